// Encodes on every instruction set, which must agree, then mutates the messages; every instruction set must give the same verdict and the
// same values, and stay in bounds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "rows.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"
#include "tersegrad/trellis.hpp"

using namespace tersegrad;

int main(int argc, char** argv) {
    const long mutations = argc > 1 ? std::atol(argv[1]) : 2000;
    std::mt19937 rng(12);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(rng()) % n; };
    const auto byte = [&] { return static_cast<std::uint8_t>(rng()); };
    std::normal_distribution<float> normal;
    long accepted = 0, rejected = 0;
    for (long round = 0; round < mutations; ++round) {
        const std::size_t n = below(200) == 0 ? (std::size_t{3} << 17) + below(3) : below(20) == 0 ? 16000 + below(40000) : below(3) ? 1 + below(3000) : below(70);
        std::vector<float> x(n);
        const bool heavy = below(2);
        for (auto& v : x) v = normal(rng) * (heavy && below(100) == 0 ? static_cast<float>(below(100000)) : 1.0f);
        std::int64_t layout[8];
        const classes::Rows rows = scale_rows(x, layout, below);
        const float steps[] = {3.0f, 0.6f, 0.05f, 1e-3f, 1e-7f};
        const trellis::Dither dither{{rng(), 6, 1, 2}, {rng(), 7, 1, 2}};
        const trellis::Options options{steps[below(5)], 4 << below(4), below(6) ? 14 + static_cast<int>(below(5)) : trellis::kAutoChunk, below(2) ? &dither : nullptr, rows};
        std::vector<std::uint8_t> message;
        for (int level = 0; level <= static_cast<int>(best_isa()); ++level) {
            set_isa(static_cast<Isa>(level));
            set_threads(1 + static_cast<int>(below(3)));
            std::vector<std::uint8_t> made(trellis::max_bytes(n));
            made.resize(trellis::encode(x.data(), n, options, made.data()).bytes);
            if (level == 0) message = made;
            if (made != message) {
                std::fprintf(stderr, "round %ld, n %zu: instruction set %d encodes otherwise\n", round, n, level);
                return 1;
            }
        }
        switch (below(7)) {
            case 0: message.resize(below(message.size() + 1)); break;
            case 1:
                for (std::size_t k = 0; k < 1 + below(8); ++k) message[below(message.size())] = byte();
                break;
            case 2: message[below(message.size())] ^= static_cast<std::uint8_t>(1 << below(8)); break;
            case 3:  // the head: mode, table of segments, kind, window, run, lengths, scale, tables
                for (std::size_t k = 0; k < 3; ++k) message[below(std::min<std::size_t>(message.size(), 60))] = byte();
                break;
            case 4:
                for (std::size_t k = below(50); k > 0; --k) message.push_back(byte());
                break;
            case 5: {
                message.resize(12 + below(600));
                for (auto& b : message) b = byte();
                const std::uint8_t head[] = {0, static_cast<std::uint8_t>(2 + below(2)), static_cast<std::uint8_t>(2 + 2 * below(32)), static_cast<std::uint8_t>(14 + below(2)), static_cast<std::uint8_t>(below(3))};
                std::memcpy(message.data(), head, sizeof head);
                break;
            }
            default: break;
        }
        const trellis::Source source{options.states, options.dither, rows};
        std::vector<float> first;
        bool verdict = false;
        for (int level = 0; level <= static_cast<int>(best_isa()); ++level) {
            set_isa(static_cast<Isa>(level));
            std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[message.size()]);  // exact size: reads beyond it are seen
            if (!message.empty()) std::memcpy(exact.get(), message.data(), message.size());
            std::vector<float> back(n, 0.0f), sum(n, 0.0f);
            const bool good = trellis::decode(exact.get(), message.size(), n, source, back.data());
            bool wrong = good != trellis::decode_add(exact.get(), message.size(), n, source, 1.0f, nullptr, sum.data());
            if (level == 0) verdict = good, first = back;
            wrong |= good != verdict;
            for (std::size_t i = 0; i < n; ++i)
                wrong |= good ? std::memcmp(&back[i], &first[i], 4) != 0 || (sum[i] != back[i] && !(std::isnan(sum[i]) && std::isnan(back[i]))) : sum[i] != 0;
            if (wrong) {
                std::fprintf(stderr, "round %ld, n %zu: instruction set %d disagrees\n", round, n, level);
                return 1;
            }
        }
        ++(verdict ? accepted : rejected);
    }
    std::printf("fuzz_trellis: %ld accepted, %ld rejected\n", accepted, rejected);
}
