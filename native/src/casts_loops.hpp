// The loops of every instruction set, written once on vectors of sixteen lanes. Included by casts.cpp, casts_avx2.cpp and
// casts_avx512.cpp, which are built with different flags: everything here is local to the including file.
#pragma once
#include <cfloat>
#include <cstring>

#include "casts_table.hpp"
#include "philox_loops.hpp"
#include "trits_loops.hpp"
#include "vec16.hpp"

namespace tersegrad::casts {
namespace {

constexpr size_t ahead = 2048;  // floats; prefetching 8 KB ahead hides most of the latency of one core's reads

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

// Calls body(i, x, draws, n) for every 64 coordinates; the last group is padded with zeros and has n < 64 real ones.
template <class Body>
LOCAL_INLINE void each_drawn(const float* x, size_t n, u64 first, const Stream& stream, Body&& body) {
    alignas(64) u16 draws[64];
    Draws source(stream, first >> 3);
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        for (int k = 0; k < 64; k += 16) __builtin_prefetch(x + i + ahead + k);
        source.next(draws);
        body(i, x + i, draws, size_t{64});
    }
    if (i < n) {
        alignas(64) float rest[64] = {};
        std::memcpy(rest, x + i, 4 * (n - i));
        source.next(draws);
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

// Thirty-two running sums per chunk, coordinate j joining sum j % 32; then the upper half is added onto the lower until one is left.
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

// ---- fp8 e4m3, one power of two per block ----

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

u32 natural_encode(const float* x, size_t n, u64 first, const Stream& stream, u8* signs, u8* exponents) {
    V over = zero();
    each_drawn(x, n, first, stream, [&](size_t i, const float* p, const u16* draws, size_t k) __attribute__((always_inline)) {
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

void ternary_codes(const float* x, size_t n, u64 first, float inverse, const Stream& stream, u8* codes) {
    const F inv = all(inverse);
    each_drawn(x, n, first, stream, [=](size_t i, const float* p, const u16* draws, size_t k) __attribute__((always_inline)) {
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

// ---- natural dithering ----

void natural_levels_codes(const float* x, size_t n, u64 first, float inverse, int levels, const Stream& stream, u8* codes) {
    const F inv = all(inverse), least = all(power(1 - levels));
    const u32 base = 64u - (static_cast<u32>(128 - levels) << 23);  // half a unit of the draw, and the exponent of level 0
    each_drawn(x, n, first, stream, [=](size_t i, const float* p, const u16* draws, size_t k) __attribute__((always_inline)) {
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

void natural_levels_values(const u8* codes, size_t n, float scale, int levels, Out out) {
    const F s = all(scale);
    const u32 lift = static_cast<u32>(127 - levels);
    each(n, out, [=](size_t i, size_t k) __attribute__((always_inline)) {
        const V c = widen(k == 16 ? load<B>(codes + i) : load<B>(codes + i, k)), level = c >> 1;
        return real(where_less(zero(), level, (level + lift) << 23, zero()) | c << 31) * s;
    });
}

constexpr Table local_table = {
    largest,     sums,        bf16_encode,    bf16_decode,    fp16_encode,   fp16_decode,    fp8_encode, fp8_decode,
    sign_encode, sign_decode, natural_encode, natural_decode, ternary_codes, ternary_values, trits_pack, trits_largest,
    trits_unpack, natural_levels_codes, natural_levels_values,
};

}  // namespace
}  // namespace tersegrad::casts
