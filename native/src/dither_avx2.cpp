#include <immintrin.h>

#include "dither_loops.hpp"

namespace tersegrad::dither::detail {
namespace {

void norm_avx2(const float* x, std::size_t n, const char* ahead, double* lanes) {
    __m256d sum[8];
    for (int j = 0; j < 8; ++j) sum[j] = _mm256_loadu_pd(lanes + 4 * j);
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        _mm_prefetch(ahead + i, _MM_HINT_T1);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m256d v = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * j));
            sum[j] = _mm256_add_pd(sum[j], _mm256_mul_pd(v, v));
        }
    }
    for (int j = 0; j < 8; ++j) _mm256_storeu_pd(lanes + 4 * j, sum[j]);
    norm_plain(x + i, n - i, nullptr, lanes);
}

// 32 int32 saturated to bytes of at most +-127, in order.
inline __m256i narrow(const __m256i k[4]) {
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(k[0], k[1]), _mm256_packs_epi32(k[2], k[3]));
    return _mm256_max_epi8(_mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), _mm256_set1_epi8(-127));
}

inline __m256i bias() { return _mm256_set1_epi8(kBias); }

inline std::uint32_t largest_byte(__m256i v) {
    alignas(32) std::uint8_t bytes[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), v);
    return *std::max_element(bytes, bytes + 32);
}

inline std::int64_t sum_of(__m256i v) {
    alignas(32) std::int32_t words[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), v);
    std::int64_t sum = 0;
    for (const std::int32_t w : words) sum += w;
    return sum;
}

void quick_avx2(const float* x, std::size_t n, float inverse, const char* ahead, std::uint8_t* out, Quick& sums) {
    const __m256 inv = _mm256_set1_ps(inverse);
    __m256 dot[8];
    for (int j = 0; j < 8; ++j) dot[j] = _mm256_loadu_ps(sums.dot + 8 * j);
    __m256i energy = _mm256_setzero_si256(), top = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        _mm_prefetch(ahead + 2 * i, _MM_HINT_T1);
        _mm_prefetch(ahead + 2 * i + 64, _MM_HINT_T1);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            __m256i k[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i + 32 * static_cast<std::size_t>(half) + 8 * static_cast<std::size_t>(j)), inv);
                k[j] = _mm256_cvtps_epi32(y);
                dot[4 * half + j] = _mm256_add_ps(dot[4 * half + j], _mm256_mul_ps(y, _mm256_cvtepi32_ps(k[j])));
            }
            const __m256i bytes = narrow(k), size = _mm256_abs_epi8(bytes);
            top = _mm256_max_epu8(top, size);
            energy = _mm256_add_epi32(energy, _mm256_madd_epi16(_mm256_maddubs_epi16(size, size), _mm256_set1_epi16(1)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + 32 * static_cast<std::size_t>(half)), _mm256_add_epi8(bytes, bias()));
        }
    }
    for (int j = 0; j < 8; ++j) _mm256_storeu_ps(sums.dot + 8 * j, dot[j]);
    sums.energy += sum_of(energy);
    sums.top = std::max(sums.top, largest_byte(top));
    if (i < n) quick_plain(x + i, n - i, inverse, nullptr, out + i, sums);
}

void exact_avx2(const float* x, std::size_t n, float inverse, const char* ahead, std::uint8_t* out, double* lanes, std::uint32_t& top) {
    const __m256 inv = _mm256_set1_ps(inverse);
    __m256i most = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        _mm_prefetch(ahead + 4 * i, _MM_HINT_T1);
        __m256i k[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m256 v = _mm256_loadu_ps(x + i + 8 * static_cast<std::size_t>(j));
            k[j] = _mm256_cvtps_epi32(_mm256_mul_ps(v, inv));
            most = _mm256_max_epu32(most, _mm256_abs_epi32(k[j]));
            const __m256d xs[2] = {_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))};
            const __m256d ks[2] = {_mm256_cvtepi32_pd(_mm256_castsi256_si128(k[j])), _mm256_cvtepi32_pd(_mm256_extracti128_si256(k[j], 1))};
            for (int h = 0; h < 2; ++h) {
                double* lane = lanes + 8 * j + 4 * h;
                _mm256_storeu_pd(lane, _mm256_add_pd(_mm256_loadu_pd(lane), _mm256_mul_pd(xs[h], ks[h])));
                _mm256_storeu_pd(lane + 32, _mm256_add_pd(_mm256_loadu_pd(lane + 32), _mm256_mul_pd(ks[h], ks[h])));
                _mm256_storeu_pd(lane + 64, _mm256_add_pd(_mm256_loadu_pd(lane + 64), _mm256_mul_pd(xs[h], xs[h])));
            }
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_add_epi8(narrow(k), bias()));
    }
    alignas(32) std::uint32_t words[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), most);
    for (const std::uint32_t w : words) top = std::max(top, w);
    if (i < n) exact_plain(x + i, n - i, inverse, nullptr, out + i, lanes, top);
}

void random_avx2(const float* x, std::size_t n, float inverse, const std::uint16_t* draws, const char* ahead, std::uint8_t* out,
                 std::uint32_t& top) {
    const __m256 inv = _mm256_set1_ps(inverse);
    __m256i most = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        _mm_prefetch(ahead + 2 * i, _MM_HINT_T1);
        __m256i k[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const std::size_t at = i + 8 * static_cast<std::size_t>(j);
            const __m256 v = _mm256_loadu_ps(x + at);
            const __m256 y = _mm256_mul_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), inv);
            const __m256i whole = _mm256_cvttps_epi32(y);
            const __m256 part = _mm256_mul_ps(_mm256_sub_ps(y, _mm256_cvtepi32_ps(whole)), _mm256_set1_ps(65536.0f));
            const __m256i draw = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(draws + at)));
            const __m256i size = _mm256_add_epi32(whole, _mm256_srli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(part), draw), 16));
            const __m256i sign = _mm256_srai_epi32(_mm256_castps_si256(v), 31);
            k[j] = _mm256_sub_epi32(_mm256_xor_si256(size, sign), sign);
        }
        const __m256i bytes = narrow(k);
        most = _mm256_max_epu8(most, _mm256_abs_epi8(bytes));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_add_epi8(bytes, bias()));
    }
    top = std::max(top, largest_byte(most));
    if (i < n) random_plain(x + i, n - i, inverse, draws + i, nullptr, out + i, top);
}

void lower_avx2(const float* x, std::size_t n, float inverse, const std::uint8_t* contexts, const Least& least, int center, std::uint8_t* k,
                Less& less) {
    const __m256 inv = _mm256_set1_ps(inverse), unsigned_part = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256i middle = _mm256_set1_epi32(center), most = _mm256_set1_epi32(kLowered + 1), one = _mm256_set1_epi32(1);
    __m256i energy = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i lower[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const std::size_t at = i + 8 * static_cast<std::size_t>(j);
            const __m256 v = _mm256_loadu_ps(x + at), y = _mm256_and_ps(_mm256_mul_ps(v, inv), unsigned_part);
            const __m256i level = _mm256_sub_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(k + at))), middle);
            const __m256i size = _mm256_abs_epi32(level);
            __m256i entry = _mm256_min_epi32(size, most);
            if (contexts)
                entry = _mm256_add_epi32(entry, _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(contexts + at))), 4));
            const __m256 down = _mm256_cmp_ps(y, _mm256_i32gather_ps(&least.of[0][0], entry, 4), _CMP_LT_OQ);
            const __m256i sign = _mm256_or_si256(_mm256_srai_epi32(level, 31), one), mask = _mm256_castps_si256(down);
            // Without the center bytes keep their sign.
            lower[j] = _mm256_add_epi32(_mm256_sub_epi32(level, _mm256_and_si256(sign, mask)), _mm256_set1_epi32(center - 128));
            const __m256 off = _mm256_and_ps(_mm256_and_ps(v, unsigned_part), down);
            double* const lane = less.dot + 8 * j;
            _mm256_storeu_pd(lane, _mm256_add_pd(_mm256_loadu_pd(lane), _mm256_cvtps_pd(_mm256_castps256_ps128(off))));
            _mm256_storeu_pd(lane + 4, _mm256_add_pd(_mm256_loadu_pd(lane + 4), _mm256_cvtps_pd(_mm256_extractf128_ps(off, 1))));
            energy = _mm256_add_epi32(energy, _mm256_and_si256(_mm256_sub_epi32(_mm256_add_epi32(size, size), one), mask));
        }
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(lower[0], lower[1]), _mm256_packs_epi32(lower[2], lower[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(k + i),
                            _mm256_xor_si256(_mm256_permutevar8x32_epi32(bytes, order), _mm256_set1_epi8(static_cast<char>(0x80))));
    }
    less.energy += sum_of(energy);
    lower_plain(x + i, n - i, inverse, contexts ? contexts + i : nullptr, least, center, k + i, less);
}

std::size_t above_avx2(const std::uint8_t* k, std::size_t n, int limit) {
    const __m256i most = _mm256_set1_epi8(static_cast<char>(limit));
    std::size_t i = 0, count = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i size = _mm256_abs_epi8(_mm256_sub_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(k + i)), bias()));
        count += static_cast<std::size_t>(__builtin_popcount(static_cast<unsigned>(_mm256_movemask_epi8(_mm256_cmpgt_epi8(size, most)))));
    }
    return count + above_plain(k + i, n - i, limit);
}

std::size_t ends_avx2(const std::uint8_t* symbols, std::size_t n, std::uint8_t last, std::uint16_t* at) {
    const __m256i end = _mm256_set1_epi8(static_cast<char>(last));
    std::size_t i = 0, count = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i s = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbols + i));
        const __m256i hit = _mm256_or_si256(_mm256_cmpeq_epi8(s, end), _mm256_cmpeq_epi8(s, _mm256_setzero_si256()));
        for (auto hits = static_cast<unsigned>(_mm256_movemask_epi8(hit)); hits; hits &= hits - 1)
            at[count++] = static_cast<std::uint16_t>(i + static_cast<std::size_t>(__builtin_ctz(hits)));
    }
    for (; i < n; ++i)
        if (symbols[i] == 0 || symbols[i] == last) at[count++] = static_cast<std::uint16_t>(i);
    return count;
}

}  // namespace

const Implementation avx2 = {norm_avx2,   quick_avx2, exact_avx2,  random_avx2, above_avx2,
                             shift_plain, ends_avx2,  scale_plain, leave_plain, lower_avx2, nullptr};

}  // namespace tersegrad::dither::detail
