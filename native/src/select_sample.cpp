#include "select_sample.hpp"

#include <cmath>
#include <cstring>
#include <functional>

#include "tersegrad/select.hpp"

namespace tersegrad::select {

std::size_t sample_size(std::size_t n) {
    const std::uint64_t all = n / 16;
    return all == 0 ? n : 16 * std::min<std::uint64_t>(all, std::clamp<std::uint64_t>(all / 16, 64, 4096));
}

void sample(const float* x, std::size_t n, std::size_t thread, std::size_t threads, float* out) {
    const std::uint64_t all = n / 16, runs = sample_size(n) / 16;
    if (all == 0) {
        if (thread == 0) std::copy(x, x + n, out);
        return;
    }
    for (std::uint64_t j = runs * thread / threads; j < runs * (thread + 1) / threads; ++j) {
        const std::uint64_t first = j * all / runs, width = (j + 1) * all / runs - first;
        const std::uint64_t hash = (j * 0x9e3779b1u) & 0xffffffffu;
        std::memcpy(out + 16 * j, x + 16 * (first + (hash * width >> 32)), 64);
    }
}

std::vector<std::uint32_t> largest(const float* sample, std::size_t size, std::size_t rank) {
    if (rank == 0 || size == 0) return {};
    const auto leading = [](std::uint32_t* keys, std::size_t count, std::size_t wanted) {
        std::nth_element(keys, keys + wanted - 1, keys + count, std::greater<>());
        return keys[wanted - 1];
    };
    Scratch<std::uint32_t> keys;
    keys.reserve(size);
    std::uint32_t least = 0;
    if (size >= 4096 && rank < size / 4) {  // a part of the sample tells which keys need not be looked at
        const std::size_t part = size / 16;
        for (std::size_t i = 0; i < part; ++i) keys[i] = key(sample[16 * i]);
        const double expected = static_cast<double>(rank) / 16;
        least = leading(keys.get(), part, std::min(part, static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 4)));
    }
    const auto collect = [&] {
        std::size_t count = 0;
        for (std::size_t i = 0; i < size; ++i) {
            keys[count] = key(sample[i]);
            count += key(sample[i]) >= least;
        }
        return count;
    };
    std::size_t count = collect();
    if (count < rank && least > 0) least = 0, count = collect();
    rank = std::min(rank, count);
    leading(keys.get(), count, rank);
    return {keys.get(), keys.get() + rank};
}

std::uint32_t sample_key(const float* x, std::size_t n, std::size_t k) {
    if (n == 0 || k == 0) return infinite_key;
    const std::size_t size = sample_size(n);
    Scratch<float> sampled;
    sampled.reserve(size);
    sample(x, n, 0, 1, sampled.get());
    const auto rank = static_cast<std::size_t>((static_cast<unsigned __int128>(k) * size + n - 1) / n);
    const std::vector<std::uint32_t> keys = largest(sampled.get(), size, rank);
    return keys.size() == rank ? std::clamp<std::uint32_t>(keys.back(), 1, infinite_key) : 1;
}

}  // namespace tersegrad::select
