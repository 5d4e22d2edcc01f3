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

// A lane's share of 256 coordinates, of which it has those before place `left`, the others being zero.
template <class Read>
__device__ __forceinline__ void load_eight(float (&v)[8], const float* from, int left, Read read) {
    if (left > 7 * 32) {
#pragma unroll
        for (int a = 0; a < 8; ++a) v[a] = read(from + 32 * a);
    } else {
#pragma unroll
        for (int a = 0; a < 8; ++a) v[a] = 32 * a < left ? read(from + 32 * a) : 0.0f;
    }
}

// A block of 512 threads for each 2^16 coordinates; a warp for each 4096 of them. What is read for the last time makes room in the cache for
// what other blocks will read once more. Without nu the step is what lies `there`, or `given`.
extern "C" __global__ void __launch_bounds__(512) dither_levels(
    const float* x, i64 n, double nu, float given, const double* there, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1,
    signed char* levels, float* steps, float* scales, double* norms, double* errors, i64* counts, i64* result
) {
    __shared__ double parts[16], folded;
    __shared__ i64 energies[16];
    __shared__ int tops[16], over15[16], over31[16];
    __shared__ u32 drawings[16][128];
    const i64 first = (i64)blockIdx.x * SCALE_BLOCK, size = smaller(SCALE_BLOCK, n - first);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 begin = first + 4096 * warp;
    const int stop = (int)larger(smaller(4096, n - begin), 0);
    const float* from = x + begin;
    signed char* to = levels + begin;
    KEEP_TOGETHER(from);
    KEEP_TOGETHER(to);
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    double total = 0;
    float v[8];
    for (int base = 0; base < stop; base += 256) {
        load_eight(v, from + base + lane, stop - base - lane, [](const float* p) { return *p; });
#pragma unroll
        for (int a = 0; a < 8; ++a) total += (double)v[a] * (double)v[a];
    }
    const double norm = fold_chunks(fold(total), parts, &folded);
    __syncthreads();
    const bool finite = norm < __longlong_as_double(0x7ff0000000000000LL);
    const bool empty = norm == 0 && (nu > 0 || drawn);
    float step = there ? (float)*there : given;
    if (nu > 0) step = usable_step(2.0 * sqrt(nu / (double)size * norm));
    const float inverse = 1.0f / step;
    double fast = 0, exact = 0, squares = 0;
    i64 all = 0;
    int top = 0, more15 = 0, more31 = 0;
    // Sums of small levels are exact in float32 and in 32 bits; a block with large ones is gone through once more.
    bool wide = !(nu > 0) || empty || !finite;
    for (;;) {
        float quick[2] = {0.0f, 0.0f};
        double dot = 0, square = 0;
        u32 energy = 0;
        top = more15 = more31 = 0;
        for (int base = 0; !drawn && !wide && base < stop; base += 256) {
            load_eight(v, from + base + lane, stop - base - lane, [](const float* p) { return __ldcs(p); });
            signed char* const here = to + base + lane;
            const int left = stop - base - lane;
            int sizes[8], most = 0;
#pragma unroll
            for (int a = 0; a < 8; ++a) {
                const float y = __fmul_rn(v[a], inverse);
                // Large levels only have to stay large here.
                const float shifted = __fadd_rn(fminf(fmaxf(y, -2097152.0f), 2097152.0f), SHIFTER);
                const int k = (int)(__float_as_uint(shifted) - __float_as_uint(SHIFTER));
                if (32 * a < left) here[32 * a] = (signed char)k;
                sizes[a] = k < 0 ? -k : k;
                most = sizes[a] > most ? sizes[a] : most;
                energy += (u32)(k * k);
                quick[a & 1] = __fadd_rn(quick[a & 1], __fmul_rn(y, __fsub_rn(shifted, SHIFTER)));
            }
            top = most > top ? most : top;
            if (most > 15) {
#pragma unroll
                for (int a = 0; a < 8; ++a) more15 += sizes[a] > 15, more31 += sizes[a] > 31;
            }
        }
        // Drawn levels need no sums: their scale is the step.
        for (int base = 0; drawn && base < stop; base += 256) {
            load_eight(v, from + base + lane, stop - base - lane, [](const float* p) { return __ldcs(p); });
            signed char* const here = to + base + lane;
            const int left = stop - base - lane;
            // A lane draws for eight coordinates that lie side by side.
            u32 w[4];
            philox(draws, ((u64)(begin + base) >> 3) + lane, 0, w);
            __syncwarp();
            for (int k = 0; k < 4; ++k) drawings[warp][4 * lane + k] = w[k];
            __syncwarp();
            const unsigned short* const own = (const unsigned short*)drawings[warp] + lane;
#pragma unroll
            for (int a = 0; a < 8; ++a) {
                bool large = false;
                const int k = empty || !finite ? 0 : level_of(v[a], inverse, own[32 * a], &large);
                const int magnitude = large ? 1 << 26 : k < 0 ? -k : k;
                if (32 * a < left) here[32 * a] = (signed char)(magnitude > 127 ? (k < 0 ? -127 : 127) : k);
                top = magnitude > top ? magnitude : top;
                more15 += magnitude > 15;
                more31 += magnitude > 31;
            }
        }
        for (int base = 0; !drawn && wide && base < stop; base += 256) {
            load_eight(v, from + base + lane, stop - base - lane, [](const float* p) { return __ldcs(p); });
            signed char* const here = to + base + lane;
            const int left = stop - base - lane;
#pragma unroll
            for (int a = 0; a < 8; ++a) {
                bool large = false;
                const int k = empty || !finite ? 0 : level_of(v[a], inverse, -1, &large);
                const int magnitude = large ? 1 << 26 : k < 0 ? -k : k;
                if (32 * a < left) here[32 * a] = (signed char)(magnitude > 127 ? (k < 0 ? -127 : 127) : k);
                top = magnitude > top ? magnitude : top;
                more15 += magnitude > 15;
                more31 += magnitude > 31;
                dot += (double)v[a] * (double)k;
                square += (double)k * (double)k;
            }
        }
        u64 energy_sum = energy;
        for (int by = 16; by; by >>= 1) {
            const int other = __shfl_xor_sync(FULL, top, by);
            top = other > top ? other : top;
            more15 += __shfl_xor_sync(FULL, more15, by);
            more31 += __shfl_xor_sync(FULL, more31, by);
            energy_sum += __shfl_xor_sync(FULL, energy_sum, by);
        }
        __syncthreads();
        if (lane == 0) tops[warp] = top, over15[warp] = more15, over31[warp] = more31, energies[warp] = (i64)energy_sum;
        if (wide) {
            exact = fold_chunks(fold(dot), parts, &folded);
            __syncthreads();
            squares = fold_chunks(fold(square), parts, &folded);
        } else {
            fast = fold_chunks(fold((double)quick[0] + (double)quick[1]), parts, &folded);
        }
        top = more15 = more31 = 0;
        all = 0;
        for (int k = 0; k < 16; ++k) {
            top = tops[k] > top ? tops[k] : top;
            more15 += over15[k];
            more31 += over31[k];
            all += energies[k];
        }
        if (wide || top < QUICK_LIMIT) break;
        wide = true;
        __syncthreads();
    }
    if (threadIdx.x) return;
    i64* known = counts + blockIdx.x * COUNT_PLACES;
    known[TOP] = top, known[ABOVE_15] = more15, known[ABOVE_31] = more31;
    const double product = wide ? exact : (double)step * fast, power = wide ? squares : (double)all;
    float scale = 0.0f;
    if (top > 0 && top < 1 << 26) scale = drawn ? step : usable_step(product / power);
    if (top > 0 && drawn) scale = step;
    const double by = scale;
    norms[blockIdx.x] = norm;
    errors[blockIdx.x] = drawn || empty ? 0.0 : norm - 2.0 * by * product + by * by * power;
    steps[blockIdx.x] = step;
    scales[blockIdx.x] = scale;
    if (!finite) result[RESULT_WRONG] = NOT_FINITE;
}

extern "C" __global__ void __launch_bounds__(32) dither_encode_chunks(
    i64 n, const signed char* levels, const i64* segments, const u32* codes, u16* words, i64* numbers, u32* states, const i64* result
) {
    __shared__ Code own[256];
    const i64 s = blockIdx.x % segments_of(n), c = blockIdx.x / segments_of(n), size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * SEGMENT_PLACES;
    if (result[RESULT_WRONG] != FINE || d[KIND] != CODED_KIND || d[ONLY] < 2) return;
    const int window = (int)d[WINDOW], alphabet = 2 * window + 1;
    const Layout l = layout_of(size, alphabet, d[CHUNK_OF]);
    if (c >= l.chunks) return;
    // The code of every level that a byte holds.
    for (int k = threadIdx.x; k < 256; k += 32) own[k] = code_of(codes[s * 256 + symbol_of((signed char)k, window)]);
    __syncwarp();
    const Code* near = own;
    auto symbol = [=](i64 i) { return (u32)symbol_of(levels[first + i], window); };
    const u8* bytes = (const u8*)levels + first;
    KEEP_TOGETHER(bytes);
    auto load = [=](i64 i) { return Raw{bytes[(u32)i], 0}; };
    auto look = [=](const Raw& r) { return near[r.symbol]; };
    const i64 number = encode_chunk(l, c, symbol, load, look, words + first, states + s * CHUNKS * 64);
    if (threadIdx.x == 0) numbers[s * CHUNKS + c] = number;
}

// One block lays out the message: the form and length of every segment, where they and their chunks begin; norm and error.
extern "C" __global__ void dither_close(
    i64 n, i64* segments, const i64* numbers, i64* offsets, double* norms, double* errors, double* sums, i64* result
) {
    const i64 segments_number = segments_of(n);
    const bool finite = result[RESULT_WRONG] == FINE;
    double* const found = (double*)result;
    if (!finite) {
        __syncthreads();
        if (threadIdx.x == 0 && result[RESULT_WRONG] == NOT_FINITE) {
            result[RESULT_LENGTH] = 4;
            found[RESULT_NORM] = __longlong_as_double(0x7ff0000000000000LL), found[RESULT_ERROR] = 0.0;
        }
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
    fold_segments(sums, segments_number);
    if (threadIdx.x == 0) found[RESULT_NORM] = sums[0], found[RESULT_ERROR] = sums[segments_number];
}

// Parts of a chunk that blocks copy.
#define PARTS 4

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
    for (i64 piece = part; piece < l.chunks * PARTS; piece += share) {
        const i64 c = piece / PARTS, which = piece % PARTS, number = numbers[s * CHUNKS + c];
        const i64 from = number * which / PARTS, until = number * (which + 1) / PARTS;
        u8* chunk = body + offsets[s * CHUNKS + c];
        copy_words(chunk + 4 * l.lanes + 2 * from, words + first + c * l.size + l.coded(c) - number + from, until - from);
        if (which) continue;
        if (threadIdx.x == 0) store32(body + 1 + d[TABLES_OF] + 4 * c, (u32)number);
        for (int k = threadIdx.x; k < l.lanes; k += blockDim.x) store32(chunk + 4 * k, states[s * CHUNKS * 64 + c * l.lanes + k]);
    }
}

// What the message leaves out of each coordinate; 256 threads for 16 times as many, which have one scale.
extern "C" __global__ void __launch_bounds__(256) dither_left(
    const float* x, i64 n, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, const signed char* levels, const float* steps, const float* scales,
    const i64* segments, const i64* result, float* left
) {
    if (result[RESULT_WRONG] != FINE) return;
    const i64 first = (i64)blockIdx.x * 4096, block = first / SCALE_BLOCK;
    const i64* d = segments + smaller(first / SEGMENT, segments_of(n) - 1) * SEGMENT_PLACES;
    const bool coded = has_levels(d), raw = d[KIND] == RAW_KIND;
    const float scale = scales[block];
    // A byte holds no larger levels than 127.
    auto at_most = [=](int level) { return coded && (level == 127 || level == -127); };
    auto rest = [=](float v, int level) { return __fsub_rn(v, coded ? scaled(level, scale) : raw ? v : 0.0f); };
    auto rest_of_large = [=](int k, float v) {
        const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
        bool large;
        return rest(v, level_of(v, 1.0f / steps[block], draw_of(draws, drawn != 0, first + k), &large));
    };
    x += first, levels += first, left += first;
    if (first + 4096 > n || ((u64)x | (u64)left) & 15) {
        for (int k = threadIdx.x; k < 4096 && first + k < n; k += 256) left[k] = at_most(levels[k]) ? rest_of_large(k, x[k]) : rest(x[k], levels[k]);
        return;
    }
    Sixteen held[4];
    u32 four[4];
#pragma unroll
    for (int a = 0; a < 4; ++a) held[a] = ((const Sixteen*)x)[256 * a + threadIdx.x], four[a] = ((const u32*)levels)[256 * a + threadIdx.x];
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        const int unit = 256 * a + threadIdx.x;
        Sixteen made;
        bool any = false;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int level = (signed char)(four[a] >> 8 * k);
            any |= at_most(level);
            made.word[k] = __float_as_uint(rest(__uint_as_float(held[a].word[k]), level));
        }
        ((Sixteen*)left)[unit] = made;
        if (!any) continue;
#pragma unroll 1
        for (int k = 0; k < 4; ++k) {
            const u32 v = k < 2 ? k ? held[a].word[1] : held[a].word[0] : k < 3 ? held[a].word[2] : held[a].word[3];
            if (at_most((signed char)(four[a] >> 8 * k))) left[4 * unit + k] = rest_of_large(4 * unit + k, __uint_as_float(v));
        }
    }
}
