// Index sets as they are: their order, their complement, and as a bitmap.
#include "index_bits.hpp"

namespace tersegrad::select {
using namespace index;

template <class I>
bool increasing(const I* indices, std::size_t count, std::uint64_t n) {
    if (count == 0) return true;
    bool good = indices[0] >= 0 && static_cast<std::uint64_t>(indices[count - 1]) < n;
    unsigned bad = 0;
    for (std::size_t j = 1; j < count; ++j) bad |= indices[j] <= indices[j - 1];
    return good && !bad;
}

template <class I>
void complement(const I* indices, std::size_t count, std::uint64_t n, I* out) {
    expect_increasing(indices, count, n);
    std::uint64_t from = 0;
    for (std::size_t j = 0; j <= count; ++j) {
        const std::uint64_t to = j < count ? static_cast<std::uint64_t>(indices[j]) : n;
        for (; from < to; ++from) *out++ = static_cast<I>(from);
        from = to + 1;
    }
}

template <class I>
void bitmap_encode(const I* indices, std::size_t count, std::uint64_t n, std::uint8_t* out) {
    expect_increasing(indices, count, n);
    std::memset(out, 0, (n + 7) / 8);
    for (std::size_t j = 0; j < count; ++j) out[indices[j] >> 3] = static_cast<std::uint8_t>(out[indices[j] >> 3] | 1u << (indices[j] & 7));
}

template <class I>
void bitmap_decode(const std::uint8_t* data, std::size_t size, std::size_t count, std::uint64_t n, I* indices) {
    const std::size_t length = static_cast<std::size_t>((n + 7) / 8);
    if (size < length) ended();
    if (n % 8 && data[length - 1] >> (n % 8)) throw std::invalid_argument("the padding of the index set is not zero");
    std::size_t found = 0;
    for (std::size_t at = 0; at < length; at += 8) {
        std::uint64_t v = 0;
        std::memcpy(&v, data + at, std::min<std::size_t>(8, length - at));
        if (static_cast<std::size_t>(std::popcount(v)) > count - found) throw std::invalid_argument("the bitmap has too many ones");
        for (; v; v &= v - 1) indices[found++] = static_cast<I>(at * 8 + static_cast<std::size_t>(std::countr_zero(v)));
    }
    if (found != count) throw std::invalid_argument("the bitmap has too few ones");
}

#define INSTANTIATE(I) \
    template bool increasing<I>(const I*, std::size_t, std::uint64_t); \
    template void complement<I>(const I*, std::size_t, std::uint64_t, I*); \
    template void bitmap_encode<I>(const I*, std::size_t, std::uint64_t, std::uint8_t*); \
    template void bitmap_decode<I>(const std::uint8_t*, std::size_t, std::size_t, std::uint64_t, I*);
INSTANTIATE(std::int32_t)
INSTANTIATE(std::int64_t)

}  // namespace tersegrad::select
