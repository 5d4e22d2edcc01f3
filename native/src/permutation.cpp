// Coordinates in the order of a keyed permutation.
#include <algorithm>
#include <bit>

#include "around_caches.hpp"
#include "select_scratch.hpp"
#include "tersegrad/select.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::select {
namespace {

// A block's worth of indices that the network maps, with those that landed at or above n sent round again.
template <class Each>
void walk(const Permutation& p, std::size_t begin, std::size_t end, Each&& each) {
    const Table& t = table();
    const int bits = p.n > 1 ? 64 - std::countl_zero(p.n - 1) : 0, left_bits = bits / 2, right_bits = bits - left_bits;
    const std::uint64_t right_mask = (std::uint64_t{1} << right_bits) - 1;
    constexpr std::size_t width = 512;
    std::uint32_t left[width], right[width];
    std::uint16_t slot[width];
    std::uint64_t image[width];
    for (std::size_t at = begin; at < end; at += width) {
        const std::size_t here = std::min(width, end - at);
        for (std::size_t i = 0; i < here; ++i) {
            left[i] = static_cast<std::uint32_t>((at + i) >> right_bits);
            right[i] = static_cast<std::uint32_t>((at + i) & right_mask);
            slot[i] = static_cast<std::uint16_t>(i);
        }
        for (std::size_t open = here; open;) {
            t.feistel(p.keys, left_bits, right_bits, left, right, open);
            std::size_t again = 0;
            for (std::size_t i = 0; i < open; ++i) {
                const std::uint64_t v = std::uint64_t{left[i]} << right_bits | right[i];
                image[slot[i]] = v;
                left[again] = left[i], right[again] = right[i], slot[again] = slot[i];
                again += v >= p.n;
            }
            open = again;
        }
        for (std::size_t i = 0; i < here; ++i) {
            image[i] += p.rotation;
            image[i] -= image[i] >= p.n ? p.n : 0;
        }
        each(at, here, image);
    }
}

}  // namespace

template <class I>
void permuted_indices(const Permutation& p, std::size_t k, I* indices) {
    parallel_for(k, 512, grain / 16, [&](std::size_t b, std::size_t e) {
        walk(p, b, e, [&](std::size_t at, std::size_t here, const std::uint64_t* image) {
            for (std::size_t i = 0; i < here; ++i) indices[at + i] = static_cast<I>(image[i]);
        });
    });
}

void permuted_gather(const Permutation& p, const float* x, std::size_t k, float* values) {
    parallel_for(k, 512, grain / 16, [&](std::size_t b, std::size_t e) {
        walk(p, b, e, [&](std::size_t at, std::size_t here, const std::uint64_t* image) {
            for (std::size_t i = 0; i < here; ++i) __builtin_prefetch(x + image[i]);
            for (std::size_t i = 0; i < here; ++i) values[at + i] = x[image[i]];
        });
    });
}

void permuted_scatter(const Permutation& p, const float* values, std::size_t k, float* out) {
    const bool around = p.n * 4 > cache_bytes;
    parallel_for(p.n, block, grain, [&](std::size_t b, std::size_t e) {
        std::size_t i = b;
        if (around) {
            alignas(64) static const float zeros[window] = {};
            const std::size_t head = std::min(e, i + to_line(out + i));
            std::memset(out + i, 0, (head - i) * 4);
            for (i = head; i + window <= e; i += window) stream(out + i, zeros);
            stream_done();
        }
        std::memset(out + i, 0, (e - i) * 4);
    });
    parallel_for(k, 512, grain / 16, [&](std::size_t b, std::size_t e) {
        walk(p, b, e, [&](std::size_t at, std::size_t here, const std::uint64_t* image) {
            for (std::size_t i = 0; i < here; ++i) __builtin_prefetch(out + image[i], 1);
            for (std::size_t i = 0; i < here; ++i) out[image[i]] = values[at + i];
        });
    });
}

void permuted_scatter_add(const Permutation& p, const float* values, std::size_t k, float weight, float* out) {
    parallel_for(k, 512, grain / 16, [&](std::size_t b, std::size_t e) {
        walk(p, b, e, [&](std::size_t at, std::size_t here, const std::uint64_t* image) {
            for (std::size_t i = 0; i < here; ++i) __builtin_prefetch(out + image[i], 1);
            for (std::size_t i = 0; i < here; ++i) {
                const float product = weight * values[at + i];
                out[image[i]] += product;
            }
        });
    });
}

template void permuted_indices<std::int32_t>(const Permutation&, std::size_t, std::int32_t*);
template void permuted_indices<std::int64_t>(const Permutation&, std::size_t, std::int64_t*);

}  // namespace tersegrad::select
