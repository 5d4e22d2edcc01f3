// The loops of trellis-coded quantisation, written once on vectors of the machine's width and compiled for each instruction set.
// Everything here is local to the including file.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <bit>
#include <cfloat>
#include <utility>

#include "trellis_parts.hpp"
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors pass between inlined functions only
#endif

#define LOCAL_INLINE static inline __attribute__((always_inline))

namespace tersegrad::trellis {
namespace {

#if defined(__AVX512F__)
constexpr int width = 64;
#elif defined(__AVX2__)
constexpr int width = 32;
#else
constexpr int width = 16;
#endif
typedef std::uint8_t B __attribute__((vector_size(width)));
typedef std::int8_t SignedB __attribute__((vector_size(width)));
typedef std::uint16_t H __attribute__((vector_size(width)));
typedef std::uint32_t U __attribute__((vector_size(width)));
constexpr int lanes32 = width / 4;

template <class V>
LOCAL_INLINE V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
LOCAL_INLINE void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
LOCAL_INLINE B all(int v) { return B{} + static_cast<std::uint8_t>(v); }
LOCAL_INLINE H all16(int v) { return H{} + static_cast<std::uint16_t>(v); }
LOCAL_INLINE H least(H a, H b) { return a < b ? a : b; }

// 1 << (s mod 8).
LOCAL_INLINE B bit_of(B s) {
#if defined(__AVX512F__)
    const __m512i powers = _mm512_set1_epi64(static_cast<long long>(0x8040201008040201ull));
    return reinterpret_cast<B>(_mm512_shuffle_epi8(powers, reinterpret_cast<__m512i>(s)));
#elif defined(__AVX2__)
    const __m256i powers = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
    return reinterpret_cast<B>(_mm256_shuffle_epi8(powers, reinterpret_cast<__m256i>(s)));
#else
    B v = all(1) + (s & 1);
    v = (s & 2) != 0 ? v << 2 : v;
    return (s & 4) != 0 ? v << 4 : v;
#endif
}

// ---- Viterbi's algorithm ----

template <Code C>
struct Branches {  // predecessors and labels, in the order that decides ties
    int from[C.states][2] = {}, label[C.states][2] = {};
    constexpr Branches() {
        int seen[C.states] = {};
        for (int s = 0; s < C.states; ++s)
            for (int z1 = 0; z1 < 2; ++z1) {
                const int to = s >> 1 ^ (z1 ? C.g1 : 0) ^ (s & 1 ? C.g0 : 0);
                from[to][seen[to]] = s;
                label[to][seen[to]++] = 2 * z1 + (s & 1);
            }
    }
};

// Every other lane of a group: the bytes of the even lanes and those of the odd ones are 16-bit numbers without any shuffle.
template <Code C>
struct Half {
    static constexpr int S = C.states, kWords = (S + 15) / 16;
    H cost[S];

    LOCAL_INLINE void start(Half& h) {
        int bits = 0;
        while (1 << bits < S) ++bits;
        for (int s = 0; s < S; ++s) h.cost[s] = all16(s ? 4096 * bits + 1 : 0);
    }

    // One step. Bit s of `first` tells that state s was entered from its first predecessor.
    template <bool Masked, std::size_t... K>
    LOCAL_INLINE void step(Half& h, H y, H active, H* first, std::index_sequence<K...>) {
        constexpr Branches<C> b;
        // Distances to the nearest multiples of four, plus 0 to 3, in 1/32.
        typedef std::int16_t I __attribute__((vector_size(width)));
        const I f0 = reinterpret_cast<I>((y ^ 64) - 64), f1 = reinterpret_cast<I>(((y + 32) & 127) - 64);
        const H p = reinterpret_cast<H>(f0 < 0 ? -f0 : f0), q = reinterpret_cast<H>(f1 < 0 ? -f1 : f1);
        const H r = 64 - p, t = 64 - q;
        const H metric[4] = {p * p, q * q, r * r, t * t};
        H next[S];
        for (int w = 0; w < kWords; ++w) first[w] = H{};
        (
            [&] {
                constexpr int s = static_cast<int>(K);
                const H a = h.cost[b.from[s][0]] + metric[b.label[s][0]];
                const H c = h.cost[b.from[s][1]] + metric[b.label[s][1]];
                next[s] = least(a, c);
                first[s / 16] |= reinterpret_cast<H>(next[s] == a) & static_cast<std::uint16_t>(1 << s % 16);
            }(),
            ...);
        for (int s = 0; s < S; ++s) {
            if constexpr (Masked) h.cost[s] = active != 0 ? next[s] : h.cost[s];
            else h.cost[s] = next[s];
        }
    }

    // Costs stay below 2^16: states differ by at most 4096 log2(S) + 1, and a step adds at most 4096, to the least of them at most 1024.
    LOCAL_INLINE void settle(Half& h) {
        H low = h.cost[0];
        for (int s = 1; s < S; ++s) low = least(low, h.cost[s]);
        for (int s = 0; s < S; ++s) h.cost[s] -= low;
    }

    LOCAL_INLINE H cheapest(const Half& h) {
        H best = h.cost[0], state = H{};
        for (int s = 1; s < S; ++s) {
            const H now = least(best, h.cost[s]);
            state = now != best ? all16(s) : state;
            best = now;
        }
        return state;
    }
};

template <Code C>
struct Group {
    static constexpr int S = C.states, kPlanes = (S + 7) / 8;
    using Halves = Half<C>;

    template <bool Masked>
    LOCAL_INLINE void advance(Halves* h, const std::uint8_t* row, B active, std::uint8_t* planes) {
        const B bytes = load<B>(row);
        H even[Halves::kWords], odd[Halves::kWords];
        const H v = reinterpret_cast<H>(bytes), on = reinterpret_cast<H>(active);
        Halves::template step<Masked>(h[0], v & 255, on & 255, even, std::make_index_sequence<S>{});
        Halves::template step<Masked>(h[1], v >> 8, on >> 8, odd, std::make_index_sequence<S>{});
        for (int w = 0; w < Halves::kWords; ++w) {
            store(planes + 2 * w * width, (even[w] & 255) | odd[w] << 8);
            if constexpr (kPlanes > 1) store(planes + (2 * w + 1) * width, even[w] >> 8 | (odd[w] & 0xff00));
        }
    }

    LOCAL_INLINE B choose(const std::uint8_t* planes, B state) {
        B plane = load<B>(planes);
        if constexpr (kPlanes >= 2) plane = (state & 8) != 0 ? load<B>(planes + width) : plane;
        if constexpr (kPlanes >= 4) {
            const B upper = (state & 8) != 0 ? load<B>(planes + 3 * width) : load<B>(planes + 2 * width);
            plane = (state & 16) != 0 ? upper : plane;
        }
        return reinterpret_cast<B>((plane & bit_of(state)) == 0);  // entered from the second predecessor
    }

    static void label(const std::uint8_t* low, std::size_t rows, B active, std::uint8_t* labels, std::uint8_t* planes) {
        constexpr std::size_t kept = static_cast<std::size_t>(kPlanes) * width;
        Halves h[2];
        Halves::start(h[0]);
        Halves::start(h[1]);
        for (std::size_t t = 0; t + 1 < rows; ++t) {
            advance<false>(h, low + t * kPitch, active, planes + t * kept);
            if (t % 16 == 15) {
                Halves::settle(h[0]);
                Halves::settle(h[1]);
            }
        }
        advance<true>(h, low + (rows - 1) * kPitch, active, planes + (rows - 1) * kept);
        B state = reinterpret_cast<B>(Halves::cheapest(h[0]) | Halves::cheapest(h[1]) << 8);
        for (std::size_t t = rows; t-- > 0;) {
            // z0 of the step is the highest bit of the state that it led to; the first predecessor lacks g1 in its upper bits.
            const B second = choose(planes + t * kept, state) & all(C.g1);
            const B z0 = reinterpret_cast<B>(reinterpret_cast<SignedB>(state) > static_cast<std::int8_t>(S / 2 - 1));
            const B base = state ^ (z0 & all(C.g0));
            const B before = (base & all(~C.g1)) | second;
            const B z1 = reinterpret_cast<B>(((base ^ second) & all(C.g1)) != 0);
            store(labels + t * kPitch, (z0 & 1) | (z1 & 2));
            const B previous = before + before + (z0 & 1);
            state = t + 1 == rows ? (active != 0 ? previous : state) : previous;
        }
    }
};

template <int Which>
void label_rows(const std::uint8_t* low, std::size_t rows, std::size_t lanes, std::size_t last, std::uint8_t* labels,
                std::vector<std::uint8_t>& scratch) {
    constexpr Code code = kCodes[Which];
    const std::size_t room = rows * Group<code>::kPlanes * width;
    if (scratch.size() < room) scratch.resize(room);
    for (std::size_t first = 0; first < lanes; first += width) {
        std::uint8_t on[width];
        for (std::size_t k = 0; k < width; ++k) on[k] = first + k < last ? 255 : 0;
        Group<code>::label(low + first, rows, load<B>(on), labels + first, scratch.data());
    }
}

// ---- between floats and integers ----

// Sums of 32 lanes, folded as everywhere.
LOCAL_INLINE double folded(double* lanes) {
    for (int half = 16; half > 0; half /= 2)
        for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    return lanes[0];
}

template <bool Dithered>
float convert_any(const float* x, std::size_t n, float scale, std::int32_t sign, const std::uint16_t* draws, std::int32_t* y, std::uint8_t* low,
                  double* norm) {
    double squares[32] = {};
    float tops[32] = {};
    const auto one = [&](std::size_t i, std::size_t k) __attribute__((always_inline)) {
        const float v = x[i] * scale, size = std::fabs(v);
        tops[k] = size > tops[k] ? size : tops[k];
        squares[k] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
        // Beyond 2^30 the message does not need y.
        const float held = size < 0x1p30f ? v : 0.0f;
        std::int32_t r = static_cast<std::int32_t>(std::nearbyintf(held));
        if constexpr (Dithered) r = (sign * r + (draws[i] & 0x7fff) + 128) >> (kUnit - 5);
        y[i] = r;
        low[i] = static_cast<std::uint8_t>(r & 127);
    };
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (std::size_t k = 0; k < 32; ++k) one(i + k, k);
    for (std::size_t k = 0; i + k < n; ++k) one(i + k, k);
    float top = 0;
    for (const float v : tops) top = std::max(top, v);
    *norm = folded(squares);
    return top;
}

float convert_plain(const float* x, std::size_t n, float scale, std::int32_t* y, std::uint8_t* low, double* norm) {
    return convert_any<false>(x, n, scale, 1, nullptr, y, low, norm);
}
float convert_dithered(const float* x, std::size_t n, float scale, std::int32_t sign, const std::uint16_t* draws, std::int32_t* y,
                       std::uint8_t* low, double* norm) {
    return convert_any<true>(x, n, scale, sign, draws, y, low, norm);
}

template <bool Small>
void place_any(const float* x, const std::int32_t* y, const std::uint8_t* labels, std::size_t n, int window, std::uint8_t* out, Sums& sums) {
    double dots[32] = {}, energies[32] = {};
    std::int32_t squares[32] = {}, tops[32] = {};
    const auto one = [&](std::size_t i, std::size_t k) __attribute__((always_inline)) {
        const std::int32_t v = integer_of(y[i], labels[i]), size = v ^ v >> 31;
        dots[k] += static_cast<double>(x[i]) * static_cast<double>(v);
        if constexpr (Small) squares[k] += v * v;
        else energies[k] += static_cast<double>(v) * static_cast<double>(v);
        tops[k] = size > tops[k] ? size : tops[k];
        // The lowest two bits stay.
        const std::int32_t rest = v & 3, low = rest - 2 * window, high = rest + 2 * window - 4;
        const std::int32_t up = v < low ? low : v, kept = up > high ? high : up;
        out[i] = static_cast<std::uint8_t>(kept + 2 * window);
    };
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (std::size_t k = 0; k < 32; ++k) one(i + k, k);
    for (std::size_t k = 0; i + k < n; ++k) one(i + k, k);
    std::int64_t whole = 0;
    for (int k = 0; k < 32; ++k) {
        whole += squares[k];
        sums.top = std::max(sums.top, static_cast<std::uint32_t>(tops[k]));
    }
    sums.dot = folded(dots);
    sums.energy = Small ? static_cast<double>(whole) : folded(energies);
}

void place(const float* x, const std::int32_t* y, const std::uint8_t* labels, std::size_t n, int window, std::uint8_t* out, Sums& sums) {
    std::int32_t top = 0;
    for (std::size_t i = 0; i < n; ++i) top |= y[i] ^ y[i] >> 31;
    // Integers up to 1026: 32 bits hold the sum of 128 squares, and any order gives the same sum.
    if (top < 1 << 15) place_any<true>(x, y, labels, n, window, out, sums);
    else place_any<false>(x, y, labels, n, window, out, sums);
}

void place_dithered(const std::int32_t* y, const std::uint8_t* labels, const std::uint16_t* draws, std::size_t n, int window, int bits,
                    std::uint8_t* symbols, std::uint8_t* tables, std::uint32_t& top) {
    std::int32_t most = static_cast<std::int32_t>(top);
    for (std::size_t i = 0; i < n; ++i) {
        const std::int32_t u = draws[i] & 0x7fff, v = integer_of(y[i], labels[i]), t = rest_of(v & 1, u);
        const std::int32_t m = (v * (1 << kUnit) - u - t) >> (kUnit + 1), a = t >= 0 ? m : -m, size = a ^ a >> 31;
        most = size > most ? size : most;
        const std::int32_t odd = a & 1, low = odd - window, high = odd + window - 2;
        const std::int32_t up = a < low ? low : a, kept = up > high ? high : up;
        symbols[i] = static_cast<std::uint8_t>(kept + window);
        const std::int32_t far = (t < 0 ? -t : t) << bits >> kUnit, last = (1 << bits) - 1;
        tables[i] = static_cast<std::uint8_t>(far < last ? far : last);
    }
    top = static_cast<std::uint32_t>(most);
}

LOCAL_INLINE float limited(float v) { return v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v; }

void restore_plain(const std::uint8_t* in, std::size_t n, int window, float scale, float* out) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::int32_t v = in[i];
        out[i] = limited(static_cast<float>(2 * ((v & 127) - window) + (v >> 7)) * scale);
    }
}

void restore_dithered(const std::uint8_t* in, std::size_t n, int window, float scale, std::int32_t sign, const std::uint16_t* draws, float* out) {
    for (std::size_t i = 0; i < n; ++i) {
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

typedef std::uint8_t Few __attribute__((vector_size(lanes32)));

template <bool Dithered>
void walk_any(Walk& w) {
    constexpr int groups = rans::kLanes / lanes32;
    U x[groups], s[groups];
    for (int g = 0; g < groups; ++g) x[g] = load<U>(w.x + g * lanes32), s[g] = load<U>(w.s + g * lanes32);
    const std::uint8_t* words = w.words;
    const std::uint32_t g0 = static_cast<std::uint32_t>(w.code.g0), g1 = static_cast<std::uint32_t>(w.code.g1);
    std::size_t step = w.step;
    for (; step < w.steps && words <= w.limit; ++step) {
        const std::size_t first = step * rans::kLanes;
        U e[groups], flip[groups];
#pragma GCC unroll 16
        for (int g = 0; g < groups; ++g) {
            const U z0 = s[g] & 1;
            U table = z0;
            flip[g] = U{};
            if constexpr (Dithered) {
                const U facts = __builtin_convertvector(load<Few>(w.facts + first + static_cast<std::size_t>(g * lanes32)), U) >> (z0 * 4);
                table = facts & 7;
                flip[g] = facts >> 3 & 1;
            }
            e[g] = look_up(w.slots, (x[g] & (rans::kTotal - 1)) | table << rans::kPrecision);
        }
#pragma GCC unroll 16
        for (int g = 0; g < groups; ++g) {
            const U z0 = s[g] & 1, symbol = e[g] & 255;
            const U y = ((e[g] >> 8 & (rans::kTotal - 1)) + 1) * (x[g] >> rans::kPrecision) + (e[g] >> 20);
            x[g] = refill(y, words);
            s[g] = s[g] >> 1 ^ ((symbol & 1) ^ flip[g]) * g1 ^ z0 * g0;
            store(w.out + first + static_cast<std::size_t>(g * lanes32), __builtin_convertvector(symbol | z0 << 7, Few));
        }
    }
    for (int g = 0; g < groups; ++g) store(w.x + g * lanes32, x[g]), store(w.s + g * lanes32, s[g]);
    w.words = words;
    w.step = step;
}

void walk(Walk& w) {
    if (w.facts) walk_any<true>(w);
    else walk_any<false>(w);
}

constexpr Implementation loops = {convert_plain, convert_dithered, {label_rows<0>, label_rows<1>, label_rows<2>, label_rows<3>}, place,
                                  place_dithered, restore_plain, restore_dithered, walk};

}  // namespace
}  // namespace tersegrad::trellis
