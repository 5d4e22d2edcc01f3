// rANS with AVX2: eight lanes a register, gathered tables, words moved by a permutation looked up by mask.
#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>

#include "tersegrad/rans.hpp"

namespace tersegrad::rans::detail {
namespace {

using Moves = std::array<std::array<std::uint8_t, 8>, 256>;

// expand[m][lane] = how many lanes below it are in m;  compact[m] brings the lanes of m, in order, to the top.
constexpr Moves make_expand() {
    Moves t{};
    for (unsigned m = 0; m < 256; ++m)
        for (unsigned lane = 0, k = 0; lane < 8; ++lane)
            if (m >> lane & 1) t[m][lane] = static_cast<std::uint8_t>(k++);
    return t;
}
constexpr Moves make_compact() {
    Moves t{};
    for (unsigned m = 0; m < 256; ++m) {
        unsigned k = 8;
        for (unsigned lane = 8; lane-- > 0;)
            if (m >> lane & 1) t[m][--k] = static_cast<std::uint8_t>(lane);
    }
    return t;
}
constexpr Moves expand = make_expand(), compact = make_compact();

inline __m256i move(const Moves& moves, unsigned mask, __m256i v) {
    return _mm256_permutevar8x32_epi32(v, _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(moves[mask].data()))));
}

inline __m256i bytes_at(const std::uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }

inline unsigned sign_mask(__m256i v) { return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(v))); }

}  // namespace

std::uint8_t* encode_steps_avx2(const EncodeModel& model, const std::uint8_t* symbols, std::size_t steps, Contexts ctx, std::uint8_t* p,
                                std::uint32_t* states) {
    constexpr int stride = sizeof(EncodeTable) / 4;
    const auto* base = reinterpret_cast<const int*>(model.tables.data());
    const __m256i word = _mm256_set1_epi32(0xffff);
    __m256i x[8];
    for (int g = 0; g < 8; ++g) x[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + 8 * g));
    for (std::size_t t = steps; t-- > 0;) {
        const std::uint8_t* s = symbols + t * kLanes;
        const int* table = ctx.data && ctx.per_step ? base + stride * ctx.data[t] : base;
        const std::uint8_t* own = ctx.data && !ctx.per_step ? ctx.data + t * kLanes : nullptr;
#pragma GCC unroll 8
        for (int g = 7; g >= 0; --g) {
            __m256i at = bytes_at(s + 8 * g);
            if (own) at = _mm256_add_epi32(at, _mm256_mullo_epi32(bytes_at(own + 8 * g), _mm256_set1_epi32(stride)));
            const __m256i entry = _mm256_i32gather_epi32(table, at, 4);
            const __m256i f = _mm256_and_si256(entry, word);
            __m256i v = x[g];
            const __m256i emits = _mm256_cmpgt_epi32(f, _mm256_srli_epi32(v, 20));  // lanes that do not
            const unsigned mask = sign_mask(emits) ^ 0xff;
            const __m256i words = move(compact, mask, _mm256_and_si256(v, word));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(p - 16),
                             _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
            p -= 2 * std::popcount(mask);
            v = _mm256_blendv_epi8(_mm256_srli_epi32(v, 16), v, emits);
            // X as float32: both halves are exact, the sum rounds once.
            const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(v, 16)), low = _mm256_cvtepi32_ps(_mm256_and_si256(v, word));
            const __m256 whole = _mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(65536.0f)), low);
            const __m256 rcp = _mm256_div_ps(_mm256_set1_ps(1.0f - 0x1p-22f), _mm256_cvtepi32_ps(_mm256_max_epi32(f, _mm256_set1_epi32(1))));
            const __m256i q = _mm256_cvttps_epi32(_mm256_mul_ps(whole, rcp));
            const __m256i r = _mm256_and_si256(_mm256_sub_epi16(v, _mm256_mullo_epi16(q, f)), word);  // in [0, 2f)
            const __m256i fine = _mm256_cmpgt_epi32(f, r);
            const __m256i y = _mm256_add_epi32(_mm256_slli_epi32(q, kPrecision), _mm256_add_epi32(r, _mm256_srli_epi32(entry, 16)));
            x[g] = _mm256_add_epi32(y, _mm256_andnot_si256(fine, _mm256_sub_epi32(_mm256_set1_epi32(kTotal), f)));
        }
    }
    for (int g = 0; g < 8; ++g) _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + 8 * g), x[g]);
    return p;
}

void decode_steps_avx2(const DecodeModel& model, Cursor& c) {
    const __m256i slot = _mm256_set1_epi32(kTotal - 1);
    __m256i x[8];
    for (int g = 0; g < 8; ++g) x[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c.states + 8 * g));
    const std::uint8_t* words = c.words;
    const bool own = c.contexts.data && !c.contexts.per_step;
    for (; c.step < c.steps && words <= c.limit; ++c.step) {
        const std::size_t first = c.step * kLanes;
        const std::size_t table = c.contexts.data && c.contexts.per_step ? c.contexts.data[c.step] : 0;
        const auto* slots = reinterpret_cast<const int*>(model.slots.data() + (table << kPrecision));
        __m256i e[8];
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            __m256i at = _mm256_and_si256(x[g], slot);
            if (own) at = _mm256_or_si256(at, _mm256_slli_epi32(bytes_at(c.contexts.data + first + 8 * static_cast<std::size_t>(g)), kPrecision));
            e[g] = _mm256_i32gather_epi32(slots, at, 4);
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            const __m256i f = _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(e[g], 8), slot), _mm256_set1_epi32(1));
            const __m256i y = _mm256_add_epi32(_mm256_mullo_epi32(f, _mm256_srli_epi32(x[g], kPrecision)), _mm256_srli_epi32(e[g], 20));
            const __m256i empty = _mm256_cmpeq_epi32(_mm256_srli_epi32(y, 16), _mm256_setzero_si256());
            const unsigned mask = sign_mask(empty);
            const __m256i w = move(expand, mask, _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words))));
            x[g] = _mm256_blendv_epi8(y, _mm256_or_si256(_mm256_slli_epi32(y, 16), w), empty);
            words += 2 * std::popcount(mask);
        }
        const __m256i byte = _mm256_set1_epi32(0xff), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (int g = 0; g < 8; g += 4) {
            const __m256i ab = _mm256_packus_epi32(_mm256_and_si256(e[g], byte), _mm256_and_si256(e[g + 1], byte));
            const __m256i cd = _mm256_packus_epi32(_mm256_and_si256(e[g + 2], byte), _mm256_and_si256(e[g + 3], byte));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(c.symbols + first + 8 * static_cast<std::size_t>(g)),
                                _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
        }
    }
    for (int g = 0; g < 8; ++g) _mm256_storeu_si256(reinterpret_cast<__m256i*>(c.states + 8 * g), x[g]);
    c.words = words;
}

void mark_present_avx2(const std::uint8_t* s, std::size_t n, std::uint8_t* present) {
    std::size_t i = 0;
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i bit = _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 1, 2, 4, 8, 16, 32, 64, -128));
    while (i + 64 <= n) {
        // Symbol 16h + l is missing where bit h mod 8 of table[h >= 8][l] is set.
        alignas(32) std::uint8_t table[2][32] = {};
        for (int v = 0; v < 256; ++v)
            if (!present[v])
                for (int copy = 0; copy < 32; copy += 16) table[v >> 7][copy + (v & 15)] |= static_cast<std::uint8_t>(1 << (v >> 4 & 7));
        const __m256i lower = _mm256_load_si256(reinterpret_cast<const __m256i*>(table[0]));
        const __m256i upper = _mm256_load_si256(reinterpret_cast<const __m256i*>(table[1]));
        const auto missing = [&](const std::uint8_t* p) {
            const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
            const __m256i low = _mm256_and_si256(v, nibble), high = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble);
            const __m256i row = _mm256_blendv_epi8(_mm256_shuffle_epi8(lower, low), _mm256_shuffle_epi8(upper, low), v);
            return _mm256_and_si256(row, _mm256_shuffle_epi8(bit, high));
        };
        for (; i + 64 <= n; i += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(s + i) + 4096, _MM_HINT_T0);
            const __m256i hit = _mm256_or_si256(missing(s + i), missing(s + i + 32));
            if (_mm256_testz_si256(hit, hit)) continue;
            for (std::size_t k = i; k < i + 64; ++k) present[s[k]] = 1;
            i += 64;
            break;
        }
    }
    for (; i < n; ++i) present[s[i]] = 1;
}

}  // namespace tersegrad::rans::detail
