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

// Rows of 32 coordinates that a warp reads at once for the norm, and later for levels.
#define NORM_ROWS 32
#define ROWS 8

// A lane's share of `rows` rows, of which it has those before place `left`, the others being zero.
template <int rows, class Read>
__device__ __forceinline__ void load_rows(float (&v)[rows], const float* from, int left, Read read) {
    if (left > (rows - 1) * 32) {
#pragma unroll
        for (int a = 0; a < rows; ++a) v[a] = read(from + 32 * a);
    } else {
#pragma unroll
        for (int a = 0; a < rows; ++a) v[a] = 32 * a < left ? read(from + 32 * a) : 0.0f;
    }
}

// A thread brings a number into its place in shared memory, or a zero; it is there once the thread has waited.
__device__ __forceinline__ void bring(float* to, const float* from, bool there) {
#if !defined(CUDA_ON_CPU) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(there ? 4 : 0) : "memory");
#else
    *to = there ? *from : 0.0f;
#endif
}
__device__ __forceinline__ void wait_for_all() {
#if !defined(CUDA_ON_CPU) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// A lane brings its share of eight rows from `base` on, of the `stop` coordinates that a warp has.
__device__ __forceinline__ void bring_rows(float* near, const float* from, int base, int stop) {
    const int lane = threadIdx.x & 31;
    if (base + 32 * ROWS <= stop) {
#pragma unroll
        for (int a = 0; a < ROWS; ++a) bring(near + base + 32 * a, from + base + lane + 32 * a, true);
    } else {
#pragma unroll
        for (int a = 0; a < ROWS; ++a) bring(near + base + 32 * a, from + base + lane + 32 * a, base + lane + 32 * a < stop);
    }
}

// A block of 512 threads for 2^16 coordinates, then for as many that lie further on, until all are done; a warp for each 4096 of them, the first `held`
// of which, a multiple of 1024, it keeps in shared memory; the rest it reads once more. Those of the next round come while levels of this one are
// found. Without nu the step is what lies `there`, or `given`.
extern "C" __global__ void __launch_bounds__(512, 1) dither_levels(
    const float* x, i64 n, i64 held, double nu, float given, const double* there, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1,
    signed char* levels, float* steps, float* scales, double* norms, double* errors, i64* counts
) {
    SHARED_BY_LAUNCH(float, kept);
    __shared__ double parts[16], folded;
    __shared__ i64 energies[16];
    __shared__ int tops[16], over15[16], over31[16];
    __shared__ u32 drawings[16][128];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float* const near = kept + held * warp + lane;
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    auto stop_of = [=](i64 block) { return (int)larger(smaller(4096, n - block * SCALE_BLOCK - 4096 * warp), 0); };
    for (int base = 0; base < smaller(held, stop_of(blockIdx.x)); base += 32 * ROWS)
        bring_rows(near, x + blockIdx.x * SCALE_BLOCK + 4096 * warp, base, stop_of(blockIdx.x));
    for (i64 block = blockIdx.x; block * SCALE_BLOCK < n; block += gridDim.x) {
        const i64 first = block * SCALE_BLOCK, size = smaller(SCALE_BLOCK, n - first), begin = first + 4096 * warp;
        const int stop = stop_of(block), next_stop = stop_of(block + gridDim.x);
        const float *from = x + begin, *next = from + gridDim.x * SCALE_BLOCK;
        signed char* to = levels + begin;
        KEEP_TOGETHER(from);
        KEEP_TOGETHER(next);
        KEEP_TOGETHER(to);
        double total = 0;
        float v[NORM_ROWS];
        auto plain = [](const float* p) { return *p; };
        if (held < stop) load_rows(v, from + held + lane, stop - (int)held - lane, plain);
        // Squares are exact: one rounding each.
        wait_for_all();
        for (int base = 0; base < smaller(held, stop); base += 32 * ROWS) {
#pragma unroll
            for (int a = 0; a < ROWS; ++a) total = __fma_rn((double)near[base + 32 * a], (double)near[base + 32 * a], total);
        }
        for (int base = (int)held; base < stop; base += 32 * NORM_ROWS) {
            if (base > held) load_rows(v, from + base + lane, stop - base - lane, plain);
#pragma unroll
            for (int a = 0; a < NORM_ROWS; ++a) total = __fma_rn((double)v[a], (double)v[a], total);
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
        bool again = false;
        // Calls body(base, left, v) for each 256 coordinates: a lane has those of them that lie 32 * a behind its first, as long as that is below `left`.
        // What was kept makes room for the next round.
        auto each = [&](auto body) {
            auto rows = [&](int base, int left) {
                float v[ROWS];
                if (base < held && !again) {
#pragma unroll
                    for (int a = 0; a < ROWS; ++a) v[a] = near[base + 32 * a];
                    if (base < next_stop) bring_rows(near, next, base, next_stop);
                } else {
                    // What is read for the last time makes room in the cache for what other blocks will read once more.
                    load_rows(v, from + base + lane, left, [](const float* p) { return __ldcs(p); });
                }
                body(base, left, v);
            };
            int base = 0;
            // All of whole ones are there, which the compiler sees.
            for (; base + 32 * ROWS <= stop; base += 32 * ROWS) rows(base, 32 * ROWS - lane);
            if (base < stop) rows(base, stop - base - lane);
        };
        // Small levels take no conversions, and their sums are exact in float32; a block with large ones is gone through once more.
        bool wide = !(nu > 0 || drawn) || empty || !finite;
        for (;;) {
            float quick[2] = {0.0f, 0.0f}, energy = 0.0f, most = 0.0f;
            double dot = 0, square = 0;
            top = more15 = more31 = 0;
            if (!drawn && !wide) {
                each([&](int base, int left, const float (&v)[ROWS]) {
                    signed char* const here = to + base + lane;
                    float sizes[ROWS], here_most = 0.0f;
#pragma unroll
                    for (int a = 0; a < ROWS; ++a) {
                        const float y = __fmul_rn(v[a], inverse), shifted = __fadd_rn(y, SHIFTER), level = __fsub_rn(shifted, SHIFTER);
                        // Large levels are other numbers here, but large.
                        if (32 * a < left) here[32 * a] = (signed char)__float_as_uint(shifted);
                        sizes[a] = fabsf(level);
                        here_most = fmaxf(here_most, sizes[a]);
                        energy = __fmaf_rn(level, level, energy);
                        quick[a & 1] = __fadd_rn(quick[a & 1], __fmul_rn(y, level));
                    }
                    most = fmaxf(most, here_most);
                    if (here_most > 15.0f) {
#pragma unroll
                        for (int a = 0; a < ROWS; ++a) more15 += sizes[a] > 15.0f, more31 += sizes[a] > 31.0f;
                    }
                });
                // Above QUICK_LIMIT it does not matter.
                top = (int)fminf(most, 1024.0f);
            }
            // Drawn levels need no sums: their scale is the step.
            if (drawn) {
                each([&](int base, int left, const float (&v)[ROWS]) {
                    signed char* const here = to + base + lane;
                    // A lane draws for eight coordinates that lie side by side.
                    u32 w[4];
                    philox(draws, ((u64)(begin + base) >> 3) + lane, 0, w);
                    __syncwarp();
                    for (int k = 0; k < 4; ++k) drawings[warp][4 * lane + k] = w[k];
                    __syncwarp();
                    const unsigned short* const own = (const unsigned short*)drawings[warp] + lane;
                    int sizes[ROWS], most = 0;
#pragma unroll
                    for (int a = 0; a < ROWS; ++a) {
                        int level;
                        if (wide) {
                            bool large = false;
                            level = empty || !finite ? 0 : level_of(v[a], inverse, own[32 * a], &large);
                            sizes[a] = large ? 1 << 26 : level < 0 ? -level : level;
                            if (sizes[a] > 127) level = level < 0 ? -127 : 127;
                        } else {
                            sizes[a] = drawn_size(__fmul_rn(v[a], inverse), own[32 * a]);
                            level = v[a] < 0 ? -sizes[a] : sizes[a];
                        }
                        if (32 * a < left) here[32 * a] = (signed char)level;
                        most = sizes[a] > most ? sizes[a] : most;
                    }
                    top = most > top ? most : top;
                    if (most > 15) {
#pragma unroll
                        for (int a = 0; a < ROWS; ++a) more15 += sizes[a] > 15, more31 += sizes[a] > 31;
                    }
                });
            } else if (wide) {
                each([&](int base, int left, const float (&v)[ROWS]) {
                    signed char* const here = to + base + lane;
#pragma unroll
                    for (int a = 0; a < ROWS; ++a) {
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
                });
            }
            u32 energy_sum = (u32)fminf(energy, 16777216.0f);
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
            wide = again = true;
            __syncthreads();
        }
        if (threadIdx.x) continue;
        i64* known = counts + block * COUNT_PLACES;
        known[TOP] = top, known[ABOVE_15] = more15, known[ABOVE_31] = more31;
        const double product = wide ? exact : (double)step * fast, power = wide ? squares : (double)all;
        float scale = 0.0f;
        if (top > 0 && top < 1 << 26) scale = drawn ? step : usable_step(product / power);
        if (top > 0 && drawn) scale = step;
        const double by = scale;
        norms[block] = norm;
        errors[block] = drawn || empty ? 0.0 : norm - 2.0 * by * product + by * by * power;
        steps[block] = step;
        scales[block] = scale;
    }
}

// A warp for each chunk of the vector, those of a segment side by side: coded segments have chunks of 2^exponent symbols.
extern "C" __global__ void __launch_bounds__(32) dither_encode_chunks(
    i64 n, i64 exponent, const signed char* levels, const i64* segments, const u32* codes, u16* words, i64* numbers, u32* states, const i64* result
) {
    __shared__ Code own[256];
    const int lane = threadIdx.x, fewer = SEGMENT_BITS - (int)exponent;
    const i64 s = smaller(blockIdx.x >> fewer, segments_of(n) - 1), c = blockIdx.x - (s << fewer), size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * SEGMENT_PLACES;
    const i64 wrong = result[RESULT_WRONG], kind = d[KIND], present = d[ONLY];
    const int window = (int)d[WINDOW], alphabet = 2 * window + 1;
    if (wrong != FINE || kind != CODED_KIND || present < 2) return;
    const Layout l = layout_of(size, alphabet, exponent);
    // The code of every level that a byte holds.
#pragma unroll
    for (int a = 0; a < 8; ++a) own[32 * a + lane] = code_of(codes[s * 256 + symbol_of((signed char)(32 * a + lane), window)]);
    __syncwarp();
    const Code* near = own;
    auto symbol = [=](i64 i) { return (u32)symbol_of(levels[first + i], window); };
    const u8* bytes = (const u8*)levels + first;
    KEEP_TOGETHER(bytes);
    auto load = [=](i64 i) { return Raw{bytes[(u32)i], 0}; };
    auto look = [=](const Raw& r) { return near[r.symbol]; };
    const i64 number = encode_chunk(l, c, symbol, load, look, words + first, states + s * CHUNKS * 64);
    if (lane == 0) numbers[s * CHUNKS + c] = number;
}

// One block lays out the message: the form and length of every segment, where they and their chunks begin; norm and error.
extern "C" __global__ void __launch_bounds__(256) dither_close(
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
            // All that is far away is asked for at once, words of so many chunks at a time.
            i64 kind = d[KIND], held[SCALES_MOST];
            const i64 window = d[WINDOW], exponent = d[CHUNK_OF], tables = d[TABLES_OF], present = d[ONLY], tail = d[TAIL], classes = d[CLASSES_OF];
            double power[SCALES_MOST], wrong[SCALES_MOST];
#pragma unroll
            for (int k = 0; k < SCALES_MOST; ++k) {
                power[k] = k < blocks ? norms[4 * s + k] : 0.0;
                wrong[k] = k < blocks ? errors[4 * s + k] : 0.0;
                held[k] = numbers[s * CHUNKS + k];
            }
            for (int half = SCALES_MOST / 2; half; half >>= 1)
                for (int k = 0; k < half; ++k) power[k] += power[k + half], wrong[k] += wrong[k + half];
            if (kind == CODED_KIND || kind == CLASSED_KIND) {
                const i64 alphabet = 2 * window + 1, most = 1 + raw_bytes(size, alphabet);
                const Layout l = layout_of(size, alphabet, exponent);
                i64 body = 1 + tables;
                const bool fits = body < most;
                if (present >= 2) {
                    body += 4 * l.chunks;
                    for (i64 c = 0; c < l.chunks; c += SCALES_MOST) {
#pragma unroll
                        for (int k = 0; k < SCALES_MOST; ++k) {
                            if (c) held[k] = numbers[s * CHUNKS + c + k];
                        }
#pragma unroll
                        for (int k = 0; k < SCALES_MOST; ++k) {
                            if (c + k >= l.chunks) continue;
                            offsets[s * CHUNKS + c + k] = body;
                            body += 4 * l.lanes + 2 * held[k];
                        }
                    }
                }
                d[FORM_OF] = !fits || body >= most ? RAW : present >= 2 ? CODED : ONLY_TABLES;
                if (!fits || body >= most) body = most;
                i64 varint = 1;
                while (tail >> 7 * varint) ++varint;
                d[SCALES] = 2 + varint;
                bytes = 2 + varint + 4 * blocks + classes + body + tail;
                if (bytes > 1 + 4 * size) d[KIND] = kind = RAW_KIND;
            }
            if (kind == RAW_KIND) bytes = 1 + 4 * size, wrong[0] = 0.0;
            if (kind == ZERO_KIND) bytes = 1;
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
#define PARTS 2

// Blocks, `share` of them for each segment, write the message.
extern "C" __global__ void __launch_bounds__(256, 4) dither_write(
    const float* x, i64 n, i64 share, const signed char* levels, const float* scales, const i64* segments, const i64* regions, const i64* firsts,
    const u8* described, const u8* tables, const u16* words, const i64* numbers, const u32* states, const i64* offsets, const u32* planes,
    const i64* result, u8* out
) {
    const i64 s = blockIdx.x / (u32)share, part = blockIdx.x % (u32)share, size = segment_length(n, s), first = s * SEGMENT;
    const i64 stride = share * blockDim.x, begin = part * blockDim.x + threadIdx.x;
    const i64* d = segments + s * SEGMENT_PLACES;
    // All that is far away is asked for at once, before anything is written.
    const i64 wrong = result[RESULT_WRONG], kind = d[KIND], at = d[AT], end = d[END], tail = d[TAIL], form = d[FORM_OF], exponent = d[CHUNK_OF];
    const i64 window = d[WINDOW], prefix = d[SCALES], classes = d[CLASSES_OF], described_tables = d[TABLES_OF];
    const i64 own_number = numbers[s * CHUNKS + part / PARTS], own_offset = offsets[s * CHUNKS + part / PARTS];
    const i64 blocks = (size + SCALE_BLOCK - 1) / SCALE_BLOCK;
    const float own_scale = begin < blocks ? scales[first / SCALE_BLOCK + begin] : 0.0f;
    if (wrong == NOT_FINITE && blockIdx.x == 0 && threadIdx.x == 0) store32(out, NON_FINITE);
    if (wrong != FINE) return;
    u8* to = out + at;
    const bool leads = begin == 0;
    if (leads && s == 0) store32(out, SEGMENTS);
    if (leads && segments_of(n) > 1) store32(out + 4 + 4 * s, (u32)(end - at));
    if (leads) to[0] = (u8)kind;
    if (kind == RAW_KIND)
        for (i64 i = begin; i < size; i += stride) store32(to + 1 + 4 * i, __float_as_uint(x[first + i]));
    if (kind != CODED_KIND && kind != CLASSED_KIND) return;
    const int width = raw_bits(2 * window + 1);
    u8 *class_bytes = to + prefix + 4 * blocks, *body = class_bytes + classes;
    if (leads) {
        to[1] = (u8)window;
        for (i64 k = 2; k < prefix; ++k) to[k] = (u8)((tail >> 7 * (k - 2) & 127) | (k + 1 < prefix ? 128 : 0));
        body[0] = form == RAW ? (u8)RAW : (u8)exponent;
    }
    if (begin < blocks) store32(to + prefix + 4 * begin, __float_as_uint(own_scale));
    if (kind == CLASSED_KIND) {
        const u8* from = described + description_at(firsts[s], regions[firsts[s] * REGION_PLACES + ROOM], s);
        for (i64 b = begin; b < classes; b += stride) class_bytes[b] = from[b];
    }
    for (i64 b = begin; b < tail; b += stride) out[end - tail + b] = (u8)(planes[s * PLANE_WORDS + (b >> 2)] >> 8 * (b & 3));
    if (form == RAW) {
        for (i64 g = begin; 8 * g < size; g += stride) {
            u64 held = 0;
            const int here = (int)smaller(8, size - 8 * g);
            for (int k = 0; k < here; ++k) held |= (u64)symbol_of(levels[first + 8 * g + k], (int)window) << k * width;
            for (int b = 0; 8 * b < here * width; ++b) body[1 + g * width + b] = (u8)(held >> 8 * b);
        }
        return;
    }
    // By the last block: the first has enough to do.
    for (i64 b = threadIdx.x; part == share - 1 && b < described_tables; b += blockDim.x) body[1 + b] = tables[s * 8192 + b];
    if (form != CODED) return;
    const Layout l = layout_of(size, 2 * window + 1, exponent);
    for (i64 piece = part; piece < l.chunks * PARTS; piece += share) {
        const i64 c = piece / PARTS, which = piece % PARTS, number = piece == part ? own_number : numbers[s * CHUNKS + c];
        const i64 from = number * which / PARTS, until = number * (which + 1) / PARTS;
        u8* chunk = body + (piece == part ? own_offset : offsets[s * CHUNKS + c]);
        copy_words(chunk + 4 * l.lanes + 2 * from, words + first + c * l.size + l.coded(c) - number + from, until - from);
        if (which) continue;
        if (threadIdx.x == 0) store32(body + 1 + described_tables + 4 * c, (u32)number);
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
