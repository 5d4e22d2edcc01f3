// The other loops of trellis-coded quantisation, written once on vectors of the machine's width and compiled for each instruction set.
// Everything here is local to the including file.
#pragma once
#include <cfloat>

#include "trellis_viterbi.hpp"
#if defined(__AVX512F__)
#include "trellis_viterbi_avx512.hpp"
#endif

namespace tersegrad::trellis {
namespace {

// ---- between floats and integers ----

// Sums of 32 lanes, folded as everywhere.
LOCAL_INLINE double folded(double* lanes) {
    for (int half = 16; half > 0; half /= 2)
        for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    return lanes[0];
}

typedef float F __attribute__((vector_size(width)));
typedef std::int32_t I __attribute__((vector_size(width)));
typedef double D __attribute__((vector_size(width)));
typedef float HalfF __attribute__((vector_size(width / 2)));
typedef std::int32_t HalfI __attribute__((vector_size(width / 2)));
constexpr int lanes64 = width / 8, kBlock = 32, kGroups = kBlock / lanes32;

// The compiler would convert halves of 512 bits one by one.
LOCAL_INLINE D doubles(HalfF v) {
#if defined(__AVX512F__)
    return reinterpret_cast<D>(_mm512_cvtps_pd(reinterpret_cast<__m256>(v)));
#else
    return __builtin_convertvector(v, D);
#endif
}
LOCAL_INLINE D doubles(HalfI v) {
#if defined(__AVX512F__)
    return reinterpret_cast<D>(_mm512_cvtepi32_pd(reinterpret_cast<__m256i>(v)));
#else
    return __builtin_convertvector(v, D);
#endif
}
// a * b + c of a product that float64 holds exactly, so that fusing changes nothing.
LOCAL_INLINE D plus_product(D a, D b, D c) {
#if defined(__AVX512F__)
    return reinterpret_cast<D>(_mm512_fmadd_pd(reinterpret_cast<__m512d>(a), reinterpret_cast<__m512d>(b), reinterpret_cast<__m512d>(c)));
#else
    return c + a * b;
#endif
}

// The compiler would convert bytes one by one.
LOCAL_INLINE I bytes_at(const std::uint8_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<I>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return reinterpret_cast<I>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    I v;
    for (int k = 0; k < lanes32; ++k) v[k] = p[k];
    return v;
#endif
}
LOCAL_INLINE I draws_at(const std::uint16_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<I>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))) & 0x7fff;
#elif defined(__AVX2__)
    return reinterpret_cast<I>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))) & 0x7fff;
#else
    I v;
    for (int k = 0; k < lanes32; ++k) v[k] = p[k] & 0x7fff;
    return v;
#endif
}
// kBlock numbers of 0..255 as bytes.
LOCAL_INLINE void store_bytes(std::uint8_t* p, const I* v) {
#if defined(__AVX512F__)
    for (int g = 0; g < kGroups; ++g) _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16 * g), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v[g])));
#elif defined(__AVX2__)
    const auto at = [&](int g) { return reinterpret_cast<__m256i>(v[g]); };
    const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(at(0), at(1)), _mm256_packus_epi32(at(2), at(3)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
    for (int k = 0; k < kBlock; ++k) p[k] = static_cast<std::uint8_t>(v[k / lanes32][k % lanes32]);
#endif
}

// To nearest, ties to even; anything where 32 bits do not hold it.
LOCAL_INLINE I rounded_all(F v) {
#if defined(__AVX512F__)
    return reinterpret_cast<I>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__)
    return reinterpret_cast<I>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(v)));
#else
    I r;
    for (int k = 0; k < lanes32; ++k) r[k] = std::fabs(v[k]) < 0x1p30f ? rounded(v[k]) : 0;
    return r;
#endif
}

template <bool Dithered>
LOCAL_INLINE I grid_of(F v, const Grid& grid, std::size_t i) {
    I y = rounded_all(v);
    if constexpr (Dithered) {
        // Unsigned: numbers that are too large to be coded come here too.
        const U sum = reinterpret_cast<U>(y) * static_cast<std::uint32_t>(grid.sign) + reinterpret_cast<U>(draws_at(grid.draws + i)) + 128;
        y = reinterpret_cast<I>(sum) >> (kUnit - 5);
    }
    return y;
}

// kBlock numbers, kept within -127 .. 127, plus 128 as bytes.
LOCAL_INLINE void store_levels(std::uint8_t* p, const I* v) {
#if defined(__AVX512F__)
    for (int g = 0; g < kGroups; ++g) {
        const __m128i kept = _mm_max_epi8(_mm512_cvtsepi32_epi8(reinterpret_cast<__m512i>(v[g])), _mm_set1_epi8(-kHighest));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16 * g), _mm_xor_si128(kept, _mm_set1_epi8(-128)));
    }
#elif defined(__AVX2__)
    const auto at = [&](int g) { return reinterpret_cast<__m256i>(v[g]); };
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(at(0), at(1)), _mm256_packs_epi32(at(2), at(3)));
    const __m256i kept = _mm256_max_epi8(_mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), _mm256_set1_epi8(-kHighest));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_xor_si256(kept, _mm256_set1_epi8(-128)));
#else
    for (int k = 0; k < kBlock; ++k) p[k] = static_cast<std::uint8_t>(std::clamp(v[k / lanes32][k % lanes32], -kHighest, kHighest) + kCenter);
#endif
}

#if defined(__AVX512F__)
// As convert_any without dither, on 16-bit numbers: of as many coordinates as vectors of 64 hold. -1: some |y| is too large for that.
template <bool Norm>
float convert_words(const float* x, std::size_t n, float scale, std::uint8_t* low, std::uint8_t* levels, D* sums) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const auto word = [](int v) { return _mm512_set1_epi16(static_cast<short>(v)); };
    const __m512 by = _mm512_set1_ps(scale);
    __m512i top = _mm512_setzero_si512();
    for (std::size_t i = 0; i + 64 <= n; i += 64) {
        const auto y = [&](std::size_t g) { return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i + 16 * g), by)); };
        // Quarters of the vectors take turns, until the last bytes are put in order.
        const __m512i a = _mm512_packs_epi32(y(0), y(1)), b = _mm512_packs_epi32(y(2), y(3));
        top = _mm512_max_epu16(top, _mm512_max_epu16(_mm512_abs_epi16(a), _mm512_abs_epi16(b)));
        const __m512i bits = _mm512_packus_epi16(_mm512_and_si512(a, word(127)), _mm512_and_si512(b, word(127)));
        _mm512_storeu_si512(low + i, _mm512_permutexvar_epi32(order, bits));
        const auto level = [&](__m512i v) { return _mm512_srai_epi16(_mm512_adds_epi16(v, word(1 << (kLevelBits - 1))), kLevelBits); };
        const __m512i kept = _mm512_max_epi8(_mm512_packs_epi16(level(a), level(b)), _mm512_set1_epi8(-kHighest));
        _mm512_storeu_si512(levels + i, _mm512_permutexvar_epi32(order, _mm512_xor_si512(kept, _mm512_set1_epi8(-kCenter))));
#pragma GCC unroll 8
        for (std::size_t g = 0; Norm && g < 8; ++g) {
            const D v = doubles(load<HalfF>(x + i + 8 * g));
            sums[g % 4] = plus_product(v, v, sums[g % 4]);
        }
    }
    const auto most = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(top, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(top, 16)));
    return most < 0x7fff ? static_cast<float>(most) : -1;
}
#endif

template <bool Dithered, bool Levels, bool Norm>
float convert_any(const float* x, std::size_t n, const Grid& grid, std::uint8_t* low, std::uint8_t* levels, double* norm) {
    constexpr int bits = Dithered ? kDitheredLevelBits : kLevelBits;
    double squares[kBlock] = {};
    F top = F{};
    float last = 0;
    D sums[kBlock / lanes64] = {};
    std::size_t i = 0;
#if defined(__AVX512F__)
    if constexpr (Levels && !Dithered) {
        last = convert_words<Norm>(x, n, grid.scale, low, levels, sums);
        if (last >= 0) i = n / 64 * 64;
        else std::fill_n(sums, kBlock / lanes64, D{});
    }
#endif
    for (; i + kBlock <= n; i += kBlock) {
        I y[kGroups], level[kGroups];
#pragma GCC unroll 8
        for (int g = 0; g < kGroups; ++g) {
            const std::size_t at = i + static_cast<std::size_t>(g * lanes32);
            const F v = load<F>(x + at) * grid.scale, size = reinterpret_cast<F>(reinterpret_cast<U>(v) & 0x7fffffffu);
            top = size > top ? size : top;
            y[g] = grid_of<Dithered>(v, grid, at) & 127;
            if constexpr (Levels) {
                // Unsigned: numbers that are too large to be coded come here too.
                level[g] = reinterpret_cast<I>(reinterpret_cast<U>(rounded_all(v)) + (1u << (bits - 1))) >> bits;
            }
        }
        store_bytes(low + i, y);
        if constexpr (Levels) store_levels(levels + i, level);
#pragma GCC unroll 16
        for (int g = 0; Norm && g < kBlock / lanes64; ++g) {
            const D v = doubles(load<HalfF>(x + i + static_cast<std::size_t>(g * lanes64)));
            sums[g] = plus_product(v, v, sums[g]);
        }
    }
    std::memcpy(squares, sums, sizeof squares);
    for (std::size_t k = 0; i + k < n; ++k) {
        const float v = x[i + k] * grid.scale, size = std::fabs(v);
        last = size > last ? size : last;
        squares[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
        std::int32_t y = size < 0x1p30f ? rounded(v) : 0;
        if constexpr (Levels) levels[i + k] = static_cast<std::uint8_t>(std::clamp((y + (1 << (bits - 1))) >> bits, -kHighest, kHighest) + kCenter);
        if constexpr (Dithered) y = with_dither(y, grid.sign, grid.draws[i + k]);
        low[i + k] = static_cast<std::uint8_t>(y & 127);
    }
    for (int k = 0; k < lanes32; ++k) last = std::max(last, static_cast<float>(top[k]));
    if constexpr (Norm) *norm = folded(squares);
    return last;
}

float convert(const float* x, std::size_t n, const Grid& grid, std::uint8_t* low, std::uint8_t* levels, double* norm) {
    if (grid.draws) {
        const auto dithered = levels ? norm ? convert_any<true, true, true> : convert_any<true, true, false> : convert_any<true, false, true>;
        return dithered(x, n, grid, low, levels, norm);
    }
    return norm ? convert_any<false, true, true>(x, n, grid, low, levels, norm) : convert_any<false, true, false>(x, n, grid, low, levels, norm);
}

// Integers that are small have squares whose sum 32 bits hold, and which any order of adding up gives exactly.
// Still coordinates have sums of their own.
template <bool Small, bool Still>
void place_any(const float* x, const std::uint8_t* labels, const std::uint8_t* adds, std::size_t n, const Grid& grid, int window, std::uint8_t* out,
               Sums& sums) {
    constexpr int kinds = Still ? 2 : 1;
    double dots[kinds][kBlock] = {}, energies[kinds][kBlock] = {};
    D dot[kinds][kBlock / lanes64] = {}, energy[kinds][kBlock / lanes64] = {};
    I squares[kinds] = {}, top = I{};
    const std::int32_t twice = 2 * window;
    std::size_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        alignas(64) std::int32_t chosen[kinds][kBlock];
        I symbols[kGroups];
#pragma GCC unroll 8
        for (int g = 0; g < kGroups; ++g) {
            const std::size_t at = i + static_cast<std::size_t>(g * lanes32);
            const I y = rounded_all(load<F>(x + at) * grid.scale);
            I label = bytes_at(labels + at), v = (((y - (label << 5) + 64) >> 7) << 2) + label;
            if constexpr (Still) {
                const I add = bytes_at(adds + at), sign = y >> 31, alone = (((((y ^ sign) - sign + add) >> kLevelBits << 1) ^ sign) - sign);
                const I stays = add != 0, mine = alone & stays, others = v & ~stays;
                store(chosen[0] + g * lanes32, others);
                store(chosen[1] + g * lanes32, mine);
                if constexpr (Small) squares[0] += others * others, squares[1] += mine * mine;
                v = mine | others;
                label = v & 3;
            } else {
                store(chosen[0] + g * lanes32, v);
                if constexpr (Small) squares[0] += v * v;
            }
            const I size = v ^ v >> 31;
            top = size > top ? size : top;
            // The lowest two bits stay.
            const I lowest = label - twice, highest = label + (twice - 4);
            const I up = v < lowest ? lowest : v, kept = up > highest ? highest : up;
            symbols[g] = kept + twice;
        }
        store_bytes(out + i, symbols);
#pragma GCC unroll 16
        for (int g = 0; g < kBlock / lanes64; ++g) {
            const D value = doubles(load<HalfF>(x + i + static_cast<std::size_t>(g * lanes64)));
            for (int kind = 0; kind < kinds; ++kind) {
                const D v = doubles(load<HalfI>(chosen[kind] + g * lanes64));
                dot[kind][g] = plus_product(value, v, dot[kind][g]);
                if constexpr (!Small) energy[kind][g] += v * v;
            }
        }
    }
    std::memcpy(dots, dot, sizeof dots);
    std::memcpy(energies, energy, sizeof energies);
    std::int64_t whole[kinds] = {};
    std::int32_t most = 0;
    for (int k = 0; k < lanes32; ++k) {
        for (int kind = 0; kind < kinds; ++kind) whole[kind] += squares[kind][k];
        most = std::max(most, static_cast<std::int32_t>(top[k]));
    }
    for (std::size_t k = 0; i + k < n; ++k) {
        const std::int32_t y = rounded(x[i + k] * grid.scale), add = Still ? adds[i + k] : 0;
        const std::int32_t v = add ? alone_of(y, add) : integer_of(y, labels[i + k]), label = v & 3;
        most = std::max(most, v ^ v >> 31);
        dots[add ? kinds - 1 : 0][k] += static_cast<double>(x[i + k]) * static_cast<double>(v);
        energies[add ? kinds - 1 : 0][k] += static_cast<double>(v) * static_cast<double>(v);
        out[i + k] = static_cast<std::uint8_t>(std::min(std::max(v, label - twice), label + twice - 4) + twice);
    }
    for (int kind = 0; kind < kinds; ++kind) {
        sums.dot[kind] = folded(dots[kind]);
        sums.energy[kind] = folded(energies[kind]) + static_cast<double>(whole[kind]);
    }
    sums.top = std::max(sums.top, static_cast<std::uint32_t>(most));
}

void place(const float* x, const std::uint8_t* labels, const std::uint8_t* adds, std::size_t n, const Grid& grid, bool small, int window,
           std::uint8_t* out, Sums& sums) {
    if (adds) return small ? place_any<true, true>(x, labels, adds, n, grid, window, out, sums) : place_any<false, true>(x, labels, adds, n, grid, window, out, sums);
    return small ? place_any<true, false>(x, labels, adds, n, grid, window, out, sums) : place_any<false, false>(x, labels, adds, n, grid, window, out, sums);
}

// Bytes less `offset`, a vector's share of `block` bytes at a time.
template <int offset>
struct Doubles {
    static constexpr int block = std::max(width, kBlock);
#if defined(__AVX512F__)
    // As the lowest bits of 2^52: a permute and a subtraction each.
    __m512i bytes;
    [[gnu::always_inline]] void put(int, B v) { bytes = reinterpret_cast<__m512i>(v); }
    [[gnu::always_inline]] D at(int g) const {
        const __m512i large = _mm512_set1_epi64(0x4330000000000000), index = _mm512_set_epi64(7 + 8 * g, 6 + 8 * g, 5 + 8 * g, 4 + 8 * g, 3 + 8 * g, 2 + 8 * g, 1 + 8 * g, 8 * g);
        const __m512i v = _mm512_mask_permutexvar_epi8(large, 0x0101010101010101, index, bytes);
        return reinterpret_cast<D>(_mm512_sub_pd(_mm512_castsi512_pd(v), _mm512_set1_pd(0x1p52 + offset)));
    }
#else
    alignas(64) std::uint8_t bytes[block];
    [[gnu::always_inline]] void put(int k, B v) { store(bytes + k, v - all(offset)); }
    [[gnu::always_inline]] D at(int g) const {
        const std::uint8_t* const p = bytes + g * lanes64;
#if defined(__AVX2__)
        return reinterpret_cast<D>(_mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_loadu_si32(p))));
#else
        D v;
        for (int k = 0; k < lanes64; ++k) v[k] = static_cast<std::int8_t>(p[k]);
        return v;
#endif
    }
#endif
};

// Sums of the squares of four neighbours each; they are above -128.
LOCAL_INLINE I squares_of(B n) {
#if defined(__AVX512F__)
    const __m512i size = _mm512_abs_epi8(reinterpret_cast<__m512i>(n));
    return reinterpret_cast<I>(_mm512_madd_epi16(_mm512_maddubs_epi16(size, size), _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
    const __m256i size = _mm256_abs_epi8(reinterpret_cast<__m256i>(n));
    return reinterpret_cast<I>(_mm256_madd_epi16(_mm256_maddubs_epi16(size, size), _mm256_set1_epi16(1)));
#else
    I sum = I{};
    for (int k = 0; k < width; ++k) {
        const std::int32_t v = static_cast<std::int8_t>(n[k]);
        sum[k / 4] += v * v;
    }
    return sum;
#endif
}

// y = 32 m + some bits, and n is the label plus a multiple of four: so n - label = m + 2 - label without its lowest two bits. The level is
// m / 2, rounded up.
template <bool Norm>
void place_near_any(const float* x, const std::uint8_t* low, const std::uint8_t* levels, const std::uint8_t* labels, std::size_t n, std::uint8_t* out,
                    Sums& sums, double* norm) {
    constexpr int offset = 2 * kUsual, block = std::max(width, kBlock);
    double dots[kBlock] = {}, norms[kBlock] = {};
    D dot[kBlock / lanes64] = {}, all_squares[kBlock / lanes64] = {};
    I squares = I{};
    B least = all(255), most = B{};
    std::size_t i = 0;
    for (; i + block <= n; i += block) {
        Doubles<offset> chosen;
        for (int k = 0; k < block; k += width) {
            const std::size_t at = i + static_cast<std::size_t>(k);
            const B level = load<B>(levels + at), label = load<B>(labels + at);
            const B half = reinterpret_cast<B>(reinterpret_cast<H>(load<B>(low + at)) >> 5) & all(1);
            const B symbol = ((level + level + all(2 + offset - 2 * kCenter) - half - label) & all(~3)) | label;
            least = symbol < least ? symbol : least;
            most = symbol > most ? symbol : most;
            store(out + at, symbol);
            squares += squares_of(symbol - all(offset));
            chosen.put(k, symbol);
        }
#pragma GCC unroll 16
        for (int g = 0; g < block / lanes64; ++g) {
            const D value = doubles(load<HalfF>(x + i + static_cast<std::size_t>(g * lanes64)));
            D& sum = dot[g % (kBlock / lanes64)];
            sum = plus_product(value, chosen.at(g), sum);
            if constexpr (Norm) {
                D& square = all_squares[g % (kBlock / lanes64)];
                square = plus_product(value, value, square);
            }
        }
    }
    std::memcpy(dots, dot, sizeof dots);
    std::memcpy(norms, all_squares, sizeof norms);
    std::int64_t whole = 0;
    for (int k = 0; k < lanes32; ++k) whole += squares[k];
    std::int32_t low_end = 255, high_end = 0;
    for (int k = 0; k < width; ++k) low_end = std::min<std::int32_t>(low_end, least[k]), high_end = std::max<std::int32_t>(high_end, most[k]);
    for (std::size_t k = 0; i + k < n; ++k) {
        const std::size_t at = i + k;
        const std::int32_t label = labels[at], v = ((2 * (levels[at] - kCenter) + 2 - (low[at] >> 5 & 1) - label) & ~3) + label;
        low_end = std::min(low_end, v + offset), high_end = std::max(high_end, v + offset);
        dots[k % kBlock] += static_cast<double>(x[at]) * v;
        norms[k % kBlock] += static_cast<double>(x[at]) * static_cast<double>(x[at]);
        whole += v * v;
        out[at] = static_cast<std::uint8_t>(v + offset);
    }
    sums.dot[0] = folded(dots);
    sums.energy[0] = static_cast<double>(whole);
    if (n) sums.top = std::max(sums.top, static_cast<std::uint32_t>(std::max(high_end - offset, offset - 1 - low_end)));
    if constexpr (Norm) *norm = folded(norms);
}
void place_near(const float* x, const std::uint8_t* low, const std::uint8_t* levels, const std::uint8_t* labels, std::size_t n, std::uint8_t* out, Sums& sums,
                double* norm) {
    norm ? place_near_any<true>(x, low, levels, labels, n, out, sums, norm) : place_near_any<false>(x, low, levels, labels, n, out, sums, norm);
}

void place_dithered(const float* x, const std::uint8_t* labels, std::size_t n, const Grid& grid, int window, int bits, std::uint8_t* symbols,
                    std::uint8_t* tables, std::uint32_t& top) {
    std::int32_t most = static_cast<std::int32_t>(top);
    const std::int32_t last = (1 << bits) - 1;
    const auto one = [&](auto y, auto label, auto u, auto lowest_bit, auto& kept, auto& table, auto& size) __attribute__((always_inline)) {
        const auto v = (((y - (label << 5) + 64) >> 7) << 2) + label;
        const auto t = ((((v & 1) << kUnit) - u + (1 << kUnit)) & ((2 << kUnit) - 1)) - (1 << kUnit);
        const auto m = ((v << kUnit) - u - t) >> (kUnit + 1);
        const auto minus = t >> 31;  // -1 where t is negative
        const auto a = (m ^ minus) - minus;
        size = a ^ a >> 31;
        const auto odd = a & 1, lowest = odd - window, highest = odd + (window - 2);
        const auto up = a < lowest ? lowest : a;
        kept = (up > highest ? highest : up) + window;
        const auto far = ((t ^ minus) - minus) << bits >> kUnit, end = lowest_bit + last;
        table = far < end ? far : end;
    };
    std::size_t i = 0;
    I tops = I{};
    for (; i + kBlock <= n; i += kBlock) {
        I kept[kGroups], table[kGroups];
        for (int g = 0; g < kGroups; ++g) {
            const std::size_t at = i + static_cast<std::size_t>(g * lanes32);
            I size;
            one(grid_of<true>(load<F>(x + at) * grid.scale, grid, at), bytes_at(labels + at), draws_at(grid.draws + at), I{}, kept[g], table[g], size);
            tops = size > tops ? size : tops;
        }
        store_bytes(symbols + i, kept);
        store_bytes(tables + i, table);
    }
    for (int k = 0; k < lanes32; ++k) most = std::max(most, static_cast<std::int32_t>(tops[k]));
    for (; i < n; ++i) {
        std::int32_t kept, table, size;
        const std::int32_t y = with_dither(rounded(x[i] * grid.scale), grid.sign, grid.draws[i]);
        one(y, static_cast<std::int32_t>(labels[i]), static_cast<std::int32_t>(grid.draws[i] & 0x7fff), 0, kept, table, size);
        most = std::max(most, size);
        symbols[i] = static_cast<std::uint8_t>(kept);
        tables[i] = static_cast<std::uint8_t>(table);
    }
    top = static_cast<std::uint32_t>(most);
}

void learn(const std::uint16_t* draws, std::size_t n, int bits, std::uint8_t* facts) {
    const std::int32_t last = (1 << bits) - 1;
    std::size_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        I both[kGroups];
        for (int g = 0; g < kGroups; ++g) {
            const I u = draws_at(draws + i + static_cast<std::size_t>(g * lanes32));
            both[g] = I{};
            for (int z0 = 0; z0 < 2; ++z0) {
                const I t = (((z0 << kUnit) - u + (1 << kUnit)) & ((2 << kUnit) - 1)) - (1 << kUnit), minus = t >> 31;
                const I far = ((t ^ minus) - minus) << bits >> kUnit, end = I{} + last;
                both[g] |= ((far < end ? far : end) | ((t + u) >> (kUnit + 1) & 1) << 3) << 4 * z0;
            }
        }
        store_bytes(facts + i, both);
    }
    for (; i < n; ++i) facts[i] = both_facts(draws[i], bits);
}

void translate(const std::uint8_t* in, std::size_t n, const std::uint8_t* table, std::uint8_t* out) {
    std::size_t i = 0;
#if defined(__AVX512F__)
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    for (; i + width <= n; i += width) store(out + i, _mm512_shuffle_epi8(all, load<__m512i>(in + i)));
#elif defined(__AVX2__)
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    for (; i + width <= n; i += width) store(out + i, _mm256_shuffle_epi8(all, load<__m256i>(in + i)));
#endif
    for (; i < n; ++i) out[i] = table[in[i]];
}

void shift(std::uint8_t* bytes, std::size_t n, std::uint8_t by) {
    for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::uint8_t>(bytes[i] - by);
}

LOCAL_INLINE float limited(float v) { return v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v; }

LOCAL_INLINE F floats_of(I v) { return __builtin_convertvector(v, F); }
LOCAL_INLINE F limited_all(F v) {
    const F most = F{} + FLT_MAX, least = -most;
    v = v > most ? most : v;
    return v < least ? least : v;
}

// To memory that is aligned to a vector.
LOCAL_INLINE void store_around(float* p, F v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(p, reinterpret_cast<__m512>(v));
#elif defined(__AVX2__)
    _mm256_stream_ps(p, reinterpret_cast<__m256>(v));
#else
    store(p, v);
#endif
}

template <bool Around>
LOCAL_INLINE void restore_to(const std::uint8_t* in, std::size_t n, int window, float scale, float* out) {
    std::size_t i = 0;
    for (; i + lanes32 <= n; i += lanes32) {
        const I v = bytes_at(in + i);
        const F value = limited_all(floats_of(((v & 127) << 1) + (v >> 7) - 2 * window) * scale);
        if constexpr (Around) store_around(out + i, value);
        else store(out + i, value);
    }
    for (; i < n; ++i) {
        const std::int32_t v = in[i];
        out[i] = limited(static_cast<float>(2 * ((v & 127) - window) + (v >> 7)) * scale);
    }
}
void restore_plain(const std::uint8_t* in, std::size_t n, int window, float scale, bool around, float* out) {
    if (around && reinterpret_cast<std::uintptr_t>(out) % width == 0) return restore_to<true>(in, n, window, scale, out);
    restore_to<false>(in, n, window, scale, out);
}

void restore_still(const std::uint8_t* in, const std::uint8_t* firsts, std::size_t n, int window, float scale, float still, float* out) {
    std::size_t i = 0;
    for (; i + lanes32 <= n; i += lanes32) {
        const I v = bytes_at(in + i), stays = (bytes_at(firsts + i) & kStill) != 0;
        store(out + i, limited_all(floats_of(((v & 127) << 1) + (v >> 7) - 2 * window) * (stays != 0 ? F{} + still : F{} + scale)));
    }
    for (; i < n; ++i) {
        const std::int32_t v = in[i];
        out[i] = limited(static_cast<float>(2 * ((v & 127) - window) + (v >> 7)) * (firsts[i] & kStill ? still : scale));
    }
}

void restore_dithered(const std::uint8_t* in, std::size_t n, int window, float scale, std::int32_t sign, const std::uint16_t* draws, float* out) {
    std::size_t i = 0;
    for (; i + lanes32 <= n; i += lanes32) {
        const I v = bytes_at(in + i), a = (v & 127) - window, u = draws_at(draws + i);
        const I t = ((((v >> 7) << kUnit) - u + (1 << kUnit)) & ((2 << kUnit) - 1)) - (1 << kUnit), minus = t >> 31;
        const I value = (((a ^ minus) - minus) << (kUnit + 1)) + t;
        store(out + i, limited_all(floats_of(value * sign) * 0x1p-13f * scale));
    }
    for (; i < n; ++i) {
        const std::int32_t v = in[i], a = (v & 127) - window, t = rest_of(v >> 7, draws[i] & 0x7fff);
        const std::int32_t value = sign * ((t >= 0 ? a : -a) * (2 << kUnit) + t);
        out[i] = limited(static_cast<float>(value) * 0x1p-13f * scale);
    }
}

// ---- decoding symbols and states together ----

LOCAL_INLINE U look_up(const std::uint32_t* slots, U index) {
#if defined(__AVX512F__)
    return reinterpret_cast<U>(_mm512_i32gather_epi32(reinterpret_cast<__m512i>(index), reinterpret_cast<const int*>(slots), 4));
#else
    U e;
    for (int k = 0; k < lanes32; ++k) e[k] = slots[index[k]];
    return e;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
struct Expand {  // moves[m][lane]: how many lanes below it are in m
    alignas(32) std::uint8_t moves[256][8] = {};
    constexpr Expand() {
        for (unsigned m = 0; m < 256; ++m)
            for (unsigned lane = 0, k = 0; lane < 8; ++lane)
                if (m >> lane & 1) moves[m][lane] = static_cast<std::uint8_t>(k++);
    }
};
constexpr Expand expand;
#endif

// States below 2^16 take a word each, in the order of the lanes.
LOCAL_INLINE U refill(U y, const std::uint8_t*& words) {
#if defined(__AVX512F__)
    const __m512i v = reinterpret_cast<__m512i>(y);
    const __mmask16 empty = _mm512_cmplt_epu32_mask(v, _mm512_set1_epi32(rans::kFirst));
    const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
    words += 2 * std::popcount(static_cast<unsigned>(empty));
    return reinterpret_cast<U>(_mm512_mask_or_epi32(v, empty, _mm512_slli_epi32(v, 16), _mm512_maskz_expand_epi32(empty, w)));
#elif defined(__AVX2__)
    const __m256i v = reinterpret_cast<__m256i>(y);
    const __m256i empty = _mm256_cmpeq_epi32(_mm256_srli_epi32(v, 16), _mm256_setzero_si256());
    const auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(empty)));
    const __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
    const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(expand.moves[mask])));
    words += 2 * std::popcount(mask);
    return reinterpret_cast<U>(
        _mm256_blendv_epi8(v, _mm256_or_si256(_mm256_slli_epi32(v, 16), _mm256_permutevar8x32_epi32(w, order)), empty));
#else
    for (int k = 0; k < lanes32; ++k) {
        const std::uint32_t empty = y[k] < rans::kFirst, word = static_cast<std::uint32_t>(words[0]) | static_cast<std::uint32_t>(words[1]) << 8;
        y[k] = y[k] << 16 * empty | (word & (0u - empty));
        words += 2 * empty;
    }
    return y;
#endif
}

template <bool Dithered, bool Classed>
void walk_any(Walk& w) {
    constexpr int groups = rans::kLanes / lanes32;
    U x[groups], s[groups];
    for (int g = 0; g < groups; ++g) x[g] = load<U>(w.x + g * lanes32), s[g] = load<U>(w.s + g * lanes32);
    const std::uint8_t* words = w.words;
    const std::uint32_t g0 = static_cast<std::uint32_t>(w.code.g0), g1 = static_cast<std::uint32_t>(w.code.g1);
    std::size_t step = w.step;
    for (; step < w.steps && words <= w.limit; ++step) {
        const std::size_t first = step * rans::kLanes;
        U e[groups], flip[groups], stays[groups];
        I found[groups];
#pragma GCC unroll 16
        for (int g = 0; g < groups; ++g) {
            const std::size_t at = first + static_cast<std::size_t>(g * lanes32);
            U z0 = s[g] & 1, begin = U{};
            flip[g] = stays[g] = U{};
            if constexpr (Classed) {
                begin = reinterpret_cast<U>(bytes_at(w.firsts + at));
                stays[g] = U{} - (begin >> 7);
                begin &= 127;
                z0 &= ~stays[g];
            }
            U table = z0;
            if constexpr (Dithered) {
                const U facts = reinterpret_cast<U>(bytes_at(w.facts + at)) >> (z0 * 4);
                table = facts & 7;
                flip[g] = facts >> 3 & 1;
            }
            e[g] = look_up(w.slots, (x[g] & (rans::kTotal - 1)) | (begin + table) << rans::kPrecision);
        }
#pragma GCC unroll 16
        for (int g = 0; g < groups; ++g) {
            U z0 = s[g] & 1;
            const U symbol = e[g] & 255;
            const U y = ((e[g] >> 8 & (rans::kTotal - 1)) + 1) * (x[g] >> rans::kPrecision) + (e[g] >> 20);
            x[g] = refill(y, words);
            const U next = s[g] >> 1 ^ ((symbol & 1) ^ flip[g]) * g1 ^ z0 * g0;
            s[g] = Classed ? (s[g] & stays[g]) | (next & ~stays[g]) : next;
            if constexpr (Classed) z0 &= ~stays[g];
            found[g] = reinterpret_cast<I>(symbol | z0 << 7);
        }
        for (int half = 0; half < rans::kLanes / kBlock; ++half)
            store_bytes(w.out + first + static_cast<std::size_t>(half * kBlock), found + half * kGroups);
    }
    for (int g = 0; g < groups; ++g) store(w.x + g * lanes32, x[g]), store(w.s + g * lanes32, s[g]);
    w.words = words;
    w.step = step;
}

void walk(Walk& w) {
    if (w.firsts) return w.facts ? walk_any<true, true>(w) : walk_any<false, true>(w);
    return w.facts ? walk_any<true, false>(w) : walk_any<false, false>(w);
}

#if defined(__AVX512F__)
#define LABEL label_masked
#define PAIR walk_pair_avx512
#else
#define LABEL label_rows
#define PAIR nullptr
#endif
constexpr Implementation loops = {convert,   {LABEL<0>, LABEL<1>, LABEL<2>, LABEL<3>}, place,         place_near,       place_dithered, learn,
                                  translate, shift,                                    restore_plain, restore_still, restore_dithered, walk, PAIR};

}  // namespace
}  // namespace tersegrad::trellis
