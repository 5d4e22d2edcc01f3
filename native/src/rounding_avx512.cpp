// AVX-512 with VBMI. Codes are packed and unpacked with shifts inside 64-bit lanes and one byte permutation.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own headers (PR 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "philox_loops.hpp"
#include "rounding_ops.hpp"

namespace tersegrad::rounding {
namespace {

inline __mmask16 first16(std::size_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u); }
inline __mmask64 first64(std::size_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1ull; }

// Fetches the four cache lines of 64 coordinates. Always inline: GCC drops calls of functions that only prefetch.
[[gnu::always_inline]] inline void fetch(std::uintptr_t x) {
    for (unsigned line = 0; line < 4; ++line) _mm_prefetch(reinterpret_cast<const char*>(x + 64 * line), _MM_HINT_T0);
}

// Fetches one line of each of some later pages at once. A fetch from a page whose address the processor has not translated yet cannot
// retire before it is, which stops all work for a hundred nanoseconds; translations that begin together take not much longer than one.
template <unsigned Pages>
[[gnu::always_inline]] inline void translate_after(std::uintptr_t x) {
    constexpr std::uintptr_t page = 4096, region = Pages * page;
#pragma GCC unroll 16
    for (unsigned p = 0; p < Pages; ++p) _mm_prefetch(reinterpret_cast<const char*>(x + region + page * p), _MM_HINT_T0);
}

// The same, called every 512 bytes or less of a walk through memory.
[[gnu::always_inline]] inline void translate(std::uintptr_t x) {
    if (x % (8 * 4096) < 512) translate_after<8>(x);
}

struct Avx512 {
    using Drawer = Philox;
    static constexpr bool kFused = true;

    static void draws(const Stream& stream, std::uint64_t block, std::size_t groups, std::uint16_t* out, std::uintptr_t next) {
        Draws source(stream, block);
        for (std::size_t g = 0; g < groups; ++g, out += 64, next += 256) {
            fetch(next);
            source.next(out);
        }
    }

    template <Sum S>
    static __m512d term(__m256 v, __m512d sum) {
        const __m512d d = _mm512_cvtps_pd(v);
        // The square of a float32 is exact in float64, so that this fused form rounds like a product and a sum.
        return S == Sum::squares ? _mm512_fmadd_pd(d, d, sum) : _mm512_add_pd(sum, _mm512_abs_pd(d));
    }

    template <Sum S, bool Fetch>
    static double sum(const float* x, std::size_t n) {
        __m512d s0 = _mm512_setzero_pd(), s1 = s0, s2 = s0, s3 = s0;
        const auto add = [&](const float* at) {
            s0 = term<S>(_mm256_loadu_ps(at), s0);
            s1 = term<S>(_mm256_loadu_ps(at + 8), s1);
            s2 = term<S>(_mm256_loadu_ps(at + 16), s2);
            s3 = term<S>(_mm256_loadu_ps(at + 24), s3);
        };
        std::size_t i = 0;
        // Of four sums of four pages each, the first one asks for the translations.
        if (Fetch && n == kSumChunk && address(x) / (4 * kSumChunk) % 4 == 0) translate_after<16>(address(x));
        for (; i + 64 <= n; i += 64) {
            if (Fetch) fetch(address(x + i) + 4 * kAhead);
            add(x + i);
            add(x + i + 32);
        }
        for (; i + 32 <= n; i += 32) add(x + i);
        if (i < n) {
            const __m512 lo = _mm512_maskz_loadu_ps(first16(n - i), x + i);
            const __m512 hi = n - i > 16 ? _mm512_maskz_loadu_ps(first16(n - i - 16), x + i + 16) : _mm512_setzero_ps();
            s0 = term<S>(_mm512_castps512_ps256(lo), s0);
            s1 = term<S>(_mm512_extractf32x8_ps(lo, 1), s1);
            s2 = term<S>(_mm512_castps512_ps256(hi), s2);
            s3 = term<S>(_mm512_extractf32x8_ps(hi, 1), s3);
        }
        return folded(s0, s1, s2, s3);
    }

    static double folded(__m512d s0, __m512d s1, __m512d s2, __m512d s3) {
        const __m512d eight = _mm512_add_pd(_mm512_add_pd(s0, s2), _mm512_add_pd(s1, s3));
        const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
        const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
        return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }

    template <bool Fetch>
    static std::uint32_t abs_max(const float* x, std::size_t n) {
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        __m512i a = _mm512_setzero_si512(), b = a;
        const auto reach = [&](__m512i& most, const float* at) {
            most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_loadu_si512(at), magnitude));
        };
        std::size_t i = 0;
        for (; i + 64 <= n; i += 64) {
            if (Fetch) fetch(address(x + i) + 4 * kAhead);
            reach(a, x + i);
            reach(b, x + i + 16);
            reach(a, x + i + 32);
            reach(b, x + i + 48);
        }
        for (; i < n; i += 16) a = _mm512_max_epu32(a, _mm512_and_si512(_mm512_maskz_loadu_epi32(first16(n - i), x + i), magnitude));
        return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
    }

    // Levels of 16 coordinates in 32-bit lanes.
    template <bool Dithered>
    static __m512i levels(__m512 x, __m512 inverse, __m512 most, __m256i draws) {
        const __m512 y = _mm512_range_ps(_mm512_mul_ps(x, inverse), most, 2);  // the smaller magnitude, with the product's sign
        const __m512i k = _mm512_cvtps_epi32(y);
        return Dithered ? _mm512_srai_epi32(_mm512_add_epi32(k, _mm512_cvtepu16_epi32(draws)), 16) : k;
    }

    template <bool Dithered>
    static void round(const float* x, std::size_t n, float inverse, float bound, const std::uint16_t* draws, std::int8_t* out) {
        const __m512 v = _mm512_set1_ps(inverse), most = _mm512_set1_ps(bound);
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        std::size_t i = 0;
        for (; i + 64 <= n; i += 64) {
            __m512i k[4];
            for (int q = 0; q < 4; ++q) {
                const __m256i u = Dithered ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(draws + i + 16 * q)) : __m256i{};
                k[q] = levels<Dithered>(_mm512_loadu_ps(x + i + 16 * q), v, most, u);
            }
            const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(k[0], k[1]), _mm512_packs_epi32(k[2], k[3]));
            _mm512_storeu_si512(out + i, _mm512_permutexvar_epi32(order, bytes));
        }
        for (; i + 16 <= n; i += 16) {
            const __m256i u = Dithered ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(draws + i)) : __m256i{};
            const __m512i k = levels<Dithered>(_mm512_loadu_ps(x + i), v, most, u);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(k));
        }
        if (i < n) {
            const __mmask16 m = first16(n - i);
            const __m256i u = Dithered ? _mm256_maskz_loadu_epi16(m, draws + i) : __m256i{};
            _mm512_mask_cvtepi32_storeu_epi8(out + i, m, levels<Dithered>(_mm512_maskz_loadu_ps(m, x + i), v, most, u));
        }
    }

    static void stochastic(const float* x, std::size_t n, float inverse, float most, const std::uint16_t* draws, std::int8_t* out) {
        round<true>(x, n, inverse, most, draws, out);
    }

    static void nearest(const float* x, std::size_t n, float inverse, float most, std::int8_t* out) {
        round<false>(x, n, inverse, most, nullptr, out);
    }

    // Byte j of the packed stream of eight 64-bit lanes with W bytes each (and the reverse).
    template <int W, bool Spread>
    static __m512i permutation() {
        alignas(64) std::uint8_t index[64];
        for (int j = 0; j < 64; ++j)
            index[j] = static_cast<std::uint8_t>(Spread ? (j % 8 < W ? j / 8 * W + j % 8 : 63) : (j < 8 * W ? j / W * 8 + j % W : 63));
        return _mm512_load_si512(index);
    }

    template <int W>
    static void pack(const std::int8_t* k, std::size_t n, std::uint8_t* out) {
        const __m512i gather = permutation<W, false>();
        const __m512i m1 = _mm512_set1_epi16((1 << W) - 1), m2 = _mm512_set1_epi32((1 << 2 * W) - 1);
        const __m512i m4 = _mm512_set1_epi64((1ll << 4 * W) - 1), low = _mm512_set1_epi8((1 << W) - 1);
        for (std::size_t i = 0; i < n; i += 64, out += 8 * W) {
            const std::size_t m = n - i < 64 ? n - i : 64;
            __m512i v = _mm512_and_si512(_mm512_maskz_loadu_epi8(first64(m), k + i), low);
            v = _mm512_ternarylogic_epi64(m1, v, _mm512_srli_epi16(v, 8 - W), 0xCA);  // mask ? v : shifted
            v = _mm512_ternarylogic_epi64(m2, v, _mm512_srli_epi32(v, 16 - 2 * W), 0xCA);
            v = _mm512_ternarylogic_epi64(m4, v, _mm512_srli_epi64(v, 32 - 4 * W), 0xCA);
            _mm512_mask_storeu_epi8(out, first64((m * W + 7) / 8), _mm512_permutexvar_epi8(gather, v));
        }
    }

    // For every word of the first or second half of a register: the low halves of 32-bit lanes.
    static __m512i widening(int half) {
        alignas(64) std::uint16_t index[32];
        for (int j = 0; j < 32; ++j) index[j] = static_cast<std::uint16_t>(16 * half + j / 2);
        return _mm512_load_si512(index);
    }

    // Byte j of the packed stream from where `codes` leaves it.
    template <int W>
    static __m512i order() {
        alignas(64) std::uint8_t index[64];
        for (int j = 0; j < 64; ++j) {
            if (W == 4) {  // coordinates 2 j and 2 j + 1: byte q of lane i holds the pair from 16 q + i on
                index[j] = static_cast<std::uint8_t>(j < 32 ? 4 * (2 * j % 16) + j / 8 : 63);
            } else {  // lane 4 i + q holds coordinates 16 q + 4 i and the next three, in its lower W / 2 bytes
                const int lane = j / (W / 2);
                index[j] = static_cast<std::uint8_t>(lane < 16 ? 4 * (lane % 4 * 4 + lane / 4) + j % (W / 2) : 63);
            }
        }
        return W % 2 ? permutation<W, false>() : _mm512_load_si512(index);
    }

    // The packed codes of 64 coordinates whose levels are the upper halves of the 32-bit lanes.
    template <int W>
    static __m512i codes(const __m512i (&k)[4], __m512i order) {
        // A ternary operation 0xE4: third ? first : second.
        if constexpr (W == 4) {  // byte q of a lane from register q, then every other lane into the upper halves of the bytes before
            const __m512i halves = _mm512_set1_epi32(0x0000ffff), even = _mm512_set1_epi32(0x00ff00ff), low = _mm512_set1_epi32(0x0f0f0f0f);
            const __m512i b02 = _mm512_ternarylogic_epi64(_mm512_srli_epi32(k[0], 16), k[2], halves, 0xE4);
            const __m512i b13 = _mm512_ternarylogic_epi64(_mm512_srli_epi32(k[1], 8), _mm512_slli_epi32(k[3], 8), halves, 0xE4);
            const __m512i b = _mm512_ternarylogic_epi64(b02, b13, even, 0xE4);
            return _mm512_permutexvar_epi8(order, _mm512_ternarylogic_epi64(b, _mm512_srli_epi64(b, 28), low, 0xE4));
        }
        const __m512i k01 = _mm512_packs_epi32(_mm512_srai_epi32(k[0], 16), _mm512_srai_epi32(k[1], 16));
        const __m512i k23 = _mm512_packs_epi32(_mm512_srai_epi32(k[2], 16), _mm512_srai_epi32(k[3], 16));
        __m512i b = _mm512_packs_epi16(k01, k23);
        if constexpr (W != 8) {
            const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            if constexpr (W % 2 != 0) b = _mm512_permutexvar_epi32(lanes, b);
            b = _mm512_and_si512(b, _mm512_set1_epi8((1 << W) - 1));
            b = _mm512_ternarylogic_epi64(b, _mm512_srli_epi16(b, 8 - W), _mm512_set1_epi16((1 << W) - 1), 0xE4);
            b = _mm512_ternarylogic_epi64(b, _mm512_srli_epi32(b, 16 - 2 * W), _mm512_set1_epi32((1 << 2 * W) - 1), 0xE4);
            if constexpr (W % 2 != 0)
                b = _mm512_ternarylogic_epi64(b, _mm512_srli_epi64(b, 32 - 4 * W), _mm512_set1_epi64((1ll << 4 * W) - 1), 0xE4);
        }
        return _mm512_permutexvar_epi8(order, b);
    }

    // Draws, levels and codes of n coordinates (a multiple of 64), and the statistic of n later ones, in one loop: the arithmetic
    // of both and the memory work side by side. No carry into the upper counter word among them, and no product beyond the levels.
    template <int W, bool L2>
    static double fused(const float* x, std::size_t n, float inverse, const Philox& philox, std::uint64_t block, std::uint8_t* out,
                        const float* later) {
        const __m512 v = _mm512_set1_ps(inverse);
        const __m512i order = Avx512::order<W>(), widen[2] = {widening(0), widening(1)};
        __m512d s[4] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};
        __m512i top = _mm512_setzero_si512(), index = philox.counters(block);
        const auto groups = [&]<int N>(std::size_t i) {
            __m512i u[2 * N];
            translate(address(later + i));
            philox.template groups<N>(index, u, [&](int r) {  // an eighth of the later coordinates: 8 N
                const float* at = later + i + static_cast<std::size_t>(8 * N * r);
                if (N > 1 || r % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(address(at) + 4 * kAhead), _MM_HINT_T0);
                if constexpr (L2) {
#pragma GCC unroll 2
                    for (int l = 0; l < N; ++l)
                        s[(N * r + l) % 4] = term<Sum::squares>(_mm256_loadu_ps(at + 8 * l), s[(N * r + l) % 4]);
                } else if (N > 1 || r % 2 == 0) {
                    top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_loadu_si512(at), _mm512_set1_epi32(0x7fffffff)));
                }
            });
            index = _mm512_add_epi64(index, _mm512_set1_epi64(8 * N));
#pragma GCC unroll 2
            for (int g = 0; g < N; ++g, out += 8 * W) {
                __m512i k[4];
#pragma GCC unroll 4
                for (int q = 0; q < 4; ++q) {
                    const __m512i y = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i + 64 * g + 16 * q), v));
                    k[q] = _mm512_add_epi32(y, _mm512_maskz_permutexvar_epi16(0x55555555u, widen[q % 2], u[2 * g + q / 2]));
                }
                const __m512i b = codes<W>(k, order);
                if constexpr (W == 8)
                    _mm512_storeu_si512(out, b);
                else if constexpr (W != 4)
                    _mm512_mask_storeu_epi8(out, first64(8 * W), b);
                else
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(b));
            }
        };
        std::size_t i = 0;
        for (; i + 128 <= n; i += 128) groups.template operator()<2>(i);
        if (i < n) groups.template operator()<1>(i);
        return L2 ? folded(s[0], s[1], s[2], s[3]) : static_cast<double>(float_of(_mm512_reduce_max_epu32(top)));
    }

    template <Into I>
    static void put(float* out, __m512 value, __m512 weight) {
        if (I == Into::add)
            _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), _mm512_mul_ps(value, weight)));
        else if (I == Into::stream)
            _mm512_stream_ps(out, value);
        else
            _mm512_storeu_ps(out, value);
    }

    template <Into I>
    static void put(float* out, __m512 value, __m512 weight, __mmask16 m) {
        if (I == Into::add)
            value = _mm512_add_ps(_mm512_maskz_loadu_ps(m, out), _mm512_mul_ps(value, weight));
        _mm512_mask_storeu_ps(out, m, value);
    }

    template <int W, Into I>
    static void expand(const std::uint8_t* codes, std::size_t n, float scale, float factor, float* out) {
        if constexpr (W == 4) return expand4<I>(codes, n, scale, factor, out);
        const __m512 step = _mm512_set1_ps(scale), weight = _mm512_set1_ps(factor);
        const __m512i spread = permutation<W, true>(), low = _mm512_set1_epi8(static_cast<char>((1 << W) - 1));
        const __m512i sign = _mm512_set1_epi8(static_cast<char>(1 << (W - 1)));
        const __m512i shifts = _mm512_set1_epi64(W == 8 ? 0 : 0x0706050403020100ll * W);
        for (std::size_t i = 0; i < n; i += 64, codes += 8 * W) {
            const std::size_t m = n - i < 64 ? n - i : 64;
            __m512i k = _mm512_maskz_loadu_epi8(first64((m * W + 7) / 8), codes);
            if constexpr (W != 8) {
                k = _mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(spread, k));
                k = _mm512_sub_epi8(_mm512_xor_si512(_mm512_and_si512(k, low), sign), sign);
            }
            alignas(64) std::int8_t bytes[64];
            if (m == 64) {
                const __m128i part[4] = {_mm512_castsi512_si128(k), _mm512_extracti32x4_epi32(k, 1),
                                         _mm512_extracti32x4_epi32(k, 2), _mm512_extracti32x4_epi32(k, 3)};
                for (int q = 0; q < 4; ++q)
                    put<I>(out + i + 16 * q, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part[q])), step), weight);
                continue;
            }
            _mm512_store_si512(bytes, k);
            for (std::size_t j = 0; j < m; j += 16) {
                const __m128i part = _mm_load_si128(reinterpret_cast<const __m128i*>(bytes + j));
                put<I>(out + i + j, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part)), step), weight, first16(m - j));
            }
        }
    }

    // Sixteen values fit a register: a code is an index into them.
    template <Into I>
    static void expand4(const std::uint8_t* codes, std::size_t n, float scale, float factor, float* out) {
        const __m512 levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
        const __m512 table = _mm512_mul_ps(levels, _mm512_set1_ps(scale)), weight = _mm512_set1_ps(factor);
        // Lower bytes of the 32-bit lanes: the codes of sixteen coordinates from eight bytes.
        const __m512i shifts = _mm512_setr_epi64(0x0000000400000000, 0x0000000c00000008, 0x0000001400000010, 0x0000001c00000018,
                                                 0x0000002400000020, 0x0000002c00000028, 0x0000003400000030, 0x0000003c00000038);
        std::size_t i = 0;
        for (; i + 16 <= n; i += 16) {
            long long word;
            std::memcpy(&word, codes + i / 2, 8);
            const __m512i index = _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(word));
            put<I>(out + i, _mm512_permutexvar_ps(index, table), weight);
        }
        if (i < n) {
            long long word = 0;
            std::memcpy(&word, codes + i / 2, (n - i + 1) / 2);
            const __m512i index = _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(word));
            put<I>(out + i, _mm512_permutexvar_ps(index, table), weight, first16(n - i));
        }
    }

    static void fence() { _mm_sfence(); }
};

}  // namespace

const Ops& avx512_ops() {
    static constexpr Ops ops = Driver<Avx512>::table();
    return ops;
}

}  // namespace tersegrad::rounding
