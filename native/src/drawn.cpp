#include "tersegrad/drawn.hpp"

#include <algorithm>
#include <atomic>

#include "drawn_loops.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::drawn {
namespace detail {
const Implementation portable = {largest_plain, quantise_plain, bins_plain, octaves_plain, restore_plain, first_plain};
}
namespace {

constexpr std::size_t grain = std::size_t{1} << 17;

const detail::Implementation& ops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return detail::avx512;
    if (isa() == Isa::avx2) return detail::avx2;
#endif
    return detail::portable;
}

// Calls body(offset, length, draws) for every chunk, on several threads.
template <class Body>
void with_draws(const Stream& stream, std::uint64_t start, std::size_t n, Body&& body) {
    parallel_for(n, detail::chunk, grain, [&](std::size_t first, std::size_t last) {
        std::uint16_t draws[detail::chunk + 64];
        for (std::size_t i = first; i < last; i += detail::chunk) {
            const std::size_t length = std::min(detail::chunk, last - i);
            random_u16(stream, start + i, length, draws);
            body(i, length, draws);
        }
    });
}

}  // namespace

std::int64_t quantise(const float* x, std::size_t n, float step, const Stream& stream, std::uint64_t start, std::int32_t* levels) {
    const float inverse = 1.0f / step;
    std::atomic<std::int64_t> top{0};
    std::atomic<bool> good{true};
    with_draws(stream, start, n, [&](std::size_t i, std::size_t length, const std::uint16_t* draws) {
        if (!good || !(ops().largest(x + i, length, inverse) < level_limit)) {
            good = false;
            return;
        }
        const std::int64_t here = ops().quantise(x + i, length, inverse, draws, levels + i);
        std::int64_t seen = top;
        while (seen < here && !top.compare_exchange_weak(seen, here)) {
        }
    });
    return good ? top.load() : -1;
}

void bins(const Stream& stream, std::uint64_t start, std::size_t n, std::uint8_t* out) {
    with_draws(stream, start, n, [&](std::size_t i, std::size_t length, const std::uint16_t* draws) { ops().bins(draws, length, out + i); });
}

void octaves(const Stream& stream, std::uint64_t start, std::size_t n, std::uint8_t* out) {
    with_draws(stream, start, n, [&](std::size_t i, std::size_t length, const std::uint16_t* draws) { ops().octaves(draws, length, out + i); });
}

void restore(const std::int32_t* levels, std::size_t n, float step, const Stream& stream, std::uint64_t start, float* out) {
    with_draws(stream, start, n, [&](std::size_t i, std::size_t length, const std::uint16_t* draws) {
        ops().restore(levels + i, length, step, draws, out + i);
    });
}

void restore_add(const std::int32_t* levels, std::size_t n, float step, const Stream& stream, std::uint64_t start, float weight, float* out) {
    with_draws(stream, start, n, [&](std::size_t i, std::size_t length, const std::uint16_t* draws) {
        float values[detail::chunk];
        ops().restore(levels + i, length, step, draws, values);
        for (std::size_t j = 0; j < length; ++j) out[i + j] += weight * values[j];
    });
}

void random_rows(const Stream& stream, const std::int64_t* rows, std::size_t count, std::size_t width, std::int32_t* out) {
    const std::uint64_t blocks = width / 8 + (width % 8 != 0);
    parallel_for(count, 1, std::max<std::size_t>(1, grain / std::max<std::size_t>(width, 1)), [&](std::size_t first, std::size_t last) {
        for (std::size_t r = first; r < last; ++r)
            for (std::size_t b = 0; b < blocks; ++b) {
                const PhiloxWords words = philox_block(stream, static_cast<std::uint64_t>(rows[r]) * blocks + b);
                for (std::size_t j = 8 * b; j < std::min<std::size_t>(width, 8 * b + 8); ++j)
                    out[r * width + j] = static_cast<std::int32_t>(words.w[j % 8 / 2] >> (16 * (j % 2)) & 0xffff);
            }
    });
}

void sphere_first(const float* book, std::size_t words, const float* units, std::size_t n, std::size_t d, const float* least,
                  const std::int64_t* start, std::int64_t* first) {
    const std::size_t work = std::max<std::size_t>(1, words * d);
    parallel_for(n, 1, 1 + (std::size_t{1} << 20) / work, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            const auto from = static_cast<std::size_t>(std::max<std::int64_t>(start[i], 0));
            first[i] = ops().first(book, words, units + i * d, d, least[i], from);
        }
    });
}

}  // namespace tersegrad::drawn
