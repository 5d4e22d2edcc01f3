// Sparse vectors: choosing coordinates, coding index sets, putting values back, and permutations from a key.
//
// The magnitude order is that of key(x), the bit pattern of |x|: an integer, total, the same on every machine. Zeros have key 0
// and are never chosen; NaN and Inf have keys from 0x7f800000 and are always chosen first. Ties go to the lowest index, so that
// the set of the k largest is unique. Indices are int32 or int64 (template I), strictly increasing unless said otherwise.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

namespace tersegrad::select {

constexpr std::uint32_t infinite_key = 0x7f800000u;

inline std::uint32_t key(float x) { return std::bit_cast<std::uint32_t>(x) & 0x7fffffffu; }

bool all_finite(const float* x, std::size_t n);

// The key of the ceil(k * s / n)-th largest of s sampled coordinates, between 1 and infinite_key: an estimate of the k-th largest.
std::uint32_t sample_key(const float* x, std::size_t n, std::size_t k);

// Coordinates with key(x) >= threshold, the first `limit` of them in index order; returns how many there are in all.
template <class I>
std::size_t compact(const float* x, std::size_t n, std::uint32_t threshold, std::size_t limit, I* indices, float* values);

// The k largest non-zero coordinates in index order; returns how many (fewer than k where the rest is zero).
template <class I>
std::size_t top_k(const float* x, std::size_t n, std::size_t k, I* indices, float* values);

// out = 0 except out[indices[j]] = values[j]. Throws std::invalid_argument unless indices increase strictly within [0, n).
template <class I>
void scatter(const I* indices, const float* values, std::size_t count, float* out, std::size_t n);

// out[indices[j]] += weight * values[j], rounded after the product and after the sum. Indices distinct and within [0, n).
template <class I>
void scatter_add(const I* indices, const float* values, std::size_t count, float weight, float* out, std::size_t n);

// ---- index sets -------------------------------------------------------------------------------------------------------------

// Whether indices increase strictly within [0, n).
template <class I>
bool increasing(const I* indices, std::size_t count, std::uint64_t n);

// The numbers of [0, n) that are not in the set; out has room for n - count.
template <class I>
void complement(const I* indices, std::size_t count, std::uint64_t n, I* out);

// Encoders throw std::invalid_argument unless indices increase strictly.
//
// Planar Golomb code of the gaps with divisor m (planar.hpp). Bytes written, or throws std::invalid_argument where `capacity` is too small.
template <class I>
std::size_t golomb_encode(const I* indices, std::size_t count, std::uint64_t m, std::uint8_t* out, std::size_t capacity);

// Bytes that golomb_encode would write.
template <class I>
std::size_t golomb_size(const I* indices, std::size_t count, std::uint64_t m);

// Bytes read; throws std::invalid_argument on bytes that end early or leave [0, n).
template <class I>
std::size_t golomb_decode(const std::uint8_t* data, std::size_t size, std::size_t count, std::uint64_t n, std::uint64_t m, I* indices);

// Arithmetic code of the gaps' binary digits, whose first byte is below 250; for short sets. Returns and errors as above.
template <class I>
std::size_t digits_encode(const I* indices, std::size_t count, std::uint64_t n, std::uint8_t* out, std::size_t capacity);
template <class I>
std::size_t digits_decode(const std::uint8_t* data, std::size_t size, std::size_t count, std::uint64_t n, I* indices);

// One bit per number, least significant first. The decoder wants exactly `count` ones and zero padding.
template <class I>
void bitmap_encode(const I* indices, std::size_t count, std::uint64_t n, std::uint8_t* out);
template <class I>
void bitmap_decode(const std::uint8_t* data, std::size_t size, std::size_t count, std::uint64_t n, I* indices);

// Gap classes: class 0 for g = 0; 2e - 1 and 2e for the lower and upper half of g + 1 in [2^e, 2^(e+1)), with e - 1 further bits.
template <class I>
void gap_classes(const I* indices, std::size_t count, std::uint8_t* classes);
// How many gaps each of the 128 classes has; throws std::invalid_argument unless indices increase strictly within [0, n).
template <class I>
void gap_histogram(const I* indices, std::size_t count, std::uint64_t n, std::uint64_t* histogram);
// The further bits of all gaps, one after another; bytes written.
template <class I>
std::size_t gap_rests_encode(const I* indices, std::size_t count, std::uint8_t* out, std::size_t capacity);
template <class I>
std::size_t gap_rests_decode(const std::uint8_t* data, std::size_t size, const std::uint8_t* classes, std::size_t count,
                             std::uint64_t n, I* indices);

// ---- permutations -----------------------------------------------------------------------------------------------------------

constexpr int rounds = 6;

// A permutation of [0, n): a Feistel network on the smallest even-or-odd number of bits that holds n, walked until it lands
// below n, then turned by `rotation` < n.
struct Permutation {
    std::uint32_t keys[rounds];
    std::uint64_t rotation, n;
};

// The images of 0 .. k-1 (k <= n), in that order.
template <class I>
void permuted_indices(const Permutation& p, std::size_t k, I* indices);
// values[j] = x[image of j].
void permuted_gather(const Permutation& p, const float* x, std::size_t k, float* values);
// out[image of j] = values[j] or += weight * values[j].
void permuted_scatter(const Permutation& p, const float* values, std::size_t k, float* out);
void permuted_scatter_add(const Permutation& p, const float* values, std::size_t k, float weight, float* out);

// ---- what the instruction sets provide ----------------------------------------------------------------------------------------

struct Table {
    // Appends coordinates with key >= threshold, as base + position and value; both outputs have room for n + 16. Returns how many.
    std::size_t (*scan)(const float* x, std::size_t n, std::uint32_t threshold, std::int32_t base, std::int32_t* indices, float* values);
    // Keeps candidates with key > threshold, and the first `ties` with key == threshold (less what was used on return). Outputs
    // may be the inputs.
    std::size_t (*filter)(const std::int32_t* indices, const float* values, std::size_t n, std::uint32_t threshold, std::size_t* ties,
                          std::int32_t* out_indices, float* out_values);
    bool (*finite)(const float* x, std::size_t n);
    // One pass through the Feistel network for n values held as (left, right) halves.
    void (*feistel)(const std::uint32_t* keys, int left_bits, int right_bits, std::uint32_t* left, std::uint32_t* right, std::size_t n);
};

const Table& table();
extern const Table table_portable, table_avx2, table_avx512;

}  // namespace tersegrad::select
