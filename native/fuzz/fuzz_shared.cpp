// Mutated streams into the decoder of modelled levels, and any levels into the dither's restoration, on every instruction set.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tersegrad/modelled.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/shared.hpp"

using namespace tersegrad;

static std::mt19937_64 source(11);

[[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "fuzz_shared: %s\n", what);
    std::exit(1);
}

int main(int argc, char** argv) {
    const long trials = argc > 1 ? std::atol(argv[1]) : 3000;
    long accepted = 0;
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
        for (auto& v : x) {
            bits = static_cast<std::uint32_t>(source());
            std::memcpy(&v, &bits, 4);
            if (source() % 2) v = static_cast<float>(static_cast<std::int32_t>(bits)) * 1e-6f;
        }
        for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa) {
            set_isa(static_cast<Isa>(isa));
            std::vector<float> out(n);
            std::vector<std::uint8_t> bins(n);
            std::vector<std::int32_t> q(n);
            shared::restore(back.data(), n, step, draws, start, out.data());
            shared::bins(draws, start, n, bins.data());
            const auto top = shared::quantise(x.data(), n, step >= 0x1p-126f ? step : 1.0f, draws, start, q.data());
            if (top < 0) std::fill(q.begin(), q.end(), 0);
            if (!isa) wanted = out, wanted_levels = q;
            if (n && (std::memcmp(out.data(), wanted.data(), 4 * n) || q != wanted_levels) && step == step) fail("instruction sets differ");
        }
    }
    std::printf("fuzz_shared: %ld of %ld mutated streams accepted\n", accepted, trials);
    return 0;
}
