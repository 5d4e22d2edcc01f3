// Values back to their places.
#include <algorithm>
#include <stdexcept>

#include "around_caches.hpp"
#include "select_scratch.hpp"
#include "tersegrad/select.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::select {

template <class I>
void scatter(const I* indices, const float* values, std::size_t count, float* out, std::size_t n) {
    if (!increasing(indices, count, n)) throw std::invalid_argument("indices must increase strictly and lie within the vector");
    const bool around = n * 4 > cache_bytes;
    parallel_for(n, block, grain, [&](std::size_t b, std::size_t e) {
        const I* at = std::lower_bound(indices, indices + count, static_cast<I>(b));
        const I* const end = indices + count;
        auto place = [&](float* target, std::size_t from, std::size_t to) {
            for (; at != end && static_cast<std::size_t>(*at) < to; ++at)
                target[static_cast<std::size_t>(*at) - from] = values[at - indices];
        };
        alignas(64) float buffer[window];
        std::size_t i = b;
        if (around) {
            const std::size_t head = std::min(e, i + to_line(out + i));
            std::memset(out + i, 0, (head - i) * 4);
            place(out + i, i, head);
            i = head;
            for (; i + window <= e; i += window) {
                std::memset(buffer, 0, sizeof buffer);
                place(buffer, i, i + window);
                stream(out + i, buffer);
            }
            stream_done();
        }
        for (; i < e; i += std::min(block, e - i)) {
            const std::size_t to = std::min(e, i + block);
            std::memset(out + i, 0, (to - i) * 4);
            place(out + i, i, to);
        }
    });
}

template <class I>
void scatter_add(const I* indices, const float* values, std::size_t count, float weight, float* out, std::size_t n) {
    if (!increasing(indices, count, n)) throw std::invalid_argument("indices must increase strictly and lie within the vector");
    constexpr std::size_t ahead = 32;
    parallel_for(count, 16, grain / 16, [&](std::size_t b, std::size_t e) {
        for (std::size_t j = b; j < e; ++j) {
            if (j + ahead < e) __builtin_prefetch(out + indices[j + ahead], 1);
            const float product = weight * values[j];
            out[indices[j]] += product;
        }
    });
}

#define INSTANTIATE(I)                                                                          \
    template void scatter<I>(const I*, const float*, std::size_t, float*, std::size_t);         \
    template void scatter_add<I>(const I*, const float*, std::size_t, float, float*, std::size_t);
INSTANTIATE(std::int32_t)
INSTANTIATE(std::int64_t)

}  // namespace tersegrad::select
