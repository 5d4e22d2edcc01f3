// Sums over spans of a vector become places: one block per row.
#include "common.cuh"

#define SCANNED 8

// Row b has n sums and room for one more number: sums become those of all before them, and the last number their total.
extern "C" __global__ void __launch_bounds__(1024) scan_rows(i64* rows, i64 n) {
    i64* row = rows + (i64)blockIdx.x * (n + 1);
    i64 carried = 0;
    for (i64 base = 0; base < n; base += SCANNED * blockDim.x) {
        const i64 first = base + SCANNED * (i64)threadIdx.x;
        i64 held[SCANNED], mine = 0, total;
#pragma unroll
        for (int a = 0; a < SCANNED; ++a) mine += held[a] = first + a < n ? row[first + a] : 0;
        i64 before = carried + block_scan(mine, &total);
#pragma unroll
        for (int a = 0; a < SCANNED; ++a) {
            if (first + a < n) row[first + a] = before;
            before += held[a];
        }
        carried += total;
    }
    if (threadIdx.x == 0) row[n] = carried;
}
