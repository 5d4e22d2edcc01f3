// Short index sets as an arithmetic code of the binary digits of their gaps.
#include "index_bits.hpp"

namespace tersegrad::select {
using namespace index;
namespace {

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
std::size_t digits_encode(const I* indices, std::size_t count, std::uint64_t n, std::uint8_t* out, std::size_t capacity) {
    expect_increasing(indices, count, n);
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

#define INSTANTIATE(I) \
    template std::size_t digits_encode<I>(const I*, std::size_t, std::uint64_t, std::uint8_t*, std::size_t); \
    template std::size_t digits_decode<I>(const std::uint8_t*, std::size_t, std::size_t, std::uint64_t, I*);
INSTANTIATE(std::int32_t)
INSTANTIATE(std::int64_t)

}  // namespace tersegrad::select
