// How much a step of Sparse Dithering errs, by a sample: one chunk of 4096 coordinates in `stride`.
#include "common.cuh"
#include "dither.cuh"
#include "dither_levels.cuh"

// A block of 512 threads for the chunks of each 2^16 coordinates, a warp for each of them: squared error with the best scale, and norm.
extern "C" __global__ void __launch_bounds__(512) dither_sample(
    const float* x, const float* carry, i64 carried, i64 n, float step, i64 stride, double* errors, double* norms
) {
    __shared__ double parts[16], folded;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 group = blockIdx.x, distance = 4096 * stride;
    // Chunks that are further apart than 2^16 coordinates have a block of their own.
    const i64 first = stride > 16 ? group : (16 * group + stride - 1) / stride;
    const i64 begin = (first + warp) * distance;
    const bool mine = begin < n && (stride > 16 ? warp == 0 : begin / SCALE_BLOCK == group);
    const i64 stop = mine ? smaller(begin + 4096, n) : begin;
    const float inverse = 1.0f / step;
    double norm = 0, dot = 0, square = 0;
    for (i64 base = begin; base < stop; base += 32 * 8) {
        float v[8];
#pragma unroll
        for (int a = 0; a < 8; ++a) {
            const i64 i = base + 32 * a + lane;
            v[a] = i < stop ? (carried ? __fadd_rn(x[i], carry[i]) : x[i]) : 0.0f;
        }
#pragma unroll
        for (int a = 0; a < 8; ++a) {
            bool large;
            const int level = level_of(v[a], inverse, -1, &large);
            const double value = v[a], k = large ? (double)TOO_LARGE : (double)level;
            norm += value * value;
            dot += value * k;
            square += k * k;
        }
    }
    const double power = fold_chunks(fold(norm), parts, &folded);
    __syncthreads();
    const double product = fold_chunks(fold(dot), parts, &folded);
    __syncthreads();
    const double energy = fold_chunks(fold(square), parts, &folded);
    if (threadIdx.x) return;
    norms[group] = power;
    errors[group] = energy > 0 ? power - product / energy * product : power;
}

// One block adds up both: the second half onto the first until one is left. `size` is a power of two, and there are zeros behind `count`.
extern "C" __global__ void dither_sample_sums(double* errors, double* norms, i64 count, i64 size, double* out) {
    for (i64 half = size / 2; half; half /= 2) {
        for (i64 i = threadIdx.x; i < half; i += blockDim.x)
            if (i + half < count) {
                errors[i] += errors[i + half];
                norms[i] += norms[i + half];
            }
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = errors[0], out[1] = norms[0];
}
