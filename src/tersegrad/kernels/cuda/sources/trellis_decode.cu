// Trellis codes: decoding (spec/wire.md, 5.20 and 5.21). All segments at once, their chunks side by side.
#define NEAR_BYTES 40960
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "entries.cuh"
#include "escapes.cuh"
#include "trellis.cuh"
#include "trellis_walk.cuh"

#define TABLES_MOST (1 << MOST_BITS)

__device__ __forceinline__ bool refused(const i64* state) { return state[WRONG] != FINE || state[OTHERS]; }

// A warp decodes chunk c of a segment that begins at coordinate `first`.
template <class Walking, class Look>
__device__ void decode_into(
    const u8* data, const i64* d, const Layout& l, i64 c, i64 first, i64 offset, i64 number, u16* ring, Walking walk, const Look& look, u32* marks,
    float* out, i64* state
) {
    u32* own_marks = marks + first / 32;
    bool good;
    if (d[TAIL]) {
        clear_marks(own_marks, l, c);
        good = decode_walk(l, c, first, (int)d[RUN_OF], data + offset, number, ring, walk, look, Out<true>{out + first, own_marks});
    } else {
        good = decode_walk(l, c, first, (int)d[RUN_OF], data + offset, number, ring, walk, look, Out<false>{out + first, own_marks});
    }
    if (!good) state[WRONG] = CORRUPT;
}

// Of a block of warps that decode chunks of a segment with the same tables: the segment, the chunk of the first warp, and how far its next is. Blocks take
// turns: how long chunks are is found in the message.
struct Turns {
    i64 s, begin, stride;
    int warp;
};
__device__ Turns turns_of(i64 count) {
    const i64 number = segments_of(count), warps = blockDim.x >> 5;
    return {blockIdx.x % number, blockIdx.x / number * warps, gridDim.x / number * warps, __shfl_sync(FULL, (int)threadIdx.x >> 5, 0)};
}

extern "C" __global__ void __launch_bounds__(128) trellis_chunks(
    const u8* data, i64 count, i64 g0, i64 g1, const i64* segments, const u32* cells, const i64* offsets, const i64* words, u32* marks, float* out,
    i64* state
) {
    __shared__ Sixteen own_cells[2 * TOTAL / 4];
    __shared__ u16 rings[4][RING];
    __shared__ float values[256];
    __shared__ bool go;
    const Turns turns = turns_of(count);
    const i64 s = turns.s, n = segment_length(count, s);
    const i64* d = segments + s * TRELLIS_PLACES;
    if (threadIdx.x == 0) go = !refused(state) && d[KIND] == CODED_KIND && d[FORM_OF] == CODED;
    __syncthreads();
    if (!go) return;
    const Layout l = layout_of(n, 2 * d[WINDOW], d[CHUNK_OF]);
    if (turns.begin >= l.chunks) return;
    walk_of<false>(d, g0, g1, nullptr, nullptr, values).prepare();
#pragma unroll 8
    for (int i = threadIdx.x; i < 2 * TOTAL / 4; i += blockDim.x) own_cells[i] = ((const Sixteen*)(cells + s * 2 * TOTAL))[i];
    __syncthreads();
    const Cells look = {own_cells[0].word};
    for (i64 begin = turns.begin; begin < l.chunks; begin += turns.stride) {
        // Threads of a warp are known to be together here.
        __syncthreads();
        const i64 c = begin + turns.warp;
        if (c >= l.chunks) return;
        const i64 place = s * CHUNKS + c;
        const Walk<false> walk = walk_of<false>(d, g0, g1, nullptr, nullptr, values);
        decode_into(data, d, l, c, s * SEGMENT, offsets[place], words[place], rings[turns.warp], walk, look, marks, out, state);
    }
}

// With dither.
extern "C" __global__ void __launch_bounds__(128) trellis_dithered_chunks(
    const u8* data, i64 count, i64 g0, i64 g1, i64 step_word, i64 who, i64 k0, i64 k1, const i64* segments, const u32* entries, const i64* offsets,
    const i64* words, u32* marks, float* out, i64* state
) {
    __shared__ u32 near[TABLES_MOST * (129 + TOTAL / 4)];
    __shared__ u16 rings[4][RING];
    __shared__ u32 rooms[4][128];
    __shared__ bool go;
    const Turns turns = turns_of(count);
    const i64 s = turns.s, n = segment_length(count, s);
    const i64* d = segments + s * TRELLIS_PLACES;
    if (threadIdx.x == 0) go = !refused(state) && d[KIND] == CODED_KIND && d[FORM_OF] == CODED;
    __syncthreads();
    if (!go) return;
    const int tables = 1 << d[BITS_OF], stride = 2 * (int)d[WINDOW] + 1;
    const Layout l = layout_of(n, 2 * d[WINDOW], d[CHUNK_OF]);
    if (turns.begin >= l.chunks) return;
    // So few tables have room for every slot.
    const int coarse = load_entries(entries + s * TABLES_MOST * 129, 129, tables, stride, near);
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    const Listed<true, true> look = {{near, (const u8*)(near + tables * stride), coarse, stride}};
    for (i64 begin = turns.begin; begin < l.chunks; begin += turns.stride) {
        // Threads of a warp are known to be together here.
        __syncthreads();
        const i64 c = begin + turns.warp;
        if (c >= l.chunks) return;
        const i64 place = s * CHUNKS + c;
        const DitheredWalk<false> walk = dithered_of<false>(d, g0, g1, nullptr, draws, (u16*)rooms[turns.warp]);
        decode_into(data, d, l, c, s * SEGMENT, offsets[place], words[place], rings[turns.warp], walk, look, marks, out, state);
    }
}

// Of the classes that have tables: the first table | whether it is still << 7. The number of tables.
__device__ int name_classes(u32 mask, u32 moving, u8* names) {
    int at = 0, number = 0;
    for (int c = 0; c < CLASSES; ++c) {
        if (!(mask >> c & 1)) continue;
        const int moves = moving >> c & 1;
        names[number++] = (u8)(at | (moves ? 0 : 128));
        at += 1 + moves;
    }
    return at;
}

// Chunks of segments with scale classes. `most`: room for the tables of a segment.
extern "C" __global__ void __launch_bounds__(128) trellis_class_decode(
    const u8* data, i64 count, i64 g0, i64 g1, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, i64 most, const i64* segments, const i64* masks,
    const u8* contexts, const u32* entries, const i64* offsets, const i64* words, u32* marks, float* out, i64* state
) {
    __shared__ u32 near[NEAR_BYTES / 4];
    __shared__ u16 rings[4][RING];
    // Draws, or values of symbols.
    __shared__ u32 rooms[4][128];
    __shared__ u8 names[CLASSES];
    __shared__ int tables;
    const Turns turns = turns_of(count);
    const i64 s = turns.s, n = segment_length(count, s);
    const i64* d = segments + s * TRELLIS_PLACES;
    const int stride = 2 * (int)d[WINDOW] + 1;
    if (threadIdx.x == 0) {
        tables = 0;
        if (!refused(state) && d[KIND] == CLASSED_KIND && d[FORM_OF] == CODED)
            tables = drawn ? __popc((u32)masks[s]) << d[BITS_OF] : name_classes((u32)masks[s], (u32)d[MOVING], names);
        // Very many tables, which have no room here, are the host's.
        if (4 * tables * stride + tables * (TOTAL >> COARSEST) > NEAR_BYTES) state[OTHERS] = 1, tables = 0;
    }
    __syncthreads();
    if (!tables) return;
    const Layout l = layout_of(n, 2 * d[WINDOW], d[CHUNK_OF]);
    if (turns.begin >= l.chunks) return;
    Walk<true> moved = walk_of<true>(d, g0, g1, contexts, names, (float*)rooms);
    if (!drawn) moved.prepare();
    const int coarse = load_entries(entries + s * most * 256, 256, tables, stride, near);
    const u8* guesses = (const u8*)(near + tables * stride);
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    for (i64 begin = turns.begin; begin < l.chunks; begin += turns.stride) {
        // Threads of a warp are known to be together here.
        __syncthreads();
        const i64 c = begin + turns.warp;
        if (c >= l.chunks) return;
        const i64 place = s * CHUNKS + c;
        auto decode = [&](auto walk) {
            auto by = [&](const auto& look) {
                decode_into(data, d, l, c, s * SEGMENT, offsets[place], words[place], rings[turns.warp], walk, look, marks, out, state);
            };
            if (coarse < 2) by(Listed<false, true>{{near, guesses, coarse, stride}});
            else by(Listed<false, false>{{near, guesses, coarse, stride}});
        };
        if (drawn) decode(dithered_of<true>(d, g0, g1, contexts, draws, (u16*)rooms[turns.warp]));
        else decode(moved);
    }
}

// A thread for each lane of a run: raw symbols, or symbols that tables leave no choice of.
template <class Walking>
__device__ void walk_plainly(const u8* data, const i64* d, i64 n, i64 first, i64 run, const u8* only, Walking walk, u32* marks, float* out, i64* state) {
    const int window = (int)d[WINDOW], width = raw_bits(2 * window);
    const i64 begin = run << d[RUN_OF], end = smaller(begin + ((i64)1 << d[RUN_OF]), n);
    if (begin >= n) return;
    walk.restart(0, first + begin);
    for (i64 i = begin + threadIdx.x; i < end; i += LANES) {
        walk.draw_one(0, first + i);
        u32 symbol = 0;
        if (d[FORM_OF] == RAW) {
            const i64 bit = i * width;
            const u8* p = data + d[AT] + 1 + (bit >> 3);
            const int shift = bit & 7, last = (bit + width) & 7;
            u32 held = p[0];
            if (shift + width > 8) held |= (u32)p[1] << 8;
            symbol = held >> shift & ((1u << width) - 1);
            if (symbol >= 2 * window) state[WRONG] = CORRUPT;
            if (i + 1 == n && last && p[shift + width > 8] >> last) state[WRONG] = CORRUPT;
        } else {
            symbol = only[walk.table(0, 0)];
        }
        const bool end_of = at_end(symbol, window) && d[TAIL];
        const u32 code = walk.move(0, 0, symbol);
        out[i] = end_of ? __uint_as_float(code) : walk.value(code);
        if (end_of) atomicOr(&marks[i >> 5], 1u << (i & 31));
    }
}

// Everything but chunks: zero and raw segments, raw symbols, single symbols. A block of 64 threads for each run that a segment may have.
extern "C" __global__ void __launch_bounds__(64) trellis_plain(
    const u8* data, i64 count, i64 g0, i64 g1, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, i64 runs, i64 most, const i64* segments,
    const u8* only, const i64* masks, const u8* contexts, const u8* class_only, u32* marks, float* out, i64* state
) {
    __shared__ u8 names[CLASSES];
    __shared__ float values[512];
    const i64 s = blockIdx.x / runs, part = blockIdx.x % runs, n = segment_length(count, s), first = s * SEGMENT;
    const i64* d = segments + s * TRELLIS_PLACES;
    if (refused(state) || (has_levels(d) && d[FORM_OF] == CODED)) return;
    if (!has_levels(d)) {
        for (i64 i = part * LANES + threadIdx.x; i < n; i += runs * LANES)
            out[first + i] = d[KIND] == ZERO_KIND ? 0.0f : __uint_as_float(load32(data + d[AT] + 4 * i));
        return;
    }
    // A run begins at a multiple of 32 coordinates.
    const i64 from = part << d[RUN_OF], until = smaller(from + ((i64)1 << d[RUN_OF]), n);
    for (i64 k = from / 32 + threadIdx.x; d[TAIL] && 32 * k < until; k += LANES) marks[first / 32 + k] = 0;
    const bool classed = d[KIND] == CLASSED_KIND;
    if (classed && !drawn && threadIdx.x == 0) name_classes((u32)masks[s], (u32)d[MOVING], names);
    __syncthreads();
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    const u8* own = classed ? class_only + s * most : only + s * TABLES_MOST;
    auto walk = [&](auto walking) {
        walking.prepare();
        __syncthreads();
        walk_plainly(data, d, n, first, part, own, walking, marks + first / 32, out + first, state);
    };
    if (drawn && classed) walk(dithered_of<true>(d, g0, g1, contexts, draws, nullptr));
    else if (drawn) walk(dithered_of<false>(d, g0, g1, nullptr, draws, nullptr));
    else if (classed) walk(walk_of<true>(d, g0, g1, contexts, names, values));
    else walk(walk_of<false>(d, g0, g1, nullptr, nullptr, values));
}

// A block for each segment with escapes. `places`: ESCAPES per segment.
extern "C" __global__ void __launch_bounds__(1024) trellis_escapes(
    const u8* data, i64 count, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, const i64* segments, const u32* marks, int* places, float* out,
    i64* state
) {
    __shared__ int ones[ESCAPES];
    const i64 s = blockIdx.x, n = segment_length(count, s), first = s * SEGMENT;
    const i64* d = segments + s * TRELLIS_PLACES;
    if (refused(state) || !has_levels(d) || !d[TAIL]) return;
    float* values = out + first;
    const i64 run = d[RUN_OF], most = drawn ? FAR_DITHERED : FAR_AWAY;
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    const Walk<true> walk = walk_of<true>(d, 0, 0, nullptr, nullptr, nullptr);
    const DitheredWalk<false> dithered = dithered_of<false>(d, 0, 0, nullptr, draws, nullptr);
    const int good = read_escapes(data + d[END] - d[TAIL], d[TAIL], marks + first / 32, n, places + s * ESCAPES, ones, [=](i64 i, i64 value) {
        if (value > most) return false;
        const u32 code = __float_as_uint(values[i]);
        const int more = (int)(value - 1);
        values[i] = drawn ? dithered.escaped(first + (i >> run << run), code, more) : walk.escaped(0, code, more);
        return true;
    });
    if (threadIdx.x) return;
    if (good < 0) state[OTHERS] = 1;
    else if (!good) state[WRONG] = CORRUPT;
}
