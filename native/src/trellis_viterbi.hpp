// Viterbi's algorithm on vectors of the machine's width, compiled for each instruction set: lanes are independent trellises, costs are 16-bit
// numbers, decisions are bits. Everything here is local to the including file.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <bit>
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

    LOCAL_INLINE void start(H* cost) {
        int bits = 0;
        while (1 << bits < S) ++bits;
        for (int s = 0; s < S; ++s) cost[s] = all16(s ? 4096 * bits + 1 : 0);
    }

    // One step. Bit s of `first` tells that state s was entered from its first predecessor.
    template <bool Still, std::size_t... K>
    LOCAL_INLINE void step(const H* cost, H* next, H byte, H* first, std::index_sequence<K...>) {
        constexpr Branches<C> b;
        const H y = Still ? byte & 127 : byte, stays = reinterpret_cast<H>((byte & kStill) != 0);
        // Distances to the nearest multiples of four, plus 0 to 3, in 1/32.
        typedef std::int16_t Signed __attribute__((vector_size(width)));
        const Signed f0 = reinterpret_cast<Signed>((y ^ 64) - 64), f1 = reinterpret_cast<Signed>(((y + 32) & 127) - 64);
        const H p = reinterpret_cast<H>(f0 < 0 ? -f0 : f0), q = reinterpret_cast<H>(f1 < 0 ? -f1 : f1);
        const H r = 64 - p, t = 64 - q;
        const H metric[4] = {p * p, q * q, r * r, t * t};
        for (int w = 0; w < kWords; ++w) first[w] = H{};
        (
            [&]() __attribute__((always_inline)) {
                constexpr int s = static_cast<int>(K);
                const H one = cost[b.from[s][0]] + metric[b.label[s][0]];
                const H other = cost[b.from[s][1]] + metric[b.label[s][1]];
                next[s] = least(one, other);
                first[s / 16] |= reinterpret_cast<H>(next[s] == one) & static_cast<std::uint16_t>(1 << s % 16);
                if constexpr (Still) next[s] = stays != 0 ? cost[s] : next[s];
            }(),
            ...);
    }

    // Costs stay below 2^16: states differ by at most 4096 log2(S) + 1, and a step adds at most 4096, to the least of them at most 1024.
    LOCAL_INLINE void settle(H* cost) {
        H low = cost[0];
        for (int s = 1; s < S; ++s) low = least(low, cost[s]);
        for (int s = 0; s < S; ++s) cost[s] -= low;
    }

    LOCAL_INLINE H cheapest(const H* cost) {
        H best = cost[0], state = H{};
        for (int s = 1; s < S; ++s) {
            const H now = least(best, cost[s]);
            state = now != best ? all16(s) : state;
            best = now;
        }
        return state;
    }
};

template <Code C>
struct Group {
    static constexpr int S = C.states, kPlanes = (S + 7) / 8, kWords = Half<C>::kWords;
    static constexpr std::size_t kept = static_cast<std::size_t>(kPlanes) * width;

    // The even lanes leave their decisions as words, the odd ones add theirs and make planes of bytes.
    template <bool Odd, bool Still>
    LOCAL_INLINE void advance(const H* cost, H* next, const std::uint8_t* row, std::uint8_t* planes) {
        const H v = reinterpret_cast<H>(load<B>(row));
        H first[kWords];
        Half<C>::template step<Still>(cost, next, Odd ? v >> 8 : v & 255, first, std::make_index_sequence<S>{});
        if constexpr (!Odd) {
            for (int w = 0; w < kWords; ++w) store(planes + w * width, first[w]);
        } else {
            H even[kWords];
            for (int w = 0; w < kWords; ++w) even[w] = load<H>(planes + w * width);
            for (int w = 0; w < kWords; ++w) {
                store(planes + 2 * w * width, (even[w] & 255) | first[w] << 8);
                if constexpr (kPlanes > 1) store(planes + (2 * w + 1) * width, even[w] >> 8 | (first[w] & 0xff00));
            }
        }
    }

    // The last states of every other lane, once all decisions are stored.
    template <bool Odd, bool Still>
    static H pass(const std::uint8_t* low, std::size_t rows, B active, std::uint8_t* planes) {
        H a[S], b[S];
        Half<C>::start(a);
        std::size_t t = 0;
        for (; t + 2 < rows; t += 2) {
            advance<Odd, Still>(a, b, low + t * kPitch, planes + t * kept);
            advance<Odd, Still>(b, a, low + (t + 1) * kPitch, planes + (t + 1) * kept);
            if (t % 16 == 14) Half<C>::settle(a);
        }
        for (; t < rows; ++t) {
            advance<Odd, Still>(a, b, low + t * kPitch, planes + t * kept);
            const H on = reinterpret_cast<H>(active), here = t + 1 < rows ? all16(1) : Odd ? on >> 8 : on & 255;
            for (int s = 0; s < S; ++s) a[s] = here != 0 ? b[s] : a[s];
        }
        return Half<C>::cheapest(a);
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

    template <bool Still>
    static void label(const std::uint8_t* low, std::size_t rows, B active, std::uint8_t* labels, std::uint8_t* planes) {
        const H even = pass<false, Still>(low, rows, active, planes), odd = pass<true, Still>(low, rows, active, planes);
        B state = reinterpret_cast<B>(even | odd << 8);
        for (std::size_t t = rows; t-- > 0;) {
            // z0 of the step is the highest bit of the state that it led to; the first predecessor lacks g1 in its upper bits.
            const B second = choose(planes + t * kept, state) & all(C.g1);
            const B z0 = reinterpret_cast<B>(reinterpret_cast<SignedB>(state) > static_cast<std::int8_t>(S / 2 - 1));
            const B base = state ^ (z0 & all(C.g0));
            const B before = (base & all(~C.g1)) | second;
            const B z1 = reinterpret_cast<B>(((base ^ second) & all(C.g1)) != 0);
            store(labels + t * kPitch, (z0 & 1) | (z1 & 2));
            B previous = before + before + (z0 & 1);
            if constexpr (Still) previous = (load<B>(low + t * kPitch) & all(kStill)) != 0 ? state : previous;
            state = t + 1 == rows ? (active != 0 ? previous : state) : previous;
        }
    }
};

template <int Which>
void label_rows(const std::uint8_t* low, std::size_t rows, std::size_t lanes, std::size_t last, bool still, std::uint8_t* labels,
                std::vector<std::uint8_t>& scratch, rans::Ahead) {
    constexpr Code code = kCodes[Which];
    const std::size_t room = rows * Group<code>::kPlanes * width;
    if (scratch.size() < room) scratch.resize(room);
    for (std::size_t first = 0; first < lanes; first += width) {
        std::uint8_t on[width];
        for (std::size_t k = 0; k < width; ++k) on[k] = first + k < last ? 255 : 0;
        if (still) Group<code>::template label<true>(low + first, rows, load<B>(on), labels + first, scratch.data());
        else Group<code>::template label<false>(low + first, rows, load<B>(on), labels + first, scratch.data());
    }
}

}  // namespace
}  // namespace tersegrad::trellis
