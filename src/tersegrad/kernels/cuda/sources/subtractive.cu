// Subtractive dithering: steps and folded levels of all segments, what is counted of them, and escapes (spec/wire.md, 5.18).
#include "common.cuh"
#include "subtractive.cuh"
#include "subtractive_counts.cuh"
#include "dither_levels.cuh"
#include "scan.cuh"
#include "classes.cuh"

#define UNIT_SIZE 4096

// A warp adds up the squares of 4096 coordinates.
extern "C" __global__ void __launch_bounds__(512, 2) subtractive_squares(const float* x, i64 n, double* sums) {
    const i64 unit = (i64)blockIdx.x * 16 + (threadIdx.x >> 5);
    const double total = chunk_squares(x, n, unit);
    if ((threadIdx.x & 31) == 0 && UNIT_SIZE * unit < n) sums[unit] = total;
}

// A block for each segment, or one for all (`whole`), makes its step; the last one to arrive finds out which parts have symbols: their number and
// how far they lie behind them.
extern "C" __global__ void __launch_bounds__(1024) subtractive_steps(
    i64 n, i64 whole, double twelve_omega, double slack, double* sums, float* steps, i64* shifts, i64* parts, i64* state
) {
    __shared__ bool last;
    const i64 number = segments_of(n), s = blockIdx.x, size = whole ? n : segment_length(n, s);
    const i64 units = (size + UNIT_SIZE - 1) / UNIT_SIZE;
    double* own = sums + s * (SEGMENT / UNIT_SIZE);
    fold_sums(own, units);
    const double square = own[0];
    if (!(square < 1e300)) state[STATUS_OF] = NOT_FINITE;
    const double step = slack * sqrt(twelve_omega / (double)size * square), least = 1.1754943508222875e-38, most = 3.4028234663852886e38;
    const float usable = square == 0.0 ? 0.0f : (float)(step < least ? least : step > most ? most : step);
    for (i64 k = threadIdx.x; k < (whole ? number : 1); k += blockDim.x) steps[s + k] = usable;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd((u64*)&state[ARRIVED], (u64)1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    i64 live = 0, symbols = 0, total;
    for (i64 base = 0; base < number; base += blockDim.x) {
        const i64 p = base + threadIdx.x;
        const bool here = p < number && ((volatile float*)steps)[p] != 0.0f;
        const i64 length = here ? segment_length(n, p) : 0;
        const i64 rank = live + block_scan(here, &total);
        live += total;
        const i64 before = symbols + block_scan(length, &total);
        symbols += total;
        if (here) shifts[rank] = p * SEGMENT - before;
        if (p < number) parts[p * SEGMENT_PLACES + KIND] = here ? CODED_KIND : ZERO_KIND;
    }
    if (threadIdx.x) return;
    state[SYMBOLS] = symbols;
    state[LIVE] = live;
    if (!live && state[STATUS_OF] == FINE) state[STATUS_OF] = ALL_ZERO;
}

struct alignas(8) Eight {
    u32 word[2];
};

// A thread for eight coordinates: their levels, as bytes that hold none beyond 127, what is drawn for them (bin | octave << 4), which levels occur
// with which bin, and how large levels are.
extern "C" __global__ void __launch_bounds__(256) subtractive_levels(
    const float* x, i64 n, const float* steps, i64 step_word, i64 who, i64 k0, i64 k1, u8* levels, u8* drawn, int* occur, i64* state
) {
    __shared__ u8 seen[BINS * BYTE_ROW];
    __shared__ int largest, above[4];
    if (!goes_on(state)) return;
    for (int k = threadIdx.x; k < BINS * BYTE_ROW; k += blockDim.x) seen[k] = 0;
    if (threadIdx.x < 4) above[threadIdx.x] = 0;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    const bool aligned = ((u64)x & 15) == 0;
    const i64 stride = (i64)gridDim.x * blockDim.x;
    int top = 0;
    bool large = false;
    for (i64 g = (i64)blockIdx.x * blockDim.x + threadIdx.x; 8 * g < n; g += stride) {
        const float step = steps[part_of(n, 8 * g)], inverse = step == 0.0f ? 0.0f : 1.0f / step;
        float v[8];
        if (aligned && 8 * g + 8 <= n)
            for (int q = 0; q < 2; ++q) {
                const Sixteen held = ((const Sixteen*)x)[2 * g + q];
#pragma unroll
                for (int k = 0; k < 4; ++k) v[4 * q + k] = __uint_as_float(held.word[k]);
            }
        else
            for (int k = 0; k < 8; ++k) v[k] = 8 * g + k < n ? x[8 * g + k] : 0.0f;
        const Drawn u(draws, g);
        Eight bytes = {{0, 0}}, kinds = {{0, 0}};
        int most = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            bool beyond;
            const int size = size_of_draw(u(k)), bin = bin_of(size), level = step == 0.0f ? 0 : folded_level(v[k], inverse, u(k), &beyond);
            const int length = level < 0 ? -level : level, near = level < -127 ? -127 : level > 127 ? 127 : level;
            bytes.word[k / 4] |= (u32)(near & 255) << 8 * (k % 4);
            kinds.word[k / 4] |= (u32)(bin | octave_of(size) << 4) << 8 * (k % 4);
            if (step == 0.0f || 8 * g + k >= n) continue;
            large |= beyond;
            most = length > most ? length : most;
            if (!seen[bin * BYTE_ROW + (near & 255)]) seen[bin * BYTE_ROW + (near & 255)] = 1;
            if (length > 7) {
                int over = length > 63 ? 4 : length > 31 ? 3 : length > 15 ? 2 : 1;
                while (over) atomicAdd(&above[--over], 1);
            }
        }
        top = most > top ? most : top;
        ((Eight*)levels)[g] = bytes;
        ((Eight*)drawn)[g] = kinds;
    }
    for (int by = 16; by; by >>= 1) {
        const int other = __shfl_xor_sync(FULL, top, by);
        top = other > top ? other : top;
    }
    if ((threadIdx.x & 31) == 0) atomicMax(&largest, top);
    if (large) state[STATUS_OF] = TOO_LARGE_TO_CODE;
    __syncthreads();
    for (int k = threadIdx.x; k < BINS * 256; k += blockDim.x)
        if (seen[k / 256 * BYTE_ROW + k % 256]) occur[k] = 1;
    if (threadIdx.x < 4 && above[threadIdx.x]) atomicAdd((u64*)&state[ABOVE + threadIdx.x], (u64)above[threadIdx.x]);
    if (threadIdx.x == 0 && largest) atomicMax(&state[LARGEST], (i64)largest);
}

// The largest level with a symbol of its own: all if few are large, else the tail is escaped.
__device__ int window_of(const i64* state) {
    const i64 top = state[LARGEST];
    if (top <= 7) return (int)larger(top, 1);
    for (int k = 0; k < 4; ++k) {
        const i64 limit = (8 << k) - 1;
        if (top <= limit) return (int)top;
        if (state[ABOVE + k] <= state[SYMBOLS] / 2048) return (int)limit;
    }
    return (int)smaller(top, 127);
}

// Counts of symbols by bin, those of every eighth unit of 4096 and those of the others; the latter where symbols with the finest bins are not
// sampled. The first block says what the window is, and which symbols occur with which bin, which was said of levels.
extern "C" __global__ void __launch_bounds__(256) subtractive_count(
    i64 n, const u8* levels, const u8* drawn, const int* occur, i64* parts, u64* counts, int* present, i64* state
) {
    __shared__ u32 sums[BINS * WORD_ROW];
    if (state[STATUS_OF] != FINE) return;
    const int window = window_of(state);
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) state[WINDOW_WORD] = window;
        for (i64 p = threadIdx.x; p < segments_of(n); p += blockDim.x) parts[p * SEGMENT_PLACES + WINDOW] = window;
        for (int k = threadIdx.x; k < BINS * 256; k += blockDim.x)
            if (occur[k]) present[(k & ~255) + symbol_of((signed char)(k & 255), window)] = 1;
    }
    // The number of blocks is a multiple of eight: all units of a block are of one kind.
    const int other = blockIdx.x % 8 != 0;
    if (other && samples(state[SYMBOLS], BINS * (2 * window + 1))) return;
    for (int k = threadIdx.x; k < BINS * WORD_ROW; k += blockDim.x) sums[k] = 0;
    __syncthreads();
    for (i64 unit = blockIdx.x; unit * UNIT_SIZE < n; unit += gridDim.x) {
        if (parts[part_of(n, unit * UNIT_SIZE) * SEGMENT_PLACES + KIND] != CODED_KIND) continue;
        const i64 i = unit * UNIT_SIZE + 16 * threadIdx.x;
        if (i >= n) continue;
        const Sixteen own = *(const Sixteen*)(levels + i), kinds = *(const Sixteen*)(drawn + i);
#pragma unroll
        for (int k = 0; k < 16; ++k)
            if (i + k < n) atomicAdd(&sums[(kinds.byte(k) & 15) * WORD_ROW + symbol_of((signed char)own.byte(k), window)], 1u);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < BINS * 256; k += blockDim.x) {
        const u32 sum = sums[k / 256 * WORD_ROW + k % 256];
        if (sum) atomicAdd(&counts[other * BINS * 256 + k], (u64)sum);
    }
}

// Coordinates that a thread and a block look at for escapes.
#define THREAD_SPAN 64
#define BLOCK_SPAN 16384

// Calls body(value) for the escapes of a thread, in order: what they add to the end of the window, plus 1. A byte holds no larger levels than 127.
template <class Body>
__device__ void each_escape(
    const float* x, i64 n, const u8* levels, const float* steps, const Draws& draws, const i64* state, Body body
) {
    const i64 begin = BLOCK_SPAN * (i64)blockIdx.x + THREAD_SPAN * threadIdx.x;
    const int window = (int)state[WINDOW_WORD];
    for (i64 i = begin; i < smaller(begin + THREAD_SPAN, n); i += 16) {
        const Sixteen own = *(const Sixteen*)(levels + i);
        for (int k = 0; k < 16 && i + k < n; ++k) {
            int level = (signed char)own.byte(k);
            if (level < window && level > -window) continue;
            bool large;
            if (level == 127 || level == -127)
                level = folded_level(x[i + k], 1.0f / steps[part_of(n, i)], Drawn(draws, (i + k) >> 3)((int)((i + k) & 7)), &large);
            body((level < 0 ? -level : level) - window + 1);
        }
    }
}

__device__ __forceinline__ bool has_escapes(const i64* state) { return state[STATUS_OF] == FINE && state[LARGEST] > state[WINDOW_WORD]; }

// Blocks count their escapes and their low bits, into two rows.
extern "C" __global__ void __launch_bounds__(256) subtractive_escapes_count(
    const float* x, i64 n, const u8* levels, const float* steps, i64 step_word, i64 who, i64 k0, i64 k1, i64* rows, const i64* state
) {
    if (!has_escapes(state)) return;
    i64 number = 0, low = 0, numbers, lows;
    each_escape(x, n, levels, steps, {(u32)step_word, (u32)who, (u32)k0, (u32)k1}, state, [&](int value) {
        ++number;
        low += bit_length((u64)value) - 1;
    });
    block_scan(number, &numbers);
    block_scan(low, &lows);
    if (threadIdx.x == 0) rows[blockIdx.x] = numbers, rows[gridDim.x + 1 + blockIdx.x] = lows;
}

// The same blocks write the codes, into `room` bytes of zeros. The first says how many they take.
extern "C" __global__ void __launch_bounds__(256) subtractive_escapes_write(
    const float* x, i64 n, const u8* levels, const float* steps, i64 step_word, i64 who, i64 k0, i64 k1, const i64* rows, u32* planes, i64 room,
    i64* state
) {
    if (!has_escapes(state)) return;
    const i64 *lows = rows + gridDim.x + 1, all = rows[gridDim.x], bits = lows[gridDim.x];
    const i64 second = 8 * ((all + bits + 7) / 8), bytes = second / 8 + (bits + 7) / 8;
    if (bytes > room) {
        if (threadIdx.x == 0) state[STATUS_OF] = MANY_ESCAPES;
        return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) state[TAIL_BYTES] = bytes;
    if (rows[blockIdx.x] == rows[blockIdx.x + 1]) return;
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    i64 number = 0, low = 0, total;
    each_escape(x, n, levels, steps, draws, state, [&](int value) {
        ++number;
        low += bit_length((u64)value) - 1;
    });
    i64 rank = rows[blockIdx.x] + block_scan(number, &total), place = lows[blockIdx.x] + block_scan(low, &total);
    each_escape(x, n, levels, steps, draws, state, [&](int value) {
        const int width = bit_length((u64)value) - 1;
        const i64 one = place + rank + width, at = second + place;
        atomicOr(&planes[one >> 5], 1u << (one & 31));
        for (int b = 0; b < width; ++b)
            if (value >> b & 1) atomicOr(&planes[(at + b) >> 5], 1u << ((at + b) & 31));
        ++rank;
        place += width;
    });
}

// So many times its value is added to each coordinate; a thread for eight.
extern "C" __global__ void __launch_bounds__(256) subtractive_left(
    float* x, i64 n, const u8* levels, const float* steps, i64 step_word, i64 who, i64 k0, i64 k1, float times, const i64* state
) {
    const i64 g = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (state[STATUS_OF] != FINE || 8 * g >= n) return;
    const float step = steps[part_of(n, 8 * g)];
    if (step == 0.0f) return;
    const Drawn u({(u32)step_word, (u32)who, (u32)k0, (u32)k1}, g);
    const Eight own = ((const Eight*)levels)[g];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const i64 i = 8 * g + k;
        if (i >= n) break;
        const int level = (signed char)(own.word[k / 4] >> 8 * (k % 4));
        bool large;
        // A byte holds no larger ones.
        const float value = level == 127 || level == -127 ? weighted<i64>(folded_level(x[i], 1.0f / step, u(k), &large), u(k), step, times)
                                                          : weighted<int>(level, u(k), step, times);
        x[i] = __fadd_rn(x[i], value);
    }
}
