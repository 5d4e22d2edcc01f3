// Memory: zeros, and single numbers.
#include "zeros.cuh"

extern "C" __global__ void zero(u8* data, i64 nbytes) {
    clear(data, nbytes, (i64)blockIdx.x * blockDim.x + threadIdx.x, (i64)gridDim.x * blockDim.x);
}

extern "C" __global__ void set_number(i64* place, i64 value) {
    if (threadIdx.x == 0) *place = value;
}
