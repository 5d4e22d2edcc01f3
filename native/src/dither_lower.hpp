// Rate-distortion-optimised levels of Sparse Dithering: which of them are lowered.
#pragma once
#include "dither_round.hpp"

namespace tersegrad::dither {

// 16 log2(a / b), nearly and in whole numbers, for b <= a < 2^32.
int log2_sixteenths(std::uint64_t a, std::uint64_t b);

// For each class of `mask`, in order, the counts of its 2 * window + 1 symbols.
detail::Least thresholds(const std::uint64_t* counts, int window, unsigned mask);

// Lowers levels that were rounded to nearest, and takes them off the block's sums. `contexts`: classes of the levels, or none.
void lower_block(const float* x, std::size_t n, const std::uint8_t* contexts, const detail::Least&, int center, std::uint8_t* k, Block&);

// The same of the levels of a vector with one scale.
void lower_alone(const float* x, std::size_t n, float inverse, std::int32_t* k);

}  // namespace tersegrad::dither
