#include <immintrin.h>

#include "classes_loops.hpp"

namespace tersegrad::classes::detail {
namespace {

std::uint64_t sum_avx512(const std::uint8_t* levels, std::size_t n, int center) {
    const __m512i c = _mm512_set1_epi8(static_cast<char>(center));
    __m512i sum = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) sum = _mm512_add_epi64(sum, _mm512_sad_epu8(_mm512_loadu_si512(levels + i), c));
    if (i < n) {
        const __mmask64 left = (std::uint64_t{1} << (n - i)) - 1;
        sum = _mm512_add_epi64(sum, _mm512_sad_epu8(_mm512_mask_loadu_epi8(c, left, levels + i), c));
    }
    return static_cast<std::uint64_t>(_mm512_reduce_add_epi64(sum));
}

// Four blocks: in every 64-bit lane an eighth of each one's sum, 16 bits apart.
inline __m512i four_sums(const std::uint8_t* levels, __m512i center) {
    __m512i part[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) part[k] = _mm512_slli_epi64(_mm512_sad_epu8(_mm512_loadu_si512(levels + 64 * k), center), static_cast<unsigned>(16 * k));
    return _mm512_or_si512(_mm512_or_si512(part[0], part[1]), _mm512_or_si512(part[2], part[3]));
}

void block_sums_avx512(const std::uint8_t* levels, std::size_t blocks, int center, std::uint16_t* sums) {
    static_assert(kBlock == 64);
    const __m512i c = _mm512_set1_epi8(static_cast<char>(center));
    std::size_t b = 0;
    for (; b + 8 <= blocks; b += 8) {
        const __m512i x = four_sums(levels + kBlock * b, c), y = four_sums(levels + kBlock * (b + 4), c);
        const __m512i halves = _mm512_add_epi16(_mm512_shuffle_i64x2(x, y, 0x44), _mm512_shuffle_i64x2(x, y, 0xee));
        const __m512i pairs = _mm512_add_epi16(halves, _mm512_shuffle_i64x2(halves, halves, 0xb1));
        const __m512i all = _mm512_add_epi16(pairs, _mm512_bsrli_epi128(pairs, 8));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(sums + b), _mm512_castsi512_si128(all));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(sums + b + 4), _mm512_extracti32x4_epi32(all, 2));
    }
    block_sums_plain(levels + kBlock * b, blocks - b, center, sums + b);
}

}  // namespace

const Implementation avx512 = {sum_avx512, block_sums_avx512, add_plain, raise_plain, extent_plain, from_plain};

}  // namespace tersegrad::classes::detail
