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
