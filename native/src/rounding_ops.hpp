// What an instruction set provides to rounding.cpp, and the loops over blocks, written once for all of them.
//
// rounding_ISA.cpp defines a struct of primitives in an anonymous namespace and instantiates `Driver` with it; nothing here has
// external linkage except the tables, so code built for one instruction set never leaks into another.
#pragma once
#include <cmath>
#include <cstring>

#include "tersegrad/rounding.hpp"

namespace tersegrad::rounding {

constexpr std::size_t kChunk = 2048;     // coordinates rounded at a time: input, draws and levels stay in the first-level cache
constexpr std::size_t kSumChunk = 4096;  // coordinates of one lane-wise sum
constexpr std::size_t kBlock = 65536;    // longer blocks are cut among threads
constexpr std::size_t kAhead = 1536;     // coordinates that loops fetch ahead: the hardware's own fetching stops at page borders
constexpr std::size_t kSlack = 64;       // draws are written in groups of 64

enum class Sum { squares, magnitudes };
enum class Into { store, stream, add };

struct Job {  // one call of quantise
    const float* x;
    std::size_t n;
    Quantiser q;
    Stream stream;
    std::uint8_t* steps;
    std::uint8_t* codes;
};

struct Expansion {  // one call of dequantise
    const std::uint8_t* steps;
    const std::uint8_t* codes;
    std::size_t n;
    Quantiser q;
    float weight;
    float* out;
};

struct Ops {
    // 64 draws per group; meanwhile the memory at address `next` is fetched, because drawing leaves it idle.
    void (*draws)(const Stream&, std::uint64_t block, std::size_t groups, std::uint16_t* out, std::uintptr_t next);
    double (*sum_squares)(const float*, std::size_t n);                                       // n <= kSumChunk
    double (*sum_abs)(const float*, std::size_t n);                                           // n <= kSumChunk
    std::uint32_t (*abs_max)(const float*, std::size_t n);                                    // bit pattern
    void (*quantise)(const Job&, std::size_t first_block, std::size_t last_block);            // q.block <= kBlock
    void (*round)(const Job&, float step, std::size_t begin, std::size_t end);                // inside one block
    void (*dequantise)(const Expansion&, Into, std::size_t first_block, std::size_t last_block);
};

const Ops& portable_ops();
const Ops& avx2_ops();
const Ops& avx512_ops();

namespace {

[[maybe_unused]] inline std::uint32_t bits_of(float f) {
    std::uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}

[[maybe_unused]] inline float float_of(std::uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

// Adds the second half to the first until one is left, as if padded with zeros to a power of two.
[[maybe_unused]] inline double fold(double* a, std::size_t count) {
    std::size_t half = 1;
    while (2 * half < count) half *= 2;
    for (; half >= 1 && count > 1; half /= 2) {
        for (std::size_t i = half; i < count; ++i) a[i - half] += a[i];
        count = half;
    }
    return a[0];
}

// What turns a block's statistic into its step; see rounding.hpp for the rule.
struct StepRule {
    double levels, margin;
    float cap;
    bool root, bfloat16;

    explicit StepRule(const Quantiser& q)
        : levels(q.levels), margin(q.rule == Rule::nearest ? 1.0 : 1.0 + 0x1p-22), root(q.rule == Rule::l2),
          bfloat16(q.format == StepFormat::bfloat16) {
        const double most = 0x1.fffffep127 / levels;
        cap = static_cast<float>(most);
        if (static_cast<double>(cap) > most) cap = float_of(bits_of(cap) - 1);
    }

    float operator()(double statistic) const {
        const double scale = root ? std::sqrt(statistic) : statistic;
        float step = static_cast<float>(scale / levels * margin);
        step = step < 0x1p-126f ? 0x1p-126f : step;
        step = step > cap ? cap : step;
        if (bfloat16) {
            const std::uint32_t u = bits_of(step);
            step = float_of((u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u);
        }
        step = scale == 0.0 ? 0.0f : step;
        return scale - scale == 0.0 ? step : float_of(0x7fc00000u);
    }
};

[[maybe_unused]] inline void write_steps(const float* steps, std::size_t count, StepFormat format, std::uint8_t* out) {
    if (format == StepFormat::float32) {
        std::memcpy(out, steps, 4 * count);
        return;
    }
    for (std::size_t b = 0; b < count; ++b) {
        const std::uint16_t half = static_cast<std::uint16_t>(bits_of(steps[b]) >> 16);
        std::memcpy(out + 2 * b, &half, 2);
    }
}

[[maybe_unused]] inline float read_step(const std::uint8_t* steps, std::size_t b, StepFormat format) {
    if (format == StepFormat::float32) {
        float f;
        std::memcpy(&f, steps + 4 * b, 4);
        return f;
    }
    std::uint16_t half;
    std::memcpy(&half, steps + 2 * b, 2);
    return float_of(static_cast<std::uint32_t>(half) << 16);
}

[[maybe_unused]] inline std::uintptr_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

template <class V>
struct Driver {
    using Pack = void (*)(const std::int8_t*, std::size_t, std::uint8_t*);

    static Pack packer(int width) {
        switch (width) {
            case 2: return &V::template pack<2>;
            case 3: return &V::template pack<3>;
            case 4: return &V::template pack<4>;
            case 5: return &V::template pack<5>;
            case 6: return &V::template pack<6>;
            case 7: return &V::template pack<7>;
            default: return [](const std::int8_t* k, std::size_t n, std::uint8_t* out) { std::memcpy(out, k, n); };
        }
    }

    // Levels of coordinates [0, n) of x, all in one block.
    static void levels_of(const float* x, std::size_t n, float step, float inverse, const Quantiser& q, const std::uint16_t* draws,
                          std::int8_t* out) {
        const float most = static_cast<float>(q.levels);
        if (!(step > 0.0f)) {
            std::memset(out, 0, n);
        } else if (q.rule == Rule::nearest) {
            V::nearest(x, n, inverse, most, out);
        } else if (step >= 0x1p-100f) {
            V::stochastic(x, n, inverse * 65536.0f, most * 65536.0f, draws, out);
        } else {  // 65536 / step may overflow: the same products from a larger x (exact) and a smaller inverse
            alignas(64) float large[kChunk];
            for (std::size_t i = 0; i < n; ++i) large[i] = x[i] * 0x1p40f;
            V::stochastic(large, n, inverse * 0x1p-24f, most * 65536.0f, draws, out);
        }
    }

    static std::size_t groups(std::size_t n) { return (n + 63) / 64; }

    static void round(const Job& job, float step, std::size_t begin, std::size_t end) {
        alignas(64) std::uint16_t draws[kChunk + kSlack];
        alignas(64) std::int8_t levels[kChunk + kSlack];
        const Pack pack = packer(job.q.width);
        const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
        for (std::size_t at = begin; at < end; at += kChunk) {
            const std::size_t n = end - at < kChunk ? end - at : kChunk;
            if (job.q.rule != Rule::nearest) V::draws(job.stream, at / 8, groups(n), draws, address(job.x + at) + 4 * kAhead);
            levels_of(job.x + at, n, step, inverse, job.q, draws, levels);
            pack(levels, n, job.codes + at / 8 * static_cast<std::size_t>(job.q.width));
        }
    }

    static double statistic(const float* x, std::size_t n, Rule rule) {
        if (rule == Rule::nearest) return static_cast<double>(float_of(V::template abs_max<true>(x, n)));
        if (rule == Rule::max) return static_cast<double>(float_of(V::template abs_max<false>(x, n)));  // the draws fetch
        if (n <= kSumChunk) return V::template sum<Sum::squares, false>(x, n);
        double sums[kBlock / kSumChunk];
        const std::size_t count = block_count(n, kSumChunk);
        for (std::size_t c = 0; c < count; ++c) {
            const std::size_t rest = n - c * kSumChunk;
            sums[c] = V::template sum<Sum::squares, false>(x + c * kSumChunk, rest < kSumChunk ? rest : kSumChunk);
        }
        return fold(sums, count);
    }

    static void quantise(const Job& job, std::size_t first, std::size_t last) {
        const std::size_t block = job.q.block, bytes = step_bytes(job.q.format);
        const StepRule rule(job.q);
        if (block > kChunk) {
            for (std::size_t b = first; b < last; ++b) {
                const std::size_t begin = b * block, end = job.n - begin < block ? job.n : begin + block;
                const float step = rule(statistic(job.x + begin, end - begin, job.q.rule));
                write_steps(&step, 1, job.q.format, job.steps + b * bytes);
                round(job, step, begin, end);
            }
            return;
        }
        if constexpr (V::kFused) first = fuse(job, rule, first, last);
        alignas(64) std::uint16_t draws[kChunk + kSlack];
        alignas(64) std::int8_t levels[kChunk + kSlack];
        alignas(64) double statistics[kChunk / 8];
        alignas(64) float steps[kChunk / 8], inverses[kChunk / 8];
        const Pack pack = packer(job.q.width);
        const std::size_t together = kChunk / block;  // blocks at a time
        for (std::size_t b = first; b < last; b += together) {
            const std::size_t count = last - b < together ? last - b : together;
            const std::size_t begin = b * block, end = job.n - begin < count * block ? job.n : begin + count * block;
            const float* x = job.x + begin;
            const std::size_t n = end - begin;
            for (std::size_t k = 0; k < count; ++k)
                statistics[k] = statistic(x + k * block, n - k * block < block ? n - k * block : block, job.q.rule);
            for (std::size_t k = 0; k < count; ++k) {
                steps[k] = rule(statistics[k]);
                inverses[k] = 1.0f / steps[k];
            }
            write_steps(steps, count, job.q.format, job.steps + b * bytes);
            if (job.q.rule != Rule::nearest) V::draws(job.stream, begin / 8, groups(n), draws, address(x) + 4 * kAhead);
            for (std::size_t k = 0; k < count; ++k)
                levels_of(x + k * block, n - k * block < block ? n - k * block : block, steps[k], inverses[k], job.q,
                          draws + k * block, levels + k * block);
            pack(levels, n, job.codes + begin / 8 * static_cast<std::size_t>(job.q.width));
        }
    }

    // Rounds blocks one by one, each in the same loop that finds the statistic of the block two further on. Returns the first
    // block that is left to the general way: all of them unless they are whole groups of 64, and the last if it is short.
    static std::size_t fuse(const Job& job, const StepRule& rule, std::size_t first, std::size_t last) {
        switch (job.q.width) {
            case 2: return fuse_width<2>(job, rule, first, last);
            case 3: return fuse_width<3>(job, rule, first, last);
            case 4: return fuse_width<4>(job, rule, first, last);
            case 5: return fuse_width<5>(job, rule, first, last);
            case 6: return fuse_width<6>(job, rule, first, last);
            case 7: return fuse_width<7>(job, rule, first, last);
            default: return fuse_width<8>(job, rule, first, last);
        }
    }

    template <int W>
    static std::size_t fuse_width(const Job& job, const StepRule& rule, std::size_t first, std::size_t last) {
        const std::size_t block = job.q.block;
        while (last > first && last * block > job.n) --last;
        if (first == last || job.q.rule == Rule::nearest || job.q.format != StepFormat::float32 || block % 64 != 0) return first;
        if (first * block >> 35 != (last * block - 1) >> 35) return first;  // a carry into the upper counter word
        const auto loop = job.q.rule == Rule::l2 ? &V::template fused<W, true> : &V::template fused<W, false>;
        const typename V::Drawer drawer(job.stream, first * block / 8);
        float step = rule(statistic(job.x + first * block, block, job.q.rule));
        double next = last - first > 1 ? statistic(job.x + (first + 1) * block, block, job.q.rule) : 0.0;
        for (std::size_t b = first; b < last; ++b) {
            const float* x = job.x + b * block;
            const float* later = last - b > 2 ? x + 2 * block : x;
            const float next_step = rule(next);
            write_steps(&step, 1, job.q.format, job.steps + b * step_bytes(job.q.format));
            // Within these limits nothing over- or underflows, and the margin of the step outweighs the three roundings between
            // it and the product, so that no level needs to be clamped.
            if (step >= 0x1p-100f && step <= 0x1p100f) {
                next = loop(x, block, 1.0f / step * 65536.0f, drawer, b * block / 8, job.codes + b * block / 8 * W, later);
            } else {
                round(job, step, b * block, (b + 1) * block);
                next = statistic(later, block, job.q.rule);
            }
            step = next_step;
        }
        return last;
    }

    template <int W, Into I>
    static void expand_blocks(const Expansion& e, std::size_t first, std::size_t last) {
        for (std::size_t b = first; b < last; ++b) {
            const std::size_t begin = b * e.q.block, n = e.n - begin < e.q.block ? e.n - begin : e.q.block;
            V::template expand<W, I>(e.codes + begin / 8 * W, n, read_step(e.steps, b, e.q.format), e.weight, e.out + begin);
        }
        if (I == Into::stream) V::fence();
    }

    template <Into I>
    static void expand_width(const Expansion& e, std::size_t first, std::size_t last) {
        switch (e.q.width) {
            case 2: return expand_blocks<2, I>(e, first, last);
            case 3: return expand_blocks<3, I>(e, first, last);
            case 4: return expand_blocks<4, I>(e, first, last);
            case 5: return expand_blocks<5, I>(e, first, last);
            case 6: return expand_blocks<6, I>(e, first, last);
            case 7: return expand_blocks<7, I>(e, first, last);
            default: return expand_blocks<8, I>(e, first, last);
        }
    }

    static void dequantise(const Expansion& e, Into into, std::size_t first, std::size_t last) {
        if (into == Into::add) return expand_width<Into::add>(e, first, last);
        // Streaming stores want aligned vectors: whole ones at the start of every block.
        const bool aligned = reinterpret_cast<std::uintptr_t>(e.out) % 64 == 0 && e.q.block % 16 == 0;
        if (into == Into::stream && aligned) return expand_width<Into::stream>(e, first, last);
        return expand_width<Into::store>(e, first, last);
    }

    static constexpr Ops table() {
        return {&V::draws, &V::template sum<Sum::squares, true>, &V::template sum<Sum::magnitudes, true>,
                &V::template abs_max<true>, &quantise, &round, &dequantise};
    }
};

}  // namespace
}  // namespace tersegrad::rounding
