// Philox-4x32-10 in the instruction set of the including file: one per instruction set, for all kernels. Everything here is local
// to the including file, so that no inline function compiled for one machine ends up running on another.
//
// A block of four 32-bit words serves eight coordinates, sixteen bits each, and lies in memory as it is on a little-endian
// machine. `Draws` writes eight blocks, that is 64 coordinates, at a time.
#pragma once
#include <cstring>

#include "tersegrad/philox.hpp"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tersegrad {
namespace {

#if defined(__AVX512F__)

// Eight blocks in the 64-bit lanes of a register, whose upper halves may hold anything because the multiplication reads lower
// halves only. The upper counter word is that of `block` throughout, so that half of the first two rounds is done once.
struct Philox {
    __m512i k0[10], k1[10], m0, m1, salt1, q1_2, c2_2, p2;

    static __m512i down(__m512i p) {  // by a shuffle, not a shift: shifts share their port with the multiplications
        return _mm512_shuffle_epi32(p, static_cast<_MM_PERM_ENUM>(0xF5));
    }

    Philox(const Stream& stream, std::uint64_t block) {
        std::uint32_t a = static_cast<std::uint32_t>(stream.key), b = static_cast<std::uint32_t>(stream.key >> 32);
        for (int r = 0; r < 10; ++r, a += kWeyl0, b += kWeyl1) {
            k0[r] = _mm512_set1_epi64(a);
            k1[r] = _mm512_set1_epi64(b);
        }
        m0 = _mm512_set1_epi64(kMultiplier0);
        m1 = _mm512_set1_epi64(kMultiplier1);
        const __m512i high = _mm512_set1_epi64(static_cast<long long>(std::uint64_t{stream.purpose} << 24 | block >> 32));
        const __m512i q1 = _mm512_mul_epu32(_mm512_set1_epi64(stream.step), m1);
        p2 = _mm512_mul_epu32(_mm512_ternarylogic_epi64(down(q1), high, k0[0], 0x96), m0);
        salt1 = _mm512_xor_si512(_mm512_set1_epi64(stream.salt), k1[0]);
        c2_2 = _mm512_xor_si512(down(p2), k1[1]);
        q1_2 = _mm512_xor_si512(q1, k0[1]);
    }

    // Even lanes hold blocks 0-3, odd lanes 4-7: the final unpacks then leave coordinates in order.
    static __m512i counters(std::uint64_t block) {
        return _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(block)), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
    }

    void operator()(__m512i index, void* out) const {
        __m512i draws[2];
        groups<1>(index, draws, [](int) {});
        _mm512_storeu_si512(out, draws[0]);
        _mm512_storeu_si512(static_cast<char*>(out) + 64, draws[1]);
    }

    // N groups of 64 draws side by side, and meanwhile(0) .. meanwhile(7) between the rounds: a group alone is a chain of seventy
    // cycles that leaves both vector ports idle most of the time, and is too long to be overlapped with much else by itself.
    template <int N, class Meanwhile>
    void groups(__m512i index, __m512i* out, Meanwhile&& meanwhile) const {
        __m512i c0[N], c1[N], c2[N], c3[N];
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) {
            const __m512i p1 = _mm512_mul_epu32(_mm512_add_epi64(index, _mm512_set1_epi64(8 * g)), m0);
            const __m512i q2 = _mm512_mul_epu32(_mm512_xor_si512(down(p1), salt1), m1);
            c0[g] = _mm512_xor_si512(down(q2), q1_2), c1[g] = q2, c2[g] = _mm512_xor_si512(p1, c2_2), c3[g] = p2;
        }
#pragma GCC unroll 8
        for (int r = 2; r < 10; ++r) {
#pragma GCC unroll 4
            for (int g = 0; g < N; ++g) {
                const __m512i p = _mm512_mul_epu32(c0[g], m0), q = _mm512_mul_epu32(c2[g], m1);
                c0[g] = _mm512_ternarylogic_epi64(down(q), c1[g], k0[r], 0x96);
                c2[g] = _mm512_ternarylogic_epi64(down(p), c3[g], k1[r], 0x96);
                c1[g] = q;
                c3[g] = p;
            }
            meanwhile(r - 2);
        }
#pragma GCC unroll 4
        for (int g = 0; g < N; ++g) {
            const __m512i w01 = _mm512_mask_shuffle_epi32(c0[g], 0xAAAA, c1[g], static_cast<_MM_PERM_ENUM>(0xA0));
            const __m512i w23 = _mm512_mask_shuffle_epi32(c2[g], 0xAAAA, c3[g], static_cast<_MM_PERM_ENUM>(0xA0));
            out[2 * g] = _mm512_unpacklo_epi64(w01, w23);
            out[2 * g + 1] = _mm512_unpackhi_epi64(w01, w23);
        }
    }
};

class Draws {
  public:
    Draws(const Stream& stream, std::uint64_t block)
        : stream_(stream), philox_(stream, block), index_(Philox::counters(block)), block_(block), left_(until_carry(block)) {}

    void next(void* out) {
        if (left_ < 8) [[unlikely]] return cross(out);
        philox_(index_, out);
        index_ = _mm512_add_epi64(index_, _mm512_set1_epi64(8));
        block_ += 8;
        left_ -= 8;
    }

  private:
    static std::uint64_t until_carry(std::uint64_t block) { return (std::uint64_t{1} << 32) - (block & 0xffffffffu); }

    // A carry into the upper counter word happens every 2^35 coordinates; the group that it cuts is put together.
    void cross(void* out) {
        char both[256];
        philox_(index_, both);
        const Philox after(stream_, block_ + left_);
        after(Philox::counters(block_ + left_), both + 16 * left_);
        std::memcpy(out, both, 128);
        *this = Draws(stream_, block_ + 8);
    }

    Stream stream_;
    Philox philox_;
    __m512i index_;
    std::uint64_t block_, left_;  // left_: blocks until the upper counter word changes
};

#elif defined(__AVX2__)

class Draws {
  public:
    Draws(const Stream& stream, std::uint64_t block)
        : high_(_mm256_set1_epi64x(static_cast<long long>(stream.purpose) << 24)), step_(_mm256_set1_epi64x(stream.step)),
          salt_(_mm256_set1_epi64x(stream.salt)),
          index_(_mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(block)), _mm256_setr_epi64x(0, 2, 1, 3))) {
        std::uint32_t a = static_cast<std::uint32_t>(stream.key), b = static_cast<std::uint32_t>(stream.key >> 32);
        for (int r = 0; r < 10; ++r, a += kWeyl0, b += kWeyl1) {
            k0_[r] = _mm256_set1_epi64x(a);
            k1_[r] = _mm256_set1_epi64x(b);
        }
    }

    void next(void* out) {
        const __m256i m0 = _mm256_set1_epi64x(kMultiplier0), m1 = _mm256_set1_epi64x(kMultiplier1);
        auto* to = static_cast<__m256i*>(out);
        for (int half = 0; half < 2; ++half, to += 2) {
            __m256i c0 = index_, c1 = _mm256_or_si256(_mm256_srli_epi64(index_, 32), high_), c2 = step_, c3 = salt_;
#pragma GCC unroll 10
            for (int r = 0; r < 10; ++r) {
                const __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
                c0 = _mm256_xor_si256(_mm256_xor_si256(c1, k0_[r]), _mm256_srli_epi64(p1, 32));
                c2 = _mm256_xor_si256(_mm256_xor_si256(c3, k1_[r]), _mm256_srli_epi64(p0, 32));
                c1 = p1;
                c3 = p0;
            }
            const __m256i w01 = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
            const __m256i w23 = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
            _mm256_storeu_si256(to, _mm256_unpacklo_epi64(w01, w23));
            _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi64(w01, w23));
            index_ = _mm256_add_epi64(index_, _mm256_set1_epi64x(4));
        }
    }

  private:
    __m256i k0_[10], k1_[10], high_, step_, salt_, index_;
};

#else

class Draws {
  public:
    Draws(const Stream& stream, std::uint64_t block) : stream_(stream), block_(block) {}

    void next(void* out) {
        for (int k = 0; k < 8; ++k) {
            const PhiloxWords words = philox_block(stream_, block_++);
            std::memcpy(static_cast<char*>(out) + 16 * k, words.w, 16);
        }
    }

  private:
    Stream stream_;
    std::uint64_t block_;
};

#endif

}  // namespace
}  // namespace tersegrad
