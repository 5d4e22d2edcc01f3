#include <immintrin.h>

#include "dither_loops.hpp"

namespace tersegrad::dither::detail {
namespace {

struct Sums {
    __m512d dot[4], energy[4], norm[4];
};

// Sixteen levels; `half` chooses the two of four accumulators, so that coordinate i adds to lane i % 32.
template <bool random>
inline __m128i sixteen(__m512 x, __m512 inverse, const std::uint16_t* draws, int half, Sums& s, __m512i& top) {
    __m512i k;
    if constexpr (random) {
        const __m512 y = _mm512_mul_ps(_mm512_abs_ps(x), inverse);
        const __m512 whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        const __m512i part = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(y, whole), _mm512_set1_ps(65536.0f)));
        const __m512i draw = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(draws)));
        k = _mm512_add_epi32(_mm512_cvttps_epi32(whole), _mm512_srli_epi32(_mm512_add_epi32(part, draw), 16));
        top = _mm512_max_epu32(top, k);
        k = _mm512_mask_sub_epi32(k, _mm512_movepi32_mask(_mm512_castps_si512(x)), _mm512_setzero_si512(), k);
    } else {
        k = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
        top = _mm512_max_epu32(top, _mm512_abs_epi32(k));
    }
    const __m512d xl = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), xh = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    const __m512d kl = _mm512_cvtepi32_pd(_mm512_castsi512_si256(k)), kh = _mm512_cvtepi32_pd(_mm512_extracti32x8_epi32(k, 1));
    // Products of a float32 and an integer below 2^29 are exact in float64, so fusing changes nothing.
    s.dot[half] = _mm512_fmadd_pd(xl, kl, s.dot[half]);
    s.dot[half + 1] = _mm512_fmadd_pd(xh, kh, s.dot[half + 1]);
    s.energy[half] = _mm512_fmadd_pd(kl, kl, s.energy[half]);
    s.energy[half + 1] = _mm512_fmadd_pd(kh, kh, s.energy[half + 1]);
    s.norm[half] = _mm512_fmadd_pd(xl, xl, s.norm[half]);
    s.norm[half + 1] = _mm512_fmadd_pd(xh, xh, s.norm[half + 1]);
    return _mm512_cvtsepi32_epi8(k);
}

void norm_avx512(const float* x, std::size_t n, double* lanes) {
    __m512d sum[4];
    for (int j = 0; j < 4; ++j) sum[j] = _mm512_loadu_pd(lanes + 8 * j);
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(x + i + 1536), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(x + i + 1552), _MM_HINT_T0);
        for (int j = 0; j < 4; ++j) {
            const __m512d v = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8 * j));
            sum[j] = _mm512_fmadd_pd(v, v, sum[j]);  // the square of a float32 is exact in float64
        }
    }
    for (int j = 0; j < 4; ++j) _mm512_storeu_pd(lanes + 8 * j, sum[j]);
    norm_plain(x + i, n - i, lanes);
}

template <bool random>
std::size_t sweep(const float* x, std::size_t n, float inverse, const std::uint16_t* draws, std::int8_t* out, double* lanes,
                  Moments& m) {
    Sums s;
    for (int j = 0; j < 4; ++j) {
        s.dot[j] = _mm512_loadu_pd(lanes + 8 * j);
        s.energy[j] = _mm512_loadu_pd(lanes + 32 + 8 * j);
        s.norm[j] = _mm512_loadu_pd(lanes + 64 + 8 * j);
    }
    const __m512 inv = _mm512_set1_ps(inverse);
    __m512i top = _mm512_setzero_si512();
    std::size_t above15 = 0, above31 = 0, i = 0;
    const __m512i most = _mm512_set1_epi8(-127);
    for (; i + 64 <= n; i += 64) {
        __m128i part[4];
        for (int j = 0; j < 4; ++j) {
            _mm_prefetch(reinterpret_cast<const char*>(x + i + 16 * j + 1024), _MM_HINT_T0);
            part[j] = sixteen<random>(_mm512_loadu_ps(x + i + 16 * j), inv, random ? draws + i + 16 * j : nullptr, 2 * (j & 1), s, top);
        }
        __m512i k = _mm512_inserti32x4(_mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(part[0]), part[1], 1), part[2], 2), part[3], 3);
        k = _mm512_max_epi8(k, most);
        const __m512i size = _mm512_abs_epi8(k);
        above15 += static_cast<std::size_t>(__builtin_popcountll(_mm512_cmpgt_epi8_mask(size, _mm512_set1_epi8(15))));
        above31 += static_cast<std::size_t>(__builtin_popcountll(_mm512_cmpgt_epi8_mask(size, _mm512_set1_epi8(31))));
        _mm512_storeu_si512(out + i, k);
    }
    for (int j = 0; j < 4; ++j) {
        _mm512_storeu_pd(lanes + 8 * j, s.dot[j]);
        _mm512_storeu_pd(lanes + 32 + 8 * j, s.energy[j]);
        _mm512_storeu_pd(lanes + 64 + 8 * j, s.norm[j]);
    }
    m.top = std::max(m.top, _mm512_reduce_max_epu32(top));
    m.above15 += above15;
    m.above31 += above31;
    return i;
}

void quantise_avx512(const float* x, std::size_t n, float inverse, const std::uint16_t* draws, std::int8_t* out, double* lanes,
                     Moments& m) {
    const std::size_t done = draws ? sweep<true>(x, n, inverse, draws, out, lanes, m) : sweep<false>(x, n, inverse, draws, out, lanes, m);
    if (done < n) quantise_plain(x + done, n - done, inverse, draws ? draws + done : nullptr, out + done, lanes, m);
}

template <bool add>
void scale_any(const std::uint8_t* symbols, std::size_t n, int window, float step, float weight, float* out) {
    const __m512 s = _mm512_set1_ps(step), w = _mm512_set1_ps(weight), most = _mm512_set1_ps(FLT_MAX), least = _mm512_set1_ps(-FLT_MAX);
    const __m512i offset = _mm512_set1_epi32(window);
    std::size_t i = 0;
    const bool stream = !add && n >= 65536;
    if (stream)
        for (; i < n && (reinterpret_cast<std::uintptr_t>(out + i) & 63); ++i)
            out[i] = limited(static_cast<float>(static_cast<int>(symbols[i]) - window) * step);
    for (; i + 16 <= n; i += 16) {
        const __m512i k = _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols + i))), offset);
        const __m512 v = _mm512_max_ps(_mm512_min_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(k), s), most), least);
        if constexpr (add) _mm512_storeu_ps(out + i, _mm512_add_ps(_mm512_loadu_ps(out + i), _mm512_mul_ps(w, v)));
        else if (stream) _mm512_stream_ps(out + i, v);
        else _mm512_storeu_ps(out + i, v);
    }
    if (stream) _mm_sfence();
    if constexpr (add) scale_add_plain(symbols + i, n - i, window, step, weight, out + i);
    else scale_plain(symbols + i, n - i, window, step, out + i);
}

void scale_avx512(const std::uint8_t* symbols, std::size_t n, int window, float step, float* out) {
    scale_any<false>(symbols, n, window, step, 1.0f, out);
}
void scale_add_avx512(const std::uint8_t* symbols, std::size_t n, int window, float step, float weight, float* out) {
    scale_any<true>(symbols, n, window, step, weight, out);
}

}  // namespace

const Implementation avx512 = {norm_avx512, quantise_avx512, shift_plain, scale_avx512, scale_add_avx512};

}  // namespace tersegrad::dither::detail
