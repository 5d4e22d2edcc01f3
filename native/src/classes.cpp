// Choosing scale classes, and reading them.
#include "tersegrad/classes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "classes_loops.hpp"
#include "tersegrad/rans.hpp"
#include "tersegrad/runtime.hpp"

namespace tersegrad::classes {
namespace detail {
const Implementation portable = {sum_plain, block_sums_plain, add_plain, raise_plain, extent_plain, from_plain};
}
int log2_near(std::uint64_t a, std::uint64_t b) {
    a *= 92682;
    b <<= 16;
    const int e = static_cast<int>(std::bit_width(a)) - static_cast<int>(std::bit_width(b));
    return e - ((e < 0 ? a << -e : a) < (e > 0 ? b << e : b));
}

namespace {

using rans::kBad;

enum Mode : std::uint8_t { one = 0, rows_only = 1, grid = 2, blocks = 3 };
constexpr int kMiddle = 8, kMean = 16, kTopBase = 31;  // octaves and bases that stand for the mean of the region, and for one
constexpr std::size_t kShortest = 512, kFewRows = 4;
constexpr int kSideChunk = 14;
constexpr double kWorthCounting = 0.98, kWorthColumns = 0.97, kWorthSending = 0.99;

const detail::Implementation& ops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return detail::avx512;
    if (isa() == Isa::avx2) return detail::avx2;
#endif
    return detail::portable;
}

// About the bits of `count` levels with that sum of magnitudes: those of a discrete Laplace distribution.
double bits_of(std::uint64_t count, std::uint64_t total) {
    if (!count || !total) return 0;
    const double n = static_cast<double>(count), m = static_cast<double>(total) / n, root = std::sqrt(1 + m * m);
    return n * (std::log2(root + m) + m * std::log2((root + 1) / m));
}

// How many rows or blocks, and how many columns, tell their scale.
struct Numbers {
    std::size_t rows, columns;
};
Numbers numbers(const Region& r, int mode) {
    if (mode == blocks) return {(r.count + kBlock - 1) / kBlock, 0};
    return {mode ? r.rows() : 0, mode == grid ? r.columns / r.group : 0};
}

// Calls body(row, begin, column, length) for all rows of a region.
template <class Body>
void each_row(const Region& r, Body&& body) {
    std::size_t row = 0, column = r.phase;
    for (std::size_t begin = 0; begin < r.count; ++row) {
        const std::size_t length = std::min(r.columns - column, r.count - begin);
        body(row, begin, column, length);
        begin += length;
        column = 0;
    }
}

int class_of(int base, int row, int column) {
    return base && row && column ? std::clamp(base - kMean + row + column - kMiddle, 1, kClasses - 1) : 0;
}

// The classes of a whole row.
void make_line(const Region& r, int base, int row, const std::uint8_t* columns, std::vector<std::uint8_t>& line) {
    std::uint8_t table[kOctaves];
    for (int o = 0; o < kOctaves; ++o) table[o] = static_cast<std::uint8_t>(class_of(base, row, o));
    line.resize(r.columns);
    if (r.group == 1)
        for (std::size_t j = 0; j < r.columns; ++j) line[j] = table[columns[j]];
    else
        for (std::size_t g = 0; g * r.group < r.columns; ++g) std::memset(line.data() + g * r.group, table[columns[g]], r.group);
}

// Calls body(begin, length, classes, row, column) for stretches of a region, in order. Either `classes` holds `length` classes, from `column`
// on, of a row whose octave is `row`; or it is null, and `row` is the class of them all.
template <class Body>
void each_stretch(const Region& r, int mode, int base, const std::uint8_t* octaves, Body&& body) {
    if (mode == one) return body(0, r.count, nullptr, class_of(base, kMiddle, kMiddle), std::size_t{0});
    if (mode == blocks) {
        for (std::size_t b = 0; b * kBlock < r.count; ++b)
            body(b * kBlock, std::min(kBlock, r.count - b * kBlock), nullptr, class_of(base, octaves[b], kMiddle), std::size_t{0});
        return;
    }
    if (mode == rows_only) {
        each_row(r, [&](std::size_t row, std::size_t begin, std::size_t, std::size_t length) {
            body(begin, length, nullptr, class_of(base, octaves[row], kMiddle), std::size_t{0});
        });
        return;
    }
    const std::uint8_t* const columns = octaves + r.rows();
    std::array<std::vector<std::uint8_t>, kOctaves> made;
    each_row(r, [&](std::size_t row, std::size_t begin, std::size_t column, std::size_t length) {
        std::vector<std::uint8_t>& line = made[octaves[row]];
        if (line.empty()) make_line(r, base, octaves[row], columns, line);
        body(begin, length, line.data() + column, octaves[row], column);
    });
}

// What a segment says about scales.
struct Scales {
    std::vector<std::uint8_t> fields;   // mode << 5 | base, one a region
    std::vector<std::uint8_t> octaves;  // of rows or blocks, then of columns, region after region
    std::vector<std::uint8_t> columns;  // 1 where an octave is a column's
};

// Scales of the rows, columns or blocks of a region, and what they hold together.
struct Axis {
    std::vector<std::uint8_t> octaves;
    std::uint64_t numbers[kOctaves] = {}, counts[kOctaves] = {}, totals[kOctaves] = {};  // of them, their coordinates and magnitudes, by octave
    double side = 0;

    void tell(std::uint64_t sum, std::uint64_t length, std::uint64_t n, std::uint64_t total) {
        octaves.push_back(static_cast<std::uint8_t>(octave_of(sum, length, n, total)));
        hold(octaves.back(), 1, length, sum);
    }
    static int octave_of(std::uint64_t sum, std::uint64_t length, std::uint64_t n, std::uint64_t total) {
        return sum ? std::clamp(kMiddle + log2_near(sum * n, total * length), 1, kOctaves - 1) : 0;
    }
    // Adds up `number` rows, columns or blocks of one octave: their coordinates and magnitudes.
    void hold(int octave, std::uint64_t number, std::uint64_t length, std::uint64_t sum) {
        numbers[octave] += number;
        counts[octave] += length;
        totals[octave] += sum;
    }
    void finish() {
        std::uint64_t every = 0;
        for (const std::uint64_t c : numbers) every += c;
        const auto all = static_cast<double>(every);
        for (const std::uint64_t c : numbers)
            if (c) side += 4.0 + static_cast<double>(c) * std::log2(all / static_cast<double>(c));
    }
    double cost() const {
        double bits = 0;
        for (int o = 0; o < kOctaves; ++o) bits += bits_of(counts[o], totals[o]);
        return side + bits;
    }
    // The cost of both together, as if they were independent.
    double crossed(const Axis& other, std::uint64_t n, std::uint64_t total) const {
        double bits = 0;
        for (int a = 0; a < kOctaves; ++a)
            for (int b = 0; b < kOctaves; ++b) bits += bits_of(counts[a] * other.counts[b] / n, totals[a] * other.totals[b] / total);
        return side + other.side + bits;
    }
};

// Finds the scales of one region; returns the bits that its levels are estimated to take.
class Describer {
public:
    Describer(const std::uint8_t* levels, int center) : levels_(levels), center_(center) {}

    double describe(const Region& r, std::size_t start, std::uint64_t& magnitude, Scales& scales) {
        const std::uint8_t* const levels = levels_ + start;
        const bool whole = r.count <= kBlock, by_rows = !whole && r.rows() >= kFewRows;
        const std::uint64_t total = whole ? ops().sum(levels, r.count, center_) : by_rows ? measure_rows(r, levels) : measure_blocks(r, levels);
        magnitude += total;
        if (!total) {
            scales.fields.push_back(0);
            return 0;
        }
        const int base = std::clamp(kMean + log2_near(total, r.count), 1, kTopBase);
        double best = bits_of(r.count, total);
        Mode mode = one;
        Axis rows, columns;
        if (!whole) {
            if (by_rows) tell_rows(r, total, rows);
            else tell_blocks(r, total, rows);
            const double cost = rows.cost();
            if (cost < best) best = cost, mode = by_rows ? rows_only : blocks;
        }
        if (by_rows) {
            tell_columns(r, total, columns);
            const double cost = rows.crossed(columns, r.count, total);
            if (cost < kWorthColumns * best) best = cost, mode = grid;
        }
        scales.fields.push_back(static_cast<std::uint8_t>(mode << 5 | base));
        if (mode == blocks) name_blocks(rows);
        if (mode != one) append(scales, rows.octaves, 0);
        if (mode == grid) append(scales, columns.octaves, 1);
        return best;
    }

private:
    static void append(Scales& scales, const std::vector<std::uint8_t>& octaves, std::uint8_t column) {
        scales.octaves.insert(scales.octaves.end(), octaves.begin(), octaves.end());
        scales.columns.insert(scales.columns.end(), octaves.size(), column);
    }

    // Each of these returns the sum of all.
    std::uint64_t measure_rows(const Region& r, const std::uint8_t* levels) {
        sums_.clear();
        narrow_.assign(r.columns, 0);
        column_sums_.assign(r.columns, 0);
        int held = 0;
        each_row(r, [&](std::size_t, std::size_t begin, std::size_t column, std::size_t length) {
            sums_.push_back(ops().sum(levels + begin, length, center_));
            ops().add(levels + begin, length, center_, narrow_.data() + column);
            if (++held == 256) drain(), held = 0;
        });
        drain();
        return std::accumulate(sums_.begin(), sums_.end(), std::uint64_t{0});
    }
    void drain() {
        for (std::size_t j = 0; j < narrow_.size(); ++j) column_sums_[j] += narrow_[j];
        std::fill(narrow_.begin(), narrow_.end(), std::uint16_t{0});
    }
    std::uint64_t measure_blocks(const Region& r, const std::uint8_t* levels) {
        block_sums_.resize(r.count / kBlock);
        ops().block_sums(levels, block_sums_.size(), center_, block_sums_.data());
        rest_ = ops().sum(levels + block_sums_.size() * kBlock, r.count % kBlock, center_);
        extent_ = ops().extent(block_sums_.data(), block_sums_.size());
        return extent_.total + rest_;
    }

    void tell_rows(const Region& r, std::uint64_t total, Axis& rows) const {
        each_row(r, [&](std::size_t row, std::size_t, std::size_t, std::size_t length) { rows.tell(sums_[row], length, r.count, total); });
        rows.finish();
    }
    // A larger sum has no smaller octave: so the blocks of an octave are those from one sum on, less those from the next octave's on. The
    // octaves of whole blocks are named only if they are sent, by name_blocks.
    void tell_blocks(const Region& r, std::uint64_t total, Axis& blocks) {
        const auto octave_of = [&](std::uint32_t sum) { return Axis::octave_of(sum, kBlock, r.count, total); };
        first_sums_.fill(extent_.most + 1u);
        std::uint32_t at = extent_.least;
        From now{block_sums_.size(), extent_.total};
        while (at <= extent_.most) {
            const int octave = octave_of(at);
            std::uint32_t next = extent_.most + 1u;  // the first sum of a higher octave
            for (std::uint32_t low = at; low + 1 < next;) {
                const std::uint32_t middle = (low + next) / 2;
                (octave_of(middle) > octave ? next : low) = middle;
            }
            const From later = next > extent_.most ? From{} : ops().from(block_sums_.data(), block_sums_.size(), static_cast<std::uint16_t>(next));
            first_sums_[static_cast<std::size_t>(octave)] = at;
            blocks.hold(octave, now.number - later.number, kBlock * (now.number - later.number), now.total - later.total);
            now = later;
            at = next;
        }
        if (r.count % kBlock) blocks.tell(rest_, r.count % kBlock, r.count, total);
        blocks.finish();
    }
    void name_blocks(Axis& blocks) const {
        std::vector<std::uint8_t> by_sum(extent_.most + 1u), whole(block_sums_.size());
        for (std::size_t octave = 0; octave < kOctaves; ++octave)
            if (first_sums_[octave] <= extent_.most)
                std::fill(by_sum.begin() + first_sums_[octave], by_sum.end(), static_cast<std::uint8_t>(octave));
        std::transform(block_sums_.begin(), block_sums_.end(), whole.begin(), [&](std::uint16_t s) { return by_sum[s]; });
        blocks.octaves.insert(blocks.octaves.begin(), whole.begin(), whole.end());
    }

    void tell_columns(const Region& r, std::uint64_t total, Axis& columns) const {
        // Column j lies in every row but the first where the first starts after it, and the last where that ends before it.
        const std::size_t rows = r.rows(), end = r.phase + r.count - (rows - 1) * r.columns;
        for (std::size_t at = 0; at < r.columns; at += r.group) {
            std::uint64_t sum = 0, length = 0;
            for (std::size_t j = at; j < at + r.group; ++j) sum += column_sums_[j], length += rows - (j < r.phase) - (j >= end);
            columns.tell(sum, length, r.count, total);
        }
        columns.finish();
    }

    const std::uint8_t* levels_;
    int center_;
    std::vector<std::uint64_t> sums_, column_sums_;
    std::vector<std::uint16_t> narrow_, block_sums_;
    Extent extent_;                                       // of block_sums_
    std::array<std::uint32_t, kOctaves> first_sums_ = {};  // of blocks of that octave; beyond the largest where there are none
    std::uint64_t rest_ = 0;                              // of a last block that is not whole
};

// Classes to numbers of tables.
using Names = std::array<std::uint8_t, kClasses>;
Names numbered(unsigned mask) {
    Names names{};
    for (unsigned c = 0; c < kClasses; ++c) names[c] = static_cast<std::uint8_t>(std::popcount(mask & ((1u << c) - 1)));
    return names;
}

// The class of every coordinate, by its name; returns which classes occur.
unsigned fill_classes(const std::vector<Region>& regions, const Scales& scales, const Names& names, std::uint8_t* contexts) {
    bool seen[kClasses] = {};
    const std::uint8_t* octaves = scales.octaves.data();
    for (std::size_t k = 0; k < regions.size(); ++k) {
        const Region& r = regions[k];
        const int mode = scales.fields[k] >> 5, base = scales.fields[k] & 31;
        std::array<std::vector<std::uint8_t>, kOctaves> lines;  // whole rows, by octave
        each_stretch(r, mode, base, octaves, [&](std::size_t begin, std::size_t length, const std::uint8_t* classes, int row, std::size_t column) {
            if (!classes) {
                std::memset(contexts + begin, names[static_cast<std::size_t>(row)], length);
                seen[row] = true;
                return;
            }
            std::vector<std::uint8_t>& line = lines[static_cast<std::size_t>(row)];
            if (line.empty()) {
                for (std::size_t j = 0; j < length; ++j) {
                    seen[classes[j]] = true;
                    contexts[begin + j] = names[classes[j]];
                }
                if (length == r.columns) line.assign(contexts + begin, contexts + begin + length);
            } else {
                std::memcpy(contexts + begin, line.data() + column, length);
            }
        });
        const Numbers number = numbers(r, mode);
        octaves += number.rows + number.columns;
        contexts += r.count;
    }
    unsigned mask = 0;
    for (int c = 0; c < kClasses; ++c) mask |= static_cast<unsigned>(seen[c]) << c;
    return mask;
}

// The largest magnitude in each class.
void find_tops(const std::uint8_t* levels, int center, const std::vector<Region>& regions, const Scales& scales, std::uint8_t* tops) {
    const std::uint8_t* octaves = scales.octaves.data();
    for (std::size_t k = 0; k < regions.size(); ++k) {
        const Region& r = regions[k];
        const int mode = scales.fields[k] >> 5, base = scales.fields[k] & 31;
        const Numbers number = numbers(r, mode);
        std::array<std::vector<std::uint8_t>, kOctaves> highest;  // of every column, by the octave of the row
        each_stretch(r, mode, base, octaves, [&](std::size_t begin, std::size_t length, const std::uint8_t* classes, int row, std::size_t column) {
            if (classes) {
                std::vector<std::uint8_t>& line = highest[static_cast<std::size_t>(row)];
                if (line.empty()) line.resize(r.columns);
                return ops().raise(levels + begin, length, center, line.data() + column);
            }
            std::uint8_t held[kBlock] = {};
            for (std::size_t at = 0; at < length; at += kBlock) ops().raise(levels + begin + at, std::min(kBlock, length - at), center, held);
            tops[row] = std::max(tops[row], *std::max_element(held, held + kBlock));
        });
        for (int row = 0; row < kOctaves; ++row) {
            const std::vector<std::uint8_t>& line = highest[static_cast<std::size_t>(row)];
            std::uint8_t top[kOctaves] = {};  // by the octave of the column
            for (std::size_t j = 0; j < line.size(); ++j) {
                std::uint8_t& held = top[octaves[number.rows + j / r.group]];
                held = std::max(held, line[j]);
            }
            for (int o = 0; o < kOctaves && !line.empty(); ++o) {
                std::uint8_t& held = tops[class_of(base, row, o)];
                held = std::max(held, top[o]);
            }
        }
        octaves += number.rows + number.columns;
        levels += r.count;
    }
}

}  // namespace

double entropy(const std::uint64_t* counts, std::size_t tables, std::size_t alphabet) {
    double bits = 0;
    for (std::size_t c = 0; c < tables; ++c) {
        std::uint64_t total = 0;
        for (std::size_t s = 0; s < alphabet; ++s) total += counts[c * alphabet + s];
        for (std::size_t s = 0; s < alphabet; ++s)
            if (const std::uint64_t v = counts[c * alphabet + s])
                bits += static_cast<double>(v) * std::log2(static_cast<double>(total) / static_cast<double>(v));
    }
    return bits;
}

std::vector<Region> cut(const Rows& rows, std::size_t start, std::size_t stop) {
    std::vector<Region> regions;
    std::size_t at = 0;
    for (std::size_t k = 0; k < rows.pieces && at < stop; ++k) {
        const auto field = [&](std::size_t j) { return static_cast<std::size_t>(rows.data[4 * k + j]); };
        const std::size_t begin = std::max(start, at), end = std::min(stop, at + field(0));
        if (begin < end) regions.push_back({end - begin, field(1), field(2), (field(3) + begin - at) % field(1)});
        at += field(0);
    }
    return regions;
}

bool choose(const std::uint8_t* levels, std::size_t n, int center, int window, const std::vector<Region>& regions, std::uint8_t* contexts,
            Chosen& chosen) {
    if (n < kShortest || regions.empty()) return false;
    Scales scales;
    Describer describer(levels, center);
    double cost = 0;
    std::uint64_t magnitude = 0;
    std::size_t at = 0;
    for (const Region& r : regions) {
        cost += describer.describe(r, at, magnitude, scales) + 8;
        at += r.count;
    }
    if (cost >= kWorthCounting * bits_of(n, magnitude)) return false;
    const unsigned mask = fill_classes(regions, scales, numbered(~0u), contexts);
    const auto alphabet = static_cast<std::size_t>(2 * window + 1), first = static_cast<std::size_t>(center - window);
    const bool sampled = n >= kExact;
    // Four counters of each kind, so that equal neighbours do not wait for each other.
    const std::size_t width = std::bit_ceil(first + alphabet), cells = kClasses * width;
    std::vector<std::uint32_t> counters(4 * cells);
    const int shift = std::countr_zero(width);
    std::uint64_t taken = 0;
    for (std::size_t i = 0; i < n; i += kBlock * (sampled ? kCounted : 1)) {
        const std::size_t end = std::min(n, i + kBlock);
        std::size_t j = i;
        for (; j + 8 <= end; j += 8) {
            std::uint64_t c, v;
            std::memcpy(&c, contexts + j, 8);
            std::memcpy(&v, levels + j, 8);
            for (int k = 0; k < 8; ++k) ++counters[static_cast<std::size_t>(k & 3) * cells + ((c >> 8 * k & 255) << shift | (v >> 8 * k & 255))];
        }
        for (; j < end; ++j) ++counters[static_cast<std::size_t>(contexts[j]) << shift | levels[j]];
        taken += end - i;
    }
    chosen.mask = mask;
    chosen.counts.clear();
    for (std::size_t c = 0; c < kClasses; ++c)
        for (std::size_t s = first; (mask >> c & 1) && s < first + alphabet; ++s) {
            const std::uint32_t* at = counters.data() + (c << shift | s);
            chosen.counts.push_back(std::uint64_t{at[0]} + at[cells] + at[2 * cells] + at[3 * cells]);
        }
    std::vector<std::uint64_t> together(alphabet);
    for (std::size_t k = 0; k < chosen.counts.size(); ++k) together[k % alphabet] += chosen.counts[k];
    const double share = static_cast<double>(n) / static_cast<double>(taken);
    const double alone = share * entropy(together.data(), 1, alphabet);
    const int tables = std::popcount(mask);
    const double apart = share * entropy(chosen.counts.data(), static_cast<std::size_t>(tables), alphabet);
    chosen.bits = apart;
    if (sampled) {
        std::uint8_t tops[kClasses] = {};
        find_tops(levels, center, regions, scales, tops);
        std::uint64_t* row = chosen.counts.data();
        for (int c = 0; c < kClasses; ++c)
            if (mask >> c & 1) {
                for (int s = window - tops[c]; s <= window + tops[c]; ++s) ++row[s];
                row += alphabet;
            }
    }
    std::vector<std::uint8_t>& bytes = chosen.bytes;
    bytes = {static_cast<std::uint8_t>(mask), static_cast<std::uint8_t>(mask >> 8)};
    bytes.insert(bytes.end(), scales.fields.begin(), scales.fields.end());
    const std::size_t head = bytes.size(), count = scales.octaves.size();
    bytes.resize(head + rans::max_message(count, kOctaves));
    bytes.resize(head + rans::encode_message(scales.octaves.data(), count, kOctaves, {scales.columns.data(), false}, 2, false, kSideChunk, bytes.data() + head));
    const std::size_t size = bytes.size() + rans::write_tables(chosen.counts.data(), static_cast<int>(alphabet), tables).size();
    return apart + 8 * static_cast<double>(size) < kWorthSending * alone;
}

void Chosen::count(const std::uint8_t* levels, const std::uint8_t* contexts, std::size_t n, int first, int alphabet, int by) {
    std::uint64_t* rows[kClasses] = {};
    std::uint64_t* row = counts.data();
    for (int c = 0; c < kClasses; ++c)
        if (mask >> c & 1) {
            rows[c] = row;
            row += alphabet;
        }
    for (std::size_t i = 0; i < n; i += kBlock * (n >= kExact ? kCounted : 1))
        for (std::size_t j = i; j < std::min(n, i + kBlock); ++j) rows[contexts[j]][levels[j] - first] += static_cast<std::uint64_t>(static_cast<std::int64_t>(by));
}

std::size_t read(const std::uint8_t* data, std::size_t size, const std::vector<Region>& regions, std::uint8_t* contexts, int& tables) {
    const std::size_t head = 2 + regions.size();
    if (size < head) return kBad;
    const unsigned mask = data[0] | static_cast<unsigned>(data[1]) << 8;
    Scales scales;
    scales.fields.assign(data + 2, data + head);
    for (std::size_t k = 0; k < regions.size(); ++k) {
        const Region& r = regions[k];
        const int mode = scales.fields[k] >> 5, base = scales.fields[k] & 31;
        if (mode > blocks || (!base && mode != one) || (mode == grid && r.count < r.columns)) return kBad;
        const Numbers number = numbers(r, mode);
        scales.columns.insert(scales.columns.end(), number.rows, 0);
        scales.columns.insert(scales.columns.end(), number.columns, 1);
    }
    scales.octaves.resize(scales.columns.size());
    const std::size_t used = rans::decode_message(data + head, size - head, scales.octaves.size(), kOctaves, {scales.columns.data(), false}, 2,
                                                  scales.octaves.data());
    if (used == kBad) return kBad;
    if (fill_classes(regions, scales, numbered(mask), contexts) & ~mask) return kBad;
    tables = std::popcount(mask);
    return head + used;
}

}  // namespace tersegrad::classes
