// Steps and levels of Sparse Dithering (spec/wire.md, 5.16 and 5.17).
#include "common.cuh"
#include "philox.cuh"

#define TOO_LARGE 67108864.0f

// What is known of a block.
enum { TOP, ABOVE_15, ABOVE_31, COUNT_PLACES };

__device__ __forceinline__ float usable_step(double step) {
    const double least = 1.1754943508222875e-38, most = 3.4028234663852886e38;
    return __double2float_rz(step < least ? least : step > most ? most : step);
}

// 1.5 * 2^23: adding it to a number below 2^22 rounds that to nearest, which is faster than the instruction for it.
#define SHIFTER 12582912.0f

// The level of x, and whether it is too large to be coded; `draw` is negative for rounding to nearest.
__device__ __forceinline__ int level_of(float x, float inverse, int draw, bool* large) {
    const float y = __fmul_rn(x, inverse), size = fabsf(y);
    *large = !(size < TOO_LARGE);
    if (draw < 0) return *large ? 0 : __float2int_rn(y);
    const float whole = floorf(size);
    const int up = (__float2int_rn(__fmul_rn(__fsub_rn(size, whole), 65536.0f)) + draw) >> 16;
    const int level = *large ? 0 : (int)whole + up;
    return __float_as_uint(x) >> 31 ? -level : level;
}

// What `level_of` gives for a level below 2^22 that is drawn, without its sign; anything large for a larger one. Adding 2^23 rounds as the addition does,
// and leaves the number in the lower bits.
__device__ __forceinline__ int drawn_size(float y, u32 draw) {
    const float size = fabsf(y), shifted = __fadd_rd(size, 8388608.0f), rest = __fsub_rn(size, __fsub_rn(shifted, 8388608.0f));
    const u32 up = __float_as_uint(__fmaf_rn(rest, 65536.0f, 8388608.0f)) + draw >> 16;
    return (int)(__float_as_uint(shifted) + up - (0x4b000000u + 0x4b00u));
}

__device__ __forceinline__ int draw_of(const Draws& draws, bool drawn, i64 i) {
    if (!drawn) return -1;
    u32 w[4];
    philox(draws, (u64)i >> 3, 0, w);
    return (int)(w[(i & 7) >> 1] >> 16 * (i & 1) & 0xffff);
}

__device__ __forceinline__ int symbol_of(int level, int window) {
    return (level < -window ? -window : level > window ? window : level) + window;
}

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

// A warp adds up the squares of chunk `chunk` of 4096 coordinates; the sum is in lane 0.
__device__ __forceinline__ double chunk_squares(const float* x, i64 n, i64 chunk) {
    const int lane = threadIdx.x & 31, count = (int)smaller(4096, n - 4096 * chunk);
    const float* const from = x + 4096 * chunk + lane;
    double total = 0;
    // Short vectors have few warps: these wait for memory as few times as they can.
    for (int base = 0; base < count; base += 32 * 32) {
        float v[32];
#pragma unroll
        for (int a = 0; a < 32; ++a) v[a] = base + 32 * a + lane < count ? from[base + 32 * a] : 0.0f;
#pragma unroll
        for (int a = 0; a < 32; ++a) total += (double)v[a] * (double)v[a];
    }
    return fold(total);
}

// A block folds sums in memory, padded to a power of two; all threads then see the first, which is that of all.
__device__ void fold_sums(double* sums, i64 number) {
    i64 half = 1;
    while (2 * half < number) half *= 2;
    for (; half; half /= 2) {
        for (i64 k = threadIdx.x; k < half; k += blockDim.x)
            if (k + half < number) sums[k] += sums[k + half];
        __syncthreads();
    }
}
