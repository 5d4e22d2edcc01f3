// Mutated and truncated streams into every bit decoder, on every instruction set: no access outside, the same answer everywhere,
// and whatever is accepted encodes back to the bytes it came from.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tersegrad/bits.hpp"
#include "tersegrad/planar.hpp"
#include "tersegrad/runtime.hpp"

using namespace tersegrad;
using namespace tersegrad::bits;

static std::mt19937_64 source(7);

[[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "fuzz_bits: %s\n", what);
    std::exit(1);
}

struct Answer {
    std::int64_t used;
    std::vector<std::int64_t> values;
    bool operator==(const Answer&) const = default;
};

struct Code {
    unsigned which;
    bool serial() const { return which < 3; }
    unsigned k() const { return which - 3; }
    Elias elias() const { return static_cast<Elias>(which); }

    std::size_t bytes(const std::vector<std::int64_t>& v) const {
        if (serial()) return static_cast<std::size_t>(elias_bits(v.data(), v.size(), elias()) + 7) / 8;
        return static_cast<std::size_t>(which < 60 ? planar::rice_bytes(v.data(), v.size(), k()) : planar::gamma_bytes(v.data(), v.size()));
    }
    bool encode(const std::vector<std::int64_t>& v, std::vector<std::uint8_t>& out) const {
        if (serial()) return elias_encode(v.data(), v.size(), elias(), out.data(), out.size());
        if (which < 60) planar::rice_encode(v.data(), v.size(), k(), out.data(), out.size());
        else planar::gamma_encode(v.data(), v.size(), out.data());
        return true;
    }
    std::int64_t decode(const std::uint8_t* data, std::size_t size, std::vector<std::int64_t>& out) const {
        if (serial()) return elias_decode(data, size, out.size(), elias(), out.data());
        return which < 60 ? planar::rice_decode(data, size, out.size(), k(), out.data()) : planar::gamma_decode(data, size, out.size(), out.data());
    }
};

int main(int argc, char** argv) {
    const long mutations = argc > 1 ? std::atol(argv[1]) : 2000;
    long accepted = 0;
    for (long trial = 0; trial < mutations; ++trial) {
        const unsigned which = static_cast<unsigned>(source() % 61);  // 0..2 Elias, 3..59 Rice with k = which - 3, 60 planar gamma
        const Code code{which};
        std::vector<std::int64_t> values(source() % 40);
        for (auto& v : values) v = static_cast<std::int64_t>(source() >> (1 + source() % 63) | 1);
        std::vector<std::uint8_t> stream(code.bytes(values));
        if (!code.encode(values, stream)) fail("an encoder refused good values");
        switch (source() % 4) {
            case 0: stream.resize(source() % (stream.size() + 1)); break;
            case 1:
                for (auto& byte : stream) byte = static_cast<std::uint8_t>(source() & source());
                break;
            case 2: std::fill_n(stream.begin(), source() % (stream.size() + 1), source() % 2 ? 0 : 255); break;
            default: break;
        }
        for (std::size_t flips = source() % 4; flips-- && !stream.empty();) stream[source() % stream.size()] ^= static_cast<std::uint8_t>(1 << source() % 8);

        // Exactly sized heap memory, so that the sanitizer sees any byte too far.
        auto data = std::make_unique<std::uint8_t[]>(stream.size());
        std::copy(stream.begin(), stream.end(), data.get());
        const std::size_t count = source() % 8 ? values.size() : source() % 200;
        Answer first;
        for (int level = 0; level <= static_cast<int>(best_isa()); ++level) {
            set_isa(static_cast<Isa>(level));
            Answer answer{0, std::vector<std::int64_t>(count)};
            answer.used = code.decode(data.get(), stream.size(), answer.values);
            if (answer.used < 0) answer.values.clear();
            if (level == 0)
                first = answer;
            else if (!(answer == first))
                fail("instruction sets disagree");
        }
        if (first.used >= 0) {
            ++accepted;
            std::vector<std::uint8_t> again(static_cast<std::size_t>(first.used));
            if (code.bytes(first.values) != again.size()) fail("an accepted stream has another length");
            if (!code.encode(first.values, again) || (!again.empty() && std::memcmp(again.data(), data.get(), again.size()) != 0)) fail("an accepted stream is not canonical");
        }
        // Fixed-width codes and trits take any bytes of the right size.
        const unsigned width = 1 + static_cast<unsigned>(source() % 16);
        const std::size_t fit = stream.size() * 8 / width, fives = stream.size() * 5;
        auto exact_size = std::make_unique<std::uint8_t[]>(packed_bytes(fit, width));
        std::copy_n(stream.begin(), packed_bytes(fit, width), exact_size.get());
        auto bytes = std::make_unique<std::uint8_t[]>(std::max(fit, fives));
        auto words = std::make_unique<std::int32_t[]>(fit);
        if (width <= 8)
            unpack(exact_size.get(), fit, width, bytes.get());
        else
            unpack(exact_size.get(), fit, width, words.get());
        unpack_trits(data.get(), fives, bytes.get());
        if (std::any_of(bytes.get(), bytes.get() + fives, [](std::uint8_t t) { return t > 2; })) fail("a trit above 2");
    }
    std::printf("fuzz_bits: %ld mutated streams, %ld accepted\n", mutations, accepted);
}
