// Trellis-coded quantisation: of all admissible sequences of integers the one nearest to x / step, entropy-coded; and back. Wire format:
// spec, "trellis" and "dithered_trellis".
//
// In state s a coordinate may take the integers n with n = s mod 2. With z0 = n mod 2 and z1 = n div 2 mod 2 the next state is
// (s >> 1) ^ g1 z1 ^ g0 z0. Coordinate i of a run of 2^15 (or 2^14) belongs to lane i mod 64; every lane is a trellis of its own and starts
// in state 0. Metrics count in squares of 1/32 of a step, so they are integers, and all instruction sets agree.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tersegrad/classes.hpp"
#include "tersegrad/philox.hpp"

namespace tersegrad::trellis {

struct Code {
    int states, g0, g1;  // g1 is a power of two
};
inline constexpr Code kCodes[] = {{4, 2, 1}, {8, 5, 2}, {16, 9, 2}, {32, 18, 4}};
inline int code_of(int states) { return states == 4 ? 0 : states == 8 ? 1 : states == 16 ? 2 : states == 32 ? 3 : -1; }

// What both ends draw: the dither of every coordinate, and a sign for every 2^14 of them.
struct Dither {
    Stream draws, signs;
};

struct Options {
    float step = 1;
    int states = 8;
    int chunk = 16;                 // log2 of the length of rANS chunks, or kAutoChunk
    const Dither* dither = nullptr;
    classes::Rows rows = {};        // where they allow scale classes
    bool rdo = false;               // without dither: not the nearest sequence, but one that takes fewer bits for its error
};
inline constexpr int kAutoChunk = 0;  // 16, or 18 where classes leave less than half a bit per coordinate

struct Outcome {
    std::size_t bytes = 0;
    double norm = 0;   // ||x||^2; not finite where x is not
    double error = 0;  // ||x - decoded||^2; 0 with dither
};

// Whole messages. `out` holds max_bytes(n).
std::size_t max_bytes(std::size_t n);
Outcome encode(const float* x, std::size_t n, const Options& o, std::uint8_t* out);
// As encode without dither and with long chunks, but nothing is written.
Outcome measure(const float* x, std::size_t n, float step, int states, const classes::Rows& rows);
// What a decoder has to know. Without rows the vector is one row.
struct Source {
    int states = 8;
    const Dither* dither = nullptr;
    classes::Rows rows = {};
};
// False: not a message for n coordinates; then decode_add has not touched `out`.
bool decode(const std::uint8_t* data, std::size_t size, std::size_t n, const Source& source, float* out);
// `values`: n of them to work in, or made here.
bool decode_add(const std::uint8_t* data, std::size_t size, std::size_t n, const Source& source, float weight, float* values, float* out);

}  // namespace tersegrad::trellis
