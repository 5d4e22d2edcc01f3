// What the files of the rotation share: the work order, and one entry per instruction set.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tersegrad/hadamard.hpp"

namespace tersegrad {

struct RotationJob {
    const float* from;
    float* to;
    std::size_t d, block;
    Stream signs;
    bool streamed;  // the output is larger than the caches
};

// fl32(2^(-k/2)) for n = 2^k; exact for even k.
static inline float hadamard_scale(std::size_t n) {
    const int k = std::countr_zero(n);
    float scale = k % 2 ? 0.70710678118654752440f : 1.0f;
    for (int i = 0; i < k / 2; ++i) scale *= 0.5f;
    return scale;
}

// Coordinates whose signs are drawn together: whole blocks, and whole Philox blocks.
static inline std::size_t rotation_span(std::size_t block) { return std::max<std::size_t>(block, 4096); }

// Coordinates [begin, end), begin a multiple of the span; the forward direction returns the largest bit pattern of |x|.
std::uint32_t rotate_blocks_portable(const RotationJob& job, bool forward, std::size_t begin, std::size_t end);
std::uint32_t rotate_blocks_avx2(const RotationJob& job, bool forward, std::size_t begin, std::size_t end);
std::uint32_t rotate_blocks_avx512(const RotationJob& job, bool forward, std::size_t begin, std::size_t end);

}  // namespace tersegrad
