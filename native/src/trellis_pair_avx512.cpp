// Reading trellis-coded symbols with tables in registers. A file of its own, so that the other loops are compiled as if there were none.
#include "rans_decoder_avx512.hpp"
#include "trellis_parts.hpp"

namespace tersegrad::trellis {
namespace {

enum class To { bytes, store, stream };

// Entries of both tables as words, so that one permute finds one: that of symbol s and z0 at 32 z0 + s.
struct Words {
    __m512i below, above;
    Words(const std::uint8_t* low, const std::uint8_t* high) {
        alignas(64) std::uint16_t words[64];
        for (int k = 0; k < 64; ++k) words[k] = static_cast<std::uint16_t>(low[k] | high[k] << 8);
        below = _mm512_load_si512(words);
        above = _mm512_load_si512(words + 32);
    }
    __m512i at(__m512i index) const { return _mm512_permutex2var_epi16(below, index, above); }
};

struct PairTables {
    Words start, scaled;
    __m512i coarse[2], g0, g1, order, twice;
    __m512i spread[4];
    __m512 scale;

    explicit PairTables(const Walk& w) : start(w.pair->image.start_low, w.pair->image.start_high), scaled(w.pair->image.scaled_low, w.pair->image.scaled_high) {
        for (int z0 = 0; z0 < 2; ++z0) coarse[z0] = _mm512_load_si512(w.pair->coarse[z0]);
        g0 = _mm512_set1_epi16(static_cast<short>(w.code.g0));
        g1 = _mm512_set1_epi16(static_cast<short>(w.code.g1));
        order = rans::detail::even_bytes();
        twice = _mm512_set1_epi8(static_cast<char>(2 * w.window));
        alignas(64) std::uint8_t bytes[4][64] = {};
        for (int k = 0; k < 64; ++k) bytes[k / 16][4 * (k % 16) + 3] = static_cast<std::uint8_t>(k);
        for (int j = 0; j < 4; ++j) spread[j] = _mm512_load_si512(bytes[j]);
        // Integers stand in the highest bytes of their words.
        scale = _mm512_set1_ps(w.scale * 0x1p-24f);
    }
};

// Chunks in registers, of 64 lanes in two halves each.
template <int Chunks>
struct Flow {
    static constexpr int halves = 2 * Chunks;
    rans::detail::Half x[halves];
    __m512i s[halves];  // states of the trellises
    const std::uint8_t* words[Chunks];
    std::size_t step[Chunks];

    explicit Flow(Walk* const* w) {
        for (int h = 0; h < halves; ++h) {
            const int first = h % 2 * 32;
            rans::detail::Lane::split(w[h / 2]->x + first, x[h]);
            const std::uint32_t* const states = w[h / 2]->s + first;
            const __m256i low = _mm512_cvtepi32_epi16(_mm512_loadu_si512(states)), high = _mm512_cvtepi32_epi16(_mm512_loadu_si512(states + 16));
            s[h] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        }
        for (int c = 0; c < Chunks; ++c) words[c] = w[c]->words, step[c] = w[c]->step;
    }
    void back(Walk* const* w) const {
        for (int h = 0; h < halves; ++h) {
            const int first = h % 2 * 32;
            rans::detail::Lane::join(x[h], w[h / 2]->x + first);
            std::uint32_t* const states = w[h / 2]->s + first;
            _mm512_storeu_si512(states, _mm512_cvtepu16_epi32(_mm512_castsi512_si256(s[h])));
            _mm512_storeu_si512(states + 16, _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(s[h], 1)));
        }
        for (int c = 0; c < Chunks; ++c) w[c]->words = words[c], w[c]->step = step[c];
    }
    bool ready(Walk* const* w) const {
        bool all = true;
        for (int c = 0; c < Chunks; ++c) all &= step[c] < w[c]->steps && words[c] <= w[c]->limit;
        return all;
    }
};

template <int Count, class Body>
[[gnu::always_inline]] inline void each(Body&& body) {
#pragma GCC unroll 4
    for (int k = 0; k < Count; ++k) body(k);
}

// One step of all chunks. Their instructions take turns: so the processor finds some that need not wait.
template <int Probes, bool Full, To to, int Chunks>
[[gnu::always_inline]] inline void one_step(Flow<Chunks>& f, const PairTables& t, Walk* const* w) {
    constexpr int halves = 2 * Chunks;
    const __m512i one = _mm512_set1_epi16(1), slots = _mm512_set1_epi16(0x0fff);
    __m512i symbol[halves], slot[halves], scaled[halves], rest[halves];
    __mmask32 z0[halves];
    // Symbols + 32 z0 in the low bytes of words; the high bytes are anything.
    each<halves>([&](int h) {
        z0[h] = _mm512_test_epi16_mask(f.s[h], one);
        const __m512i bin = _mm512_srli_epi16(f.x[h].low, 6);
        symbol[h] = _mm512_mask_mov_epi16(_mm512_permutexvar_epi8(bin, t.coarse[0]), z0[h], _mm512_permutexvar_epi8(bin, t.coarse[1]));
        slot[h] = _mm512_and_si512(f.x[h].low, slots);
    });
#pragma GCC unroll 6
    for (int k = Probes - 1; k >= 0; --k)
        each<halves>([&](int h) {
            const __m512i probe = _mm512_add_epi16(symbol[h], _mm512_set1_epi16(static_cast<short>(1 << k)));
            symbol[h] = _mm512_mask_mov_epi16(symbol[h], _mm512_cmple_epu16_mask(t.start.at(probe), slot[h]), probe);
        });
    // As in rans::detail::take.
    each<halves>([&](int h) {
        scaled[h] = t.scaled.at(symbol[h]);
        const __m512i top = _mm512_andnot_si512(slots, f.x[h].low);
        rest[h] = _mm512_add_epi16(_mm512_mulhi_epu16(scaled[h], top), _mm512_sub_epi16(slot[h], t.start.at(symbol[h])));
    });
    each<halves>([&](int h) {
        const __m512i low = _mm512_add_epi16(_mm512_mullo_epi16(scaled[h], f.x[h].high), rest[h]), high = _mm512_mulhi_epu16(scaled[h], f.x[h].high);
        const __m512i carried = _mm512_mask_sub_epi16(high, _mm512_cmplt_epu16_mask(low, rest[h]), high, _mm512_set1_epi16(-1));
        if constexpr (Full) {
            const __mmask32 moves = _mm512_test_epi16_mask(scaled[h], scaled[h]);
            f.x[h].high = _mm512_mask_mov_epi16(f.x[h].high, moves, carried);
            f.x[h].low = _mm512_mask_mov_epi16(f.x[h].low, moves, low);
        } else {
            f.x[h].high = carried;
            f.x[h].low = low;
        }
    });
    each<halves>([&](int h) { rans::detail::refill(f.x[h], f.words[h / 2]); });
    each<halves>([&](int h) {
        const __m512i by_z1 = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(symbol[h], one), t.g1), by_z0 = _mm512_maskz_mov_epi16(z0[h], t.g0);
        f.s[h] = _mm512_ternarylogic_epi64(_mm512_srli_epi16(f.s[h], 1), by_z1, by_z0, 0x96);
    });
    each<Chunks>([&](int c) {
        const std::size_t at = f.step[c]++ * rans::kLanes;
        const __m512i both = _mm512_permutex2var_epi8(symbol[2 * c], t.order, symbol[2 * c + 1]);
        const __mmask64 odd = _mm512_test_epi8_mask(both, _mm512_set1_epi8(32));
        const __m512i found = _mm512_and_si512(both, _mm512_set1_epi8(31));
        _mm512_storeu_si512(w[c]->out + at, _mm512_mask_add_epi8(found, odd, found, _mm512_set1_epi8(-128)));
        if constexpr (to != To::bytes) {
            const __m512i even = _mm512_sub_epi8(_mm512_add_epi8(found, found), t.twice);
            const __m512i n = _mm512_mask_add_epi8(even, odd, even, _mm512_set1_epi8(1));
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m512i raised = _mm512_maskz_permutexvar_epi8(0x8888888888888888, t.spread[j], n);
                const __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(raised), t.scale);
                if constexpr (to == To::stream) _mm512_stream_ps(w[c]->values + at + 16 * j, v);
                else _mm512_storeu_ps(w[c]->values + at + 16 * j, v);
            }
        }
    });
}

// As walk, with tables in registers: a gather takes longer than all of this. Two chunks hide each other's latency.
template <int Probes, bool Full, To to, int Chunks>
void walk_chunks(Walk* const* w) {
    const PairTables t(*w[0]);
    Flow<Chunks> f(w);
    while (f.ready(w)) one_step<Probes, Full, to>(f, t, w);
    f.back(w);
}
template <int Probes, bool Full, To to>
void walk_pair_any(Walk& w, Walk* other) {
    Walk* const both[2] = {&w, other};
    other ? walk_chunks<Probes, Full, to, 2>(both) : walk_chunks<Probes, Full, to, 1>(both);
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
