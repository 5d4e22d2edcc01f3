// rANS for every machine: models, and the portable coder of one chunk.
#include "tersegrad/rans.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "tersegrad/runtime.hpp"

namespace tersegrad::rans {
namespace {

std::uint32_t load32(const std::uint8_t* p) {
    return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 | static_cast<std::uint32_t>(p[2]) << 16 |
           static_cast<std::uint32_t>(p[3]) << 24;
}
std::uint32_t load16(const std::uint8_t* p) { return static_cast<std::uint32_t>(p[0] | p[1] << 8); }

int flat_shift(int alphabet, int contexts) {
    const int shift = std::bit_width(static_cast<unsigned>(alphabet) - 1);
    return shift <= 6 && contexts << shift <= 64 ? shift : -1;
}

// 1/f shortened by 2^-22: then x * reciprocal in float32 never exceeds x/f and misses it by less than one (x/f < 2^20).
float below_reciprocal(std::uint32_t f) { return static_cast<float>(1.0 / f * (1.0 - 0x1p-22)); }

// Calls body(lane) for the lanes of a row of symbols that begins with symbol `at` of the chunk, in order; lanes: a power of two.
template <class Body>
[[gnu::always_inline]] inline void each_lane(std::size_t at, std::size_t lanes, Body&& body) {
    const std::size_t from = at & (lanes - 1);
    for (std::size_t lane = from; lane < lanes; ++lane) body(lane);
    for (std::size_t lane = 0; lane < from; ++lane) body(lane);
}

// Codes lanes [0, active) of one step, last lane first.
std::uint8_t* encode_step(const EncodeModel& model, const std::uint8_t* symbols, int active, Contexts ctx, std::uint8_t* p, std::uint32_t* x) {
    for (int lane = active - 1; lane >= 0; --lane) {
        const std::uint32_t packed = model.tables[static_cast<std::size_t>(ctx.of(static_cast<std::size_t>(lane)))].packed[symbols[lane]];
        const std::uint32_t f = packed & 0xffff, start = packed >> 16;
        std::uint32_t state = x[lane];
        const std::uint32_t emits = state >> 20 >= f;  // without branches: nobody can predict it
        p[-2] = static_cast<std::uint8_t>(state);
        p[-1] = static_cast<std::uint8_t>(state >> 8);
        p -= 2 * emits;
        state >>= 16 * emits;
        const std::uint32_t q = f ? state / f : 0;
        x[lane] = (q << kPrecision) + (state - q * f) + start;
    }
    return p;
}

// All symbols of a chunk with fewer lanes, last symbol first.
std::uint8_t* encode_few(const EncodeModel& model, const std::uint8_t* symbols, std::size_t n, std::size_t lanes, Contexts ctx, std::uint8_t* p,
                         std::uint32_t* x) {
    for (std::size_t i = n; i-- > 0;) {
        const std::uint32_t packed = model.tables[static_cast<std::size_t>(ctx.of(i))].packed[symbols[i]];
        const std::uint32_t f = packed & 0xffff, start = packed >> 16;
        std::uint32_t& state = x[i & (lanes - 1)];
        const std::uint32_t emits = state >> 20 >= f;
        p[-2] = static_cast<std::uint8_t>(state);
        p[-1] = static_cast<std::uint8_t>(state >> 8);
        p -= 2 * emits;
        const std::uint32_t y = state >> 16 * emits, q = f ? y / f : 0;
        state = (q << kPrecision) + (y - q * f) + start;
    }
    return p;
}

std::uint8_t* encode_steps_portable(const EncodeModel& model, const std::uint8_t* symbols, std::size_t steps, Contexts ctx, std::uint8_t* p,
                                    std::uint32_t* x) {
    for (std::size_t t = steps; t-- > 0;) p = encode_step(model, symbols + t * kLanes, kLanes, ctx.at(t * kLanes), p, x);
    return p;
}

// One step, lane by lane, with the symbol from the starts alone; false if the words run out.
bool decode_step(const DecodeModel& model, detail::Cursor& c, int active, const std::uint8_t* end) {
    for (int lane = 0; lane < active; ++lane) {
        const std::size_t i = c.step * kLanes + static_cast<std::size_t>(lane);
        const std::uint16_t* starts = model.starts.data() + 257 * c.contexts.of(i);
        const std::uint32_t slot = c.states[lane] & (kTotal - 1);
        const auto s = static_cast<std::size_t>(std::upper_bound(starts, starts + model.alphabet, slot) - starts) - 1;
        std::uint32_t x = (starts[s + 1] - starts[s]) * (c.states[lane] >> kPrecision) + slot - starts[s];
        if (x < kFirst) {
            if (c.words >= end) return false;
            x = x << 16 | load16(c.words);
            c.words += 2;
        }
        c.states[lane] = x;
        c.symbols[i] = static_cast<std::uint8_t>(s);
    }
    return true;
}

void decode_steps_portable(const DecodeModel& model, detail::Cursor& c) {
    // Local copies: a store through a byte pointer may alias anything else.
    std::uint32_t x[kLanes];
    std::copy_n(c.states, kLanes, x);
    const std::uint8_t *words = c.words, *const limit = c.limit;
    const std::uint32_t* const slots = model.slots.data();
    const Contexts contexts = c.contexts;
    std::size_t step = c.step;
    for (const std::size_t steps = c.steps; step < steps && words <= limit; ++step) {
        std::uint8_t* const out = c.symbols + step * kLanes;
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const auto context = static_cast<std::size_t>(contexts.of(step * kLanes + lane));
            const std::uint32_t e = slots[context << kPrecision | (x[lane] & (kTotal - 1))];
            const std::uint32_t y = ((e >> 8 & (kTotal - 1)) + 1) * (x[lane] >> kPrecision) + (e >> 20);
            const std::uint32_t empty = y < kFirst;  // without branches: nobody can predict it
            x[lane] = y << 16 * empty | (load16(words) & (0u - empty));
            words += 2 * empty;
            out[lane] = static_cast<std::uint8_t>(e);
        }
    }
    std::copy_n(x, kLanes, c.states);
    c.words = words;
    c.step = step;
}

// Symbols of a chunk with L lanes, from i on, while there are words for every lane, so that nobody has to look; and without branches, which
// nobody could predict.
template <std::size_t L, bool C>
void decode_rows(const std::uint32_t* slots, Contexts contexts, std::size_t n, std::uint32_t* states, const std::uint8_t*& words,
                 const std::uint8_t* end, std::uint8_t* out, std::size_t& i) {
    std::uint32_t x[L];
    std::copy_n(states, L, x);
    const std::uint8_t* p = words;
    std::size_t at = i;
    for (; at + L <= n && static_cast<std::size_t>(end - p) >= 2 * L; at += L) {
#pragma GCC unroll 8
        for (std::size_t lane = 0; lane < L; ++lane) {
            const std::size_t context = C ? static_cast<std::size_t>(contexts.of(at + lane)) : 0;
            const std::uint32_t e = slots[context << kPrecision | (x[lane] & (kTotal - 1))];
            const std::uint32_t y = ((e >> 8 & (kTotal - 1)) + 1) * (x[lane] >> kPrecision) + (e >> 20), empty = y < kFirst;
            x[lane] = y << 16 * empty | (load16(p) & (0u - empty));
            p += 2 * empty;
            out[at + lane] = static_cast<std::uint8_t>(e);
        }
    }
    std::copy_n(x, L, states);
    words = p;
    i = at;
}

// All symbols of a chunk with fewer lanes; false if the words run out.
bool decode_few(const DecodeModel& model, detail::Cursor& c, std::size_t n, std::size_t lanes, const std::uint8_t* end) {
    const std::uint8_t* words = c.words;
    const std::uint32_t* const slots = model.slots.data();
    const Contexts contexts = c.contexts;
    std::uint8_t* const out = c.symbols;
    std::uint32_t x[kLanes];
    std::copy_n(c.states, kLanes, x);
    std::size_t i = 0;
    if (model.slots_needed) {
        const auto rows = [&](auto count) {
            if (contexts.data) decode_rows<count(), true>(slots, contexts, n, x, words, end, out, i);
            else decode_rows<count(), false>(slots, contexts, n, x, words, end, out, i);
        };
        if (lanes == 1) rows(std::integral_constant<std::size_t, 1>{});
        else if (lanes == 2) rows(std::integral_constant<std::size_t, 2>{});
        else if (lanes == 4) rows(std::integral_constant<std::size_t, 4>{});
        else if (lanes == 8) rows(std::integral_constant<std::size_t, 8>{});
        else if (lanes == 16) rows(std::integral_constant<std::size_t, 16>{});
        else rows(std::integral_constant<std::size_t, 32>{});
    }
    for (; i < n; ++i) {
        const std::uint16_t* starts = model.starts.data() + 257 * contexts.of(i);
        std::uint32_t& state = x[i & (lanes - 1)];
        const std::uint32_t slot = state & (kTotal - 1);
        const auto s = static_cast<std::size_t>(std::upper_bound(starts, starts + model.alphabet, slot) - starts) - 1;
        std::uint32_t y = static_cast<std::uint32_t>(starts[s + 1] - starts[s]) * (state >> kPrecision) + slot - starts[s];
        if (y < kFirst) {
            if (words >= end) return false;
            y = y << 16 | load16(words);
            words += 2;
        }
        state = y;
        out[i] = static_cast<std::uint8_t>(s);
    }
    std::copy_n(x, kLanes, c.states);
    c.words = words;
    return true;
}

void decode_steps(const DecodeModel& model, detail::Cursor& c) {
#if defined(__x86_64__)
    if (!model.slots_needed || isa() == Isa::avx512) return detail::decode_steps_avx512(model, c);
    if (isa() == Isa::avx2) return detail::decode_steps_avx2(model, c);
#endif
    decode_steps_portable(model, c);
}

}  // namespace

namespace detail {

bool valid_states(const DecodeJob& job) {
    for (std::size_t k = 0; k < job.layout->lanes; ++k)
        if (load32(job.states + 4 * k) < kFirst) return false;
    return true;
}

Chunk::Chunk(const DecodeJob& job) : job_(job) {
    const std::size_t lanes = job.layout->lanes;
    for (std::size_t k = 0; k < kLanes; ++k) cursor.states[k] = k < lanes ? load32(job.states + 4 * k) : kFirst;
    cursor.words = job.words;
    cursor.symbols = job.symbols;
    cursor.step = 0;
    cursor.steps = lanes == kLanes ? job.layout->coded(job.n) / kLanes : 0;
    cursor.contexts = job.contexts;
    cursor.stream = job.stream && reinterpret_cast<std::uintptr_t>(job.symbols) % 64 == 0;
    end_ = job.words + 2 * job.word_count;
    cursor.limit = end_;
    if (job.beyond >= kReach)
        padded_ = true;  // by what follows
    else if (2 * job.word_count + job.beyond >= kReach)
        cursor.limit = end_ - (kReach - job.beyond);
    else
        extend();
}

bool Chunk::extend() {
    if (padded_) return false;
    const auto left = static_cast<std::size_t>(end_ - cursor.words);
    std::memset(tail_, 0, sizeof tail_);
    if (left) std::memcpy(tail_, cursor.words, left);
    cursor.words = tail_;
    cursor.limit = end_ = tail_ + left;
    padded_ = true;
    return true;
}

// The symbols that are not coded, from the states that the coded ones have left behind.
bool Chunk::finish_raw() {
    const Layout& layout = *job_.layout;
    const std::size_t coded = layout.coded(job_.n), lanes = layout.lanes;
    std::uint8_t* out = cursor.symbols + (lanes == kLanes ? cursor.step * kLanes + coded % kLanes : coded);
    const std::uint32_t mask = (1u << layout.width) - 1, last = static_cast<std::uint32_t>(layout.alphabet) - 1;
    // Local copies: a store through a byte pointer may alias anything else. Loops over all lanes are made of vectors.
    std::uint32_t held[kLanes], wrong = 0;
    std::uint8_t symbols[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) held[lane] = cursor.states[lane] - kFirst;
    const std::size_t from = coded & (lanes - 1);  // a row begins with this lane
    for (std::size_t row = 0; row < layout.rows; ++row, out += lanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const std::uint32_t s = held[lane] & mask;
            wrong |= last - s;  // below zero
            symbols[lane] = static_cast<std::uint8_t>(s);
            held[lane] >>= layout.width;
        }
        std::memcpy(out, symbols + from, lanes - from);
        std::memcpy(out + lanes - from, symbols, from);
    }
    for (const std::uint32_t rest : held) wrong |= rest ? 1u << 31 : 0;
    return wrong >> 31 == 0;
}

bool Chunk::finish(const DecodeModel& model) {
    if (job_.layout->lanes < kLanes)
        return decode_few(model, cursor, job_.layout->coded(job_.n), job_.layout->lanes, end_) && cursor.words == end_ && finish_raw();
    while (cursor.step < cursor.steps) {
        decode_steps(model, cursor);
        if (cursor.step < cursor.steps && !extend()) return false;
    }
    if (cursor.words > end_) return false;
    if (!decode_step(model, cursor, static_cast<int>(job_.layout->coded(job_.n) % kLanes), end_)) return false;
    return cursor.words == end_ && finish_raw();
}

}  // namespace detail

Layout::Layout(std::size_t n, int alphabet_, int chunk) : chunks{n, std::size_t{1} << chunk}, alphabet(alphabet_) {
    const int digits = static_cast<int>(std::bit_width(n));
    lanes = digits > 14 ? kLanes : digits < 11 ? 1 : std::size_t{1} << (digits - 10);  // 512 to 1023 symbols each in small blocks
    width = static_cast<int>(raw_bits(alphabet));
    rows = width ? 16 / static_cast<std::size_t>(width) : 0;
    // One chunk may be too short; of several, the shortest has 2^13 symbols.
    if (n < lanes * (rows + 1)) rows = 0;
}

EncodeModel::EncodeModel(const std::uint16_t* frequencies, int alphabet_, int contexts_, bool paired)
    : alphabet(alphabet_), contexts(contexts_), shift(flat_shift(alphabet_, contexts_)), tables(static_cast<std::size_t>(contexts_)), flat{} {
    const auto split = [](EncodeTable& table) {
        for (int plane = 0; plane < 4; ++plane)
            for (int s = 0; s < 64; ++s) table.planes[plane][s] = static_cast<std::uint8_t>(table.packed[s] >> 8 * plane);
    };
    for (int c = 0; c < contexts; ++c) {
        EncodeTable& table = tables[static_cast<std::size_t>(c)];
        std::memset(&table, 0, sizeof table);
        std::uint32_t starts[2] = {};
        bool choice = false;
        for (int s = 0; s < alphabet; ++s) {
            const std::uint32_t f = frequencies[c * alphabet + s];
            std::uint32_t& start = starts[paired ? s & 1 : 0];
            choice |= f && f < kTotal;
            if (f) {
                table.packed[s] = f | start << 16;
                table.reciprocal[s] = below_reciprocal(f);
            }
            start += f;
            if (shift >= 0) {
                flat.packed[c << shift | s] = table.packed[s];
                flat.reciprocal[c << shift | s] = table.reciprocal[s];
            }
        }
        split(table);
        silent.push_back(!choice);
        if (alphabet <= 32) packed.insert(packed.end(), table.packed, table.packed + 32);
    }
    split(flat);
}

DecodeModel::DecodeModel(const std::uint16_t* frequencies, int alphabet_, int contexts_, bool per_symbol, const Layout& layout)
    : alphabet(alphabet_), contexts(contexts_), shift(flat_shift(alphabet_, contexts_)), levels(0), full(false) {
    const bool flat = per_symbol && contexts > 1;
    // Few lanes are decoded one by one; for very few symbols a table of all slots is not worth its making.
    const bool few = layout.lanes < kLanes;
    slots_needed = few ? layout.chunks.n >= 1024 : isa() != Isa::avx512 || alphabet > 64 || (flat && shift < 0);
    starts.resize(static_cast<std::size_t>(contexts) * 257);
    for (int c = 0; c < contexts; ++c) {
        std::uint16_t* start = starts.data() + 257 * c;
        for (int s = 0; s < alphabet; ++s) {
            start[s + 1] = static_cast<std::uint16_t>(start[s] + frequencies[c * alphabet + s]);
            full |= frequencies[c * alphabet + s] == kTotal;
        }
        const std::uint16_t *const row = frequencies + c * alphabet, *const sure = std::find(row, row + alphabet, kTotal);
        only.push_back(sure == row + alphabet ? std::int16_t{-1} : static_cast<std::int16_t>(sure - row));
    }
    if (slots_needed) {
        slots.resize(static_cast<std::size_t>(contexts) * kTotal);
        for (int c = 0; c < contexts; ++c)
            for (int s = 0; s < alphabet; ++s) {
                const std::uint32_t first = starts[static_cast<std::size_t>(257 * c + s)], f = frequencies[c * alphabet + s];
                for (std::uint32_t k = 0; k < f; ++k)
                    slots[static_cast<std::size_t>(c) * kTotal + first + k] = static_cast<std::uint32_t>(s) | (f - 1) << 8 | k << 20;
            }
        return;
    }
    if (few) return;
    images.resize(flat ? 1 : static_cast<std::size_t>(contexts));
    std::memset(images.data(), 0, images.size() * sizeof(Images));
    for (Images& image : images) std::memset(image.start_high, kTotal >> 8, 64);  // beyond the alphabet: no slot reaches 4096
    const auto fill = [&](Images& image, int base, int c) {
        for (int s = 0; s < alphabet; ++s) {
            const std::uint32_t start = starts[static_cast<std::size_t>(257 * c + s)];
            const std::uint32_t scaled = frequencies[c * alphabet + s] << 4 & 0xffff;
            image.start_low[base + s] = static_cast<std::uint8_t>(start);
            image.start_high[base + s] = static_cast<std::uint8_t>(start >> 8);
            image.scaled_low[base + s] = static_cast<std::uint8_t>(scaled);
            image.scaled_high[base + s] = static_cast<std::uint8_t>(scaled >> 8);
        }
    };
    if (flat) {  // no coarse table: the search starts at context << shift and takes `shift` probes
        levels = shift;
        for (int c = 0; c < contexts; ++c) fill(images[0], c << shift, c);
        return;
    }
    for (int c = 0; c < contexts; ++c) {
        Images& image = images[static_cast<std::size_t>(c)];
        fill(image, 0, c);
        const std::uint16_t* start = starts.data() + 257 * c;
        const auto symbol_at = [&](int slot) { return static_cast<int>(std::upper_bound(start, start + alphabet, slot) - start) - 1; };
        for (int bucket = 0; bucket < 64; ++bucket) {
            const int low = symbol_at(bucket * 64), high = symbol_at(bucket * 64 + 63);
            image.coarse[bucket] = static_cast<std::uint8_t>(low);
            levels = std::max(levels, static_cast<int>(std::bit_width(static_cast<unsigned>(high - low))));
        }
    }
    // The probes look up to 2^levels - 1 further: keep them inside the 64 entries.
    for (Images& image : images)
        for (std::uint8_t& symbol : image.coarse) symbol = std::min<std::uint8_t>(symbol, static_cast<std::uint8_t>(64 - (1 << levels)));
}

namespace {

// What of a chunk comes before its whole steps: the symbols that are not coded, and those behind the last step.
detail::EncodeRun begin_chunk(const EncodeModel& model, const Layout& layout, int first, const EncodeJob& job) {
    const std::size_t coded = layout.coded(job.n), lanes = layout.lanes, steps = coded / kLanes;
    std::fill_n(job.states, kLanes, kFirst);
    const std::uint8_t* left = job.symbols + coded;
    for (std::size_t row = 0; row < layout.rows; ++row)
        each_lane(coded, lanes, [&](std::size_t lane) { job.states[lane] += static_cast<std::uint32_t>(*left++ - first) << row * static_cast<std::size_t>(layout.width); });
    if (lanes < kLanes) return {job.symbols, 0, job.contexts, encode_few(model, job.symbols, coded, lanes, job.contexts, job.words, job.states), job.states};
    std::uint8_t* const p = encode_step(model, job.symbols + steps * kLanes, static_cast<int>(coded % kLanes), job.contexts.at(steps * kLanes), job.words, job.states);
    return {job.symbols, steps, job.contexts, p, job.states};
}

std::uint8_t* finish_chunk(const EncodeModel& model, detail::EncodeRun& run, Ahead ahead) {
    if (!run.steps) return run.words;
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return detail::encode_steps_avx512(model, run, nullptr, ahead), run.words;
    if (isa() == Isa::avx2) return detail::encode_steps_avx2(model, run.symbols, run.steps, run.contexts, run.words, run.states);
#endif
    return encode_steps_portable(model, run.symbols, run.steps, run.contexts, run.words, run.states);
}

}  // namespace

std::uint8_t* encode_chunk(const EncodeModel& model, const Layout& layout, const std::uint8_t* symbols, std::size_t n, int first, Contexts ctx,
                           std::uint8_t* end, std::uint32_t states[kLanes], Ahead ahead) {
    detail::EncodeRun run = begin_chunk(model, layout, first, {symbols, n, ctx, end, states});
    return finish_chunk(model, run, ahead);
}

void encode_two_chunks(const EncodeModel& model, const Layout& layout, int first, EncodeJob& one, EncodeJob& two, Ahead ahead) {
    detail::EncodeRun a = begin_chunk(model, layout, first, one), b = begin_chunk(model, layout, first, two);
#if defined(__x86_64__)
    if (isa() == Isa::avx512 && a.steps && b.steps) detail::encode_steps_avx512(model, a, &b, ahead);
#endif
    one.words = finish_chunk(model, a, {});
    two.words = finish_chunk(model, b, {});
}

bool decode_chunk(const DecodeModel& model, const DecodeJob& job) {
    if (!detail::valid_states(job)) return false;
    detail::Chunk chunk(job);
    return chunk.finish(model);
}

bool decode_two_chunks(const DecodeModel& model, const DecodeJob& first, const DecodeJob& second) {
    if (!detail::valid_states(first) || !detail::valid_states(second)) return false;
    detail::Chunk a(first), b(second);
#if defined(__x86_64__)
    if (!model.slots_needed) detail::decode_two_avx512(model, a.cursor, b.cursor);
#endif
    return a.finish(model) && b.finish(model);
}

}  // namespace tersegrad::rans
