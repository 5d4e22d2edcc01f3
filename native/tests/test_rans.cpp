// Round trips of chunks and messages on every instruction set, with sanitizers: exact sizes, so that any stray access shows.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tersegrad/rans.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

using namespace tersegrad;

static int checks = 0;
#define CHECK(x)                                                             \
    do {                                                                     \
        ++checks;                                                            \
        if (!(x)) {                                                          \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x);     \
            return 1;                                                        \
        }                                                                    \
    } while (0)

static std::vector<std::uint8_t> draw(std::mt19937& rng, std::size_t n, int alphabet, double step) {
    std::normal_distribution<double> normal;
    std::vector<std::uint8_t> symbols(n);
    for (auto& s : symbols) {
        const double v = step > 0 ? std::nearbyint(normal(rng) / step) + alphabet / 2 : rng() % static_cast<unsigned>(alphabet);
        s = static_cast<std::uint8_t>(std::fmin(std::fmax(v, 0), alphabet - 1));
    }
    return symbols;
}

int main() {
    std::mt19937 rng(1);
    // From 1024 on a block has two lanes, from 2^14 on 64; chunks of 2^14 symbols are the shortest.
    const std::size_t kLong = std::size_t{1} << 16;
    const std::size_t sizes[] = {0, 1, 2, 63, 64, 65, 127, 511, 513, 1025, 5000, 16383, 16384, 25000, kLong + 1, 3 * kLong + 77};
    const int alphabets[] = {1, 2, 3, 5, 16, 17, 32, 33, 64, 65, 200, 256};
    for (std::size_t n : sizes)
        for (int alphabet : alphabets)
            for (double spread : {0.0, 0.02, 0.25}) {
                if (n > 10000 && (alphabet % 16 || spread == 0.0)) continue;
                const int chunk = rans::kShortestChunk + static_cast<int>(rng() % 5);
                for (int kind = 0; kind < 3; ++kind) {  // contexts: none, a step, a symbol
                    const auto symbols = draw(rng, n, alphabet, spread * alphabet);
                    const int contexts = kind == 0 ? 1 : kind == 1 ? 7 : (alphabet <= 16 ? 3 : 5);
                    std::vector<std::uint8_t> numbers(kind == 1 ? (n + 63) / 64 : n);
                    for (auto& c : numbers) c = static_cast<std::uint8_t>(rng() % static_cast<unsigned>(contexts));
                    const rans::Contexts ctx = kind ? rans::Contexts{numbers.data(), kind == 1} : rans::Contexts{};
                    std::vector<std::uint8_t> first;
                    for (int level = 0; level <= static_cast<int>(best_isa()); ++level)
                        for (int threads : {1, 3}) {
                            if (threads > 1 && n < kLong) continue;
                            set_isa(static_cast<Isa>(level));
                            set_threads(threads);
                            const std::size_t room = rans::max_message(n, alphabet);
                            std::unique_ptr<std::uint8_t[]> out(new std::uint8_t[room]);
                            const std::size_t used = rans::encode_message(symbols.data(), n, alphabet, ctx, contexts, true, chunk, out.get());
                            CHECK(used <= room);
                            std::vector<std::uint8_t> bytes(out.get(), out.get() + used);
                            if (level == 0 && threads == 1) first = bytes;
                            CHECK(bytes == first);
                            std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[used]), back(new std::uint8_t[n]);
                            if (used) std::memcpy(exact.get(), bytes.data(), used);
                            CHECK(rans::decode_message(exact.get(), used, n, alphabet, ctx, contexts, back.get()) == used);
                            CHECK(n == 0 || std::memcmp(back.get(), symbols.data(), n) == 0);
                        }
                }
            }
    // Division: every frequency, states at the edges of every quotient.
    for (int level = 1; level <= static_cast<int>(best_isa()); ++level)
        for (int f = 1; f < 4096; f += f < 64 || f > 4032 ? 1 : 37) {
            std::uint16_t frequencies[2] = {static_cast<std::uint16_t>(f), static_cast<std::uint16_t>(4096 - f)};
            std::vector<std::uint8_t> symbols(64 * 40);
            for (auto& s : symbols) s = rng() % 4096 >= static_cast<unsigned>(f);
            const rans::EncodeModel model(frequencies, 2, 1);
            const rans::Layout layout(std::size_t{1} << 14, 2, 14);  // 64 lanes
            std::vector<std::uint8_t> scratch[2];
            std::uint32_t states[2][64];
            std::size_t length[2];
            for (int k = 0; k < 2; ++k) {
                set_isa(k ? static_cast<Isa>(level) : Isa::portable);
                scratch[k].resize(2 * symbols.size() + rans::kSlack);
                std::uint8_t* end = scratch[k].data() + scratch[k].size();
                length[k] = static_cast<std::size_t>(end - rans::encode_chunk(model, layout, symbols.data(), symbols.size(), 0, {}, end, states[k]));
            }
            CHECK(length[0] == length[1] && std::memcmp(states[0], states[1], sizeof states[0]) == 0);
            CHECK(std::memcmp(&*scratch[0].end() - length[0], &*scratch[1].end() - length[1], length[0]) == 0);
            // A symbol that fills the table is free.
            std::uint16_t alone[2] = {4096, 0};
            const rans::EncodeModel free_model(alone, 2, 1);
            std::fill(symbols.begin(), symbols.end(), std::uint8_t{0});
            std::uint8_t* end = scratch[1].data() + scratch[1].size();
            CHECK(rans::encode_chunk(free_model, layout, symbols.data(), symbols.size(), 0, {}, end, states[1]) == end);
            CHECK(states[1][0] == rans::kFirst && states[1][63] == rans::kFirst);
        }
    std::printf("rans: %d checks\n", checks);
    return 0;
}
