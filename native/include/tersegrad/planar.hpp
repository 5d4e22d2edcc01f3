// Planar codes: all unary parts of a sequence as one bit stream (so many zeros, then a one), then all its low bits, each plane padded with
// zeros to a byte. The j-th one of the unary plane stands at the sum of the parts up to j, plus j: nothing has to be read in order.
// Wire format: spec, "Planar codes" and "Index sets".
#pragma once
#include <cstddef>
#include <cstdint>

namespace tersegrad::planar {

constexpr unsigned rice_limit = 32;  // quotients from here on are escaped
constexpr unsigned rice_max = 56;    // the largest parameter

// What decoders return instead of a number of bytes, which is never negative.
constexpr std::int64_t ended = -1, outside = -2, unpadded = -3;

// ---- Elias gamma codes of 1 .. 2^63 - 1 ----
// Bytes that the codes take, or -1 if a value is below 1.
std::int64_t gamma_bytes(const std::int64_t* values, std::size_t count);
// Into exactly gamma_bytes bytes.
void gamma_encode(const std::int64_t* values, std::size_t count, std::uint8_t* out);
// Bytes read, or one of the codes above.
std::int64_t gamma_decode(const std::uint8_t* data, std::size_t size, std::size_t count, std::int64_t* out);

// ---- Rice codes of 0 .. 2^63 - 1, parameter k in 0..rice_max; quotients from rice_limit on continue as gamma codes behind the planes ----
// Bits of all planes without padding, and bytes; -1 if a value is negative.
std::int64_t rice_bits(const std::int64_t* values, std::size_t count, unsigned k);
std::int64_t rice_bytes(const std::int64_t* values, std::size_t count, unsigned k);
int rice_best(const std::int64_t* values, std::size_t count);  // the smallest k with the fewest bits; -1 if a value is negative
// Bytes written, `outside` if a value is negative, `ended` if they are more than there is room for.
std::int64_t rice_encode(const std::int64_t* values, std::size_t count, unsigned k, std::uint8_t* out, std::size_t capacity);
std::int64_t rice_decode(const std::uint8_t* data, std::size_t size, std::size_t count, unsigned k, std::int64_t* out);

// ---- Golomb codes of the gaps between increasing indices ----
// A remainder below `few` takes `width` bits. The others take `width` bits as well, and one more in a plane of their own.
struct Golomb {
    std::uint64_t m, few;
    unsigned width;
    explicit Golomb(std::uint64_t divisor);  // throws std::invalid_argument unless it lies in [1, 2^56)
};
struct Sums {
    std::uint64_t unary = 0, last = 0;  // bits of the first and of the last plane
};
// Where a part of a set begins to write its planes: 0..7 bits into their first bytes. 8 bytes beyond the ends may be written.
struct Planes {
    std::uint8_t *unary, *rests, *last;
    unsigned unary_bit, rests_bit, last_bit;
};

struct RiceSums {
    std::uint64_t zeros = 0, escapes = 0, low = 0;  // bits: zeros of the unary plane, escaped values, low bits of theirs
};

// What the instruction sets provide; the same source, compiled with and without bit-manipulation instructions.
struct Table {
    // The gaps to indices[begin .. end), the first one to the index before it.
    Sums (*measure32)(const Golomb&, const std::int32_t*, std::size_t begin, std::size_t end);
    Sums (*measure64)(const Golomb&, const std::int64_t*, std::size_t begin, std::size_t end);
    // The bits that were written to the first and to the last plane.
    Sums (*write32)(const Golomb&, const std::int32_t*, std::size_t begin, std::size_t end, const Planes&);
    Sums (*write64)(const Golomb&, const std::int64_t*, std::size_t begin, std::size_t end, const Planes&);
    std::int64_t (*read32)(const Golomb&, const std::uint8_t*, std::size_t, std::size_t count, std::uint64_t n, std::int32_t*);
    std::int64_t (*read64)(const Golomb&, const std::uint8_t*, std::size_t, std::size_t count, std::uint64_t n, std::int64_t*);
    void (*gamma_encode)(const std::int64_t*, std::size_t, std::uint8_t*);
    std::int64_t (*gamma_decode)(const std::uint8_t*, std::size_t, std::size_t, std::int64_t*);
    bool (*rice_measure)(const std::int64_t*, std::size_t, unsigned, RiceSums&);
    std::int64_t (*rice_encode)(const std::int64_t*, std::size_t, unsigned, std::uint8_t*, std::size_t capacity);
    std::int64_t (*rice_decode)(const std::uint8_t*, std::size_t, std::size_t, unsigned, std::int64_t*);
};
const Table& table();
extern const Table table_portable, table_avx2, table_avx512;

}  // namespace tersegrad::planar
