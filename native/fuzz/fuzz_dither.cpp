// Mutates valid messages of both forms; every instruction set must give the same verdict and the same values, and stay in bounds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "rows.hpp"
#include "tersegrad/dither.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

using namespace tersegrad;

int main(int argc, char** argv) {
    const long mutations = argc > 1 ? std::atol(argv[1]) : 3000;
    std::mt19937 rng(11);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(rng()) % n; };
    const auto byte = [&] { return static_cast<std::uint8_t>(rng()); };
    std::normal_distribution<float> normal;
    long accepted = 0, rejected = 0;
    for (long round = 0; round < mutations; ++round) {
        const std::size_t n = below(100) == 0 ? dither::kSegment * 3 / 2 + below(3) : below(20) == 0 ? 20000 + below(40000) : below(3) ? 1 + below(3000) : below(70);
        std::vector<float> x(n);
        const bool heavy = below(2);
        for (auto& v : x) v = normal(rng) * (heavy && below(100) == 0 ? static_cast<float>(below(100000)) : 1.0f);
        std::int64_t layout[8];
        const classes::Rows rows = scale_rows(x, layout, below);
        const double nus[] = {1.0, 0.1, 0.01, 1e-4};
        set_isa(best_isa());
        set_threads(1 + static_cast<int>(below(3)));
        std::vector<std::uint8_t> message(dither::max_bytes(n));
        const dither::Options options{nus[below(4)], 0, static_cast<dither::Coder>(below(3)), nullptr, nullptr, nullptr, 14 + static_cast<int>(below(5)), rows, below(2) == 0};
        message.resize(dither::encode(x.data(), n, options, message.data()).bytes);
        switch (below(6)) {
            case 0: message.resize(below(message.size() + 1)); break;
            case 1:
                for (std::size_t k = 0; k < 1 + below(8); ++k) message[below(message.size())] = byte();
                break;
            case 2: message[below(message.size())] ^= static_cast<std::uint8_t>(1 << below(8)); break;
            case 3:  // the head: first word, table of segments, kind, window, lengths, scales, classes
                for (std::size_t k = 0; k < 3; ++k) message[below(std::min<std::size_t>(message.size(), 60))] = byte();
                break;
            case 4:
                for (std::size_t k = below(50); k > 0; --k) message.push_back(byte());
                break;
            default: {
                message.resize(4 + below(600));
                for (auto& b : message) b = byte();
                const std::uint32_t words[] = {0x80000000u, 0x7fc00000u, 0u, 0x3f800000u};
                std::memcpy(message.data(), &words[below(4)], 4);
                if (message.size() > 5) message[4] &= 3;
            }
        }
        std::vector<float> first;
        bool verdict = false;
        for (int level = 0; level <= static_cast<int>(best_isa()); ++level) {
            set_isa(static_cast<Isa>(level));
            std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[message.size()]);  // exact size: reads beyond it are seen
            std::memcpy(exact.get(), message.data(), message.size());
            std::vector<float> back(n, 0.0f), sum(n, 0.0f);
            const bool good = dither::decode(exact.get(), message.size(), n, rows, back.data());
            bool wrong = good != dither::decode_add(exact.get(), message.size(), n, rows, 1.0f, sum.data());
            if (level == 0) verdict = good, first = back;
            wrong |= good != verdict;
            if (good)
                for (std::size_t i = 0; i < n; ++i)
                    wrong |= std::memcmp(&back[i], &first[i], 4) != 0 || (sum[i] != back[i] && !(std::isnan(sum[i]) && std::isnan(back[i])));
            if (wrong) {
                std::fprintf(stderr, "round %ld, n %zu: instruction set %d disagrees\n", round, n, level);
                return 1;
            }
        }
        ++(verdict ? accepted : rejected);
    }
    std::printf("fuzz_dither: %ld accepted, %ld rejected\n", accepted, rejected);
}
