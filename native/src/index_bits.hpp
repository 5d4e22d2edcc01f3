// What the codes of index sets share: their errors, and bits, least significant first. Every reader is safe on arbitrary bytes: it
// reads within [data, data + size), and decoders throw where a set does not follow from the bytes.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "tersegrad/select.hpp"

namespace tersegrad::select {
namespace index {

[[noreturn]] inline void ended() { throw std::invalid_argument("the index set ends early"); }
[[noreturn]] inline void outside() { throw std::invalid_argument("an index lies outside the vector"); }
[[noreturn]] inline void no_room() { throw std::invalid_argument("the output buffer is too small for the index set"); }

// Encoders without a vector's length take indices up to here.
constexpr std::uint64_t kMostPlaces = std::uint64_t{1} << 62;

template <class I>
void expect_increasing(const I* indices, std::size_t count, std::uint64_t n = kMostPlaces) {
    if (!increasing(indices, count, n)) throw std::invalid_argument("indices must increase strictly and lie within the vector");
}

inline std::uint64_t load64(const std::uint8_t* p) {
    std::uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}

// Stores eight bytes at a time while there is room, else byte by byte.
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

}  // namespace index
}  // namespace tersegrad::select
