// The loops of variance.cpp, compiled once for each instruction set. Plain C++: compilers make vectors of it.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "tersegrad/variance.hpp"

namespace tersegrad::variance {

constexpr std::size_t tile = 1024;

// Coordinates [begin, begin + n) of a job, n <= tile: what is sent (else 0) into `sent`; returns the largest bit pattern of a magnitude.
using Tile = std::uint32_t (*)(const Job&, std::size_t begin, std::size_t n, float* sent);

std::uint32_t tile_portable(const Job&, std::size_t, std::size_t, float*);
std::uint32_t tile_avx2(const Job&, std::size_t, std::size_t, float*);
std::uint32_t tile_avx512(const Job&, std::size_t, std::size_t, float*);

namespace {

inline std::uint32_t key(float f) { return std::bit_cast<std::uint32_t>(f) & 0x7fffffffu; }

template <bool hybrid>
std::uint32_t tile_of(const Job& job, std::size_t begin, std::size_t n, float* __restrict sent) {
    const float *__restrict r = job.r + begin, *__restrict v = job.v + begin;
    const float *__restrict x = job.x + begin, *__restrict s = job.s + begin;
    float *__restrict next_r = job.next_r + begin, *__restrict next_v = job.next_v + begin;
    const float alpha = job.alpha, zeta = job.zeta, tau = job.tau, twice = 2 * tau, square = tau * tau;
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const float total = r[i] + x[i], spread = v[i] + s[i], faded = spread * zeta;
        if constexpr (hybrid) {
            const float size = std::bit_cast<float>(key(total));
            const bool chosen = (size > tau) & (total * total > spread * alpha);
            const float step = chosen ? std::copysign(tau, total) : 0.0f;
            const float corrected = (spread - size * twice) + square;
            const float kept = chosen ? (corrected > 0.0f ? corrected : 0.0f) : faded;
            const float left = total - step;
            next_r[i] = left;
            next_v[i] = kept;
            sent[i] = step;
            top = std::max(top, std::max(key(left), key(kept)));
        } else {
            const bool chosen = total * total > spread * alpha;
            const float kept = chosen ? 0.0f : faded;
            next_r[i] = chosen ? 0.0f : total;
            next_v[i] = kept;
            sent[i] = chosen ? total : 0.0f;
            top = std::max(top, std::max(key(total), key(kept)));
        }
    }
    return top;
}

inline std::uint32_t tile_either(const Job& job, std::size_t begin, std::size_t n, float* sent) {
    return job.tau > 0 ? tile_of<true>(job, begin, n, sent) : tile_of<false>(job, begin, n, sent);
}

}  // namespace
}  // namespace tersegrad::variance
