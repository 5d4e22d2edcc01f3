// rANS with AVX2: eight lanes a register, no gathers, words moved by a permutation looked up by mask.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "tersegrad/rans.hpp"

namespace tersegrad::rans::detail {
namespace {

using Moves = std::array<std::array<std::uint8_t, 16>, 256>;

// Shuffles of eight words. Of expand[m], lane k of those in m takes the word whose number is that of the lanes in m below k; compact[m] brings
// the words of the lanes that are not in m, in order, to the top.
constexpr Moves make_expand() {
    Moves t{};
    for (unsigned m = 0; m < 256; ++m)
        for (unsigned lane = 0, k = 0; lane < 8; ++lane)
            if (m >> lane & 1) t[m][2 * lane] = static_cast<std::uint8_t>(2 * k), t[m][2 * lane + 1] = static_cast<std::uint8_t>(2 * k + 1), ++k;
    return t;
}
constexpr Moves make_compact() {
    Moves t{};
    for (unsigned m = 0; m < 256; ++m) {
        unsigned k = 8;
        for (unsigned lane = 8; lane-- > 0;)
            if (!(m >> lane & 1)) --k, t[m][2 * k] = static_cast<std::uint8_t>(2 * lane), t[m][2 * k + 1] = static_cast<std::uint8_t>(2 * lane + 1);
    }
    return t;
}
alignas(64) constexpr Moves expand = make_expand(), compact = make_compact();

inline __m128i move(const Moves& moves, unsigned mask, __m128i words) {
    return _mm_shuffle_epi8(words, _mm_load_si128(reinterpret_cast<const __m128i*>(moves[mask].data())));
}

inline __m256i bytes_at(const std::uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }

inline unsigned sign_mask(__m256i v) { return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(v))); }

// A gather by plain loads, faster than the instruction on most machines.
inline __m256i load_eight(const std::uint32_t* table, const std::uint32_t* at) {
    const auto one = [&](int k) { return _mm_cvtsi32_si128(static_cast<int>(table[at[k]])); };
    const __m128i low = _mm_unpacklo_epi64(_mm_unpacklo_epi32(one(0), one(1)), _mm_unpacklo_epi32(one(2), one(3)));
    const __m128i high = _mm_unpacklo_epi64(_mm_unpacklo_epi32(one(4), one(5)), _mm_unpacklo_epi32(one(6), one(7)));
    return _mm256_set_m128i(high, low);
}

enum class Choice { one, step, symbol };

// f | start << 16 of 32 symbols, in four groups of eight lanes. Tables of 16 * M entries, looked up by byte shuffles.
template <int M>
struct Lookup {
    __m256i planes[4][M];
    void load(const EncodeTable& table) {
        for (int plane = 0; plane < 4; ++plane)
            for (int m = 0; m < M; ++m)
                planes[plane][m] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table.planes[plane] + 16 * m)));
    }
    // One table of 16 entries, from which the low bits of a symbol choose: the others tell no two symbols of it apart.
    void fold(const EncodeTable& table) {
        for (int plane = 0; plane < 4; ++plane) {
            const auto* from = reinterpret_cast<const __m128i*>(table.planes[plane]);
            const __m128i low = _mm_or_si128(_mm_load_si128(from), _mm_load_si128(from + 1));
            planes[plane][0] = _mm256_broadcastsi128_si256(_mm_or_si128(low, _mm_or_si128(_mm_load_si128(from + 2), _mm_load_si128(from + 3))));
        }
    }
    void find(__m256i s, __m256i entry[4]) const {
        // Groups of four bytes alternate between the halves, so that the unpacks below end in lane order.
        s = _mm256_permutevar8x32_epi32(s, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        const __m256i bit4 = _mm256_slli_epi16(s, 3), bit5 = _mm256_slli_epi16(s, 2);
        __m256i bytes[4];
        for (int plane = 0; plane < 4; ++plane) {
            bytes[plane] = _mm256_shuffle_epi8(planes[plane][0], s);
            if constexpr (M > 1) bytes[plane] = _mm256_blendv_epi8(bytes[plane], _mm256_shuffle_epi8(planes[plane][1], s), bit4);
            if constexpr (M > 2)
                bytes[plane] = _mm256_blendv_epi8(
                    bytes[plane],
                    _mm256_blendv_epi8(_mm256_shuffle_epi8(planes[plane][2], s), _mm256_shuffle_epi8(planes[plane][3], s), bit4), bit5);
        }
        const __m256i f_low = _mm256_unpacklo_epi8(bytes[0], bytes[1]), f_high = _mm256_unpackhi_epi8(bytes[0], bytes[1]);
        const __m256i s_low = _mm256_unpacklo_epi8(bytes[2], bytes[3]), s_high = _mm256_unpackhi_epi8(bytes[2], bytes[3]);
        entry[0] = _mm256_unpacklo_epi16(f_low, s_low);
        entry[1] = _mm256_unpackhi_epi16(f_low, s_low);
        entry[2] = _mm256_unpacklo_epi16(f_high, s_high);
        entry[3] = _mm256_unpackhi_epi16(f_high, s_high);
    }
};

// Codes four groups of eight lanes, the last one first, and stage by stage, so that one group's results arrive while the others are worked on.
inline void encode_32(__m256i* x, const __m256i* entry, std::uint8_t*& p) {
    const __m256i word = _mm256_set1_epi32(0xffff);
    __m256i v[4], f[4], q[4];
#pragma GCC unroll 4
    for (int g = 3; g >= 0; --g) {
        f[g] = _mm256_and_si256(entry[g], word);
        const __m256i stays = _mm256_cmpgt_epi32(f[g], _mm256_srli_epi32(x[g], 20)), low = _mm256_and_si256(x[g], word);
        const unsigned mask = sign_mask(stays);
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        p -= 16;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), move(compact, mask, words));
        p += 2 * std::popcount(mask);
        v[g] = _mm256_blendv_epi8(_mm256_srli_epi32(x[g], 16), x[g], stays);
    }
#pragma GCC unroll 4
    for (int g = 3; g >= 0; --g) {
        // In float32, with f made larger by 2^-22: that outweighs the roundings (the two of X together are below 1.5 * 2^-24), so that q is
        // right or one too small.
        const __m256 part = _mm256_cvtepi32_ps(v[g]), whole = _mm256_blendv_ps(part, _mm256_add_ps(part, _mm256_set1_ps(0x1p32f)), part);
        q[g] = _mm256_cvttps_epi32(_mm256_div_ps(whole, _mm256_mul_ps(_mm256_cvtepi32_ps(f[g]), _mm256_set1_ps(1.0f + 0x1p-22f))));
    }
#pragma GCC unroll 4
    for (int g = 3; g >= 0; --g) {
        const __m256i r = _mm256_and_si256(_mm256_sub_epi16(v[g], _mm256_mullo_epi16(q[g], f[g])), word);  // in [0, 2f)
        const __m256i fine = _mm256_cmpgt_epi32(f[g], r);
        const __m256i y = _mm256_add_epi32(_mm256_slli_epi32(q[g], kPrecision), _mm256_add_epi32(r, _mm256_srli_epi32(entry[g], 16)));
        x[g] = _mm256_add_epi32(y, _mm256_andnot_si256(fine, _mm256_sub_epi32(_mm256_set1_epi32(kTotal), f[g])));
    }
}

// Whether no two of the first 64 symbols that occur have the same low bits.
bool foldable(const EncodeTable& table) {
    for (int s = 0; s < 16; ++s)
        if ((table.packed[s] != 0) + (table.packed[s + 16] != 0) + (table.packed[s + 32] != 0) + (table.packed[s + 48] != 0) > 1) return false;
    return true;
}

template <int M, Choice C>
std::uint8_t* encode_shuffles(const EncodeModel& model, const std::uint8_t* symbols, std::size_t steps, const std::uint8_t* ctx,
                              std::uint8_t* p, std::uint32_t* states) {
    Lookup<M> lookup;
    if constexpr (C == Choice::symbol) lookup.load(model.flat);
    if constexpr (C == Choice::one && M == 1) lookup.fold(model.tables[0]);
    if constexpr (C == Choice::one && M > 1) lookup.load(model.tables[0]);
    const __m128i shift = _mm_cvtsi32_si128(model.shift);
    __m256i x[8];
    for (int g = 0; g < 8; ++g) x[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + 8 * g));
    for (std::size_t t = steps; t-- > 0;) {
        if constexpr (C == Choice::step) lookup.load(model.tables[ctx[t]]);
#pragma GCC unroll 2
        for (int half = 1; half >= 0; --half) {
            const std::size_t at = t * kLanes + 32 * static_cast<std::size_t>(half);
            __m256i s = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbols + at));
            if constexpr (C == Choice::symbol)
                s = _mm256_or_si256(s, _mm256_sll_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(ctx + at)), shift));
            __m256i entry[4];
            lookup.find(s, entry);
            encode_32(x + 4 * half, entry, p);
        }
    }
    for (int g = 0; g < 8; ++g) _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + 8 * g), x[g]);
    return p;
}

std::uint8_t* encode_large(const EncodeModel& model, const std::uint8_t* symbols, std::size_t steps, Contexts ctx, std::uint8_t* p,
                           std::uint32_t* states) {
    alignas(32) std::uint32_t entries[kAhead][kLanes];
    __m256i x[8];
    for (int g = 0; g < 8; ++g) x[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + 8 * g));
    for (std::size_t end = steps; end > 0;) {
        const std::size_t begin = end - std::min(end, kAhead);
        for (std::size_t t = begin; t < end; ++t)
            look_up(model, symbols + t * kLanes, ctx.at(t * kLanes), entries[t - begin]);
        for (std::size_t t = end; t-- > begin;) {
            const __m256i* const entry = reinterpret_cast<const __m256i*>(entries[t - begin]);
            encode_32(x + 4, entry + 4, p);
            encode_32(x, entry, p);
        }
        end = begin;
    }
    for (int g = 0; g < 8; ++g) _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + 8 * g), x[g]);
    return p;
}

// Whether all lanes of a step have one context.
inline bool uniform(const std::uint8_t* ctx) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ctx)), b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ctx + 32));
    const __m256i first = _mm256_broadcastb_epi8(_mm256_castsi256_si128(a));
    return _mm256_movemask_epi8(_mm256_and_si256(_mm256_cmpeq_epi8(a, first), _mm256_cmpeq_epi8(b, first))) == -1;
}

// Many contexts, up to 32 symbols. Steps of one context take its table into registers, or nothing at all where it leaves no choice.
std::uint8_t* encode_mixed(const EncodeModel& model, const std::uint8_t* symbols, std::size_t steps, const std::uint8_t* ctx, std::uint8_t* p,
                           std::uint32_t* states) {
    const std::uint32_t* const packed = model.packed.data();
    Lookup<2> lookup;
    lookup.load(model.tables[0]);
    int loaded = 0;
    __m256i x[8];
    for (int g = 0; g < 8; ++g) x[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states + 8 * g));
    for (std::size_t t = steps; t-- > 0;) {
        const std::uint8_t *const here = ctx + t * kLanes, *const s = symbols + t * kLanes;
        if (uniform(here)) {
            if (model.silent[here[0]]) continue;
            if (loaded != here[0]) lookup.load(model.tables[loaded = here[0]]);
#pragma GCC unroll 2
            for (int half = 1; half >= 0; --half) {
                __m256i entry[4];
                lookup.find(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + 32 * half)), entry);
                encode_32(x + 4 * half, entry, p);
            }
            continue;
        }
        alignas(32) std::uint32_t at[kLanes];
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g)
            _mm256_store_si256(reinterpret_cast<__m256i*>(at + 8 * g), _mm256_or_si256(_mm256_slli_epi32(bytes_at(here + 8 * g), 5), bytes_at(s + 8 * g)));
        __m256i entry[8];
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) entry[g] = load_eight(packed, at + 8 * g);
        encode_32(x + 4, entry + 4, p);
        encode_32(x, entry, p);
    }
    for (int g = 0; g < 8; ++g) _mm256_storeu_si256(reinterpret_cast<__m256i*>(states + 8 * g), x[g]);
    return p;
}

template <Choice C>
std::uint8_t* encode_by_size(int entries, const EncodeModel& model, const std::uint8_t* symbols, std::size_t steps, const std::uint8_t* ctx,
                             std::uint8_t* p, std::uint32_t* states) {
    if (entries <= 16) return encode_shuffles<1, C>(model, symbols, steps, ctx, p, states);
    if (entries <= 32) return encode_shuffles<2, C>(model, symbols, steps, ctx, p, states);
    return encode_shuffles<4, C>(model, symbols, steps, ctx, p, states);
}

template <Choice C>
void decode_slots(const DecodeModel& model, Cursor& c) {
    const __m256i slot = _mm256_set1_epi32(kTotal - 1);
    __m256i x[8];
    for (int g = 0; g < 8; ++g) x[g] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c.states + 8 * g));
    // Local copies: a store of symbols may alias anything else.
    const std::uint8_t *words = c.words, *const limit = c.limit, *const contexts = c.contexts.data;
    const std::uint32_t* const tables = model.slots.data();
    std::uint8_t* const symbols = c.symbols;
    std::size_t step = c.step;
    for (const std::size_t steps = c.steps; step < steps && words <= limit; ++step) {
        const std::size_t first = step * kLanes;
        if constexpr (C == Choice::symbol)
            if (uniform(contexts + first) && model.only[contexts[first]] >= 0) {  // no choice, no words
                std::memset(symbols + first, model.only[contexts[first]], kLanes);
                continue;
            }
        const std::uint32_t* const slots = C == Choice::step ? tables + (static_cast<std::size_t>(contexts[step]) << kPrecision) : tables;
        __m256i e[8];
        alignas(32) std::uint32_t at[kLanes];
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            __m256i index = _mm256_and_si256(x[g], slot);
            if constexpr (C == Choice::symbol)
                index = _mm256_or_si256(index, _mm256_slli_epi32(bytes_at(contexts + first + 8 * static_cast<std::size_t>(g)), kPrecision));
            _mm256_store_si256(reinterpret_cast<__m256i*>(at + 8 * g), index);
        }
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) e[g] = load_eight(slots, at + 8 * g);
#pragma GCC unroll 8
        for (int g = 0; g < 8; ++g) {
            const __m256i f = _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(e[g], 8), slot), _mm256_set1_epi32(1));
            const __m256i y = _mm256_add_epi32(_mm256_mullo_epi32(f, _mm256_srli_epi32(x[g], kPrecision)), _mm256_srli_epi32(e[g], 20));
            const __m256i empty = _mm256_cmpeq_epi32(_mm256_srli_epi32(y, 16), _mm256_setzero_si256());
            const unsigned mask = sign_mask(empty);
            const __m256i w = _mm256_cvtepu16_epi32(move(expand, mask, _mm_loadu_si128(reinterpret_cast<const __m128i*>(words))));
            x[g] = _mm256_blendv_epi8(y, _mm256_or_si256(_mm256_slli_epi32(y, 16), w), empty);
            words += 2 * std::popcount(mask);
        }
        const __m256i byte = _mm256_set1_epi32(0xff), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (int g = 0; g < 8; g += 4) {
            const __m256i ab = _mm256_packus_epi32(_mm256_and_si256(e[g], byte), _mm256_and_si256(e[g + 1], byte));
            const __m256i cd = _mm256_packus_epi32(_mm256_and_si256(e[g + 2], byte), _mm256_and_si256(e[g + 3], byte));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols + first + 8 * static_cast<std::size_t>(g)),
                                _mm256_permutevar8x32_epi32(_mm256_packus_epi16(ab, cd), order));
        }
    }
    for (int g = 0; g < 8; ++g) _mm256_storeu_si256(reinterpret_cast<__m256i*>(c.states + 8 * g), x[g]);
    c.words = words;
    c.step = step;
}

}  // namespace

std::uint8_t* encode_steps_avx2(const EncodeModel& model, const std::uint8_t* symbols, std::size_t steps, Contexts ctx, std::uint8_t* p,
                                std::uint32_t* states) {
    if (model.alphabet <= 64) {
        if (!ctx.data || model.contexts == 1) return encode_by_size<Choice::one>(foldable(model.tables[0]) ? 16 : model.alphabet, model, symbols, steps, ctx.data, p, states);
        if (ctx.per_step) return encode_by_size<Choice::step>(model.alphabet, model, symbols, steps, ctx.data, p, states);
        if (model.shift >= 0) return encode_by_size<Choice::symbol>(model.contexts << model.shift, model, symbols, steps, ctx.data, p, states);
        if (model.alphabet <= 32) return encode_mixed(model, symbols, steps, ctx.data, p, states);
    }
    return encode_large(model, symbols, steps, ctx, p, states);
}

void decode_steps_avx2(const DecodeModel& model, Cursor& c) {
    if (!c.contexts.data) decode_slots<Choice::one>(model, c);
    else if (c.contexts.per_step) decode_slots<Choice::step>(model, c);
    else decode_slots<Choice::symbol>(model, c);
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
