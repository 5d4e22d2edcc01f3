// Viterbi's algorithm with bits, compiled for each instruction set: plain loops over 64 lanes, which are independent trellises. Everything here
// is local to the including file.
#pragma once
#include "trellis_rated.hpp"

namespace tersegrad::trellis::rated {
namespace {

constexpr std::size_t kWide = rans::kLanes;

void fold(const float* x, std::size_t n, float scale, std::int16_t* y) {
    for (std::size_t i = 0; i < n; ++i) {
        const auto v = static_cast<std::int32_t>(__builtin_rintf(x[i] * scale));
        const std::int32_t low = v & 127, up = v >= kFold - 128 ? kFold - 128 + low : v;
        y[i] = static_cast<std::int16_t>(v < 128 - kFold ? low - kFold : up);
    }
}

void symbols(const std::int16_t* y, const std::uint8_t* labels, std::size_t n, std::uint8_t* out) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::int32_t label = labels[i], odd = label & 1, v = (((y[i] - 32 * label + 64) >> 7) * 4) + label;
        const std::int32_t lowest = odd - kWindow, highest = odd + kWindow - 2, up = v < lowest ? lowest : v;
        out[i] = static_cast<std::uint8_t>((up > highest ? highest : up) + kWindow);
    }
}

template <Code C>
struct Search {
    static constexpr int S = C.states, kWords = (S + 15) / 16;
    struct Branches {  // predecessors and labels, in the order that decides ties
        int from[S][2] = {}, label[S][2] = {};
        constexpr Branches() {
            int seen[S] = {};
            for (int s = 0; s < S; ++s)
                for (int z1 = 0; z1 < 2; ++z1) {
                    const int to = s >> 1 ^ (z1 ? C.g1 : 0) ^ (s & 1 ? C.g0 : 0);
                    from[to][seen[to]] = s;
                    label[to][seen[to]++] = 2 * z1 + (s & 1);
                }
        }
    };
    static constexpr Branches branches{};

    struct alignas(64) Row {
        std::uint16_t metric[4][kWide], stays[kWide];  // stays: all bits where the state is left alone
    };

    // One step. Bit s of `second` tells that state s was entered from its second predecessor.
    static inline __attribute__((always_inline)) void step(const std::uint16_t (&cost)[S][kWide], std::uint16_t (&next)[S][kWide], const Row& row,
                                                           std::uint16_t* __restrict second) {
        std::uint16_t bits[kWords][kWide] = {};
#pragma GCC unroll 32
        for (int s = 0; s < S; ++s) {
            const std::uint16_t *const a = cost[branches.from[s][0]], *const b = cost[branches.from[s][1]], *const same = cost[s];
            const std::uint16_t *const p = row.metric[branches.label[s][0]], *const q = row.metric[branches.label[s][1]];
            for (std::size_t k = 0; k < kWide; ++k) {
                const auto one = static_cast<std::uint16_t>(a[k] + p[k]), other = static_cast<std::uint16_t>(b[k] + q[k]);
                const std::uint16_t best = other < one ? other : one, stays = row.stays[k];
                next[s][k] = static_cast<std::uint16_t>((best & ~stays) | (same[k] & stays));
                bits[s / 16][k] = static_cast<std::uint16_t>(bits[s / 16][k] | (other < one ? 1 << s % 16 : 0));
            }
        }
        std::memcpy(second, bits, sizeof bits);
    }

    static void settle(std::uint16_t (&cost)[S][kWide]) {
        std::uint16_t low[kWide];
        std::memcpy(low, cost[0], sizeof low);
        for (int s = 1; s < S; ++s)
            for (std::size_t k = 0; k < kWide; ++k) low[k] = cost[s][k] < low[k] ? cost[s][k] : low[k];
        for (int s = 0; s < S; ++s)
            for (std::size_t k = 0; k < kWide; ++k) cost[s][k] = static_cast<std::uint16_t>(cost[s][k] - low[k]);
    }

    // What the labels of one row cost, which has `count` coordinates.
    template <bool Classed>
    static inline __attribute__((always_inline)) void look_up(const std::int16_t* y, const std::uint8_t* numbers, const Metrics* metrics,
                                                              const std::uint16_t* stays, std::size_t count, Row& row) {
        for (std::size_t k = 0; k < count; ++k) {
            const std::size_t number = Classed ? numbers[k] : 0;
            const std::uint16_t* const costs = metrics[number].of[y[k] + kFold];
            for (int label = 0; label < 4; ++label) row.metric[label][k] = costs[label];
            row.stays[k] = stays[number];
        }
        for (std::size_t k = count; k < kWide; ++k) row.stays[k] = 0xffff;
    }

    // From states and decisions to the states before and the labels on the way.
    static inline __attribute__((always_inline)) void step_back(const std::uint16_t* second, const std::uint16_t* stays, std::uint16_t* state,
                                                                std::uint8_t* labels) {
        for (std::size_t k = 0; k < kWide; ++k) {
            const std::uint16_t s = state[k], word = kWords > 1 && s >= 16 ? second[(kWords - 1) * kWide + k] : second[k];
            const auto decision = static_cast<std::uint16_t>(word >> (s & 15) & 1);
            // z0 of the step is the highest bit of the state that it led to; the first predecessor lacks g1 in its upper bits.
            const std::uint16_t z0 = s >= S / 2, base = z0 ? s ^ C.g0 : s;
            const auto before = static_cast<std::uint16_t>((base & ~C.g1) | (decision ? C.g1 : 0));
            const std::uint16_t z1 = ((base ^ before) & C.g1) != 0;
            labels[k] = static_cast<std::uint8_t>(z0 | z1 << 1);
            state[k] = static_cast<std::uint16_t>((s & stays[k]) | ((2 * before + z0) & ~stays[k]));
        }
    }

    template <bool Classed>
    static void label_any(const std::int16_t* y, const std::uint8_t* numbers, const Metrics* metrics, const std::uint16_t* stays, std::size_t n,
                          std::size_t lanes, std::uint8_t* labels, std::vector<std::uint16_t>& scratch) {
        const std::size_t rows = (n + lanes - 1) / lanes, kept = (kWords + 1) * kWide;  // decisions, and which lanes stay
        if (scratch.size() < rows * kept) scratch.resize(rows * kept);
        int bits = 0;
        while (1 << bits < S) ++bits;
        alignas(64) std::uint16_t cost[2][S][kWide];
        for (int s = 0; s < S; ++s)
            for (std::size_t k = 0; k < kWide; ++k) cost[0][s][k] = static_cast<std::uint16_t>(s ? kHighest * bits + 1 : 0);
        Row row{};
        for (std::size_t t = 0; t < rows; ++t) {
            const std::size_t at = t * lanes;
            look_up<Classed>(y + at, Classed ? numbers + at : nullptr, metrics, stays, std::min(lanes, n - at), row);
            step(cost[t % 2], cost[1 - t % 2], row, scratch.data() + t * kept);
            std::memcpy(scratch.data() + t * kept + kWords * kWide, row.stays, sizeof row.stays);
            // Costs stay below 2^16: states differ by at most kHighest log2(S) + 1, and the least of them grows by at most 4096 in a step.
            if (t % 4 == 3) settle(cost[1 - t % 2]);
        }
        const auto& last = cost[rows % 2];
        std::uint16_t state[kWide];
        for (std::size_t k = 0; k < kWide; ++k) {
            int best = 0;
            for (int s = 1; s < S; ++s) best = last[s][k] < last[best][k] ? s : best;
            state[k] = static_cast<std::uint16_t>(best);
        }
        for (std::size_t t = rows; t-- > 0;) {
            const std::uint16_t* const second = scratch.data() + t * kept;
            std::uint8_t found[kWide];
            step_back(second, second + kWords * kWide, state, found);
            std::memcpy(labels + t * lanes, found, std::min(lanes, n - t * lanes));
        }
    }

    static void label(const std::int16_t* y, const std::uint8_t* numbers, const Metrics* metrics, const std::uint16_t* stays, std::size_t n,
                      std::size_t lanes, std::uint8_t* labels, std::vector<std::uint16_t>& scratch) {
        if (numbers) return label_any<true>(y, numbers, metrics, stays, n, lanes, labels, scratch);
        return label_any<false>(y, numbers, metrics, stays, n, lanes, labels, scratch);
    }
};

constexpr Loops loops = {fold, symbols, {Search<kCodes[0]>::label, Search<kCodes[1]>::label, Search<kCodes[2]>::label, Search<kCodes[3]>::label}};

}  // namespace
}  // namespace tersegrad::trellis::rated
