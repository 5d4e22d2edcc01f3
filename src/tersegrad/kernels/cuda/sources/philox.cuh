// Philox-4x32-10 (spec/wire.md, section 3).
#include "common.cuh"

struct Draws {
    u32 step, who, k0, k1;
};

// The four words of block `index` for a purpose.
__device__ __forceinline__ void philox(const Draws& of, u64 index, u32 purpose, u32* w) {
    u32 a = (u32)index, b = purpose << 24 | (u32)(index >> 32), c = of.step, d = of.who, k0 = of.k0, k1 = of.k1;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(0xD2511F53u, a), low0 = 0xD2511F53u * a, high1 = __umulhi(0xCD9E8D57u, c), low1 = 0xCD9E8D57u * c;
        a = high1 ^ b ^ k0;
        b = low1;
        c = high0 ^ d ^ k1;
        d = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    w[0] = a, w[1] = b, w[2] = c, w[3] = d;
}
