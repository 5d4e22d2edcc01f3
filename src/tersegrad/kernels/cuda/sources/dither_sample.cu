// How much a step of Sparse Dithering errs, by a sample.
#include "common.cuh"
#include "dither.cuh"
#include "dither_levels.cuh"
#include "dither_sample.cuh"

extern "C" __global__ void __launch_bounds__(512) dither_sample(
    const float* x, const float* carry, i64 carried, i64 n, float step, i64 stride, double* errors, double* norms
) {
    sample_group(x, carry, carried != 0, n, step, stride, errors, norms);
}

extern "C" __global__ void dither_sample_sums(double* errors, double* norms, i64 count, double* out) {
    fold_groups(errors, norms, count);
    if (threadIdx.x == 0) out[0] = errors[0], out[1] = norms[0];
}
