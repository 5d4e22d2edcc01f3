// Whole vectors: whether all is finite, what settles them after the fact, and permutations by a key.
#include "common.cuh"

#define HUGE_VALUE 0x7f7fffffu

extern "C" __global__ void not_finite(const float* x, i64 n, u8* finite) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    bool bad = false;
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < n; i += 8 * stride) {
        u32 bits[8];
#pragma unroll
        for (int a = 0; a < 8; ++a) bits[a] = __float_as_uint(x[i + a * stride]);
#pragma unroll
        for (int a = 0; a < 8; ++a) bad |= (bits[a] & 0x7f800000u) == 0x7f800000u;
    }
    for (; i < n; i += stride) bad |= (__float_as_uint(x[i]) & 0x7f800000u) == 0x7f800000u;
    if (bad) *finite = 0;
}

// Nothing where the flag is set and the factor, if there is one, is 1.
extern "C" __global__ void settle(float* values, i64 n, const u8* good, const float* factor, i64 given) {
    const float by = given ? *factor : 1.0f;
    const bool fine = *good != 0;
    if (fine && by == 1.0f) return;
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        const u32 bits = __float_as_uint(__fmul_rn(values[i], by)), limit = (bits & 0x80000000u) | HUGE_VALUE;
        values[i] = __uint_as_float(!fine ? 0x7fc00000u : (bits & 0x7fffffffu) == 0x7f800000u ? limit : bits);
    }
}

// Bytes as they were, unless the flag is set.
extern "C" __global__ void revert(u8* now, i64 nbytes, const u8* good, const u8* before) {
    if (*good) return;
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < nbytes; i += stride) now[i] = before[i];
}

// ---- permutations: a network of rounds on the bits of a number, walked until it lies within the vector ----

struct Permutation {
    u32 key[6];
    i64 rotation, n;
    int left_bits, right_bits;
    __device__ static u32 mix(u32 h) {
        h ^= h >> 16;
        h *= 0x7feb352du;
        h ^= h >> 15;
        h *= 0x846ca68bu;
        return h ^ h >> 16;
    }
    __device__ i64 operator()(i64 j) const {
        const u64 left = ((u64)1 << left_bits) - 1, right = ((u64)1 << right_bits) - 1;
        u64 v = (u64)j;
        do {
            u64 a = v >> right_bits, b = v & right;
            for (int r = 0; r < 6; r += 2) {
                a ^= mix((u32)b + key[r]) & left;
                b ^= mix((u32)a + key[r + 1]) & right;
            }
            v = a << right_bits | b;
        } while ((i64)v >= n);
        const i64 turned = (i64)v + rotation;
        return turned >= n ? turned - n : turned;
    }
};

enum { GATHER = 1, SCATTER, SCATTER_ADD };

// For position j of `count`: x at its image into values, or values into x there.
extern "C" __global__ void permuted(
    i64 what, i64 k0, i64 k1, i64 k2, i64 k3, i64 k4, i64 k5, i64 rotation, i64 n, i64 bits, i64 count, float weight, float* values, float* x
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count) return;
    const Permutation image = {{(u32)k0, (u32)k1, (u32)k2, (u32)k3, (u32)k4, (u32)k5}, rotation, n, (int)bits / 2, (int)(bits - bits / 2)};
    const i64 i = image(j);
    if (what == GATHER) values[j] = x[i];
    else if (what == SCATTER) x[i] = values[j];
    else x[i] = __fadd_rn(x[i], __fmul_rn(values[j], weight));
}
