// The loops of cosine.cpp, compiled once for each instruction set. Plain C++: compilers make vectors of it.
#pragma once
#include <algorithm>

#include "tersegrad/cosine.hpp"

namespace tersegrad::cosine {
namespace {

inline void add(double* __restrict to, const double* __restrict from, double factor, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

inline void rounded(double* values, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<double>(static_cast<float>(values[i]));
}

// One tile; scratch has room for two of them and a square of the width. Terms that are zero change no sum and are left out.
inline void tile_of(const Job& job, const chunks::Region& r, std::size_t offset, double* scratch) {
    const std::size_t h = r.height, w = r.width;
    double *const tile = scratch, *const half = scratch + h * w, *const sum = half + h * w;
    std::fill(half, half + h * w, 0.0);
    for (std::size_t row = 0; row < h; ++row) {
        const float* const from = job.x + offset + row * r.cols;
        bool any = false;
        for (std::size_t c = 0; c < w; ++c) {
            tile[row * w + c] = static_cast<double>(from[c]);
            any |= from[c] != 0.0f;
        }
        if (any)
            for (std::size_t i = 0; i < h; ++i) {
                const double factor = job.forward ? job.down[i * h + row] : job.down[row * h + i];
                add(half + i * w, tile + row * w, factor, w);
            }
    }
    rounded(half, h * w);
    for (std::size_t row = 0; row < h; ++row) {
        std::fill(sum, sum + w, 0.0);
        for (std::size_t j = 0; j < w; ++j)
            if (half[row * w + j] != 0.0) add(sum, job.along + j * w, half[row * w + j], w);
        float* const to = job.out + offset + row * r.cols;
        for (std::size_t c = 0; c < w; ++c) to[c] = static_cast<float>(sum[c]);
    }
}

}  // namespace
}  // namespace tersegrad::cosine
