// Variance-based compression: one pass over r, v, x and s that writes the next r and v and collects what is sent.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tersegrad::variance {

struct Job {
    const float *r, *v, *x, *s;
    float *next_r, *next_v;
    std::size_t n;
    float alpha, zeta, tau;  // tau > 0: the hybrid, which sends +-tau where |r| > tau
};

struct Outcome {
    std::size_t count;  // of what is sent; beyond `room` it was counted only
    bool finite;        // the next r and v, and what is sent
};

// With R = r + x, V = v + s a coordinate is sent where R^2 > alpha V. Indices and values of the first `room` in ascending order.
template <class I>
Outcome update(const Job& job, I* indices, float* values, std::size_t room);

}  // namespace tersegrad::variance
