#include "tersegrad/variance.hpp"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "tersegrad/runtime.hpp"
#include "variance_loops.hpp"

namespace tersegrad::variance {
namespace {

Tile chosen_tile() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return tile_avx512;
    if (isa() == Isa::avx2) return tile_avx2;
#endif
    return tile_portable;
}

bool any(const float* f, std::size_t n) {
    std::uint32_t bits = 0;
    for (std::size_t i = 0; i < n; ++i) bits |= key(f[i]);
    return bits != 0;
}

}  // namespace

std::uint32_t tile_portable(const Job& job, std::size_t begin, std::size_t n, float* sent) { return tile_either(job, begin, n, sent); }

template <class I>
Outcome update(const Job& job, I* indices, float* values, std::size_t room) {
    const Tile path = chosen_tile();
    std::atomic<bool> finite{true};
    std::mutex gate;
    std::map<std::size_t, std::vector<std::pair<I, float>>> found;  // by where each thread's part begins
    parallel_for(job.n, tile, std::size_t{1} << 16, [&](std::size_t begin, std::size_t end) {
        alignas(64) float sent[tile];
        std::vector<std::pair<I, float>> mine;
        std::uint32_t top = 0;
        for (std::size_t at = begin; at < end; at += tile) {
            const std::size_t n = std::min(tile, end - at);
            top = std::max(top, path(job, at, n, sent));
            for (std::size_t i = 0; i < n; i += 16) {
                const std::size_t m = std::min<std::size_t>(16, n - i);
                if (!any(sent + i, m)) continue;
                for (std::size_t k = i; k < i + m; ++k)
                    if (key(sent[k])) mine.emplace_back(static_cast<I>(at + k), sent[k]);
            }
        }
        if (top >= 0x7f800000u) finite = false;
        const std::lock_guard<std::mutex> lock(gate);
        found.emplace(begin, std::move(mine));
    });
    std::size_t count = 0;
    for (const auto& [begin, part] : found)
        for (const auto& [index, value] : part) {
            if (count < room) {
                indices[count] = index;
                values[count] = value;
            }
            ++count;
        }
    return {count, finite.load()};
}

template Outcome update<std::int32_t>(const Job&, std::int32_t*, float*, std::size_t);
template Outcome update<std::int64_t>(const Job&, std::int64_t*, float*, std::size_t);

}  // namespace tersegrad::variance
