#include <immintrin.h>

// GCC 12 takes its own "undefined" operands for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "bits_codes.hpp"

namespace tersegrad::bits {
namespace {

using V = __m512i;

TERSEGRAD_INLINE V set64(u64 x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
TERSEGRAD_INLINE V select(u64 m, V x, V y) { return _mm512_ternarylogic_epi64(set64(m), x, y, 0xca); }
TERSEGRAD_INLINE V table(const std::array<u8, 64>& bytes) { return _mm512_loadu_si512(bytes.data()); }

// Lanes of S bytes whose first W bytes are put one after another, and the reverse.
template <unsigned W, unsigned S>
constexpr auto join_bytes() {
    std::array<u8, 64> index{};
    for (unsigned j = 0; j < 64; ++j) index[j] = static_cast<u8>((j / W * S + j % W) % 64);
    return index;
}
template <unsigned W, unsigned S>
constexpr auto split_bytes() {
    std::array<u8, 64> index{};
    for (unsigned j = 0; j < 64; ++j) index[j] = static_cast<u8>(j / S * W + j % S);
    return index;
}

template <unsigned W>
void pack8_avx512(const u8* codes, std::size_t count, u8* out) {
    static constexpr auto join = join_bytes<W, 8>();
    const V permutation = table(join);
    std::size_t i = 0;
    for (; i + 64 <= count; i += 64, out += 8 * W) {
        V x = _mm512_loadu_si512(codes + i);
        if constexpr (W == 1) {
            store64(out, _mm512_test_epi8_mask(x, _mm512_set1_epi8(1)));
        } else {
            // What lies above the bits of interest is never selected.
            x = select(lanes(mask(W), 16), x, _mm512_srli_epi64(x, 8 - W));
            x = select(lanes(mask(2 * W), 32), x, _mm512_srli_epi64(x, 16 - 2 * W));
            x = select(mask(4 * W), x, _mm512_srli_epi64(x, 32 - 4 * W));
            _mm512_mask_storeu_epi8(out, mask(8 * W), _mm512_permutexvar_epi8(permutation, x));
        }
    }
    pack8<W>(codes + i, count - i, out);
}

template <unsigned W>
void unpack8_avx512(const u8* data, std::size_t count, u8* out) {
    static constexpr auto split = split_bytes<W, 8>();
    const V permutation = table(split);
    const V shifts = set64(u64{W} << 8 | u64{2 * W} << 16 | u64{3 * W} << 24 | u64{4 * W} << 32 | u64{5 * W} << 40 | u64{6 * W} << 48 |
                           u64{7 * W} << 56);
    const V low = _mm512_set1_epi8(static_cast<char>(mask(W)));
    std::size_t i = 0;
    for (; i + 64 <= count; i += 64, data += 8 * W) {
        const V x = _mm512_permutexvar_epi8(permutation, _mm512_maskz_loadu_epi8(mask(8 * W), data));
        _mm512_storeu_si512(out + i, _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, x), low));
    }
    unpack8<W>(data, count - i, out + i);
}

template <unsigned W>
void pack32_avx512(const i32* codes, std::size_t count, u8* out) {
    static constexpr auto join = join_bytes<W, 16>();
    static constexpr auto low_halves = [] {
        std::array<std::uint16_t, 32> index{};
        for (unsigned j = 0; j < 32; ++j) index[j] = static_cast<std::uint16_t>(2 * j);
        return index;
    }();
    const V permutation = table(join), halves = _mm512_loadu_si512(low_halves.data());
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32, out += 4 * W) {
        V x = _mm512_permutex2var_epi16(_mm512_loadu_si512(codes + i), halves, _mm512_loadu_si512(codes + i + 16));
        x = select(lanes(mask(W), 32), x, _mm512_srli_epi64(x, 16 - W));
        x = select(mask(2 * W), x, _mm512_srli_epi64(x, 32 - 2 * W));
        x = _mm512_and_si512(x, set64(mask(4 * W)));
        // The second word of each pair continues at bit 4 W of the first.
        const V second = _mm512_unpackhi_epi64(x, x);
        const V high = _mm512_maskz_srli_epi64(0xaa, second, 64 - 4 * W);
        x = _mm512_mask_or_epi64(high, 0x55, x, _mm512_slli_epi64(second, 4 * W));
        _mm512_mask_storeu_epi8(out, mask(4 * W), _mm512_permutexvar_epi8(permutation, x));
    }
    pack32<W>(codes + i, count - i, out);
}

// Code i of sixteen lies within the four bytes from byte i W / 8 on.
template <unsigned W>
void unpack32_avx512(const u8* data, std::size_t count, i32* out) {
    static constexpr auto index = [] {
        std::array<u8, 64> all{};
        for (unsigned j = 0; j < 64; ++j) all[j] = static_cast<u8>(j / 4 * W / 8 + j % 4);
        return all;
    }();
    static constexpr auto shift = [] {
        std::array<i32, 16> all{};
        for (unsigned i = 0; i < 16; ++i) all[i] = i * W % 8;
        return all;
    }();
    const V permutation = table(index), shifts = _mm512_loadu_si512(shift.data()), low = _mm512_set1_epi32(static_cast<int>(mask(W)));
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16, data += 2 * W) {
        const V x = _mm512_permutexvar_epi8(permutation, _mm512_maskz_loadu_epi8(mask(2 * W), data));
        _mm512_storeu_si512(out + i, _mm512_and_si512(_mm512_srlv_epi32(x, shifts), low));
    }
    unpack32<W>(data, count - i, out + i);
}

template <unsigned... W>
constexpr void vectors8(Implementation& t, std::integer_sequence<unsigned, W...>) {
    ((t.pack8[W + 1] = pack8_avx512<W + 1>, t.unpack8[W + 1] = unpack8_avx512<W + 1>), ...);
}
template <unsigned... W>
constexpr void vectors32(Implementation& t, std::integer_sequence<unsigned, W...>) {
    ((t.pack32[W + 9] = pack32_avx512<W + 9>, t.unpack32[W + 9] = unpack32_avx512<W + 9>), ...);
}

constexpr Implementation implementation() {
    Implementation t = scalar_implementation();
    vectors8(t, std::make_integer_sequence<unsigned, 7>{});
    vectors32(t, std::make_integer_sequence<unsigned, 8>{});
    return t;
}

}  // namespace

const Implementation avx512 = implementation();

}  // namespace tersegrad::bits
