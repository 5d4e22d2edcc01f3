// Philox known answers, sums, and every instruction set against the portable one, on memory whose ends the sanitizers watch.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tersegrad/rounding.hpp"
#include "tersegrad/runtime.hpp"

using namespace tersegrad;

#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                         \
        }                                                                         \
    } while (0)

static void known_answers() {
    const PhiloxWords zero = philox(0, 0, 0, 0, 0);
    const std::uint32_t a[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    CHECK(std::memcmp(zero.w, a, 16) == 0);
    const PhiloxWords ones = philox(~0ull, ~0u, ~0u, ~0u, ~0u);
    const std::uint32_t b[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
    CHECK(std::memcmp(ones.w, b, 16) == 0);
    const PhiloxWords pi = philox(0x299f31d0a4093822, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344);
    const std::uint32_t c[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
    CHECK(std::memcmp(pi.w, c, 16) == 0);
}

static void draws() {
    const Stream stream{0x0123456789abcdef, 200, 77, 5u << 16 | 9};
    for (const std::uint64_t start : {std::uint64_t{0}, std::uint64_t{13}, (std::uint64_t{1} << 35) - 70, (std::uint64_t{1} << 41) + 8}) {
        std::vector<std::uint16_t> u(3001);
        random_u16(stream, start, u.size(), u.data());
        for (std::size_t k = 0; k < u.size(); ++k) {
            const std::uint64_t i = start + k;
            const PhiloxWords words = philox_block(stream, i >> 3);
            CHECK(u[k] == static_cast<std::uint16_t>(words.w[i % 8 / 2] >> (i % 2 * 16)));
        }
    }
}

struct Result {
    std::vector<std::uint8_t> steps, codes;
    std::vector<float> out, added;
};

static Result run(const float* x, std::size_t n, const Quantiser& q) {
    Result r;
    r.steps.resize(block_count(n, q.block) * step_bytes(q.format));
    r.codes.resize(code_bytes(n, q.width));
    r.out.resize(n, 3.0f);
    r.added.resize(n, 1.0f);
    quantise(x, n, q, Stream{5, 0, 1, 2}, r.steps.data(), r.codes.data());
    dequantise(r.steps.data(), r.codes.data(), n, q, r.out.data());
    dequantise_add(r.steps.data(), r.codes.data(), n, q, 0.3f, r.added.data());
    return r;
}

static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
}

static void quantisers(Isa isa_now) {
    for (const std::size_t n : {0, 1, 7, 8, 63, 64, 65, 511, 512, 513, 5001}) {
        const std::unique_ptr<float[]> x(new float[n]);  // exactly n: reading one more is caught
        for (std::size_t i = 0; i < n; ++i) x[i] = std::sin(static_cast<float>(i * i + n)) * std::exp2(static_cast<float>(i % 40) - 20.0f);
        if (n == 5001)  // blocks of constant, single, huge and tiny coordinates: levels at their limits
            for (std::size_t i = 0; i < 2500; ++i)
                x[i] = i < 600 ? -1.5f : i < 1200 ? (i % 192 ? 0.0f : 7.0f) : i < 1800 ? x[i] * 0x1p107f : x[i] * 0x1p-120f;
        for (const std::size_t block : {8, 32, 64, 192, 512, 1016, 8192, 1 << 17})
            for (int width = 2; width <= 8; ++width)
                for (const Rule rule : {Rule::l2, Rule::max, Rule::nearest}) {
                    const StepFormat format = rule == Rule::nearest && width == 4 ? StepFormat::bfloat16 : StepFormat::float32;
                    const Quantiser q{block, (1 << (width - 1)) - 1, width, rule, format};
                    set_isa(Isa::portable);
                    const Result expected = run(x.get(), n, q);
                    const double squares = sum_squares(x.get(), n), magnitudes = sum_abs(x.get(), n);
                    const float top = abs_max(x.get(), n);
                    set_isa(isa_now);
                    const Result got = run(x.get(), n, q);
                    CHECK(expected.steps == got.steps && expected.codes == got.codes);
                    CHECK(same(expected.out, got.out) && same(expected.added, got.added));
                    CHECK(squares == sum_squares(x.get(), n) && magnitudes == sum_abs(x.get(), n) && top == abs_max(x.get(), n));
                }
    }
}

static void refusals() {
    float x[8] = {};
    std::uint8_t bytes[64];
    int caught = 0;
    for (const Quantiser& q : {Quantiser{12, 7, 4}, Quantiser{0, 7, 4}, Quantiser{8, 8, 4}, Quantiser{8, 1, 1}, Quantiser{8, 1, 9}}) {
        try {
            quantise(x, 8, q, Stream{}, bytes, bytes);
        } catch (const std::exception&) {
            ++caught;
        }
    }
    CHECK(caught == 5);
}

int main() {
    known_answers();
    for (int k = 0; k <= static_cast<int>(best_isa()); ++k) {
        set_isa(static_cast<Isa>(k));
        draws();
        quantisers(static_cast<Isa>(k));
    }
    refusals();
    std::puts("rounding: ok");
}
