// Exponents of powers of two as symbols for one table, and back: zero stays zero, the least of the others becomes one.
#include "common.cuh"
#include "classes.cuh"

// What is found: 255 minus the least of the others minus one, and the largest; then, for those who ask, the least minus one, the largest, and
// how many symbols there are.
enum { LEAST_FOUND, LARGEST_FOUND, BELOW, LARGEST, ALPHABET };

__device__ __forceinline__ bool at_sixteen(const void* p) { return ((u64)p & 15) == 0; }

// Calls body(first coordinate, sixteen bytes, how many of them count) for all coordinates.
template <class Body>
__device__ __forceinline__ void each_sixteen(const u8* from, i64 n, Body body) {
    const bool aligned = at_sixteen(from);
    const i64 stride = 16 * (i64)gridDim.x * blockDim.x;
    for (i64 i = 16 * ((i64)blockIdx.x * blockDim.x + threadIdx.x); i < n; i += stride) {
        Sixteen held = {};
        const int count = (int)smaller(16, n - i);
        if (aligned && count == 16) held = *(const Sixteen*)(from + i);
        else for (int k = 0; k < count; ++k) held.word[k >> 2] |= (u32)from[i + k] << 8 * (k & 3);
        body(i, held, count);
    }
}

extern "C" __global__ void exponent_range(const u8* exponents, i64 n, i64* found) {
    u32 least = 255, most = 0;
    each_sixteen(exponents, n, [&](i64, const Sixteen& held, int count) {
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const u32 e = held.byte(k), before = e - 1 & 255;  // 255 for zeros, which do not count as the least
            if (k >= count) break;
            least = before < least ? before : least;
            most = e > most ? e : most;
        }
    });
    for (int by = 16; by; by >>= 1) {
        const u32 lower = __shfl_xor_sync(FULL, least, by), higher = __shfl_xor_sync(FULL, most, by);
        least = lower < least ? lower : least;
        most = higher > most ? higher : most;
    }
    if (threadIdx.x & 31) return;
    // They begin as zeros.
    atomicMax((u64*)&found[LEAST_FOUND], (u64)(255 - least));
    atomicMax((u64*)&found[LARGEST_FOUND], (u64)most);
}

extern "C" __global__ void exponent_symbols(const u8* exponents, i64 n, i64* found, u8* symbols) {
    const u32 below = 255 - (u32)found[LEAST_FOUND], most = (u32)found[LARGEST_FOUND];
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        const i64 number = (i64)most - (i64)below + 1;
        found[BELOW] = below, found[LARGEST] = most, found[ALPHABET] = number < 2 ? 2 : number > 256 ? 256 : number;
    }
    const bool aligned = at_sixteen(symbols);
    each_sixteen(exponents, n, [&](i64 i, const Sixteen& held, int count) {
        Sixteen made = {};
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const u32 e = held.byte(k), s = e > below ? e - below : 0;
            made.word[k >> 2] |= s << 8 * (k & 3);
        }
        if (aligned && count == 16) *(Sixteen*)(symbols + i) = made;
        else for (int k = 0; k < count; ++k) symbols[i + k] = (u8)made.byte(k);
    });
}

// In bytes, as all sums of symbols.
extern "C" __global__ void exponent_bytes(const u8* symbols, i64 n, i64 below, u8* exponents) {
    const bool aligned = at_sixteen(exponents);
    each_sixteen(symbols, n, [&](i64 i, const Sixteen& held, int count) {
        Sixteen made = {};
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const u32 s = held.byte(k);
            made.word[k >> 2] |= ((s ? s + (u32)below : 0) & 255) << 8 * (k & 3);
        }
        if (aligned && count == 16) *(Sixteen*)(exponents + i) = made;
        else for (int k = 0; k < count; ++k) exponents[i + k] = (u8)made.byte(k);
    });
}
