// Levels coded by the arithmetic coder with given probabilities: nothing to learn and no tables to send, for short vectors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tersegrad::modelled {

inline constexpr std::int64_t kLargest = std::int64_t{1} << 30;  // of a level's magnitude

// Chances of a one in 2^16, by class and decision (spec, "Subtractive dithering"); every entry lies in 1..65535.
struct Table {
    const std::int32_t* entries;
    std::size_t width;  // 1 + 2 * reach
    int shift;          // low bits of a level that are sent as they are, 0..30
    const std::int32_t* row(std::size_t c) const { return entries + c * width; }
    std::int64_t reach() const { return static_cast<std::int64_t>(width / 2); }
};

std::vector<std::uint8_t> encode(const std::int32_t* levels, const std::uint8_t* classes, std::size_t n, const Table&);
// False: malformed bytes. Classes must have rows.
bool decode(const std::uint8_t* data, std::size_t size, const std::uint8_t* classes, std::size_t n, const Table&, std::int32_t* levels);

}  // namespace tersegrad::modelled
