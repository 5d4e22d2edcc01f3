// Zeros into memory, sixteen bytes at a time.
#pragma once
#include "common.cuh"

struct alignas(16) Zeros {
    u64 words[2];
};

// Zero bytes from any place on, shared among `stride` threads of which this is number `me`; they are sixteen at least.
__device__ __forceinline__ void clear(u8* data, i64 nbytes, i64 me, i64 stride) {
    const i64 before = smaller((16 - (i64)((u64)data & 15)) & 15, nbytes), sixteens = (nbytes - before) / 16, end = before + 16 * sixteens;
    Zeros* aligned = (Zeros*)(data + before);
    for (i64 i = me; i < sixteens; i += stride) aligned[i] = Zeros{{0, 0}};
    if (me < before) data[me] = 0;
    if (me < nbytes - end) data[end + me] = 0;
}
