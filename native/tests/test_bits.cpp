// Bit streams, packing, trits, Elias and Rice codes: every instruction set against one bit at a time, in exactly sized heap buffers
// so that the sanitizers see any access outside.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "tersegrad/bits.hpp"
#include "tersegrad/runtime.hpp"

using namespace tersegrad;
using namespace tersegrad::bits;

static void check(bool condition, const char* what, int line) {
    if (condition) return;
    std::fprintf(stderr, "line %d: %s\n", line, what);
    std::exit(1);
}
#define CHECK(condition) check(condition, #condition, __LINE__)

template <class T>
static std::unique_ptr<T[]> exact(std::size_t n) {
    return std::make_unique<T[]>(n);  // no slack, unlike a vector
}

static std::mt19937_64 source(1);

static void test_streams() {
    for (int trial = 0; trial < 300; ++trial) {
        std::vector<std::pair<std::uint64_t, unsigned>> items(source() % 50);
        std::size_t total = 0;
        for (auto& [value, n] : items) {
            n = static_cast<unsigned>(source() % 65);
            value = source() & mask(n);
            total += n;
        }
        const std::size_t bytes = (total + 7) / 8;
        auto buffer = exact<std::uint8_t>(bytes);
        BitWriter writer(buffer.get(), bytes);
        for (auto [value, n] : items) writer.put_long(value, n);
        CHECK(writer.position() == total);
        CHECK(writer.finish() == bytes && !writer.overflowed());
        BitReader reader(buffer.get(), bytes);
        for (auto [value, n] : items) CHECK(reader.get_long(n) == value);
        CHECK(reader.position() == total && reader.clean_end());
        CHECK(reader.get(57) == 0 || total % 8);
        CHECK(reader.overrun() && !reader.clean_end());
        if (bytes > 1) {  // a buffer that is too small is filled and no more
            auto small = exact<std::uint8_t>(bytes - 1);
            BitWriter cut(small.get(), bytes - 1);
            for (auto [value, n] : items) cut.put_long(value, n);
            cut.finish();
            CHECK(cut.overflowed());
        }
    }
}

template <class Code>
static void test_packing(unsigned width) {
    for (std::size_t count = 0; count < 300; count += count < 140 ? 1 : 53) {
        auto codes = exact<Code>(count), back = exact<Code>(count);
        for (std::size_t i = 0; i < count; ++i) codes[i] = static_cast<Code>(source());
        const std::size_t bytes = packed_bytes(count, width);
        auto data = exact<std::uint8_t>(bytes);
        pack(codes.get(), count, width, data.get());
        BitReader reader(data.get(), bytes);
        for (std::size_t i = 0; i < count; ++i) CHECK(reader.get(width) == (static_cast<std::uint64_t>(codes[i]) & mask(width)));
        CHECK(reader.clean_end());
        unpack(data.get(), count, width, back.get());
        for (std::size_t i = 0; i < count; ++i) CHECK(back[i] == static_cast<Code>(static_cast<std::uint64_t>(codes[i]) & mask(width)));
    }
}

static void test_trits() {
    for (std::size_t count = 0; count < 200; ++count) {
        auto trits = exact<std::uint8_t>(count), back = exact<std::uint8_t>(count);
        for (std::size_t i = 0; i < count; ++i) trits[i] = static_cast<std::uint8_t>(source() % 3);
        auto data = exact<std::uint8_t>(trit_bytes(count));
        CHECK(pack_trits(trits.get(), count, data.get()));
        for (std::size_t i = 0, power = 1; i < count; ++i, power = i % 5 ? power * 3 : 1) CHECK(data[i / 5] / power % 3 == trits[i]);
        CHECK(unpack_trits(data.get(), count, back.get()));
        for (std::size_t i = 0; i < count; ++i) CHECK(trits[i] == back[i]);
        if (count) {
            trits[count - 1] = 3;
            CHECK(!pack_trits(trits.get(), count, data.get()));
            data[source() % trit_bytes(count)] = 243;
            CHECK(!unpack_trits(data.get(), count, back.get()));
            for (std::size_t i = 0; i < count; ++i) CHECK(back[i] <= 2);
        }
    }
}

static std::vector<std::int64_t> some_values(std::int64_t least) {
    std::vector<std::int64_t> values(source() % 70);
    for (auto& v : values) {
        v = static_cast<std::int64_t>(source() >> (1 + source() % 63));
        if (source() % 50 == 0) v = std::numeric_limits<std::int64_t>::max();
        if (v < least) v = least;
    }
    return values;
}

template <class Bits, class Encode, class Decode>
static void test_code(std::int64_t least, Bits bits, Encode encode, Decode decode) {
    for (int trial = 0; trial < 60; ++trial) {
        auto values = some_values(least);
        const std::int64_t total = bits(values.data(), values.size());
        CHECK(total >= 0);
        const std::size_t bytes = (static_cast<std::size_t>(total) + 7) / 8;
        auto data = exact<std::uint8_t>(bytes);
        CHECK(encode(values.data(), values.size(), data.get(), bytes));
        auto back = exact<std::int64_t>(values.size());
        CHECK(decode(data.get(), bytes, values.size(), back.get()) == static_cast<std::int64_t>(bytes));
        for (std::size_t i = 0; i < values.size(); ++i) CHECK(back[i] == values[i]);
        for (std::size_t cut = 0; cut < bytes; ++cut) {
            auto part = exact<std::uint8_t>(cut);
            std::copy_n(data.get(), cut, part.get());
            CHECK(decode(part.get(), cut, values.size(), back.get()) == -1);
        }
        if (bytes) CHECK(!encode(values.data(), values.size(), data.get(), bytes - 1));
        if (!values.empty()) {
            values[source() % values.size()] = source() % 2 ? least - 1 : std::numeric_limits<std::int64_t>::min();
            CHECK(bits(values.data(), values.size()) == -1);
            CHECK(!encode(values.data(), values.size(), data.get(), bytes));
        }
    }
}

int main() {
    test_streams();
    for (int level = 0; level <= static_cast<int>(best_isa()); ++level) {
        set_isa(static_cast<Isa>(level));
        for (unsigned width = 1; width <= 8; ++width) test_packing<std::uint8_t>(width);
        for (unsigned width = 9; width <= 16; ++width) test_packing<std::int32_t>(width);
        test_trits();
        for (int c = 0; c < 3; ++c) {
            const auto code = static_cast<Elias>(c);
            test_code(
                1, [=](auto v, auto n) { return elias_bits(v, n, code); },
                [=](auto v, auto n, auto out, auto bytes) { return elias_encode(v, n, code, out, bytes); },
                [=](auto data, auto bytes, auto n, auto out) { return elias_decode(data, bytes, n, code, out); });
        }
    }
    std::printf("bits: every instruction set agrees with one bit at a time\n");
}
