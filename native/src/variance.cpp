#include "tersegrad/variance.hpp"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"
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
Found<I> update(const Job& job) {
    const Tile path = chosen_tile();
    std::mutex gate;
    std::map<std::size_t, Found<I>> parts;  // by where each thread's part begins
    parallel_for(job.n, tile, std::size_t{1} << 16, [&](std::size_t begin, std::size_t end) {
        alignas(64) float sent[tile];
        Found<I> mine;
        std::uint32_t top = 0;
        for (std::size_t at = begin; at < end; at += tile) {
            const std::size_t n = std::min(tile, end - at);
            top = std::max(top, path(job, at, n, sent));
            for (std::size_t i = 0; i < n; i += 16) {
                const std::size_t m = std::min<std::size_t>(16, n - i);
                if (!any(sent + i, m)) continue;
                for (std::size_t k = i; k < i + m; ++k)
                    if (key(sent[k])) {
                        mine.indices.push_back(static_cast<I>(at + k));
                        mine.values.push_back(sent[k]);
                    }
            }
        }
        mine.finite = top < 0x7f800000u;
        const std::lock_guard<std::mutex> lock(gate);
        parts.emplace(begin, std::move(mine));
    });
    Found<I> all;
    for (auto& [begin, part] : parts) {
        all.finite &= part.finite;
        if (begin == 0) {
            all.indices = std::move(part.indices);
            all.values = std::move(part.values);
        } else {
            all.indices.insert(all.indices.end(), part.indices.begin(), part.indices.end());
            all.values.insert(all.values.end(), part.values.begin(), part.values.end());
        }
    }
    return all;
}

template Found<std::int32_t> update<std::int32_t>(const Job&);
template Found<std::int64_t> update<std::int64_t>(const Job&);

}  // namespace tersegrad::variance
