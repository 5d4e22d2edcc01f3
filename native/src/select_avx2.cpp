#include <immintrin.h>

#include "select_feistel.inl"
#include "tersegrad/select.hpp"

namespace tersegrad::select {
namespace {

std::size_t scan(const float* x, std::size_t n, std::uint32_t threshold, std::int32_t base, std::int32_t* indices, float* values) {
    // Keys and threshold are below 2^31, so the signed comparison serves.
    const __m256i t = _mm256_set1_epi32(static_cast<int>(threshold) - 1), magnitude = _mm256_set1_epi32(0x7fffffff);
    std::size_t count = 0, i = 0;
    auto mask = [&](const float* p) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return static_cast<std::uint32_t>(
            _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_and_si256(v, magnitude), t))));
    };
    for (; i + 32 <= n; i += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(x + i) + 6144, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(x + i + 16) + 6144, _MM_HINT_T0);
        std::uint32_t keep = mask(x + i) | mask(x + i + 8) << 8 | mask(x + i + 16) << 16 | mask(x + i + 24) << 24;
        while (keep) {
            const unsigned at = static_cast<unsigned>(_tzcnt_u32(keep));
            indices[count] = base + static_cast<std::int32_t>(i + at);
            values[count++] = x[i + at];
            keep &= keep - 1;
        }
    }
    for (; i < n; ++i) {
        indices[count] = base + static_cast<std::int32_t>(i);
        values[count] = x[i];
        count += key(x[i]) >= threshold;
    }
    return count;
}

bool finite(const float* x, std::size_t n) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i a = _mm256_setzero_si256(), b = a;
    std::size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        _mm_prefetch(reinterpret_cast<const char*>(x + i) + 6144, _MM_HINT_T0);
        a = _mm256_max_epi32(a, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), magnitude));
        b = _mm256_max_epi32(b, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 8)), magnitude));
    }
    a = _mm256_max_epi32(a, b);
    std::uint32_t lanes[8], largest = 0;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), a);
    for (std::uint32_t lane : lanes) largest = lane > largest ? lane : largest;
    for (; i < n; ++i) largest = key(x[i]) > largest ? key(x[i]) : largest;
    return largest < infinite_key;
}

std::size_t filter(const std::int32_t* indices, const float* values, std::size_t n, std::uint32_t threshold, std::size_t* ties,
                   std::int32_t* out_indices, float* out_values) {
    std::size_t count = 0, left = *ties;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t k = key(values[i]);
        bool keep = k > threshold;
        if (k == threshold && left) --left, keep = true;
        if (keep) out_indices[count] = indices[i], out_values[count] = values[i], ++count;
    }
    *ties = left;
    return count;
}

}  // namespace

const Table table_avx2 = {scan, filter, finite, feistel_network};

}  // namespace tersegrad::select
