#include "tersegrad/align.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "align_loops.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::align {
namespace detail {
const Implementation portable = {quantise_plain, dot_plain, add_plain};
}
namespace {

using std::size_t;
using i8 = std::int8_t;

enum Kind : unsigned { none = 0, by_rows = 1, by_both = 2 };
constexpr size_t kFewestRows = 4, kFewestColumns = 4, kLongest = size_t{1} << 24, kGrain = size_t{1} << 17;
constexpr int kRounds = 2;
constexpr double kLeastBits = 16.0, kLeastShare = 0.02;

const detail::Implementation& ops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return detail::avx512;
    if (isa() == Isa::avx2) return detail::avx2;
#endif
    return detail::portable;
}

struct Matrix {
    size_t at, count, columns, phase, rows;
};

std::vector<Matrix> matrices(const classes::Rows& layout) {
    std::vector<Matrix> found;
    size_t at = 0;
    for (size_t k = 0; k < layout.pieces; ++k) {
        const auto field = [&](size_t j) { return static_cast<size_t>(layout.data[4 * k + j]); };
        const Matrix m{at, field(0), field(1), field(3), (field(3) + field(0) + field(1) - 1) / field(1)};
        if (m.rows >= kFewestRows && m.columns >= kFewestColumns && std::max(m.rows, m.columns) <= kLongest) found.push_back(m);
        at += m.count;
    }
    return found;
}

double saved(std::int64_t count, std::int64_t agreement, size_t told) {
    const double n = static_cast<double>(count), share = static_cast<double>(count + agreement) / static_cast<double>(2 * count);
    const double entropy = share < 1 ? -(share * std::log2(share) + (1 - share) * std::log2(1 - share)) : 0.0;
    return n * (1 - entropy) - static_cast<double>(told);
}

// Calls body(row, begin, column, length) for rows first .. last; begin counts from the piece's first coordinate.
template <class Body>
void each_row(const Matrix& m, size_t first, size_t last, Body&& body) {
    for (size_t row = first; row < last; ++row) {
        const size_t column = row ? 0 : m.phase, begin = row ? row * m.columns - m.phase : 0;
        body(row, begin, column, std::min(m.columns - column, m.count - begin));
    }
}
template <class Body>
void in_rows(const Matrix& m, Body&& body) {
    parallel_for(m.rows, 1, std::max<size_t>(1, kGrain / m.columns), body);
}

// The signs of one piece, and how many coordinates agree with them. Minus signs are masks of -1, others of 0.
struct Search {
    std::vector<i8> q, alone, down, across;
    std::int64_t count = 0, rows_agree = 0, both_agree = 0;

    Search(const float* x, float least, const Matrix& m) : q(m.count), alone(m.rows), down(m.rows), across(m.columns) {
        const float* const from = x + m.at;
        std::vector<std::int64_t> busy(m.rows);
        const std::vector<i8> plus(m.columns);
        std::mutex lock;
        in_rows(m, [&](size_t first, size_t last) {
            std::int64_t all = 0, agree = 0;
            each_row(m, first, last, [&](size_t row, size_t begin, size_t, size_t length) {
                i8* const to = q.data() + begin;
                const std::int64_t number = ops().quantise(from + begin, length, least, to);
                const std::int64_t sum = ops().dot(to, plus.data(), length);
                busy[row] = number;
                alone[row] = sum < 0 ? -1 : 0;
                all += number;
                agree += sum < 0 ? -sum : sum;
            });
            const std::lock_guard<std::mutex> hold(lock);
            count += all;
            rows_agree += agree;
        });
        const auto top = static_cast<size_t>(std::max_element(busy.begin(), busy.end()) - busy.begin());
        each_row(m, top, top + 1, [&](size_t, size_t begin, size_t column, size_t length) {
            for (size_t i = 0; i < length; ++i) across[column + i] = q[begin + i] < 0 ? -1 : 0;
        });
        std::vector<std::int32_t> sums(m.columns);
        for (int round = 0; round < kRounds; ++round) {
            std::fill(sums.begin(), sums.end(), 0);
            in_rows(m, [&](size_t first, size_t last) {
                std::vector<std::int32_t> own(m.columns);
                std::vector<i8> narrow(m.columns);
                size_t held = 0;
                const auto drain = [&] {
                    for (size_t j = 0; j < m.columns; ++j) own[j] += narrow[j];
                    std::fill(narrow.begin(), narrow.end(), i8{0});
                    held = 0;
                };
                each_row(m, first, last, [&](size_t row, size_t begin, size_t column, size_t length) {
                    const i8* const from_q = q.data() + begin;
                    const i8 mask = ops().dot(from_q, across.data() + column, length) < 0 ? -1 : 0;
                    down[row] = mask;
                    ops().add(from_q, length, mask, narrow.data() + column);
                    if (++held == detail::kNarrow) drain();
                });
                drain();
                const std::lock_guard<std::mutex> hold(lock);
                for (size_t j = 0; j < m.columns; ++j) sums[j] += own[j];
            });
            both_agree = 0;
            for (size_t j = 0; j < m.columns; ++j) {
                across[j] = sums[j] < 0 ? -1 : 0;
                both_agree += std::abs(sums[j]);
            }
        }
    }
};

struct Writer {
    std::vector<std::uint8_t> bytes;
    size_t at = 0;
    void put(bool bit) {
        if (at % 8 == 0) bytes.push_back(0);
        bytes.back() = static_cast<std::uint8_t>(bytes.back() | static_cast<unsigned>(bit) << at % 8);
        ++at;
    }
    void put(const std::vector<i8>& masks) {
        for (const i8 mask : masks) put(mask != 0);
    }
};

}  // namespace

std::vector<std::uint8_t> find(const float* x, float least, const classes::Rows& layout) {
    Writer told;
    bool some = false;
    for (const Matrix& m : matrices(layout)) {
        const Search s(x, least, m);
        const double rows = s.count ? saved(s.count, s.rows_agree, m.rows) : 0.0;
        const double both = s.count ? saved(s.count, s.both_agree, m.rows + m.columns) : 0.0;
        unsigned kind = both > rows ? by_both : by_rows;
        if (std::max(rows, both) < std::max(kLeastBits, kLeastShare * static_cast<double>(s.count))) kind = none;
        told.put(kind & 1);
        told.put(kind >> 1);
        if (kind == by_rows) told.put(s.alone);
        if (kind == by_both) told.put(s.down), told.put(s.across);
        some |= kind != none;
    }
    return some ? told.bytes : std::vector<std::uint8_t>{};
}

bool flip(const float* x, size_t n, const std::uint8_t* data, size_t size, const classes::Rows& layout, float* out) {
    size_t at = 0;
    const auto bit = [&](size_t place) { return static_cast<std::uint32_t>(data[place / 8] >> place % 8 & 1); };
    struct Told {
        Matrix m;
        unsigned kind;
        size_t rows;  // where their bits are
    };
    std::vector<Told> told;
    for (const Matrix& m : matrices(layout)) {
        if (at + 2 > 8 * size) return false;
        const unsigned kind = bit(at) | bit(at + 1) << 1;
        const size_t more = kind == by_both ? m.rows + m.columns : kind == by_rows ? m.rows : 0;
        if (kind > by_both || at + 2 + more > 8 * size) return false;
        if (kind) told.push_back({m, kind, at + 2});
        at += 2 + more;
    }
    if (size != (at + 7) / 8) return false;
    for (size_t place = at; place < 8 * size; ++place)
        if (bit(place)) return false;
    size_t done = 0;
    const auto copy = [&](size_t to) {
        if (out != x && to > done) std::memcpy(out + done, x + done, 4 * (to - done));
    };
    for (const Told& t : told) {
        const Matrix& m = t.m;
        copy(m.at);
        done = m.at + m.count;
        std::vector<std::uint32_t> across(m.columns);
        if (t.kind == by_both)
            for (size_t j = 0; j < m.columns; ++j) across[j] = bit(t.rows + m.rows + j) << 31;
        in_rows(m, [&](size_t first, size_t last) {
            each_row(m, first, last, [&](size_t row, size_t begin, size_t column, size_t length) {
                const std::uint32_t down = bit(t.rows + row) << 31;
                const float* const from = x + m.at + begin;
                float* const to = out + m.at + begin;
                const std::uint32_t* const masks = across.data() + column;
                for (size_t i = 0; i < length; ++i) {
                    std::uint32_t b;
                    std::memcpy(&b, from + i, 4);
                    b ^= down ^ masks[i];
                    std::memcpy(to + i, &b, 4);
                }
            });
        });
    }
    copy(n);
    return true;
}

}  // namespace tersegrad::align
