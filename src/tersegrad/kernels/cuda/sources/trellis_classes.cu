// Trellis codes by scale classes, without dither (spec/wire.md, 5.20, "Classes"): which classes are still, the sums of both kinds of coordinates, tables,
// and chunks. Classes were chosen among the levels of a scalar quantiser; everything here leaves segments alone that have none.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "classes_estimate.cuh"
#include "classes_octaves.cuh"
#include "trellis.cuh"
#include "trellis_sums.cuh"

// As in classes_encode.cu: from where on one block of 64 in eight is counted.
#define EXACT ((i64)1 << 16)
#define COUNTED 8
// A class is still where more than two eighths of its coordinates lie within an eighth of a level from zero, or more than seven eighths of its levels
// are zero. Rounding adds half a level there, less by so much for each bit by which a one is dearer than a zero, up to the most.
#define EIGHTHS 8
#define CLOSE 2
#define ZEROS 7
#define HALF 32
#define PER_BIT 3
#define MOST_DEARER 8
// Two tables for each class.
#define TABLES_MOST (2 * CLASSES)
#define BENCHES 8
// Coordinates that a thread reads at once.
#define TOGETHER 8

// Blocks, `share` of them for each segment, count by class the coordinates that are close to zero.
extern "C" __global__ void trellis_near(
    const float* x, i64 n, i64 share, float step, const double* there, const u8* classes, const i64* scalars, int* near
) {
    __shared__ int held[CLASSES];
    const i64 s = blockIdx.x / share, size = segment_length(n, s);
    if (!Classed{classes, nullptr, scalars}.has(s)) return;
    const Given of = given_of(x, n, 15, step, there, 0, 0, 0, 0, 0);
    if (threadIdx.x < CLASSES) held[threadIdx.x] = 0;
    __syncthreads();
    const bool sampled = size >= EXACT;
    const Slice slice = slice_of(s * SEGMENT, size, blockIdx.x % share, share);
    for (i64 j = threadIdx.x;; j += blockDim.x) {
        const i64 i = slice.from + (sampled ? j / BLOCK * BLOCK * COUNTED + j % BLOCK : j);
        if (i >= slice.to) break;
        const int y = nearest(__fmul_rn(x[i], of.scale));
        if (y > -2 * GRID / EIGHTHS && y < 2 * GRID / EIGHTHS) atomicAdd(&held[classes[i]], 1);
    }
    __syncthreads();
    if (threadIdx.x < CLASSES && held[threadIdx.x]) atomicAdd(&near[s * CLASSES + threadIdx.x], held[threadIdx.x]);
}

// A warp for each segment decides which of its classes are still. What is known of its indices is forgotten: they are chosen anew.
extern "C" __global__ void __launch_bounds__(32) trellis_still(
    i64 n, const int* near, const int* counts, const int* tops, const i64* scalars, i64* segments, u32* info, int* known
) {
    const i64 s = blockIdx.x, size = segment_length(n, s), *levels = scalars + s * SEGMENT_PLACES;
    if (levels[KIND] != CLASSED_KIND) return;
    const int c = threadIdx.x, window = (int)levels[WINDOW], alphabet = 2 * window + 1;
    const bool sampled = size >= EXACT;
    int tables = 0;
    u32 told = 0;
    if (c < CLASSES && tops[s * CLASSES + c]) {
        const int *own = counts + s * CLASSES * 256 + c * alphabet, top = tops[s * CLASSES + c] - 1;
        i64 every = 0;
        for (int k = 0; k < alphabet; ++k) every += own[k];
        const i64 zeros = own[window], close = near[s * CLASSES + c];
        const bool still = EIGHTHS * close > CLOSE * every || EIGHTHS * zeros > ZEROS * every;
        const i64 ones = own[window - 1] + own[window + 1] + (sampled && top >= 1 ? 2 : 0);
        const int dearer = ones ? within(log2_near(2 * (u64)(zeros + sampled), (u64)ones), 0, MOST_DEARER) : MOST_DEARER;
        tables = still ? 1 : 2;
        told = (u32)still << 8 | (u32)(HALF - PER_BIT * dearer) << 16;
    }
    const int upto = (int)warp_scan(tables), all = __shfl_sync(FULL, upto, 31);
    if (c < CLASSES) info[s * CLASSES + c] = told | (u32)(upto - tables);
    const u32 moving = __ballot_sync(FULL, tables == 2);
    if (c) return;
    i64* d = segments + s * TRELLIS_PLACES;
    d[KIND] = CLASSED_KIND;
    d[CHUNK_OF] = levels[CHUNK_OF];
    d[CLASSES_OF] = levels[CLASSES_OF];
    d[OCTAVES_OF] = all;
    d[MOVING] = moving;
    for (int k = TOP_OF; k <= OVER_30; ++k) known[s * KNOWN_PLACES + k] = 0;
}

// A warp for each 4096 coordinates: sums of x n and n^2 of those that move and of those that are still.
extern "C" __global__ void __launch_bounds__(512) trellis_class_sums(
    const float* x, i64 n, i64 run, float step, const double* there, const u8* bytes, const u8* classes, const u32* info, const i64* scalars, double* dots, double* powers,
    double* still_dots, double* still_powers
) {
    __shared__ u32 told[CLASSES];
    const Given of = given_of(x, n, run, step, there, 0, 0, 0, 0, 0);
    const Classed by = {classes, info, scalars};
    const int lane = threadIdx.x & 31;
    const i64 part = (i64)blockIdx.x * 16 + (threadIdx.x >> 5), begin = part * SUMMED;
    // All that a block reads lies in one segment.
    const i64 s = segment_of(n, (i64)blockIdx.x * 16 * SUMMED);
    if (!by.has(s)) return;
    if (threadIdx.x < CLASSES) told[threadIdx.x] = info[s * CLASSES + threadIdx.x];
    __syncthreads();
    if (begin >= n) return;
    const u32 stills = by.stills(s);
    const int stop = (int)smaller(SUMMED, n - begin);
    x += begin, bytes += begin, classes += begin;
    double dot[2] = {0, 0}, power[2] = {0, 0};
    for (int base = lane; base < stop; base += 32 * TOGETHER) {
        float v[TOGETHER];
        u32 byte[TOGETHER], kind[TOGETHER];
#pragma unroll
        for (int a = 0; a < TOGETHER; ++a) {
            const int i = (int)smaller(base + 32 * a, stop - 1);
            v[a] = x[i], byte[a] = bytes[i], kind[a] = classes[i];
        }
#pragma unroll
        for (int a = 0; a < TOGETHER; ++a) {
            if (base + 32 * a >= stop) break;
            const bool still = stills >> kind[a] & 1;
            const int y = nearest(__fmul_rn(v[a], of.scale));
            const double k = still ? 2 * Classed::still_of(told[kind[a]], y) : integer_of(y, (int)(byte[a] >> 7) + 2 * (int)(byte[a] & 1));
            const double product = (double)v[a] * k, square = k * k;
            if (still) dot[1] += product, power[1] += square;
            else dot[0] += product, power[0] += square;
        }
    }
    for (int h = 0; h < 2; ++h) dot[h] = fold(dot[h]), power[h] = fold(power[h]);
    if (lane == 0) dots[part] = dot[0], powers[part] = power[0], still_dots[part] = dot[1], still_powers[part] = power[1];
}

// A block for each segment: its scales and its error.
extern "C" __global__ void trellis_class_fit(
    i64 n, const double* dots, const double* powers, const double* still_dots, const double* still_powers, const i64* scalars, i64* segments, double* sums
) {
    __shared__ double shared[PARTS_MOST];
    const i64 s = blockIdx.x, number = segments_of(n), size = segment_length(n, s), first = s * SEGMENT / SUMMED, parts = (size + SUMMED - 1) / SUMMED;
    if (scalars[s * SEGMENT_PLACES + KIND] != CLASSED_KIND) return;
    const double dot[2] = {fold_parts(dots + first, parts, shared), fold_parts(still_dots + first, parts, shared)};
    const double power[2] = {fold_parts(powers + first, parts, shared), fold_parts(still_powers + first, parts, shared)};
    if (threadIdx.x) return;
    i64* d = segments + s * TRELLIS_PLACES;
    double error = sums[s];
    for (int h = 0; h < 2; ++h) {
        const float scale = power[h] ? usable_step(dot[h] / power[h]) : 0.0f;
        const double by = scale;
        error = error - 2.0 * by * dot[h] + by * by * power[h];
        d[SCALE_OF + h] = __float_as_uint(scale);
    }
    if (!power[0] && !power[1]) d[KIND] = ZERO_KIND;
    sums[number + s] = error;
}

// A block for each segment with classes writes its tables, from exact counts. `bits`: room for those of a segment.
extern "C" __global__ void __launch_bounds__(512) trellis_class_tables(
    i64 n, const u8* bytes, const u8* classes, const u32* info, i64* segments, u8* bits, u8* tables, u32* codes
) {
    __shared__ u32 sums[TABLES_MOST * 128];
    // First how often each byte occurs in each class, then what warps need to make tables.
    __shared__ union {
        u32 counts[CLASSES * APART];
        Bench benches[BENCHES];
    } pool;
    __shared__ i64 lengths[TABLES_MOST];
    __shared__ int present[TABLES_MOST];
    const i64 s = blockIdx.x, size = segment_length(n, s), first = s * SEGMENT;
    i64* d = segments + s * TRELLIS_PLACES;
    if (d[KIND] != CLASSED_KIND) return;
    const int t = threadIdx.x, warp = t >> 5, number = (int)d[OCTAVES_OF], window = (int)d[WINDOW], alphabet = 2 * window;
    for (int k = t; k < number * 128; k += blockDim.x) sums[k] = 0;
    for (int k = t; k < CLASSES * APART; k += blockDim.x) pool.counts[k] = 0;
    __syncthreads();
    const Sixteen *units = (const Sixteen*)(bytes + first), *kinds = (const Sixteen*)(classes + first);
#pragma unroll 2
    for (i64 unit = t; 16 * unit < size; unit += blockDim.x) {
        const Sixteen held = units[unit], kind = kinds[unit];
#pragma unroll
        for (int k = 0; k < 16; ++k)
            if (16 * unit + k < size) atomicAdd(&pool.counts[kind.byte(k) * APART + held.byte(k)], 1u);
    }
    __syncthreads();
    for (int k = t; k < CLASSES * 256; k += blockDim.x) {
        // Still coordinates have z0 = 0.
        const u32 byte = k & 255, found = pool.counts[k / 256 * APART + byte];
        if (found) atomicAdd(&sums[((info[s * CLASSES + k / 256] & 255) + (byte >> 7)) * 128 + trellis_symbol(byte, window)], found);
    }
    __syncthreads();
    u8* const own = bits + s * TABLES_MOST * TABLE_BYTES;
    for (int k = warp; warp < BENCHES && k < number; k += BENCHES) {
        const u32* counts = sums + 128 * k;
        auto count = [=](int a) { return (i64)counts[a]; };
        make_table(count, alphabet, pool.benches[warp], own + k * TABLE_BYTES, lengths + k, present + k, codes + (s * TABLES_MOST + k) * 128);
    }
    __syncthreads();
    close_tables(own, lengths, present, number, tables + s * TABLES_ROOM, d);
}

// A warp for each chunk of a segment with classes, four of them in a block.
extern "C" __global__ void __launch_bounds__(128) trellis_class_chunks(
    i64 n, i64 exponent, const u8* bytes, const u8* classes, const u32* info, const i64* segments, const u32* codes, u16* words, i64* numbers, u32* states
) {
    __shared__ Code own[CLASSES * APART];
    const Chunks place = chunks_of(n, exponent, 4);
    const i64 s = place.s, c = place.c, size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * TRELLIS_PLACES;
    if (d[KIND] != CLASSED_KIND || d[ONLY] < 2) return;
    const int window = (int)d[WINDOW];
    const Layout l = layout_of(size, 2 * window, d[CHUNK_OF]);
    if (c >= l.chunks) return;
    // By class, the code of every byte; of classes without a table, and of the z0 that still ones do not have, nobody asks.
    for (int k = threadIdx.x; k < CLASSES * 256; k += blockDim.x) {
        const i64 table = (info[s * CLASSES + k / 256] & 255) + (k >> 7 & 1);
        own[k / 256 * APART + k % 256] = code_of(table < d[OCTAVES_OF] ? codes[(s * TABLES_MOST + table) * 128 + trellis_symbol((u32)k & 127, window)] : 0);
    }
    __syncthreads();
    const i64 mine = c + (threadIdx.x >> 5);
    if (mine >= l.chunks) return;
    const Code* near = own;
    const u8 *held = bytes + first, *kinds = classes + first;
    KEEP_TOGETHER(held);
    KEEP_TOGETHER(kinds);
    auto symbol = [=](i64 i) { return trellis_symbol(held[i], window); };
    auto load = [=](i64 i) { return Raw{held[(u32)i], kinds[(u32)i]}; };
    auto look = [=](const Raw& r) { return near[r.context * APART + r.symbol]; };
    const i64 number = encode_chunk(l, mine, symbol, load, look, words + first, states + s * CHUNKS * 64);
    if ((threadIdx.x & 31) == 0) numbers[s * CHUNKS + mine] = number;
}

// Without dither: what the message leaves out of each coordinate; 256 threads for 4 times as many coordinates.
extern "C" __global__ void trellis_left(
    const float* x, i64 n, float step, const double* there, const u8* bytes, const u8* classes, const u32* info, const i64* scalars,
    const i64* segments, const i64* result, float* left
) {
    if (result[RESULT_WRONG] != FINE) return;
    const Given of = given_of(x, n, 15, step, there, 0, 0, 0, 0, 0);
    const Classed by = {classes, info, scalars};
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        const i64 i = ((i64)blockIdx.x * 4 + a) * blockDim.x + threadIdx.x;
        if (i >= n) return;
        const i64 s = segment_of(n, i);
        const i64* d = segments + s * TRELLIS_PLACES;
        float value = d[KIND] == RAW_KIND ? x[i] : 0.0f;
        if (has_levels(d)) {
            const int y = nearest(__fmul_rn(x[i], of.scale)), c = d[KIND] == CLASSED_KIND ? classes[i] : 0;
            const bool still = d[KIND] == CLASSED_KIND && !(d[MOVING] >> c & 1);
            const int number = still ? 2 * by.still(s, c, y) : integer_of(y, (int)(bytes[i] >> 7) + 2 * (int)(bytes[i] & 1));
            value = scaled(number, __uint_as_float((u32)d[still ? STILL_SCALE : SCALE_OF]));
        }
        left[i] = __fsub_rn(x[i], value);
    }
}
