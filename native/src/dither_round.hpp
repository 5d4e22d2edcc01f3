// Rounding for Sparse Dithering: a block of at most 2^16 coordinates (or a short vector) to levels, its scale and its error.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dither_loops.hpp"

namespace tersegrad::dither {

const detail::Implementation& ops();  // of the instruction set in use

// Adds the second half to the first until one is left, as if padded with zeros to a power of two.
double fold(double* a, std::size_t count);
// The same of N, a power of two that the compiler knows.
template <std::size_t N>
double fold(double* a) {
    for (std::size_t half = N / 2; half; half /= 2)
        for (std::size_t i = 0; i < half; ++i) a[i] += a[half + i];
    return a[0];
}

float usable_step(double step);  // toward zero, inside the normal range
float step_for(double nu, std::size_t n, double norm);

// The level of one coordinate in full.
std::int32_t level(float x, float inverse, const Stream* draws, std::uint64_t index);

void add(const float* x, const float* y, std::size_t n, float* sum);

// Walks through memory that will be needed soon.
struct Ahead {
    const char* at;
    const char* next(std::size_t coordinates, std::size_t lines) {
        const char* here = at;
        at += coordinates * lines;
        return here;
    }
};

struct Block {
    float inverse = 0, scale = 0;
    double norm = 0, error = 0;
    double dot = 0, energy = 0;  // <x, k> and ||k||^2, without draws
    std::uint32_t top = 0;
    void fit();  // the least-squares scale, and the error that it leaves
};

// Levels of x in k, with the bias; those beyond +-127 are saturated. `start`: the first coordinate's index in the vector.
Block round_block(const float* x, std::size_t n, std::uint64_t start, const Options& o, Ahead& ahead, std::uint8_t* k);

}  // namespace tersegrad::dither
