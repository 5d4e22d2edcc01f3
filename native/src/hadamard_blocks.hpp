// One body of the rotation for every instruction set: a file that includes this names its vector type V and gets the same
// additions in the same order, only grouped differently. Everything is in an unnamed namespace: each file is built with its own
// instructions and must not share code with the others.
//
// V: W lanes, R vectors worked on at once; load, store, stream, add, sub, scaled (product with +-scale), flipped (signs applied),
// lanes (the stages inside one vector), Top (the running maximum of |x|).
#pragma once
#include <cstring>

#include "hadamard_paths.hpp"
#include "philox_loops.hpp"

namespace tersegrad {
namespace {

// The signs of a run of coordinates: word(j) holds those of W coordinates from j on, in its low bits.
struct Signs {
    const std::uint32_t* words;
    std::size_t offset = 0;
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

// The first log2(r W) stages of every block in x[0 .. n), scaled; the signs are applied before or after.
template <class V, int r, bool signed_in, bool signed_out>
inline void first_pass(const float* x, float* y, std::size_t n, float scale, const Signs& signs, typename V::Top& top) {
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
                v[i] = V::scaled(v[i], scale);
            }
            v[i] = V::lanes(v[i]);
        }
        stages<V, r>(v);
#pragma GCC unroll 16
        for (int i = 0; i < r; ++i) {
            const std::size_t at = j + static_cast<std::size_t>(i) * V::W;
            if constexpr (signed_out) v[i] = V::flipped(v[i], signs.word(at));
            V::store(y + at, v[i]);
        }
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

// The first stages of whole blocks in x[0 .. n); r = how many vectors a block has, at most R.
template <class V, bool signed_in, bool signed_out>
inline void first_any(const float* x, float* y, std::size_t n, std::size_t r, float scale, const Signs& signs, typename V::Top& top) {
    if (r >= 16 && V::R >= 16) return first_pass<V, V::R >= 16 ? 16 : 1, signed_in, signed_out>(x, y, n, scale, signs, top);
    if (r >= 8) return first_pass<V, 8, signed_in, signed_out>(x, y, n, scale, signs, top);
    if (r >= 4) return first_pass<V, 4, signed_in, signed_out>(x, y, n, scale, signs, top);
    if (r >= 2) return first_pass<V, 2, signed_in, signed_out>(x, y, n, scale, signs, top);
    return first_pass<V, 1, signed_in, signed_out>(x, y, n, scale, signs, top);
}

// One block of n coordinates, more than R vectors hold: through scratch, which stays in the first-level cache up to 4096.
template <class V, bool forward, bool streamed>
inline void large_block(const float* x, float* y, float* scratch, std::size_t n, float scale, const Signs& signs, typename V::Top& top) {
    first_any<V, forward, false>(x, scratch, n, V::R, scale, signs, top);
    std::size_t h = V::R * V::W;
    for (; h * V::R < n; h *= V::R) any_pass<V, false, false>(scratch, scratch, n, h, V::R, signs);
    any_pass<V, !forward, streamed>(scratch, y, n, h, n / h, signs);
}

// The short tail, and blocks smaller than a vector: the same stages, one coordinate at a time.
template <bool forward>
inline std::uint32_t plain_block(const float* from, float* to, float* buffer, std::size_t have, std::size_t n, const Signs& signs) {
    std::uint32_t top = 0;
    const float scale = hadamard_scale(n);
    const std::size_t in = forward ? have : n, out = forward ? n : have;
    std::memcpy(buffer, from, in * sizeof(float));
    std::fill(buffer + in, buffer + n, 0.0f);
    for (std::size_t i = 0; i < n; ++i) {
        if (forward) {
            const std::uint32_t bits = std::bit_cast<std::uint32_t>(buffer[i]);
            top = std::max(top, bits & 0x7fffffffu);
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
    return top;
}

// Coordinates [begin, end) of the buffer, begin a multiple of 4096 and of the block. Signs are drawn for `span` coordinates at once.
template <class V, bool forward>
std::uint32_t blocks(const RotationJob& job, std::size_t begin, std::size_t end) {
    alignas(64) float small[4096];
    std::vector<float> large(job.block > 4096 ? job.block : 0);
    float* scratch = large.empty() ? small : large.data();
    const std::size_t span = rotation_span(job.block);
    std::vector<std::uint32_t> words(span / 32);  // a whole number of groups: the span is a multiple of 1024
    typename V::Top top;
    std::uint32_t top_tail = 0;
    const bool streamed = job.streamed && V::streams && reinterpret_cast<std::uintptr_t>(job.to) % 64 == 0;
    const float scale = hadamard_scale(job.block);
    Draws source(job.signs, begin / 128);
    for (std::size_t at = begin; at < end; at += span) {
        const std::size_t have = std::min(span, end - at), rest = have % job.block, whole = have - rest;
        const float* from = job.from + at;
        float* to = job.to + at;
        for (std::size_t j = 0; j < whole + (rest ? std::bit_ceil(rest) : 0); j += 1024) source.next(words.data() + j / 32);
        if (job.block < V::W) {
            for (std::size_t j = 0; j < whole; j += job.block)
                top_tail = std::max(top_tail, plain_block<forward>(from + j, to + j, scratch, job.block, job.block, {words.data(), j}));
        } else if (job.block <= V::R * V::W) {
            first_any<V, forward, !forward>(from, to, whole, job.block / V::W, scale, {words.data()}, top);
        } else {
            for (std::size_t j = 0; j < whole; j += job.block) {
                if (streamed)
                    large_block<V, forward, true>(from + j, to + j, scratch, job.block, scale, {words.data(), j}, top);
                else
                    large_block<V, forward, false>(from + j, to + j, scratch, job.block, scale, {words.data(), j}, top);
            }
        }
        if (rest)
            top_tail = std::max(top_tail, plain_block<forward>(from + whole, to + whole, scratch, rest, std::bit_ceil(rest), {words.data(), whole}));
    }
    if (streamed) V::fence();
    return std::max(top_tail, top.value());
}

}  // namespace
}  // namespace tersegrad
