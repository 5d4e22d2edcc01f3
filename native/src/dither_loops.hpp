// The loops of dithering, written once and compiled for each instruction set.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "tersegrad/dither.hpp"

namespace tersegrad::dither::detail {
namespace {

inline float limited(float v) { return v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v; }

// Levels that int32 cannot hold (and NaN) come out as 2^31 - 1, which no caller codes.
inline std::int32_t round_one(float x, float inverse, bool random, std::uint32_t draw) {
    const float y = std::fabs(x) * inverse, whole = std::floor(y);
    if (!(y < 2147483520.0f)) return 0x7fffffff;
    if (!random) return static_cast<std::int32_t>(std::nearbyintf(x * inverse));
    const std::int32_t part = static_cast<std::int32_t>(std::nearbyintf((y - whole) * 65536.0f));
    const std::int32_t k = static_cast<std::int32_t>(whole) + ((part + static_cast<std::int32_t>(draw)) >> 16);
    return std::signbit(x) ? -k : k;
}

[[maybe_unused]] void norm_plain(const float* x, std::size_t n, double* lanes) {
    for (std::size_t i = 0; i < n; ++i) lanes[i % 32] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
}

[[maybe_unused]] void quantise_plain(const float* x, std::size_t n, float inverse, const std::uint16_t* draws, std::int8_t* out,
                                     double* lanes, Moments& m) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::int32_t k = round_one(x[i], inverse, draws != nullptr, draws ? draws[i] : 0);
        const std::uint32_t size = k < 0 ? 0u - static_cast<std::uint32_t>(k) : static_cast<std::uint32_t>(k);
        m.top = std::max(m.top, size);
        m.above15 += size > 15;
        m.above31 += size > 31;
        out[i] = static_cast<std::int8_t>(std::clamp(k, -127, 127));
        const double a = x[i], b = k;
        lanes[i % 32] += a * b;
        lanes[32 + i % 32] += b * b;
        lanes[64 + i % 32] += a * a;
    }
}

[[maybe_unused]] void shift_plain(std::int8_t* k, std::size_t n, int window) {
    const std::int8_t w = static_cast<std::int8_t>(window);
    for (std::size_t i = 0; i < n; ++i) {
        const std::int8_t c = k[i] > w ? w : k[i] < -w ? static_cast<std::int8_t>(-w) : k[i];
        k[i] = static_cast<std::int8_t>(static_cast<std::uint8_t>(c) + static_cast<std::uint8_t>(w));
    }
}

[[maybe_unused]] void scale_plain(const std::uint8_t* symbols, std::size_t n, int window, float step, float* out) {
    for (std::size_t i = 0; i < n; ++i) out[i] = limited(static_cast<float>(static_cast<int>(symbols[i]) - window) * step);
}

[[maybe_unused]] void scale_add_plain(const std::uint8_t* symbols, std::size_t n, int window, float step, float weight, float* out) {
    for (std::size_t i = 0; i < n; ++i)
        out[i] += weight * limited(static_cast<float>(static_cast<int>(symbols[i]) - window) * step);
}

}  // namespace
}  // namespace tersegrad::dither::detail
