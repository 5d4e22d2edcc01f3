#include "tersegrad/hadamard.hpp"

#include <atomic>
#include <stdexcept>

#include "hadamard_blocks.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad {
namespace {

// Four plain floats; compilers turn them into whatever the baseline offers.
struct Portable {
    static constexpr std::size_t W = 4, R = 8;
    static constexpr bool streams = false;
    struct T {
        float f[4];
    };
    struct Top {
        std::uint32_t bits = 0;
        void take(const T& v) {
            for (float f : v.f) bits = std::max(bits, std::bit_cast<std::uint32_t>(f) & 0x7fffffffu);
        }
        std::uint32_t value() const { return bits; }
    };
    static T load(const float* p) {
        T v;
        std::memcpy(v.f, p, sizeof v.f);
        return v;
    }
    static void store(float* p, const T& v) { std::memcpy(p, v.f, sizeof v.f); }
    static void stream(float* p, const T& v) { store(p, v); }
    static void fence() {}
    static T add(const T& a, const T& b) { return {{a.f[0] + b.f[0], a.f[1] + b.f[1], a.f[2] + b.f[2], a.f[3] + b.f[3]}}; }
    static T sub(const T& a, const T& b) { return {{a.f[0] - b.f[0], a.f[1] - b.f[1], a.f[2] - b.f[2], a.f[3] - b.f[3]}}; }
    static T flipped(T v, std::uint32_t signs) {
        for (int i = 0; i < 4; ++i) v.f[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(v.f[i]) ^ (signs >> i << 31));
        return v;
    }
    static T scaled(T v, float scale) {
        for (float& f : v.f) f *= scale;
        return v;
    }
    static T scaled(T v, float scale, std::uint32_t signs) { return scaled(flipped(v, signs), scale); }
    static T lanes(const T& v) {
        const float a = v.f[0] + v.f[1], b = v.f[0] - v.f[1], c = v.f[2] + v.f[3], d = v.f[2] - v.f[3];
        return {{a + c, b + d, a - c, b - d}};
    }
};

std::uint32_t run(const RotationJob& job, bool forward) {
    if (job.d == 0) return 0;
    auto path = rotate_blocks_portable;
#if defined(__x86_64__)
    if (isa() == Isa::avx512)
        path = rotate_blocks_avx512;
    else if (isa() == Isa::avx2)
        path = rotate_blocks_avx2;
#endif
    std::atomic<std::uint32_t> top{0};
    parallel_for(job.d, rotation_span(job.block), std::size_t{1} << 17, [&](std::size_t begin, std::size_t end) {
        const std::uint32_t mine = path(job, forward, begin, end);
        std::uint32_t seen = top.load();
        while (seen < mine && !top.compare_exchange_weak(seen, mine)) {
        }
    });
    return top.load();
}

// Output that no cache will hold until it is read goes straight to memory.
bool worth_streaming(std::size_t d) { return d >= (std::size_t{16} << 20); }

}  // namespace

std::uint32_t rotate_blocks_portable(const RotationJob& job, bool forward, std::size_t begin, std::size_t end) {
    return forward ? blocks<Portable, true>(job, begin, end) : blocks<Portable, false>(job, begin, end);
}

std::size_t rotated_size(std::size_t d, std::size_t block) {
    if (!std::has_single_bit(block) || block > largest_hadamard_block)
        throw std::invalid_argument("the block of a rotation must be a power of two up to 65536");
    const std::size_t rest = d % block;
    return d - rest + (rest ? std::bit_ceil(rest) : 0);
}

std::uint32_t rotate(const float* x, float* y, std::size_t d, std::size_t block, const Stream& signs) {
    rotated_size(d, block);
    return run({x, y, d, block, signs, x != y && worth_streaming(d)}, true);
}

void unrotate(const float* y, float* x, std::size_t d, std::size_t block, const Stream& signs) {
    rotated_size(d, block);
    run({y, x, d, block, signs, x != y && worth_streaming(d)}, false);
}

}  // namespace tersegrad
