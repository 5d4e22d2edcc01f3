// rANS with AVX-512 (VBMI, VBMI2): tables in registers, looked up by permutes; gathers only beyond 64 entries.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside GCC 12's intrinsics (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "rans_decoder_avx512.hpp"
#include "tersegrad/rans.hpp"

namespace tersegrad::rans::detail {
namespace {

// ---- encoder: 64 states in four registers of 16 ----
// A half step (32 lanes) is a pair of registers, one with the even lanes and one with the odd, so that the low words of both
// stand in lane order once the odd ones are moved up by 16 bits.
constexpr int lane_of(int reg, int k) { return reg / 2 * 32 + 2 * k + reg % 2; }

struct Spread {  // byte indices that bring a register's symbols to the low bytes of its 16 words
    __m512i index[4];
    Spread() {
        for (int reg = 0; reg < 4; ++reg) {
            alignas(64) std::uint8_t bytes[64] = {};
            for (int k = 0; k < 16; ++k) bytes[4 * k] = static_cast<std::uint8_t>(lane_of(reg, k));
            index[reg] = _mm512_load_si512(bytes);
        }
    }
};

// An entry as the encoder wants it: f below, start in the highest 12 bits.
inline __m512i raised(__m512i packed) {
    const __m512i word = _mm512_set1_epi32(0xffff);
    return _mm512_or_si512(_mm512_and_si512(packed, word), _mm512_slli_epi32(_mm512_andnot_si512(word, packed), 4));
}

// Tables of up to 16 * G entries.
template <int G>
struct Lookup {
    __m512i packed[G];
    __m512 reciprocal[G];
    void load(const EncodeTable& table) {
        for (int g = 0; g < G; ++g) {
            packed[g] = raised(_mm512_load_si512(table.packed + 16 * g));
            reciprocal[g] = _mm512_load_ps(table.reciprocal + 16 * g);
        }
    }
    void find(__m512i s, __m512i& entry, __m512& rcp) const {
        if constexpr (G == 1) {
            entry = _mm512_permutexvar_epi32(s, packed[0]);
            rcp = _mm512_permutexvar_ps(s, reciprocal[0]);
        } else if constexpr (G == 2) {
            entry = _mm512_permutex2var_epi32(packed[0], s, packed[1]);
            rcp = _mm512_permutex2var_ps(reciprocal[0], s, reciprocal[1]);
        } else {
            const __mmask16 upper = _mm512_test_epi32_mask(s, _mm512_set1_epi32(32));
            entry = _mm512_permutex2var_epi32(packed[0], s, packed[1]);
            rcp = _mm512_permutex2var_ps(reciprocal[0], s, reciprocal[1]);
            entry = _mm512_mask_mov_epi32(entry, upper, _mm512_permutex2var_epi32(packed[2], s, packed[3]));
            rcp = _mm512_mask_mov_ps(rcp, upper, _mm512_permutex2var_ps(reciprocal[2], s, reciprocal[3]));
        }
    }
};

inline __m512i encode_16(__m512i x, __m512i entry, __m512 rcp, __mmask16& emits) {
    const __m512i word = _mm512_set1_epi32(0xffff);
    const __m512i f = _mm512_and_si512(entry, word);
    emits = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(x, 20), f);
    x = _mm512_mask_srli_epi32(x, emits, x, 16);
    const __m512i q = _mm512_cvttps_epu32(_mm512_mul_ps(_mm512_cvtepu32_ps(x), rcp));
    // The remainder lies in [0, 2f), so its low 16 bits suffice.
    const __m512i r = _mm512_maskz_sub_epi16(0x55555555, x, _mm512_mullo_epi16(q, entry));
    const __mmask16 more = _mm512_cmpge_epu32_mask(r, f);
    const __m512i y = _mm512_add_epi32(_mm512_shldi_epi32(q, entry, kPrecision), r);  // q, then start, then r
    return _mm512_mask_add_epi32(y, more, y, _mm512_sub_epi32(_mm512_set1_epi32(kTotal), f));
}

inline std::uint8_t* push(std::uint8_t* p, __mmask16 even, __mmask16 odd, __m512i from_even, __m512i from_odd) {
    const __m512i words = _mm512_mask_blend_epi16(0xaaaaaaaa, from_even, _mm512_slli_epi32(from_odd, 16));
    const std::uint32_t emits = _pdep_u32(even, 0x55555555) | _pdep_u32(odd, 0xaaaaaaaa);
    const int count = std::popcount(emits);
    p -= 2 * count;
    _mm512_mask_storeu_epi16(p, _bzhi_u32(~0u, static_cast<unsigned>(count)), _mm512_maskz_compress_epi16(emits, words));
    return p;
}

enum class Choice { one, step, symbol };

// A chunk in flight.
template <int G, Choice C>
struct Encoder {
    explicit Encoder(const EncodeRun& run) : symbols(run.symbols), ctx(run.contexts.data), p(run.words), left(run.steps) {
        alignas(64) std::uint32_t ordered[4][16];
        for (int reg = 0; reg < 4; ++reg) {
            for (int k = 0; k < 16; ++k) ordered[reg][k] = run.states[lane_of(reg, k)];
            x[reg] = _mm512_load_si512(ordered[reg]);
        }
    }
    void back(EncodeRun& run) const {
        alignas(64) std::uint32_t ordered[4][16];
        for (int reg = 0; reg < 4; ++reg) {
            _mm512_store_si512(ordered[reg], x[reg]);
            for (int k = 0; k < 16; ++k) run.states[lane_of(reg, k)] = ordered[reg][k];
        }
        run.words = p;
        run.steps = left;
    }

    // Codes the last of the steps that are left.
    [[gnu::always_inline]] void step(const EncodeModel& model, const Lookup<G>& common, const __m512i* index, __m128i shift) {
        const std::size_t t = --left;
        Lookup<G> lookup;
        if constexpr (C == Choice::step) lookup.load(model.tables[ctx[t]]);
        else lookup = common;
        __m512i s = _mm512_loadu_si512(symbols + t * kLanes);
        if constexpr (C == Choice::symbol) s = _mm512_or_si512(s, _mm512_sll_epi16(_mm512_loadu_si512(ctx + t * kLanes), shift));
        _mm_prefetch(reinterpret_cast<const char*>(symbols + t * kLanes) - 4096, _MM_HINT_T0);
        __mmask16 emits[4];
        __m512i low[4];
#pragma GCC unroll 4
        for (int reg = 3; reg >= 0; --reg) {
            __m512i entry;
            __m512 rcp;
            lookup.find(_mm512_permutexvar_epi8(index[reg], s), entry, rcp);
            low[reg] = x[reg];
            x[reg] = encode_16(x[reg], entry, rcp, emits[reg]);
        }
        p = push(p, emits[2], emits[3], low[2], low[3]);
        p = push(p, emits[0], emits[1], low[0], low[1]);
    }

    __m512i x[4];
    const std::uint8_t *symbols, *ctx;
    std::uint8_t* p;
    std::size_t left;
};

template <int G, Choice C>
void encode_registers(const EncodeModel& model, EncodeRun& run, EncodeRun* other, Ahead ahead) {
    static const Spread spread;
    const __m512i index[4] = {spread.index[0], spread.index[1], spread.index[2], spread.index[3]};
    Lookup<G> lookup;
    if constexpr (C != Choice::step) lookup.load(C == Choice::one ? model.tables[0] : model.flat);
    const __m128i shift = _mm_cvtsi32_si128(model.shift);
    // A fetch from where no memory is would look for it every time.
    if (!ahead.begin) ahead = {run.symbols, run.symbols};
    // Fetching memory for the caller costs nothing here: chunks wait for their own states.
    const auto fetch = [&] {
        if constexpr (C == Choice::one) {
            const char* line = static_cast<const char*>(ahead.begin);
            _mm_prefetch(line, _MM_HINT_T1);
            _mm_prefetch(line + 64, _MM_HINT_T1);
            ahead.begin = line + 128 < static_cast<const char*>(ahead.end) ? line + 128 : line;
        }
    };
    Encoder<G, C> a(run);
    if (other) {
        Encoder<G, C> b(*other);
        while (a.left && b.left) {
            fetch();
            a.step(model, lookup, index, shift);
            fetch();
            b.step(model, lookup, index, shift);
        }
        b.back(*other);
        a.back(run);
        return;
    }
    while (a.left) {
        fetch();
        a.step(model, lookup, index, shift);
    }
    a.back(run);
}

// More entries than registers hold: f and start by plain loads, the reciprocal computed.
std::uint8_t* encode_large(const EncodeModel& model, const std::uint8_t* symbols, std::size_t steps, Contexts ctx, std::uint8_t* p,
                           std::uint32_t* states) {
    alignas(64) std::uint32_t entries[kAhead][kLanes], ordered[4][16];
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    __m512i x[4];
    for (int reg = 0; reg < 4; ++reg) {
        for (int k = 0; k < 16; ++k) ordered[reg][k] = states[lane_of(reg, k)];
        x[reg] = _mm512_load_si512(ordered[reg]);
    }
    for (std::size_t end = steps; end > 0;) {
        const std::size_t begin = end - std::min(end, kAhead);
        for (std::size_t t = begin; t < end; ++t)
            look_up(model, symbols + t * kLanes, ctx.at(t * kLanes), entries[t - begin]);
        for (std::size_t t = end; t-- > begin;) {
            __mmask16 emits[4];
            __m512i low[4];
            __m512i row[4];
            for (int k = 0; k < 4; ++k) row[k] = _mm512_load_si512(entries[t - begin] + 16 * k);
#pragma GCC unroll 4
            for (int reg = 3; reg >= 0; --reg) {
                const __m512i a = row[reg & 2], b = row[reg | 1];
                const __m512i entry = raised(_mm512_permutex2var_epi32(a, reg & 1 ? odd : even, b));
                const __m512 f = _mm512_cvtepi32_ps(_mm512_and_si512(entry, _mm512_set1_epi32(0xffff)));
                // One Newton step leaves errors of a few 2^-24; shortening by 2^-21 keeps the quotient right or one too small.
                const __m512 guess = _mm512_rcp14_ps(f);
                const __m512 rcp = _mm512_mul_ps(_mm512_mul_ps(guess, _mm512_set1_ps(1.0f - 0x1p-21f)),
                                                 _mm512_sub_ps(_mm512_set1_ps(2.0f), _mm512_mul_ps(f, guess)));
                low[reg] = x[reg];
                x[reg] = encode_16(x[reg], entry, rcp, emits[reg]);
            }
            p = push(p, emits[2], emits[3], low[2], low[3]);
            p = push(p, emits[0], emits[1], low[0], low[1]);
        }
        end = begin;
    }
    for (int reg = 0; reg < 4; ++reg) {
        _mm512_store_si512(ordered[reg], x[reg]);
        for (int k = 0; k < 16; ++k) states[lane_of(reg, k)] = ordered[reg][k];
    }
    return p;
}

template <Choice C>
void encode_by_size(int entries, const EncodeModel& model, EncodeRun& run, EncodeRun* other, Ahead ahead) {
    if (entries <= 16) return encode_registers<1, C>(model, run, other, ahead);
    if (entries <= 32) return encode_registers<2, C>(model, run, other, ahead);
    encode_registers<4, C>(model, run, other, ahead);
}

// ---- decoder ----
template <int L, bool Full, Choice C>
[[gnu::always_inline]] inline void one_step(Lane& c, const Tables& common, const Images* images, __m512i order, __m128i shift) {
    Tables t;
    if constexpr (C == Choice::step)
        t.load(images[*c.contexts]);
    else
        t = common;
    __m512i a, b;
    if constexpr (C == Choice::symbol) {
        const __m512i base = _mm512_sll_epi16(_mm512_loadu_si512(c.contexts), shift);  // below 64, so bytes stay apart
        const __m512i twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), base);
        a = take<L, Full>(c.a, t, _mm512_unpacklo_epi8(twice, twice));
        b = take<L, Full>(c.b, t, _mm512_unpackhi_epi8(twice, twice));
    } else {
        a = take<L, Full>(c.a, t, coarse_symbol(c.a, t));
        b = take<L, Full>(c.b, t, coarse_symbol(c.b, t));
    }
    if constexpr (C == Choice::symbol) {  // strip the context
        const __m512i mask = _mm512_set1_epi8(static_cast<char>((1 << L) - 1));
        a = _mm512_and_si512(a, mask);
        b = _mm512_and_si512(b, mask);
    }
    refill(c.a, c.words);
    refill(c.b, c.words);
    store_symbols(c.symbols, a, b, order, c.stream);
    c.symbols += kLanes;
    if constexpr (C != Choice::one) c.contexts += C == Choice::step ? 1 : kLanes;
    ++c.step;
}

template <int L, bool Full, Choice C>
void run(const DecodeModel& model, Cursor& c1, Cursor* c2) {
    const __m512i order = even_bytes();
    const __m128i shift = _mm_cvtsi32_si128(model.shift);
    const Images* images = model.images.data();
    Tables t;
    t.load(images[0]);
    Lane x(c1);
    if (c2) {
        Lane y(*c2);
        while (x.ready() && y.ready()) {
            one_step<L, Full, C>(x, t, images, order, shift);
            one_step<L, Full, C>(y, t, images, order, shift);
        }
        y.back(*c2);
    } else {
        while (x.ready()) one_step<L, Full, C>(x, t, images, order, shift);
    }
    x.back(c1);
    if (c1.stream) _mm_sfence();
}

template <bool Full, Choice C>
void run_levels(const DecodeModel& model, Cursor& c1, Cursor* c2) {
    switch (model.levels) {
        case 0: return run<0, Full, C>(model, c1, c2);
        case 1: return run<1, Full, C>(model, c1, c2);
        case 2: return run<2, Full, C>(model, c1, c2);
        case 3: return run<3, Full, C>(model, c1, c2);
        case 4: return run<4, Full, C>(model, c1, c2);
        case 5: return run<5, Full, C>(model, c1, c2);
        default: return run<6, Full, C>(model, c1, c2);
    }
}

void run_choice(const DecodeModel& model, Cursor& c1, Cursor* c2) {
    if (!c1.contexts.data || model.contexts == 1) return model.full ? run_levels<true, Choice::one>(model, c1, c2) : run_levels<false, Choice::one>(model, c1, c2);
    if (c1.contexts.per_step) return model.full ? run_levels<true, Choice::step>(model, c1, c2) : run_levels<false, Choice::step>(model, c1, c2);
    return model.full ? run_levels<true, Choice::symbol>(model, c1, c2) : run_levels<false, Choice::symbol>(model, c1, c2);
}

void decode_gather(const DecodeModel& model, Cursor& c) {
    const auto* slots = reinterpret_cast<const int*>(model.slots.data());
    const bool plain = !c.contexts.data;
    __m512i x[4];
    for (int g = 0; g < 4; ++g) x[g] = _mm512_loadu_si512(c.states + 16 * g);
    const std::uint8_t* words = c.words;
    for (; c.step < c.steps && words <= c.limit; ++c.step) {
        const std::size_t first = c.step * kLanes;
        __m512i e[4];
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
            __m512i at = _mm512_and_si512(x[g], _mm512_set1_epi32(kTotal - 1));
            if (!plain) {
                const __m512i context =
                    c.contexts.per_step ? _mm512_set1_epi32(c.contexts.data[c.step])
                                        : _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(c.contexts.data + first + 16 * g)));
                at = _mm512_or_si512(at, _mm512_slli_epi32(context, kPrecision));
            }
            e[g] = _mm512_i32gather_epi32(at, slots, 4);
        }
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
            const __m512i f = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(e[g], 8), _mm512_set1_epi32(kTotal - 1)), _mm512_set1_epi32(1));
            __m512i y = _mm512_add_epi32(_mm512_mullo_epi32(f, _mm512_srli_epi32(x[g], kPrecision)), _mm512_srli_epi32(e[g], 20));
            const __mmask16 empty = _mm512_cmplt_epu32_mask(y, _mm512_set1_epi32(kFirst));
            const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
            x[g] = _mm512_mask_or_epi32(y, empty, _mm512_slli_epi32(y, 16), _mm512_maskz_expand_epi32(empty, w));
            words += 2 * std::popcount(static_cast<unsigned>(empty));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(c.symbols + first + 16 * g), _mm512_cvtepi32_epi8(e[g]));
        }
    }
    for (int g = 0; g < 4; ++g) _mm512_storeu_si512(c.states + 16 * g, x[g]);
    c.words = words;
}

// Tells the bytes of s that are not marked yet.
struct Missing {
    __m512i quarter[4];
    explicit Missing(const std::uint8_t* present) {
        for (int k = 0; k < 4; ++k)
            quarter[k] = _mm512_maskz_set1_epi8(_mm512_cmpeq_epi8_mask(_mm512_loadu_si512(present + 64 * k), _mm512_setzero_si512()), 1);
    }
    __mmask64 of(__m512i s) const {
        const __mmask64 upper = _mm512_movepi8_mask(s);
        const __m512i hit = _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(quarter[0], s, quarter[1]), upper,
                                                 _mm512_permutex2var_epi8(quarter[2], s, quarter[3]));
        return _mm512_test_epi8_mask(hit, hit);
    }
};

// Counts the symbols first .. first + 7 in registers, one byte per lane and symbol; at most 255 * 64 symbols.
inline void count_eight(const std::uint8_t* s, std::size_t steps, int first, std::uint64_t* counts) {
    __m512i sum[8];
    for (__m512i& v : sum) v = _mm512_setzero_si512();
    const __m512i one = _mm512_set1_epi8(1);
    for (std::size_t t = 0; t < steps; ++t) {
        const __m512i v = _mm512_sub_epi8(_mm512_loadu_si512(s + 64 * t), _mm512_set1_epi8(static_cast<char>(first)));
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) sum[k] = _mm512_mask_add_epi8(sum[k], _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8(static_cast<char>(k))), sum[k], one);
    }
    for (int k = 0; k < 8; ++k)
        counts[first + k] += static_cast<std::uint64_t>(_mm512_reduce_add_epi64(_mm512_sad_epu8(sum[k], _mm512_setzero_si512())));
}

}  // namespace

std::size_t count_avx512(const std::uint8_t* s, std::size_t n, int alphabet, std::uint64_t* counts) {
    std::size_t i = 0;
    while (i + 64 <= n) {
        const std::size_t steps = std::min<std::size_t>((n - i) / 64, 64);
        __m512i any = _mm512_setzero_si512();
        for (std::size_t t = 0; t < steps; ++t) any = _mm512_or_si512(any, _mm512_loadu_si512(s + i + 64 * t));
        if (_mm512_test_epi8_mask(any, _mm512_set1_epi8(static_cast<char>(0xe0)))) break;  // for the caller to find
        for (int first = 0; first < alphabet; first += 8) count_eight(s + i, steps, first, counts);
        i += 64 * steps;
    }
    return i;
}

void encode_steps_avx512(const EncodeModel& model, EncodeRun& run, EncodeRun* other, Ahead ahead) {
    const Contexts ctx = run.contexts;
    const bool one = !ctx.data || model.contexts == 1;
    if (model.alphabet <= 64) {
        if (one) return encode_by_size<Choice::one>(model.alphabet, model, run, other, ahead);
        if (ctx.per_step) return encode_by_size<Choice::step>(model.alphabet, model, run, other, ahead);
        if (model.shift >= 0) return encode_by_size<Choice::symbol>(model.contexts << model.shift, model, run, other, ahead);
    }
    if (other) return;
    run.words = encode_large(model, run.symbols, run.steps, ctx, run.words, run.states);
    run.steps = 0;
}

void decode_steps_avx512(const DecodeModel& model, Cursor& c) {
    if (model.slots_needed) return decode_gather(model, c);
    run_choice(model, c, nullptr);
}

void decode_two_avx512(const DecodeModel& model, Cursor& a, Cursor& b) { run_choice(model, a, &b); }

void mark_present_avx512(const std::uint8_t* s, std::size_t n, std::uint8_t* present) {
    std::size_t i = 0;
    while (i + 256 <= n) {
        // Until something new turns up only the first 64 symbols are looked for; larger ones show in the union of all.
        const __m512i missing = Missing(present).quarter[0];
        const bool small = std::all_of(present + 64, present + 256, [](std::uint8_t p) { return p == 0; });
        const Missing all(present);
        for (; i + 256 <= n; i += 256) {
            const __m512i v[4] = {_mm512_loadu_si512(s + i), _mm512_loadu_si512(s + i + 64), _mm512_loadu_si512(s + i + 128),
                                  _mm512_loadu_si512(s + i + 192)};
            _mm_prefetch(reinterpret_cast<const char*>(s + i) + 4096, _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(s + i) + 4160, _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(s + i) + 4224, _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(s + i) + 4288, _MM_HINT_T0);
            if (small) {
                const __m512i large = _mm512_or_si512(_mm512_or_si512(v[0], v[1]), _mm512_or_si512(v[2], v[3]));
                const __m512i hits = _mm512_or_si512(
                    _mm512_or_si512(_mm512_permutexvar_epi8(v[0], missing), _mm512_permutexvar_epi8(v[1], missing)),
                    _mm512_or_si512(_mm512_permutexvar_epi8(v[2], missing), _mm512_permutexvar_epi8(v[3], missing)));
                // A symbol above 63 has bit 6 or 7; a missing one sets bit 0 of `hits`.
                const __m512i odd = _mm512_or_si512(_mm512_and_si512(large, _mm512_set1_epi8(static_cast<char>(0xc0))), hits);
                if (_mm512_test_epi8_mask(odd, odd) == 0) continue;
            }
            if ((all.of(v[0]) | all.of(v[1]) | all.of(v[2]) | all.of(v[3])) == 0) continue;
            for (int k = 0; k < 256; ++k) present[s[i + static_cast<std::size_t>(k)]] = 1;
            i += 256;
            break;
        }
    }
    for (; i < n; ++i) present[s[i]] = 1;
}

void mark_present_steps_avx512(const std::uint8_t* s, std::size_t n, const std::uint8_t* contexts, std::uint8_t* present) {
    std::size_t t = 0;
    for (; (t + 1) * kLanes <= n; ++t) {
        std::uint8_t* row = present + std::size_t{256} * contexts[t];
        const std::uint8_t* v = s + t * kLanes;
        if (Missing(row).of(_mm512_loadu_si512(v)) == 0) continue;
        for (int k = 0; k < kLanes; ++k) row[v[k]] = 1;
    }
    if (t * kLanes < n) {
        std::uint8_t* row = present + std::size_t{256} * contexts[t];
        for (std::size_t i = t * kLanes; i < n; ++i) row[s[i]] = 1;
    }
}

}  // namespace tersegrad::rans::detail
