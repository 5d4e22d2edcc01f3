// The loops of planar codes. Included by one file per instruction set, so everything is in an unnamed namespace: the same source, compiled
// with and without bit-manipulation instructions, must never be merged by the linker.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "tersegrad/planar.hpp"

namespace tersegrad::planar {
namespace {

using u8 = std::uint8_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

inline u64 mask(unsigned n) { return n < 64 ? (u64{1} << n) - 1 : ~u64{0}; }
inline std::size_t bytes_of(u64 bits) { return static_cast<std::size_t>((bits + 7) / 8); }

// ---- writing ----

// Bits from some bit of a byte on. Writes eight bytes at a time, up to eight beyond the last one.
class Writer {
  public:
    Writer(u8* out, unsigned bit) : at_(out), filled_(bit) {}
    [[gnu::always_inline]] void put(u64 value, unsigned n) {  // n <= 56
        word_ |= value << filled_;
        filled_ += n;
        std::memcpy(at_, &word_, 8);
        at_ += filled_ >> 3;
        word_ >>= filled_ & ~7u;
        filled_ &= 7;
    }
    void put_long(u64 value, unsigned n) {  // n <= 63
        if (n > 32) put(value & mask(32), 32), value >>= 32, n -= 32;
        put(value, n);
    }
    // So many zeros and a one.
    [[gnu::always_inline]] void unary(u64 zeros) {
        for (; zeros > 55; zeros -= 56) put(0, 56);
        put(u64{1} << zeros, static_cast<unsigned>(zeros) + 1);
    }

  private:
    u8* at_;
    u64 word_ = 0;
    unsigned filled_;
};

// floor(g / m): for 32-bit indices by one multiplication, exact since g < 2^31 times the reciprocal's error is below 2^62 / m.
template <class I>
struct Divider {
    u64 m, reciprocal;
    explicit Divider(u64 divisor) : m(divisor), reciprocal(((u64{1} << 62) - 1) / divisor + 1) {}
    u64 operator()(u64 g) const {
        if constexpr (sizeof(I) > 4) return g / m;
        return static_cast<u64>(static_cast<unsigned __int128>(g) * reciprocal >> 62);
    }
};

template <class I>
Sums measure(const Golomb& code, const I* indices, std::size_t begin, std::size_t end) {
    const Divider<I> divide(code.m);
    i64 before = begin ? static_cast<i64>(indices[begin - 1]) : -1;
    Sums sums{end - begin, 0};
    for (std::size_t j = begin; j < end; ++j) {
        const u64 gap = static_cast<u64>(indices[j] - before - 1);
        before = indices[j];
        const u64 q = divide(gap);
        sums.unary += q;
        sums.last += gap - q * code.m >= code.few;
    }
    return sums;
}

template <class I>
void write(const Golomb& code, const I* indices, std::size_t begin, std::size_t end, const Planes& planes) {
    const Divider<I> divide(code.m);
    i64 before = begin ? static_cast<i64>(indices[begin - 1]) : -1;
    Writer unary(planes.unary, planes.unary_bit), rests(planes.rests, planes.rests_bit), last(planes.last, planes.last_bit);
    for (std::size_t j = begin; j < end; ++j) {
        const u64 gap = static_cast<u64>(indices[j] - before - 1);
        before = indices[j];
        const u64 q = divide(gap), r = gap - q * code.m, moved = r + code.few;
        const bool is_long = r >= code.few;  // hard to predict: no branch
        unary.unary(q);
        rests.put(is_long ? moved >> 1 : r, code.width);
        last.put(moved & static_cast<u64>(is_long), is_long);
    }
}

// ---- reading ----

// Eight bytes from `at` on; what lies beyond the end is zero.
[[gnu::always_inline]] inline u64 load(const u8* data, std::size_t size, std::size_t at) {
    u64 v = 0;
    if (at + 8 <= size) std::memcpy(&v, data + at, 8);
    else if (at < size) std::memcpy(&v, data + at, size - at);
    return v;
}

// The n <= 57 bits from `bit` on.
[[gnu::always_inline]] inline u64 field(const u8* data, std::size_t size, u64 bit, unsigned n) {
    return load(data, size, static_cast<std::size_t>(bit >> 3)) >> (bit & 7) & mask(n);
}
inline u64 long_field(const u8* data, std::size_t size, u64 bit, unsigned n) {
    if (n <= 57) return field(data, size, bit, n);
    return field(data, size, bit, 32) | field(data, size, bit + 32, n - 32) << 32;
}

// Bits of a plane, up to and including its count-th one; `ended` if there are fewer, `unpadded` if its last byte is.
i64 plane_bits(const u8* data, std::size_t size, std::size_t count) {
    if (count == 0) return 0;
    std::size_t at = 0, found = 0;
    for (;; at += 8) {
        if (at >= size) return ended;
        const auto ones = static_cast<std::size_t>(std::popcount(load(data, size, at)));
        if (found + ones >= count) break;
        found += ones;
    }
    u64 word = load(data, size, at);
    for (; found + 1 < count; ++found) word &= word - 1;
    const u64 bits = 8 * u64{at} + static_cast<u64>(std::countr_zero(word)) + 1;
    if (bits & 7 && data[bits >> 3] >> (bits & 7)) return unpadded;
    return static_cast<i64>(bits);
}

// Whether the bits of a plane fit into its bytes and the rest of them is zero; else `ended` or `unpadded`.
i64 check_fields(const u8* data, std::size_t size, u64 bits) {
    if (bytes_of(bits) > size) return ended;
    if (bits & 7 && data[bits >> 3] >> (bits & 7)) return unpadded;
    return 0;
}

// Calls body(j, position of the j-th one) for all ones of a plane that is known to have them.
template <class Body>
[[gnu::always_inline]] inline void each_one(const u8* data, std::size_t size, std::size_t count, Body&& body) {
    std::size_t j = 0;
    for (std::size_t at = 0; j < count; at += 8)
        for (u64 word = load(data, size, at); word && j < count; word &= word - 1)
            body(j++, 8 * u64{at} + static_cast<u64>(std::countr_zero(word)));
}

template <class I>
i64 read(const Golomb& code, const u8* data, std::size_t size, std::size_t count, u64 n, I* indices) {
    const i64 unary = plane_bits(data, size, count);
    if (unary < 0) return unary;
    const std::size_t unary_bytes = bytes_of(static_cast<u64>(unary));
    if (static_cast<u64>(unary) - count > n / code.m) return outside;
    const u8* const rests = data + unary_bytes;
    const std::size_t rests_size = size - unary_bytes;
    if (code.width && count > 8 * u64{rests_size} / code.width) return ended;
    const u64 rest_bits = u64{count} * code.width;
    if (const i64 bad = check_fields(rests, rests_size, rest_bits)) return bad;
    const u8* const last = rests + bytes_of(rest_bits);
    const std::size_t last_size = rests_size - bytes_of(rest_bits);
    // The last plane has one bit per long remainder: how many, the pass below finds out. Bits beyond its end read as zero until then.
    u64 at = 0, sum = 0, used = 0;
    bool far = false;
    each_one(data, size, count, [&](std::size_t j, u64 p) __attribute__((always_inline)) {
        u64 r = field(rests, rests_size, at, code.width);
        at += code.width;
        const u64 is_long = r >= code.few;
        const u64 bit = (used >> 3 < last_size ? u64{last[used >> 3]} : 0) >> (used & 7) & 1;
        r = is_long ? 2 * r + bit - code.few : r;
        used += is_long;
        sum += r;
        const u64 index = (p - j) * code.m + sum + j;
        far |= index >= n;  // no step exceeds 2^57, so a sum cannot wrap without passing here first
        indices[j] = static_cast<I>(index);
    });
    if (far) return outside;
    if (const i64 bad = check_fields(last, last_size, used)) return bad;
    return static_cast<i64>(unary_bytes + bytes_of(rest_bits) + bytes_of(used));
}

// ---- gamma and Rice codes ----

inline unsigned log2_floor(i64 v) { return static_cast<unsigned>(std::bit_width(static_cast<u64>(v))) - 1; }

// A plane of its own memory, because a writer goes beyond its end.
template <class Body>
u8* put_plane(u8* out, u64 bits, std::vector<u8>& scratch, Body&& body) {
    scratch.resize(bytes_of(bits) + 8);
    Writer writer(scratch.data(), 0);
    body(writer);
    if (bits) std::memcpy(out, scratch.data(), bytes_of(bits));
    return out + bytes_of(bits);
}

void gamma_encode_loop(const i64* values, std::size_t count, u8* out) {
    u64 low = 0;
    for (std::size_t i = 0; i < count; ++i) low += log2_floor(values[i]);
    std::vector<u8> scratch;
    out = put_plane(out, low + count, scratch, [&](Writer& w) {
        for (std::size_t i = 0; i < count; ++i) w.unary(log2_floor(values[i]));
    });
    put_plane(out, low, scratch, [&](Writer& w) {
        for (std::size_t i = 0; i < count; ++i) {
            const unsigned n = log2_floor(values[i]);
            w.put_long(static_cast<u64>(values[i]) & mask(n), n);
        }
    });
}

i64 gamma_decode_loop(const u8* data, std::size_t size, std::size_t count, i64* out) {
    const i64 unary = plane_bits(data, size, count);
    if (unary < 0) return unary;
    const std::size_t first = bytes_of(static_cast<u64>(unary));
    const u64 bits = static_cast<u64>(unary) - count;
    if (const i64 bad = check_fields(data + first, size - first, bits)) return bad;
    u64 before = 0, at = 0;  // the place after the previous one, and that of its low bits
    bool good = true;
    each_one(data, first, count, [&](std::size_t j, u64 p) {
        const u64 n = p - before;
        before = p + 1;
        good &= n <= 62;
        const auto width = static_cast<unsigned>(std::min<u64>(n, 62));
        out[j] = static_cast<i64>(u64{1} << width | long_field(data + first, size - first, at, width));
        at += n;
    });
    return good ? static_cast<i64>(first + bytes_of(bits)) : outside;
}

inline u64 quotient(i64 v, unsigned k) { return static_cast<u64>(v) >> k; }

void rice_encode_loop(const i64* values, std::size_t count, unsigned k, u8* out) {
    u64 zeros = 0;
    std::vector<i64> escapes;
    for (std::size_t i = 0; i < count; ++i) {
        const u64 q = quotient(values[i], k);
        zeros += std::min<u64>(q, rice_limit);
        if (q >= rice_limit) escapes.push_back(static_cast<i64>(q - (rice_limit - 1)));
    }
    std::vector<u8> scratch;
    out = put_plane(out, zeros + count, scratch, [&](Writer& w) {
        for (std::size_t i = 0; i < count; ++i) w.unary(std::min<u64>(quotient(values[i], k), rice_limit));
    });
    out = put_plane(out, u64{count} * k, scratch, [&](Writer& w) {
        for (std::size_t i = 0; i < count; ++i) w.put(static_cast<u64>(values[i]) & mask(k), k);
    });
    gamma_encode_loop(escapes.data(), escapes.size(), out);
}

i64 rice_decode_loop(const u8* data, std::size_t size, std::size_t count, unsigned k, i64* out) {
    const i64 unary = plane_bits(data, size, count);
    if (unary < 0) return unary;
    const std::size_t first = bytes_of(static_cast<u64>(unary));
    const u8* const rests = data + first;
    const std::size_t rests_size = size - first;
    if (k && count > 8 * u64{rests_size} / k) return ended;
    const u64 bits = u64{count} * k;
    if (const i64 bad = check_fields(rests, rests_size, bits)) return bad;
    u64 before = 0;
    bool good = true;
    std::vector<std::size_t> escaped;
    each_one(data, first, count, [&](std::size_t j, u64 p) {
        const u64 q = p - before;
        before = p + 1;
        good &= q <= rice_limit;
        if (q == rice_limit) escaped.push_back(j);
        out[j] = static_cast<i64>((q & 63) << k | field(rests, rests_size, u64{j} * k, k));
    });
    if (!good) return outside;
    std::size_t used = first + bytes_of(bits);
    std::vector<i64> beyond(escaped.size());
    const i64 more = gamma_decode_loop(data + used, size - used, escaped.size(), beyond.data());
    if (more < 0) return more;
    const u64 largest = (mask(63) >> k) - (rice_limit - 1);
    for (std::size_t e = 0; e < escaped.size(); ++e) {
        if (static_cast<u64>(beyond[e]) > largest) return outside;
        i64& v = out[escaped[e]];
        v = static_cast<i64>((static_cast<u64>(beyond[e]) + rice_limit - 1) << k | (static_cast<u64>(v) & mask(k)));
    }
    return static_cast<i64>(used) + more;
}

constexpr Table planar_table() {
    return {measure<std::int32_t>, measure<i64>,        write<std::int32_t>, write<i64>,      read<std::int32_t>,
            read<i64>,             gamma_encode_loop,   gamma_decode_loop,   rice_encode_loop, rice_decode_loop};
}

}  // namespace
}  // namespace tersegrad::planar
