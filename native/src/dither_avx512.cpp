#include <immintrin.h>

#include <bit>

#include "dither_loops.hpp"
#include "rans_decoder_avx512.hpp"

namespace tersegrad::dither::detail {
namespace {

inline void fetch(const char* line) { _mm_prefetch(line, _MM_HINT_T1); }

void norm_avx512(const float* x, std::size_t n, const char* ahead, double* lanes) {
    __m512d sum[4];
    for (int j = 0; j < 4; ++j) sum[j] = _mm512_loadu_pd(lanes + 8 * j);
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        fetch(ahead + i);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            const __m512d v = _mm512_cvtps_pd(_mm256_loadu_ps(x + i + 8 * j));
            sum[j % 4] = _mm512_fmadd_pd(v, v, sum[j % 4]);  // the square of a float32 is exact in float64
        }
    }
    for (int j = 0; j < 4; ++j) _mm512_storeu_pd(lanes + 8 * j, sum[j]);
    norm_plain(x + i, n - i, nullptr, lanes);
}

// 64 int32 saturated to bytes of at most +-127, in order.
inline __m512i narrow(const __m512i k[4]) {
    const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(k[0], k[1]), _mm512_packs_epi32(k[2], k[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_max_epi8(_mm512_permutexvar_epi32(order, bytes), _mm512_set1_epi8(-127));
}

inline __m512i bias() { return _mm512_set1_epi8(kBias); }

inline std::uint32_t largest_byte(__m512i v) {
    alignas(64) std::uint8_t bytes[64];
    _mm512_store_si512(bytes, v);
    return *std::max_element(bytes, bytes + 64);
}

void quick_avx512(const float* x, std::size_t n, float inverse, const char* ahead, std::uint8_t* out, Quick& sums) {
    const __m512 inv = _mm512_set1_ps(inverse);
    __m512 dot[4];
    for (int j = 0; j < 4; ++j) dot[j] = _mm512_loadu_ps(sums.dot + 16 * j);
    __m512i energy = _mm512_setzero_si512(), top = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        fetch(ahead + i);
        __m512i k[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i + 16 * j), inv);
            k[j] = _mm512_cvtps_epi32(y);
            dot[j] = _mm512_add_ps(dot[j], _mm512_mul_ps(y, _mm512_cvtepi32_ps(k[j])));
        }
        const __m512i bytes = narrow(k), size = _mm512_abs_epi8(bytes);
        top = _mm512_max_epu8(top, size);
        energy = _mm512_add_epi32(energy, _mm512_madd_epi16(_mm512_maddubs_epi16(size, size), _mm512_set1_epi16(1)));
        _mm512_storeu_si512(out + i, _mm512_add_epi8(bytes, bias()));
    }
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(sums.dot + 16 * j, dot[j]);
    sums.energy += _mm512_reduce_add_epi32(energy);  // at most 4096 * 127^2
    sums.top = std::max(sums.top, largest_byte(top));
    if (i < n) quick_plain(x + i, n - i, inverse, nullptr, out + i, sums);
}

void exact_avx512(const float* x, std::size_t n, float inverse, const char* ahead, std::uint8_t* out, double* lanes, std::uint32_t& top) {
    __m512d dot[4], energy[4], norm[4];
    for (int j = 0; j < 4; ++j) {
        dot[j] = _mm512_loadu_pd(lanes + 8 * j);
        energy[j] = _mm512_loadu_pd(lanes + 32 + 8 * j);
        norm[j] = _mm512_loadu_pd(lanes + 64 + 8 * j);
    }
    const __m512 inv = _mm512_set1_ps(inverse);
    __m512i most = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        fetch(ahead + 3 * i);
        fetch(ahead + 3 * i + 64);
        fetch(ahead + 3 * i + 128);
        __m512i k[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512 v = _mm512_loadu_ps(x + i + 16 * j);
            k[j] = _mm512_cvtps_epi32(_mm512_mul_ps(v, inv));
            most = _mm512_max_epu32(most, _mm512_abs_epi32(k[j]));
            const __m512d xl = _mm512_cvtps_pd(_mm512_castps512_ps256(v)), xh = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
            const __m512d kl = _mm512_cvtepi32_pd(_mm512_castsi512_si256(k[j])), kh = _mm512_cvtepi32_pd(_mm512_extracti32x8_epi32(k[j], 1));
            const int h = 2 * (j & 1);
            // Exact products below kTooLarge, so that fusing changes nothing.
            dot[h] = _mm512_fmadd_pd(xl, kl, dot[h]);
            dot[h + 1] = _mm512_fmadd_pd(xh, kh, dot[h + 1]);
            energy[h] = _mm512_fmadd_pd(kl, kl, energy[h]);
            energy[h + 1] = _mm512_fmadd_pd(kh, kh, energy[h + 1]);
            norm[h] = _mm512_fmadd_pd(xl, xl, norm[h]);
            norm[h + 1] = _mm512_fmadd_pd(xh, xh, norm[h + 1]);
        }
        _mm512_storeu_si512(out + i, _mm512_add_epi8(narrow(k), bias()));
    }
    for (int j = 0; j < 4; ++j) {
        _mm512_storeu_pd(lanes + 8 * j, dot[j]);
        _mm512_storeu_pd(lanes + 32 + 8 * j, energy[j]);
        _mm512_storeu_pd(lanes + 64 + 8 * j, norm[j]);
    }
    top = std::max(top, _mm512_reduce_max_epu32(most));
    if (i < n) exact_plain(x + i, n - i, inverse, nullptr, out + i, lanes, top);
}

void random_avx512(const float* x, std::size_t n, float inverse, const std::uint16_t* draws, const char* ahead, std::uint8_t* out,
                   std::uint32_t& top) {
    const __m512 inv = _mm512_set1_ps(inverse);
    __m512i most = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        fetch(ahead + 2 * i);
        fetch(ahead + 2 * i + 64);
        __m512i k[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const __m512 v = _mm512_loadu_ps(x + i + 16 * j), y = _mm512_mul_ps(_mm512_abs_ps(v), inv);
            const __m512i whole = _mm512_cvttps_epi32(y);
            const __m512 part = _mm512_mul_ps(_mm512_sub_ps(y, _mm512_cvtepi32_ps(whole)), _mm512_set1_ps(65536.0f));
            const __m512i draw = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(draws + i + 16 * j)));
            k[j] = _mm512_add_epi32(whole, _mm512_srli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(part), draw), 16));
            k[j] = _mm512_mask_sub_epi32(k[j], _mm512_movepi32_mask(_mm512_castps_si512(v)), _mm512_setzero_si512(), k[j]);
        }
        const __m512i bytes = narrow(k);
        most = _mm512_max_epu8(most, _mm512_abs_epi8(bytes));
        _mm512_storeu_si512(out + i, _mm512_add_epi8(bytes, bias()));
    }
    top = std::max(top, largest_byte(most));
    if (i < n) random_plain(x + i, n - i, inverse, draws + i, nullptr, out + i, top);
}

void lower_avx512(const float* x, std::size_t n, float inverse, const std::uint8_t* contexts, const Least& least, int center, std::uint8_t* k,
                  Less& less) {
    const __m512 inv = _mm512_set1_ps(inverse), first = _mm512_load_ps(least.of[0]);
    const __m512i middle = _mm512_set1_epi32(center), most = _mm512_set1_epi32(kLowered + 1), one = _mm512_set1_epi32(1);
    __m512d dot[4];
    for (int j = 0; j < 4; ++j) dot[j] = _mm512_loadu_pd(less.dot + 8 * j);
    __m512i energy = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
#pragma GCC unroll 2
        for (std::size_t h = 0; h < 2; ++h) {
            const std::size_t at = i + 16 * h;
            const __m512 v = _mm512_loadu_ps(x + at), y = _mm512_abs_ps(_mm512_mul_ps(v, inv));
            const __m512i level = _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(k + at))), middle);
            const __m512i size = _mm512_abs_epi32(level), entry = _mm512_min_epi32(size, most);
            __m512 limit = _mm512_permutexvar_ps(entry, first);
            if (contexts) {
                // Neighbours mostly share a class.
                const __m128i classes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(contexts + at));
                if (_mm_cmpeq_epi8_mask(classes, _mm_set1_epi8(static_cast<char>(contexts[at]))) == 0xffff)
                    limit = _mm512_permutexvar_ps(entry, _mm512_load_ps(least.of[contexts[at]]));
                else
                    limit = _mm512_i32gather_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_cvtepu8_epi32(classes), 4), entry), least.of, 4);
            }
            const __mmask16 down = _mm512_cmp_ps_mask(y, limit, _CMP_LT_OQ);
            const __m512i sign = _mm512_or_si512(_mm512_srai_epi32(level, 31), one);
            const __m512i lower = _mm512_mask_sub_epi32(level, down, level, sign);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(k + at), _mm512_cvtepi32_epi8(_mm512_add_epi32(lower, middle)));
            const __m512 off = _mm512_maskz_mov_ps(down, _mm512_abs_ps(v));
            dot[2 * h] = _mm512_add_pd(dot[2 * h], _mm512_cvtps_pd(_mm512_castps512_ps256(off)));
            dot[2 * h + 1] = _mm512_add_pd(dot[2 * h + 1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(off, 1)));
            energy = _mm512_mask_add_epi32(energy, down, energy, _mm512_sub_epi32(_mm512_add_epi32(size, size), one));
        }
    }
    for (int j = 0; j < 4; ++j) _mm512_storeu_pd(less.dot + 8 * j, dot[j]);
    less.energy += _mm512_reduce_add_epi32(energy);
    lower_plain(x + i, n - i, inverse, contexts ? contexts + i : nullptr, least, center, k + i, less);
}

std::size_t above_avx512(const std::uint8_t* k, std::size_t n, int limit) {
    const __m512i most = _mm512_set1_epi8(static_cast<char>(limit));
    std::size_t i = 0, count = 0;
    for (; i + 64 <= n; i += 64)
        count += static_cast<std::size_t>(std::popcount(_mm512_cmpgt_epi8_mask(_mm512_abs_epi8(_mm512_sub_epi8(_mm512_loadu_si512(k + i), bias())), most)));
    return count + above_plain(k + i, n - i, limit);
}

void shift_avx512(std::uint8_t* k, std::size_t n, int window) {
    const __m512i w = _mm512_set1_epi8(static_cast<char>(window)), least = _mm512_set1_epi8(static_cast<char>(-window));
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i c = _mm512_max_epi8(_mm512_min_epi8(_mm512_sub_epi8(_mm512_loadu_si512(k + i), bias()), w), least);
        _mm512_storeu_si512(k + i, _mm512_add_epi8(c, w));
    }
    shift_plain(k + i, n - i, window);
}

std::size_t ends_avx512(const std::uint8_t* symbols, std::size_t n, std::uint8_t last, std::uint16_t* at) {
    const __m512i end = _mm512_set1_epi8(static_cast<char>(last));
    std::size_t i = 0, count = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i s = _mm512_loadu_si512(symbols + i);
        std::uint64_t hits = _mm512_testn_epi8_mask(s, s) | _mm512_cmpeq_epi8_mask(s, end);
        for (; hits; hits &= hits - 1) at[count++] = static_cast<std::uint16_t>(i + static_cast<std::size_t>(std::countr_zero(hits)));
    }
    for (; i < n; ++i)
        if (symbols[i] == 0 || symbols[i] == last) at[count++] = static_cast<std::uint16_t>(i);
    return count;
}

inline __m512 clamped(__m512 v) { return _mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(FLT_MAX)), _mm512_set1_ps(-FLT_MAX)); }

// What 32 symbols stand for, in registers.
template <bool Add>
std::size_t scale_few(const std::uint8_t* symbols, std::size_t n, int window, float step, float weight, float* out) {
    alignas(64) float table[32];
    for (int s = 0; s < 32; ++s) table[s] = limited(static_cast<float>(s - window) * step);
    if constexpr (Add)
        for (float& v : table) v *= weight;
    const __m512 low = _mm512_load_ps(table), high = _mm512_load_ps(table + 16);
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        if constexpr (Add)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) _mm_prefetch(reinterpret_cast<const char*>(out + i + 1024 + 16 * j), _MM_HINT_T0);
#pragma GCC unroll 4
        for (std::size_t j = i; j < i + 64; j += 16) {
            const __m512i k = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols + j)));
            const __m512 v = _mm512_permutex2var_ps(low, k, high);
            _mm512_storeu_ps(out + j, Add ? _mm512_add_ps(_mm512_loadu_ps(out + j), v) : v);
        }
    }
    return i;
}

void scale_avx512(const std::uint8_t* symbols, std::size_t n, int window, float step, bool add, float weight, float* out) {
    if (window <= 15 && n >= 64) {
        const std::size_t done = add ? scale_few<true>(symbols, n, window, step, weight, out) : scale_few<false>(symbols, n, window, step, weight, out);
        return scale_plain(symbols + done, n - done, window, step, add, weight, out + done);
    }
    const __m512 s = _mm512_set1_ps(step), w = _mm512_set1_ps(weight);
    const __m512i offset = _mm512_set1_epi32(window);
    std::size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512i k = _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols + i))), offset);
        const __m512 v = clamped(_mm512_mul_ps(_mm512_cvtepi32_ps(k), s));
        _mm512_storeu_ps(out + i, add ? _mm512_add_ps(_mm512_loadu_ps(out + i), _mm512_mul_ps(w, v)) : v);
    }
    scale_plain(symbols + i, n - i, window, step, add, weight, out + i);
}

// ---- words to floats, in registers ----

enum class To { store, stream, add };

// What 64 symbols stand for: by table while 32 entries hold them all, else computed.
template <bool Wide>
struct Values {
    __m512 low, high;
    void load(const Track& track, bool add) {
        const int window = track.window;
        const float scale = track.scales[(track.start + track.chunk->cursor.step * rans::kLanes) / kScaleBlock];
        if constexpr (Wide) {
            low = _mm512_set1_ps(static_cast<float>(window));
            high = _mm512_set1_ps(scale);
        } else {
            alignas(64) float table[32];
            for (int s = 0; s < 32; ++s) table[s] = limited(static_cast<float>(s - window) * scale);
            if (add && track.symbols) table[0] = table[2 * window] = 0;  // the escapes will be added instead
            low = _mm512_load_ps(table);
            high = _mm512_load_ps(table + 16);
        }
    }
    __m512 of(__m512i s) const {
        if constexpr (Wide) return clamped(_mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(s), low), high));
        return _mm512_permutex2var_ps(low, s, high);
    }
};

struct Route {  // one chunk, as far as registers reach
    rans::detail::Lane lane;
    float* out;
    std::size_t hop;  // of the symbols
};

template <int L, bool Wide, To T>
[[gnu::always_inline]] inline void one_step(Route& r, const rans::detail::Tables& t, const Values<Wide>& values, __m512i order, __m512 weight) {
    using namespace rans::detail;
    const __m512i a = take<L, false>(r.lane.a, t, coarse_symbol(r.lane.a, t));
    const __m512i b = take<L, false>(r.lane.b, t, coarse_symbol(r.lane.b, t));
    refill(r.lane.a, r.lane.words);
    refill(r.lane.b, r.lane.words);
    const __m512i symbols = _mm512_permutex2var_epi8(a, order, b);
    if (r.hop) {
        _mm512_storeu_si512(r.lane.symbols, symbols);
        r.lane.symbols += r.hop;
    }
    const __m512i s[4] = {_mm512_cvtepu8_epi32(_mm512_castsi512_si128(symbols)), _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(symbols, 1)),
                          _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(symbols, 2)), _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(symbols, 3))};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512 v = values.of(s[j]);
        if constexpr (T == To::stream) _mm512_stream_ps(r.out + 16 * j, v);
        else if constexpr (T == To::store) _mm512_storeu_ps(r.out + 16 * j, v);
        else _mm512_storeu_ps(r.out + 16 * j, _mm512_add_ps(_mm512_loadu_ps(r.out + 16 * j), _mm512_mul_ps(weight, v)));
    }
    r.out += 64;
    ++r.lane.step;
}

// Runs both until one reaches the end of its block or of its words.
template <int L, bool Wide, To T>
void run(Track& x, Track* y, float weight) {
    using namespace rans::detail;
    const __m512i order = even_bytes();
    const __m512 w = _mm512_set1_ps(weight);
    alignas(64) std::uint8_t unused[64];
    const auto route = [&](Track& track) {
        Cursor& c = track.chunk->cursor;
        c.symbols = track.symbols ? track.symbols : unused;
        Route r{Lane(c), track.out + c.step * rans::kLanes, track.symbols ? std::size_t{64} : 0};
        if (!track.symbols) r.lane.symbols = unused;
        return r;
    };
    Tables t;
    t.load(x.model->images[0]);
    Values<Wide> values;
    values.load(x, T == To::add);
    Route r = route(x);
    if (y) {
        Tables u;
        u.load(y->model->images[0]);
        Values<Wide> others;
        others.load(*y, T == To::add);
        Route q = route(*y);
        while (r.lane.ready() && q.lane.ready()) {
            one_step<L, Wide, T>(r, t, values, order, w);
            one_step<L, Wide, T>(q, u, others, order, w);
        }
        q.lane.back(y->chunk->cursor);
    } else {
        while (r.lane.ready()) one_step<L, Wide, T>(r, t, values, order, w);
    }
    r.lane.back(x.chunk->cursor);
}

using Run = void (*)(Track&, Track*, float);

template <bool Wide, To T>
Run choose(int probes) {
    if (probes <= 2) return run<2, Wide, T>;
    if (probes == 3) return run<3, Wide, T>;
    if (probes == 4) return run<4, Wide, T>;
    return run<6, Wide, T>;
}

Run choose(int probes, bool wide, To to) {
    if (to == To::stream) return wide ? choose<true, To::stream>(probes) : choose<false, To::stream>(probes);
    if (to == To::store) return wide ? choose<true, To::store>(probes) : choose<false, To::store>(probes);
    return wide ? choose<true, To::add>(probes) : choose<false, To::add>(probes);
}

// Makes `probes` probes safe: none looks beyond the 64 entries. Fewer may not reach the symbol from then on.
void widen(rans::DecodeModel& model, int probes) {
    model.levels = std::max(model.levels, probes);
    for (std::uint8_t& symbol : model.images[0].coarse) symbol = std::min<std::uint8_t>(symbol, static_cast<std::uint8_t>(64 - (1 << probes)));
}

bool decode_avx512(Track& x, Track* y, bool add, float weight, bool stream) {
    const auto aligned = [](const Track& t) { return reinterpret_cast<std::uintptr_t>(t.out) % 64 == 0; };
    int probes = x.model->levels, window = x.window;
    if (y) probes = std::max(probes, y->model->levels), window = std::max(window, y->window);
    probes = probes <= 2 ? 2 : probes <= 4 ? probes : 6;
    stream = stream && aligned(x) && (!y || aligned(*y));
    const Run go = choose(probes, window > 15, add ? To::add : stream ? To::stream : To::store);
    Track* tracks[2] = {&x, y};
    for (Track* t : tracks)
        if (t) widen(*t->model, probes);
    constexpr std::size_t block = kScaleBlock / rans::kLanes;
    for (;;) {
        Track* open[2];
        int count = 0;
        for (Track* t : tracks) {
            if (!t) continue;
            auto& c = t->chunk->cursor;
            if (c.step == t->steps) continue;
            const std::size_t before = t->start / rans::kLanes;
            c.steps = std::min(t->steps, ((before + c.step) / block + 1) * block - before);
            open[count++] = t;
        }
        if (!count) break;
        go(*open[0], count == 2 ? open[1] : nullptr, weight);
        for (int k = 0; k < count; ++k) {
            auto& c = open[k]->chunk->cursor;
            if (c.step < c.steps && c.words > c.limit && !open[k]->chunk->extend()) return false;
        }
    }
    if (stream) _mm_sfence();
    return true;
}

}  // namespace

const Implementation avx512 = {norm_avx512,  quick_avx512, exact_avx512, random_avx512, above_avx512,
                               shift_avx512, ends_avx512,  scale_avx512, leave_plain,   lower_avx512,  decode_avx512};

}  // namespace tersegrad::dither::detail
