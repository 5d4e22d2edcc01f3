// Variance-based compression: one pass over r, v, x and s that writes the next r and v and collects what is sent.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tersegrad::variance {

struct Job {
    const float *r, *v, *x, *s;
    float *next_r, *next_v;
    std::size_t n;
    float alpha, zeta, tau;  // tau > 0: the hybrid, which sends +-tau where |r| > tau
};

template <class I>
struct Found {
    std::vector<I> indices;  // of what is sent, in ascending order
    std::vector<float> values;
    bool finite = true;  // the next r and v, and what is sent
};

// With R = r + x, V = v + s a coordinate is sent where R^2 > alpha V.
template <class I>
Found<I> update(const Job& job);

}  // namespace tersegrad::variance
