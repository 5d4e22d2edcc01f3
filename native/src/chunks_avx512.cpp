#include <immintrin.h>

#include "chunks_loops.hpp"

namespace tersegrad::chunks {
namespace {

// Candidates among 64 coordinates, of which `mask` tells; base + position and value. Room for 16 more is needed.
inline std::size_t take(std::uint64_t mask, const __m512 (&v)[4], int base, std::int32_t* indices, float* values) {
    const __m512i along = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto count = static_cast<std::size_t>(_mm_popcnt_u64(mask));
    if (count <= 16) {
        const __m512i bytes = _mm512_set_epi8(63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42, 41, 40, 39, 38,
                                              37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12,
                                              11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i at = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(_mm512_maskz_compress_epi8(mask, bytes)));
        const __m512 low = _mm512_permutex2var_ps(v[0], at, v[1]), high = _mm512_permutex2var_ps(v[2], at, v[3]);
        _mm512_storeu_ps(values, _mm512_mask_blend_ps(_mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), low, high));
        _mm512_storeu_si512(indices, _mm512_add_epi32(_mm512_set1_epi32(base), at));
        return count;
    }
    for (int u = 0; u < 4; ++u) {
        const auto keep = static_cast<__mmask16>(mask >> 16 * u);
        _mm512_storeu_si512(indices, _mm512_maskz_compress_epi32(keep, _mm512_add_epi32(_mm512_set1_epi32(base + 16 * u), along)));
        _mm512_storeu_ps(values, _mm512_maskz_compress_ps(keep, v[u]));
        indices += _mm_popcnt_u32(keep), values += _mm_popcnt_u32(keep);
    }
    return count;
}

// A sum is looked at before it leaves its registers. Widths are multiples of 64.
template <bool around>
void add_and_scan_lines(const float* x, const float* carry, float decay, float* sum, const Scan& of) {
    constexpr std::size_t ahead = 768;
    const __m512 by = _mm512_set1_ps(decay);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const std::size_t rows = of.rows, stride = of.stride, width = of.width, tiles = of.tiles, most = of.most, room = of.room;
    const std::uint32_t* const thresholds = of.thresholds;
    std::size_t* const counts = of.counts;
    for (std::size_t row = 0; row < rows; ++row) {
        std::int32_t* indices = of.indices;
        float* values = of.values;
        for (std::size_t c = 0; c < tiles; ++c, indices += room, values += room) {
            std::size_t found = counts[c];
            // No key reaches -1, which is larger than all.
            const __m512i least = _mm512_set1_epi32(found > most ? -1 : static_cast<int>(thresholds[c]));
            for (std::size_t j = 0; j < width; j += 64) {
                const std::size_t at = row * stride + c * width + j;
                __m512 v[4];
                std::uint64_t mask = 0;
                for (std::size_t u = 0; u < 4; ++u) {
                    const std::size_t i = at + 16 * u;
                    // What is stored around the caches leaves them to the two that are read, and the processor sees these coming.
                    if constexpr (!around) {
                        __builtin_prefetch(x + i + ahead);
                        __builtin_prefetch(carry + i + ahead);
                        __builtin_prefetch(sum + i + ahead, 1);
                    }
                    v[u] = _mm512_add_ps(_mm512_mul_ps(by, _mm512_loadu_ps(carry + i)), _mm512_loadu_ps(x + i));
                    if constexpr (around) _mm512_stream_ps(sum + i, v[u]);
                    else _mm512_storeu_ps(sum + i, v[u]);
                    mask |= std::uint64_t{_mm512_cmpge_epu32_mask(_mm512_and_si512(_mm512_castps_si512(v[u]), magnitude), least)} << 16 * u;
                }
                found += take(mask, v, static_cast<int>(row * width + j), indices + found, values + found);
            }
            counts[c] = found;
        }
    }
}

void pick(const std::int32_t* indices, const float* candidates, const std::uint32_t*, std::size_t n, std::uint32_t threshold, std::size_t, std::size_t ties,
          std::int32_t* places, float* values) {
    select::table_avx512.filter(indices, candidates, n, threshold, &ties, places, values);
}

void add_and_scan(const float* x, const float* carry, float decay, float* sum, bool around, const Scan& of) {
    if (of.width % 64) return sum_and_scan(x, carry, decay, sum, around, of);
    const bool aligned = reinterpret_cast<std::uintptr_t>(sum) % 64 == 0 && of.stride % 16 == 0;
    (around && aligned ? add_and_scan_lines<true> : add_and_scan_lines<false>)(x, carry, decay, sum, of);
}

}  // namespace

const Loops loops_avx512 = {maxima_of, kth_of, pick, sum_of, add_and_scan};

}  // namespace tersegrad::chunks
