// What the bytes mean that are coded with one table: symbols, levels, exponents, or folded levels.
#include "common.cuh"
#include "rans_tables.cuh"

// Levels are symbols minus `shift`. Of exponents 0 is symbol 0, and the least of the others symbol 1. Folded levels are symbols: twice the
// magnitude, plus 1 below zero.
enum { SYMBOLS, LEVELS, EXPONENTS, FOLDED };

struct Meaning {
    int means;
    // Is added to a byte, but not to exponents that are 0.
    u32 shift;
    __device__ __forceinline__ u32 symbol(u32 byte) const { return means == EXPONENTS && !byte ? 0 : (byte + shift) & 255; }
    __device__ __forceinline__ u32 byte(u32 symbol) const { return means == EXPONENTS && !symbol ? 0 : (symbol - shift) & 255; }
};

// The same where the range of exponents is known.
__device__ __forceinline__ Meaning meaning_of(i64 means, i64 shift, const i64* head) {
    return {(int)means, means == EXPONENTS ? (u32)(1 - head[LEAST_OF]) : (u32)shift};
}
