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

std::uint64_t sum_plain(const std::uint8_t* levels, std::size_t n, int center) {
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

}  // namespace
}  // namespace tersegrad::classes::detail
