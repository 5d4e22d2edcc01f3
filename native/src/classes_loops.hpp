// The loops of classes.cpp, compiled once for each instruction set. Plain C++: compilers make vectors of it.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tersegrad/classes.hpp"

namespace tersegrad::classes::detail {
namespace {

inline std::uint8_t distance(std::uint8_t level, std::uint8_t center) {
    return static_cast<std::uint8_t>(std::max(level, center) - std::min(level, center));
}

[[maybe_unused]] std::uint64_t sum_plain(const std::uint8_t* levels, std::size_t n, int center) {
    const auto c = static_cast<std::uint8_t>(center);
    std::uint64_t total = 0;
    while (n) {
        // Sixteen bits hold 256 magnitudes.
        const std::size_t run = std::min<std::size_t>(n, 256);
        std::uint16_t part = 0;
        for (std::size_t i = 0; i < run; ++i) part = static_cast<std::uint16_t>(part + distance(levels[i], c));
        total += part;
        levels += run;
        n -= run;
    }
    return total;
}

void block_sums_plain(const std::uint8_t* __restrict levels, std::size_t blocks, int center, std::uint16_t* __restrict sums) {
    // An array of centers, because compilers know the sum of absolute differences of two arrays as one instruction.
    std::uint8_t centers[kBlock];
    std::memset(centers, center, kBlock);
    for (std::size_t b = 0; b < blocks; ++b, levels += kBlock) {
        int sum = 0;
        for (std::size_t i = 0; i < kBlock; ++i) sum += std::abs(levels[i] - centers[i]);
        sums[b] = static_cast<std::uint16_t>(sum);
    }
}

void add_plain(const std::uint8_t* __restrict levels, std::size_t n, int center, std::uint16_t* __restrict sums) {
    const auto c = static_cast<std::uint8_t>(center);
    for (std::size_t j = 0; j < n; ++j) sums[j] = static_cast<std::uint16_t>(sums[j] + distance(levels[j], c));
}

void raise_plain(const std::uint8_t* __restrict levels, std::size_t n, int center, std::uint8_t* __restrict tops) {
    const auto c = static_cast<std::uint8_t>(center);
    for (std::size_t j = 0; j < n; ++j) tops[j] = std::max(tops[j], distance(levels[j], c));
}

// Runs whose sums 32 bits hold; 16-bit signed comparisons, which every instruction set has.
inline constexpr std::size_t kRun = std::size_t{1} << 14;

Extent extent_plain(const std::uint16_t* sums, std::size_t n) {
    Extent e;
    if (!n) return e;
    std::int16_t least = INT16_MAX, most = 0;
    for (std::size_t begin = 0; begin < n; begin += kRun) {
        std::uint32_t total = 0;
        for (std::size_t i = begin; i < std::min(n, begin + kRun); ++i) {
            const auto s = static_cast<std::int16_t>(sums[i]);
            least = std::min(least, s);
            most = std::max(most, s);
            total += sums[i];
        }
        e.total += total;
    }
    e.least = static_cast<std::uint16_t>(least);
    e.most = static_cast<std::uint16_t>(most);
    return e;
}

From from_plain(const std::uint16_t* sums, std::size_t n, std::uint16_t least) {
    const auto bound = static_cast<std::int16_t>(least);
    From f;
    for (std::size_t begin = 0; begin < n; begin += kRun) {
        std::uint32_t total = 0;
        std::int16_t number = 0;
        for (std::size_t i = begin; i < std::min(n, begin + kRun); ++i) {
            const bool held = static_cast<std::int16_t>(sums[i]) >= bound;
            number = static_cast<std::int16_t>(number + held);
            total += held ? sums[i] : std::uint16_t{0};
        }
        f.number += static_cast<std::uint64_t>(number);
        f.total += total;
    }
    return f;
}

}  // namespace
}  // namespace tersegrad::classes::detail
