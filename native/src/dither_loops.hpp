// The loops of dithering, written plainly: the definition, the rest of every vectorised loop, and the portable version.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "tersegrad/dither.hpp"

namespace tersegrad::dither::detail {
namespace {

inline float limited(float v) { return v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v; }

// Round half to even; exact below 2^22. Larger results are meant to be saturated.
inline float round_small(float y) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23
    return (y + magic) - magic;
}

// Levels from kTooLarge on (and NaN) come out as kTooLarge, which no caller codes.
inline std::int32_t round_one(float x, float inverse, bool random, std::uint32_t draw) {
    const float y = x * inverse, size = std::fabs(y);
    if (!(size < static_cast<float>(kTooLarge))) return kTooLarge;
    if (!random) return static_cast<std::int32_t>(size < 4194304.0f ? round_small(y) : std::nearbyintf(y));
    const auto whole = static_cast<std::int32_t>(size);
    const auto part = static_cast<std::int32_t>(round_small((size - static_cast<float>(whole)) * 65536.0f));
    const std::int32_t k = whole + ((part + static_cast<std::int32_t>(draw)) >> 16);
    return std::signbit(x) ? -k : k;
}

inline std::uint32_t magnitude(std::int32_t k) { return k < 0 ? 0u - static_cast<std::uint32_t>(k) : static_cast<std::uint32_t>(k); }
inline std::uint8_t biased(std::int32_t k) { return static_cast<std::uint8_t>(std::clamp(k, -127, 127) + kBias); }
inline std::int8_t unbiased(std::uint8_t b) { return static_cast<std::int8_t>(b - kBias); }

[[maybe_unused]] void norm_plain(const float* x, std::size_t n, const char*, double* lanes) {
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (std::size_t j = 0; j < 32; ++j) lanes[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
    for (std::size_t j = 0; i + j < n; ++j) lanes[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
}

[[maybe_unused]] void quick_plain(const float* x, std::size_t n, float inverse, const char*, std::uint8_t* out, Quick& sums) {
    const auto sweep = [&](std::size_t i, std::size_t count) {
        std::int32_t energy = 0, top = 0;
        for (std::size_t j = 0; j < count; ++j) {
            const float y = x[i + j] * inverse, k = round_small(y);
            sums.dot[j] += y * k;
            const float held = k > 127.0f ? 127.0f : k < -127.0f ? -127.0f : k;
            const auto level = static_cast<std::int32_t>(held), size = level < 0 ? -level : level;
            out[i + j] = static_cast<std::uint8_t>(level + kBias);
            energy += level * level;
            top = std::max(top, size);
        }
        sums.energy += energy;
        sums.top = std::max(sums.top, static_cast<std::uint32_t>(top));
    };
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) sweep(i, 64);
    sweep(i, n - i);
}

[[maybe_unused]] void exact_plain(const float* x, std::size_t n, float inverse, const char*, std::uint8_t* out, double* lanes,
                                  std::uint32_t& top) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::int32_t k = round_one(x[i], inverse, false, 0);
        top = std::max(top, magnitude(k));
        out[i] = biased(k);
        const double a = x[i], b = k;
        lanes[i % 32] += a * b;
        lanes[32 + i % 32] += b * b;
        lanes[64 + i % 32] += a * a;
    }
}

[[maybe_unused]] void random_plain(const float* x, std::size_t n, float inverse, const std::uint16_t* draws, const char*, std::uint8_t* out,
                                   std::uint32_t& top) {
    for (std::size_t i = 0; i < n; ++i) {
        out[i] = biased(round_one(x[i], inverse, true, draws[i]));
        top = std::max(top, magnitude(unbiased(out[i])));
    }
}

[[maybe_unused]] std::size_t above_plain(const std::uint8_t* k, std::size_t n, int limit) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < n; ++i) count += magnitude(unbiased(k[i])) > static_cast<std::uint32_t>(limit);
    return count;
}

[[maybe_unused]] void shift_plain(std::uint8_t* k, std::size_t n, int window) {
    const auto w = static_cast<std::int8_t>(window);
    for (std::size_t i = 0; i < n; ++i) {
        const std::int8_t level = unbiased(k[i]), c = level > w ? w : level < -w ? static_cast<std::int8_t>(-w) : level;
        k[i] = static_cast<std::uint8_t>(static_cast<std::uint8_t>(c) + static_cast<std::uint8_t>(w));
    }
}

[[maybe_unused]] std::size_t ends_plain(const std::uint8_t* symbols, std::size_t n, std::uint8_t last, std::uint16_t* at) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < n; ++i) {
        at[count] = static_cast<std::uint16_t>(i);
        count += symbols[i] == 0 || symbols[i] == last;
    }
    return count;
}

[[maybe_unused]] void scale_plain(const std::uint8_t* symbols, std::size_t n, int window, float step, bool add, float weight, float* out) {
    if (add)
        for (std::size_t i = 0; i < n; ++i) out[i] += weight * limited(static_cast<float>(static_cast<int>(symbols[i]) - window) * step);
    else
        for (std::size_t i = 0; i < n; ++i) out[i] = limited(static_cast<float>(static_cast<int>(symbols[i]) - window) * step);
}

[[maybe_unused]] void lower_plain(const float* x, std::size_t n, float inverse, const std::uint8_t* contexts, const Least& least, int center,
                                  std::uint8_t* k, Less& less) {
    for (std::size_t i = 0; i < n; ++i) {
        const int level = k[i] - center, size = level < 0 ? -level : level;
        if (!(std::fabs(x[i] * inverse) < least.of[contexts ? contexts[i] : 0][std::min(size, kLowered + 1)])) continue;
        k[i] = static_cast<std::uint8_t>(level < 0 ? k[i] + 1 : k[i] - 1);
        less.dot[i % 32] += std::fabs(x[i]);
        less.energy += 2 * size - 1;
    }
}

[[maybe_unused]] void leave_plain(const std::uint8_t* k, std::size_t n, float step, const float* x, float* left) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < n; ++i) left[i] = x[i] - limited(static_cast<float>(unbiased(k[i])) * step);
}

}  // namespace
}  // namespace tersegrad::dither::detail
