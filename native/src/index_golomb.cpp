// Index sets as the Golomb code of their gaps.
#include <memory>
#include <numeric>
#include <vector>

#include "index_bits.hpp"
#include "index_parts.hpp"

namespace tersegrad::select {
using namespace index;
namespace {

struct Golomb {
    std::uint64_t m, short_codes;  // remainders below short_codes take `width` bits, the others one more
    unsigned width;

    explicit Golomb(std::uint64_t divisor) : m(divisor) {
        if (m == 0 || m >> 56) throw std::invalid_argument("the divisor must lie in [1, 2^56)");
        width = static_cast<unsigned>(std::bit_width(m)) - 1;
        short_codes = (std::uint64_t{2} << width) - m;  // all of them where m is a power of two
    }
};

// floor(g / m): for 32-bit indices by one multiplication, exact since g < 2^31 times the reciprocal's error is below 2^62 / m.
template <class I>
struct Divider {
    std::uint64_t m, reciprocal;
    explicit Divider(std::uint64_t divisor) : m(divisor), reciprocal(((std::uint64_t{1} << 62) - 1) / divisor + 1) {}
    std::uint64_t operator()(std::uint64_t g) const {
        if constexpr (sizeof(I) > 4) return g / m;
        return static_cast<std::uint64_t>(static_cast<unsigned __int128>(g) * reciprocal >> 62);
    }
};

// The gaps to indices[begin .. end), the first one to the index before it.
template <class I>
void golomb_write(const I* indices, std::size_t begin, std::size_t end, std::uint64_t m, BitWriter& bits) {
    const Golomb code(m);
    const Divider<I> divide(m);
    std::int64_t before = begin ? static_cast<std::int64_t>(indices[begin - 1]) : -1;
    std::size_t j = begin;
    const std::size_t count = end;
    // Short remainders: r in `width` bits. Long ones: (r + u) >> 1 in `width` bits, then the lowest bit of r + u.
    auto word = [&](std::uint64_t r, unsigned& length) {
        const std::uint64_t is_long = r >= code.short_codes, moved = r + code.short_codes;
        length = code.width + static_cast<unsigned>(is_long);
        return is_long ? moved >> 1 | (moved & 1) << code.width : r;
    };
    while (j < count) {
        // The usual case, in registers: a code word of at most 56 bits and room for eight bytes.
        BitWriter::State s = bits.state();
        for (; j < count && bits.end() - s.at >= 8; ++j) {
            const std::uint64_t gap = static_cast<std::uint64_t>(indices[j] - before - 1);
            const std::uint64_t q = divide(gap);
            unsigned length;
            const std::uint64_t rest = word(gap - q * m, length);
            if (q + 1 + length > 56) break;
            before = indices[j];
            s.word |= (rest << 1 | 1) << q << s.filled;
            s.filled += static_cast<unsigned>(q) + 1 + length;
            std::memcpy(s.at, &s.word, 8);
            s.at += s.filled >> 3;
            s.word >>= s.filled & ~7u;
            s.filled &= 7;
        }
        bits.restore(s);
        if (j == count) break;
        const std::uint64_t gap = static_cast<std::uint64_t>(indices[j] - before - 1);
        before = indices[j++];
        const std::uint64_t q = divide(gap);
        unsigned length;
        const std::uint64_t rest = word(gap - q * m, length);
        bits.zeros(q);
        bits.put(1, 1);
        bits.put(rest & ((std::uint64_t{1} << 28) - 1), std::min(length, 28u));
        if (length > 28) bits.put(rest >> 28, length - 28);
    }
}

template <class I>
std::uint64_t golomb_bits(const I* indices, std::size_t begin, std::size_t end, std::uint64_t m) {
    const Golomb code(m);
    const Divider<I> divide(m);
    std::int64_t before = begin ? static_cast<std::int64_t>(indices[begin - 1]) : -1;
    std::uint64_t total = static_cast<std::uint64_t>(end - begin) * (code.width + 1);
    for (std::size_t j = begin; j < end; ++j) {
        const std::uint64_t gap = static_cast<std::uint64_t>(indices[j] - before - 1);
        before = indices[j];
        const std::uint64_t q = divide(gap), r = gap - q * m;
        total += q + (r >= code.short_codes);
    }
    return total;
}

}  // namespace

template <class I>
std::size_t golomb_encode(const I* indices, std::size_t count, std::uint64_t m, std::uint8_t* out, std::size_t capacity) {
    const std::size_t parts = parts_of(count);
    if (parts == 1) {
        BitWriter bits(out, capacity);
        golomb_write(indices, 0, count, m, bits);
        return bits.finish();
    }
    // Every part is written on its own, from the bit where it will stand, and then joined to the others.
    std::vector<std::uint64_t> starts(parts + 1);
    each_part(count, parts, [&](std::size_t p, std::size_t begin, std::size_t end) { starts[p + 1] = golomb_bits(indices, begin, end, m); });
    for (std::size_t p = 0; p < parts; ++p) starts[p + 1] += starts[p];
    if ((starts[parts] + 7) / 8 > capacity) no_room();
    std::vector<std::uint8_t> firsts(parts);
    each_part(count, parts, [&](std::size_t p, std::size_t begin, std::size_t end) {
        const std::size_t at = starts[p] / 8, size = (starts[p + 1] + 7) / 8 - at;
        const std::unique_ptr<std::uint8_t[]> own(new std::uint8_t[size]);
        BitWriter bits(own.get(), size);
        bits.zeros(starts[p] % 8);
        golomb_write(indices, begin, end, m, bits);
        firsts[p] = own[0];
        std::memcpy(out + at + 1, own.get() + 1, size - 1);
    });
    out[0] = firsts[0];
    for (std::size_t p = 1; p < parts; ++p) {
        const std::size_t at = starts[p] / 8;
        out[at] = starts[p] % 8 ? static_cast<std::uint8_t>(out[at] | firsts[p]) : firsts[p];
    }
    return (starts[parts] + 7) / 8;
}

template <class I>
std::size_t golomb_size(const I* indices, std::size_t count, std::uint64_t m) {
    const std::size_t parts = parts_of(count);
    std::vector<std::uint64_t> sizes(parts);
    each_part(count, parts, [&](std::size_t p, std::size_t begin, std::size_t end) { sizes[p] = golomb_bits(indices, begin, end, m); });
    return (std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0}) + 7) / 8;
}

template <class I>
std::size_t golomb_decode(const std::uint8_t* data, std::size_t size, std::size_t count, std::uint64_t n, std::uint64_t m, I* indices) {
    const Golomb code(m);
    BitReader bits(data, size);
    const std::uint64_t most = n / m + 1;
    const std::uint64_t mask = (std::uint64_t{1} << code.width) - 1;
    std::uint64_t next = 0;  // the smallest index that may follow
    for (std::size_t j = 0; j < count; ++j) {
        std::uint64_t v = bits.peek(), q, r;
        const unsigned z = static_cast<unsigned>(std::countr_zero(v));
        if (z + 2 + code.width <= 57) {
            q = z;
            v >>= z + 1;
            bits.skip(z + 1 + code.width);
        } else {
            q = bits.unary();
            v = bits.peek();
            bits.skip(code.width);
        }
        if (q > most) outside();
        r = v & mask;
        const bool is_long = r >= code.short_codes;  // hard to predict: no branch
        const std::uint64_t long_r = 2 * r + (v >> code.width & 1) - code.short_codes;
        r = is_long ? long_r : r;
        bits.skip(is_long);
        next += q * m + r;
        if (next >= n) outside();
        indices[j] = static_cast<I>(next++);
    }
    if (bits.overrun()) ended();
    if (!bits.padded_with_zeros()) throw std::invalid_argument("the padding of the index set is not zero");
    return bits.bytes();
}

#define INSTANTIATE(I) \
    template std::size_t golomb_encode<I>(const I*, std::size_t, std::uint64_t, std::uint8_t*, std::size_t); \
    template std::size_t golomb_size<I>(const I*, std::size_t, std::uint64_t); \
    template std::size_t golomb_decode<I>(const std::uint8_t*, std::size_t, std::size_t, std::uint64_t, std::uint64_t, I*);
INSTANTIATE(std::int32_t)
INSTANTIATE(std::int64_t)

}  // namespace tersegrad::select
