// The loops of chunks.cpp, compiled once for each instruction set. Plain C++: compilers make vectors of it.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "tersegrad/chunks.hpp"
#include "tersegrad/select.hpp"

namespace tersegrad::chunks {
namespace {

inline void maxima_of(const float* __restrict x, std::size_t n, std::size_t groups, std::uint32_t* __restrict maxima) {
    // 64 lanes at a time stay in registers. Keys are below 2^31, so that signed comparisons serve.
    for (std::size_t base = 0; base < groups; base += 64) {
        std::int32_t most[64] = {};
        for (std::size_t row = 0; row + groups <= n; row += groups)
            for (std::size_t j = 0; j < 64; ++j) {
                const auto key = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x[row + base + j]) & 0x7fffffffu);
                most[j] = most[j] > key ? most[j] : key;
            }
        for (std::size_t j = 0; j < 64; ++j) maxima[base + j] = static_cast<std::uint32_t>(most[j]);
    }
}

// The largest t such that at least k of the keys, none above `top`, reach it; all reach `low`, and there are at least k.
inline std::uint32_t kth_of(const std::uint32_t* __restrict keys, std::size_t n, std::size_t k, std::uint32_t low, std::uint32_t top) {
    std::uint32_t above = top + 1;
    while (above - low > 1) {
        const std::uint32_t middle = low + (above - low) / 2;
        std::int32_t count = 0;
        for (std::size_t j = 0; j < n; ++j) count += static_cast<std::int32_t>(keys[j]) >= static_cast<std::int32_t>(middle);
        if (static_cast<std::size_t>(count) == k) return middle;
        (static_cast<std::size_t>(count) > k ? low : above) = middle;
    }
    return low;
}

// Without a branch on what is kept.
inline void pick_of(const std::int32_t* indices, const float* candidates, const std::uint32_t* keys, std::size_t n, std::uint32_t threshold, std::size_t k,
                    std::size_t ties, std::int32_t* places, float* values) {
    std::size_t to = 0;
    for (std::size_t j = 0; j < n && to < k; ++j) {
        const bool tie = keys[j] == threshold, keep = keys[j] > threshold || (tie && ties);
        ties -= tie && keep;
        places[to] = indices[j];
        values[to] = candidates[j];
        to += keep;
    }
}

inline void sum_of(const float* __restrict x, const float* __restrict carry, float decay, float* __restrict sum, std::size_t n) {
    // Three streams: what comes next is asked for ahead of time.
    constexpr std::size_t line = 16, ahead = 768;
    std::size_t j = 0;
    for (; j + line <= n; j += line) {
        __builtin_prefetch(x + j + ahead);
        __builtin_prefetch(carry + j + ahead);
        __builtin_prefetch(sum + j + ahead, 1);
        for (std::size_t i = 0; i < line; ++i) sum[j + i] = decay * carry[j + i] + x[j + i];
    }
    for (; j < n; ++j) sum[j] = decay * carry[j] + x[j];
}

inline void scan_row(const float* x, const Scan& of, std::size_t row) {
    const select::Table& table = select::table();
    for (std::size_t c = 0; c < of.tiles; ++c) {
        std::size_t& found = of.counts[c];
        if (found > of.most) continue;
        const std::size_t to = c * of.room + found;
        found += table.scan(x + c * of.width, of.width, of.thresholds[c], static_cast<std::int32_t>(row * of.width), of.indices + to, of.values + to);
    }
}

inline void sum_and_scan(const float* x, const float* carry, float decay, float* sum, bool, const Scan& of) {
    for (std::size_t row = 0; row < of.rows; ++row) {
        const std::size_t at = row * of.stride;
        sum_of(x + at, carry + at, decay, sum + at, of.tiles * of.width);
        scan_row(sum + at, of, row);
    }
}

}  // namespace
}  // namespace tersegrad::chunks
