// Signs of rows and columns (spec, "Aligned"): finding those with which most coordinates of a gradient agree, and applying them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tersegrad/classes.hpp"

namespace tersegrad::align {

// The description for coordinates of more than `least`; empty where none is worth its bits.
std::vector<std::uint8_t> find(const float* x, float least, const classes::Rows&);

// out = x with the signs of a description; `out` may be x. False, and nothing is written, where it is malformed.
bool flip(const float* x, std::size_t n, const std::uint8_t* data, std::size_t size, const classes::Rows&, float* out);

}  // namespace tersegrad::align
