// Sparse Dithering: what a segment says before its symbols: its kind and window, the table of its symbols, its escapes (spec/wire.md, 5.16).
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "philox.cuh"
#include "dither_levels.cuh"
#include "classes.cuh"
#include "escapes.cuh"

// Histograms side by side, of which threads take turns: most levels are the same few.
#define COPIES 8

struct Window {
    i64 top;
    int size;
    __device__ bool coded() const { return top > 0 && top < 1 << 26; }
};

// From what is known of the blocks of a segment.
__device__ Window window_of(const i64* counts, i64 first, i64 size) {
    i64 top = 0, more15 = 0, more31 = 0;
    for (i64 b = first / SCALE_BLOCK; b * SCALE_BLOCK < first + size; ++b) {
        const i64* known = counts + b * COUNT_PLACES;
        top = larger(top, known[TOP]);
        more15 += known[ABOVE_15];
        more31 += known[ABOVE_31];
    }
    return {top, (int)(top <= 15 ? top : more15 <= size / 512 ? 15 : top <= 31 ? top : more31 <= size / 512 ? 31 : smaller(top, 127))};
}

// A thread for each segment begins what is known of it: its kind, its window, the chunks that it has if it has no classes. Whether all norms are finite.
extern "C" __global__ void dither_windows(i64 n, i64 exponent, const double* norms, const i64* counts, i64* segments, i64* result) {
    const i64 s = (i64)blockIdx.x * blockDim.x + threadIdx.x, blocks = (n + SCALE_BLOCK - 1) / SCALE_BLOCK;
    if (blockIdx.x == 0) {
        bool finite = true;
        for (i64 b = threadIdx.x; b < blocks; b += blockDim.x) finite &= norms[b] < __longlong_as_double(0x7ff0000000000000LL);
        if (!finite) result[RESULT_WRONG] = NOT_FINITE;
    }
    if (s >= segments_of(n)) return;
    const Window window = window_of(counts, s * SEGMENT, segment_length(n, s));
    i64* d = segments + s * SEGMENT_PLACES;
    for (int k = 0; k < SEGMENT_PLACES; ++k) d[k] = 0;
    d[KIND] = window.top == 0 ? ZERO_KIND : window.coded() ? CODED_KIND : RAW_KIND;
    d[WINDOW] = window.size;
    d[CHUNK_OF] = exponent;
}

__device__ __forceinline__ int level_at(const Sixteen& held, int k) { return (signed char)held.byte(k); }

// A block writes the table of a segment and its codes.
__device__ void write_table_of(i64 s, i64 size, const Window& window, const Sixteen* levels, i64* d, short* q, u8* tables, u32* codes) {
    __shared__ u32 sums[COPIES * 256];
    __shared__ u8 seen[256];
    __shared__ u32 w[256];
    __shared__ int f[256];
    __shared__ TableRoom room;
    const int t = threadIdx.x, alphabet = 2 * window.size + 1;
    const bool sampled = size >= larger((i64)1 << 16, 4096 * alphabet);
    for (int k = t; k < COPIES * 256; k += blockDim.x) sums[k] = 0;
    for (int k = t; k < 256; k += blockDim.x) seen[k] = 0;
    __syncthreads();
    for (i64 j = t;; j += blockDim.x) {
        // Sixteen levels; of a sample those of every eighth block of 4096.
        const i64 unit = sampled ? (j >> 8 << 11) + (j & 255) : j;
        if (16 * unit >= size) break;
        const Sixteen held = levels[unit];
#pragma unroll
        for (int k = 0; k < 16; ++k)
            if (16 * unit + k < size) atomicAdd(&sums[t % COPIES * 256 + symbol_of(level_at(held, k), window.size)], 1u);
    }
    __syncthreads();
    for (int k = t; k < 256; k += blockDim.x)
        for (int copy = 1; copy < COPIES; ++copy) sums[k] += sums[copy * 256 + k];
    __syncthreads();
    i64 own = 0, different;
    for (int k = t; k < 256; k += blockDim.x) own += sums[k] > 0;
    block_scan(own, &different);
    const bool everything = sampled && 2 * different >= alphabet;
    if (sampled && !everything)
        for (i64 unit = t; 16 * unit < size; unit += blockDim.x) {
            const Sixteen held = levels[unit];
#pragma unroll
            for (int k = 0; k < 16; ++k)
                if (16 * unit + k < size) seen[symbol_of(level_at(held, k), window.size)] = 1;
        }
    __syncthreads();
    if (t >= 32) return;
    const u32* counted = sums;
    const u8* there = seen;
    const i64 bits = write_table([=](int k) { return (i64)counted[k] + (everything ? 1 : there[k]); }, alphabet, q + s * 256, tables + s * 8192, room);
    const int present = make_frequencies(q + s * 256, alphabet, w, f);
    u32 start = 0;
    for (int base = 0; base < alphabet; base += 32) {
        const int k = base + t;
        const u32 mine = k < alphabet ? (u32)f[k] : 0, upto = (u32)warp_scan(mine);
        if (k < alphabet) codes[s * 256 + k] = mine | (start + upto - mine) << 16;
        start += __shfl_sync(FULL, upto, 31);
    }
    if (t == 0) d[TABLES_OF] = (bits + 7) / 8, d[ONLY] = present;
}

// Two blocks for each segment that has levels: the first half of them write its table and its codes; the others its escapes.
extern "C" __global__ void __launch_bounds__(512) dither_segments(
    const float* x, i64 n, const signed char* levels, const float* steps, const i64* counts,
    i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, i64* segments, short* q, u8* tables, u32* codes, int* escapes, u32* planes, i64* result
) {
    const i64 number = segments_of(n), s = blockIdx.x % number, size = segment_length(n, s), first = s * SEGMENT;
    i64* d = segments + s * SEGMENT_PLACES;
    if (result[RESULT_WRONG] == NOT_FINITE) return;
    const Window window = window_of(counts, first, size);
    const Sixteen* units = (const Sixteen*)(levels + first);
    if (!window.coded()) return;
    if (blockIdx.x < number) return write_table_of(s, size, window, units, d, q, tables, codes);
    if (window.top <= window.size) return;
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    int* values = escapes + s * ESCAPES;
    const int most = window.size;
    auto escaped = [=](u32 four) {
        const u32 minus = four >> 7 & 0x01010101u, sizes = (four ^ minus * 255) + minus;
        return sizes + (u32)(128 - most) * 0x01010101u;
    };
    auto value = [=](i64 i, u32 byte) {
        int level = (signed char)byte;
        bool large;
        // A byte holds no larger ones.
        if (level == 127 || level == -127) level = level_of(x[first + i], 1.0f / steps[(first + i) >> 16], draw_of(draws, drawn != 0, first + i), &large);
        return (level < 0 ? -level : level) - most + 1;
    };
    const i64 found = list_escapes(units, size, values, escaped, value);
    if (found > ESCAPES) {
        if (threadIdx.x == 0) result[RESULT_WRONG] = MANY_ESCAPES;
        return;
    }
    __syncthreads();
    const i64 tail = write_planes(values, found, planes + s * PLANE_WORDS);
    if (threadIdx.x == 0) d[TAIL] = tail;
}
