// Subtractive dithering: tables, chunks and the message (spec/wire.md, 5.18).
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "subtractive.cuh"
#include "dither_levels.cuh"
#include "classes.cuh"
#include "classes_octaves.cuh"
#include "subtractive_counts.cuh"

// Codes that a block has near.
#define NEAR 4096
#define WARPS 4
// Parts of a chunk that blocks copy.
#define PIECES 4

// A warp for each table: its bits and its codes.
extern "C" __global__ void __launch_bounds__(32) subtractive_tables(
    const u64* counts, const int* present, const u64* fine, const i64* tops, u8* bits, i64* lengths, u32* codes, i64* state
) {
    __shared__ Bench bench;
    __shared__ int different;
    __shared__ i64 row[256];
    const i64 table = blockIdx.x, kept = state[FINENESS];
    if (state[STATUS_OF] != FINE || table >= state[NUMBER]) return;
    const Counted of = {counts, present, fine, state};
    const bool classed = state[WITH_CLASSES];
    const int o = classed ? (int)(table % kept) : 0, until = o + 1 == kept ? DEEPEST : o + 1;
    // The class with that number.
    int c = 0;
    for (i64 before = classed ? table / kept : 0; classed && (before || !tops[c]); ++c) before -= tops[c] > 0;
    for (int a = threadIdx.x; a < of.alphabet(); a += 32) row[a] = classed ? of.octaves(c, o, until, a) : of.bins((int)kept, (int)table, a, false);
    __syncwarp();
    const i64* counted = row;
    make_table([=](int a) { return counted[a]; }, of.alphabet(), bench, bits + table * TABLE_BYTES, lengths + table, &different, codes + table * 256);
    if (threadIdx.x == 0 && different > 1) state[MORE_THAN_ONE] = 1;
}

// Where symbol i lies among the coordinates: so far behind.
__device__ __forceinline__ i64 shift_of(const i64* shifts, const i64* state, i64 i) { return shifts[smaller(i / SEGMENT, state[LIVE] - 1)]; }

// A warp for each chunk, which lies in one part, four of them in a block.
extern "C" __global__ void __launch_bounds__(32 * WARPS) subtractive_chunks(
    const u8* levels, const u8* drawn, const u8* classes, const i64* shifts, const u32* codes, u16* words, i64* numbers, u32* states, const i64* state
) {
    __shared__ Code own[NEAR];
    if (state[STATUS_OF] != FINE || !state[MORE_THAN_ONE]) return;
    const int window = (int)state[WINDOW_WORD], alphabet = 2 * window + 1, fineness = (int)state[FINENESS];
    const Layout l = layout_of(state[SYMBOLS], alphabet, state[EXPONENT]);
    const i64 c = WARPS * (i64)blockIdx.x + (threadIdx.x >> 5), cells = state[NUMBER] * alphabet, names = state[NAMES];
    if (WARPS * (i64)blockIdx.x >= l.chunks) return;
    const bool mine = cells <= NEAR, classed = state[WITH_CLASSES];
    for (int k = threadIdx.x; mine && k < cells; k += blockDim.x) own[k] = code_of(codes[k / alphabet * 256 + k % alphabet]);
    __syncthreads();
    if (c >= l.chunks) return;
    const Code* near = own;
    const i64 shift = shift_of(shifts, state, c * l.size);
    const u8 *bytes = levels + shift, *kinds = drawn + shift, *of = classes + shift;
    auto symbol = [=](i64 i) { return (u32)symbol_of((signed char)bytes[i], window); };
    auto find = [=](u32 context, u32 level) {
        const u32 symbol = (u32)symbol_of((signed char)level, window);
        return mine ? near[context * alphabet + symbol] : code_of(codes[context * 256 + symbol]);
    };
    i64 number;
    if (classed) {
        auto load = [=](i64 i) { return Raw{bytes[i], (u32)of[i] | (u32)kinds[i] << 8}; };
        auto look = [=](const Raw& r) {
            const u32 octave = r.context >> 12, name = (u32)(names >> 4 * (r.context & 15)) & 15;
            return find(name * fineness + (octave < fineness ? octave : fineness - 1), r.symbol);
        };
        number = encode_chunk(l, c, symbol, load, look, words, states);
    } else {
        auto load = [=](i64 i) { return Raw{bytes[i], kinds[i]}; };
        auto look = [=](const Raw& r) { return find((r.context & 15) >> (FINEST - fineness), r.symbol); };
        number = encode_chunk(l, c, symbol, load, look, words, states);
    }
    if ((threadIdx.x & 31) == 0) numbers[c] = number;
}

// One block joins the tables and lays out the message.
extern "C" __global__ void __launch_bounds__(256) subtractive_close(
    i64 steps_number, const u8* bits, const i64* lengths, u8* tables, const i64* numbers, i64* offsets, i64* state
) {
    if (state[STATUS_OF] != FINE) return;
    const int alphabet = 2 * (int)state[WINDOW_WORD] + 1;
    const i64 bytes = join_tables(bits, TABLE_BYTES, lengths, state[NUMBER], tables);
    const Layout l = layout_of(state[SYMBOLS], alphabet, state[EXPONENT]);
    const i64 plain = 1 + raw_bytes(state[SYMBOLS], alphabet), begin = 1 + bytes;
    const bool informative = state[MORE_THAN_ONE];
    i64 at = begin + (informative ? 4 * l.chunks : 0);
    for (i64 base = 0; informative && base < l.chunks; base += blockDim.x) {
        const i64 c = base + threadIdx.x;
        i64 total;
        const i64 before = block_scan(c < l.chunks ? 4 * l.lanes + 2 * numbers[c] : 0, &total);
        if (c < l.chunks) offsets[c] = at + before;
        at += total;
    }
    if (threadIdx.x) return;
    const bool raw = begin >= plain || at >= plain;
    i64 varint = 1;
    while (state[TAIL_BYTES] >> 7 * varint) ++varint;
    if (!state[WITH_CLASSES]) state[SIDE_BYTES] = 0;
    state[TABLE_BYTES_OF] = bytes;
    state[FORM_WORD] = raw ? RAW : informative ? CODED : ONLY_TABLES;
    state[BODY] = 4 + 4 * steps_number + 2 + varint + state[SIDE_BYTES];
    state[MESSAGE_LENGTH] = state[BODY] + (raw ? plain : at) + state[TAIL_BYTES];
}

// The message. Blocks take chunks, or stretches of raw symbols, in turn.
extern "C" __global__ void __launch_bounds__(256) subtractive_write(
    i64 steps_number, const float* steps, const u8* levels, const i64* shifts, const u8* side, const u8* tables, const u16* words,
    const i64* numbers, const u32* states, const i64* offsets, const u32* planes, const i64* state, u8* out
) {
    if (state[STATUS_OF] != FINE) return;
    const int window = (int)state[WINDOW_WORD], alphabet = 2 * window + 1;
    const i64 stride = (i64)gridDim.x * blockDim.x, begin = (i64)blockIdx.x * blockDim.x + threadIdx.x, tail = state[TAIL_BYTES];
    const i64 form = state[FORM_WORD], side_bytes = state[SIDE_BYTES], head = state[BODY] - side_bytes;
    u8* body = out + state[BODY];
    if (begin == 0) {
        store32(out, SEGMENTS);
        u8* to = out + 4 + 4 * steps_number;
        to[0] = (u8)(window | (state[WITH_CLASSES] ? CLASSED_WINDOW : 0));
        to[1] = (u8)state[FINENESS];
        for (i64 k = 2; to + k < out + head; ++k) to[k] = (u8)((tail >> 7 * (k - 2) & 127) | (to + k + 1 < out + head ? 128 : 0));
        body[0] = form == RAW ? (u8)RAW : (u8)state[EXPONENT];
    }
    for (i64 s = begin; s < steps_number; s += stride) store32(out + 4 + 4 * s, __float_as_uint(steps[s]));
    for (i64 b = begin; b < side_bytes; b += stride) out[head + b] = side[b];
    for (i64 b = begin; b < tail; b += stride) out[state[MESSAGE_LENGTH] - tail + b] = (u8)(planes[b >> 2] >> 8 * (b & 3));
    if (form == RAW) {
        const int width = raw_bits(alphabet);
        for (i64 g = begin; 8 * g < state[SYMBOLS]; g += stride) {
            const u8* own = levels + shift_of(shifts, state, 8 * g) + 8 * g;
            const int here = (int)smaller(8, state[SYMBOLS] - 8 * g);
            u64 held = 0;
            for (int k = 0; k < here; ++k) held |= (u64)symbol_of((signed char)own[k], window) << k * width;
            for (int b = 0; 8 * b < here * width; ++b) body[1 + g * width + b] = (u8)(held >> 8 * b);
        }
        return;
    }
    for (i64 b = begin; b < state[TABLE_BYTES_OF]; b += stride) body[1 + b] = tables[b];
    if (form != CODED) return;
    const Layout l = layout_of(state[SYMBOLS], alphabet, state[EXPONENT]);
    for (i64 piece = blockIdx.x; piece < l.chunks * PIECES; piece += gridDim.x) {
        const i64 c = piece / PIECES, which = piece % PIECES, number = numbers[c];
        const i64 from = number * which / PIECES, until = number * (which + 1) / PIECES;
        u8* chunk = body + offsets[c];
        copy_words(chunk + 4 * l.lanes + 2 * from, words + c * l.size + l.coded(c) - number + from, until - from);
        if (which) continue;
        if (threadIdx.x == 0) store32(body + 1 + state[TABLE_BYTES_OF] + 4 * c, (u32)number);
        for (int k = threadIdx.x; k < l.lanes; k += blockDim.x) store32(chunk + 4 * k, states[c * l.lanes + k]);
    }
}
