// Planar codes: every instruction set writes what one bit at a time writes, and reads it back.
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "tersegrad/planar.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/select.hpp"
#include "tersegrad/threads.hpp"

using namespace tersegrad;

static int checks = 0;
#define CHECK(condition)                                                     \
    do {                                                                     \
        ++checks;                                                            \
        if (!(condition)) {                                                  \
            std::printf("test_planar: line %d: %s\n", __LINE__, #condition); \
            return 1;                                                        \
        }                                                                    \
    } while (0)

struct Bits {  // the slow way
    std::vector<std::uint8_t> bytes;
    std::size_t count = 0;
    void put(std::uint64_t value, unsigned n) {
        for (unsigned b = 0; b < n; ++b, ++count) {
            if (count % 8 == 0) bytes.push_back(0);
            bytes.back() = static_cast<std::uint8_t>(bytes.back() | (value >> b & 1) << count % 8);
        }
    }
    void unary(std::uint64_t zeros) {
        for (; zeros; --zeros) put(0, 1);
        put(1, 1);
    }
    void pad() { count = 8 * bytes.size(); }
};

static unsigned log2_of(std::uint64_t v) {
    unsigned n = 0;
    while (v >>= 1) ++n;
    return n;
}

static void gamma(Bits& out, const std::vector<std::int64_t>& values) {
    for (auto v : values) out.unary(log2_of(static_cast<std::uint64_t>(v)));
    out.pad();
    for (auto v : values) out.put(static_cast<std::uint64_t>(v), log2_of(static_cast<std::uint64_t>(v)));
    out.pad();
}

static int codes(std::mt19937_64& random) {
    std::vector<std::int64_t> values(random() % 200);
    const unsigned least = random() % 63;
    for (auto& v : values) v = static_cast<std::int64_t>(random() >> (1 + least + random() % (63 - least)) | 1);
    Bits expected;
    gamma(expected, values);
    const auto bytes = static_cast<std::size_t>(planar::gamma_bytes(values.data(), values.size()));
    CHECK(bytes == expected.bytes.size());
    std::unique_ptr<std::uint8_t[]> data(new std::uint8_t[bytes]);
    planar::gamma_encode(values.data(), values.size(), data.get());
    CHECK(bytes == 0 || std::memcmp(data.get(), expected.bytes.data(), bytes) == 0);
    std::vector<std::int64_t> back(values.size());
    CHECK(planar::gamma_decode(data.get(), bytes, back.size(), back.data()) == static_cast<std::int64_t>(bytes) && back == values);

    const auto k = static_cast<unsigned>(random() % (planar::rice_max + 1));
    Bits rice;
    std::vector<std::int64_t> escapes;
    for (auto v : values) rice.unary(std::min<std::uint64_t>(static_cast<std::uint64_t>(v) >> k, planar::rice_limit));
    rice.pad();
    for (auto v : values) {
        rice.put(static_cast<std::uint64_t>(v), k);
        if (v >> k >= planar::rice_limit) escapes.push_back((v >> k) - (planar::rice_limit - 1));
    }
    rice.pad();
    gamma(rice, escapes);
    const auto size = static_cast<std::size_t>(planar::rice_bytes(values.data(), values.size(), k));
    CHECK(size == rice.bytes.size());
    std::unique_ptr<std::uint8_t[]> code(new std::uint8_t[size]);
    CHECK(planar::rice_encode(values.data(), values.size(), k, code.get(), size) == static_cast<std::int64_t>(size));
    CHECK(size == 0 || std::memcmp(code.get(), rice.bytes.data(), size) == 0);
    if (size) {
        std::unique_ptr<std::uint8_t[]> little(new std::uint8_t[size - 1]);
        CHECK(planar::rice_encode(values.data(), values.size(), k, little.get(), size - 1) == planar::ended);
    }
    CHECK(planar::rice_decode(code.get(), size, back.size(), k, back.data()) == static_cast<std::int64_t>(size) && back == values);
    const int best = planar::rice_best(values.data(), values.size());
    const auto fewest = planar::rice_bits(values.data(), values.size(), static_cast<unsigned>(best));
    const auto bits = planar::rice_bits(values.data(), values.size(), k);
    CHECK(static_cast<int>(k) < best ? bits > fewest : bits >= fewest);
    return 0;
}

template <class I>
static int indices(std::mt19937_64& random) {
    const std::size_t k = random() % (random() % 20 ? 500 : 150000);
    const std::uint64_t mean = 1 + random() % 300;
    std::vector<I> set;
    std::uint64_t at = 0;
    for (std::size_t j = 0; j < k; ++j) {
        at += random() % (2 * mean) + (random() % 1000 ? 0 : 60 * mean);
        set.push_back(static_cast<I>(at++));
    }
    const std::uint64_t m = 1 + random() % (2 * mean), n = at + random() % 5;
    const unsigned width = log2_of(m);
    const std::uint64_t few = (std::uint64_t{2} << width) - m;
    Bits expected, rests, last;
    std::int64_t before = -1;
    for (I index : set) {
        const auto gap = static_cast<std::uint64_t>(index - before - 1), r = gap % m;
        before = index;
        expected.unary(gap / m);
        rests.put(r < few ? r : (r + few) >> 1, width);
        if (r >= few) last.put(r + few, 1);
    }
    expected.bytes.insert(expected.bytes.end(), rests.bytes.begin(), rests.bytes.end());
    expected.bytes.insert(expected.bytes.end(), last.bytes.begin(), last.bytes.end());
    for (int threads : {1, 3}) {
        set_threads(threads);
        CHECK(select::golomb_size(set.data(), k, m) == expected.bytes.size());
        std::unique_ptr<std::uint8_t[]> data(new std::uint8_t[expected.bytes.size()]);
        CHECK(select::golomb_encode(set.data(), k, m, data.get(), expected.bytes.size()) == expected.bytes.size());
        CHECK(k == 0 || std::memcmp(data.get(), expected.bytes.data(), expected.bytes.size()) == 0);
        std::vector<I> back(k);
        CHECK(select::golomb_decode(data.get(), expected.bytes.size(), k, n, m, back.data()) == expected.bytes.size() && back == set);
    }
    return 0;
}

int main() {
    std::mt19937_64 random(3);
    for (int level = 0; level <= static_cast<int>(best_isa()); ++level) {
        set_isa(static_cast<Isa>(level));
        for (int trial = 0; trial < 300; ++trial)
            if (codes(random)) return 1;
        for (int trial = 0; trial < 100; ++trial)
            if (indices<std::int32_t>(random) || indices<std::int64_t>(random)) return 1;
    }
    std::printf("test_planar: %d checks\n", checks);
}
