// The step of Sparse Dithering for a target error, found on the device (core/targets.py: sampled_step).
#include "common.cuh"
#include "dither.cuh"
#include "dither_levels.cuh"
#include "dither_sample.cuh"
#include "search.cuh"

// Sums that a block folds near, and how many it adds up for each of them first.
#define FOLDED 2048
#define STRIDES 8

// As fold_sums, but with few looks at memory far away: the sum of all.
__device__ double fold_near(double* sums, i64 number) {
    __shared__ double near[FOLDED];
    i64 size = FOLDED * STRIDES;
    while (size < number) size *= 2;
    for (; size > FOLDED * STRIDES; size /= 2) {
        for (i64 k = threadIdx.x; k + size / 2 < number; k += blockDim.x) sums[k] += sums[k + size / 2];
        number = smaller(number, size / 2);
        __syncthreads();
    }
    for (int k = threadIdx.x; k < FOLDED; k += blockDim.x) {
        double own[STRIDES];
#pragma unroll
        for (int j = 0; j < STRIDES; ++j) own[j] = k + j * FOLDED < number ? sums[k + j * FOLDED] : 0.0;
#pragma unroll
        for (int half = STRIDES / 2; half; half /= 2)
#pragma unroll
            for (int j = 0; j < half; ++j) own[j] += own[j + half];
        near[k] = own[0];
    }
    __syncthreads();
    for (int half = FOLDED / 2; half; half /= 2) {
        for (int k = threadIdx.x; k < half; k += blockDim.x) near[k] += near[k + half];
        __syncthreads();
    }
    return near[0];
}

// A step from the squared norm, factor * sqrt(by * norm / over), or `otherwise` where that is not positive or not finite; and the norm. A warp adds
// up 4096 coordinates, and the last block to arrive, of which there are none at first, what all warps have found.
extern "C" __global__ void __launch_bounds__(512, 2) norm_step(
    const float* x, i64 n, double by, double over, double factor, double otherwise, i64* arrived, double* sums, double* out
) {
    __shared__ bool last;
    const i64 chunk = (i64)blockIdx.x * 16 + (threadIdx.x >> 5);
    const double total = chunk_squares(x, n, chunk);
    if ((threadIdx.x & 31) == 0 && 4096 * chunk < n) sums[chunk] = total;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd((u64*)arrived, (u64)1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    const double norm = fold_near(sums, (n + 4095) / 4096);
    if (threadIdx.x) return;
    const bool good = norm > 0.0 && finite_number(norm);
    out[0] = good ? (double)usable_step(factor * sqrt(by * norm / over)) : otherwise;
    out[1] = norm;
}

// One block of 1024 threads makes all looks at the first, small sample, of at most 32 chunks: a warp for each of them.
extern "C" __global__ void __launch_bounds__(1024) dither_aim_coarse(
    const float* x, const float* carry, i64 carried, i64 n, i64 stride, i64 refined,
    double aim, double tight, double near_tight, double factor, double divisor, double norm, Search* search, double* told
) {
    __shared__ double norms[32], dots[32], squares[32], powers[32], errors[32];
    __shared__ Search own;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Target target = {aim, tight, near_tight, factor, divisor, norm};
    const i64 distance = 4096 * stride, chunks = (n + distance - 1) / distance, groups = sample_groups(n, stride);
    const i64 begin = warp * distance, stop = warp < chunks ? smaller(begin + 4096, n) : begin;
    // The chunks of this warp's group.
    const i64 first = stride > 16 ? warp : (16 * warp + stride - 1) / stride;
    const i64 until = smaller(chunks, stride > 16 ? warp + 1 : (16 * (warp + 1) + stride - 1) / stride);
    if (threadIdx.x == 0) own.begin();
    __syncthreads();
    while (own.stage < FINE_LOOKS) {
        Sums sums = sample_chunk<16>(x, carry, carried != 0, begin, stop, 1.0f / own.step);
        sums.norm = fold(sums.norm), sums.dot = fold(sums.dot), sums.square = fold(sums.square);
        if (lane == 0) norms[warp] = sums.norm, dots[warp] = sums.dot, squares[warp] = sums.square;
        __syncthreads();
        const bool mine = warp < groups && first + lane < until;
        const double power = fold(mine ? norms[first + lane] : 0.0);
        const double product = fold(mine ? dots[first + lane] : 0.0);
        const double energy = fold(mine ? squares[first + lane] : 0.0);
        if (lane == 0) powers[warp] = power, errors[warp] = best_error(power, product, energy);
        __syncthreads();
        if (warp == 0) {
            const double wrong = fold(errors[lane]), whole = fold(powers[lane]);
            if (lane == 0) own.tell(wrong, whole, target, refined != 0, told);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *search = own;
}

// One look at the larger sample, unless the search has ended: blocks as in dither_sample, the last of which goes on with the search.
extern "C" __global__ void __launch_bounds__(512) dither_aim_fine(
    const float* x, const float* carry, i64 carried, i64 n, i64 stride,
    double aim, double tight, double near_tight, double factor, double divisor, double norm, Search* search, double* told,
    double* errors, double* norms
) {
    __shared__ bool last;
    if (search->stage == ENDED) return;
    sample_group(x, carry, carried != 0, n, search->step, stride, errors, norms);
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd((u64*)&search->arrived, (u64)1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    fold_groups(errors, norms, gridDim.x);
    if (threadIdx.x) return;
    go_on(search, errors[0], norms[0], Target{aim, tight, near_tight, factor, divisor, norm}, told);
}
