// Subtractive dithering: what a message says before its chunks (spec/wire.md, 5.18).
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "subtractive.cuh"
#include "classes.cuh"
#include "classes_reading.cuh"
#include "entries.cuh"

#define VARINT_MOST 10

// One block reads the head: steps, and what follows them. Messages of no segments, with plain levels or with very many bytes of escapes (more than
// `room`) are left to others.
extern "C" __global__ void __launch_bounds__(256) subtractive_open(
    const u8* data, i64 nbytes, i64 n, i64 whole, i64 room, float* steps, i64* shifts, i64* parts, i64* state
) {
    __shared__ bool bad;
    const i64 number = segments_of(n), steps_number = whole ? 1 : number, at = 4 + 4 * steps_number;
    if (load32(data) != SEGMENTS || nbytes < at + 1) {
        if (threadIdx.x == 0) state[STATUS_OF] = load32(data) != SEGMENTS ? ANOTHER : CORRUPT;
        return;
    }
    if (threadIdx.x == 0) bad = false;
    __syncthreads();
    i64 live = 0, symbols = 0, total;
    for (i64 base = 0; base < number; base += blockDim.x) {
        const i64 p = base + threadIdx.x;
        const float step = p < number ? __uint_as_float(load32(data + 4 + 4 * (whole ? 0 : p))) : 0.0f;
        const bool here = step != 0.0f;
        if (here && !(step >= 1.17549435e-38f && step <= __uint_as_float(HUGE_VALUE))) bad = true;
        const i64 length = here ? segment_length(n, p) : 0;
        const i64 rank = live + block_scan(here, &total);
        live += total;
        const i64 before = symbols + block_scan(length, &total);
        symbols += total;
        if (here) shifts[rank] = p * SEGMENT - before;
        if (p >= number) continue;
        steps[p] = step;
        parts[p * SEGMENT_PLACES + KIND] = here ? CODED_KIND : ZERO_KIND;
        parts[p * SEGMENT_PLACES + AT] = p * SEGMENT - before;
    }
    __syncthreads();
    if (threadIdx.x) return;
    const int word = data[at], window = word % CLASSED_WINDOW, classed = word >= CLASSED_WINDOW;
    if (!bad && (word == 0 || !live)) {
        state[STATUS_OF] = ANOTHER;
        return;
    }
    bad |= window == 0 || nbytes < at + 3;
    i64 fine = 0, body = at + 2, shift = 0, byte = 128;
    u64 tail = 0;
    if (!bad) {
        fine = data[at + 1];
        bad |= classed ? fine < 1 || fine > DEEPEST : fine > FINEST;
        for (; !bad && byte >= 128; ++body, shift += 7) {
            bad |= body == nbytes || shift == 7 * VARINT_MOST;
            byte = bad ? 0 : data[body];
            bad |= shift == 63 && byte > 1;
            tail |= (u64)(byte & 127) << shift;
        }
        bad |= (byte == 0 && body > at + 3) || tail > (u64)(nbytes - body);
    }
    state[SYMBOLS] = symbols;
    state[LIVE] = live;
    state[WINDOW_WORD] = window;
    state[WITH_CLASSES] = classed;
    state[FINENESS] = fine;
    state[TAIL_BYTES] = (i64)tail;
    state[BODY] = body;
    if (bad) state[STATUS_OF] = CORRUPT;
    else if ((i64)tail > room) state[STATUS_OF] = ANOTHER;
}

// One block reads the classes, if there are some, and the tables. Octaves begin so far behind those of the first region of their part that all are in
// one place.
extern "C" __global__ void __launch_bounds__(256) subtractive_read(
    const u8* data, i64 nbytes, i64 n, i64* parts, const i64* regions, const i64* firsts, i64* told, u8* octaves, i64* masks, i64* side_offsets,
    i64* side_words, short* q, i64* state
) {
    __shared__ Reading in;
    if (state[STATUS_OF] != FINE) return;
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    const i64 number = segments_of(n), regions_number = firsts[number], begin = state[BODY], end = nbytes - state[TAIL_BYTES];
    const bool classed = state[WITH_CLASSES];
    auto refuse = [=]() {
        if (t == 0) state[STATUS_OF] = CORRUPT;
    };
    if (t == 0) in.bad = classed && begin + 2 > end, in.at = in.chunks = 0;
    if (in.refused()) return refuse();
    i64 head = begin, count = 0, rank = 0, here;
    const i64 mask = classed ? data[begin] | (i64)data[begin + 1] << 8 : 0;
    if (classed) {
        for (i64 base = 0; base < regions_number; base += blockDim.x) {
            const i64 r = base + t, p = r < regions_number ? part_of(n, regions[r * REGION_PLACES + START]) : 0;
            const bool live = r < regions_number && parts[p * SEGMENT_PLACES + KIND] != ZERO_KIND;
            const i64 place = begin + 2 + rank + block_scan(live, &here);
            rank += here;
            i64 own = 0;
            if (live) {
                const int field = place < end ? data[place] : 255, mode = field >> 5;
                const Region g = region_of(regions, r);
                if (mode > BY_BLOCKS || (!(field & 31) && mode != ONE_SCALE) || (mode == BY_GRID && g.count < g.columns)) in.bad = true;
                else own = g.lines(mode) + g.across(mode);
                told[r * TOLD_PLACES + FIELD] = field;
            }
            const i64 before = block_scan(own, &here);
            if (live) told[r * TOLD_PLACES + OCTAVES_AT] = count + before;
            count += here;
        }
        head = begin + 2 + rank;
        if (in.refused()) return refuse();
        for (i64 r = warp; r < regions_number; r += WARPS) {
            const Region g = region_of(regions, r);
            const i64 p = part_of(n, g.start);
            if (parts[p * SEGMENT_PLACES + KIND] == ZERO_KIND) continue;
            const int mode = (int)told[r * TOLD_PLACES + FIELD] >> 5, lines = g.lines(mode), all = lines + g.across(mode);
            u8* to = octaves + told[r * TOLD_PLACES + OCTAVES_AT];
            for (int k = lane; k < all; k += 32) to[k] = k >= lines;
        }
        __syncthreads();
        for (i64 r = t; r < regions_number; r += blockDim.x) {
            const i64 p = part_of(n, regions[r * REGION_PLACES + START]);
            if (parts[p * SEGMENT_PLACES + KIND] != ZERO_KIND) told[r * TOLD_PLACES + OCTAVES_AT] -= regions[firsts[p] * REGION_PLACES + ROOM];
        }
        for (i64 p = t; p < number; p += blockDim.x) masks[p] = mask;
        if (count) open_octaves(data + head, end - head, count, octaves, side_offsets, side_words, in);
        if (in.refused()) return refuse();
    }
    const i64 body = head + in.at, alphabet = 2 * state[WINDOW_WORD] + 1;
    const i64 tables = classed ? state[FINENESS] * __popc((u32)mask) : (i64)1 << state[FINENESS];
    // One thread reads the tables of the symbols while warps decode the octaves.
    if (t == 32 * (WARPS - 1)) {
        const int form = body < end ? data[body] : 0;
        bool bad = !tables;
        if (form == RAW) {
            bad |= end - body != 1 + raw_bytes(state[SYMBOLS], alphabet);
        } else {
            BitReader bits = {data + body + 1, 8 * smaller(end - body - 1, tables * (32 * alphabet + 2)), 0, form >= 14 && form <= 18};
            for (i64 k = 0; k < tables && bits.good; ++k) read_table(bits, (int)alphabet, q + k * 256, in.present);
            while (bits.good && bits.at & 7)
                if (bits.bit()) bits.good = false;
            bad |= !bits.good;
            state[TABLE_BYTES_OF] = bits.at / 8;
        }
        if (bad) in.bad = true;
        state[BODY] = body;
        state[NUMBER] = tables;
        state[FORM_WORD] = form == RAW ? RAW : CODED;
        state[EXPONENT] = form;
    }
    __syncwarp();
    if (in.chunks) decode_octaves(data + head, count, octaves, side_offsets, side_words, in);
    if (in.refused()) return refuse();
    for (i64 p = t; classed && p < number; p += blockDim.x)
        if (parts[p * SEGMENT_PLACES + KIND] != ZERO_KIND) parts[p * SEGMENT_PLACES + KIND] = CLASSED_KIND;
}

// A warp for each table.
extern "C" __global__ void __launch_bounds__(32) subtractive_entries(const short* q, u32* entries, u8* only, i64* state) {
    __shared__ u32 w[256];
    __shared__ int f[256];
    const i64 table = blockIdx.x;
    const int alphabet = 2 * (int)state[WINDOW_WORD] + 1;
    if (state[STATUS_OF] != FINE || state[FORM_WORD] == RAW || table >= state[NUMBER]) return;
    const int found = make_frequencies(q + table * 256, alphabet, w, f);
    make_entries(f, alphabet, entries + table * 256, only + table);
    if (threadIdx.x == 0 && found > 1) state[MORE_THAN_ONE] = 1;
}

// One block finds where chunks begin, at most `most` of them. More tables than a block has room for are left to others.
extern "C" __global__ void __launch_bounds__(256) subtractive_places(
    const u8* data, i64 nbytes, i64 near, i64* offsets, i64* words, i64* state
) {
    if (state[STATUS_OF] != FINE || state[FORM_WORD] == RAW) return;
    const i64 alphabet = 2 * state[WINDOW_WORD] + 1, begin = state[BODY] + 1 + state[TABLE_BYTES_OF], end = nbytes - state[TAIL_BYTES];
    const i64 tables = state[NUMBER];
    const bool coded = state[MORE_THAN_ONE], crowded = 4 * tables * (alphabet + 1) + (tables * TOTAL >> COARSEST) > near;
    const Layout l = layout_of(state[SYMBOLS], alphabet, state[EXPONENT]);
    i64 at = begin + (coded ? 4 * l.chunks : 0);
    bool bad = at > end;
    for (i64 base = 0; coded && base < l.chunks && begin + 4 * l.chunks <= end; base += blockDim.x) {
        const i64 c = base + threadIdx.x;
        i64 bytes = 0, total;
        if (c < l.chunks) {
            words[c] = load32(data + begin + 4 * c);
            bad |= words[c] > l.coded(c);
            bytes = 4 * l.lanes + 2 * words[c];
        }
        const i64 before = block_scan(bytes, &total);
        if (c < l.chunks) offsets[c] = at + before;
        at += total;
    }
    bad |= at != end;
    __syncthreads();
    if (bad) atomicMax(&state[STATUS_OF], (i64)CORRUPT);
    if (threadIdx.x) return;
    if (!coded) state[FORM_WORD] = ONLY_TABLES;
    else if (crowded) atomicMax(&state[STATUS_OF], (i64)ANOTHER);
}
