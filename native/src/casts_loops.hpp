// The loops of every instruction set, written once on vectors of sixteen lanes. Included by casts.cpp, casts_avx2.cpp and
// casts_avx512.cpp, which are built with different flags: everything here is local to the including file, so that no inline
// function compiled for one machine ends up running on another.
#pragma once
#include <cfloat>
#include <cstring>
#include <type_traits>

#include "casts_table.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"                // vectors pass between inlined functions only
#pragma GCC diagnostic ignored "-Wuninitialized"        // false alarms inside the compiler's own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define LOCAL_INLINE static inline __attribute__((always_inline))

namespace tersegrad::casts {
namespace {

using std::size_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;

#if defined(__AVX512F__)
constexpr int native = 64;
#elif defined(__AVX2__)
constexpr int native = 32;
#else
constexpr int native = 16;
#endif
constexpr int parts = 64 / native, lanes = native / 4;

typedef u32 PartV __attribute__((vector_size(native)));
typedef i32 PartI __attribute__((vector_size(native)));
typedef float PartF __attribute__((vector_size(native)));
typedef u64 PartPairs __attribute__((vector_size(native)));
typedef double PartD __attribute__((vector_size(native)));
typedef float HalfF __attribute__((vector_size(native / 2)));
typedef u16 H __attribute__((vector_size(32)));
typedef u8 B __attribute__((vector_size(16)));

// Sixteen lanes as vectors of the machine's own width. (The compiler would take wider vectors apart by itself, but through
// memory, and comparisons lane by lane.)
template <class P>
struct Wide {
    using Lane = std::remove_reference_t<decltype(P{}[0])>;
    P part[parts];
};
using V = Wide<PartV>;
using I = Wide<PartI>;
using F = Wide<PartF>;

#define LANEWISE(op)                                                               \
    template <class P>                                                             \
    LOCAL_INLINE Wide<P> operator op(Wide<P> a, const Wide<P>& b) {                \
        for (int k = 0; k < parts; ++k) a.part[k] = a.part[k] op b.part[k];        \
        return a;                                                                  \
    }                                                                              \
    template <class P>                                                             \
    LOCAL_INLINE Wide<P> operator op(Wide<P> a, typename Wide<P>::Lane b) {        \
        for (int k = 0; k < parts; ++k) a.part[k] = a.part[k] op b;                \
        return a;                                                                  \
    }
LANEWISE(+)
LANEWISE(-)
LANEWISE(*)
LANEWISE(&)
LANEWISE(|)
LANEWISE(^)
#undef LANEWISE
template <class P>
LOCAL_INLINE Wide<P> operator<<(Wide<P> a, int by) {
    for (int k = 0; k < parts; ++k) a.part[k] = a.part[k] << by;
    return a;
}
template <class P>
LOCAL_INLINE Wide<P> operator>>(Wide<P> a, int by) {
    for (int k = 0; k < parts; ++k) a.part[k] = a.part[k] >> by;
    return a;
}

constexpr size_t ahead = 2048;  // floats; prefetching 8 KB ahead hides most of the latency of one core's reads
constexpr u32 magnitude = 0x7fffffff, infinity = 0x7f800000, top = 0x80000000;

template <class T>
LOCAL_INLINE T load(const void* p) {
    T v;
    if constexpr (sizeof(T) == 64) {
        for (int k = 0; k < parts; ++k) std::memcpy(&v.part[k], static_cast<const char*>(p) + k * native, native);
    } else {
        std::memcpy(&v, p, sizeof v);
    }
    return v;
}
template <class T>
LOCAL_INLINE T load(const void* p, size_t bytes) {  // zeros behind them
    u8 padded[sizeof(T)] = {};
    std::memcpy(padded, p, bytes);
    return load<T>(padded);
}
template <class T>
LOCAL_INLINE void store(void* p, const T& v) {
    if constexpr (sizeof(T) == 64) {
        for (int k = 0; k < parts; ++k) std::memcpy(static_cast<char*>(p) + k * native, &v.part[k], native);
    } else {
        std::memcpy(p, &v, sizeof v);
    }
}
template <class To, class P>
LOCAL_INLINE To same_bits(const Wide<P>& v) {
    To out;
    for (int k = 0; k < parts; ++k) out.part[k] = (std::remove_reference_t<decltype(out.part[0])>)v.part[k];
    return out;
}
LOCAL_INLINE V bits(const F& v) { return same_bits<V>(v); }
LOCAL_INLINE V bits(const I& v) { return same_bits<V>(v); }
LOCAL_INLINE F real(const V& v) { return same_bits<F>(v); }
LOCAL_INLINE I whole(const V& v) { return same_bits<I>(v); }
LOCAL_INLINE F to_float(const I& v) {
    F out;
    for (int k = 0; k < parts; ++k) out.part[k] = __builtin_convertvector(v.part[k], PartF);
    return out;
}
LOCAL_INLINE I to_int(const F& v) {
    I out;
    for (int k = 0; k < parts; ++k) out.part[k] = __builtin_convertvector(v.part[k], PartI);
    return out;
}
LOCAL_INLINE V zero() {
    V out;
    for (int k = 0; k < parts; ++k) out.part[k] = PartV{};
    return out;
}
LOCAL_INLINE V all(u32 v) { return zero() + v; }
LOCAL_INLINE F all(float v) { return real(zero()) + v; }
LOCAL_INLINE V swap_neighbours(V v) {
    for (int k = 0; k < parts; ++k) v.part[k] = (PartV)((PartPairs)v.part[k] << 32 | (PartPairs)v.part[k] >> 32);
    return v;
}

// yes where a < b, else no.
template <class P>
LOCAL_INLINE V where_less(const Wide<P>& a, const Wide<P>& b, const V& yes, const V& no) {
    V out;
    for (int k = 0; k < parts; ++k) out.part[k] = (PartV)(a.part[k] < b.part[k] ? (PartI)yes.part[k] : (PartI)no.part[k]);
    return out;
}
LOCAL_INLINE V where_less(const V& a, const V& b, const V& yes, const V& no) {  // both below 2^31
    return where_less(whole(a), whole(b), yes, no);
}
LOCAL_INLINE V larger(const V& a, const V& b) { return where_less(a, b, b, a); }
LOCAL_INLINE V smaller(const V& a, const V& b) { return where_less(a, b, a, b); }
LOCAL_INLINE F larger(const F& a, const F& b) {
#if defined(__AVX512F__)
    return {(PartF)_mm512_max_ps((__m512)a.part[0], (__m512)b.part[0])};
#else
    return real(where_less(b, a, bits(a), bits(b)));
#endif
}
LOCAL_INLINE F smaller(const F& a, const F& b) {
#if defined(__AVX512F__)
    return {(PartF)_mm512_min_ps((__m512)a.part[0], (__m512)b.part[0])};
#else
    return real(where_less(a, b, bits(a), bits(b)));
#endif
}
LOCAL_INLINE float power(int e) {  // 2^e, -126 <= e <= 127
    const u32 b = static_cast<u32>(e + 127) << 23;
    float f;
    std::memcpy(&f, &b, 4);
    return f;
}
LOCAL_INLINE u32 reduce_max(const V& v) {  // all below 2^31
#if defined(__AVX512F__)
    return static_cast<u32>(_mm512_reduce_max_epi32((__m512i)v.part[0]));
#else
    PartI most = (PartI)v.part[0];
    for (int k = 1; k < parts; ++k) most = (PartI)v.part[k] > most ? (PartI)v.part[k] : most;
    i32 result = 0;
    for (int k = 0; k < lanes; ++k) result = most[k] > result ? most[k] : result;
    return static_cast<u32>(result);
#endif
}

// Between widths of integers; what is narrowed fits.
LOCAL_INLINE V widen(const B& v) {
    V out;
#if defined(__AVX512F__)
    out.part[0] = (PartV)_mm512_cvtepu8_epi32((__m128i)v);
#elif defined(__AVX2__)
    out.part[0] = (PartV)_mm256_cvtepu8_epi32((__m128i)v);
    out.part[1] = (PartV)_mm256_cvtepu8_epi32(_mm_unpackhi_epi64((__m128i)v, (__m128i)v));
#else
    for (int k = 0; k < 16; ++k) out.part[k / lanes][k % lanes] = v[k];
#endif
    return out;
}
LOCAL_INLINE V widen(const H& v) {
    V out;
#if defined(__AVX512F__)
    out.part[0] = (PartV)_mm512_cvtepu16_epi32((__m256i)v);
#elif defined(__AVX2__)
    out.part[0] = (PartV)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)v));
    out.part[1] = (PartV)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)v, 1));
#else
    for (int k = 0; k < 16; ++k) out.part[k / lanes][k % lanes] = v[k];
#endif
    return out;
}
LOCAL_INLINE H halves(const V& v) {
#if defined(__AVX512F__)
    return (H)_mm512_cvtepi32_epi16((__m512i)v.part[0]);
#elif defined(__AVX2__)
    return (H)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v.part[0], (__m256i)v.part[1]), 0xD8);
#else
    H out;
    for (int k = 0; k < 16; ++k) out[k] = static_cast<u16>(v.part[k / lanes][k % lanes]);
    return out;
#endif
}
LOCAL_INLINE B quarters(const V& v) {
#if defined(__AVX512F__)
    return (B)_mm512_cvtepi32_epi8((__m512i)v.part[0]);
#elif defined(__AVX2__)
    const __m256i h = (__m256i)halves(v);
    return (B)_mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
#else
    B out;
    for (int k = 0; k < 16; ++k) out[k] = static_cast<u8>(v.part[k / lanes][k % lanes]);
    return out;
#endif
}

// The top bits of the sixteen lanes, lane 0 lowest.
LOCAL_INLINE u16 top_bits(const V& v) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)v.part[0]);
#elif defined(__AVX2__)
    return static_cast<u16>(_mm256_movemask_ps((__m256)v.part[0]) | _mm256_movemask_ps((__m256)v.part[1]) << 8);
#else
    u32 m = 0;
#if defined(__SSE2__)
    for (int k = 0; k < parts; ++k) m |= static_cast<u32>(_mm_movemask_ps((__m128)v.part[k])) << (k * lanes);
#else
    for (int k = 0; k < 16; ++k) m |= (v.part[k / lanes][k % lanes] >> 31) << k;
#endif
    return static_cast<u16>(m);
#endif
}
// Lane k is bit k of m, moved to the top.
LOCAL_INLINE V to_top_bits(u16 m) {
    V out;
#if defined(__AVX512DQ__)
    out.part[0] = (PartV)_mm512_maskz_set1_epi32(m, static_cast<int>(top));
#else
    PartV place;
    for (int k = 0; k < lanes; ++k) place[k] = 31u - static_cast<u32>(k);
    for (int k = 0; k < parts; ++k) out.part[k] = (PartV{} + static_cast<u32>(m >> (k * lanes))) << place & top;
#endif
    return out;
}
LOCAL_INLINE u16 negative(const F& v) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v.part[0], _mm512_setzero_ps(), _CMP_LT_OQ);
#else
    return top_bits(where_less(v, all(0.0f), all(top), zero()));
#endif
}

// ---- output: three ways, chosen outside the loops ----

template <Emit how>
LOCAL_INLINE void emit(float* out, const F& v, const F& weight) {
    if constexpr (how == Emit::add) {
        store(out, load<F>(out) + weight * v);
    } else if constexpr (how == Emit::stream) {
#if defined(__AVX512F__)
        _mm512_stream_ps(out, (__m512)v.part[0]);
#elif defined(__AVX2__)
        _mm256_stream_ps(out, (__m256)v.part[0]);
        _mm256_stream_ps(out + 8, (__m256)v.part[1]);
#else
        store(out, v);
#endif
    } else {
        store(out, v);
    }
}
template <Emit how>
LOCAL_INLINE void emit(float* out, const F& v, const F& weight, size_t n) {  // the first n lanes only
    float result[16];
    store(result, how == Emit::add ? load<F>(out, 4 * n) + weight * v : v);
    std::memcpy(out, result, 4 * n);
}
// Calls body(i, n) for every group of sixteen coordinates, n of them real, and emits what it returns.
template <Emit how, class Body>
LOCAL_INLINE void each(size_t n, Out out, Body&& body) {
    const F weight = all(out.weight);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) emit<how>(out.at + i, body(i, size_t{16}), weight);
    if (i < n) emit<how>(out.at + i, body(i, n - i), weight, n - i);
}
template <class Body>
LOCAL_INLINE void each(size_t n, Out out, Body&& body) {
    if (out.how == Emit::add) return each<Emit::add>(n, out, body);
    if (out.how == Emit::store) return each<Emit::store>(n, out, body);
    each<Emit::stream>(n, out, body);
}

// ---- Philox-4x32-10: one block serves eight coordinates, sixteen bits each ----

// The draws of coordinates 64 t .. 64 t + 63, purpose 0 (rounding), in order; `block` = 8 t.
// Four words of a block are held in the low halves of 64-bit lanes; what stands in the high halves never matters.
LOCAL_INLINE void draw(const Draws& keys, u64 block, u16* out) {
#if defined(__AVX512F__)
    const __m512i counter = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(block)), _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0));
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
    __m512i c0 = counter, c1 = _mm512_srli_epi64(counter, 32), c2 = _mm512_set1_epi64(keys.step),
            c3 = _mm512_set1_epi64(keys.origin);
#pragma GCC unroll 10
    for (int r = 0; r < 10; ++r) {
        const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
        // a shuffle moves the high halves down as a shift would, on the port that is not busy multiplying
        c0 = _mm512_ternarylogic_epi64(_mm512_shuffle_epi32(p1, _MM_PERM_DDBB), c1, _mm512_set1_epi32(static_cast<int>(keys.even[r])), 0x96);
        c2 = _mm512_ternarylogic_epi64(_mm512_shuffle_epi32(p0, _MM_PERM_DDBB), c3, _mm512_set1_epi32(static_cast<int>(keys.odd[r])), 0x96);
        c1 = p1;
        c3 = p0;
    }
    const __m512i low = _mm512_mask_blend_epi32(0xAAAA, c0, _mm512_slli_epi64(c1, 32));
    const __m512i high = _mm512_mask_blend_epi32(0xAAAA, c2, _mm512_slli_epi64(c3, 32));
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(low, high));
    _mm512_storeu_si512(out + 32, _mm512_unpackhi_epi64(low, high));
#elif defined(__AVX2__)
    const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
    for (int half = 0; half < 2; ++half, block += 4, out += 32) {
        const __m256i counter = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(block)), _mm256_set_epi64x(3, 1, 2, 0));
        __m256i c0 = counter, c1 = _mm256_srli_epi64(counter, 32), c2 = _mm256_set1_epi64x(keys.step),
                c3 = _mm256_set1_epi64x(keys.origin);
#pragma GCC unroll 10
        for (int r = 0; r < 10; ++r) {
            const __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
            c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), _mm256_set1_epi32(static_cast<int>(keys.even[r])));
            c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), _mm256_set1_epi32(static_cast<int>(keys.odd[r])));
            c1 = p1;
            c3 = p0;
        }
        const __m256i low = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
        const __m256i high = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi64(low, high));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm256_unpackhi_epi64(low, high));
    }
#else
    for (int k = 0; k < 8; ++k, ++block, out += 8) {
        u32 c0 = static_cast<u32>(block), c1 = static_cast<u32>(block >> 32), c2 = keys.step, c3 = keys.origin;
        for (int r = 0; r < 10; ++r) {
            const u64 p0 = u64{0xD2511F53} * c0, p1 = u64{0xCD9E8D57} * c2;
            c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ keys.even[r];
            c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ keys.odd[r];
            c1 = static_cast<u32>(p1);
            c3 = static_cast<u32>(p0);
        }
        const u32 words[4] = {c0, c1, c2, c3};
        std::memcpy(out, words, 16);
    }
#endif
}
// Calls body(i, x, draws, n) for every 64 coordinates; the last group is padded with zeros and has n < 64 real ones.
template <class Body>
LOCAL_INLINE void each_drawn(const float* x, size_t n, u64 first, const Draws& keys, Body&& body) {
    alignas(64) u16 draws[64];
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        for (int k = 0; k < 64; k += 16) __builtin_prefetch(x + i + ahead + k);
        draw(keys, (first + i) >> 3, draws);
        body(i, x + i, draws, size_t{64});
    }
    if (i < n) {
        alignas(64) float rest[64] = {};
        std::memcpy(rest, x + i, 4 * (n - i));
        draw(keys, (first + i) >> 3, draws);
        body(i, rest, draws, n - i);
    }
}

// ---- magnitudes ----

u32 largest(const float* x, size_t n) {
    V most[4] = {zero(), zero(), zero(), zero()};
    size_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int k = 0; k < 4; ++k) {
            __builtin_prefetch(x + i + ahead + 16 * k);
            most[k] = larger(most[k], load<V>(x + i + 16 * k) & magnitude);
        }
    for (; i < n; i += 16) most[0] = larger(most[0], load<V>(x + i, 4 * (n - i < 16 ? n - i : 16)) & magnitude);
    return reduce_max(larger(larger(most[0], most[1]), larger(most[2], most[3])));
}

// Thirty-two running sums a chunk, coordinate j joining sum j % 32; then the upper half is added onto the lower until one is left.
struct Lanes {
    static constexpr int width = native / 8;
    PartD sum[32 / width] = {};
    __attribute__((always_inline)) void join(const float* x, bool square) {
        for (int k = 0; k < 32 / width; ++k) {
            const PartD d = __builtin_convertvector(load<HalfF>(x + width * k), PartD);
            sum[k] += square ? d * d : d < 0 ? -d : d;
        }
    }
    double total() {
        for (int h = 16 / width; h; h /= 2)
            for (int k = 0; k < h; ++k) sum[k] += sum[k + h];
        double s[width];
        std::memcpy(s, sum, sizeof s);
        for (int h = width / 2; h; h /= 2)
            for (int k = 0; k < h; ++k) s[k] += s[k + h];
        return s[0];
    }
};

void sums(const float* x, size_t n, double* chunks) {
    for (size_t begin = 0; begin < n; begin += chunk) {
        const size_t end = begin + chunk < n ? begin + chunk : n;
        Lanes sum;
        size_t i = begin;
        for (; i + 32 <= end; i += 32) {
            __builtin_prefetch(x + i + ahead);
            __builtin_prefetch(x + i + ahead + 16);
            sum.join(x + i, true);
        }
        if (i < end) {
            float rest[32] = {};
            std::memcpy(rest, x + i, 4 * (end - i));
            sum.join(rest, true);
        }
        *chunks++ = sum.total();
    }
}

// Rounding up next to float32's largest number must not end in infinity.
LOCAL_INLINE F signed_product(F size, F scale, V sign) { return real(bits(smaller(all(FLT_MAX), size * scale)) | sign); }

// ---- bf16 ----

LOCAL_INLINE H bf16(V x) {
    const V a = x & magnitude;
    const V nearest = smaller((a + 0x7fff + (a >> 16 & 1)) >> 16, all(0x7f7fu));             // finite values stay finite
    const V special = a >> 16 | where_less(all(infinity), a, all(0x40u), zero());  // NaN stays NaN
    return halves(where_less(a, all(infinity), nearest, special) | (x >> 16 & 0x8000));
}

void bf16_encode(const float* x, size_t n, bool stream, u8* out) {
    size_t i = 0;
#if defined(__AVX512F__)
    if (stream) {
        for (; i + 32 <= n; i += 32) {
            __builtin_prefetch(x + i + ahead);
            __builtin_prefetch(x + i + ahead + 16);
            const H low = bf16(load<V>(x + i)), high = bf16(load<V>(x + i + 16));
            _mm512_stream_si512(reinterpret_cast<__m512i*>(out + 2 * i),
                                _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1));
        }
    }
#else
    (void)stream;
#endif
    for (; i + 16 <= n; i += 16) {
        __builtin_prefetch(x + i + ahead);
        store(out + 2 * i, bf16(load<V>(x + i)));
    }
    if (i < n) {
        const H h = bf16(load<V>(x + i, 4 * (n - i)));
        std::memcpy(out + 2 * i, &h, 2 * (n - i));
    }
}

void bf16_decode(const u8* data, size_t n, Out out) {
    each(n, out, [=](size_t i, size_t k) __attribute__((always_inline)) {
        const H h = k == 16 ? load<H>(data + 2 * i) : load<H>(data + 2 * i, 2 * k);
        return real(widen(h) << 16);
    });
}

// ---- fp16: |y| < 2^15, so nothing overflows ----

LOCAL_INLINE H fp16(F x, F factor) {
    const V sign = bits(x) >> 16 & 0x8000;
    const F y = real(bits(x * factor) & magnitude);
    const V b = bits(y);
    const V normal = ((b + 0xfff + (b >> 13 & 1)) >> 13) - (112u << 10);
    const V subnormal = bits(y + 0.5f) - bits(all(0.5f));  // the last place of 0.5 is fp16's smallest number
    return halves(where_less(y, all(0x1p-14f), subnormal, normal) | sign);
}

void fp16_encode(const float* x, size_t n, float factor, u8* out) {
    const F f = all(factor);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __builtin_prefetch(x + i + ahead);
        store(out + 2 * i, fp16(load<F>(x + i), f));
    }
    if (i < n) {
        const H h = fp16(load<F>(x + i, 4 * (n - i)), f);
        std::memcpy(out + 2 * i, &h, 2 * (n - i));
    }
}

void fp16_decode(const u8* data, size_t n, float scale, Out out) {
    const F s = all(scale);
    each(n, out, [=](size_t i, size_t k) __attribute__((always_inline)) {
        const H h = k == 16 ? load<H>(data + 2 * i) : load<H>(data + 2 * i, 2 * k);
        const V b = widen(h), m = b & 0x7fff;
        const V normal = (m << 13) + where_less(m, all(0x7c00u), all(112u << 23), all(224u << 23));
        const V subnormal = bits(to_float(whole(m)) * 0x1p-24f);
        return signed_product(real(where_less(m, all(0x400u), subnormal, normal)), s, (b & 0x8000) << 16);
    });
}

// ---- fp8 e4m3, one power of two a block ----

LOCAL_INLINE u8 shared_exponent(u32 most) {  // so that the largest lies in (232, 464], which rounds to at most 448
    const int e = static_cast<int>((most + 0x17ffff) >> 23) - 8;
    return static_cast<u8>(e < 1 ? 1 : e);
}
LOCAL_INLINE B fp8(F x, F factor) {
    const V sign = bits(x) >> 24 & 0x80;
    const F y = real(bits(x * factor) & magnitude);
    const V b = bits(y);
    const V normal = ((b + 0x7ffff + (b >> 20 & 1)) >> 20) - (120u << 3);
    const V subnormal = bits(y + 0x1p14f) - bits(all(0x1p14f));  // the last place of 2^14 is e4m3's smallest number
    return quarters(where_less(y, all(0x1p-6f), subnormal, normal) | sign);
}

u32 fp8_encode(const float* x, size_t n, size_t block, u8* scales, u8* out) {
    V over = zero();
    for (size_t begin = 0; begin < n; begin += block) {
        const size_t end = begin + block < n ? begin + block : n;
        V most = zero();
        size_t i = begin;
        for (; i + 16 <= end; i += 16) {
            __builtin_prefetch(x + i + ahead);
            most = larger(most, load<V>(x + i) & magnitude);
        }
        if (i < end) most = larger(most, load<V>(x + i, 4 * (end - i)) & magnitude);
        over = larger(over, most);
        const u8 e = shared_exponent(reduce_max(most));
        scales[begin / block] = e;
        const F factor = all(power(127 - e));
        for (i = begin; i + 16 <= end; i += 16) store(out + i, fp8(load<F>(x + i), factor));
        if (i < end) {
            const B b = fp8(load<F>(x + i, 4 * (end - i)), factor);
            std::memcpy(out + i, &b, end - i);
        }
    }
    return reduce_max(over);
}

LOCAL_INLINE float e8m0(u8 e) {
    const u32 b = e == 0 ? 0x00400000u : e == 255 ? 0x7fc00000u : static_cast<u32>(e) << 23;
    float f;
    std::memcpy(&f, &b, 4);
    return f;
}

void fp8_decode(const u8* scales, const u8* data, size_t n, size_t block, Out out) {
    const int shift = __builtin_ctzll(block);
    each(n, out, [=](size_t i, size_t k) __attribute__((always_inline)) {
        const V b = widen(k == 16 ? load<B>(data + i) : load<B>(data + i, k)), m = b & 0x7f;
        const V normal = (m << 20) + (120u << 23);
        const V subnormal = bits(to_float(whole(m)) * 0x1p-9f);
        const V nan = where_less(all(0x7eu), m, all(0x7fc00000u), zero());
        const F size = real(where_less(m, all(8u), subnormal, normal) | nan);
        return signed_product(size, all(e8m0(scales[i >> shift])), (b & 0x80) << 24);
    });
}

// ---- sign ----

void sign_encode(const float* x, size_t n, double* chunks, u8* out) {
    for (size_t begin = 0; begin < n; begin += chunk) {
        const size_t end = begin + chunk < n ? begin + chunk : n;
        Lanes sum;
        size_t i = begin;
        for (; i + 32 <= end; i += 32) {
            __builtin_prefetch(x + i + ahead);
            __builtin_prefetch(x + i + ahead + 16);
            sum.join(x + i, false);
            const u32 m = negative(load<F>(x + i)) | static_cast<u32>(negative(load<F>(x + i + 16))) << 16;
            store(out + i / 8, m);
        }
        if (i < end) {
            float rest[32] = {};
            std::memcpy(rest, x + i, 4 * (end - i));
            sum.join(rest, false);
            const u32 m = negative(load<F>(rest)) | static_cast<u32>(negative(load<F>(rest + 16))) << 16;
            std::memcpy(out + i / 8, &m, (end - i + 7) / 8);
        }
        *chunks++ = sum.total();
    }
}

void sign_decode(const u8* data, size_t n, float scale, Out out) {
    const V s = bits(all(scale));
    each(n, out, [=](size_t i, size_t k) __attribute__((always_inline)) {
        return real(s ^ to_top_bits(k == 16 ? load<u16>(data + i / 8) : load<u16>(data + i / 8, (k + 7) / 8)));
    });
}

// ---- natural compression ----

u32 natural_encode(const float* x, size_t n, u64 first, const Draws& draws_of, u8* signs, u8* exponents) {
    V over = zero();
    each_drawn(x, n, first, draws_of, [&](size_t i, const float* p, const u16* draws, size_t k) __attribute__((always_inline)) {
        u16 m[4];
        u8 rest[64];
        u8* const to = k == 64 ? exponents + i : rest;
        for (int j = 0; j < 4; ++j) {
            const V b = load<V>(p + 16 * j), a = b & magnitude;
            over = larger(over, a);
            m[j] = top_bits(b);
            // carries into the exponent with probability (the fraction, rounded to 16 bits)
            const V up = (a + 64 + (widen(load<H>(draws + 16 * j)) << 7)) >> 23;
            store(to + 16 * j, quarters(smaller(up, all(254u))));
        }
        std::memcpy(signs + i / 8, m, (k + 7) / 8);
        if (k < 64) std::memcpy(exponents + i, rest, k);
    });
    return reduce_max(over);
}

void natural_decode(const u8* signs, const u8* exponents, size_t n, Out out) {
    each(n, out, [=](size_t i, size_t k) __attribute__((always_inline)) {
        const V e = widen(k == 16 ? load<B>(exponents + i) : load<B>(exponents + i, k));
        const u16 m = k == 16 ? load<u16>(signs + i / 8) : load<u16>(signs + i / 8, (k + 7) / 8);
        return real(e << 23 | (e + 1) >> 8 << 22 | to_top_bits(m));  // 255 becomes NaN
    });
}

// ---- ternary ----

void ternary_codes(const float* x, size_t n, u64 first, float inverse, const Draws& draws_of, u8* codes) {
    const F inv = all(inverse);
    each_drawn(x, n, first, draws_of, [=](size_t i, const float* p, const u16* draws, size_t k) __attribute__((always_inline)) {
        u8 rest[64];
        u8* const to = k == 64 ? codes + i : rest;
        for (int j = 0; j < 4; ++j) {
            const V b = load<V>(p + 16 * j);
            // a coordinate's own 16 bits, then those of its neighbour: uniform to 32 bits, at the price of one draw
            const V h = widen(load<H>(draws + 16 * j));
            const V u = h << 16 | swap_neighbours(h);
            const F share = smaller(real(b & magnitude) * inv, all(1.0f));
            const V chance = bits(to_int(share * 0x1p30f));
            store(to + 16 * j, quarters(where_less(u >> 2, chance, bits(whole(b) >> 31 | 1), zero()) + 1));
        }
        if (k < 64) std::memcpy(codes + i, rest, k);
    });
}

void ternary_values(const u8* codes, size_t n, float scale, Out out) {
#if defined(__AVX512F__)
    const __m512 value = _mm512_castps128_ps512(_mm_setr_ps(-scale, 0.0f * scale, scale, 0.0f));
#else
    const F s = all(scale);
#endif
    each(n, out, [=](size_t i, size_t k) __attribute__((always_inline)) {
        const V c = widen(k == 16 ? load<B>(codes + i) : load<B>(codes + i, k));
#if defined(__AVX512F__)
        return F{(PartF)_mm512_permutexvar_ps((__m512i)c.part[0], value)};
#else
        return to_float(whole(c) - 1) * s;
#endif
    });
}

// Trits five a byte, 320 at a time; returns how many were done, the rest is for the plain loop.
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

// ---- natural dithering ----

void dithering_codes(const float* x, size_t n, u64 first, float inverse, int levels, const Draws& draws_of, u8* codes) {
    const F inv = all(inverse), least = all(power(1 - levels));
    const u32 base = 64u - (static_cast<u32>(128 - levels) << 23);  // half a unit of the draw, and the exponent of level 0
    each_drawn(x, n, first, draws_of, [=](size_t i, const float* p, const u16* draws, size_t k) __attribute__((always_inline)) {
        u8 rest[64];
        u8* const to = k == 64 ? codes + i : rest;
        for (int j = 0; j < 4; ++j) {
            const V b = load<V>(p + 16 * j);
            const F y = smaller(real(b & magnitude) * inv, all(1.0f));
            // 2 y where levels are powers of two, y + least where they are 0 and least: the fraction is the chance to go up
            const F z = y + larger(y, least);
            const V level = (bits(z) + (widen(load<H>(draws + 16 * j)) << 7) + base) >> 23;
            store(to + 16 * j, quarters(level << 1 | where_less(zero(), level, b >> 31, zero())));
        }
        if (k < 64) std::memcpy(codes + i, rest, k);
    });
}

void dithering_values(const u8* codes, size_t n, float scale, int levels, Out out) {
    const F s = all(scale);
    const u32 lift = static_cast<u32>(127 - levels);
    each(n, out, [=](size_t i, size_t k) __attribute__((always_inline)) {
        const V c = widen(k == 16 ? load<B>(codes + i) : load<B>(codes + i, k)), level = c >> 1;
        return real(where_less(zero(), level, (level + lift) << 23, zero()) | c << 31) * s;
    });
}

constexpr Table local_table = {
    largest,        sums,        bf16_encode,    bf16_decode,    fp16_encode,   fp16_decode,    fp8_encode,      fp8_decode,
    sign_encode,    sign_decode, natural_encode, natural_decode, ternary_codes, ternary_values, trits_pack,      trits_unpack,
    dithering_codes, dithering_values,
};

}  // namespace
}  // namespace tersegrad::casts
