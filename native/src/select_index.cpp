// Index sets as bytes. Every decoder here is safe on arbitrary bytes: it reads within [data, data + size) and throws otherwise.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "tersegrad/runtime.hpp"
#include "tersegrad/select.hpp"

namespace tersegrad::select {
namespace {

[[noreturn]] void ended() { throw std::invalid_argument("the index set ends early"); }
[[noreturn]] void outside() { throw std::invalid_argument("an index lies outside the vector"); }
[[noreturn]] void no_room() { throw std::invalid_argument("the output buffer is too small for the index set"); }

inline std::uint64_t load64(const std::uint8_t* p) {
    std::uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}

// Bits, least significant first. Stores eight bytes at a time while there is room, else byte by byte.
class BitWriter {
  public:
    BitWriter(std::uint8_t* out, std::size_t capacity) : begin_(out), at_(out), end_(out + capacity) {}

    void put(std::uint64_t value, unsigned n) {  // n <= 56
        word_ |= value << filled_;
        filled_ += n;
        if (end_ - at_ >= 8) {
            std::memcpy(at_, &word_, 8);
        } else {
            if (static_cast<std::size_t>(end_ - at_) * 8 < filled_) no_room();
            for (unsigned b = 0; b < (filled_ + 7) / 8; ++b) at_[b] = static_cast<std::uint8_t>(word_ >> (8 * b));
        }
        at_ += filled_ >> 3;
        word_ = filled_ >= 64 ? 0 : word_ >> (filled_ & ~7u);
        filled_ &= 7;
    }

    void zeros(std::uint64_t n) {
        for (; n > 56; n -= 56) put(0, 56);
        put(0, static_cast<unsigned>(n));
    }

    std::size_t finish() { return static_cast<std::size_t>(at_ - begin_) + (filled_ ? 1 : 0); }

    struct State {
        std::uint8_t* at;
        std::uint64_t word;
        unsigned filled;
    };
    State state() const { return {at_, word_, filled_}; }
    void restore(const State& s) { at_ = s.at, word_ = s.word, filled_ = s.filled; }
    std::uint8_t* end() const { return end_; }

  private:
    std::uint8_t *begin_, *at_, *end_;
    std::uint64_t word_ = 0;
    unsigned filled_ = 0;
};

class BitReader {
  public:
    BitReader(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    // The next bits; at least 57 of them count, those beyond the end are zero.
    std::uint64_t peek() const {
        const std::size_t byte = position_ >> 3;
        std::uint64_t v = 0;
        if (byte + 8 <= size_) v = load64(data_ + byte);
        else if (byte < size_) std::memcpy(&v, data_ + byte, size_ - byte);
        return v >> (position_ & 7);
    }

    void skip(std::uint64_t n) { position_ += n; }
    bool overrun() const { return position_ > size_ * 8; }
    std::size_t bytes() const { return (position_ + 7) >> 3; }

    // Padding of the last byte; an encoder writes zeros.
    bool padded_with_zeros() const { return (position_ & 7) == 0 || (data_[position_ >> 3] >> (position_ & 7)) == 0; }

    // The number of zeros before the next one, which is skipped too.
    std::uint64_t unary() {
        std::uint64_t n = 0;
        for (;;) {
            const std::uint64_t v = peek();
            if (v) {
                const unsigned z = static_cast<unsigned>(std::countr_zero(v));
                skip(z + 1);
                return n + z;
            }
            n += 57;
            skip(57);
            if (overrun()) ended();
        }
    }

  private:
    const std::uint8_t* data_;
    std::size_t size_;
    std::uint64_t position_ = 0;
};

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

// Range coder, 48 bits, bytes most significant first, carries resolved in the bytes already written.
constexpr std::uint64_t range_floor = std::uint64_t{1} << 40, range_first = std::uint64_t{250} << 40;

class RangeEncoder {
  public:
    RangeEncoder(std::uint8_t* out, std::size_t capacity) : out_(out), capacity_(capacity) {}

    void bit(bool one, std::uint32_t p_one) {
        const std::uint64_t bound = (range_ >> 16) * p_one;
        if (one) range_ = bound;
        else low_ += bound, range_ -= bound;
        normalise();
    }

    void uniform(std::uint64_t value, std::uint64_t choices) {  // choices <= 2^16
        range_ /= choices;
        low_ += value * range_;
        normalise();
    }

    std::size_t finish() {
        // The decoder may see any bytes after ours: the whole interval of continuations must lie inside [low, low + range).
        const unsigned bytes = range_ >= 2 * range_floor ? 1 : 2;
        const std::uint64_t unit = std::uint64_t{1} << (48 - 8 * bytes);
        low_ = (low_ + unit - 1) & ~(unit - 1);
        for (unsigned b = 0; b < bytes; ++b) shift_out();
        return size_;
    }

  private:
    void normalise() {
        while (range_ < range_floor) {
            shift_out();
            range_ <<= 8;
        }
    }
    void shift_out() {
        if (low_ >> 48) {
            std::size_t i = size_;
            while (++out_[--i] == 0) {}
            low_ &= (std::uint64_t{1} << 48) - 1;
        }
        if (size_ == capacity_) no_room();
        out_[size_++] = static_cast<std::uint8_t>(low_ >> 40);
        low_ = (low_ << 8) & ((std::uint64_t{1} << 48) - 1);
    }

    std::uint8_t* out_;
    std::size_t capacity_, size_ = 0;
    std::uint64_t low_ = 0, range_ = range_first;
};

class RangeDecoder {
  public:
    RangeDecoder(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {
        for (int b = 0; b < 6; ++b) code_ = code_ << 8 | next();
        if (code_ >= range_) throw std::invalid_argument("not an arithmetic-coded index set");
    }

    bool bit(std::uint32_t p_one) {
        const std::uint64_t bound = (range_ >> 16) * p_one;
        const bool one = code_ < bound;
        if (one) range_ = bound;
        else code_ -= bound, range_ -= bound;
        normalise();
        return one;
    }

    std::uint64_t uniform(std::uint64_t choices) {
        range_ /= choices;
        const std::uint64_t value = code_ / range_;
        if (value >= choices) throw std::invalid_argument("no encoder writes this index set");
        code_ -= value * range_;
        normalise();
        return value;
    }

    std::size_t finish() const {
        const std::size_t used = at_ - 6 + (range_ >= 2 * range_floor ? 1 : 2);
        if (used > size_) ended();
        return used;
    }

  private:
    std::uint64_t next() {
        const std::uint64_t b = at_ < size_ ? data_[at_] : 0;
        ++at_;
        return b;
    }
    void normalise() {
        while (range_ < range_floor) {
            range_ <<= 8;
            code_ = code_ << 8 | next();
        }
    }

    const std::uint8_t* data_;
    std::size_t size_, at_ = 0;
    std::uint64_t code_ = 0, range_ = range_first;
};

// The model: a gap among n places with k indices to come is about geometric, and the binary digits of a geometric number are
// independent. Digit j is one with probability t / (1 + t), t = ((n - k) / (n + 1))^(2^j). Digits that are nearly fair go in
// raw, and the last index of all is uniform. `Code` codes one digit or choice and returns it.
template <class Code>
std::uint64_t code_gap(std::uint64_t n, std::uint64_t k, Code&& code) {
    auto raw = [&](int from, int to) {
        std::uint64_t v = 0;
        for (int j = from; j < to; j += 16) v |= code.uniform(j, std::min(16, to - j)) << j;
        return v;
    };
    if (k == 1) {
        const int low = std::max(0, static_cast<int>(std::bit_width(n - 1)) - 16);
        const std::uint64_t top = code.choice(low, ((n - 1) >> low) + 1);
        return top << low | raw(0, low);
    }
    constexpr std::uint64_t one = std::uint64_t{1} << 60;
    const int digits = static_cast<int>(std::bit_width(n - k));
    auto t = static_cast<std::uint64_t>((static_cast<unsigned __int128>(n - k) << 60) / (n + 1));
    int fair = 0;  // digits below this one have t > 31/32
    while (fair < digits && t > one - (one >> 5)) {
        t = static_cast<std::uint64_t>(static_cast<unsigned __int128>(t) * t >> 60);
        ++fair;
    }
    std::uint64_t gap = 0;
    for (int j = fair; j < digits; ++j) {
        const std::uint64_t short_t = t >> 28;
        const auto p = static_cast<std::uint32_t>(std::clamp<std::uint64_t>((short_t << 16) / ((std::uint64_t{1} << 32) + short_t), 1, 65535));
        gap |= std::uint64_t{code.digit(j, p)} << j;
        t = static_cast<std::uint64_t>(static_cast<unsigned __int128>(t) * t >> 60);
    }
    return gap | raw(0, fair);
}

struct GapEncoder {
    RangeEncoder& coder;
    std::uint64_t gap;
    std::uint64_t uniform(int at, int bits) {
        const std::uint64_t v = gap >> at & ((std::uint64_t{1} << bits) - 1);
        coder.uniform(v, std::uint64_t{1} << bits);
        return v;
    }
    std::uint64_t choice(int at, std::uint64_t choices) {
        coder.uniform(gap >> at, choices);
        return gap >> at;
    }
    bool digit(int at, std::uint32_t p) {
        coder.bit(gap >> at & 1, p);
        return gap >> at & 1;
    }
};

struct GapDecoder {
    RangeDecoder& coder;
    std::uint64_t uniform(int, int bits) { return coder.uniform(std::uint64_t{1} << bits); }
    std::uint64_t choice(int, std::uint64_t choices) { return coder.uniform(choices); }
    bool digit(int, std::uint32_t p) { return coder.bit(p); }
};

}  // namespace

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
    if (!increasing(indices, count, n)) throw std::invalid_argument("indices must increase strictly and lie within the vector");
    std::uint64_t from = 0;
    for (std::size_t j = 0; j <= count; ++j) {
        const std::uint64_t to = j < count ? static_cast<std::uint64_t>(indices[j]) : n;
        for (; from < to; ++from) *out++ = static_cast<I>(from);
        from = to + 1;
    }
}

namespace {

constexpr std::size_t kGapGrain = std::size_t{1} << 15;  // indices that pay for a thread

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

// body(part, begin, end) for every thread's part of `count` indices.
template <class Body>
void each_part(std::size_t count, std::size_t parts, Body&& body) {
    parallel_for(parts, 1, 1, [&](std::size_t b, std::size_t e) {
        for (std::size_t p = b; p < e; ++p) body(p, count * p / parts, count * (p + 1) / parts);
    });
}

std::size_t parts_of(std::size_t count) { return static_cast<std::size_t>(plan_threads(count, kGapGrain)); }

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

template <class I>
std::size_t digits_encode(const I* indices, std::size_t count, std::uint64_t n, std::uint8_t* out, std::size_t capacity) {
    if (!increasing(indices, count, n)) throw std::invalid_argument("indices must increase strictly and lie within the vector");
    RangeEncoder coder(out, capacity);
    std::uint64_t next = 0;
    for (std::size_t j = 0; j < count; ++j) {
        const std::uint64_t index = static_cast<std::uint64_t>(indices[j]);
        code_gap(n - next, count - j, GapEncoder{coder, index - next});
        next = index + 1;
    }
    return coder.finish();
}

template <class I>
std::size_t digits_decode(const std::uint8_t* data, std::size_t size, std::size_t count, std::uint64_t n, I* indices) {
    RangeDecoder coder(data, size);
    std::uint64_t next = 0;
    for (std::size_t j = 0; j < count; ++j) {
        if (n - next < count - j) outside();
        const std::uint64_t gap = code_gap(n - next, count - j, GapDecoder{coder});
        if (gap > n - next - (count - j)) outside();
        indices[j] = static_cast<I>(next + gap);
        next += gap + 1;
    }
    return coder.finish();
}

template <class I>
void bitmap_encode(const I* indices, std::size_t count, std::uint64_t n, std::uint8_t* out) {
    if (!increasing(indices, count, n)) throw std::invalid_argument("indices must increase strictly and lie within the vector");
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

#define INSTANTIATE(I)                                                                                                          \
    template bool increasing<I>(const I*, std::size_t, std::uint64_t);                                                          \
    template void complement<I>(const I*, std::size_t, std::uint64_t, I*);                                                      \
    template std::size_t golomb_encode<I>(const I*, std::size_t, std::uint64_t, std::uint8_t*, std::size_t);                    \
    template std::size_t golomb_size<I>(const I*, std::size_t, std::uint64_t);                                                  \
    template std::size_t golomb_decode<I>(const std::uint8_t*, std::size_t, std::size_t, std::uint64_t, std::uint64_t, I*);     \
    template std::size_t digits_encode<I>(const I*, std::size_t, std::uint64_t, std::uint8_t*, std::size_t);                    \
    template std::size_t digits_decode<I>(const std::uint8_t*, std::size_t, std::size_t, std::uint64_t, I*);                    \
    template void bitmap_encode<I>(const I*, std::size_t, std::uint64_t, std::uint8_t*);                                        \
    template void bitmap_decode<I>(const std::uint8_t*, std::size_t, std::size_t, std::uint64_t, I*);                           \
    template void gap_classes<I>(const I*, std::size_t, std::uint8_t*);                                                         \
    template void gap_histogram<I>(const I*, std::size_t, std::uint64_t, std::uint64_t*);                                       \
    template std::size_t gap_rests_encode<I>(const I*, std::size_t, std::uint8_t*, std::size_t);                                \
    template std::size_t gap_rests_decode<I>(const std::uint8_t*, std::size_t, const std::uint8_t*, std::size_t, std::uint64_t, I*);
INSTANTIATE(std::int32_t)
INSTANTIATE(std::int64_t)

}  // namespace tersegrad::select
