// Randomised Walsh-Hadamard rotation by blocks. The definition is kernels/reference/hadamard.py; same floats on every path.
//
// A vector of d coordinates is cut into blocks of `block` (a power of two); the rest r < block is padded with zeros to the next
// power of two. One block of n = 2^k: multiply by 2^(-k/2) (rounded to float32), apply signs, then k stages of
// (a, b) -> (a + b, a - b) over pairs at distance 1, 2, 4, ... n/2. Scaling first keeps every intermediate value below the block's
// Euclidean norm. The inverse runs the same stages and applies the signs last.
//
// Sign of coordinate i: bit i % 32 of word (i % 128) / 32 of the Philox block with counter (i >> 7, purpose << 24 | i >> 39,
// step, buffer << 16 | sender): one bit per coordinate, so one block serves 128.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tersegrad/philox.hpp"

namespace tersegrad {

constexpr std::size_t largest_hadamard_block = std::size_t{1} << 16;

// Coordinates after padding. Throws std::invalid_argument unless block is a power of two in [1, largest_hadamard_block].
std::size_t rotated_size(std::size_t d, std::size_t block);

// x[d] -> y[rotated_size(d, block)]; the same memory is allowed. Returns the largest bit pattern of |x|: >= 0x7f800000 when x
// holds a NaN or an infinity.
std::uint32_t rotate(const float* x, float* y, std::size_t d, std::size_t block, const Stream& signs);

// y[rotated_size(d, block)] -> x[d]; the same memory is allowed.
void unrotate(const float* y, float* x, std::size_t d, std::size_t block, const Stream& signs);

}  // namespace tersegrad
