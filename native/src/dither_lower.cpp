#include "dither_lower.hpp"

#include <bit>

namespace tersegrad::dither {
namespace {

using detail::kLowered;
constexpr int kMost = 96;  // sixteenths of a bit, each 1/256 of a step
constexpr float kStep = 256.0f;

}  // namespace

int log2_sixteenths(std::uint64_t a, std::uint64_t b) {
    std::uint64_t m = (a << 31) / b;
    int found = static_cast<int>(std::bit_width(m)) - 32;
    m >>= found;
    for (int i = 0; i < 4; ++i) {
        m = m * m >> 31;
        const auto up = static_cast<int>(m >> 32);
        found = 2 * found + up;
        m >>= up;
    }
    return found;
}

detail::Least thresholds(const std::uint64_t* counts, int window, unsigned mask) {
    detail::Least least;
    for (; mask; mask &= mask - 1, counts += 2 * window + 1) {
        float* const of = least.of[std::countr_zero(mask)];
        std::uint64_t below = 2 * counts[window];  // a level below another with the same sign; zero counts as one of each
        for (int j = 1; j <= std::min(window, kLowered); ++j) {
            const std::uint64_t here = counts[window - j] + counts[window + j];
            const int dearer = !here ? kMost : below > here ? std::min(log2_sixteenths(below, here), kMost) : 0;
            of[j] = static_cast<float>(j) - 0.5f + static_cast<float>(dearer) / kStep;
            below = here;
        }
    }
    return least;
}

void lower_block(const float* x, std::size_t n, const std::uint8_t* contexts, const detail::Least& least, int center, std::uint8_t* k, Block& b) {
    double dots[kScaleBlock / kSumChunk];
    std::size_t chunks = 0;
    std::int64_t energy = 0;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        detail::Less less;
        ops().lower(x + i, std::min(kSumChunk, n - i), b.inverse, contexts ? contexts + i : nullptr, least, center, k + i, less);
        dots[chunks++] = fold<32>(less.dot);
        energy += less.energy;
    }
    b.dot -= fold(dots, chunks);
    b.energy -= static_cast<double>(energy);
    b.fit();
}

void lower_alone(const float* x, std::size_t n, float inverse, std::int32_t* k) {
    constexpr int window = kLowered + 1;
    std::uint64_t counts[2 * window + 1] = {};
    for (std::size_t i = 0; i < n; ++i) ++counts[std::clamp(k[i], -window, window) + window];
    const detail::Least least = thresholds(counts, window, 1);
    for (std::size_t i = 0; i < n; ++i)
        if (std::fabs(x[i] * inverse) < least.of[0][std::min<std::uint32_t>(detail::magnitude(k[i]), window)]) k[i] += k[i] < 0 ? 1 : -1;
}

}  // namespace tersegrad::dither
