// Sums over spans of a vector become places.
#pragma once
#include "common.cuh"

// Of a row of sums, one for each of `parts`, those before part `at` and all together; in most kernels a block has one part. Where parts are
// many the sums have become places between the kernels (`scanned`), with the total behind them.
struct Place {
    i64 before, all;
    __device__ Place(const i64* sums, i64 scanned, i64 at = blockIdx.x, i64 parts = gridDim.x) {
        if (scanned) {
            before = sums[at];
            all = sums[parts];
            return;
        }
        i64 mine = 0, others = 0, total;
        for (i64 j = threadIdx.x; j < parts; j += blockDim.x) {
            if (j < at) mine += sums[j];
            else others += sums[j];
        }
        block_scan(mine, &before);
        block_scan(others, &total);
        all = before + total;
    }
};

#define SCANNED 8

// One block per row. Row b has n sums and room for one more number: sums become those of all before them, and the last number their total. Whole warps.
extern "C" __global__ void __launch_bounds__(1024) scan_rows(i64* rows, i64 n) {
    i64* row = rows + (i64)blockIdx.x * (n + 1);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 carried = 0;
    for (i64 base = 0; base < n; base += SCANNED * blockDim.x) {
        // A warp has 32 * SCANNED in a row, of which a lane reads every 32nd.
        const i64 first = base + 32 * SCANNED * warp + lane;
        i64 held[SCANNED], sums[SCANNED], mine = 0, total;
#pragma unroll
        for (int a = 0; a < SCANNED; ++a) held[a] = first + 32 * a < n ? row[first + 32 * a] : 0;
#pragma unroll
        for (int a = 0; a < SCANNED; ++a) {
            sums[a] = mine + warp_scan(held[a]);
            mine = __shfl_sync(FULL, sums[a], 31);
        }
        // The warp's total counts once.
        const i64 before = carried + __shfl_sync(FULL, block_scan(lane == 0 ? mine : 0, &total), 0);
#pragma unroll
        for (int a = 0; a < SCANNED; ++a)
            if (first + 32 * a < n) row[first + 32 * a] = before + sums[a] - held[a];
        carried += total;
    }
    if (threadIdx.x == 0) row[n] = carried;
}
