// Scale classes: which rows, columns or blocks of 64 of a segment have large levels and which small ones, told in octaves, so that
// every coordinate is coded with the table of its class. Wire format: spec, "Scale classes".
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tersegrad::classes {

inline constexpr int kClasses = 16, kOctaves = 16;
inline constexpr std::size_t kBlock = 64;
// Levels are counted, all if there are fewer than kExact, else those of one block in kCounted.
inline constexpr std::size_t kExact = std::size_t{1} << 16, kCounted = 8;

// Where rows and columns are: numel, columns, group and phase of every piece, one after another. No pieces: no classes.
struct Rows {
    const std::int64_t* data = nullptr;
    std::size_t pieces = 0;
};

// Consecutive coordinates of one tensor: rows of `columns` coordinates, the first one from `phase` on; `group` neighbours share the
// scale of a column.
struct Region {
    std::size_t count, columns, group, phase;
    std::size_t rows() const { return (phase + count + columns - 1) / columns; }
};
std::vector<Region> cut(const Rows&, std::size_t start, std::size_t stop);

// Classes that are worth telling.
struct Chosen {
    std::vector<std::uint8_t> bytes;    // what the decoder reads
    unsigned mask = 0;                  // which classes have a table
    std::vector<std::uint64_t> counts;  // of their 2 * window + 1 symbols
    double bits = 0;                    // that the levels are about to take
    // Adds `by` for each symbol that is counted: those of n levels, stored with `first` added.
    void count(const std::uint8_t* levels, const std::uint8_t* contexts, std::size_t n, int first, int alphabet, int by);
};
// Levels of at most +-window, stored with `center` added. False: one table serves as well. Else contexts[i] is the class of level i.
bool choose(const std::uint8_t* levels, std::size_t n, int center, int window, const std::vector<Region>&, std::uint8_t* contexts, Chosen&);

// log2(a / b) to the nearest integer, nearly. Both are below 2^45.
int log2_near(std::uint64_t a, std::uint64_t b);
// Bits of symbols with these counts, each table's by its own.
double entropy(const std::uint64_t* counts, std::size_t tables, std::size_t alphabet);

// The tables of all coordinates from the bytes of `choose`, and the number of tables; returns the bytes read, or rans::kBad.
std::size_t read(const std::uint8_t* data, std::size_t size, const std::vector<Region>&, std::uint8_t* contexts, int& tables);

// ---- between the files of this topic ----
// What sums of blocks add up to, and the least and the largest; of none: 0, 1 and 0.
struct Extent {
    std::uint64_t total = 0;
    std::uint16_t least = 1, most = 0;
};
// How many they are, and what they add up to.
struct From {
    std::uint64_t number = 0, total = 0;
};
namespace detail {
struct Implementation {
    // Sum of |level - center|.
    std::uint64_t (*sum)(const std::uint8_t* levels, std::size_t n, int center);
    // The same of whole blocks of kBlock levels, one after another.
    void (*block_sums)(const std::uint8_t* levels, std::size_t blocks, int center, std::uint16_t* sums);
    // sums[j] += |levels[j] - center|
    void (*add)(const std::uint8_t* levels, std::size_t n, int center, std::uint16_t* sums);
    // tops[j] = max(tops[j], |levels[j] - center|)
    void (*raise)(const std::uint8_t* levels, std::size_t n, int center, std::uint8_t* tops);
    // Of sums of blocks, each below 2^15.
    Extent (*extent)(const std::uint16_t* sums, std::size_t n);
    // Of those that are not below `least`.
    From (*from)(const std::uint16_t* sums, std::size_t n, std::uint16_t least);
};
extern const Implementation portable;
#if defined(__x86_64__)
extern const Implementation avx2, avx512;
#endif
}  // namespace detail
}  // namespace tersegrad::classes
