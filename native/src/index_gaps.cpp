// Gaps of an index set as classes, to be entropy-coded, and the further bits of each.
#include <array>
#include <atomic>
#include <vector>

#include "index_bits.hpp"
#include "index_parts.hpp"

namespace tersegrad::select {
using namespace index;
namespace {

inline unsigned class_of(std::uint64_t gap) {
    const std::uint64_t g = gap + 1;
    const unsigned e = static_cast<unsigned>(std::bit_width(g)) - 1;
    return e ? 2 * e + static_cast<unsigned>(g >> (e - 1) & 1) - 1 : 0;
}
// Classes: 0 for g + 1 = 1; 2e - 1 and 2e for the lower and upper half of [2^e, 2^(e+1)). Further bits: e - 1.
inline unsigned rest_bits(unsigned c) { return c ? (c + 1) / 2 - 1 : 0; }

}  // namespace

template <class I>
void gap_classes(const I* indices, std::size_t count, std::uint8_t* classes) {
    expect_increasing(indices, count);
    std::int64_t before = -1;
    for (std::size_t j = 0; j < count; ++j) {
        classes[j] = static_cast<std::uint8_t>(class_of(static_cast<std::uint64_t>(indices[j] - before - 1)));
        before = indices[j];
    }
}

template <class I>
void gap_histogram(const I* indices, std::size_t count, std::uint64_t n, std::uint64_t* histogram) {
    using Counts = std::array<std::uint64_t, 128>;
    std::vector<Counts> sums(parts_of(count));
    std::atomic<bool> good{true};
    each_part(count, sums.size(), [&](std::size_t p, std::size_t begin, std::size_t end) {
        const std::size_t from = begin ? begin - 1 : 0;  // order is checked across the border too
        if (!increasing(indices + from, end - from, n)) {
            good = false;
            return;
        }
        std::uint64_t quarter[4][128] = {};  // four, because one counter cannot be raised again within five cycles
        std::int64_t before = begin ? static_cast<std::int64_t>(indices[begin - 1]) : -1;
        for (std::size_t j = begin; j < end; ++j) {
            ++quarter[j & 3][class_of(static_cast<std::uint64_t>(indices[j] - before - 1)) & 127];
            before = indices[j];
        }
        for (unsigned c = 0; c < 128; ++c) sums[p][c] = quarter[0][c] + quarter[1][c] + quarter[2][c] + quarter[3][c];
    });
    if (!good) throw std::invalid_argument("indices must increase strictly and lie within the vector");
    for (unsigned c = 0; c < 128; ++c) {
        histogram[c] = 0;
        for (const Counts& part : sums) histogram[c] += part[c];
    }
}

template <class I>
std::size_t gap_rests_encode(const I* indices, std::size_t count, std::uint8_t* out, std::size_t capacity) {
    expect_increasing(indices, count);
    BitWriter bits(out, capacity);
    std::int64_t before = -1;
    for (std::size_t j = 0; j < count; ++j) {
        const std::uint64_t g = static_cast<std::uint64_t>(indices[j] - before);
        before = indices[j];
        const unsigned n = rest_bits(class_of(g - 1));
        const std::uint64_t rest = g & ((std::uint64_t{1} << n) - 1);
        bits.put(rest & ((std::uint64_t{1} << 28) - 1), std::min(n, 28u));
        if (n > 28) bits.put(rest >> 28, n - 28);
    }
    return bits.finish();
}

template <class I>
std::size_t gap_rests_decode(const std::uint8_t* data, std::size_t size, const std::uint8_t* classes, std::size_t count,
                             std::uint64_t n, I* indices) {
    BitReader bits(data, size);
    std::uint64_t next = 0;
    for (std::size_t j = 0; j < count; ++j) {
        const unsigned c = classes[j], extra = rest_bits(c), e = (c + 1) / 2;
        if (e > 56) outside();
        const std::uint64_t head = c ? 2 + ((c + 1) & 1) : 1;  // the two highest bits of g + 1
        const std::uint64_t g = head << extra | (bits.peek() & ((std::uint64_t{1} << extra) - 1));
        bits.skip(extra);
        next += g - 1;
        if (next >= n) outside();
        indices[j] = static_cast<I>(next++);
    }
    if (bits.overrun()) ended();
    if (!bits.padded_with_zeros()) throw std::invalid_argument("the padding of the index set is not zero");
    return bits.bytes();
}

#define INSTANTIATE(I) \
    template void gap_classes<I>(const I*, std::size_t, std::uint8_t*); \
    template void gap_histogram<I>(const I*, std::size_t, std::uint64_t, std::uint64_t*); \
    template std::size_t gap_rests_encode<I>(const I*, std::size_t, std::uint8_t*, std::size_t); \
    template std::size_t gap_rests_decode<I>(const std::uint8_t*, std::size_t, const std::uint8_t*, std::size_t, std::uint64_t, I*);
INSTANTIATE(std::int32_t)
INSTANTIATE(std::int64_t)

}  // namespace tersegrad::select
