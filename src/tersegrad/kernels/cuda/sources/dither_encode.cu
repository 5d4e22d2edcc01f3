// Sparse Dithering: encoding by segments (spec/wire.md, 5.16). Blocks of 2^16 coordinates find their norm, their levels and their scale;
// segments their window, table and escapes; chunks are coded side by side; then everything is laid into one message.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "philox.cuh"
#include "dither_levels.cuh"
#include "classes.cuh"

#define QUICK_LIMIT 127

// What is known of a block.
enum { TOP, ABOVE_15, ABOVE_31, COUNT_PLACES };

// "The second half onto the first until one is left" over a warp; the sum is in lane 0.
__device__ __forceinline__ double fold(double v) {
    for (int by = 16; by; by >>= 1) v += __shfl_xor_sync(FULL, v, by);
    return v;
}

// The fold of up to 16 values in shared memory, padded with zeros, for all threads of a block.
__device__ __forceinline__ double fold_chunks(double mine, double* shared, double* result) {
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = mine;
    __syncthreads();
    if (threadIdx.x < 32) {
        const double sum = fold(threadIdx.x < 16 ? shared[threadIdx.x] : 0.0);
        if (threadIdx.x == 0) *result = sum;
    }
    __syncthreads();
    return *result;
}

// A block of 512 threads for each 2^16 coordinates; a warp for each 4096 of them.
extern "C" __global__ void __launch_bounds__(512) dither_levels(
    const float* x, i64 n, double nu, float given, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1,
    signed char* levels, float* steps, float* scales, double* norms, double* errors, i64* counts, i64* result
) {
    __shared__ double parts[16], folded;
    __shared__ i64 energies[16];
    __shared__ int tops[16], over15[16], over31[16];
    const i64 first = (i64)blockIdx.x * SCALE_BLOCK, size = smaller(SCALE_BLOCK, n - first);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 begin = first + 4096 * warp, stop = smaller(begin + 4096, n);
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    double total = 0;
    for (i64 base = begin; base < stop; base += 32 * 8) {
        float v[8];
#pragma unroll
        for (int a = 0; a < 8; ++a) v[a] = base + 32 * a + lane < stop ? x[base + 32 * a + lane] : 0.0f;
#pragma unroll
        for (int a = 0; a < 8; ++a) total += (double)v[a] * (double)v[a];
    }
    const double norm = fold_chunks(fold(total), parts, &folded);
    __syncthreads();
    const bool finite = norm < __longlong_as_double(0x7ff0000000000000LL);
    const bool empty = norm == 0 && (nu > 0 || drawn);
    float step = given;
    if (nu > 0) step = usable_step(2.0 * sqrt(nu / (double)size * norm));
    const float inverse = 1.0f / step;
    float quick[2] = {0.0f, 0.0f};
    double dot = 0, square = 0;
    i64 energy = 0;
    int top = 0, more15 = 0, more31 = 0;
    for (i64 base = begin; base < stop; base += 256) {
        u32 w[4];
        if (drawn) philox(draws, ((u64)base >> 3) + lane, 0, w);
#pragma unroll
        for (int a = 0; a < 8; ++a) {
            int draw = -1;
            if (drawn) {
                const int from = 4 * a + (lane >> 3);
                const u32 words[4] = {
                    __shfl_sync(FULL, w[0], from), __shfl_sync(FULL, w[1], from), __shfl_sync(FULL, w[2], from), __shfl_sync(FULL, w[3], from)
                };
                const u32 word = lane & 4 ? (lane & 2 ? words[3] : words[2]) : (lane & 2 ? words[1] : words[0]);
                draw = (int)(word >> 16 * (lane & 1) & 0xffff);
            }
            const i64 i = base + 32 * a + lane;
            if (i >= stop) continue;
            const float value = x[i];
            bool large = false;
            const int k = empty || !finite ? 0 : level_of(value, inverse, draw, &large);
            const int magnitude = large ? 1 << 26 : k < 0 ? -k : k;
            levels[i] = (signed char)(magnitude > 127 ? (k < 0 ? -127 : 127) : k);
            top = magnitude > top ? magnitude : top;
            more15 += magnitude > 15;
            more31 += magnitude > 31;
            energy += (i64)k * k;
            // Coordinates of a row of 64 add to as many lanes, in order.
            quick[a & 1] = __fadd_rn(quick[a & 1], __fmul_rn(__fmul_rn(value, inverse), (float)k));
            dot += (double)value * (double)k;
            square += (double)k * (double)k;
        }
    }
    for (int by = 16; by; by >>= 1) {
        const int other = __shfl_xor_sync(FULL, top, by);
        top = other > top ? other : top;
        more15 += __shfl_xor_sync(FULL, more15, by);
        more31 += __shfl_xor_sync(FULL, more31, by);
        energy += __shfl_xor_sync(FULL, energy, by);
    }
    if (lane == 0) tops[warp] = top, over15[warp] = more15, over31[warp] = more31, energies[warp] = energy;
    const double fast = fold_chunks(fold((double)quick[0] + (double)quick[1]), parts, &folded);
    __syncthreads();
    const double exact = fold_chunks(fold(dot), parts, &folded);
    __syncthreads();
    const double squares = fold_chunks(fold(square), parts, &folded);
    if (threadIdx.x) return;
    i64 all = 0;
    for (int k = 1; k < 16; ++k) {
        tops[0] = tops[k] > tops[0] ? tops[k] : tops[0];
        over15[0] += over15[k];
        over31[0] += over31[k];
    }
    for (int k = 0; k < 16; ++k) all += energies[k];
    top = tops[0];
    i64* known = counts + blockIdx.x * COUNT_PLACES;
    known[TOP] = top, known[ABOVE_15] = over15[0], known[ABOVE_31] = over31[0];
    const bool is_quick = nu > 0 && top < QUICK_LIMIT;
    const double product = is_quick ? (double)step * fast : exact, power = is_quick ? (double)all : squares;
    float scale = 0.0f;
    if (top > 0 && top < 1 << 26) scale = drawn ? step : usable_step(product / power);
    if (top > 0 && drawn) scale = step;
    const double wide = scale;
    norms[blockIdx.x] = norm;
    errors[blockIdx.x] = drawn || empty ? 0.0 : norm - 2.0 * wide * product + wide * wide * power;
    steps[blockIdx.x] = step;
    scales[blockIdx.x] = scale;
    if (!finite) result[RESULT_WRONG] = NOT_FINITE;
}

// A block for each segment: kind, window, histogram, table, frequencies, and the escapes.
extern "C" __global__ void dither_segments(
    const float* x, i64 n, i64 exponent, const signed char* levels, const float* steps, const i64* counts,
    i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, i64* segments, short* q, u8* tables, u32* codes, int* escapes, u32* planes, i64* result
) {
    __shared__ u32 sums[256];
    __shared__ u8 seen[256];
    __shared__ u32 w[256];
    __shared__ int f[256];
    __shared__ TableRoom room;
    const i64 s = blockIdx.x, size = segment_length(n, s), first = s * SEGMENT;
    const int t = threadIdx.x;
    i64* d = segments + s * SEGMENT_PLACES;
    if (result[RESULT_WRONG] != FINE) return;
    i64 top = 0, more15 = 0, more31 = 0;
    for (i64 b = first / SCALE_BLOCK; b * SCALE_BLOCK < first + size; ++b) {
        const i64* known = counts + b * COUNT_PLACES;
        top = larger(top, known[TOP]);
        more15 += known[ABOVE_15];
        more31 += known[ABOVE_31];
    }
    const int window = (int)(top <= 15 ? top : more15 <= size / 512 ? 15 : top <= 31 ? top : more31 <= size / 512 ? 31 : smaller(top, 127));
    const int alphabet = 2 * window + 1;
    const bool coded = top > 0 && top < 1 << 26;
    if (t == 0) {
        for (int k = 0; k < SEGMENT_PLACES; ++k) d[k] = 0;
        d[KIND] = top == 0 ? ZERO_KIND : coded ? CODED_KIND : RAW_KIND;
        d[WINDOW] = window;
        d[CHUNK_OF] = exponent;
    }
    if (!coded) return;
    const i64 least = larger((i64)1 << 16, 4096 * alphabet);
    const bool sampled = size >= least;
    sums[t] = 0, seen[t] = 0;
    __syncthreads();
    for (i64 i = t; i < size; i += blockDim.x) {
        if (sampled && (i >> 12) % 8) {
            // To the next block of 4096 that is counted; blocks and strides are multiples of the threads.
            i += 7 * 4096 - blockDim.x;
            continue;
        }
        atomicAdd(&sums[symbol_of(levels[first + i], window)], 1u);
    }
    __syncthreads();
    i64 different;
    block_scan(sums[t] > 0, &different);
    const bool everything = sampled && 2 * different >= alphabet;
    if (sampled && !everything)
        for (i64 i = t; i < size; i += blockDim.x) seen[symbol_of(levels[first + i], window)] = 1;
    __syncthreads();
    if (t < 32) {
        const u32* held = sums;
        const u8* there = seen;
        const i64 bits = write_table([=](int k) { return (i64)held[k] + (everything ? 1 : there[k]); }, alphabet, q + s * 256, tables + s * 8192, room);
        const int present = make_frequencies(q + s * 256, alphabet, w, f);
        if (t == 0) {
            d[TABLES_OF] = (bits + 7) / 8;
            d[ONLY] = present;
            u32 start = 0;
            for (int k = 0; k < alphabet; ++k) {
                codes[s * 256 + k] = (u32)f[k] | start << 16;
                start += (u32)f[k];
            }
        }
    }
    if (top <= window) return;
    // Escapes, sixteen coordinates per thread at a time: their values, then their planes.
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    int* values = escapes + s * ESCAPES;
    u32* words = planes + s * PLANE_WORDS;
    i64 found = 0, total, unary = 0, low = 0;
    for (i64 base = 0; base < size; base += 16 * blockDim.x) {
        const i64 begin = first + base + 16 * t, stop = smaller(begin + 16, first + size);
        i64 own = 0;
        for (i64 i = begin; i < stop; ++i) own += levels[i] >= window || levels[i] <= -window;
        i64 rank = found + block_scan(own, &total);
        for (i64 i = begin; own && i < stop; ++i) {
            if (levels[i] < window && levels[i] > -window) continue;
            int k = levels[i];
            bool large;
            if (k == 127 || k == -127) k = level_of(x[i], 1.0f / steps[i >> 16], draw_of(draws, drawn != 0, i), &large);
            if (rank < ESCAPES) values[rank] = (k < 0 ? -k : k) - window + 1;
            ++rank;
        }
        found += total;
    }
    if (found > ESCAPES) {
        if (t == 0) result[RESULT_WRONG] = MANY_ESCAPES;
        return;
    }
    __syncthreads();
    for (i64 pass = 0; pass < 2; ++pass) {
        // First the lengths, and zeros; then the bits.
        const i64 second = 8 * ((unary + 7) / 8);
        i64 ones = 0, lows = 0;
        for (i64 base = 0; base < found; base += blockDim.x) {
            const i64 j = base + t;
            const int value = j < found ? values[j] : 1, width = bit_length((u64)value) - 1;
            i64 ones_here, lows_here;
            const i64 end = ones + block_scan(j < found ? width + 1 : 0, &ones_here) + width;
            const i64 at = second + lows + block_scan(j < found ? width : 0, &lows_here);
            if (pass && j < found) {
                atomicOr(&words[end >> 5], 1u << (end & 31));
                for (int b = 0; b < width; ++b)
                    if (value >> b & 1) atomicOr(&words[(at + b) >> 5], 1u << ((at + b) & 31));
            }
            ones += ones_here;
            lows += lows_here;
        }
        unary = ones, low = lows;
        if (!pass)
            for (i64 k = t; k < ((unary + 7) / 8 + (low + 7) / 8 + 3) / 4; k += blockDim.x) words[k] = 0;
        __syncthreads();
    }
    if (t == 0) d[TAIL] = (unary + 7) / 8 + (low + 7) / 8;
}

extern "C" __global__ void __launch_bounds__(32) dither_encode_chunks(
    i64 n, const signed char* levels, const i64* segments, const u32* codes, u16* words, i64* numbers, u32* states, const i64* result
) {
    __shared__ u32 own[256], inverses[256];
    const i64 s = blockIdx.x / CHUNKS, c = blockIdx.x % CHUNKS, size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * SEGMENT_PLACES;
    if (result[RESULT_WRONG] != FINE || d[KIND] != CODED_KIND || d[ONLY] < 2) return;
    const int window = (int)d[WINDOW], alphabet = 2 * window + 1;
    const Layout l = layout_of(size, alphabet, d[CHUNK_OF]);
    if (c >= l.chunks) return;
    for (int k = threadIdx.x; k < alphabet; k += 32) own[k] = codes[s * 256 + k], inverses[k] = inverse_of(own[k]);
    __syncwarp();
    const u32 *from = own, *inverted = inverses;
    auto symbol = [=](i64 i) { return (u32)symbol_of(levels[first + i], window); };
    auto look = [=](int level, u32* code, u32* inverse) { *code = from[symbol_of(level, window)], *inverse = inverted[symbol_of(level, window)]; };
    const i64 number = encode_chunk(l, c, symbol, [=](i64 i) { return levels[first + i]; }, look, words + first, states + s * CHUNKS * 64);
    if (threadIdx.x == 0) numbers[s * CHUNKS + c] = number;
}

// One block lays out the message: the form and length of every segment, where they and their chunks begin; norm and error.
extern "C" __global__ void dither_close(
    i64 n, i64* segments, const i64* numbers, i64* offsets, double* norms, double* errors, double* sums, i64* result
) {
    const i64 segments_number = segments_of(n);
    const bool finite = result[RESULT_WRONG] == FINE;
    if (!finite) {
        __syncthreads();
        if (threadIdx.x == 0 && result[RESULT_WRONG] == NOT_FINITE) result[RESULT_LENGTH] = 4;
        return;
    }
    i64 at = 4 + (segments_number > 1 ? 4 * segments_number : 0);
    for (i64 base = 0; base < segments_number; base += blockDim.x) {
        const i64 s = base + threadIdx.x;
        i64* d = segments + s * SEGMENT_PLACES;
        i64 bytes = 0, total;
        if (s < segments_number) {
            const i64 size = segment_length(n, s), blocks = (size + SCALE_BLOCK - 1) / SCALE_BLOCK;
            double power[8], wrong[8];
            for (int k = 0; k < 8; ++k) {
                power[k] = k < blocks ? norms[4 * s + k] : 0.0;
                wrong[k] = k < blocks ? errors[4 * s + k] : 0.0;
            }
            for (int half = 4; half; half >>= 1)
                for (int k = 0; k < half; ++k) power[k] += power[k + half], wrong[k] += wrong[k + half];
            if (has_levels(d)) {
                const i64 alphabet = 2 * d[WINDOW] + 1, most = 1 + raw_bytes(size, alphabet);
                const Layout l = layout_of(size, alphabet, d[CHUNK_OF]);
                i64 body = 1 + d[TABLES_OF];
                const bool fits = body < most;
                if (d[ONLY] >= 2) {
                    body += 4 * l.chunks;
                    for (i64 c = 0; c < l.chunks; ++c) {
                        offsets[s * CHUNKS + c] = body;
                        body += 4 * l.lanes + 2 * numbers[s * CHUNKS + c];
                    }
                }
                d[FORM_OF] = !fits || body >= most ? RAW : d[ONLY] >= 2 ? CODED : ONLY_TABLES;
                if (d[FORM_OF] == RAW) body = most;
                i64 varint = 1;
                while (d[TAIL] >> 7 * varint) ++varint;
                d[SCALES] = 2 + varint;
                bytes = 2 + varint + 4 * blocks + d[CLASSES_OF] + body + d[TAIL];
                if (bytes > 1 + 4 * size) d[KIND] = RAW_KIND;
            }
            if (d[KIND] == RAW_KIND) bytes = 1 + 4 * size, wrong[0] = 0.0;
            if (d[KIND] == ZERO_KIND) bytes = 1;
            sums[s] = power[0];
            sums[segments_number + s] = wrong[0];
        }
        const i64 before = block_scan(bytes, &total);
        if (s < segments_number) d[AT] = at + before, d[END] = at + before + bytes;
        at += total;
    }
    if (threadIdx.x == 0) result[RESULT_LENGTH] = at;
    __syncthreads();
    // Folds over segments, padded to a power of two.
    i64 half = 1;
    while (2 * half < segments_number) half *= 2;
    for (i64 left = segments_number; left > 1; left = half, half /= 2) {
        for (i64 k = threadIdx.x; k + half < left; k += blockDim.x) {
            sums[k] += sums[k + half];
            sums[segments_number + k] += sums[segments_number + k + half];
        }
        __syncthreads();
    }
}

// Blocks, `share` of them for each segment, write the message.
extern "C" __global__ void dither_write(
    const float* x, i64 n, i64 share, const signed char* levels, const float* scales, const i64* segments, const i64* regions, const i64* firsts,
    const u8* described, const u8* tables, const u16* words, const i64* numbers, const u32* states, const i64* offsets, const u32* planes,
    const i64* result, u8* out
) {
    const i64 s = blockIdx.x / share, part = blockIdx.x % share, size = segment_length(n, s), first = s * SEGMENT;
    const i64 stride = share * blockDim.x, begin = part * blockDim.x + threadIdx.x;
    if (result[RESULT_WRONG] == NOT_FINITE && blockIdx.x == 0 && threadIdx.x == 0) store32(out, NON_FINITE);
    if (result[RESULT_WRONG] != FINE) return;
    const i64* d = segments + s * SEGMENT_PLACES;
    u8* to = out + d[AT];
    const bool leads = begin == 0;
    if (leads && s == 0) store32(out, SEGMENTS);
    if (leads && segments_of(n) > 1) store32(out + 4 + 4 * s, (u32)(d[END] - d[AT]));
    if (leads) to[0] = (u8)d[KIND];
    if (d[KIND] == RAW_KIND)
        for (i64 i = begin; i < size; i += stride) store32(to + 1 + 4 * i, __float_as_uint(x[first + i]));
    if (!has_levels(d)) return;
    const int window = (int)d[WINDOW], width = raw_bits(2 * window + 1);
    const i64 blocks = (size + SCALE_BLOCK - 1) / SCALE_BLOCK;
    u8 *classes = to + d[SCALES] + 4 * blocks, *body = classes + d[CLASSES_OF];
    if (leads) {
        to[1] = (u8)window;
        for (i64 k = 2; k < d[SCALES]; ++k) to[k] = (u8)((d[TAIL] >> 7 * (k - 2) & 127) | (k + 1 < d[SCALES] ? 128 : 0));
        for (i64 b = 0; b < blocks; ++b) store32(to + d[SCALES] + 4 * b, __float_as_uint(scales[first / SCALE_BLOCK + b]));
        body[0] = d[FORM_OF] == RAW ? (u8)RAW : (u8)d[CHUNK_OF];
    }
    if (d[KIND] == CLASSED_KIND) {
        const u8* from = described + description_at(firsts[s], regions[firsts[s] * REGION_PLACES + ROOM], s);
        for (i64 b = begin; b < d[CLASSES_OF]; b += stride) classes[b] = from[b];
    }
    for (i64 b = begin; b < d[TAIL]; b += stride) out[d[END] - d[TAIL] + b] = (u8)(planes[s * PLANE_WORDS + (b >> 2)] >> 8 * (b & 3));
    if (d[FORM_OF] == RAW) {
        for (i64 g = begin; 8 * g < size; g += stride) {
            u64 held = 0;
            const int here = (int)smaller(8, size - 8 * g);
            for (int k = 0; k < here; ++k) held |= (u64)symbol_of(levels[first + 8 * g + k], window) << k * width;
            for (int b = 0; 8 * b < here * width; ++b) body[1 + g * width + b] = (u8)(held >> 8 * b);
        }
        return;
    }
    for (i64 b = begin; b < d[TABLES_OF]; b += stride) body[1 + b] = tables[s * 8192 + b];
    if (d[FORM_OF] != CODED) return;
    const Layout l = layout_of(size, 2 * window + 1, d[CHUNK_OF]);
    for (i64 c = part; c < l.chunks; c += share) {
        u8* chunk = body + offsets[s * CHUNKS + c];
        const i64 number = numbers[s * CHUNKS + c];
        const u16* from = words + first + c * l.size + l.coded(c) - number;
        if (threadIdx.x == 0) store32(body + 1 + d[TABLES_OF] + 4 * c, (u32)number);
        for (int k = threadIdx.x; k < l.lanes; k += blockDim.x) store32(chunk + 4 * k, states[s * CHUNKS * 64 + c * l.lanes + k]);
        for (i64 k = threadIdx.x; k < number; k += blockDim.x) store16(chunk + 4 * l.lanes + 2 * k, from[k]);
    }
}
