#include <immintrin.h>

#include "select_feistel.inl"
#include "tersegrad/select.hpp"

namespace tersegrad::select {
namespace {

inline __m512i keys_of(const float* x) {
    return _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7fffffff));
}

std::size_t scan(const float* x, std::size_t n, std::uint32_t threshold, std::int32_t base, std::int32_t* indices, float* values) {
    const __m512i t = _mm512_set1_epi32(static_cast<int>(threshold)), magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i step = _mm512_set1_epi32(16);
    __m512i position =
        _mm512_add_epi32(_mm512_set1_epi32(base), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    std::size_t count = 0, i = 0;
    // No branch on the mask: at a few percent it would be mispredicted more often than the two shuffles cost.
    auto take = [&](const float* p) {
        const __m512i v = _mm512_loadu_si512(p);
        const __mmask16 keep = _mm512_cmpge_epu32_mask(_mm512_and_si512(v, magnitude), t);
        _mm512_storeu_si512(indices + count, _mm512_maskz_compress_epi32(keep, position));
        _mm512_storeu_si512(values + count, _mm512_maskz_compress_epi32(keep, v));
        count += static_cast<std::size_t>(_mm_popcnt_u32(keep));
        position = _mm512_add_epi32(position, step);
    };
    for (; i + 64 <= n; i += 64) {
        for (int u = 0; u < 4; ++u) {
            _mm_prefetch(reinterpret_cast<const char*>(x + i + 16 * u) + 6144, _MM_HINT_T0);
            take(x + i + 16 * u);
        }
    }
    for (; i + 16 <= n; i += 16) take(x + i);
    if (i < n) {
        const __mmask16 inside = static_cast<__mmask16>((1u << (n - i)) - 1);
        const __m512i v = _mm512_maskz_loadu_epi32(inside, x + i);
        const __mmask16 keep = _mm512_mask_cmpge_epu32_mask(inside, _mm512_and_si512(v, magnitude), t);
        _mm512_storeu_si512(indices + count, _mm512_maskz_compress_epi32(keep, position));
        _mm512_storeu_si512(values + count, _mm512_maskz_compress_epi32(keep, v));
        count += static_cast<std::size_t>(_mm_popcnt_u32(keep));
    }
    return count;
}

std::size_t filter(const std::int32_t* indices, const float* values, std::size_t n, std::uint32_t threshold, std::size_t* ties,
                   std::int32_t* out_indices, float* out_values) {
    const __m512i t = _mm512_set1_epi32(static_cast<int>(threshold)), magnitude = _mm512_set1_epi32(0x7fffffff);
    std::size_t count = 0, left = *ties;
    for (std::size_t i = 0; i < n; i += 16) {
        const __mmask16 inside = n - i >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << (n - i)) - 1);
        const __m512i v = _mm512_maskz_loadu_epi32(inside, values + i), at = _mm512_maskz_loadu_epi32(inside, indices + i);
        const __m512i k = _mm512_and_si512(v, magnitude);
        unsigned keep = _mm512_mask_cmpgt_epu32_mask(inside, k, t);
        const unsigned equal = _mm512_mask_cmpeq_epu32_mask(inside, k, t);
        if (equal && left) {
            const std::size_t have = static_cast<std::size_t>(_mm_popcnt_u32(equal));
            const unsigned first = have <= left ? equal : _pdep_u32((1u << left) - 1, equal);
            left -= have <= left ? have : left;
            keep |= first;
        }
        const std::size_t kept = static_cast<std::size_t>(_mm_popcnt_u32(keep));
        const __mmask16 room = static_cast<__mmask16>((1u << kept) - 1);
        const __mmask16 chosen = static_cast<__mmask16>(keep);
        _mm512_mask_storeu_epi32(out_indices + count, room, _mm512_maskz_compress_epi32(chosen, at));
        _mm512_mask_storeu_epi32(out_values + count, room, _mm512_maskz_compress_epi32(chosen, v));
        count += kept;
    }
    *ties = left;
    return count;
}

bool finite(const float* x, std::size_t n) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        for (int u = 0; u < 4; ++u) _mm_prefetch(reinterpret_cast<const char*>(x + i + 16 * u) + 6144, _MM_HINT_T0);
        a = _mm512_max_epu32(a, keys_of(x + i));
        b = _mm512_max_epu32(b, keys_of(x + i + 16));
        c = _mm512_max_epu32(c, keys_of(x + i + 32));
        d = _mm512_max_epu32(d, keys_of(x + i + 48));
    }
    a = _mm512_max_epu32(_mm512_max_epu32(a, b), _mm512_max_epu32(c, d));
    std::uint32_t largest = _mm512_reduce_max_epu32(a);
    for (; i < n; ++i) largest = key(x[i]) > largest ? key(x[i]) : largest;
    return largest < infinite_key;
}

}  // namespace

const Table table_avx512 = {scan, filter, finite, feistel_network};

}  // namespace tersegrad::select
