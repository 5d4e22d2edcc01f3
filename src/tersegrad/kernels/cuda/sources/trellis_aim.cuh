// The step of trellis codes for a target error, found on the device (core/targets.py: sampled_step): looks at the small sample.
#include "common.cuh"
#include "search.cuh"
#include "trellis.cuh"
#include "trellis_sums.cuh"
#include "trellis_viterbi.cuh"

// Eight warps make all looks at the small sample, which is one segment of at most four runs; `kept` has room for their decisions.
template <int S>
__device__ void aim_coarse(const float* x, i64 n, i64 run, const Target& target, u32* kept, u8* bytes, Search* search, double* told) {
    __shared__ double norms[PARTS_MOST], dots[PARTS_MOST], powers[PARTS_MOST], shared[PARTS_MOST];
    __shared__ int known[KNOWN_PLACES];
    __shared__ Search own;
    const int warp = threadIdx.x >> 5;
    const i64 parts = (n + SUMMED - 1) / SUMMED, warps = 2 * ((n + ((i64)1 << run) - 1) >> run);
    if (threadIdx.x == 0) own.begin();
    __syncthreads();
    while (own.stage < FINE_LOOKS) {
        const Given of = given_of(x, n, run, own.step, nullptr, 0, 0, 0, 0, 0);
        if (threadIdx.x < KNOWN_PLACES) known[threadIdx.x] = 0;
        __syncthreads();
        // The first look asks for the norm alone.
        if (own.stage != FIRST_LOOK && warp < warps)
            viterbi<S, false, false>(of, warp, kept + warp * GROUPS * (S / 2) * 32, nullptr, bytes, nullptr, nullptr, {}, known);
        __syncthreads();
        for (i64 part = warp; part < parts; part += 8) {
            const PartSums sums = sum_part(of, bytes, part);
            if ((threadIdx.x & 31) == 0) norms[part] = sums.norm, dots[part] = sums.dot, powers[part] = sums.power;
        }
        const double norm = fold_parts(norms, parts, shared), dot = fold_parts(dots, parts, shared), power = fold_parts(powers, parts, shared);
        if (threadIdx.x == 0) own.tell(error_of(norm, dot, power, known), norm, target, true, told);
        __syncthreads();
    }
    if (threadIdx.x == 0) *search = own;
}
