// Sparse kernels under sanitizers: every instruction set against a plain sort, and round trips of index sets.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "tersegrad/runtime.hpp"
#include "tersegrad/select.hpp"
#include "tersegrad/threads.hpp"

using namespace tersegrad;
using Indices = std::vector<std::int32_t>;

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            std::printf("test_select: %s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            std::exit(1);                                                                 \
        }                                                                                 \
    } while (0)

// The k largest keys, of equal ones the first, in order.
static Indices sorted_top_k(const std::vector<float>& x, std::size_t k) {
    std::vector<std::uint32_t> keys;
    for (float v : x)
        if (select::key(v)) keys.push_back(select::key(v));
    Indices order;
    if (keys.empty()) return order;
    k = std::min(k, keys.size());
    std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(k - 1), keys.end(), std::greater<>());
    const std::uint32_t last = keys[k - 1];
    auto ties = static_cast<std::size_t>(std::count(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(k), last));
    for (std::size_t i = 0; i < x.size(); ++i) {
        const std::uint32_t key = select::key(x[i]);
        if (key > last || (key == last && ties)) {
            order.push_back(static_cast<std::int32_t>(i));
            ties -= key == last;
        }
    }
    return order;
}

// Multiplies the coordinates that the selection samples: with a large factor it finds too few, with zero too many.
static void mislead(std::vector<float>& x, float factor) {
    const std::uint64_t all = x.size() / 16, runs = std::min<std::uint64_t>(all, std::clamp<std::uint64_t>(all / 16, 64, 4096));
    for (std::uint64_t j = 0; j < runs; ++j) {
        const std::uint64_t first = j * all / runs, width = (j + 1) * all / runs - first;
        const std::uint64_t run = first + (((j * 0x9e3779b1u) & 0xffffffffu) * width >> 32);
        for (std::uint64_t i = 16 * run; i < 16 * run + 16; ++i) x[i] *= factor;
    }
}

static void top_k(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (std::size_t n : {1u, 15u, 64u, 65u, 1000u, 5000u, 800000u}) {
        for (int kind = 0; kind < 6; ++kind) {
            if (n < 1000 && kind >= 4) continue;
            std::vector<float> x(n);
            for (float& v : x) {
                v = normal(random);
                if (kind == 1) v = random() % 200 ? 0.0f : v;
                if (kind == 2) v = static_cast<float>(static_cast<int>(v * 2));
                if (kind == 3) v = -1.0f;
            }
            if (kind == 4) mislead(x, 1000.0f);
            if (kind == 5) mislead(x, 0.0f);
            for (std::size_t k : {n / 100 + 1, n < 100000 ? n : std::size_t{1}}) {
                const Indices expected = sorted_top_k(x, k);
                Indices got(k);
                std::vector<float> values(k);
                got.resize(select::top_k(x.data(), n, k, got.data(), values.data()));
                CHECK(got == expected);
                std::vector<std::int64_t> wide(k);
                CHECK(select::top_k(x.data(), n, k, wide.data(), values.data()) == expected.size());
                CHECK(std::equal(expected.begin(), expected.end(), wide.begin()));
                std::vector<float> out(n, 7.0f);
                select::scatter(got.data(), values.data(), got.size(), out.data(), n);
                for (std::size_t j = 0; j < got.size(); ++j) CHECK(out[static_cast<std::size_t>(got[j])] == x[static_cast<std::size_t>(got[j])]);
                CHECK(static_cast<std::size_t>(std::count(out.begin(), out.end(), 0.0f)) == n - got.size());
            }
        }
    }
}

static void index_sets(std::mt19937& random) {
    for (int trial = 0; trial < 600; ++trial) {
        const std::uint64_t n = 1 + random() % (trial % 2 ? 300 : 100000);
        Indices set;
        const unsigned rarity = 1 + random() % 50;
        for (std::uint64_t i = 0; i < n; ++i)
            if (random() % rarity == 0) set.push_back(static_cast<std::int32_t>(i));
        const std::size_t k = set.size();
        Indices back(k);
        const std::uint64_t m = 1 + random() % 70;
        const std::size_t size = select::golomb_size(set.data(), k, m);
        std::vector<std::uint8_t> bytes(size);
        CHECK(select::golomb_encode(set.data(), k, m, bytes.data(), size) == size);
        CHECK(select::golomb_decode(bytes.data(), size, k, n, m, back.data()) == size);
        CHECK(back == set);
        if (k <= 300) {
            std::vector<std::uint8_t> code(64 + 128 * k);
            const std::size_t used = select::digits_encode(set.data(), k, n, code.data(), code.size());
            code.resize(used);
            back.assign(k, -1);
            CHECK(select::digits_decode(code.data(), used, k, n, back.data()) == used);
            CHECK(back == set);
        }
        std::vector<std::uint8_t> map((n + 7) / 8), classes(k);
        select::bitmap_encode(set.data(), k, n, map.data());
        back.assign(k, -1);
        select::bitmap_decode(map.data(), map.size(), k, n, back.data());
        CHECK(back == set);
        select::gap_classes(set.data(), k, classes.data());
        std::vector<std::uint8_t> rests(8 * k + 8);
        rests.resize(select::gap_rests_encode(set.data(), k, rests.data(), rests.size()));
        back.assign(k, -1);
        CHECK(select::gap_rests_decode(rests.data(), rests.size(), classes.data(), k, n, back.data()) == rests.size());
        CHECK(back == set);
        Indices rest(n - k);
        select::complement(set.data(), k, n, rest.data());
        rest.insert(rest.end(), set.begin(), set.end());
        std::sort(rest.begin(), rest.end());
        for (std::uint64_t i = 0; i < n; ++i) CHECK(rest[i] == static_cast<std::int32_t>(i));
    }
}

static void permutations(std::mt19937& random) {
    for (std::uint64_t n : {1u, 2u, 3u, 64u, 65u, 1000u, 70001u}) {
        select::Permutation p{{}, random() % n, n};
        for (auto& key : p.keys) key = static_cast<std::uint32_t>(random());
        Indices images(n);
        select::permuted_indices(p, n, images.data());
        std::vector<float> x(n), values(n), out(n, 3.0f);
        for (std::uint64_t i = 0; i < n; ++i) x[i] = static_cast<float>(i);
        select::permuted_gather(p, x.data(), n, values.data());
        for (std::uint64_t i = 0; i < n; ++i) CHECK(values[i] == static_cast<float>(images[i]));
        select::permuted_scatter(p, values.data(), n, out.data());
        CHECK(out == x);
        std::sort(images.begin(), images.end());
        for (std::uint64_t i = 0; i < n; ++i) CHECK(images[i] == static_cast<std::int32_t>(i));
    }
}

int main() {
    for (int level = 0; level <= static_cast<int>(best_isa()); ++level) {
        set_isa(static_cast<Isa>(level));
        for (int threads : {1, 3}) {
            set_threads(threads);
            std::mt19937 random(1);
            top_k(random);
            permutations(random);
            if (level == 0 && threads == 1) index_sets(random);
        }
    }
    std::puts("test_select: ok");
}
