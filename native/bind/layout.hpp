// Where rows and columns of a vector are, as Python tells it.
#pragma once
#include "bind.hpp"
#include "tersegrad/classes.hpp"

namespace tersegrad::bind {

// The layout of a vector of n coordinates, or nothing.
inline classes::Rows rows_of(const Array<const std::int64_t>& layout, std::size_t n) {
    expect(layout.size() % 4 == 0, "a layout has four numbers for each piece");
    std::size_t total = 0;
    for (std::size_t k = 0; k < layout.size(); k += 4) {
        const std::int64_t numel = layout.data()[k], columns = layout.data()[k + 1], group = layout.data()[k + 2], phase = layout.data()[k + 3];
        const bool good = numel >= 0 && columns >= 1 && group >= 1 && columns % group == 0 && 0 <= phase && phase < columns &&
                          columns <= std::int64_t{1} << 62 && static_cast<std::size_t>(numel) <= n - total;
        expect(good, "the layout does not belong to this vector");
        total += static_cast<std::size_t>(numel);
    }
    expect(layout.size() == 0 || total == n, "the layout does not belong to this vector");
    return {layout.data(), layout.size() / 4};
}

}  // namespace tersegrad::bind
