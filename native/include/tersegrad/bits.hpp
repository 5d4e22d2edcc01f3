// Bit streams and the simple lossless codes over them: fixed-width packing, trits, Elias, Golomb-Rice.
// Bits are numbered LSB-first: bit i of a stream is bit i % 8 of byte i / 8. Every reader here is safe on arbitrary bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#define TERSEGRAD_INLINE inline __attribute__((always_inline))

namespace tersegrad::bits {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are loaded and stored as they lie on the wire");

// The n low bits set, n in 0..64.
TERSEGRAD_INLINE constexpr std::uint64_t mask(unsigned n) { return n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1; }

// Appends bits to a buffer of fixed size and never writes outside it: what does not fit is dropped and `overflowed` says so.
// Always inlined, because kernels compile it for several instruction sets within one program.
class BitWriter {
   public:
    TERSEGRAD_INLINE BitWriter(std::uint8_t* out, std::size_t bytes) : begin_(out), at_(out), end_(out + bytes) {}

    // The n <= 56 low bits of `value`, whose other bits must be zero.
    TERSEGRAD_INLINE void put(std::uint64_t value, unsigned n) {
        word_ |= value << fill_;
        fill_ += n;
        if (end_ - at_ >= 8) [[likely]] {
            std::memcpy(at_, &word_, 8);
            at_ += fill_ >> 3;
            word_ >>= fill_ & 56;
            fill_ &= 7;
        } else {
            drain();
        }
    }

    // As put, for n <= 64.
    TERSEGRAD_INLINE void put_long(std::uint64_t value, unsigned n) {
        if (n > 32) {
            put(value & 0xffffffffu, 32);
            put(value >> 32, n - 32);
        } else {
            put(value, n);
        }
    }

    // Bits written so far.
    TERSEGRAD_INLINE std::size_t position() const { return static_cast<std::size_t>(at_ - begin_) * 8 + fill_; }

    // Writes the last partial byte, padded with zeros, and returns the number of bytes of the stream.
    TERSEGRAD_INLINE std::size_t finish() {
        fill_ = (fill_ + 7) & ~7u;
        drain();
        return static_cast<std::size_t>(at_ - begin_);
    }

    TERSEGRAD_INLINE bool overflowed() const { return overflowed_; }

   private:
    TERSEGRAD_INLINE void drain() {
        for (; fill_ >= 8; fill_ -= 8, word_ >>= 8) {
            if (at_ == end_) {
                overflowed_ = true;
                word_ = 0;
                fill_ &= 7;
                return;
            }
            *at_++ = static_cast<std::uint8_t>(word_);
        }
    }

    std::uint8_t *begin_, *at_, *end_;
    std::uint64_t word_ = 0;
    unsigned fill_ = 0;  // bits of word_ in use, 0..7 between calls
    bool overflowed_ = false;
};

// Reads bits from a buffer and never outside it: beyond the end it sees zeros, and `overrun` says so.
class BitReader {
   public:
    TERSEGRAD_INLINE BitReader(const std::uint8_t* data, std::size_t bytes, std::size_t position = 0)
        : data_(data), bytes_(bytes), position_(position) {}

    // The next bits, LSB-first; at least 57 of them are meant, the others are zero.
    TERSEGRAD_INLINE std::uint64_t peek() const {
        const std::size_t byte = position_ >> 3;
        std::uint64_t word = 0;
        if (byte + 8 <= bytes_) [[likely]]
            std::memcpy(&word, data_ + byte, 8);
        else
            for (std::size_t j = byte; j < bytes_; ++j) word |= std::uint64_t{data_[j]} << (8 * (j - byte));
        return word >> (position_ & 7);
    }

    TERSEGRAD_INLINE void skip(std::size_t n) { position_ += n; }

    // The next n <= 57 bits.
    TERSEGRAD_INLINE std::uint64_t get(unsigned n) {
        const std::uint64_t value = peek() & mask(n);
        position_ += n;
        return value;
    }

    // The next n <= 64 bits.
    TERSEGRAD_INLINE std::uint64_t get_long(unsigned n) {
        if (n <= 32) return get(n);
        const std::uint64_t low = get(32);
        return low | get(n - 32) << 32;
    }

    TERSEGRAD_INLINE std::size_t position() const { return position_; }
    TERSEGRAD_INLINE bool overrun() const { return position_ > bytes_ * 8; }

    // Whether the rest of the byte that the position lies in is zero, as a canonical stream ends.
    TERSEGRAD_INLINE bool clean_end() const {
        return !overrun() && ((position_ & 7) == 0 || data_[position_ >> 3] >> (position_ & 7) == 0);
    }

   private:
    const std::uint8_t* data_;
    std::size_t bytes_, position_;
};

// ---- fixed width: code i takes bits [i * width, (i + 1) * width) ----

constexpr std::size_t packed_bytes(std::size_t count, unsigned width) {
    return count / 8 * width + (count % 8 * width + 7) / 8;
}

// The low `width` bits of each code; width 1..8 from bytes, 9..16 from 32-bit integers. Sizes are exact: packed_bytes.
void pack(const std::uint8_t* codes, std::size_t count, unsigned width, std::uint8_t* out);
void pack(const std::int32_t* codes, std::size_t count, unsigned width, std::uint8_t* out);
void unpack(const std::uint8_t* data, std::size_t count, unsigned width, std::uint8_t* out);
void unpack(const std::uint8_t* data, std::size_t count, unsigned width, std::int32_t* out);

// ---- trits: five in a byte, base 3, the first the least significant ----

constexpr std::size_t trit_bytes(std::size_t count) { return count / 5 + (count % 5 != 0); }

bool pack_trits(const std::uint8_t* trits, std::size_t count, std::uint8_t* out);   // false: a value above 2
bool unpack_trits(const std::uint8_t* data, std::size_t count, std::uint8_t* out);  // false: not canonical; values are 0..2 even so

// ---- Elias codes of values >= 1, and Golomb-Rice codes of values >= 0 ----

enum class Elias : int { gamma = 0, delta = 1, omega = 2 };


// Bits of all codes together; -1 if a value is out of range.
std::int64_t elias_bits(const std::int64_t* values, std::size_t count, Elias code);

// Values must be in range and `bytes` = ceil(bits / 8); false if they were not.
bool elias_encode(const std::int64_t* values, std::size_t count, Elias code, std::uint8_t* out, std::size_t bytes);

// Bytes consumed, or -1 if the stream is truncated, holds a value above 2^63 - 1, or ends in a byte with non-zero padding.
std::int64_t elias_decode(const std::uint8_t* data, std::size_t bytes, std::size_t count, Elias code, std::int64_t* out);


// ---- one implementation a machine: what the dispatcher chooses between ----

struct Implementation {
    // The last argument: the output is larger than the cache, write around it.
    using Pack8 = void (*)(const std::uint8_t*, std::size_t, std::uint8_t*, bool);
    using Pack32 = void (*)(const std::int32_t*, std::size_t, std::uint8_t*, bool);
    using Unpack8 = void (*)(const std::uint8_t*, std::size_t, std::uint8_t*, bool);
    using Unpack32 = void (*)(const std::uint8_t*, std::size_t, std::int32_t*, bool);
    Pack8 pack8[9];       // by width, 1..8
    Pack32 pack32[17];    // by width, 9..16
    Unpack8 unpack8[9];
    Unpack32 unpack32[17];
    // False: a value above 2, or a byte above 242.
    bool (*pack_trits)(const std::uint8_t*, std::size_t, std::uint8_t*);
    bool (*unpack_trits)(const std::uint8_t*, std::size_t, std::uint8_t*);
    bool (*elias_encode)(const std::int64_t*, std::size_t, Elias, std::uint8_t*, std::size_t);
    std::int64_t (*elias_decode)(const std::uint8_t*, std::size_t, std::size_t, Elias, std::int64_t*);
    std::int64_t (*elias_bits)(const std::int64_t*, std::size_t, Elias);
};

extern const Implementation portable;
#if defined(__x86_64__)
extern const Implementation avx2, avx512;
#endif

}  // namespace tersegrad::bits
