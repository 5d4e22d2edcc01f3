#include "rans_decoder_avx512.hpp"
#include "trellis_loops.hpp"

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
};

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

template <int Probes, bool Full>
[[gnu::always_inline]] inline void one_step(PairLane& l, const PairTables& t, std::uint8_t* out) {
    const __m512i p = symbols_of<Probes, Full>(l.a, t), q = symbols_of<Probes, Full>(l.b, t);
    rans::detail::refill(l.a.x, l.words);
    rans::detail::refill(l.b.x, l.words);
    const __m512i both = _mm512_permutex2var_epi8(p, t.order, q);
    const __m512i symbol = _mm512_and_si512(both, _mm512_set1_epi8(31)), z0 = _mm512_and_si512(_mm512_slli_epi16(both, 2), _mm512_set1_epi8(-128));
    _mm512_storeu_si512(out + l.step++ * rans::kLanes, _mm512_or_si512(symbol, z0));
}

// As walk, with tables in registers: a gather takes longer than all of this. Two chunks hide each other's latency.
template <int Probes, bool Full>
void walk_pair_any(Walk& w, Walk* other) {
    PairTables t;
    t.even.load(w.pair->image);
    t.even.coarse = _mm512_load_si512(w.pair->coarse[0]);
    t.odd_coarse = _mm512_load_si512(w.pair->coarse[1]);
    t.g0 = _mm512_set1_epi16(static_cast<short>(w.code.g0));
    t.g1 = _mm512_set1_epi16(static_cast<short>(w.code.g1));
    t.order = rans::detail::even_bytes();
    PairLane l(w);
    if (other) {
        PairLane m(*other);
        while (l.ready(w) && m.ready(*other)) {
            one_step<Probes, Full>(l, t, w.out);
            one_step<Probes, Full>(m, t, other->out);
        }
        m.back(*other);
    } else {
        while (l.ready(w)) one_step<Probes, Full>(l, t, w.out);
    }
    l.back(w);
}

template <bool Full>
void walk_pair_probing(Walk& w, Walk* other) {
    switch (w.pair->probes) {
        case 1: return walk_pair_any<1, Full>(w, other);
        case 2: return walk_pair_any<2, Full>(w, other);
        case 3: return walk_pair_any<3, Full>(w, other);
        case 4: return walk_pair_any<4, Full>(w, other);
        default: return walk_pair_any<5, Full>(w, other);
    }
}

void walk_pair(Walk& w, Walk* other) { w.pair->full ? walk_pair_probing<true>(w, other) : walk_pair_probing<false>(w, other); }

constexpr Implementation with_pairs() {
    Implementation all = loops;
    all.walk_pair = walk_pair;
    return all;
}

}  // namespace

const Implementation avx512 = with_pairs();
}  // namespace tersegrad::trellis
