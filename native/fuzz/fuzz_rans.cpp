// Mutates valid messages and tables; every instruction set must give the same verdict and the same symbols, and stay in bounds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tersegrad/rans.hpp"
#include "tersegrad/runtime.hpp"

using namespace tersegrad;

int main(int argc, char** argv) {
    const long mutations = argc > 1 ? std::atol(argv[1]) : 2000;
    std::mt19937 rng(7);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(rng()) % n; };
    long accepted = 0, rejected = 0;
    for (long round = 0; round < mutations; ++round) {
        const int alphabets[] = {2, 3, 7, 16, 31, 64, 100, 256};
        const int alphabet = alphabets[below(8)], kind = static_cast<int>(below(3));
        const int contexts = kind ? 1 + static_cast<int>(below(5)) : 1;
        const std::size_t n = below(4) ? 1 + below(9000) : (below(20) ? 1 + below(200) : (std::size_t{1} << 15) + below(40000));
        std::vector<std::uint8_t> symbols(n), numbers(kind == 1 ? (n + 63) / 64 : n);
        const auto skew = 1 + below(4);
        for (auto& s : symbols) {
            s = static_cast<std::uint8_t>(below(static_cast<std::size_t>(alphabet)));
            for (std::size_t k = 1; k < skew; ++k) s = std::min(s, static_cast<std::uint8_t>(below(static_cast<std::size_t>(alphabet))));
        }
        for (auto& c : numbers) c = static_cast<std::uint8_t>(below(static_cast<std::size_t>(contexts)));
        const rans::Contexts ctx = kind ? rans::Contexts{numbers.data(), kind == 1} : rans::Contexts{};
        set_isa(best_isa());
        std::vector<std::uint8_t> message(rans::max_message(n, alphabet));
        message.resize(rans::encode_message(symbols.data(), n, alphabet, ctx, contexts, true, 14 + static_cast<int>(below(5)), message.data()));
        switch (below(5)) {
            case 0: message.resize(below(message.size() + 1)); break;
            case 1:
                for (std::size_t k = 0; k < 1 + below(8) && !message.empty(); ++k) message[below(message.size())] = static_cast<std::uint8_t>(rng());
                break;
            case 2:
                if (!message.empty()) message[below(message.size())] ^= static_cast<std::uint8_t>(1 << below(8));
                break;
            case 3:  // the head: mode, tables, chunk table
                for (std::size_t k = 0; k < 3 && !message.empty(); ++k) message[below(std::min<std::size_t>(message.size(), 40))] = static_cast<std::uint8_t>(rng());
                break;
            default:
                message.resize(below(600));
                for (auto& b : message) b = static_cast<std::uint8_t>(rng());
                if (!message.empty()) message[0] = static_cast<std::uint8_t>(below(20));
        }
        std::vector<std::uint8_t> first;
        std::size_t verdict = 0;
        for (int level = 0; level <= static_cast<int>(best_isa()); ++level) {
            set_isa(static_cast<Isa>(level));
            std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[message.size()]);  // exact size: reads beyond it are seen
            if (!message.empty()) std::memcpy(exact.get(), message.data(), message.size());
            std::vector<std::uint8_t> back(n);
            const std::size_t used = rans::decode_message(exact.get(), message.size(), n, alphabet, ctx, contexts, back.data());
            bool wrong = used != rans::kBad && used > message.size();
            if (used != rans::kBad)
                for (std::uint8_t s : back) wrong |= s >= alphabet;
            if (level == 0) {
                verdict = used;
                first = back;
                ++(used == rans::kBad ? rejected : accepted);
            }
            wrong |= used != verdict || (used != rans::kBad && back != first);
            if (wrong) {
                std::fprintf(stderr, "round %ld: instruction set %d disagrees\n", round, level);
                return 1;
            }
        }
    }
    std::printf("fuzz_rans: %ld mutations, %ld accepted, %ld rejected\n", mutations, accepted, rejected);
    return 0;
}
