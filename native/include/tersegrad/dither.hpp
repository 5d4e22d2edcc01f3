// Sparse Dithering, fused: scale, round, entropy-code one segment at a time while it is in the cache; and back.
//
// A vector is cut where rANS cuts it: segments of 2^18 coordinates, the last from half to one and a half of that. Each segment
// is self-contained (spec, "Level segments"), so that segments can be coded in parallel and in one pass over memory.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tersegrad/philox.hpp"

namespace tersegrad::dither {

// What rounding one segment to multiples of a step tells.
struct Moments {
    double dot = 0;        // <x, k>
    double energy = 0;     // ||k||^2, an exact integer
    double norm = 0;       // ||x||^2
    std::uint32_t top = 0; // largest |k|
    std::size_t above15 = 0, above31 = 0;  // how many |k| exceed 15 and 31
};

// k = rint(x * inverse), or with draws: |k| = floor(|x| * inverse + draw / 2^16). k is saturated to int8; Moments are not.
// Sums run as in rounding.hpp: chunks of 4096 coordinates, 32 float64 lanes, folded.
void quantise(const float* x, std::size_t n, float inverse, const Stream* draws, std::uint64_t start, std::int8_t* k, Moments&);
// The full value of one level that int8 could not hold.
std::int32_t level(float x, float inverse, const Stream* draws, std::uint64_t index);

struct Options {
    double nu = 0;          // > 0: each segment's step is 2 sqrt(nu / n) ||x||; else `step` serves all segments
    float step = 0;
    bool gain = true;       // send the least-squares scale instead of the step
    const Stream* draws = nullptr;  // stochastic rounding
};

struct Outcome {
    std::size_t bytes = 0;  // 0: the vector is not finite, nothing was written
    double norm = 0;        // ||x||^2
    double error = 0;       // ||x - decoded||^2, exact up to float64 rounding, if `gain`
};

std::size_t max_bytes(std::size_t n);
Outcome encode(const float* x, std::size_t n, const Options&, std::uint8_t* out);
// out = decoded, or out += weight * decoded. False: malformed bytes.
bool decode(const std::uint8_t* data, std::size_t size, std::size_t n, float* out);
bool decode_add(const std::uint8_t* data, std::size_t size, std::size_t n, float weight, float* out);

// Moments of a strided sample at a given step, for the search of a target: whole blocks of 4096, one in `stride`.
Moments sample(const float* x, std::size_t n, float inverse, std::size_t stride);

namespace detail {
using Quantise = void (*)(const float*, std::size_t, float, const std::uint16_t*, std::int8_t*, double*, Moments&);
using Scale = void (*)(const std::uint8_t*, std::size_t, int, float, float*);
using ScaleAdd = void (*)(const std::uint8_t*, std::size_t, int, float, float, float*);
struct Implementation {
    void (*norm)(const float*, std::size_t, double* lanes);  // at most 4096 coordinates; 32 lanes, added to
    Quantise quantise;  // at most 4096 coordinates; lanes: 3 * 32 doubles (dot, energy, norm), added to
    void (*shift)(std::int8_t*, std::size_t, int);  // k -> clamp(k, -K, K) + K
    Scale scale;        // out = (symbol - K) * step
    ScaleAdd scale_add;
};
extern const Implementation portable;
#if defined(__x86_64__)
extern const Implementation avx2, avx512;
#endif
}  // namespace detail
}  // namespace tersegrad::dither
