// A sign and a power of two in four bits, with a float32 scale per block (spec/wire.md, "e3m0").
#pragma once
#include <cstddef>
#include <cstdint>

namespace tersegrad::powers {

// `scales`: four bytes per block of `block` coordinates, a multiple of 8; `codes`: two per byte, the last one padded with zeros.
void encode(const float* x, std::size_t n, std::size_t block, std::uint8_t* scales, std::uint8_t* codes);

// out = what the codes stand for, or out += weight times that; all NaN if a scale is not finite.
void decode(const std::uint8_t* scales, const std::uint8_t* codes, std::size_t n, std::size_t block, float* out);
void decode_add(const std::uint8_t* scales, const std::uint8_t* codes, std::size_t n, std::size_t block, float weight, float* out);

// ---- what the instruction sets provide ----------------------------------------------------------------------------------------

struct Loops {
    // The largest magnitude of some coordinates, as its bits.
    std::uint32_t (*largest)(const float* x, std::size_t n);
    // Codes of 2 n coordinates, given the reciprocal of their scale; and back.
    void (*encode)(const float* x, std::size_t pairs, float inverse, std::uint8_t* codes);
    void (*decode)(const std::uint8_t* codes, std::size_t pairs, float scale, float* out);
    void (*decode_add)(const std::uint8_t* codes, std::size_t pairs, float scale, float weight, float* out);
};
extern const Loops loops_portable, loops_avx2, loops_avx512;

}  // namespace tersegrad::powers
