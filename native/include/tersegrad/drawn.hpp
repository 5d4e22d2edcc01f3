// Draws that both ends share: subtractive dither, and rows of a codebook that is never stored.
//
// Coordinate i has the 16-bit draw u, standing for U = (2u - 65535) / 2^17 of a step. With Y = rint(fl32(fl32(x / step) * 65536)) the
// level is q = (Y + u) >> 16 and its value ((q << 17) - 2u + 65535) * 2^-17 * step. Levels travel folded: q where u >= 32768, else -q.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tersegrad/philox.hpp"

namespace tersegrad::drawn {

inline constexpr float level_limit = 1073741824.0f;  // |x / step| from here on is not coded

// Folded levels; returns the largest magnitude, or -1 where x is not finite or too large for the step.
std::int64_t quantise(const float* x, std::size_t n, float step, const Stream&, std::uint64_t start, std::int32_t* levels);
// The bin of |U|, 0..15.
void bins(const Stream&, std::uint64_t start, std::size_t n, std::uint8_t* out);
// How close |U| is to 1/2: 0 in the lower half of its range, 1 in the next quarter, ..., at most 7.
void octaves(const Stream&, std::uint64_t start, std::size_t n, std::uint8_t* out);
// out = value, or out += weight * value; any levels are safe.
void restore(const std::int32_t* levels, std::size_t n, float step, const Stream&, std::uint64_t start, float* out);
void restore_add(const std::int32_t* levels, std::size_t n, float step, const Stream&, std::uint64_t start, float weight, float* out);
// Row r takes draws r * stride .. r * stride + width, stride = width rounded up to a multiple of 8.
void random_rows(const Stream&, const std::int64_t* rows, std::size_t count, std::size_t width, std::int32_t* out);
// For each of n units (d floats each) the first word from start[i] on whose product with it is at least least[i], or -1. `book` holds
// coordinate 0 of all words, then coordinate 1, and so on.
void sphere_first(const float* book, std::size_t words, const float* units, std::size_t n, std::size_t d, const float* least,
                  const std::int64_t* start, std::int64_t* first);

namespace detail {
inline constexpr std::size_t chunk = 4096;
struct Implementation {  // at most `chunk` coordinates
    float (*largest)(const float* x, std::size_t n, float inverse);  // of |x * inverse|; not below level_limit where one is NaN
    std::int32_t (*quantise)(const float* x, std::size_t n, float inverse, const std::uint16_t* draws, std::int32_t* levels);
    void (*bins)(const std::uint16_t* draws, std::size_t n, std::uint8_t* out);
    void (*octaves)(const std::uint16_t* draws, std::size_t n, std::uint8_t* out);
    void (*restore)(const std::int32_t* levels, std::size_t n, float step, const std::uint16_t* draws, float* out);
    std::int64_t (*first)(const float* book, std::size_t words, const float* unit, std::size_t d, float least, std::size_t start);
};
extern const Implementation portable;
#if defined(__x86_64__)
extern const Implementation avx2, avx512;
#endif
}  // namespace detail
}  // namespace tersegrad::drawn
