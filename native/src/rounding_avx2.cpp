// AVX2 with BMI2: the same steps as AVX-512 in narrower registers; codes are packed and unpacked eight at a time by pext, pdep.
#include <immintrin.h>

#include "philox_loops.hpp"
#include "rounding_ops.hpp"

namespace tersegrad::rounding {
namespace {

inline void ahead(const float* x) { _mm_prefetch(reinterpret_cast<const char*>(x + kAhead), _MM_HINT_T0); }

struct Avx2 {
    static constexpr bool kFused = false;

    static void draws(const Stream& stream, std::uint64_t block, std::size_t groups, std::uint16_t* out, std::uintptr_t next) {
        Draws source(stream, block);
        for (std::size_t g = 0; g < groups; ++g, out += 64, next += 256) {
            for (unsigned line = 0; line < 4; ++line) _mm_prefetch(reinterpret_cast<const char*>(next + 64 * line), _MM_HINT_T0);
            source.next(out);
        }
    }

    template <Sum S, bool Fetch>
    static double sum(const float* x, std::size_t n) {
        alignas(32) float tail[32] = {};
        __m256d s[8] = {};
        const __m256d magnitude = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7fffffffffffffff));
        for (std::size_t i = 0; i < n; i += 32) {
            const float* row = x + i;
            if (n - i < 32) {
                std::memcpy(tail, row, 4 * (n - i));
                row = tail;
            } else if (Fetch) {
                ahead(row);
                ahead(row + 16);
            }
#pragma GCC unroll 8
            for (int q = 0; q < 8; ++q) {
                const __m256d d = _mm256_cvtps_pd(_mm_loadu_ps(row + 4 * q));
                s[q] = _mm256_add_pd(s[q], S == Sum::squares ? _mm256_mul_pd(d, d) : _mm256_and_pd(d, magnitude));
            }
        }
        for (int half = 4; half >= 1; half /= 2)
            for (int q = 0; q < half; ++q) s[q] = _mm256_add_pd(s[q], s[q + half]);
        const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(s[0]), _mm256_extractf128_pd(s[0], 1));
        return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }

    template <bool Fetch>
    static std::uint32_t abs_max(const float* x, std::size_t n) {
        const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
        __m256i a = _mm256_setzero_si256(), b = a;
        std::size_t i = 0;
        for (; i + 16 <= n; i += 16) {
            if (Fetch) ahead(x + i);
            a = _mm256_max_epu32(a, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), magnitude));
            b = _mm256_max_epu32(b, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 8)), magnitude));
        }
        a = _mm256_max_epu32(a, b);
        __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4E));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xB1));
        std::uint32_t most = static_cast<std::uint32_t>(_mm_cvtsi128_si32(m));
        for (; i < n; ++i) {
            const std::uint32_t u = bits_of(x[i]) & 0x7fffffffu;
            most = u > most ? u : most;
        }
        return most;
    }

    template <bool Dithered>
    static __m256i levels(const float* x, __m256 inverse, __m256 most, __m256 least, const std::uint16_t* draws) {
        const __m256 y = _mm256_max_ps(_mm256_min_ps(_mm256_mul_ps(_mm256_loadu_ps(x), inverse), most), least);
        const __m256i k = _mm256_cvtps_epi32(y);
        if (!Dithered) return k;
        const __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(draws)));
        return _mm256_srai_epi32(_mm256_add_epi32(k, u), 16);
    }

    template <bool Dithered>
    static void round(const float* x, std::size_t n, float inverse, float bound, const std::uint16_t* draws, std::int8_t* out) {
        const __m256 v = _mm256_set1_ps(inverse), most = _mm256_set1_ps(bound), least = _mm256_set1_ps(-bound);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        alignas(32) float tail[32] = {};
        alignas(32) std::uint16_t tail_draws[32] = {};
        alignas(32) std::int8_t tail_out[32];
        for (std::size_t i = 0; i < n; i += 32) {
            const float* row = x + i;
            const std::uint16_t* u = Dithered ? draws + i : tail_draws;
            const std::size_t m = n - i;
            if (m < 32) {
                std::memcpy(tail, row, 4 * m);
                row = tail;
                if (Dithered) std::memcpy(tail_draws, u, 2 * m);
                u = tail_draws;
            }
            __m256i k[4];
#pragma GCC unroll 4
            for (int q = 0; q < 4; ++q) k[q] = levels<Dithered>(row + 8 * q, v, most, least, u + 8 * q);
            __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(k[0], k[1]), _mm256_packs_epi32(k[2], k[3]));
            bytes = _mm256_permutevar8x32_epi32(bytes, order);
            if (m < 32) {
                _mm256_store_si256(reinterpret_cast<__m256i*>(tail_out), bytes);
                std::memcpy(out + i, tail_out, m);
            } else {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), bytes);
            }
        }
    }

    static void stochastic(const float* x, std::size_t n, float inverse, float most, const std::uint16_t* draws, std::int8_t* out) {
        round<true>(x, n, inverse, most, draws, out);
    }

    static void nearest(const float* x, std::size_t n, float inverse, float most, std::int8_t* out) {
        round<false>(x, n, inverse, most, nullptr, out);
    }

    static constexpr std::uint64_t ones = 0x0101010101010101ull;

    template <int W>
    static void pack(const std::int8_t* k, std::size_t n, std::uint8_t* out) {
        constexpr std::uint64_t mask = ones * ((1u << W) - 1);
        std::size_t i = 0;
        std::uint64_t word;
        for (; i + 8 <= n; i += 8, out += W) {
            std::memcpy(&word, k + i, 8);
            word = _pext_u64(word, mask);
            std::memcpy(out, &word, W);
        }
        if (i < n) {
            word = 0;
            std::memcpy(&word, k + i, n - i);
            word = _pext_u64(word, mask);
            std::memcpy(out, &word, ((n - i) * W + 7) / 8);
        }
    }

    // W bytes as an integer, by loads that overlap: copying three bytes through memory would stall.
    template <int W>
    static std::uint64_t load(const std::uint8_t* p) {
        std::uint16_t low2;
        std::uint32_t low4, high4;
        std::uint64_t all;
        std::memcpy(&low2, p, 2);
        if constexpr (W == 2) return low2;
        if constexpr (W == 3) return low2 | static_cast<std::uint64_t>(p[2]) << 16;
        if constexpr (W >= 4) std::memcpy(&low4, p, 4);
        if constexpr (W == 4) return low4;
        if constexpr (W >= 5 && W <= 7) {
            std::memcpy(&high4, p + W - 4, 4);
            return low4 | static_cast<std::uint64_t>(high4) << (8 * W - 32);
        }
        if constexpr (W == 8) std::memcpy(&all, p, 8);
        return all;
    }

    // Eight codes, sign-extended into 32-bit lanes.
    template <int W>
    static __m256i unpack(std::uint64_t word) {
        if constexpr (W == 4) {
            const __m256i all = _mm256_set1_epi32(static_cast<std::int32_t>(word));
            return _mm256_srai_epi32(_mm256_sllv_epi32(all, _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0)), 28);
        } else {
            if constexpr (W != 8) word = _pdep_u64(word, (ones * ((1u << W) - 1)) << (8 - W));
            const __m256i wide = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(static_cast<long long>(word)));
            return W == 8 ? wide : _mm256_srai_epi32(wide, 8 - W);
        }
    }

    template <int W, Into I>
    static void expand(const std::uint8_t* codes, std::size_t n, float scale, float factor, float* out) {
        const __m256 step = _mm256_set1_ps(scale), weight = _mm256_set1_ps(factor);
        std::size_t i = 0;
        for (; i + 8 <= n; i += 8, codes += W) {
            const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(unpack<W>(load<W>(codes))), step);
            if (I == Into::add)
                _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), _mm256_mul_ps(value, weight)));
            else if (I == Into::stream)
                _mm256_stream_ps(out + i, value);
            else
                _mm256_storeu_ps(out + i, value);
        }
        if (i < n) {
            alignas(32) float rest[8];
            std::uint64_t word = 0;
            std::memcpy(&word, codes, ((n - i) * W + 7) / 8);
            _mm256_store_ps(rest, _mm256_mul_ps(_mm256_cvtepi32_ps(unpack<W>(word)), step));
            for (std::size_t j = 0; i + j < n; ++j) out[i + j] = I == Into::add ? out[i + j] + rest[j] * factor : rest[j];
        }
    }

    static void fence() { _mm_sfence(); }
};

}  // namespace

const Ops& avx2_ops() {
    static constexpr Ops ops = Driver<Avx2>::table();
    return ops;
}

}  // namespace tersegrad::rounding
