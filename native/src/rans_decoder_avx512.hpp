// The AVX-512 decoder of rANS in pieces, for loops that do something with the symbols while they are in registers.
// Only for files that are compiled with those instructions.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside GCC 12's intrinsics (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <bit>

#include "tersegrad/rans.hpp"

namespace tersegrad::rans::detail {
namespace {

// ---- decoder: 64 states in two planes (low and high words) of two halves ----
// A symbol number sits in both bytes of its word, so that one masked permute each fetches the low and the high byte of an entry.
struct Half {
    __m512i low, high;
};

struct Tables {
    __m512i coarse, start_low, start_high, scaled_low, scaled_high;
    void load(const Images& image) {
        coarse = _mm512_load_si512(image.coarse);
        start_low = _mm512_load_si512(image.start_low);
        start_high = _mm512_load_si512(image.start_high);
        scaled_low = _mm512_load_si512(image.scaled_low);
        scaled_high = _mm512_load_si512(image.scaled_high);
    }
};

constexpr __mmask64 kOddBytes = 0xaaaaaaaaaaaaaaaa;

[[gnu::always_inline]] inline __m512i entry(__m512i index, __m512i low, __m512i high) {
    return _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(index, low), kOddBytes, index, high);
}

// Finds the symbol (in both bytes) and takes it out of the state; what remains may be below 2^16.
template <int L, bool Full>
[[gnu::always_inline]] inline __m512i take(Half& x, const Tables& t, __m512i symbol) {
    const __m512i slot = _mm512_and_si512(x.low, _mm512_set1_epi16(0x0fff));
#pragma GCC unroll 6
    for (int k = L - 1; k >= 0; --k) {
        const __m512i probe = _mm512_add_epi8(symbol, _mm512_set1_epi8(static_cast<char>(1 << k)));
        const __mmask32 reached = _mm512_cmple_epu16_mask(entry(probe, t.start_low, t.start_high), slot);
        symbol = _mm512_mask_mov_epi16(symbol, reached, probe);
    }
    const __m512i scaled = entry(symbol, t.scaled_low, t.scaled_high);  // 16 f
    const __m512i start = entry(symbol, t.start_low, t.start_high);
    const __m512i top = _mm512_andnot_si512(_mm512_set1_epi16(0x0fff), x.low);
    // f * (X >> 12) = 16f * high + f * (low >> 12); the second part plus slot - start fits 16 bits.
    const __m512i rest = _mm512_add_epi16(_mm512_mulhi_epu16(scaled, top), _mm512_sub_epi16(slot, start));
    const __m512i low = _mm512_add_epi16(_mm512_mullo_epi16(scaled, x.high), rest);
    const __m512i high = _mm512_mulhi_epu16(scaled, x.high);
    const __mmask32 carry = _mm512_cmplt_epu16_mask(low, rest);
    if constexpr (Full) {
        const __mmask32 moves = _mm512_test_epi16_mask(scaled, scaled);
        x.high = _mm512_mask_mov_epi16(x.high, moves, _mm512_mask_sub_epi16(high, carry, high, _mm512_set1_epi16(-1)));
        x.low = _mm512_mask_mov_epi16(x.low, moves, low);
    } else {
        x.high = _mm512_mask_sub_epi16(high, carry, high, _mm512_set1_epi16(-1));
        x.low = low;
    }
    return symbol;
}

[[gnu::always_inline]] inline void refill(Half& x, const std::uint8_t*& words) {
    const __mmask32 empty = _mm512_testn_epi16_mask(x.high, x.high);
    x.high = _mm512_mask_mov_epi16(x.high, empty, x.low);
    x.low = _mm512_mask_expand_epi16(x.low, empty, _mm512_loadu_si512(words));
    words += 2 * std::popcount(static_cast<std::uint32_t>(empty));
}

[[gnu::always_inline]] inline __m512i coarse_symbol(const Half& x, const Tables& t) {
    const __m512i both = _mm512_ternarylogic_epi64(_mm512_set1_epi16(0x00ff), _mm512_srli_epi16(x.low, 6), _mm512_slli_epi16(x.low, 2), 0xca);
    return _mm512_permutexvar_epi8(both, t.coarse);
}

inline void store_symbols(std::uint8_t* out, __m512i a, __m512i b, __m512i order, bool stream) {
    // Both bytes of a word are the symbol: take the even bytes of a and of b.
    const __m512i symbols = _mm512_permutex2var_epi8(a, order, b);
    if (stream) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), symbols);
    else _mm512_storeu_si512(out, symbols);
}

struct Lane {  // one chunk in registers
    Half a, b;
    const std::uint8_t *words, *limit;
    std::uint8_t* symbols;
    const std::uint8_t* contexts;
    std::size_t step, steps;
    bool stream;

    explicit Lane(const Cursor& c)
        : words(c.words), limit(c.limit), symbols(c.symbols + c.step * kLanes), step(c.step), steps(c.steps), stream(c.stream) {
        contexts = c.contexts.at(c.step * kLanes).data;
        split(c.states, a);
        split(c.states + 32, b);
    }
    void back(Cursor& c) const {
        join(a, c.states);
        join(b, c.states + 32);
        c.words = words;
        c.step = step;
    }
    bool ready() const { return step < steps && words <= limit; }

    static void split(const std::uint32_t* states, Half& h) {
        alignas(64) std::uint16_t low[32], high[32];
        for (int k = 0; k < 32; ++k) low[k] = static_cast<std::uint16_t>(states[k]), high[k] = static_cast<std::uint16_t>(states[k] >> 16);
        h.low = _mm512_load_si512(low);
        h.high = _mm512_load_si512(high);
    }
    static void join(const Half& h, std::uint32_t* states) {
        alignas(64) std::uint16_t low[32], high[32];
        _mm512_store_si512(low, h.low);
        _mm512_store_si512(high, h.high);
        for (int k = 0; k < 32; ++k) states[k] = static_cast<std::uint32_t>(high[k]) << 16 | low[k];
    }
};

inline __m512i even_bytes() {
    alignas(64) std::uint8_t bytes[64];
    for (int k = 0; k < 64; ++k) bytes[k] = static_cast<std::uint8_t>(k < 32 ? 2 * k : 64 + 2 * (k - 32));
    return _mm512_load_si512(bytes);
}

}  // namespace
}  // namespace tersegrad::rans::detail
