// Plain C++: what every machine runs, and the arithmetic that the other instruction sets reproduce.
#include "philox_loops.hpp"
#include "rounding_ops.hpp"

namespace tersegrad::rounding {
namespace {

struct Portable {
    static constexpr bool kFused = false;

    static void draws(const Stream& stream, std::uint64_t block, std::size_t groups, std::uint16_t* out, std::uintptr_t) {
        Draws source(stream, block);
        for (std::size_t g = 0; g < groups; ++g, out += 64) source.next(out);
    }

    template <Sum S, bool>
    static double sum(const float* x, std::size_t n) {
        double lanes[32] = {};
        for (std::size_t i = 0; i < n; ++i) {
            const double v = x[i];
            lanes[i % 32] += S == Sum::squares ? v * v : std::fabs(v);
        }
        return fold(lanes, 32);
    }

    template <bool>
    static std::uint32_t abs_max(const float* x, std::size_t n) {
        std::uint32_t most = 0;
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint32_t u = bits_of(x[i]) & 0x7fffffffu;
            most = u > most ? u : most;
        }
        return most;
    }

    static float clamp(float y, float most) { return y < -most ? -most : y > most ? most : y; }

    static void stochastic(const float* x, std::size_t n, float inverse, float most, const std::uint16_t* draws, std::int8_t* out) {
        for (std::size_t i = 0; i < n; ++i) {
            const std::int32_t y = static_cast<std::int32_t>(std::lrint(clamp(x[i] * inverse, most)));
            out[i] = static_cast<std::int8_t>((y + static_cast<std::int32_t>(draws[i])) >> 16);
        }
    }

    static void nearest(const float* x, std::size_t n, float inverse, float most, std::int8_t* out) {
        for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::int8_t>(std::lrint(clamp(x[i] * inverse, most)));
    }

    template <int W>
    static void pack(const std::int8_t* k, std::size_t n, std::uint8_t* out) {
        for (std::size_t i = 0; i < n; i += 8) {
            std::uint64_t word = 0;
            const std::size_t m = n - i < 8 ? n - i : 8;
            for (std::size_t j = 0; j < m; ++j)
                word |= (static_cast<std::uint64_t>(static_cast<std::uint8_t>(k[i + j])) & ((1u << W) - 1)) << (W * j);
            for (std::size_t byte = 0; byte < (m * W + 7) / 8; ++byte) *out++ = static_cast<std::uint8_t>(word >> (8 * byte));
        }
    }

    template <int W, Into I>
    static void expand(const std::uint8_t* codes, std::size_t n, float step, float weight, float* out) {
        for (std::size_t i = 0; i < n; i += 8) {
            const std::size_t m = n - i < 8 ? n - i : 8;
            std::uint64_t word = 0;
            for (std::size_t byte = 0; byte < (m * W + 7) / 8; ++byte) word |= static_cast<std::uint64_t>(*codes++) << (8 * byte);
            for (std::size_t j = 0; j < m; ++j) {
                const std::int32_t code = static_cast<std::int32_t>(word >> (W * j) & ((1u << W) - 1));
                const float value = static_cast<float>((code ^ (1 << (W - 1))) - (1 << (W - 1))) * step;
                if (I == Into::add)
                    out[i + j] += weight * value;
                else
                    out[i + j] = value;
            }
        }
    }

    static void fence() {}
};

}  // namespace

const Ops& portable_ops() {
    static constexpr Ops ops = Driver<Portable>::table();
    return ops;
}

}  // namespace tersegrad::rounding
