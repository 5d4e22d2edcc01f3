#include "tersegrad/rounding.hpp"

#include <stdexcept>
#include <vector>

#include "rounding_ops.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad {
namespace {

using namespace rounding;

constexpr std::size_t kGrain = 1 << 17;          // coordinates that pay for a thread
constexpr std::size_t kStreamFrom = 4u << 20;    // outputs of that many floats leave the caches anyway: write around them

const Ops& ops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return avx512_ops();
    if (isa() == Isa::avx2) return avx2_ops();
#endif
    return portable_ops();
}

void check(const Quantiser& q, bool encoding) {
    if (q.block == 0 || q.block % 8 != 0) throw std::invalid_argument("a block is a positive multiple of 8 coordinates");
    if (q.width < 2 || q.width > 8) throw std::invalid_argument("codes take 2 to 8 bits");
    if (encoding && (q.levels < 1 || q.levels >= 1 << (q.width - 1))) throw std::invalid_argument("levels do not fit the width");
}

// parallel_for over blocks, measured in coordinates.
template <class Body>
void over_blocks(std::size_t n, std::size_t block, Body&& body) {
    const std::size_t together = std::max<std::size_t>(1, kChunk / block);
    parallel_for(block_count(n, block), together, std::max<std::size_t>(1, kGrain / block), body);
}

template <class T>
void draw(const Stream& stream, std::uint64_t start, std::size_t count, T* out) {
    const Ops& o = ops();
    parallel_for(count, 8, kGrain, [&](std::size_t begin, std::size_t end) {
        alignas(64) std::uint16_t draws[kChunk + kSlack];
        while (begin < end) {
            const std::uint64_t at = start + begin;
            const std::size_t skip = at % 8, n = std::min<std::size_t>(end - begin, kChunk - skip);
            o.draws(stream, at / 8, (skip + n + 63) / 64, draws, address(draws));
            for (std::size_t i = 0; i < n; ++i) out[begin + i] = static_cast<T>(draws[skip + i]);
            begin += n;
        }
    });
}

double whole_sum(double (*part)(const float*, std::size_t), const float* x, std::size_t n) {
    if (n <= kSumChunk) return part(x, n);
    std::vector<double> sums(block_count(n, kSumChunk));
    parallel_for(sums.size(), 1, kGrain / kSumChunk, [&](std::size_t first, std::size_t last) {
        for (std::size_t c = first; c < last; ++c) sums[c] = part(x + c * kSumChunk, std::min(kSumChunk, n - c * kSumChunk));
    });
    return fold(sums.data(), sums.size());
}

// Statistics of every block; long blocks are cut among threads instead of shared out.
template <class T, class Whole>
void each_block(const float* x, std::size_t n, std::size_t block, T* out, Whole&& whole) {
    if (block == 0) throw std::invalid_argument("a block has at least one coordinate");
    auto range = [&](std::size_t first, std::size_t last) {
        for (std::size_t b = first; b < last; ++b) out[b] = whole(x + b * block, std::min(block, n - b * block));
    };
    if (block > kBlock)
        range(0, block_count(n, block));
    else
        over_blocks(n, block, range);
}

bool any_not_finite(const std::uint8_t* steps, std::size_t count, StepFormat format) {
    bool found = false;
    if (format == StepFormat::float32)
        for (std::size_t b = 0; b < count; ++b) {
            std::uint32_t u;
            std::memcpy(&u, steps + 4 * b, 4);
            found |= (u & 0x7f800000u) == 0x7f800000u;
        }
    else
        for (std::size_t b = 0; b < count; ++b) {
            std::uint16_t u;
            std::memcpy(&u, steps + 2 * b, 2);
            found |= (u & 0x7f80u) == 0x7f80u;
        }
    return found;
}

void expand(const Expansion& e, bool add) {
    check(e.q, false);
    if (any_not_finite(e.steps, block_count(e.n, e.q.block), e.q.format)) {
        std::fill(e.out, e.out + e.n, float_of(0x7fc00000u));
        return;
    }
    const Ops& o = ops();
    const Into into = add ? Into::add : e.n >= kStreamFrom ? Into::stream : Into::store;
    if (e.q.block <= kBlock) {
        over_blocks(e.n, e.q.block, [&](std::size_t first, std::size_t last) { o.dequantise(e, into, first, last); });
        return;
    }
    for (std::size_t begin = 0, b = 0; begin < e.n; begin += e.q.block, ++b) {  // a long block is many short ones of equal step
        const std::size_t n = std::min(e.q.block, e.n - begin);
        const float step = read_step(e.steps, b, e.q.format);
        parallel_for(block_count(n, kChunk), 1, kGrain / kChunk, [&](std::size_t first, std::size_t last) {
            Expansion part = e;
            part.q.format = StepFormat::float32;
            part.q.block = last * kChunk;
            part.steps = reinterpret_cast<const std::uint8_t*>(&step);
            part.codes = e.codes + (begin + first * kChunk) / 8 * static_cast<std::size_t>(e.q.width);
            part.out = e.out + begin + first * kChunk;
            part.n = std::min(n, last * kChunk) - first * kChunk;
            o.dequantise(part, into, 0, 1);
        });
    }
}

}  // namespace

void random_u16(const Stream& stream, std::uint64_t start, std::size_t count, std::uint16_t* out) { draw(stream, start, count, out); }
void random_u16(const Stream& stream, std::uint64_t start, std::size_t count, std::int32_t* out) { draw(stream, start, count, out); }

void quantise(const float* x, std::size_t n, const Quantiser& q, const Stream& stream, std::uint8_t* steps, std::uint8_t* codes) {
    check(q, true);
    const Ops& o = ops();
    const Job job{x, n, q, stream, steps, codes};
    if (q.block <= kBlock) {
        over_blocks(n, q.block, [&](std::size_t first, std::size_t last) { o.quantise(job, first, last); });
        return;
    }
    const StepRule rule(q);
    for (std::size_t begin = 0, b = 0; begin < n; begin += q.block, ++b) {
        const std::size_t length = std::min(q.block, n - begin);
        const float step =
            rule(q.rule == Rule::l2 ? sum_squares(x + begin, length) : static_cast<double>(abs_max(x + begin, length)));
        write_steps(&step, 1, q.format, steps + b * step_bytes(q.format));
        parallel_for(length, 8, kGrain, [&](std::size_t first, std::size_t last) { o.round(job, step, begin + first, begin + last); });
    }
}

void dequantise(const std::uint8_t* steps, const std::uint8_t* codes, std::size_t n, const Quantiser& q, float* out) {
    expand({steps, codes, n, q, 1.0f, out}, false);
}

void dequantise_add(const std::uint8_t* steps, const std::uint8_t* codes, std::size_t n, const Quantiser& q, float weight,
                    float* out) {
    expand({steps, codes, n, q, weight, out}, true);
}

double sum_squares(const float* x, std::size_t n) { return whole_sum(ops().sum_squares, x, n); }
double sum_abs(const float* x, std::size_t n) { return whole_sum(ops().sum_abs, x, n); }

float abs_max(const float* x, std::size_t n) {
    const Ops& o = ops();
    if (n <= kBlock) return float_of(o.abs_max(x, n));
    std::vector<std::uint32_t> parts(block_count(n, kBlock), 0);
    parallel_for(parts.size(), 1, kGrain / kBlock, [&](std::size_t first, std::size_t last) {
        for (std::size_t c = first; c < last; ++c) parts[c] = o.abs_max(x + c * kBlock, std::min(kBlock, n - c * kBlock));
    });
    std::uint32_t most = 0;
    for (const std::uint32_t u : parts) most = std::max(most, u);
    return float_of(most);
}

void block_sum_squares(const float* x, std::size_t n, std::size_t block, double* out) {
    each_block(x, n, block, out, [](const float* p, std::size_t m) { return sum_squares(p, m); });
}

void block_sum_abs(const float* x, std::size_t n, std::size_t block, double* out) {
    each_block(x, n, block, out, [](const float* p, std::size_t m) { return sum_abs(p, m); });
}

void block_abs_max(const float* x, std::size_t n, std::size_t block, float* out) {
    each_block(x, n, block, out, [](const float* p, std::size_t m) { return abs_max(p, m); });
}

}  // namespace tersegrad
