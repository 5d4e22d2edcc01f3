// A sample of a vector, spread over all of it, and the largest keys in it.
#pragma once
#include "select_scratch.hpp"

namespace tersegrad::select {

// Sampled runs of 16 coordinates: run j of `runs` lies in the j-th of `runs` equal strata of the n / 16 runs, at a place that
// a multiplicative hash of j chooses, so that no period of the data can meet all of them. Below 16 coordinates: all.
std::size_t sample_size(std::size_t n);

// Writes the share of one of `threads` threads of the sample.
void sample(const float* x, std::size_t n, std::size_t thread, std::size_t threads, float* out);

// The `rank` largest keys of a sample, of which the last is the smallest; fewer if the sample has fewer.
std::vector<std::uint32_t> largest(const float* sample, std::size_t size, std::size_t rank);

}  // namespace tersegrad::select
