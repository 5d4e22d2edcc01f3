// Norms, and vectors cut into blocks that share a step: stochastic or nearest rounding, packing, and back.
//
// A block of at most `block` coordinates becomes one float step and signed integers |k| <= levels, so that x is about k * step.
//   l2, max : step = fl32(scale / levels * (1 + 2^-22)) with scale = the block's L2 norm or largest magnitude, then
//             Y = rint(fl32(fl32(x * fl32(1 / step)) * 65536)), clamped to +-65536 * levels, and k = (Y + draw) >> 16 (floor),
//             draw = the coordinate's 16 bits of Philox.
//   nearest : step = fl32(max / levels), rounded further to bfloat16 on request, k = rint(fl32(x * fl32(1 / step))), clamped.
// Steps are raised to 2^-126 and lowered to the largest float32 c with levels * c finite. A zero block has step 0, a block with
// NaN or Inf has step NaN; both have k = 0. Codes are k in two's complement, `width` bits each, in one stream, lowest bit first.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tersegrad/philox.hpp"

namespace tersegrad {

enum class Rule : int { l2 = 0, max = 1, nearest = 2 };
enum class StepFormat : int { float32 = 0, bfloat16 = 1 };

struct Quantiser {
    std::size_t block = 512;  // a multiple of 8
    int levels = 7;           // 1 .. 2^(width-1) - 1
    int width = 4;            // 2 .. 8 bits
    Rule rule = Rule::l2;
    StepFormat format = StepFormat::float32;
};

inline std::size_t block_count(std::size_t n, std::size_t block) { return n / block + (n % block != 0); }
inline std::size_t step_bytes(StepFormat f) { return f == StepFormat::float32 ? 4 : 2; }
inline std::size_t code_bytes(std::size_t n, int width) {
    const std::size_t w = static_cast<std::size_t>(width);
    return n / 8 * w + (n % 8 * w + 7) / 8;
}

// Writes block_count * step_bytes bytes of steps and code_bytes bytes of codes.
void quantise(const float* x, std::size_t n, const Quantiser& q, const Stream& stream, std::uint8_t* steps, std::uint8_t* codes);

// out = k * step, or out += weight * (k * step), every operation rounded to float32. One step that is not finite makes all of
// `out` NaN. `levels` and `rule` of the quantiser are not needed.
void dequantise(const std::uint8_t* steps, const std::uint8_t* codes, std::size_t n, const Quantiser& q, float* out);
void dequantise_add(const std::uint8_t* steps, const std::uint8_t* codes, std::size_t n, const Quantiser& q, float weight,
                    float* out);

// Sums of a block: chunks of 4096 coordinates; in a chunk 32 float64 lanes, coordinate i adding to lane i % 32 in order; lanes,
// then chunk sums (padded with zeros to a power of two), are folded by adding the second half to the first until one is left.
// abs_max is the largest magnitude by bit pattern: NaN beats Inf beats finite.
double sum_squares(const float* x, std::size_t n);
double sum_abs(const float* x, std::size_t n);
float abs_max(const float* x, std::size_t n);
void block_sum_squares(const float* x, std::size_t n, std::size_t block, double* out);
void block_sum_abs(const float* x, std::size_t n, std::size_t block, double* out);
void block_abs_max(const float* x, std::size_t n, std::size_t block, float* out);

}  // namespace tersegrad
