// One body of the rotation for every instruction set: a file that includes this names its vector type V and gets the same
// additions in the same order, only grouped differently. Everything is in an unnamed namespace: each file is built with its own
// instructions and must not share code with the others.
//
// V: W lanes, R vectors worked on at once, load, store, stream, zero, add, sub, scaled (product with +-scale), flipped
// (signs applied), lanes (the stages inside one vector), and Top (the running maximum of |x|).
#pragma once
#include <cstring>

#include "hadamard_paths.hpp"

namespace tersegrad {
namespace {

inline void sign_words(const SignStream& s, std::uint64_t first, std::size_t blocks, std::uint32_t* words) {
    constexpr std::size_t lanes = 16;
    for (std::size_t base = 0; base < blocks; base += lanes) {
        std::uint32_t c0[lanes], c1[lanes], c2[lanes], c3[lanes];
        for (std::size_t l = 0; l < lanes; ++l) {
            const std::uint64_t index = first + base + l;  // i >> 7
            c0[l] = static_cast<std::uint32_t>(index);
            c1[l] = s.purpose << 24 | static_cast<std::uint32_t>(index >> 32);
            c2[l] = s.step;
            c3[l] = s.stream;
        }
        auto k0 = static_cast<std::uint32_t>(s.key), k1 = static_cast<std::uint32_t>(s.key >> 32);
        for (int round = 0; round < 10; ++round) {
            for (std::size_t l = 0; l < lanes; ++l) {
                const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0[l], p1 = std::uint64_t{0xCD9E8D57u} * c2[l];
                c0[l] = static_cast<std::uint32_t>(p1 >> 32) ^ c1[l] ^ k0;
                c1[l] = static_cast<std::uint32_t>(p1);
                c2[l] = static_cast<std::uint32_t>(p0 >> 32) ^ c3[l] ^ k1;
                c3[l] = static_cast<std::uint32_t>(p0);
            }
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        for (std::size_t l = 0; l < lanes && base + l < blocks; ++l) {
            std::uint32_t* w = words + (base + l) * 4;
            w[0] = c0[l], w[1] = c1[l], w[2] = c2[l], w[3] = c3[l];
        }
    }
}

// The signs of coordinates first .. first + n: word(j) holds those of W coordinates from j on, in its low bits.
struct Signs {
    const std::uint32_t* words;
    std::size_t offset;  // of the block's first coordinate inside words; a multiple of n when n < 128
    std::uint32_t word(std::size_t j) const { return words[(offset + j) / 32] >> ((offset + j) % 32); }
};

// Stages over r vectors at distance h, 2h, ...: the butterflies of one register block.
template <class V, int r>
inline void stages(typename V::T (&v)[r]) {
#pragma GCC unroll 8
    for (int h = 1; h < r; h *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < r; ++i)
            if (!(i & h)) {
                const auto a = v[i], b = v[i + h];
                v[i] = V::add(a, b);
                v[i + h] = V::sub(a, b);
            }
}

// The first log2(r W) stages, from memory to scratch, scaled; `signed_in` applies the signs before.
template <class V, int r, bool signed_in>
inline void first_pass(const float* x, float* scratch, std::size_t n, float scale, const Signs& signs, typename V::Top& top) {
    for (std::size_t j = 0; j < n; j += r * V::W) {
        typename V::T v[r];
#pragma GCC unroll 16
        for (int i = 0; i < r; ++i) {
            const std::size_t at = j + static_cast<std::size_t>(i) * V::W;
            v[i] = V::load(x + at);
            if constexpr (signed_in) {
                top.take(v[i]);
                v[i] = V::scaled(v[i], scale, signs.word(at));
            } else {
                v[i] = V::scaled(v[i], scale, 0);
            }
            v[i] = V::lanes(v[i]);
        }
        stages<V, r>(v);
#pragma GCC unroll 16
        for (int i = 0; i < r; ++i) V::store(scratch + j + static_cast<std::size_t>(i) * V::W, v[i]);
    }
}

// log2(r) stages at distances h .. h r / 2; `signed_out` applies the signs after, `streamed` bypasses the cache.
template <class V, int r, bool signed_out, bool streamed>
inline void pass(const float* from, float* to, std::size_t n, std::size_t h, const Signs& signs) {
    for (std::size_t base = 0; base < n; base += h * r)
        for (std::size_t j = base; j < base + h; j += V::W) {
            typename V::T v[r];
#pragma GCC unroll 16
            for (int i = 0; i < r; ++i) v[i] = V::load(from + j + static_cast<std::size_t>(i) * h);
            stages<V, r>(v);
#pragma GCC unroll 16
            for (int i = 0; i < r; ++i) {
                const std::size_t at = j + static_cast<std::size_t>(i) * h;
                if constexpr (signed_out) v[i] = V::flipped(v[i], signs.word(at));
                if constexpr (streamed)
                    V::stream(to + at, v[i]);
                else
                    V::store(to + at, v[i]);
            }
        }
}

template <class V, bool signed_out, bool streamed>
inline void any_pass(const float* from, float* to, std::size_t n, std::size_t h, std::size_t r, const Signs& signs) {
    if (r == 16 && V::R >= 16) return pass<V, V::R >= 16 ? 16 : 1, signed_out, streamed>(from, to, n, h, signs);
    if (r == 8) return pass<V, 8, signed_out, streamed>(from, to, n, h, signs);
    if (r == 4) return pass<V, 4, signed_out, streamed>(from, to, n, h, signs);
    if (r == 2) return pass<V, 2, signed_out, streamed>(from, to, n, h, signs);
    return pass<V, 1, signed_out, streamed>(from, to, n, h, signs);
}

template <class V, bool forward>
inline void first_any(const float* x, float* scratch, std::size_t n, float scale, const Signs& signs, typename V::Top& top) {
    const std::size_t r = n / V::W;
    if (r >= 16 && V::R >= 16) return first_pass<V, V::R >= 16 ? 16 : 1, forward>(x, scratch, n, scale, signs, top);
    if (r >= 8) return first_pass<V, 8, forward>(x, scratch, n, scale, signs, top);
    if (r >= 4) return first_pass<V, 4, forward>(x, scratch, n, scale, signs, top);
    if (r >= 2) return first_pass<V, 2, forward>(x, scratch, n, scale, signs, top);
    return first_pass<V, 1, forward>(x, scratch, n, scale, signs, top);
}

// A whole block of n = 2^k coordinates, n >= W.
template <class V, bool forward, bool streamed>
inline void whole(const float* x, float* y, float* scratch, std::size_t n, float scale, const Signs& signs, typename V::Top& top) {
    first_any<V, forward>(x, scratch, n, scale, signs, top);
    std::size_t h = n < V::R * V::W ? n : V::R * V::W;
    while (h * V::R < n) {
        any_pass<V, false, false>(scratch, scratch, n, h, V::R, signs);
        h *= V::R;
    }
    any_pass<V, !forward, streamed>(scratch, y, n, h, n / h, signs);
}

// Blocks [begin, end) of the buffer; the last one may be short.
template <class V, bool forward>
std::uint32_t blocks(const RotationJob& job, std::size_t begin, std::size_t end) {
    alignas(64) float scratch[4096 + 16];
    alignas(64) std::uint32_t words[4096 / 32 + 64];
    std::vector<float> large;
    std::vector<std::uint32_t> large_words;
    float* buffer = scratch;
    std::uint32_t* sign_buffer = words;
    if (job.block > 4096) {
        large.resize(job.block);
        large_words.resize(job.block / 32 + 64);
        buffer = large.data();
        sign_buffer = large_words.data();
    }
    typename V::Top top;
    std::uint32_t top_tail = 0;
    const bool streamed = job.streamed && reinterpret_cast<std::uintptr_t>(job.to) % 64 == 0;
    for (std::size_t b = begin; b < end; ++b) {
        const std::size_t at = b * job.block, have = std::min(job.block, job.d - at);
        const std::size_t n = have == job.block ? have : std::bit_ceil(have);
        sign_words(job.signs, at / 128, n < 128 ? 1 : n / 128, sign_buffer);
        const Signs signs{sign_buffer, at % 128};
        const float scale = hadamard_scale(n);
        const float* from = job.from + at;
        float* to = job.to + at;
        if (have == job.block && n >= V::W) {
            if (streamed)
                whole<V, forward, true>(from, to, buffer, n, scale, signs, top);
            else
                whole<V, forward, false>(from, to, buffer, n, scale, signs, top);
            continue;
        }
        // The short tail, and blocks smaller than a vector: the same stages, one coordinate at a time.
        const std::size_t in = forward ? have : n, out = forward ? n : have;
        std::memcpy(buffer, from, in * sizeof(float));
        std::fill(buffer + in, buffer + n, 0.0f);
        for (std::size_t i = 0; i < n; ++i) {
            if (forward) {
                const std::uint32_t bits = std::bit_cast<std::uint32_t>(buffer[i]);
                top_tail = std::max(top_tail, bits & 0x7fffffffu);
                buffer[i] = std::bit_cast<float>(bits ^ (signs.word(i) << 31));
            }
            buffer[i] *= scale;
        }
        for (std::size_t h = 1; h < n; h *= 2)
            for (std::size_t base = 0; base < n; base += 2 * h)
                for (std::size_t i = base; i < base + h; ++i) {
                    const float p = buffer[i], q = buffer[i + h];
                    buffer[i] = p + q;
                    buffer[i + h] = p - q;
                }
        if (!forward)
            for (std::size_t i = 0; i < n; ++i)
                buffer[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(buffer[i]) ^ (signs.word(i) << 31));
        std::memcpy(to, buffer, out * sizeof(float));
    }
    if (streamed) V::fence();
    return std::max(top_tail, top.value());
}

}  // namespace
}  // namespace tersegrad
