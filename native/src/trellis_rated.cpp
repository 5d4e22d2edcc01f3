// What integers cost in bits, and sequences that are chosen by it.
#include "trellis_rated.hpp"

#include "dither_lower.hpp"
#include "tersegrad/runtime.hpp"

namespace tersegrad::trellis {
namespace {

using namespace rated;
constexpr int kPasses = 2;

const Loops& loops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return rated::avx512;
    if (isa() == Isa::avx2) return rated::avx2;
#endif
    return rated::portable;
}

// Memory that a thread keeps.
struct Workspace {
    std::vector<std::int16_t> y;
    std::vector<std::uint8_t> symbols;
    std::vector<std::uint16_t> decisions;
    std::vector<Metrics> metrics;
};

// Of integers with these counts, -kWindow first: sixteenths of bits, as many more as than the cheapest has, times kMetric.
void costs_of(const std::uint64_t* counts, std::uint16_t* costs) {
    // Half a count more for each, so that none is zero.
    std::uint64_t totals[2] = {kWindow, kWindow};
    for (int k = 0; k < kSymbols; ++k) totals[k & 1] += 2 * counts[k];
    int bits[kSymbols];
    for (int k = 0; k < kSymbols; ++k) bits[k] = dither::log2_sixteenths(totals[k & 1], 2 * counts[k] + 1);
    const int least = *std::min_element(bits, bits + kSymbols);
    for (int k = 0; k < kSymbols; ++k) costs[k] = static_cast<std::uint16_t>(kMetric * std::min(bits[k] - least, kMost));
}

void fill(const std::uint16_t* costs, Metrics& metrics) {
    for (std::int32_t y = -kFold; y < kFold; ++y)
        for (std::int32_t label = 0; label < 4; ++label) {
            const std::int32_t v = integer_of(y, label), far = y - 32 * v, odd = v & 1;
            metrics.of[y + kFold][label] = static_cast<std::uint16_t>(far * far + costs[std::clamp(v, odd - kWindow, odd + kWindow - 2) + kWindow]);
        }
}

}  // namespace

void rate(const Rounded& g, std::uint8_t* labels) {
    thread_local Workspace work;
    const std::size_t classes = g.still.size();
    if (work.y.size() < g.n) work.y.resize(g.n), work.symbols.resize(g.n);
    if (work.metrics.size() < classes) work.metrics.resize(classes);
    loops().fold(g.x, g.n, g.scale, work.y.data());
    std::vector<std::uint64_t> counts(classes * kSymbols);
    std::vector<std::uint16_t> stays(classes);
    for (std::size_t c = 0; c < classes; ++c) stays[c] = g.still[c] ? 0xffff : 0;
    for (int pass = 0; pass < kPasses; ++pass) {
        loops().symbols(work.y.data(), labels, g.n, work.symbols.data());
        rans::histogram(work.symbols.data(), g.n, kSymbols, {g.numbers, false}, static_cast<int>(classes), false, counts.data());
        for (std::size_t c = 0; c < classes; ++c) {
            if (g.still[c]) continue;
            std::uint16_t costs[kSymbols];
            costs_of(counts.data() + c * kSymbols, costs);
            fill(costs, work.metrics[c]);
        }
        for (std::size_t at = 0; at < g.n; at += g.run)
            loops().label[g.which](work.y.data() + at, g.numbers ? g.numbers + at : nullptr, work.metrics.data(), stays.data(),
                                   std::min(g.run, g.n - at), g.lanes, labels + at, work.decisions);
    }
}

}  // namespace tersegrad::trellis
