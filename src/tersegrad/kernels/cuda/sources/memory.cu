// Memory: zeros, and single numbers.
#include "common.cuh"

struct alignas(16) Zeros {
    u64 words[2];
};

// Zero bytes from any place on.
extern "C" __global__ void zero(u8* data, i64 nbytes) {
    const i64 me = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const i64 before = smaller((16 - (i64)((u64)data & 15)) & 15, nbytes), sixteens = (nbytes - before) / 16, end = before + 16 * sixteens;
    Zeros* aligned = (Zeros*)(data + before);
    for (i64 i = me; i < sixteens; i += stride) aligned[i] = Zeros{{0, 0}};
    if (me < before) data[me] = 0;
    if (me < nbytes - end) data[end + me] = 0;
}

extern "C" __global__ void set_number(i64* place, i64 value) {
    if (threadIdx.x == 0) *place = value;
}
