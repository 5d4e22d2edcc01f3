// Reading trellis-coded symbols with tables in registers. A file of its own, so that the other loops are compiled as if there were none.
#include "rans_decoder_avx512.hpp"
#include "trellis_parts.hpp"

namespace tersegrad::trellis {
namespace {

// 32 lanes: of rANS, and of the trellises.
struct Lanes {
    rans::detail::Half x;
    __m512i s;

    void load(const Walk& w, int first) {
        rans::detail::Lane::split(w.x + first, x);
        const __m256i low = _mm512_cvtepi32_epi16(_mm512_loadu_si512(w.s + first)), high = _mm512_cvtepi32_epi16(_mm512_loadu_si512(w.s + first + 16));
        s = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    void store(Walk& w, int first) const {
        rans::detail::Lane::join(x, w.x + first);
        _mm512_storeu_si512(w.s + first, _mm512_cvtepu16_epi32(_mm512_castsi512_si256(s)));
        _mm512_storeu_si512(w.s + first + 16, _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(s, 1)));
    }
};

struct PairTables {
    rans::detail::Tables even;  // but for the coarse one they serve both
    __m512i odd_coarse, g0, g1, order;
    __m512i twice;  // the window, in bytes
    __m512 scale;
};

enum class To { bytes, store, stream };

// One chunk in registers.
struct PairLane {
    Lanes a, b;
    const std::uint8_t* words;
    std::size_t step;

    explicit PairLane(const Walk& w) : words(w.words), step(w.step) {
        a.load(w, 0);
        b.load(w, 32);
    }
    void back(Walk& w) const {
        a.store(w, 0);
        b.store(w, 32);
        w.words = words;
        w.step = step;
    }
    bool ready(const Walk& w) const { return step < w.steps && words <= w.limit; }
};

// The symbols of 32 lanes, 32 z0 added; all but new words.
template <int Probes, bool Full>
[[gnu::always_inline]] inline __m512i symbols_of(Lanes& l, const PairTables& t) {
    using namespace rans::detail;
    const __m512i one = _mm512_set1_epi16(1);
    const __mmask32 z0 = _mm512_test_epi16_mask(l.s, one);
    Tables odd;
    odd.coarse = t.odd_coarse;
    const __m512i found = take<Probes, Full>(l.x, t.even, _mm512_mask_mov_epi16(coarse_symbol(l.x, t.even), z0, coarse_symbol(l.x, odd)));
    const __m512i moved = _mm512_xor_si512(_mm512_maskz_mov_epi16(_mm512_test_epi16_mask(found, one), t.g1), _mm512_maskz_mov_epi16(z0, t.g0));
    l.s = _mm512_xor_si512(_mm512_srli_epi16(l.s, 1), moved);
    return found;
}

template <int Probes, bool Full, To to>
[[gnu::always_inline]] inline void one_step(PairLane& l, const PairTables& t, const Walk& w) {
    const __m512i p = symbols_of<Probes, Full>(l.a, t), q = symbols_of<Probes, Full>(l.b, t);
    rans::detail::refill(l.a.x, l.words);
    rans::detail::refill(l.b.x, l.words);
    const std::size_t at = l.step++ * rans::kLanes;
    const __m512i both = _mm512_permutex2var_epi8(p, t.order, q);
    const __mmask64 odd = _mm512_test_epi8_mask(both, _mm512_set1_epi8(32));
    const __m512i symbol = _mm512_and_si512(both, _mm512_set1_epi8(31));
    _mm512_storeu_si512(w.out + at, _mm512_mask_add_epi8(symbol, odd, symbol, _mm512_set1_epi8(-128)));
    if constexpr (to != To::bytes) {
        const __m512i even = _mm512_sub_epi8(_mm512_add_epi8(symbol, symbol), t.twice);
        const __m512i n = _mm512_mask_add_epi8(even, odd, even, _mm512_set1_epi8(1));
        const __m128i quarters[4] = {_mm512_castsi512_si128(n), _mm512_extracti32x4_epi32(n, 1), _mm512_extracti32x4_epi32(n, 2), _mm512_extracti32x4_epi32(n, 3)};
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(quarters[j])), t.scale);
            if constexpr (to == To::stream) _mm512_stream_ps(w.values + at + 16 * j, v);
            else _mm512_storeu_ps(w.values + at + 16 * j, v);
        }
    }
}

// As walk, with tables in registers: a gather takes longer than all of this. Two chunks hide each other's latency.
template <int Probes, bool Full, To to>
void walk_pair_any(Walk& w, Walk* other) {
    PairTables t;
    t.even.load(w.pair->image);
    t.even.coarse = _mm512_load_si512(w.pair->coarse[0]);
    t.odd_coarse = _mm512_load_si512(w.pair->coarse[1]);
    t.g0 = _mm512_set1_epi16(static_cast<short>(w.code.g0));
    t.g1 = _mm512_set1_epi16(static_cast<short>(w.code.g1));
    t.order = rans::detail::even_bytes();
    t.twice = _mm512_set1_epi8(static_cast<char>(2 * w.window));
    t.scale = _mm512_set1_ps(w.scale);
    PairLane l(w);
    if (other) {
        PairLane m(*other);
        while (l.ready(w) && m.ready(*other)) {
            one_step<Probes, Full, to>(l, t, w);
            one_step<Probes, Full, to>(m, t, *other);
        }
        m.back(*other);
    } else {
        while (l.ready(w)) one_step<Probes, Full, to>(l, t, w);
    }
    l.back(w);
}

template <bool Full, To to>
void walk_pair_probing(Walk& w, Walk* other) {
    switch (w.pair->probes) {
        case 1: return walk_pair_any<1, Full, to>(w, other);
        case 2: return walk_pair_any<2, Full, to>(w, other);
        case 3: return walk_pair_any<3, Full, to>(w, other);
        case 4: return walk_pair_any<4, Full, to>(w, other);
        default: return walk_pair_any<5, Full, to>(w, other);
    }
}

template <bool Full>
void walk_pair_to(Walk& w, Walk* other) {
    const auto aligned = [](const Walk* one) { return !one || reinterpret_cast<std::uintptr_t>(one->values) % 64 == 0; };
    if (!w.values) return walk_pair_probing<Full, To::bytes>(w, other);
    if (w.around && aligned(&w) && aligned(other)) return walk_pair_probing<Full, To::stream>(w, other);
    walk_pair_probing<Full, To::store>(w, other);
}

}  // namespace

void walk_pair_avx512(Walk& w, Walk* other) { w.pair->full ? walk_pair_to<true>(w, other) : walk_pair_to<false>(w, other); }

}  // namespace tersegrad::trellis
