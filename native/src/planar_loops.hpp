// The loops of planar codes. Included by one file per instruction set, so everything is in an unnamed namespace: the same source, compiled
// with and without bit-manipulation instructions, must never be merged by the linker.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
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

// Memory that grows and is not cleared.
class Scratch {
  public:
    u8* data() { return data_.get(); }
    // At least `size` bytes, of which the first `kept` stay as they are.
    void reserve(std::size_t kept, std::size_t size) {
        if (size <= size_) return;
        size = std::max(size, 2 * size_);
        std::unique_ptr<u8[]> larger(new u8[size]);
        if (kept && size_) std::memcpy(larger.get(), data_.get(), std::min(kept, size_));
        data_ = std::move(larger);
        size_ = size;
    }

  private:
    std::unique_ptr<u8[]> data_;
    std::size_t size_ = 0;
};

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
    // Go on in other memory, where the bytes before are complete.
    void move(u8* to) { at_ = to; }
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

// The unary codes of up to G small numbers, collected so that one call of put writes them.
struct Ones {
    u64 bits = 0, place = 0;
    [[gnu::always_inline]] void add(u64 zeros) {
        place += zeros;
        bits |= u64{1} << (place & 63);
        ++place;
    }
    bool fit() const { return place <= 56; }
};

// How many fields of so many bits one call of put writes: 8, 4, 2 or 1.
template <class Body>
[[gnu::always_inline]] inline void by_width(unsigned width, Body&& body) {
    if (width <= 7) body(std::integral_constant<unsigned, 8>{});
    else if (width <= 14) body(std::integral_constant<unsigned, 4>{});
    else if (width <= 28) body(std::integral_constant<unsigned, 2>{});
    else body(std::integral_constant<unsigned, 1>{});
}

// floor(g / m): for 32-bit indices by the upper half of one multiplication. Exact: g < 2^31 times the reciprocal's error, which is
// below m, stays below 2^63 where m < 2^32; a larger m gives 0.
template <class I>
struct Divider {
    u64 m, reciprocal;
    explicit Divider(u64 divisor) : m(divisor), reciprocal(((u64{1} << 63) - 1) / divisor + 1) {}
    u64 operator()(u64 g) const {
        if constexpr (sizeof(I) > 4) return g / m;
        return static_cast<u64>(static_cast<unsigned __int128>(2 * g) * reciprocal >> 64);
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

template <unsigned G, class I>
Sums write_groups(const Golomb& code, const I* indices, std::size_t begin, std::size_t end, const Planes& planes) {
    const Divider<I> divide(code.m);
    const unsigned width = code.width;
    i64 before = begin ? static_cast<i64>(indices[begin - 1]) : -1;
    Writer unary(planes.unary, planes.unary_bit), rests(planes.rests, planes.rests_bit), last(planes.last, planes.last_bit);
    Sums sums;
    const auto group = [&](std::size_t j, auto size) __attribute__((always_inline)) {
        constexpr unsigned n = decltype(size)::value;
        u64 quotients[n], fields = 0, lasts = 0;
        unsigned longs = 0;
        Ones ones;
#pragma GCC unroll 8
        for (unsigned k = 0; k < n; ++k) {
            const u64 gap = static_cast<u64>(indices[j + k] - before - 1);
            before = indices[j + k];
            const u64 q = quotients[k] = divide(gap), r = gap - q * code.m, moved = r + code.few;
            const bool is_long = r >= code.few;  // hard to predict: no branch
            ones.add(q);
            fields |= (is_long ? moved >> 1 : r) << (k * width);
            lasts |= (moved & static_cast<u64>(is_long)) << longs;
            longs += is_long;
        }
        if (ones.fit()) [[likely]] unary.put(ones.bits, static_cast<unsigned>(ones.place));
        else
            for (const u64 q : quotients) unary.unary(q);
        rests.put(fields, n * width);
        last.put(lasts, longs);
        sums.unary += ones.place;
        sums.last += longs;
    };
    std::size_t j = begin;
    for (; j + G <= end; j += G) group(j, std::integral_constant<unsigned, G>{});
    for (; j < end; ++j) group(j, std::integral_constant<unsigned, 1>{});
    return sums;
}

template <class I>
Sums write(const Golomb& code, const I* indices, std::size_t begin, std::size_t end, const Planes& planes) {
    Sums sums;
    by_width(code.width, [&](auto size) { sums = write_groups<decltype(size)::value>(code, indices, begin, end, planes); });
    return sums;
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
// The same where eight bytes are known to be there.
[[gnu::always_inline]] inline u64 whole_field(const u8* data, u64 bit, unsigned n) {
    u64 v;
    std::memcpy(&v, data + (bit >> 3), 8);
    return v >> (bit & 7) & mask(n);
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
    const auto each = [&](auto whole) __attribute__((always_inline)) {
        each_one(data, size, count, [&](std::size_t j, u64 p) __attribute__((always_inline)) {
            u64 r = whole() ? whole_field(rests, at, code.width) : field(rests, rests_size, at, code.width);
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
    };
    // Where eight bytes follow the last field, as they nearly always do, no field has to ask how many do.
    if (rest_bits / 8 + 8 <= rests_size) each(std::true_type{});
    else each(std::false_type{});
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

// Bits of the unary plane's zeros, escaped values, and low bits of theirs; false if a value is negative.
bool rice_measure_loop(const i64* values, std::size_t count, unsigned k, RiceSums& sums) {
    sums = {};
    constexpr std::size_t block = 512;
    for (std::size_t i = 0; i < count; i += block) {
        const std::size_t end = std::min(count, i + block);
        u64 any = 0, zeros = 0;
        for (std::size_t j = i; j < end; ++j) {
            any |= static_cast<u64>(values[j]);
            zeros += static_cast<u64>(values[j]) >> k;
        }
        if (any >> 63) return false;
        if (any >> k < rice_limit) {
            sums.zeros += zeros;
            continue;
        }
        for (std::size_t j = i; j < end; ++j) {
            const u64 q = quotient(values[j], k);
            sums.zeros += std::min<u64>(q, rice_limit);
            if (q >= rice_limit) ++sums.escapes, sums.low += log2_floor(static_cast<i64>(q - (rice_limit - 1)));
        }
    }
    return true;
}

// Both planes in one pass over the values: the second cannot be placed before the first has ended, so both are written apart.
template <unsigned G>
i64 rice_encode_groups(const i64* values, std::size_t count, unsigned k, u8* out, std::size_t capacity) {
    constexpr std::size_t block = 4096;
    const std::size_t rest_bytes = bytes_of(u64{count} * k);
    // Where `out` surely holds it, the unary plane is written in its place.
    const bool roomy = capacity >= bytes_of(u64{count} * (rice_limit + 1)) + 16;
    Scratch unary_plane, rest_plane;
    rest_plane.reserve(0, rest_bytes + 8);
    Writer rests(rest_plane.data(), 0);
    std::vector<i64> escapes;
    u64 bits = 0, signs = 0;
    std::size_t done = 0;  // bytes of the unary plane that are complete
    Writer unary(nullptr, 0);
    const auto group = [&](std::size_t j, auto size) __attribute__((always_inline)) {
        constexpr unsigned n = decltype(size)::value;
        u64 fields = 0, any = 0;
        Ones ones;
#pragma GCC unroll 8
        for (unsigned i = 0; i < n; ++i) {
            const u64 v = static_cast<u64>(values[j + i]), q = v >> k;
            any |= q;
            ones.add(q);
            fields |= (v & mask(k)) << (i * k);
        }
        signs |= any << k;
        rests.put(fields, n * k);
        if (any < rice_limit && ones.fit()) [[likely]] {
            unary.put(ones.bits, static_cast<unsigned>(ones.place));
            bits += ones.place;
            return;
        }
        for (unsigned i = 0; i < n; ++i) {
            const u64 q = quotient(values[j + i], k);
            if (q >= rice_limit) escapes.push_back(static_cast<i64>(q - (rice_limit - 1)));
            unary.unary(std::min<u64>(q, rice_limit));
            bits += std::min<u64>(q, rice_limit) + 1;
        }
    };
    for (std::size_t i = 0; i < count; i += block) {
        const std::size_t end = std::min(count, i + block);
        if (!roomy) unary_plane.reserve(done + 1, done + block * (rice_limit + 1) / 8 + 16);
        unary.move((roomy ? out : unary_plane.data()) + done);
        std::size_t j = i;
        for (; j + G <= end; j += G) group(j, std::integral_constant<unsigned, G>{});
        for (; j < end; ++j) group(j, std::integral_constant<unsigned, 1>{});
        done = static_cast<std::size_t>(bits / 8);
        if (signs >> 63) return outside;
    }
    u64 low = 0;
    for (const i64 v : escapes) low += log2_floor(v);
    const std::size_t total = bytes_of(bits) + rest_bytes + bytes_of(low + escapes.size()) + bytes_of(low);
    if (total > capacity) return ended;
    if (count && !roomy) std::memcpy(out, unary_plane.data(), bytes_of(bits));
    out += bytes_of(bits);
    if (rest_bytes) std::memcpy(out, rest_plane.data(), rest_bytes);
    gamma_encode_loop(escapes.data(), escapes.size(), out + rest_bytes);
    return static_cast<i64>(total);
}

i64 rice_encode_loop(const i64* values, std::size_t count, unsigned k, u8* out, std::size_t capacity) {
    i64 bytes = 0;
    by_width(k, [&](auto size) { bytes = rice_encode_groups<decltype(size)::value>(values, count, k, out, capacity); });
    return bytes;
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
            read<i64>,             gamma_encode_loop,   gamma_decode_loop,   rice_measure_loop, rice_encode_loop, rice_decode_loop};
}

}  // namespace
}  // namespace tersegrad::planar
