// A sign and a power of two per coordinate: scales, blocks and threads.
#include "tersegrad/powers.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "powers_loops.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::powers {

const Loops loops_portable = all_loops();

namespace {

constexpr float least = 0x1p-120f;
constexpr std::size_t grain = 1 << 16;  // coordinates that are worth a thread

const Loops& loops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return loops_avx512;
    if (isa() == Isa::avx2) return loops_avx2;
#endif
    return loops_portable;
}

// body(number of a block, its first coordinate, how many it has)
template <class Body>
void by_blocks(std::size_t n, std::size_t block, Body&& body) {
    const std::size_t blocks = (n + block - 1) / block;
    parallel_for(blocks, 1, std::max<std::size_t>(1, grain / block), [&](std::size_t begin, std::size_t end) {
        for (std::size_t b = begin; b < end; ++b) body(b, b * block, std::min(block, n - b * block));
    });
}

float scale_of(const std::uint8_t* scales, std::size_t block) {
    float scale;
    std::memcpy(&scale, scales + 4 * block, 4);
    return scale;
}

template <class Values>
void decode_blocks(const std::uint8_t* scales, const std::uint8_t* codes, std::size_t n, std::size_t block, float* out, Values&& values) {
    std::atomic<bool> finite{true};
    by_blocks(n, block, [&](std::size_t b, std::size_t, std::size_t) {
        if (!std::isfinite(scale_of(scales, b))) finite = false;
    });
    if (!finite) {
        std::fill(out, out + n, std::numeric_limits<float>::quiet_NaN());
        return;
    }
    by_blocks(n, block, [&](std::size_t b, std::size_t first, std::size_t count) {
        const float scale = scale_of(scales, b);
        const std::uint8_t* const mine = codes + first / 2;
        values(mine, count / 2, scale, out + first);
        if (count % 2) {
            // Two are decoded, and one of them is kept.
            float both[2] = {out[first + count - 1], 0.0f};
            values(mine + count / 2, 1, scale, both);
            out[first + count - 1] = both[0];
        }
    });
}

}  // namespace

void encode(const float* x, std::size_t n, std::size_t block, std::uint8_t* scales, std::uint8_t* codes) {
    const Loops& loop = loops();
    by_blocks(n, block, [&](std::size_t b, std::size_t first, std::size_t count) {
        const u32 bits = loop.largest(x + first, count);
        float scale = std::bit_cast<float>(bits);
        std::uint8_t* const mine = codes + first / 2;
        if (bits >= 0x7f800000u) scale = std::bit_cast<float>(u32{0x7fc00000});
        if (scale < least) scale = 0;
        std::memcpy(scales + 4 * b, &scale, 4);
        if (!(scale > 0)) {
            std::memset(mine, 0, (count + 1) / 2);
            return;
        }
        const float inverse = 1.0f / scale;
        loop.encode(x + first, count / 2, inverse, mine);
        if (count % 2) mine[count / 2] = static_cast<std::uint8_t>(code_of(x[first + count - 1], inverse));
    });
}

void decode(const std::uint8_t* scales, const std::uint8_t* codes, std::size_t n, std::size_t block, float* out) {
    decode_blocks(scales, codes, n, block, out, loops().decode);
}

void decode_add(const std::uint8_t* scales, const std::uint8_t* codes, std::size_t n, std::size_t block, float weight, float* out) {
    const Loops& loop = loops();
    decode_blocks(scales, codes, n, block, out, [&](const std::uint8_t* mine, std::size_t pairs, float scale, float* to) {
        loop.decode_add(mine, pairs, scale, weight, to);
    });
}

}  // namespace tersegrad::powers
