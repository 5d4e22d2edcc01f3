// Sixteen 32-bit lanes on every instruction set: integers (V, I), floats (F), halves (H) and bytes (B), and what the loops of the
// casts do with them. Everything here is local to the including file, so that no inline function compiled for one machine ends up
// running on another.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

}  // namespace
}  // namespace tersegrad::casts
