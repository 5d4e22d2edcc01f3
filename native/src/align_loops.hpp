// The loops of every instruction set, plain enough for compilers to vectorise. Included by align.cpp, align_avx2.cpp and
// align_avx512.cpp, which are built with different flags: everything here is local to the including file.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace tersegrad::align::detail {

// What each instruction set provides. A minus sign is a mask of -1, a plus sign one of 0: (q ^ mask) - mask is the product.
struct Implementation {
    // q = 1 where x > least, -1 where x < -least, else 0; how many are not 0.
    std::int64_t (*quantise)(const float* x, std::size_t n, float least, std::int8_t* q);
    // The sum of the products of q and masks.
    std::int64_t (*dot)(const std::int8_t* q, const std::int8_t* masks, std::size_t n);
    // sums += the products of q and one mask.
    void (*add)(const std::int8_t* q, std::size_t n, std::int8_t mask, std::int8_t* sums);
};
extern const Implementation portable;
#if defined(__x86_64__)
extern const Implementation avx2, avx512;
#endif

namespace {

// Sums of so many of -1, 0 and 1 fit into a byte.
constexpr std::size_t kNarrow = 64, kLanes = 64;

std::int64_t dot_plain(const std::int8_t* q, const std::int8_t* masks, std::size_t n) {
    std::int64_t total = 0;
    for (std::size_t i = 0; i < n;) {
        const std::size_t end = std::min(n, i + kLanes * kNarrow);
        std::int8_t lanes[kLanes] = {};
        for (; i + kLanes <= end; i += kLanes)
            for (std::size_t l = 0; l < kLanes; ++l) lanes[l] = static_cast<std::int8_t>(lanes[l] + (q[i + l] ^ masks[i + l]) - masks[i + l]);
        std::int32_t sum = 0;
        for (std::size_t l = 0; l < kLanes; ++l) sum += lanes[l];
        for (; i < end; ++i) sum += (q[i] ^ masks[i]) - masks[i];
        total += sum;
    }
    return total;
}

std::int64_t quantise_plain(const float* x, std::size_t n, float least, std::int8_t* q) {
    std::int64_t total = 0;
    for (std::size_t i = 0; i < n;) {
        const std::size_t end = std::min(n, i + 4096);
        for (std::size_t j = i; j < end; ++j) {
            const int positive = x[j] > least, negative = x[j] < -least;
            q[j] = static_cast<std::int8_t>(positive - negative);
        }
        std::int32_t sum = 0;
        for (std::size_t j = i; j < end; ++j) sum += q[j] & 1;
        total += sum;
        i = end;
    }
    return total;
}

void add_plain(const std::int8_t* q, std::size_t n, std::int8_t mask, std::int8_t* sums) {
    for (std::size_t i = 0; i < n; ++i) sums[i] = static_cast<std::int8_t>(sums[i] + (q[i] ^ mask) - mask);
}

}  // namespace
}  // namespace tersegrad::align::detail
