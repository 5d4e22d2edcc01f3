// Viterbi's algorithm with AVX-512: as trellis_viterbi.hpp, but decisions stay in masks, from which a permute of bytes fetches them back.
// Only for files that are compiled with those instructions.
#pragma once
#include "trellis_viterbi.hpp"

namespace tersegrad::trellis {
namespace {

template <Code C>
struct Masked {
    using V = __m512i;
    static constexpr int S = C.states;
    // Bytes of a step: of every state a bit for each of the 32 even lanes, then of the odd ones, which tells that it was entered from its
    // first predecessor.
    static constexpr std::size_t kept = 8 * S;

    struct Metrics {
        V of[4];
    };
    // As Half::step, of every other lane of a row.
    template <bool Odd, bool Still>
    LOCAL_INLINE Metrics metrics(V row, __mmask32& stays) {
        V y = Odd ? _mm512_srli_epi16(row, 8) : Still ? row : _mm512_and_si512(row, _mm512_set1_epi16(255));
        if constexpr (Still) {
            stays = _mm512_test_epi16_mask(y, _mm512_set1_epi16(kStill));
            y = _mm512_and_si512(y, _mm512_set1_epi16(127));
        }
        // Distances to the nearest multiples of four, plus 0 to 3, in 1/32.
        const auto circle = [](V v) { return _mm512_min_epu16(v, _mm512_sub_epi16(_mm512_set1_epi16(128), v)); };
        const V half = _mm512_set1_epi16(64), p = circle(y), r = _mm512_sub_epi16(half, p);
        const V t = circle(_mm512_and_si512(_mm512_add_epi16(y, _mm512_set1_epi16(32)), _mm512_set1_epi16(127))), q = _mm512_sub_epi16(half, t);
        return {{_mm512_mullo_epi16(p, p), _mm512_mullo_epi16(q, q), _mm512_mullo_epi16(r, r), _mm512_mullo_epi16(t, t)}};
    }

    // Entering state s.
    template <int s>
    LOCAL_INLINE V enter(const V* cost, const Metrics& metric, std::uint8_t* first) {
        constexpr Branches<C> b;
        const V one = _mm512_add_epi16(cost[b.from[s][0]], metric.of[b.label[s][0]]), other = _mm512_add_epi16(cost[b.from[s][1]], metric.of[b.label[s][1]]);
        _store_mask32(reinterpret_cast<__mmask32*>(first + 8 * s), _mm512_cmple_epu16_mask(one, other));
        return _mm512_min_epu16(one, other);
    }
    template <bool Still, std::size_t... K>
    LOCAL_INLINE void step(const V* cost, V* next, const Metrics& metric, __mmask32 stays, std::uint8_t* first, std::index_sequence<K...>) {
        ((next[K] = enter<static_cast<int>(K)>(cost, metric, first)), ...);
        if constexpr (Still) ((next[K] = _mm512_mask_mov_epi16(next[K], stays, cost[K])), ...);
    }

    // Two steps lead to four states from the same four, by way of four others. Where registers cannot hold all states, memory holds them between
    // pairs of steps.
    template <int u>
    LOCAL_INLINE void enter_twice(const V* cost, V* next, const Metrics* metric, std::uint8_t* first) {
        constexpr Branches<C> b;
        constexpr int half = C.g1 / 2, one = b.from[u][0], two = b.from[u][1], three = b.from[u ^ half][0], four = b.from[u ^ half][1];
        V middle[S];
        middle[one] = enter<one>(cost, metric[0], first);
        middle[two] = enter<two>(cost, metric[0], first);
        middle[three] = enter<three>(cost, metric[0], first);
        middle[four] = enter<four>(cost, metric[0], first);
        next[u] = enter<u>(middle, metric[1], first + kept);
        next[u ^ half] = enter<u ^ half>(middle, metric[1], first + kept);
        next[u ^ C.g1] = enter<u ^ C.g1>(middle, metric[1], first + kept);
        next[u ^ C.g1 ^ half] = enter<u ^ C.g1 ^ half>(middle, metric[1], first + kept);
    }
    template <bool Odd, std::size_t... K>
    LOCAL_INLINE void two_steps(const V* cost, V* next, const std::uint8_t* low, std::uint8_t* first, std::index_sequence<K...>) {
        __mmask32 none;
        const Metrics metric[2] = {metrics<Odd, false>(_mm512_loadu_si512(low), none), metrics<Odd, false>(_mm512_loadu_si512(low + kPitch), none)};
        // The states whose bits g1 and g1 / 2 are zero.
        (enter_twice<static_cast<int>(K / (C.g1 / 2) * 2 * C.g1 + K % (C.g1 / 2))>(cost, next, metric, first), ...);
    }

    template <bool Odd, bool Still>
    LOCAL_INLINE void advance(const V* cost, V* next, const std::uint8_t* low, std::uint8_t* first) {
        __mmask32 stays = 0;
        const Metrics metric = metrics<Odd, Still>(_mm512_loadu_si512(low), stays);
        step<Still>(cost, next, metric, stays, first, std::make_index_sequence<S>{});
    }

    // As Half::settle.
    LOCAL_INLINE void settle(V* cost) {
        V low = cost[0];
        for (int s = 1; s < S; ++s) low = _mm512_min_epu16(low, cost[s]);
        for (int s = 0; s < S; ++s) cost[s] = _mm512_sub_epi16(cost[s], low);
    }

    // The last states of every other lane, once all decisions are stored. Meanwhile memory is fetched.
    template <bool Odd, bool Still>
    static V pass(const std::uint8_t* low, std::size_t rows, __mmask64 active, std::uint8_t* planes, rans::Ahead& ahead) {
        V a[S], b[S];
        int bits = 0;
        while (1 << bits < S) ++bits;
        for (int s = 0; s < S; ++s) a[s] = _mm512_set1_epi16(static_cast<short>(s ? 4096 * bits + 1 : 0));
        std::uint8_t* const first = planes + (Odd ? 4 : 0);
        const char *line = static_cast<const char*>(ahead.begin), *const end = static_cast<const char*>(ahead.end);
        std::size_t t = 0;
        constexpr bool pairs = S == 32 && !Still;
        constexpr std::size_t stride = pairs ? 4 : 2;
        for (; t + stride < rows; t += stride) {
#pragma GCC unroll 8
            for (std::size_t k = 0; k < 2 * stride; ++k) _mm_prefetch(line + 64 * k, _MM_HINT_T1);
            line = line + 128 * stride < end ? line + 128 * stride : line;
            if constexpr (pairs) {
                two_steps<Odd>(a, b, low + t * kPitch, first + t * kept, std::make_index_sequence<S / 4>{});
                two_steps<Odd>(b, a, low + (t + 2) * kPitch, first + (t + 2) * kept, std::make_index_sequence<S / 4>{});
            } else {
                advance<Odd, Still>(a, b, low + t * kPitch, first + t * kept);
                advance<Odd, Still>(b, a, low + (t + 1) * kPitch, first + (t + 1) * kept);
            }
            if ((t + stride) % 16 == 0) settle(a);
        }
        ahead.begin = line;
        for (; t < rows; ++t) {
            advance<Odd, Still>(a, b, low + t * kPitch, first + t * kept);
            const auto here = t + 1 < rows ? ~__mmask32{0} : static_cast<__mmask32>(_pext_u64(active, Odd ? 0xaaaaaaaaaaaaaaaa : 0x5555555555555555));
            for (int s = 0; s < S; ++s) a[s] = _mm512_mask_mov_epi16(a[s], here, b[s]);
        }
        V best = a[0], state = _mm512_setzero_si512();
        for (int s = 1; s < S; ++s) {
            const V now = _mm512_min_epu16(best, a[s]);
            state = _mm512_mask_mov_epi16(state, _mm512_cmpneq_epu16_mask(now, best), _mm512_set1_epi16(static_cast<short>(s)));
            best = now;
        }
        return state;
    }

    // Whether lanes came from their first predecessors: the bit of 16 g1. Bytes of `at`: state << 3 | where the masks hold the lane; those of
    // `turn` move its bit there, without a mask, which would take longer than to find the byte.
    LOCAL_INLINE V first_of(const std::uint8_t* first, V at, V turn) {
        const V row = _mm512_loadu_si512(first);
        V found;
        if constexpr (S <= 8) {
            found = _mm512_permutexvar_epi8(at, row);
        } else {
            found = _mm512_permutex2var_epi8(row, at, _mm512_loadu_si512(first + 64));
            if constexpr (S == 32) {
                const V upper = _mm512_permutex2var_epi8(_mm512_loadu_si512(first + 128), at, _mm512_loadu_si512(first + 192));
                found = _mm512_mask_mov_epi8(found, _mm512_movepi8_mask(at), upper);
            }
        }
        return _mm512_multishift_epi64_epi8(turn, found);
    }

    template <bool Still>
    static void label(const std::uint8_t* low, std::size_t rows, __mmask64 active, std::uint8_t* labels, std::uint8_t* planes, rans::Ahead ahead) {
        const V even = pass<false, Still>(low, rows, active, planes, ahead), odd = pass<true, Still>(low, rows, active, planes, ahead);
        alignas(64) std::uint8_t places[64], turns[64];
        constexpr int target = std::countr_zero(static_cast<unsigned>(C.g1 << 4));
        for (int k = 0; k < 64; ++k) {
            places[k] = static_cast<std::uint8_t>((k & 1) << 2 | k >> 4);
            turns[k] = static_cast<std::uint8_t>((8 * (k & 7) + (k >> 1 & 7) - target) & 63);
        }
        const V place = _mm512_load_si512(places), turn = _mm512_load_si512(turns);
        const auto byte = [](int v) { return _mm512_set1_epi8(static_cast<char>(v)); };
        // What is left of twice a state: without its highest bit, which g0 cancels, and without that of g1. The lowest is z0.
        constexpr int stay = (S - 2) << 3 & ~(C.g1 << 4), odd_adds = (C.g0 << 4 & stay) | 8;
        V at = _mm512_or_si512(_mm512_slli_epi16(_mm512_or_si512(even, _mm512_slli_epi16(odd, 8)), 3), place);
        for (std::size_t t = rows; t-- > 0;) {
            // z0 of the step is the highest bit of the state that it led to; the first predecessor lacks g1 in its upper bits.
            const V first = first_of(planes + t * kept, at, turn);
            const __mmask64 z0 = _mm512_test_epi8_mask(at, byte(S / 2 << 3));
            const __mmask64 z1 = _kxnor_mask64(_mm512_test_epi8_mask(first, byte(C.g1 << 4)), _mm512_test_epi8_mask(at, byte(C.g1 << 3)));
            const V label = _mm512_maskz_mov_epi8(z0, byte(1));
            _mm512_storeu_si512(labels + t * kPitch, _mm512_mask_add_epi8(label, z1, label, byte(2)));
            // twice & stay | place
            const V lower = _mm512_ternarylogic_epi64(_mm512_add_epi8(at, at), byte(stay), place, 0xea);
            const V one = _mm512_xor_si512(lower, _mm512_maskz_mov_epi8(z0, byte(odd_adds)));
            // one | 16 g1 & ~first
            V previous = _mm512_ternarylogic_epi64(one, byte(C.g1 << 4), first, 0xf4);
            __mmask64 moves = t + 1 == rows ? active : ~__mmask64{0};
            if constexpr (Still) moves &= ~_mm512_movepi8_mask(_mm512_loadu_si512(low + t * kPitch));
            if (Still || t + 1 == rows) previous = _mm512_mask_mov_epi8(at, moves, previous);
            at = previous;
        }
    }
};

template <int Which>
void label_masked(const std::uint8_t* low, std::size_t rows, std::size_t lanes, std::size_t last, bool still, std::uint8_t* labels,
                  std::vector<std::uint8_t>& scratch, rans::Ahead ahead) {
    using M = Masked<kCodes[Which]>;
    const std::size_t room = rows * M::kept + 64;
    if (scratch.size() < room) scratch.resize(room);
    // A fetch from a page whose address is not translated yet holds up all work for a hundred nanoseconds. Of all pages at once not for much longer.
    constexpr std::ptrdiff_t page = 4096;
    for (auto at = static_cast<const char*>(ahead.begin), end = static_cast<const char*>(ahead.end); at < end; at += std::min(page, end - at))
        _mm_prefetch(at, _MM_HINT_T1);
    const __mmask64 active = _bzhi_u64(~0ull, static_cast<unsigned>(std::min(last, lanes)));
    if (still) M::template label<true>(low, rows, active, labels, scratch.data(), ahead);
    else M::template label<false>(low, rows, active, labels, scratch.data(), ahead);
}

}  // namespace
}  // namespace tersegrad::trellis
