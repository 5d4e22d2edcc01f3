#include <immintrin.h>

#include "hadamard_blocks.hpp"

namespace tersegrad {
namespace {

struct Avx2 {
    static constexpr std::size_t W = 8, R = 8;
    static constexpr bool streams = false;  // half lines at eight places at once do not combine
    using T = __m256;
    struct Top {
        __m256i bits = _mm256_setzero_si256();
        void take(T v) { bits = _mm256_max_epu32(bits, _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff))); }
        std::uint32_t value() const {
            alignas(32) std::uint32_t all[8];
            _mm256_store_si256(reinterpret_cast<__m256i*>(all), bits);
            return *std::max_element(all, all + 8);
        }
    };
    static T load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, T v) { _mm256_storeu_ps(p, v); }
    static void stream(float* p, T v) { _mm256_stream_ps(p, v); }
    static void fence() { _mm_sfence(); }
    static T add(T a, T b) { return _mm256_add_ps(a, b); }
    static T sub(T a, T b) { return _mm256_sub_ps(a, b); }
    static T flipped(T v, std::uint32_t signs) {
        const __m256i shifted = _mm256_sllv_epi32(_mm256_set1_epi32(static_cast<int>(signs)), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
        return _mm256_xor_ps(v, _mm256_and_ps(_mm256_castsi256_ps(shifted), _mm256_set1_ps(-0.0f)));
    }
    static T scaled(T v, float scale) { return _mm256_mul_ps(v, _mm256_set1_ps(scale)); }
    static T scaled(T v, float scale, std::uint32_t signs) { return _mm256_mul_ps(flipped(v, signs), _mm256_set1_ps(scale)); }
    static T lanes(T v) {
        // a + b below, a - b above: partner plus v with its upper half negated, which is the same rounding.
        const __m256 s1 = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
        const __m256 s2 = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
        const __m256 s4 = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
        v = _mm256_add_ps(_mm256_permute_ps(v, 0xb1), _mm256_xor_ps(v, s1));
        v = _mm256_add_ps(_mm256_permute_ps(v, 0x4e), _mm256_xor_ps(v, s2));
        return _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, s4));
    }
};

}  // namespace

std::uint32_t rotate_blocks_avx2(const RotationJob& job, bool forward, std::size_t begin, std::size_t end) {
    return forward ? blocks<Avx2, true>(job, begin, end) : blocks<Avx2, false>(job, begin, end);
}

}  // namespace tersegrad
