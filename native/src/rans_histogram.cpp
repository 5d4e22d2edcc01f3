// Histograms: exact, or counted on one block in eight with the presence of every symbol taken from all the data.
#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

#include "tersegrad/rans.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::rans {
namespace {

constexpr std::size_t kGrain = std::size_t{1} << 18;

// Rows of 256 counters, one per context; without contexts at least four rows, so that equal neighbours do not wait for each other.
struct Counters {
    Counters(int contexts, bool plain, int alphabet_)
        : rows(static_cast<std::size_t>(plain ? std::max(4, contexts) : contexts) * 256), alphabet(alphabet_) {}
    std::vector<std::uint64_t> rows;
    int alphabet;

    void add(const std::uint8_t* s, std::size_t n, Contexts ctx) {
        std::uint64_t* r = rows.data();
        if (!ctx.data) {
            std::size_t i = 0;
#if defined(__x86_64__)
            if (alphabet <= 32 && isa() == Isa::avx512) i = detail::count_avx512(s, n, alphabet, r);
#endif
            for (; i + 8 <= n; i += 8) {
                std::uint64_t v;
                std::memcpy(&v, s + i, 8);
                ++r[v & 255], ++r[256 + (v >> 8 & 255)], ++r[512 + (v >> 16 & 255)], ++r[768 + (v >> 24 & 255)];
                ++r[v >> 32 & 255], ++r[256 + (v >> 40 & 255)], ++r[512 + (v >> 48 & 255)], ++r[768 + (v >> 56)];
            }
            for (; i < n; ++i) ++r[s[i]];
        } else if (ctx.per_step) {
            for (std::size_t i = 0; i < n; i += kLanes) {
                std::uint64_t* row = r + std::size_t{256} * ctx.data[i / kLanes];
                for (std::size_t k = i; k < std::min(n, i + kLanes); ++k) ++row[s[k]];
            }
        } else {
            for (std::size_t i = 0; i < n; ++i) ++r[std::size_t{256} * ctx.data[i] + s[i]];
        }
    }
};

void mark_bytes(const std::uint8_t* s, std::size_t n, std::uint8_t* present) {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return detail::mark_present_avx512(s, n, present);
    if (isa() == Isa::avx2) return detail::mark_present_avx2(s, n, present);
#endif
    for (std::size_t i = 0; i < n; ++i) present[s[i]] = 1;
}

// Where a context and a symbol fit one byte together, pairs are joined a block at a time and marked like plain symbols.
void mark_pairs(const std::uint8_t* s, std::size_t n, const std::uint8_t* contexts, int alphabet, int count, std::uint8_t* present) {
    const int shift = std::bit_width(static_cast<unsigned>(alphabet) - 1);
    const std::size_t pairs = static_cast<std::size_t>(count) << shift, mask = (std::size_t{1} << shift) - 1;
    const auto cell = [&](std::size_t pair) { return (pair >> shift) * 256 + (pair & mask); };
    std::uint8_t joined[kBlock], seen[256] = {};
    for (std::size_t k = 0; k < std::min<std::size_t>(pairs, 256); ++k) seen[k] = present[cell(k)];
    for (std::size_t begin = 0; begin < n; begin += kBlock) {
        const std::size_t size = std::min(n - begin, kBlock);
        const std::uint8_t *a = s + begin, *c = contexts + begin;
        std::uint8_t any = 0;
        for (std::size_t i = 0; i < size; ++i) {
            any |= a[i];
            joined[i] = static_cast<std::uint8_t>(c[i] << shift | a[i]);
        }
        if (pairs <= 256 && any <= mask)
            mark_bytes(joined, size, seen);
        else
            for (std::size_t i = 0; i < size; ++i) present[std::size_t{256} * c[i] + a[i]] = 1;
    }
    for (std::size_t k = 0; k < std::min<std::size_t>(pairs, 256); ++k) present[cell(k)] |= seen[k];
}

void mark(const std::uint8_t* s, std::size_t n, Contexts ctx, int alphabet, int contexts, std::uint8_t* present) {
    if (!ctx.data) return mark_bytes(s, n, present);
    if (!ctx.per_step) return mark_pairs(s, n, ctx.data, alphabet, contexts, present);
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return detail::mark_present_steps_avx512(s, n, ctx.data, present);
#endif
    for (std::size_t i = 0; i < n; i += kLanes) mark_bytes(s + i, std::min(n - i, std::size_t{kLanes}), present + std::size_t{256} * ctx.data[i / kLanes]);
}

}  // namespace

std::uint8_t largest(const std::uint8_t* values, std::size_t n) {
    std::uint8_t most = 0;
    for (std::size_t i = 0; i < n; ++i) most = std::max(most, values[i]);
    return most;
}

bool worth_sampling(std::size_t n, int alphabet, int contexts) {
    const std::size_t cells = static_cast<std::size_t>(alphabet) * static_cast<std::size_t>(contexts);
    return n >= std::max<std::size_t>(std::size_t{1} << 16, 4096 * cells);
}

void histogram_dense(const std::uint8_t* symbols, std::size_t n, int first, int alphabet, std::uint64_t* counts) {
    const std::size_t begin = static_cast<std::size_t>(first), end = begin + static_cast<std::size_t>(alphabet);
    const bool sample = worth_sampling(n, alphabet, 1);
    Counters counters(1, true, static_cast<int>(end));
    for (std::size_t i = 0; i < n; i += kBlock * kStride) counters.add(symbols + i, std::min(n - i, sample ? kBlock : kBlock * kStride), {});
    const auto& r = counters.rows;
    for (std::size_t s = 0; s < end; ++s) counts[s] = r[s] + r[256 + s] + r[512 + s] + r[768 + s];
    if (!sample) return;
    const auto seen = std::count_if(counts + begin, counts + end, [](std::uint64_t c) { return c != 0; });
    if (2 * seen < alphabet)
        histogram(symbols, n, static_cast<int>(end), {}, 1, true, counts);
    else
        for (std::size_t s = begin; s < end; ++s) ++counts[s];
}

bool histogram(const std::uint8_t* symbols, std::size_t n, int alphabet, Contexts ctx, int contexts, bool sample, std::uint64_t* counts) {
    const std::size_t rows = static_cast<std::size_t>(contexts) * 256;
    std::vector<std::uint64_t> total(rows);
    std::vector<std::uint8_t> seen(sample ? rows : 0);
    std::mutex joined;
    parallel_for(n, kBlock * kStride, kGrain, [&](std::size_t begin, std::size_t end) {
        Counters counters(contexts, ctx.data == nullptr, alphabet);
        for (std::size_t i = begin; i < end; i += kBlock * kStride)  // begin is a multiple of it: the first of its blocks is sampled
            counters.add(symbols + i, std::min(end - i, sample ? kBlock : kBlock * kStride), ctx.at(i));
        if (!ctx.data)
            for (std::size_t s = 0; s < 256; ++s) {  // all of them are context 0
                counters.rows[s] += counters.rows[256 + s] + counters.rows[512 + s] + counters.rows[768 + s];
                counters.rows[256 + s] = counters.rows[512 + s] = counters.rows[768 + s] = 0;
            }
        std::vector<std::uint8_t> present(seen.size());
        if (sample) {
            for (std::size_t k = 0; k < rows; ++k) present[k] = counters.rows[k] != 0;
            mark(symbols + begin, end - begin, ctx.at(begin), alphabet, contexts, present.data());
        }
        const std::lock_guard lock(joined);
        for (std::size_t k = 0; k < rows; ++k) total[k] += counters.rows[k];
        for (std::size_t k = 0; k < present.size(); ++k) seen[k] |= present[k];
    });
    for (int c = 0; c < contexts; ++c)
        for (int s = 0; s < 256; ++s) {
            const std::size_t k = static_cast<std::size_t>(c) * 256 + static_cast<std::size_t>(s);
            const std::uint64_t count = total[k] + (sample ? seen[k] : 0);
            if (s < alphabet)
                counts[static_cast<std::size_t>(c) * static_cast<std::size_t>(alphabet) + static_cast<std::size_t>(s)] = count;
            else if (count)
                return false;
        }
    return true;
}

}  // namespace tersegrad::rans
