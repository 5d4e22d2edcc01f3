// Instruction set and threads: chosen at run time, never visible in the bytes.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace tersegrad {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// The best instruction set of this machine; avx512 means F, BW, DQ, VL, VBMI and VBMI2 together.
Isa best_isa();
Isa isa();                  // in use
void set_isa(Isa);          // at most best_isa()
int threads();              // upper limit, by default the number of cores this process may use
void set_threads(int);

// How many threads are worth starting for `items` pieces of work, each thread getting at least `grain`.
inline int plan_threads(std::size_t items, std::size_t grain) {
    const std::size_t most = grain ? items / grain : items;
    return static_cast<int>(std::max<std::size_t>(1, std::min<std::size_t>(most, static_cast<std::size_t>(threads()))));
}

// Runs body(begin, end) over [0, items) in contiguous parts whose borders are multiples of `unit`.
// Threads live for one call: nothing idles, and fork() is safe. `grain` items are the least that pay for a thread.
template <class Body>
void parallel_for(std::size_t items, std::size_t unit, std::size_t grain, Body&& body) {
    const int n = plan_threads(items, grain);
    if (n <= 1) {
        if (items) body(std::size_t{0}, items);
        return;
    }
    const std::size_t units = (items + unit - 1) / unit;
    std::vector<std::thread> pool;
    pool.reserve(static_cast<std::size_t>(n) - 1);
    auto border = [&](int k) { return std::min(items, units * static_cast<std::size_t>(k) / static_cast<std::size_t>(n) * unit); };
    for (int k = 1; k < n; ++k)
        if (border(k) < border(k + 1)) pool.emplace_back([&body, b = border(k), e = border(k + 1)] { body(b, e); });
    if (border(1) > 0) body(std::size_t{0}, border(1));
    for (auto& t : pool) t.join();
}

}  // namespace tersegrad
