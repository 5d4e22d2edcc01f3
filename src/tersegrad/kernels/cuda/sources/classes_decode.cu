// Sparse Dithering: reading segments with scale classes (spec/wire.md, 4.11 and 5.16): the classes of coordinates, and their symbols with a
// table for each class.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "classes_reading.cuh"
#include "entries.cuh"

// No segment has more octaves than two for each coordinate.
#define SIDE_CHUNKS 64

// Whose segments they are: what a segment tells of itself in other places.
enum { DITHERED_LEVELS, TRELLIS, DITHERED_TRELLIS };

// A block for each segment with classes reads what it says of them, and the tables, at most `most` of them, and the places of its chunks.
extern "C" __global__ void classes_read(
    const u8* data, i64 count, i64 whose, i64 most, i64* segments, const i64* regions, const i64* firsts, i64* told, u8* octaves, i64* masks, short* q, u32* entries,
    u8* only, i64* offsets, i64* words, i64* state
) {
    __shared__ Reading in;
    __shared__ i64 side_offsets[SIDE_CHUNKS], side_words[SIDE_CHUNKS];
    const i64 s = blockIdx.x, n = segment_length(count, s), first = firsts[s], last = firsts[s + 1];
    const int t = threadIdx.x, warp = own_number(), lane = t & 31;
    i64* d = segments + s * (whose ? TRELLIS_PLACES : SEGMENT_PLACES);
    if (t == 0) in.bad = state[WRONG] != FINE || d[KIND] != CLASSED_KIND;
    if (in.refused()) return;
    const i64 begin = d[AT], end = d[END] - d[TAIL], head = begin + 2 + last - first;
    auto refuse = [=]() {
        if (t == 0) state[WRONG] = CORRUPT;
    };
    if (head > end) return refuse();
    i64 number = 0, here;
    for (i64 base = first; base < last; base += blockDim.x) {
        const i64 r = base + t;
        i64 own = 0;
        if (r < last) {
            const int field = data[begin + 2 + r - first], mode = field >> 5;
            const Region g = region_of(regions, r);
            if (mode > BY_BLOCKS || (!(field & 31) && mode != ONE_SCALE) || (mode == BY_GRID && g.count < g.columns)) in.bad = true;
            else own = g.lines(mode) + g.across(mode);
            told[r * TOLD_PLACES + FIELD] = field;
        }
        const i64 before = block_scan(own, &here);
        if (r < last) told[r * TOLD_PLACES + OCTAVES_AT] = number + before;
        number += here;
    }
    if (in.refused()) return refuse();
    u8* own = octaves + regions[first * REGION_PLACES + ROOM];
    for (i64 r = first + warp; r < last; r += WARPS) {
        const Region g = region_of(regions, r);
        const int mode = (int)told[r * TOLD_PLACES + FIELD] >> 5, lines = g.lines(mode), all = lines + g.across(mode);
        u8* to = own + told[r * TOLD_PLACES + OCTAVES_AT];
        for (int k = lane; k < all; k += 32) to[k] = k >= lines;
    }
    if (t == 0) in.at = in.chunks = 0;
    __syncthreads();
    if (number) open_octaves(data + head, end - head, number, own, side_offsets, side_words, in);
    if (in.refused()) return refuse();
    const i64 mask = data[begin] | (i64)data[begin + 1] << 8, body = head + in.at, alphabet = 2 * d[WINDOW] + !whose;
    int tables = __popc((u32)mask), shortest = 14;
    // A class that moves has two tables; with dither a class has as many as there are classes of distances.
    if (whose == TRELLIS) tables += __popc((u32)d[MOVING] & (u32)mask);
    if (whose == DITHERED_TRELLIS) tables <<= d[BITS_OF];
    if (whose) shortest = (int)d[RUN_OF];
    if (whose == TRELLIS && d[MOVING] & ~mask) return refuse();
    // One thread reads the tables of the symbols while warps decode the octaves.
    if (t == 32 * (WARPS - 1)) {
        masks[s] = mask;
        in.form = body < end ? data[body] : 0;
        in.found = 0;
        bool bad = !tables;
        if (in.form == RAW) {
            bad |= end - body != 1 + raw_bytes(n, alphabet);
        } else {
            BitReader bits = {data + body + 1, 8 * smaller(end - body - 1, tables * (32 * alphabet + 2)), 0, in.form >= shortest && in.form <= 18};
            for (int k = 0; k < tables && bits.good; ++k) read_table(bits, (int)alphabet, q + (s * most + k) * 256, in.present);
            while (bits.good && bits.at & 7)
                if (bits.bit()) bits.good = false;
            bad |= !bits.good;
            in.tables = bits.at / 8;
        }
        if (bad) in.bad = true;
        d[AT] = body;
        d[FORM_OF] = in.form == RAW ? RAW : CODED;
        d[CHUNK_OF] = in.form;
    }
    __syncwarp();
    if (in.chunks) decode_octaves(data + head, number, own, side_offsets, side_words, in);
    if (in.refused()) return refuse();
    if (in.form == RAW) return;
    for (int k = warp; k < tables; k += WARPS) {
        const i64 table = s * most + k;
        const int found = make_frequencies(q + table * 256, (int)alphabet, in.w[warp], in.f[warp]);
        if (lane == 0) atomicMax(&in.found, found);
        make_entries(in.f[warp], (int)alphabet, entries + table * 256, only + table);
    }
    __syncthreads();
    const i64 at = body + 1 + in.tables;
    if (in.found < 2) {
        if (t == 0) d[FORM_OF] = ONLY_TABLES;
        if (at != end) refuse();
        return;
    }
    if (warp) return;
    const Layout l = layout_of(n, alphabet, in.form);
    if (!chunk_places(data, at, end, l, offsets + s * CHUNKS, words + s * CHUNKS)) state[WRONG] = CORRUPT;
}

// Blocks, `share` of them for each segment, write the table of every coordinate: the classes below its own that have one.
extern "C" __global__ void classes_fill(
    i64 count, i64 whose, i64 share, const i64* segments, const i64* regions, const i64* firsts, const i64* told, const u8* octaves, const i64* masks,
    u8* contexts, i64* state
) {
    __shared__ bool go;
    const i64 s = blockIdx.x / share, size = segment_length(count, s), first = s * SEGMENT;
    const i64* d = segments + s * (whose ? TRELLIS_PLACES : SEGMENT_PLACES);
    if (threadIdx.x == 0) go = state[WRONG] == FINE && d[KIND] == CLASSED_KIND;
    __syncthreads();
    if (!go) return;
    const u32 mask = (u32)masks[s];
    // A byte for each class, with its upper bit where the class has no table.
    u32 names[4];
    for (int q = 0; q < 4; ++q) {
        names[q] = 0;
        for (int c = 4 * q; c < 4 * q + 4; ++c) names[q] |= (mask >> c & 1 ? (u32)__popc(mask & ((1u << c) - 1)) : 128) << 8 * (c & 3);
    }
    auto name = [=](u32 classes) {
        // Each digit chooses among eight bytes, and among both eights the upper bit of its class.
        const u32 digits = __byte_perm(classes | classes >> 4, 0, 0x4420) & 0x7777;
        const u32 low = __byte_perm(names[0], names[1], digits), high = __byte_perm(names[2], names[3], digits);
        return low ^ ((low ^ high) & (classes >> 3 & ONES) * 255);
    };
    const u8* own = octaves + regions[firsts[s] * REGION_PLACES + ROOM];
    const Slice slice = slice_of(first, size, blockIdx.x % share, share);
    each_part(regions, firsts, s, slice.from, slice.to, [=](const Team& team, i64 r, const Region& g, int i0, int i1) {
        const i64* mine = told + r * TOLD_PLACES;
        u8* place = contexts + g.start;
        u32 all = 0;
        auto put = [=, &all](int i, const Sixteen& named, int begin, int end) {
            put_sixteen(place + i, named, begin, end);
            if (end - begin == 16) all |= named.word[0] | named.word[1] | named.word[2] | named.word[3];
            else
                for (int k = begin; k < end; ++k) all |= place[i + k];
        };
        each_class(team, g, mine[FIELD], own + mine[OCTAVES_AT], i0, i1, name, put);
        if (all & 128 * ONES) state[WRONG] = CORRUPT;
    });
}

// A warp for each chunk, four of them in a block, or for several of a segment: `share` blocks for each, and as many more as the last one may have.
extern "C" __global__ void __launch_bounds__(128) classes_chunks(
    const u8* data, i64 count, i64 share, const i64* segments, const i64* masks, const u8* contexts, const u32* entries,
    const i64* offsets, const i64* words, u32* marks, float* out, i64* state
) {
    __shared__ u32 near[NEAR_BYTES / 4];
    __shared__ u16 rings[4][RING];
    __shared__ bool go;
    __shared__ float scales[SCALES_MOST];
    const u32 number = (u32)segments_of(count), turn = blockIdx.x / number;
    const bool more = turn >= share, last = more || blockIdx.x % number == number - 1;
    const i64 s = last ? number - 1 : blockIdx.x % number, begin = 4 * (more ? blockIdx.x - share * (number - 1) : turn), n = segment_length(count, s);
    const int warp = own_number();
    const i64* d = segments + s * SEGMENT_PLACES;
    if (threadIdx.x == 0) go = state[WRONG] == FINE && d[KIND] == CLASSED_KIND && d[FORM_OF] == CODED;
    __syncthreads();
    if (!go) return;
    const int window = (int)d[WINDOW], alphabet = 2 * window + 1, tables = __popc((u32)masks[s]);
    const Layout l = layout_of(n, alphabet, d[CHUNK_OF]);
    if (begin >= l.chunks) return;
    if (threadIdx.x < (n + SCALE_BLOCK - 1) / SCALE_BLOCK) scales[threadIdx.x] = scale_at(data + d[SCALES], threadIdx.x);
    // The entries of one symbol are mostly in different banks of memory: their distance, where it can be, is one of 5, 13, 21 ..
    const int stride = (int)smaller(256, alphabet + 1 + (4 - alphabet & 7)), coarse = load_entries(entries + s * CLASSES * 256, 256, tables, stride, near);
    const u8* guesses = (const u8*)(near + tables * stride);
    const i64 first = s * SEGMENT;
    float* to = out + first;
    u32* own_marks = marks + first / 32;
    const u8* own_contexts = contexts + first;
    KEEP_TOGETHER(own_contexts);
    u16* ring = rings[warp];
    const bool careful = d[TAIL] || !moderate(scales, (n + SCALE_BLOCK - 1) / SCALE_BLOCK);
    for (i64 base = begin; base < l.chunks; base += last ? CHUNKS : 4 * share) {
        __syncthreads();
        const i64 c = base + warp;
        if (c >= l.chunks) return;
        const u8* states = data + offsets[s * CHUNKS + c];
        const i64 coded = words[s * CHUNKS + c];
        auto decode = [&](auto look) {
            const ContextOf context = {own_contexts};
            if (!careful) return decode_chunk(l, c, alphabet, states, coded, ring, context, look, Values<false>{to, scales, own_marks, window, 0.0f});
            clear_marks(own_marks, l, c);
            return decode_chunk(l, c, alphabet, states, coded, ring, context, look, Values<true>{to, scales, own_marks, window, 0.0f});
        };
        const bool good = coarse < 2 ? decode(Entries<true>{near, guesses, coarse, stride}) : decode(Entries<false>{near, guesses, coarse, stride});
        if (!good) state[WRONG] = CORRUPT;
    }
}
