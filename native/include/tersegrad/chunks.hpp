// Exactly k of every chunk of a vector: choosing them, coding which they are, putting values back (spec/wire.md, "Chunk sets").
//
// A region is a part of the vector, rows x cols in row-major order, that is cut into tiles of height x width: the chunks. All chunks of
// a region keep the same number of coordinates. A place is a position within a chunk, row-major; the places of a chunk increase.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tersegrad::chunks {

constexpr std::size_t largest_chunk = 65536, most_kept = 256;  // more than that only where a chunk is sent whole

struct Region {
    std::size_t start, rows, cols, height, width, kept;

    std::size_t numel() const { return rows * cols; }
    std::size_t size() const { return height * width; }  // of a chunk
    std::size_t count() const { return (rows / height) * (cols / width); }
    std::size_t places() const { return count() * kept; }
    std::size_t offset(std::size_t chunk) const {
        const std::size_t across = cols / width;
        return start + chunk / across * height * cols + chunk % across * width;
    }
};

// The `kept` coordinates of largest key (select.hpp) of every chunk, ties to the lowest place, zeros too. False: one is NaN or Inf.
bool choose(const float* x, const std::vector<Region>& regions, std::int32_t* places, float* values);

// The same of sum = x + decay * carry, rounded after each operation. False: the sum is not complete.
bool carry_and_choose(const float* x, const float* carry, float decay, float* sum, const std::vector<Region>& regions, std::int32_t* places,
                      float* values);

// Bytes that no encoder exceeds.
std::size_t capacity(const std::vector<Region>& regions);

// Throws std::invalid_argument unless places increase within their chunks. Bytes written.
std::size_t encode(const std::int32_t* places, const std::vector<Region>& regions, std::uint8_t* out);

// All of `data`; throws std::invalid_argument where it is no code.
void decode(const std::uint8_t* data, std::size_t size, const std::vector<Region>& regions, std::int32_t* places);

// out = values at their places, 0 elsewhere; or out += weight * values. Throws std::invalid_argument where a place lies outside its chunk.
void scatter(const std::int32_t* places, const float* values, const std::vector<Region>& regions, float* out);
void scatter_add(const std::int32_t* places, const float* values, const std::vector<Region>& regions, float weight, float* out);

// Which bin each value falls into, and what stands for each bin of each tensor (spec/wire.md, "chunk_top_k"); counts of values per bin.
void to_bins(const float* values, const std::int64_t* counts, std::size_t tensors, std::size_t bins, std::uint8_t* chosen, float* stands,
             std::int64_t* filled);

// ---- what the instruction sets provide ----------------------------------------------------------------------------------------

// Which coordinates of some tiles of rows x width, side by side, rows `stride` apart, have keys of at least a threshold: appended to what was
// found in a tile before, as place and value. A tile in which more than `most` were found is looked at no further. It has `room` places for
// candidates, 16 more than there can be.
struct Scan {
    std::size_t rows, stride, width, tiles;
    const std::uint32_t* thresholds;
    std::size_t most;
    std::int32_t* indices;
    float* values;
    std::size_t room;
    std::size_t* counts;
};

struct Loops {
    // Writes the largest key of the coordinates i, i + groups, i + 2 groups, ... for each i < groups, a multiple of 64; what is left over
    // after the last whole row is not looked at.
    void (*maxima)(const float* x, std::size_t n, std::size_t groups, std::uint32_t* maxima);
    // A threshold that exactly k of the keys reach, or the k-th largest key. All reach `low`, none exceeds `top`, and n >= k.
    std::uint32_t (*kth)(const std::uint32_t* keys, std::size_t n, std::size_t k, std::uint32_t low, std::uint32_t top);
    // The k candidates with keys above the threshold, or with this key, of which there are `ties` to be taken, the first ones.
    void (*pick)(const std::int32_t* indices, const float* candidates, const std::uint32_t* keys, std::size_t n, std::uint32_t threshold, std::size_t k,
                 std::size_t ties, std::int32_t* places, float* values);
    // sum = x + decay * carry, rounded after each operation.
    void (*add)(const float* x, const float* carry, float decay, float* sum, std::size_t n);
    // The same for what `of` is about, and its candidates. `around`: the sum may be stored around the caches.
    void (*add_and_scan)(const float* x, const float* carry, float decay, float* sum, bool around, const Scan& of);
};
extern const Loops loops_portable, loops_avx2, loops_avx512;

}  // namespace tersegrad::chunks
