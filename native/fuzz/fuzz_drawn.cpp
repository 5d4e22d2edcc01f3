// Mutated streams into the decoder of modelled levels, any levels into the dither's restoration, and mutated scale classes of parts of a
// vector into their reader, on every instruction set.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "rows.hpp"
#include "tersegrad/modelled.hpp"
#include "tersegrad/rans.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/drawn.hpp"

using namespace tersegrad;

static std::mt19937_64 source(11);

[[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "fuzz_drawn: %s\n", what);
    std::exit(1);
}

// Classes of two parts of a vector; true if their reader accepts them once they are mutated.
static bool try_classes() {
    const auto below = [](std::size_t n) { return static_cast<std::size_t>(source() % n); };
    constexpr int window = 5;
    std::vector<float> x(512 + below(2000));
    for (auto& v : x) v = static_cast<float>(below(2001)) / 500.0f - 2.0f;
    std::int64_t layout[8];
    const classes::Rows rows = scale_rows(x, layout, below);
    const std::size_t stop = below(x.size() + 1), start = stop + below(x.size() - stop + 1), n = x.size() - (start - stop);
    std::vector<classes::Region> regions = classes::cut(rows, 0, stop);
    const std::vector<classes::Region> more = classes::cut(rows, start, x.size());
    regions.insert(regions.end(), more.begin(), more.end());
    x.erase(x.begin() + static_cast<std::ptrdiff_t>(stop), x.begin() + static_cast<std::ptrdiff_t>(start));
    std::vector<std::uint8_t> symbols(n), contexts(n), wanted;
    for (std::size_t i = 0; i < n; ++i) symbols[i] = static_cast<std::uint8_t>(std::clamp(static_cast<int>(x[i]), -window, window) + window);
    std::vector<std::uint8_t> told;
    for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa) {
        set_isa(static_cast<Isa>(isa));
        classes::Chosen chosen;
        if (!classes::choose(symbols.data(), n, window, window, regions, contexts.data(), chosen)) chosen.bytes.clear();
        if (isa && chosen.bytes != told) fail("instruction sets choose other classes");
        told = chosen.bytes;
    }
    if (told.empty()) told.resize(2 + regions.size() + below(40), 0xff);
    else if (int tables; classes::read(told.data(), told.size(), regions, contexts.data(), tables) != told.size()) fail("classes");
    if (source() % 3 == 0) told.resize(below(told.size() + 1));
    for (std::size_t flips = 1 + below(4); flips-- && !told.empty();) told[below(told.size())] = static_cast<std::uint8_t>(source());
    auto data = std::make_unique<std::uint8_t[]>(told.size());
    std::copy(told.begin(), told.end(), data.get());
    int tables = 0;
    const std::size_t used = classes::read(data.get(), told.size(), regions, contexts.data(), tables);
    if (used == rans::kBad) return false;
    if (used > told.size() || (n && rans::largest(contexts.data(), n) >= tables)) fail("classes beyond their bytes or tables");
    return true;
}

int main(int argc, char** argv) {
    const long trials = argc > 1 ? std::atol(argv[1]) : 3000;
    long accepted = 0, classed = 0;
    for (long trial = 0; trial < trials; ++trial) {
        const std::size_t n = source() % 300, reach = 1 + source() % 6, rows = 1 + source() % 8, width = 1 + 2 * reach;
        std::vector<std::int32_t> entries(rows * width), levels(n);
        for (auto& e : entries) e = static_cast<std::int32_t>(1 + source() % 65535);
        std::vector<std::uint8_t> classes(n);
        for (auto& c : classes) c = static_cast<std::uint8_t>(source() % rows);
        for (auto& v : levels) v = static_cast<std::int32_t>(source() >> (34 + source() % 30)) * (source() % 2 ? 1 : -1);
        const modelled::Table table{entries.data(), width, static_cast<int>(source() % 5)};
        auto stream = modelled::encode(levels.data(), classes.data(), n, table);
        std::vector<std::int32_t> back(n);
        if (!modelled::decode(stream.data(), stream.size(), classes.data(), n, table, back.data()) || back != levels) fail("round trip");
        if (source() % 3 == 0) stream.resize(source() % (stream.size() + 1));
        for (std::size_t flips = source() % 9; flips-- && !stream.empty();) stream[source() % stream.size()] = static_cast<std::uint8_t>(source());
        auto data = std::make_unique<std::uint8_t[]>(stream.size());  // exactly sized, so that the sanitizer sees any byte too far
        std::copy(stream.begin(), stream.end(), data.get());
        accepted += modelled::decode(data.get(), stream.size(), classes.data(), n, table, back.data());

        for (auto& v : back)
            if (source() % 4 == 0) v = static_cast<std::int32_t>(source());
        const Stream draws{source(), 1, 2, 3};
        const std::uint64_t start = source() % 100;
        std::uint32_t bits = static_cast<std::uint32_t>(source());
        float step;
        std::memcpy(&step, &bits, 4);
        std::vector<float> wanted, x(n);
        std::vector<std::int32_t> wanted_levels;
        std::vector<std::uint8_t> wanted_bins, wanted_octaves;
        for (auto& v : x) {
            bits = static_cast<std::uint32_t>(source());
            std::memcpy(&v, &bits, 4);
            if (source() % 2) v = static_cast<float>(static_cast<std::int32_t>(bits)) * 1e-6f;
        }
        for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa) {
            set_isa(static_cast<Isa>(isa));
            std::vector<float> out(n);
            std::vector<std::uint8_t> bins(n), octaves(n);
            std::vector<std::int32_t> q(n);
            drawn::restore(back.data(), n, step, draws, start, out.data());
            drawn::bins(draws, start, n, bins.data());
            drawn::octaves(draws, start, n, octaves.data());
            const auto top = drawn::quantise(x.data(), n, step >= 0x1p-126f ? step : 1.0f, draws, start, q.data());
            if (top < 0) std::fill(q.begin(), q.end(), 0);
            if (!isa) wanted = out, wanted_levels = q, wanted_bins = bins, wanted_octaves = octaves;
            if (bins != wanted_bins || octaves != wanted_octaves) fail("instruction sets see another dither");
            if (n && (std::memcmp(out.data(), wanted.data(), 4 * n) || q != wanted_levels) && step == step) fail("instruction sets differ");
        }
        classed += try_classes();
    }
    std::printf("fuzz_drawn: %ld of %ld mutated streams and %ld of as many mutated classes accepted\n", accepted, trials, classed);
    return 0;
}
