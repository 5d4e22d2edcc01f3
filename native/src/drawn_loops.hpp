// The loops of shared dither, written once and compiled for each instruction set.
#pragma once
#include <cfloat>
#include <cmath>

#include "tersegrad/drawn.hpp"

namespace tersegrad::drawn::detail {
namespace {

inline std::int32_t folded(std::int32_t q, std::int32_t u) { return u >= 32768 ? q : -q; }

float largest_plain(const float* x, std::size_t n, float inverse) {
    float top = 0;
    bool good = true;
    for (std::size_t i = 0; i < n; ++i) {
        const float size = std::fabs(x[i] * inverse);
        good &= size < level_limit;  // false for NaN too
        top = size > top ? size : top;
    }
    return good ? top : level_limit;
}

std::int32_t quantise_plain(const float* x, std::size_t n, float inverse, const std::uint16_t* draws, std::int32_t* levels) {
    std::int32_t top = 0;
    if (largest_plain(x, n, inverse) < 16384.0f) {  // 32 bits hold Y
        for (std::size_t i = 0; i < n; ++i) {
            const std::int32_t u = draws[i], y = static_cast<std::int32_t>(std::nearbyintf(x[i] * inverse * 65536.0f));
            const std::int32_t q = (y + u) >> 16, size = q < 0 ? -q : q;
            levels[i] = folded(q, u);
            top = size > top ? size : top;
        }
    } else {
        for (std::size_t i = 0; i < n; ++i) {
            const std::int64_t u = draws[i], y = static_cast<std::int64_t>(std::nearbyintf(x[i] * inverse * 65536.0f));
            const auto q = static_cast<std::int32_t>((y + u) >> 16), size = q < 0 ? -q : q;
            levels[i] = folded(q, static_cast<std::int32_t>(u));
            top = size > top ? size : top;
        }
    }
    return top;
}

void bins_plain(const std::uint16_t* draws, std::size_t n, std::uint8_t* out) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::int32_t u = draws[i];
        out[i] = static_cast<std::uint8_t>((u >= 32768 ? u - 32768 : 32767 - u) >> 11);
    }
}

void octaves_plain(const std::uint16_t* draws, std::size_t n, std::uint8_t* out) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint16_t u = draws[i], size = (u & 0x8000) ? u & 0x7fff : 0x7fff - u;
        std::uint16_t octave = 0;
        for (int j = 1; j < 8; ++j) octave = static_cast<std::uint16_t>(octave + (size >= 0x8000 - (0x8000 >> j)));
        out[i] = static_cast<std::uint8_t>(octave);
    }
}

void restore_plain(const std::int32_t* levels, std::size_t n, float step, const std::uint16_t* draws, float* out) {
    bool small = true;
    for (std::size_t i = 0; i < n; ++i) small &= levels[i] > -8192 && levels[i] < 8192;
    if (small) {
        for (std::size_t i = 0; i < n; ++i) {
            const std::int32_t u = draws[i], twice = folded(levels[i], u) * 131072 - 2 * u + 65535;
            const float v = static_cast<float>(twice) * 0x1p-17f * step;
            out[i] = v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v;
        }
    } else {
        for (std::size_t i = 0; i < n; ++i) {
            const std::int64_t u = draws[i], a = levels[i], twice = (u >= 32768 ? a : -a) * 131072 - 2 * u + 65535;
            const float v = static_cast<float>(twice) * 0x1p-17f * step;
            out[i] = v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v;
        }
    }
}

std::int64_t first_plain(const float* book, std::size_t words, const float* unit, std::size_t d, float least, std::size_t start) {
    constexpr std::size_t lanes = 64;
    std::size_t w = start;
    for (; w + lanes <= words; w += lanes) {
        float sums[lanes] = {};
        for (std::size_t j = 0; j < d; ++j) {
            const float u = unit[j];
            const float* column = book + j * words + w;
            for (std::size_t k = 0; k < lanes; ++k) sums[k] += u * column[k];
        }
        bool any = false;
        for (std::size_t k = 0; k < lanes; ++k) any |= sums[k] >= least;
        if (any)
            for (std::size_t k = 0; k < lanes; ++k)
                if (sums[k] >= least) return static_cast<std::int64_t>(w + k);
    }
    for (; w < words; ++w) {
        float sum = 0;
        for (std::size_t j = 0; j < d; ++j) sum += unit[j] * book[j * words + w];
        if (sum >= least) return static_cast<std::int64_t>(w);
    }
    return -1;
}

}  // namespace
}  // namespace tersegrad::drawn::detail
