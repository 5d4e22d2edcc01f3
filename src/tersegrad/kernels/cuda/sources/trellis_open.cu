// Trellis codes: reading what segments say before their symbols (spec/wire.md, 5.20 and 5.21).
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "entries.cuh"
#include "trellis.cuh"

#define TABLES_MOST (1 << MOST_BITS)

// A thread reads the header of a segment, and the head and the tables of its symbols: whether they are well-formed.
__device__ bool parse_segment(const u8* data, i64 n, i64 drawn, i64 at, i64 end, i64* d, short* q, short* present) {
    const i64 size = end - at, fixed = drawn ? 4 : 3;
    for (int k = 0; k < TRELLIS_PLACES; ++k) d[k] = 0;
    const int kind = at < end ? data[at] : -1;
    d[KIND] = kind;
    d[AT] = at + 1;
    d[END] = end;
    if ((kind == ZERO_KIND && size == 1) || (kind == RAW_KIND && size == 1 + 4 * n)) return true;
    if (kind != CODED_KIND && kind != CLASSED_KIND) return false;
    i64 tail = 0, used = 0, byte = 128;
    while (byte >= 128) {
        if (used == 5 || fixed + used >= size) return false;
        byte = data[at + fixed + used];
        tail |= (byte & 127) << 7 * used;
        ++used;
    }
    const int window = data[at + 1], run = data[at + 2], bits = drawn ? data[at + 3] : 1;
    // Without dither, classes have a scale for what moves and one for what is still, which may be zero, and tell which is which.
    const int scales = kind == CLASSED_KIND && !drawn ? 2 : 1;
    const i64 body = fixed + used + 4 * scales + (scales > 1 ? 2 : 0);
    if ((used > 1 && byte == 0) || window % 2 || window < 2 || window > WIDEST || run < 14 || run > 15 || bits > MOST_BITS) return false;
    if (body + tail > size) return false;
    for (int k = 0; k < scales; ++k) {
        const u32 scale = load32(data + at + fixed + used + 4 * k), exponent = scale >> 23;
        if ((exponent == 0 || exponent >= 255) && !(scales > 1 && (scale & 0x7fffffff) == 0)) return false;
        d[SCALE_OF + k] = scale;
    }
    d[MOVING] = scales > 1 ? data[at + body - 2] | (i64)data[at + body - 1] << 8 : 0;
    d[WINDOW] = window;
    d[RUN_OF] = run;
    d[BITS_OF] = bits;
    d[AT] = at + body;
    d[TAIL] = tail;
    // Classes come before the symbols.
    if (kind == CLASSED_KIND) return true;
    const i64 alphabet = 2 * window, nbytes = size - body - tail;
    const int number = 1 << bits;
    const u8* block = data + at + body;
    const int form = nbytes ? block[0] : 0;
    if (form == RAW) {
        d[FORM_OF] = RAW;
        return nbytes == 1 + raw_bytes(n, alphabet);
    }
    d[FORM_OF] = CODED;
    d[CHUNK_OF] = form;
    BitReader in = {block + 1, 8 * smaller(nbytes - 1, number * (32 * alphabet + 2)), 0, form >= run && form >= 14 && form <= 18};
    for (int k = 0; k < number && in.good; ++k) read_table(in, (int)alphabet, q + k * 128, present);
    while (in.good && in.at & 7)
        if (in.bit()) in.good = false;
    d[TABLES_OF] = in.at / 8;
    return in.good;
}

// A block of 256 threads for each segment: its header and tables, and where its chunks begin. Tables become cells without dither: frequency - 1 |
// symbol << 12 | place << 20; entries with it.
extern "C" __global__ void trellis_open(
    const u8* data, i64 nbytes, i64 count, i64 drawn, i64* begins, i64* segments, short* q, u32* cells, u32* entries, u8* only, i64* offsets,
    i64* words, i64* state
) {
    __shared__ u32 w[TABLES_MOST][128];
    __shared__ int f[TABLES_MOST][128], start[257];
    __shared__ short listed[256];
    __shared__ int found;
    __shared__ bool good;
    const i64 s = blockIdx.x, n = segment_length(count, s), number = segments_of(count);
    const int t = threadIdx.x, warp = t >> 5;
    i64* d = segments + s * TRELLIS_PLACES;
    i64 first, last;
    if (data[0] != MODE_NORMAL) {
        if (t == 0) state[WRONG] = ANOTHER;
        return;
    }
    if (!find_segment(data, nbytes, 1, number, s, &first, &last)) {
        if (t == 0) state[WRONG] = CORRUPT;
        return;
    }
    short* const own_q = q + s * TABLES_MOST * 128;
    if (t == 0) {
        begins[s] = first, begins[s + 1] = last;
        found = 0;
        good = parse_segment(data, n, drawn, first, last, d, own_q, listed);
        if (!good) state[WRONG] = CORRUPT;
    }
    __syncthreads();
    if (!good || d[KIND] != CODED_KIND || d[FORM_OF] != CODED) return;
    const i64 alphabet = 2 * d[WINDOW], begin = d[AT] + 1 + d[TABLES_OF], end = d[END] - d[TAIL];
    const int tables = 1 << d[BITS_OF];
    if (warp < tables) {
        const int present = make_frequencies(own_q + warp * 128, (int)alphabet, w[warp], f[warp]);
        if ((t & 31) == 0) atomicMax(&found, present);
        const i64 table = s * TABLES_MOST + warp;
        make_entries(f[warp], (int)alphabet, entries + table * 129, only + table);
    }
    __syncthreads();
    if (found < 2) {
        if (t == 0) {
            d[FORM_OF] = ONLY_TABLES;
            if (begin != end) state[WRONG] = CORRUPT;
        }
        return;
    }
    for (int k = 0; !drawn && k < 2; ++k) {
        const int* frequencies = f[k];
        u32* to = cells + (2 * s + k) * TOTAL;
        make_cells(frequencies, (int)alphabet, start, [=](int slot, u32 symbol, u32 place) {
            to[slot] = (u32)(frequencies[symbol] - 1) | symbol << 12 | place << 20;
        });
        __syncthreads();
    }
    if (t >= 32) return;
    const Layout l = layout_of(n, alphabet, d[CHUNK_OF]);
    if (!chunk_places(data, begin, end, l, offsets + s * CHUNKS, words + s * CHUNKS)) state[WRONG] = CORRUPT;
}
