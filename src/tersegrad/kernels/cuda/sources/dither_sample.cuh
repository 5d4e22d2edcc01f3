// Samples of Sparse Dithering: one chunk of 4096 coordinates in `stride`.
#include "common.cuh"
#include "dither.cuh"
#include "dither_levels.cuh"

struct Sums {
    double norm, dot, square;
};

// What a warp's coordinates add up to, a sum for each of its threads; so many coordinates of a thread are on their way at once.
template <int ahead>
__device__ Sums sample_chunk(const float* x, const float* carry, bool carried, i64 begin, i64 stop, float inverse) {
    const int lane = threadIdx.x & 31;
    Sums sums = {0, 0, 0};
    for (i64 base = begin; base < stop; base += 32 * ahead) {
        float v[ahead];
#pragma unroll
        for (int a = 0; a < ahead; ++a) {
            const i64 i = base + 32 * a + lane;
            v[a] = i < stop ? (carried ? __fadd_rn(x[i], carry[i]) : x[i]) : 0.0f;
        }
#pragma unroll
        for (int a = 0; a < ahead; ++a) {
            bool large;
            const int level = level_of(v[a], inverse, -1, &large);
            const double value = v[a], k = large ? (double)TOO_LARGE : (double)level;
            sums.norm += value * value;
            sums.dot += value * k;
            sums.square += k * k;
        }
    }
    return sums;
}

// Squared error with the best scale.
__device__ __forceinline__ double best_error(double norm, double dot, double square) {
    return square > 0 ? norm - dot / square * dot : norm;
}

// Chunks of each 2^16 coordinates have one scale; those that are further apart have one of their own.
__device__ __forceinline__ i64 sample_groups(i64 n, i64 stride) {
    const i64 size = stride > 16 ? 4096 * stride : SCALE_BLOCK;
    return (n + size - 1) / size;
}

// A block of 512 threads for each group, a warp for each of its chunks: squared error and norm.
__device__ void sample_group(
    const float* x, const float* carry, bool carried, i64 n, float step, i64 stride, double* errors, double* norms
) {
    __shared__ double parts[16], folded;
    const int warp = threadIdx.x >> 5;
    const i64 group = blockIdx.x, distance = 4096 * stride;
    const i64 first = stride > 16 ? group : (16 * group + stride - 1) / stride;
    const i64 begin = (first + warp) * distance;
    const bool mine = begin < n && (stride > 16 ? warp == 0 : begin / SCALE_BLOCK == group);
    const Sums sums = sample_chunk<8>(x, carry, carried, begin, mine ? smaller(begin + 4096, n) : begin, 1.0f / step);
    const double power = fold_chunks(fold(sums.norm), parts, &folded);
    __syncthreads();
    const double product = fold_chunks(fold(sums.dot), parts, &folded);
    __syncthreads();
    const double energy = fold_chunks(fold(sums.square), parts, &folded);
    if (threadIdx.x) return;
    norms[group] = power;
    errors[group] = best_error(power, product, energy);
}

// A block adds up both: the second half onto the first until one is left, as if there were zeros up to a power of two.
__device__ void fold_groups(double* errors, double* norms, i64 count) {
    i64 half = 1;
    while (2 * half < count) half *= 2;
    for (; half; half /= 2) {
        for (i64 i = threadIdx.x; i < half; i += blockDim.x)
            if (i + half < count) {
                errors[i] += errors[i + half];
                norms[i] += norms[i + half];
            }
        __syncthreads();
    }
}
