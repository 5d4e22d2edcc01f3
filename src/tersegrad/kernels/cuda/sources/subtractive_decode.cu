// Subtractive dithering: values of symbols and of escapes (spec/wire.md, 5.18).
#define NEAR_BYTES 38912
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "subtractive.cuh"
#include "scan.cuh"
#include "classes.cuh"
#include "entries.cuh"

#define WARPS 4
#define GROUP 256
// Coordinates whose marks, and half the bytes of escapes that, a block looks at.
#define SPAN 32768
#define SPAN_BYTES 4096

// The draws of two groups of symbols of a warp: `i` is a symbol, which lies `shift` behind its coordinate.
struct Nearby {
    Draws draws;
    i64 shift;
    u16* ring;
    __device__ int near(i64 i) const { return ring[(u32)i % (2 * GROUP)]; }
    __device__ int far(i64 i) const { return Drawn(draws, (i + shift) >> 3)((int)((i + shift) & 7)); }
    __device__ void fetch(i64 i) const {
        const int lane = threadIdx.x & 31;
        const Drawn own(draws, ((i + shift) >> 3) + lane);
        __syncwarp();
        ((Sixteen*)(ring + (u32)i % (2 * GROUP)))[lane] = Sixteen{{own.words[0], own.words[1], own.words[2], own.words[3]}};
        __syncwarp();
    }
};

// The table of a symbol: by the bin of its draw, or by its class, from `classes` on, and octave.
template <bool classed>
struct TableOf {
    static constexpr int ahead = GROUP / 64;
    Nearby drawn;
    const u8* classes;
    int fineness;
    __device__ u32 of(int u, i64 i) const {
        const int size = size_of_draw(u);
        if (!classed) return bin_of(size) >> (FINEST - fineness);
        const int octave = octave_of(size);
        return classes[i] * fineness + (octave < fineness ? octave : fineness - 1);
    }
    __device__ void begin(i64 i) const { drawn.fetch(i); }
    __device__ u32 near(i64 i) const { return of(drawn.near(i), i); }
    __device__ u32 operator()(i64 i) const { return of(drawn.far(i), i); }
};

// Values of symbols; those at the ends of the window are marked where there are escapes.
template <bool escapes>
struct Settled {
    Nearby drawn;
    float* out;
    u32* marks;
    int window;
    float by, weight;
    __device__ bool marked(u32 symbol) const { return symbol - 1 >= 2 * (u32)window - 1; }
    __device__ void operator()(i64 i, u8 symbol) const {
        out[i] = weighted<int>(symbol - window, drawn.far(i), by, weight);
        if (escapes && marked(symbol)) atomicOr(&marks[i >> 5], 1u << (i & 31));
    }
    // A warp's step of 64 symbols from i on.
    __device__ void step(i64 i, u32 a, u32 b) const {
        const int lane = threadIdx.x & 31;
        out[i + lane] = weighted<int>((int)a - window, drawn.near(i + lane), by, weight);
        out[i + lane + 32] = weighted<int>((int)b - window, drawn.near(i + lane + 32), by, weight);
        if (!escapes) return;
        const u32 low = __ballot_sync(FULL, marked(a)), high = __ballot_sync(FULL, marked(b));
        if (lane < 2) marks[(i >> 5) + lane] = lane ? high : low;
    }
};

// A warp for each chunk, which lies in one part, four of them in a block.
extern "C" __global__ void __launch_bounds__(32 * WARPS) subtractive_decode_chunks(
    const u8* data, i64 n, i64 step_word, i64 who, i64 k0, i64 k1, const float* steps, const i64* shifts, const u8* classes, const u32* entries,
    const i64* offsets, const i64* words, float weight, u32* marks, float* out, i64* state
) {
    __shared__ u32 near[NEAR_BYTES / 4];
    __shared__ u16 rings[WARPS][RING];
    __shared__ Sixteen draws[WARPS][2 * GROUP / 8];
    if (!goes_on(state) || state[FORM_WORD] != CODED) return;
    const int window = (int)state[WINDOW_WORD], alphabet = 2 * window + 1, tables = (int)state[NUMBER], fineness = (int)state[FINENESS];
    const Layout l = layout_of(state[SYMBOLS], alphabet, state[EXPONENT]);
    const i64 begin = WARPS * (i64)blockIdx.x, c = begin + (threadIdx.x >> 5);
    if (begin >= l.chunks) return;
    const int stride = alphabet + 1, coarse = load_entries(entries, 256, tables, stride, near);
    const u8* guesses = (const u8*)(near + tables * stride);
    if (c >= l.chunks) return;
    const i64 shift = shifts[smaller(c * l.size / SEGMENT, state[LIVE] - 1)], first = c * l.size + shift;
    const Nearby drawn = {{(u32)step_word, (u32)who, (u32)k0, (u32)k1}, shift, (u16*)draws[threadIdx.x >> 5]};
    const float step = steps[part_of(n, first)];
    u32* own_marks = marks + shift / 32;
    u16* ring = rings[threadIdx.x >> 5];
    auto decode = [&](auto context, auto look) {
        const u8* states = data + offsets[c];
        if (!state[TAIL_BYTES])
            return decode_chunk(l, c, alphabet, states, words[c], ring, context, look, Settled<false>{drawn, out + shift, own_marks, window, step, weight});
        clear_marks(own_marks, l, c);
        return decode_chunk(l, c, alphabet, states, words[c], ring, context, look, Settled<true>{drawn, out + shift, own_marks, window, step, weight});
    };
    auto by = [&](auto context) {
        return coarse < 2 ? decode(context, Entries<true>{near, guesses, coarse, stride}) : decode(context, Entries<false>{near, guesses, coarse, stride});
    };
    const bool good = state[WITH_CLASSES] ? by(TableOf<true>{drawn, classes + shift, fineness}) : by(TableOf<false>{drawn, nullptr, fineness});
    if (!good) state[STATUS_OF] = CORRUPT;
}

// Everything else: parts of zeros, raw symbols, tables that leave no choice.
extern "C" __global__ void __launch_bounds__(256) subtractive_plain(
    const u8* data, i64 n, i64 step_word, i64 who, i64 k0, i64 k1, const float* steps, const i64* parts, const u8* classes, const u8* only,
    float weight, i64 added, u32* marks, float* out, i64* state
) {
    const i64 form = state[FORM_WORD];
    if (!goes_on(state) || (form == CODED && state[SYMBOLS] == n)) return;
    const int window = (int)state[WINDOW_WORD], width = raw_bits(2 * window + 1), fineness = (int)state[FINENESS], lane = threadIdx.x & 31;
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 base = (i64)blockIdx.x * blockDim.x + threadIdx.x - lane; base < n; base += stride) {
        const i64 i = smaller(base + lane, n - 1), p = part_of(n, i), j = i - parts[p * SEGMENT_PLACES + AT];
        const bool still = parts[p * SEGMENT_PLACES + KIND] == ZERO_KIND;
        if (!still && form == CODED) continue;
        u32 symbol = (u32)window;
        if (still) {
            // What is added to others then leaves all of them as they are, zeros too.
            out[i] = added ? -0.0f : 0.0f;
        } else {
            const Nearby drawn = {{(u32)step_word, (u32)who, (u32)k0, (u32)k1}, 0, nullptr};
            const int u = drawn.far(i);
            if (form == RAW) {
                const i64 bit = j * width;
                const u8* at = data + state[BODY] + 1 + (bit >> 3);
                const int shift = bit & 7, end = (bit + width) & 7;
                u32 held = at[0];
                if (shift + width > 8) held |= (u32)at[1] << 8;
                symbol = held >> shift & ((1u << width) - 1);
                if (symbol > 2 * window || (j + 1 == state[SYMBOLS] && end && at[shift + width > 8] >> end)) state[STATUS_OF] = CORRUPT;
            } else {
                symbol = only[state[WITH_CLASSES] ? TableOf<true>{drawn, classes, fineness}.of(u, i) : TableOf<false>{drawn, classes, fineness}.of(u, i)];
            }
            out[i] = weighted<int>((int)symbol - window, u, steps[p], weight);
        }
        const u32 votes = __ballot_sync(FULL, base + lane < n && !still && (symbol == 0 || symbol == 2 * window));
        if (state[TAIL_BYTES] && lane == 0) marks[base / 32] = votes;
    }
}

// Where the escapes of a message end, and what its tail has: for all blocks of the kernels below.
struct Tail {
    const u8* codes;
    i64 bytes;
    bool some;
    __device__ Tail(const u8* data, i64 nbytes, const i64* state)
        : codes(data + nbytes - state[TAIL_BYTES]), bytes(state[TAIL_BYTES]), some(goes_on(state) && bytes) {}
};

// The marks of four words of a thread; of parts with zeros there are none.
__device__ __forceinline__ void marks_of(const u32* marks, i64 n, const i64* parts, i64 first, u32* words) {
    const bool live = first < n && parts[part_of(n, first) * SEGMENT_PLACES + KIND] != ZERO_KIND;
    for (int k = 0; k < 4; ++k) words[k] = live && first + 32 * k < n ? marks[first / 32 + k] : 0;
}

// Blocks count, into two rows, the escapes of SPAN coordinates, and the ones of SPAN_BYTES bytes.
extern "C" __global__ void __launch_bounds__(256) subtractive_marks(
    const u8* data, i64 nbytes, i64 n, const i64* parts, const u32* marks, i64* rows, const i64* state
) {
    const Tail tail(data, nbytes, state);
    i64 marked = 0, ones = 0, total;
    if (!tail.some) return;
    u32 words[4];
    marks_of(marks, n, parts, SPAN * (i64)blockIdx.x + 128 * threadIdx.x, words);
    for (int k = 0; k < 4; ++k) marked += __popc(words[k]);
    const i64 begin = SPAN_BYTES * (i64)blockIdx.x + 16 * threadIdx.x;
    for (i64 b = begin; b < smaller(begin + 16, tail.bytes); ++b) ones += __popc(tail.codes[b]);
    block_scan(marked, &total);
    if (threadIdx.x == 0) rows[blockIdx.x] = total;
    block_scan(ones, &total);
    if (threadIdx.x == 0) rows[gridDim.x + 1 + blockIdx.x] = total;
}

// The same blocks list where the ones of the unary plane are, as many as there are escapes; more than `most` are left to others.
extern "C" __global__ void __launch_bounds__(256) subtractive_ones(
    const u8* data, i64 nbytes, const i64* rows, i64 most, i64* places, i64* state
) {
    const Tail tail(data, nbytes, state);
    const i64 *found = rows + gridDim.x + 1, all = rows[gridDim.x];
    if (!tail.some) return;
    if (all == 0 || all > most || found[gridDim.x] < all) {
        if (threadIdx.x == 0) atomicMax(&state[STATUS_OF], (i64)(all > most ? ANOTHER : CORRUPT));
        return;
    }
    const i64 begin = SPAN_BYTES * (i64)blockIdx.x + 16 * threadIdx.x;
    i64 ones = 0, total;
    for (i64 b = begin; b < smaller(begin + 16, tail.bytes); ++b) ones += __popc(tail.codes[b]);
    i64 rank = found[blockIdx.x] + block_scan(ones, &total);
    for (i64 b = begin; b < smaller(begin + 16, tail.bytes) && rank < all; ++b)
        for (u32 byte = tail.codes[b]; byte && rank < all; byte &= byte - 1, ++rank) places[rank] = 8 * b + __ffs((int)byte) - 1;
}

// And the same settle the escapes.
extern "C" __global__ void __launch_bounds__(256) subtractive_settle(
    const u8* data, i64 nbytes, i64 n, i64 step_word, i64 who, i64 k0, i64 k1, const float* steps, const i64* parts, const u32* marks,
    const i64* rows, const i64* places, float weight, float* out, i64* state
) {
    const Tail tail(data, nbytes, state);
    if (!tail.some) return;
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    const i64 all = rows[gridDim.x], last = places[all - 1], used = last / 8 + 1, end = 8 * used + last + 1 - all, window = state[WINDOW_WORD];
    bool bad = (end + 7) / 8 != tail.bytes || tail.codes[last / 8] >> last % 8 >> 1;
    if (!bad && end & 7) bad |= tail.codes[end >> 3] >> (end & 7) != 0;
    const i64 first = SPAN * (i64)blockIdx.x + 128 * threadIdx.x;
    u32 words[4];
    i64 own = 0, total;
    marks_of(marks, n, parts, first, words);
    for (int k = 0; k < 4; ++k) own += __popc(words[k]);
    i64 rank = rows[blockIdx.x] + block_scan(own, &total);
    for (int k = 0; k < 4 && !bad; ++k)
        for (; words[k] && !bad; words[k] &= words[k] - 1, ++rank) {
            const i64 i = first + 32 * k + __ffs((int)words[k]) - 1, before = rank ? places[rank - 1] : -1, width = places[rank] - before - 1;
            // The widths of those before are what lies before, but for their ones.
            const i64 at = 8 * used + before + 1 - rank;
            bad |= width > 30;
            i64 value = (i64)1 << smaller(width, 31);
            for (i64 b = 0; !bad && b < width; ++b) value |= (i64)(tail.codes[(at + b) >> 3] >> ((at + b) & 7) & 1) << b;
            bad |= value > LEVEL_LIMIT;
            const int u = Drawn(draws, i >> 3)((int)(i & 7)), level = (int)(window + value - 1);
            // The sign of the end of the window's value is that of the level before it is folded.
            const bool folded = ((__float_as_uint(out[i]) ^ __float_as_uint(weight)) >> 31) != (u < FOLDED);
            if (!bad) out[i] = weighted<i64>(folded ? -level : level, u, steps[part_of(n, i)], weight);
        }
    if (bad) state[STATUS_OF] = CORRUPT;
}
