// Sparse Dithering round trips on every instruction set and thread count, with sanitizers: exact sizes, so that any stray access shows.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "tersegrad/dither.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

using namespace tersegrad;

static int checks = 0;
#define CHECK(x)                                                         \
    do {                                                                 \
        ++checks;                                                        \
        if (!(x)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #x); \
            return 1;                                                    \
        }                                                                \
    } while (0)

// heavy: a share of the coordinates is many times larger than the others, so that levels are escaped.
static std::vector<float> draw(std::mt19937& rng, std::size_t n, bool heavy) {
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (auto& v : x) {
        v = normal(rng);
        if (heavy && rng() % 2000 == 0) v *= static_cast<float>(1 + rng() % 3000);
    }
    return x;
}

static std::unique_ptr<std::uint8_t[]> exactly(const std::vector<std::uint8_t>& bytes) {
    std::unique_ptr<std::uint8_t[]> copy(new std::uint8_t[bytes.size()]);
    if (!bytes.empty()) std::memcpy(copy.get(), bytes.data(), bytes.size());
    return copy;
}

static int round_trip(const std::vector<float>& values, const dither::Options& options, bool bounded) {
    const std::size_t n = values.size();
    const std::unique_ptr<float[]> x(new float[n]);
    if (n) std::memcpy(x.get(), values.data(), 4 * n);
    std::vector<std::uint8_t> first;
    std::vector<float> decoded(n), added(n);
    for (int level = 0; level <= static_cast<int>(best_isa()); ++level)
        for (int count : {1, 3}) {
            set_isa(static_cast<Isa>(level));
            set_threads(count);
            std::vector<std::uint8_t> message(dither::max_bytes(n));
            const auto outcome = dither::encode(x.get(), n, options, message.data());
            CHECK(outcome.bytes <= message.size());
            message.resize(outcome.bytes);
            std::vector<float> apart(n, -1.0f), summed(n, -1.0f), half(values);  // what is left of x, and of a sum
            for (auto& v : half) v *= 0.5f;
            if (std::isfinite(outcome.norm) && n && std::isnormal(half[0])) {
                dither::Options carrying = options;
                carrying.left = summed.data();
                carrying.carry = half.data();
                std::vector<std::uint8_t> again(dither::max_bytes(n));
                again.resize(dither::encode(half.data(), n, carrying, again.data()).bytes);
                std::vector<float> whole(n);
                for (std::size_t i = 0; i < n; ++i) whole[i] = half[i] + half[i];
                std::vector<std::uint8_t> direct(dither::max_bytes(n));
                direct.resize(dither::encode(whole.data(), n, options, direct.data()).bytes);
                CHECK(again == direct);
                CHECK(dither::decode_add(direct.data(), direct.size(), n, {}, -1.0f, whole.data()));
                CHECK(std::memcmp(whole.data(), summed.data(), 4 * n) == 0);
            }
            dither::Options keeping = options;
            std::vector<std::uint8_t> once_more(dither::max_bytes(n));
            keeping.left = apart.data();
            once_more.resize(dither::encode(x.get(), n, keeping, once_more.data()).bytes);
            CHECK(once_more == message);
            const bool start = first.empty();
            if (start) first = message;
            CHECK(message == first);
            const auto bytes = exactly(message);
            std::vector<float> out(n, -1.0f), sum(n, 1.0f);
            CHECK(dither::decode(bytes.get(), message.size(), n, {}, out.data()));
            CHECK(dither::decode_add(bytes.get(), message.size(), n, {}, 0.5f, sum.data()));
            if (start) decoded = out, added = sum;
            CHECK(n == 0 || std::memcmp(out.data(), decoded.data(), 4 * n) == 0);
            CHECK(n == 0 || std::memcmp(sum.data(), added.data(), 4 * n) == 0);
            std::vector<float> wanted(values);
            CHECK(dither::decode_add(bytes.get(), message.size(), n, {}, -1.0f, wanted.data()));
            const bool finite = std::isfinite(outcome.norm);
            CHECK(n == 0 || !finite || std::memcmp(apart.data(), wanted.data(), 4 * n) == 0);
        }
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < n; ++i) {
        norm += static_cast<double>(values[i]) * values[i];
        error += (static_cast<double>(decoded[i]) - values[i]) * (static_cast<double>(decoded[i]) - values[i]);
        CHECK(added[i] == 1.0f + 0.5f * decoded[i] || std::isnan(decoded[i]));
    }
    CHECK(!bounded || !std::isfinite(norm) || error <= options.nu * norm * (1 + 1e-6) + static_cast<double>(n) * 0x1p-252);
    return 0;
}

int main() {
    std::mt19937 rng(1);
    const Stream draws{7, 1, 2, 3};
    const std::size_t sizes[] = {0, 1, 2, 10, 63, 64, 65, 127, 1000, 4097, 20000, dither::kScaleBlock + 1, dither::kSegment + dither::kSegment / 2 + 3};
    for (std::size_t n : sizes)
        for (bool heavy : {false, true}) {
            if (n > 100000 && !heavy) continue;
            const auto x = draw(rng, n, heavy);
            for (auto coder : {dither::Coder::automatic, dither::Coder::rans, dither::Coder::paper}) {
                if (coder == dither::Coder::paper && n > 5000) continue;
                if (round_trip(x, {0.1, 0, coder, nullptr}, true)) return 1;
                if (n > 100000) continue;
                if (round_trip(x, {0.001, 0, coder, nullptr}, true)) return 1;
                if (round_trip(x, {0, 0.7f, coder, nullptr}, false)) return 1;
                dither::Options chosen{0.3, 0, coder, nullptr};
                chosen.rdo = true;
                if (round_trip(x, chosen, false)) return 1;
                if (round_trip(x, {0, 1e-9f, coder, nullptr}, false)) return 1;
                if (round_trip(x, {0.25, 0, coder, &draws}, false)) return 1;
            }
        }
    std::vector<float> odd(3000, 0.0f);  // zeros, a single level, denormals, huge values, not finite
    for (float v : {0.0f, 1.0f, 1e-44f, 3e38f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        odd[1234] = v;
        for (auto coder : {dither::Coder::automatic, dither::Coder::rans, dither::Coder::paper})
            if (round_trip(odd, {0.1, 0, coder, nullptr}, v < 1e38f)) return 1;
        std::fill(odd.begin(), odd.end(), v);
        if (round_trip(odd, {0.1, 0, dither::Coder::rans, nullptr}, v < 1e38f)) return 1;
        std::fill(odd.begin(), odd.end(), 0.0f);
    }
    std::printf("test_dither: %d checks\n", checks);
}
