// Vectors that scale classes are for.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tersegrad/classes.hpp"

// Three times of four x becomes a part of a matrix, whose rows and columns have scales of their own, and a vector; `layout` says which.
template <class Below>
tersegrad::classes::Rows scale_rows(std::vector<float>& x, std::int64_t (&layout)[8], Below&& below) {
    const std::size_t n = x.size(), part = below(n + 1), group = 1 + below(4), columns = group * (1 + below(60)), phase = below(columns);
    const std::size_t told[] = {part, columns, group, phase, n - part, n - part + 1, 1, 0};
    for (std::size_t k = 0; k < 8; ++k) layout[k] = static_cast<std::int64_t>(told[k]);
    const tersegrad::classes::Rows rows{layout, below(4) ? std::size_t{2} : 0};
    if (rows.pieces)
        for (std::size_t i = 0; i < part; ++i) {
            const std::size_t row = (phase + i) / columns, column = (phase + i) % columns / group;
            x[i] *= row % 5 == 3 ? 0.0f : std::ldexp(1.0f, static_cast<int>(row * 7 % 9) - static_cast<int>(column * 5 % 6));
        }
    return rows;
}
