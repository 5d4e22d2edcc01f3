// Sums over the parts of a segment, in the order of spec/wire.md (section 5, sums).
#include "common.cuh"

// Coordinates that a warp adds up, and the most of these that a segment has, padded to a power of two.
#define SUMMED 4096
#define PARTS_MOST 128

// A block folds the sums of a segment's parts.
__device__ double fold_parts(const double* sums, i64 number, double* shared) {
    __syncthreads();
    for (int k = threadIdx.x; k < PARTS_MOST; k += blockDim.x) shared[k] = k < number ? sums[k] : 0.0;
    __syncthreads();
    for (int half = PARTS_MOST / 2; half; half >>= 1) {
        for (int k = threadIdx.x; k < half; k += blockDim.x) shared[k] += shared[k + half];
        __syncthreads();
    }
    return shared[0];
}
