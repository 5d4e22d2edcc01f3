#include <immintrin.h>

#include "chunks_loops.hpp"

namespace tersegrad::chunks {
namespace {

// A sum is looked at before it leaves its register. Widths are multiples of 16.
template <bool around>
void add_and_scan_lines(const float* x, const float* carry, float decay, float* sum, const Scan& of) {
    constexpr std::size_t ahead = 768;
    const __m512 by = _mm512_set1_ps(decay);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), step = _mm512_set1_epi32(16);
    const __m512i along = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const std::size_t rows = of.rows, stride = of.stride, width = of.width, tiles = of.tiles, most = of.most, room = of.room;
    const std::uint32_t* const thresholds = of.thresholds;
    std::size_t* const counts = of.counts;
    for (std::size_t row = 0; row < rows; ++row, x += stride, carry += stride, sum += stride) {
        const __m512i first = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(row * width)), along);
        std::int32_t* indices = of.indices;
        float* values = of.values;
        for (std::size_t c = 0; c < tiles; ++c, indices += room, values += room) {
            std::size_t found = counts[c];
            // No key reaches -1, which is larger than all.
            const __m512i least = _mm512_set1_epi32(found > most ? -1 : static_cast<int>(thresholds[c]));
            __m512i position = first;
            for (std::size_t j = c * width; j < (c + 1) * width; j += 16) {
                // What is stored around the caches leaves them to the two that are read, and the processor sees these coming.
                if constexpr (!around) {
                    __builtin_prefetch(x + j + ahead);
                    __builtin_prefetch(carry + j + ahead);
                    __builtin_prefetch(sum + j + ahead, 1);
                }
                const __m512 v = _mm512_add_ps(_mm512_mul_ps(by, _mm512_loadu_ps(carry + j)), _mm512_loadu_ps(x + j));
                if constexpr (around) _mm512_stream_ps(sum + j, v);
                else _mm512_storeu_ps(sum + j, v);
                const __m512i bits = _mm512_castps_si512(v);
                const __mmask16 keep = _mm512_cmpge_epu32_mask(_mm512_and_si512(bits, magnitude), least);
                _mm512_storeu_si512(indices + found, _mm512_maskz_compress_epi32(keep, position));
                _mm512_storeu_si512(values + found, _mm512_maskz_compress_epi32(keep, bits));
                found += static_cast<std::size_t>(_mm_popcnt_u32(keep));
                position = _mm512_add_epi32(position, step);
            }
            counts[c] = found;
        }
    }
}

void add_and_scan(const float* x, const float* carry, float decay, float* sum, bool around, const Scan& of) {
    if (of.width % 16) return sum_and_scan(x, carry, decay, sum, around, of);
    const bool aligned = reinterpret_cast<std::uintptr_t>(sum) % 64 == 0 && of.stride % 16 == 0;
    (around && aligned ? add_and_scan_lines<true> : add_and_scan_lines<false>)(x, carry, decay, sum, of);
}

}  // namespace

const Loops loops_avx512 = {maxima_of, kth_of, sum_of, add_and_scan};

}  // namespace tersegrad::chunks
