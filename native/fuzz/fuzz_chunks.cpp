// Mutated and truncated chunk sets into the decoder: no access outside, and whatever is accepted is a set that encodes back to its bytes.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "tersegrad/chunks.hpp"

using namespace tersegrad::chunks;

static std::mt19937_64 source(7);

[[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "fuzz_chunks: %s\n", what);
    std::exit(1);
}

int main(int argc, char** argv) {
    const long mutations = argc > 1 ? std::atol(argv[1]) : 2000;
    long accepted = 0;
    for (long trial = 0; trial < mutations; ++trial) {
        std::vector<Region> regions;
        std::size_t numel = 0, count = 0;
        for (std::size_t j = 1 + source() % 3; j--;) {
            const std::size_t height = 1 + source() % 20, width = 1 + source() % 40;
            const std::size_t kept = 1 + source() % std::min<std::size_t>(height * width, most_kept);
            regions.push_back({numel, height * (1 + source() % 3), width * (1 + source() % 3), height, width, kept});
            numel += regions.back().numel();
            count += regions.back().places();
        }
        std::vector<float> x(numel), values(count);
        for (float& v : x) v = static_cast<float>(static_cast<std::int64_t>(source() % 41) - 20);
        std::vector<std::int32_t> places(count), again(count);
        if (!choose(x.data(), regions, places.data(), values.data())) fail("finite numbers were called infinite");
        std::vector<std::uint8_t> stream(capacity(regions));
        stream.resize(encode(places.data(), regions, stream.data()));
        decode(stream.data(), stream.size(), regions, again.data());
        if (places != again) fail("a set did not come back");

        if (source() % 3 == 0) stream.resize(source() % (stream.size() + 1));
        for (std::size_t flips = source() % 4; flips-- && !stream.empty();) stream[source() % stream.size()] ^= static_cast<std::uint8_t>(1 << source() % 8);
        // Exactly sized heap memory, so that the sanitizer sees any byte too far.
        auto data = std::make_unique<std::uint8_t[]>(stream.size());
        std::copy(stream.begin(), stream.end(), data.get());
        try {
            decode(data.get(), stream.size(), regions, again.data());
        } catch (const std::invalid_argument&) {
            continue;
        }
        ++accepted;
        std::vector<std::uint8_t> back(capacity(regions));
        back.resize(encode(again.data(), regions, back.data()));  // throws where places do not increase
        if (back != stream) fail("an accepted message is not what its set encodes to");
        std::vector<float> dense(numel);
        scatter(again.data(), values.data(), regions, dense.data());
    }
    std::printf("fuzz_chunks: %ld mutations, %ld accepted\n", mutations, accepted);
}
