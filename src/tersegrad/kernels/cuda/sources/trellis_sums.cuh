// Sums over the parts of a segment, in the order of spec/wire.md (section 5, sums).
#include "common.cuh"
#include "trellis.cuh"

// Coordinates that a warp adds up, and the most of these that a segment has, padded to a power of two.
#define SUMMED 4096
#define PARTS_MOST 128

struct PartSums {
    double norm, dot, power;
};

// A warp's sums over a part: of x^2 and, without dither, of x n and n^2.
__device__ PartSums sum_part(const Given& of, const u8* bytes, i64 part) {
    const int lane = threadIdx.x & 31, stop = (int)smaller(SUMMED, of.n - part * SUMMED);
    const float* from = of.x + part * SUMMED;
    const u8* held = bytes + part * SUMMED;
    KEEP_TOGETHER(from);
    KEEP_TOGETHER(held);
    double norm = 0, dot = 0, power = 0;
    for (int base = 0; base < stop; base += 32 * 8) {
        float v[8];
        u32 byte[8];
#pragma unroll
        for (int a = 0; a < 8; ++a) {
            const int i = base + 32 * a + lane;
            v[a] = i < stop ? from[(u32)i] : 0.0f;
            byte[a] = !of.drawn && i < stop ? held[(u32)i] : WIDEST;
        }
#pragma unroll
        for (int a = 0; a < 8; ++a) {
            norm += (double)v[a] * (double)v[a];
            if (of.drawn) continue;
            const int k = integer_of(nearest(__fmul_rn(v[a], of.scale)), (int)(byte[a] >> 7) + 2 * (int)(byte[a] & 1));
            const double number = (double)k;
            dot += (double)v[a] * number;
            power += number * number;
        }
    }
    return {fold(norm), fold(dot), fold(power)};
}

// The least-squares scale of a segment, and the squared error with it.
__device__ __forceinline__ float best_scale(double dot, double power) { return power ? usable_step(dot / power) : 0.0f; }
__device__ __forceinline__ double scaled_error(double norm, double dot, double power, float scale) {
    const double by = scale;
    return norm - 2.0 * by * dot + by * by * power;
}

// The squared error of a segment from its sums: none where it is zero or not coded.
__device__ __forceinline__ double error_of(double norm, double dot, double power, const int* known) {
    if (!(norm < __longlong_as_double(0x7ff0000000000000LL)) || norm == 0 || known[TOO_FAR]) return 0.0;
    return scaled_error(norm, dot, power, best_scale(dot, power));
}

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
