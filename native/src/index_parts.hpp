// Index sets in parts, one for each thread.
#pragma once
#include "tersegrad/threads.hpp"
#include <cstddef>


namespace tersegrad::select {
namespace index {

constexpr std::size_t kGapGrain = std::size_t{1} << 15;  // indices that pay for a thread

// body(part, begin, end) for every thread's part of `count` indices.
template <class Body>
void each_part(std::size_t count, std::size_t parts, Body&& body) {
    parallel_for(parts, 1, 1, [&](std::size_t b, std::size_t e) {
        for (std::size_t p = b; p < e; ++p) body(p, count * p / parts, count * (p + 1) / parts);
    });
}

inline std::size_t parts_of(std::size_t count) { return static_cast<std::size_t>(plan_threads(count, kGapGrain)); }

}  // namespace index
}  // namespace tersegrad::select
