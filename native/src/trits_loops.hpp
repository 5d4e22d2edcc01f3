// Five trits to a byte and back, 320 at a time, where the instruction set has byte permutations; else the plain loop does it all.
#pragma once
#include "vec16.hpp"

namespace tersegrad::casts {
namespace {

// The largest of some bytes.
u8 trits_largest(const u8* data, size_t bytes) {
    u8 most = 0;
    for (size_t i = 0; i < bytes; ++i) most = data[i] > most ? data[i] : most;
    return most;
}

// These return how many trits they did; the rest is for the plain loop.
size_t trits_pack(const u8* codes, size_t n, u8* out) {
    size_t i = 0;
#if defined(__AVX512VBMI__)
    // Byte j is t[5j] + 3 t[5j+1] + ... + 81 t[5j+4]: for each digit, pick its 64 trits out of five vectors, in Horner's order.
    __m512i pick[5];
    __mmask64 from[5][5];
    for (int k = 0; k < 5; ++k) {
        u8 at[64];
        for (int v = 0; v < 5; ++v) from[k][v] = 0;
        for (int j = 0; j < 64; ++j) {
            at[j] = static_cast<u8>((5 * j + k) & 63);
            from[k][(5 * j + k) >> 6] |= u64{1} << j;
        }
        pick[k] = _mm512_loadu_si512(at);
    }
    for (; i + 320 <= n; i += 320) {
        __m512i t[5], sum = _mm512_setzero_si512();
        for (int v = 0; v < 5; ++v) t[v] = _mm512_loadu_si512(codes + i + 64 * v);
#pragma GCC unroll 5
        for (int k = 4; k >= 0; --k) {
            __m512i digit = _mm512_permutexvar_epi8(pick[k], t[0]);
#pragma GCC unroll 5
            for (int v = 1; v < 5; ++v) digit = _mm512_mask_permutexvar_epi8(digit, from[k][v], pick[k], t[v]);
            sum = _mm512_add_epi8(_mm512_add_epi8(sum, sum), _mm512_add_epi8(sum, digit));
        }
        _mm512_storeu_si512(out + i / 5, sum);
    }
#else
    (void)codes, (void)n, (void)out;
#endif
    return i;
}

size_t trits_unpack(const u8* data, size_t n, u8* codes, u32& largest_byte) {
    size_t i = 0;
#if defined(__AVX512VBMI__)
    // Digit k of b is the integer part of 3 frac(b / 3^(k+1)), exact in 16 bits of fraction for b <= 242.
    __m512i pick[10], inverse[10];
    for (int v = 0; v < 10; ++v) {
        u16 at[32], by[32];
        static constexpr u16 inverses[5] = {21846, 7282, 2428, 810, 270};
        for (int j = 0; j < 32; ++j) {
            at[j] = static_cast<u16>((32 * v + j) / 5);
            by[j] = inverses[(32 * v + j) % 5];
        }
        pick[v] = _mm512_loadu_si512(at);
        inverse[v] = _mm512_loadu_si512(by);
    }
    const __m512i three = _mm512_set1_epi16(3);
    __m512i most = _mm512_setzero_si512();
    for (; i + 320 <= n; i += 320) {
        const __m512i b = _mm512_loadu_si512(data + i / 5);
        most = _mm512_max_epu8(most, b);
#pragma GCC unroll 10
        for (int v = 0; v < 10; ++v) {
            const __m512i wide = _mm512_maskz_permutexvar_epi8(0x5555555555555555u, pick[v], b);
            const __m512i digit = _mm512_mulhi_epu16(_mm512_mullo_epi16(wide, inverse[v]), three);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i + 32 * v), _mm512_cvtepi16_epi8(digit));
        }
    }
    u8 bytes[64];
    _mm512_storeu_si512(bytes, most);
    for (u8 b : bytes) largest_byte = b > largest_byte ? b : largest_byte;
#else
    (void)data, (void)n, (void)codes, (void)largest_byte;
#endif
    return i;
}

}  // namespace
}  // namespace tersegrad::casts
