// Fixed-rate baselines: bf16, fp16, fp8, sign, ternary, natural compression and natural dithering, each from floats to message
// bytes and back in as few passes over memory as its format allows. The layouts are those of the wire format. A stream of random
// bits gives coordinate i its own sixteen.
//
// Encoders write exactly the number of bytes that NAME_nbytes() tells. Decoders read exactly that many, accept any content, and
// either store (`add` false) or add `weight` times the value; they are safe for every byte sequence.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tersegrad/philox.hpp"

namespace tersegrad::casts {

// How a decoder leaves its values: out[i] = v, or out[i] += weight * v with one rounding for the product and one for the sum.
struct Sink {
    float* out;
    bool add = false;
    float weight = 1.0f;
};

void bf16_encode(const float* x, std::size_t n, std::uint8_t* out);
void bf16_decode(const std::uint8_t* data, std::size_t n, Sink sink);

// 4 bytes of scale, then 2 bytes per coordinate.
void fp16_encode(const float* x, std::size_t n, std::uint8_t* out);
void fp16_decode(const std::uint8_t* data, std::size_t n, Sink sink);

// One E8M0 byte for every `block` coordinates (a multiple of 16), then one e4m3 byte per coordinate.
void fp8_encode(const float* x, std::size_t n, std::size_t block, std::uint8_t* out);
void fp8_decode(const std::uint8_t* data, std::size_t n, std::size_t block, Sink sink);

// 4 bytes of scale for every `block` coordinates (a multiple of 64), then one bit per coordinate.
std::size_t sign_nbytes(std::size_t n, std::size_t block);
void sign_encode(const float* x, std::size_t n, std::size_t block, std::uint8_t* out);
void sign_decode(const std::uint8_t* data, std::size_t n, std::size_t block, Sink sink);
// Encodes y = x + carry, and leaves y minus what that decodes to; false where y is not finite. A block has at most 4096 coordinates.
bool sign_split(const float* x, const float* carry, std::size_t n, std::size_t block, std::uint8_t* out, float* left);

// Sign bits, then one exponent byte per coordinate.
void natural_encode(const float* x, std::size_t n, const Stream& stream, std::uint8_t* out);
void natural_decode(const std::uint8_t* data, std::size_t n, Sink sink);

// 4 bytes of scale for every `bucket` coordinates (a multiple of 64), then five trits per byte.
// Decoding is false where bytes are not canonical trits.
std::size_t ternary_nbytes(std::size_t n, std::size_t bucket);
void ternary_encode(const float* x, std::size_t n, std::size_t bucket, const Stream& stream, std::uint8_t* out);
bool ternary_decode(const std::uint8_t* data, std::size_t n, std::size_t bucket, Sink sink);

// 4 bytes of scale for every `bucket` coordinates (a multiple of 64), then `width` bits per coordinate: level << 1 | sign.
std::size_t natural_levels_nbytes(std::size_t n, std::size_t bucket, int width);
void natural_levels_encode(const float* x, std::size_t n, std::size_t bucket, int levels, int width, const Stream& stream,
                           std::uint8_t* out);
void natural_levels_decode(const std::uint8_t* data, std::size_t n, std::size_t bucket, int levels, int width, Sink sink);

}  // namespace tersegrad::casts
