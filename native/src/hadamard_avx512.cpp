// GCC 12 takes the intrinsics' own "undefined" operands for uninitialised variables.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "hadamard_blocks.hpp"

namespace tersegrad {
namespace {

struct Avx512 {
    static constexpr std::size_t W = 16, R = 16;
    static constexpr bool streams = true;
    using T = __m512;
    struct Top {
        __m512i bits = _mm512_setzero_si512();
        void take(T v) { bits = _mm512_max_epu32(bits, _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff))); }
        std::uint32_t value() const {
            alignas(64) std::uint32_t all[16];
            _mm512_store_si512(all, bits);
            return *std::max_element(all, all + 16);
        }
    };
    static T load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, T v) { _mm512_storeu_ps(p, v); }
    static void stream(float* p, T v) { _mm512_stream_ps(p, v); }
    static void fence() { _mm_sfence(); }
    static T add(T a, T b) { return _mm512_add_ps(a, b); }
    static T sub(T a, T b) { return _mm512_sub_ps(a, b); }
    static T flipped(T v, std::uint32_t signs) {
        return _mm512_mask_xor_ps(v, static_cast<__mmask16>(signs), v, _mm512_set1_ps(-0.0f));
    }
    static T scaled(T v, float scale) { return _mm512_mul_ps(v, _mm512_set1_ps(scale)); }
    static T scaled(T v, float scale, std::uint32_t signs) {
        return _mm512_mul_ps(v, _mm512_mask_blend_ps(static_cast<__mmask16>(signs), _mm512_set1_ps(scale), _mm512_set1_ps(-scale)));
    }
    static T lanes(T v) {
        // a + b below, a - b above: a fused multiply-add by +-1 rounds once, like an addition.
        const __m512 s1 = _mm512_setr_ps(1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1);
        const __m512 s2 = _mm512_setr_ps(1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1);
        const __m512 s4 = _mm512_setr_ps(1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1);
        const __m512 s8 = _mm512_setr_ps(1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1);
        v = _mm512_fmadd_ps(v, s1, _mm512_permute_ps(v, 0xb1));
        v = _mm512_fmadd_ps(v, s2, _mm512_permute_ps(v, 0x4e));
        v = _mm512_fmadd_ps(v, s4, _mm512_shuffle_f32x4(v, v, 0xb1));
        return _mm512_fmadd_ps(v, s8, _mm512_shuffle_f32x4(v, v, 0x4e));
    }
};

}  // namespace

std::uint32_t rotate_blocks_avx512(const RotationJob& job, bool forward, std::size_t begin, std::size_t end) {
    return forward ? blocks<Avx512, true>(job, begin, end) : blocks<Avx512, false>(job, begin, end);
}

}  // namespace tersegrad
