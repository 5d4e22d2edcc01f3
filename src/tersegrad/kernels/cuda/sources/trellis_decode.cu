// Trellis codes: decoding (spec/wire.md, 5.20 and 5.21). All segments at once, their chunks side by side. Thread t of a warp follows the states
// of lanes t and t + 32, of rANS and of the trellises alike.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "entries.cuh"
#include "escapes.cuh"
#include "trellis.cuh"

#define TABLES_MOST (1 << MOST_BITS)
// Steps that are decoded without a look at where a run begins; with dither, a thread draws for eight of their coordinates.
#define GROUP 4

// A block finds where its segment begins and ends; whether that is in the message, and all segments fill it.
__device__ bool find_segment(const u8* data, i64 nbytes, i64 number, i64 s, i64* begin, i64* end) {
    *begin = 1, *end = nbytes;
    if (number == 1) return true;
    i64 before = 0, all = 0;
    if (1 + 4 * number > nbytes) return false;
    for (i64 k = threadIdx.x; k < number; k += blockDim.x) {
        const i64 size = load32(data + 1 + 4 * k);
        before += k < s ? size : 0;
        all += size;
    }
    block_scan(before, &before);
    block_scan(all, &all);
    *begin = 1 + 4 * number + before;
    *end = *begin + load32(data + 1 + 4 * s);
    return 1 + 4 * number + all == nbytes;
}

// A thread reads the header of a segment, and the head and the tables of its symbols: FINE, CORRUPT or ANOTHER, which is the host's.
__device__ int parse_segment(const u8* data, i64 n, i64 drawn, i64 at, i64 end, i64* d, short* q, short* present) {
    const i64 size = end - at, fixed = drawn ? 4 : 3;
    for (int k = 0; k < TRELLIS_PLACES; ++k) d[k] = 0;
    const int kind = at < end ? data[at] : -1;
    d[KIND] = kind;
    d[AT] = at + 1;
    d[END] = end;
    if ((kind == ZERO_KIND && size == 1) || (kind == RAW_KIND && size == 1 + 4 * n)) return FINE;
    if (kind == CLASSED_KIND) return ANOTHER;
    if (kind != CODED_KIND) return CORRUPT;
    i64 tail = 0, used = 0, byte = 128;
    while (byte >= 128) {
        if (used == 5 || fixed + used >= size) return CORRUPT;
        byte = data[at + fixed + used];
        tail |= (byte & 127) << 7 * used;
        ++used;
    }
    const int window = data[at + 1], run = data[at + 2], bits = drawn ? data[at + 3] : 1;
    const i64 body = fixed + used + 4;
    if ((used > 1 && byte == 0) || window % 2 || window < 2 || window > WIDEST || run < 14 || run > 15 || bits > MOST_BITS) return CORRUPT;
    if (body + tail > size) return CORRUPT;
    const u32 scale = load32(data + at + body - 4), exponent = scale >> 23;
    if (exponent == 0 || exponent >= 255) return CORRUPT;
    d[WINDOW] = window;
    d[RUN_OF] = run;
    d[BITS_OF] = bits;
    d[SCALE_OF] = scale;
    d[AT] = at + body;
    d[TAIL] = tail;
    const i64 alphabet = 2 * window, nbytes = size - body - tail;
    const int number = 1 << bits;
    const u8* block = data + at + body;
    const int form = nbytes ? block[0] : 0;
    if (form == RAW) {
        d[FORM_OF] = RAW;
        return nbytes == 1 + raw_bytes(n, alphabet) ? FINE : CORRUPT;
    }
    d[FORM_OF] = CODED;
    d[CHUNK_OF] = form;
    BitReader in = {block + 1, 8 * smaller(nbytes - 1, number * (32 * alphabet + 2)), 0, form >= run && form >= 14 && form <= 18};
    for (int k = 0; k < number && in.good; ++k) read_table(in, (int)alphabet, q + k * 128, present);
    while (in.good && in.at & 7)
        if (in.bit()) in.good = false;
    d[TABLES_OF] = in.at / 8;
    return in.good ? FINE : CORRUPT;
}

// A block of 256 threads for each segment: its header and tables, and where its chunks begin. Tables become cells without dither: frequency - 1 |
// place << 12 | symbol << 24; entries with it.
extern "C" __global__ void trellis_open(
    const u8* data, i64 nbytes, i64 count, i64 drawn, i64* begins, i64* segments, short* q, u32* cells, u32* entries, u8* only, i64* offsets,
    i64* words, i64* state
) {
    __shared__ u32 w[TABLES_MOST][128];
    __shared__ int f[TABLES_MOST][128], start[257];
    __shared__ short listed[256];
    __shared__ int found, wrong;
    const i64 s = blockIdx.x, n = segment_length(count, s), number = segments_of(count);
    const int t = threadIdx.x, warp = t >> 5;
    i64* d = segments + s * TRELLIS_PLACES;
    i64 first, last;
    if (data[0] != MODE_NORMAL) {
        if (t == 0) state[WRONG] = ANOTHER;
        return;
    }
    if (!find_segment(data, nbytes, number, s, &first, &last)) {
        if (t == 0) state[WRONG] = CORRUPT;
        return;
    }
    short* const own_q = q + s * TABLES_MOST * 128;
    if (t == 0) {
        begins[s] = first, begins[s + 1] = last;
        found = 0;
        wrong = parse_segment(data, n, drawn, first, last, d, own_q, listed);
        // What is malformed is told before what is another's.
        if (wrong == CORRUPT) state[WRONG] = CORRUPT;
        if (wrong == ANOTHER) state[OTHERS] = 1;
    }
    __syncthreads();
    if (wrong != FINE || d[KIND] != CODED_KIND || d[FORM_OF] != CODED) return;
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
            to[slot] = (u32)(frequencies[symbol] - 1) | place << 12 | symbol << 24;
        });
        __syncthreads();
    }
    if (t >= 32) return;
    const Layout l = layout_of(n, alphabet, d[CHUNK_OF]);
    if (!chunk_places(data, begin, end, l, offsets + s * CHUNKS, words + s * CHUNKS)) state[WRONG] = CORRUPT;
}

// The trellises of two lanes without dither. A symbol and its z0 are known by symbol | z0 << 7.
struct Walk {
    u32 g0, g1, states[2];
    int window;
    float scale;
    __device__ void restart(int h, i64) { states[h] = 0; }
    __device__ void draw_ahead(i64) {}
    __device__ void draw() {}
    __device__ void draw_one(int, i64) {}
    __device__ u32 table(int h, int) const { return states[h] & 1; }
    __device__ u32 move(int h, int, u32 symbol) {
        const u32 z0 = states[h] & 1;
        states[h] = states[h] >> 1 ^ (symbol & 1) * g1 ^ z0 * g0;
        return symbol | z0 << 7;
    }
    __device__ float value(u32 code) const {
        // The integer by way of 2^23, which takes no conversion.
        const u32 n = (code & 127) << 1 | code >> 7;
        const float number = __fsub_rn(__uint_as_float(0x4b000000u | n), (float)(8388608 + 2 * window)), most = __uint_as_float(HUGE_VALUE);
        return fminf(fmaxf(__fmul_rn(number, scale), -most), most);
    }
    // Of a symbol that is at an end, with 2 more for each unit of `more`.
    __device__ float escaped(i64, u32 code, int more) const {
        const int a = (int)(code & 127) - window, all = a < 0 ? a - 2 * more : a + 2 * more;
        const float most = __uint_as_float(HUGE_VALUE);
        return fminf(fmaxf(__fmul_rn((float)(2 * all + (int)(code >> 7)), scale), -most), most);
    }
};

// The same with dither. A symbol is known by its value in 2^-13 of a step.
struct DitheredWalk {
    u32 g0, g1, states[2];
    int window, bits, signs[2];
    float scale;
    Draws draws;
    u16* room;
    u32 next[4];
    int u[GROUP][2];
    __device__ void restart(int h, i64 i) {
        states[h] = 0;
        signs[h] = sign_of(draws, i);
    }
    // The draws of the group that begins at coordinate i, a multiple of eight; and their way to the threads that need them.
    __device__ void draw_ahead(i64 i) { philox(draws, ((u64)i >> 3) + (threadIdx.x & 31), PURPOSE, next); }
    __device__ void draw() {
        const int t = threadIdx.x & 31;
        __syncwarp();
        for (int k = 0; k < 4; ++k) ((u32*)room)[4 * t + k] = next[k];
        __syncwarp();
#pragma unroll
        for (int a = 0; a < GROUP; ++a)
            for (int h = 0; h < 2; ++h) u[a][h] = room[64 * a + 32 * h + t] & 0x7fff;
    }
    __device__ void draw_one(int h, i64 i) { u[0][h] = dither_of(draws, i); }
    __device__ u32 table(int h, int a) const { return (u32)fine_class(distance_of(u[a][h], (int)states[h] & 1)) >> (MOST_BITS - bits); }
    __device__ u32 move(int h, int a, u32 symbol) {
        const u32 z0 = states[h] & 1;
        const int t = distance_of(u[a][h], (int)z0), index = (int)symbol - window;
        states[h] = states[h] >> 1 ^ ((symbol ^ (u32)flip_of(t, u[a][h])) & 1) * g1 ^ z0 * g0;
        return (u32)(signs[h] * (((t >= 0 ? index : -index) << (DITHER + 1)) + t));
    }
    __device__ float scaled_by(float number) const {
        const float most = __uint_as_float(HUGE_VALUE);
        return fminf(fmaxf(__fmul_rn(__fmul_rn(number, 1.0f / 8192.0f), scale), -most), most);
    }
    __device__ float value(u32 code) const {
        return scaled_by(__fsub_rn(__uint_as_float(code + __float_as_uint(SHIFTER)), SHIFTER));
    }
    // `begin` is where the run begins.
    __device__ float escaped(i64 begin, u32 code, int more) const {
        const int sign = sign_of(draws, begin), v = sign * (int)code, m = (v + (1 << DITHER)) >> (DITHER + 1), t = v - (m << (DITHER + 1)), a = t >= 0 ? m : -m;
        const i64 all = a < 0 ? (i64)a - 2 * (i64)more : (i64)a + 2 * (i64)more;
        return scaled_by((float)(sign * (((t >= 0 ? all : -all) << (DITHER + 1)) + t)));
    }
};

// Values of a chunk's symbols. Where there are escapes, those at the ends of the window are marked in a bitmap, and what is known of them stands
// in the place of their values.
template <bool escapes>
struct Out {
    float* to;
    u32* marks;
    template <class Walking>
    __device__ void one(const Walking& walk, i64 i, u32 code, bool end) const {
        to[i] = escapes && end ? __uint_as_float(code) : walk.value(code);
        if (escapes && end) atomicOr(&marks[i >> 5], 1u << (i & 31));
    }
    // A warp's step of 64 symbols from i on.
    template <class Walking>
    __device__ __forceinline__ void step(const Walking& walk, i64 i, const u32 (&code)[2], const bool (&end)[2]) const {
        const int lane = threadIdx.x & 31;
        float* place = to + i + lane;
        for (int h = 0; h < 2; ++h) place[32 * h] = escapes && end[h] ? __uint_as_float(code[h]) : walk.value(code[h]);
        if (!escapes) return;
        const u32 low = __ballot_sync(FULL, end[0]), high = __ballot_sync(FULL, end[1]);
        if (lane < 2) marks[(i >> 5) + lane] = lane ? high : low;
    }
};

// A warp decodes chunk c of a segment that begins at coordinate `origin`: `look(table, slot, &cell, &symbol)` gives what a slot stands for. Whether
// the chunk is well-formed, as far as this thread saw. (As decode_chunk, which knows the tables of symbols beforehand.)
template <class Walking, class Look, class Put>
__device__ bool decode_walk(
    const Layout& l, i64 c, i64 origin, int run, const u8* states, i64 number, u16* ring, Walking& walk, Look look, const Put& put
) {
    const int t = threadIdx.x & 31, coded = (int)l.coded(c), alphabet = 2 * walk.window, starts = (1 << run) - 1;
    const u32 before = (1u << t) - 1;
    const i64 first = c * l.size;
    Words in;
    in.begin(states + 4 * LANES, states + 4 * LANES + 2 * number, ring);
    u32 x[2];
    bool good = true;
    for (int h = 0; h < 2; ++h) {
        x[h] = load32(states + 4 * (t + 32 * h));
        good &= x[h] >= 65536;
    }
    int at = 0, base = 0;
    // A malformed chunk may ask for more words than it has. What lies in the ring then is as good as anything: the count tells.
    auto refill = [&](const bool(&needs)[2]) {
        const u32 votes = __ballot_sync(FULL, needs[0]), later = __ballot_sync(FULL, needs[1]);
        const int from0 = at + __popc(votes & before), from1 = at + __popc(votes) + __popc(later & before);
        const u32 word0 = ring[(u32)from0 % RING], word1 = ring[(u32)from1 % RING];
        if (needs[0]) x[0] = x[0] << 16 | word0;
        if (needs[1]) x[1] = x[1] << 16 | word1;
        at += __popc(votes) + __popc(later);
        if (at + 64 > in.loaded) in.turn();
    };
    const int groups = coded / (LANES * GROUP);
    if (groups) walk.draw_ahead(origin + first);
    for (int group = 0; group < groups; ++group) {
        if (!(base & starts))
            for (int h = 0; h < 2; ++h) walk.restart(h, origin + first + base);
        walk.draw();
        if (group + 1 < groups) walk.draw_ahead(origin + first + base + LANES * GROUP);
        // Symbols are handed on while the next ones are looked up.
        u32 last[2] = {0, 0};
        bool ends[2] = {false, false};
#pragma unroll
        for (int a = 0; a < GROUP; ++a, base += LANES) {
            u32 cell[2], symbol[2];
            bool needs[2];
            for (int h = 0; h < 2; ++h) look(walk.table(h, a), x[h] & (TOTAL - 1), &cell[h], &symbol[h]);
            if (a) put.step(walk, first + base - LANES, last, ends);
            for (int h = 0; h < 2; ++h) {
                x[h] = ((cell[h] & 0xfff) + 1) * (x[h] >> 12) + (cell[h] >> 12);
                needs[h] = x[h] < 65536;
            }
            refill(needs);
            for (int h = 0; h < 2; ++h) last[h] = walk.move(h, a, symbol[h]), ends[h] = at_end(symbol[h], walk.window);
        }
        put.step(walk, first + base - LANES, last, ends);
    }
    // What is left of the coded symbols, step by step, and those that were not coded: what a state has above the smallest one.
    for (; base < coded; base += LANES) {
        if (!(base & starts))
            for (int h = 0; h < 2; ++h) walk.restart(h, origin + first + base);
        bool needs[2];
        for (int h = 0; h < 2; ++h) {
            const int i = base + t + 32 * h;
            needs[h] = false;
            if (i < coded) {
                u32 cell, symbol;
                walk.draw_one(h, origin + first + i);
                look(walk.table(h, 0), x[h] & (TOTAL - 1), &cell, &symbol);
                put.one(walk, first + i, walk.move(h, 0, symbol), at_end(symbol, walk.window));
                x[h] = ((cell & 0xfff) + 1) * (x[h] >> 12) + (cell >> 12);
                needs[h] = x[h] < 65536;
            }
        }
        refill(needs);
    }
    good &= at == number;
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        const u32 rest = x[h] - 65536;
        good &= x[h] >= 65536 && rest >> l.rows * l.width == 0;
        for (int r = 0; r < l.rows; ++r) {
            u32 symbol = rest >> r * l.width & ((1u << l.width) - 1);
            good &= symbol < alphabet;
            if (symbol >= alphabet) symbol = 0;
            // The lane's next place.
            const int i = coded + r * LANES + ((lane - coded % LANES + LANES) % LANES);
            if ((i & starts) < LANES) walk.restart(h, origin + first + (i & ~starts));
            walk.draw_one(h, origin + first + i);
            put.one(walk, first + i, walk.move(h, 0, symbol), at_end(symbol, walk.window));
        }
    }
    return good;
}

// What a slot stands for, by cells: frequency - 1 | place << 12, and the symbol.
struct Cells {
    const u32* cells;
    __device__ void operator()(u32 table, u32 slot, u32* cell, u32* symbol) const {
        const u32 held = cells[table * TOTAL + slot];
        *cell = held & 0xffffff;
        *symbol = held >> 24;
    }
};
template <bool fine>
struct Listed {
    Entries<fine> entries;
    __device__ void operator()(u32 table, u32 slot, u32* cell, u32* symbol) const {
        u8 found;
        u32 held;
        entries(table, slot, &held, &found);
        *cell = (held - 1 & 0xffff) | held >> 16 << 12;
        *symbol = found;
    }
};

__device__ __forceinline__ bool refused(const i64* state) { return state[WRONG] != FINE || state[OTHERS]; }

__device__ Walk walk_of(const i64* d, i64 g0, i64 g1) { return {(u32)g0, (u32)g1, {0, 0}, (int)d[WINDOW], __uint_as_float((u32)d[SCALE_OF])}; }
__device__ DitheredWalk dithered_of(const i64* d, i64 g0, i64 g1, const Draws& draws, u16* room) {
    return {(u32)g0, (u32)g1, {0, 0}, (int)d[WINDOW], (int)d[BITS_OF], {1, 1}, __uint_as_float((u32)d[SCALE_OF]), draws, room, {}, {}};
}

// A warp for each chunk; the last blocks, for chunks that a segment may have, have nothing to do.
extern "C" __global__ void __launch_bounds__(32) trellis_chunks(
    const u8* data, i64 count, i64 g0, i64 g1, const i64* segments, const u32* cells, const i64* offsets, const i64* words, u32* marks, float* out,
    i64* state
) {
    __shared__ Sixteen own_cells[2 * TOTAL / 4];
    __shared__ u16 ring[RING];
    const i64 s = blockIdx.x % segments_of(count), c = blockIdx.x / segments_of(count), n = segment_length(count, s), first = s * SEGMENT;
    const i64* d = segments + s * TRELLIS_PLACES;
    if (refused(state) || d[KIND] != CODED_KIND || d[FORM_OF] != CODED) return;
    const Layout l = layout_of(n, 2 * d[WINDOW], d[CHUNK_OF]);
    if (c >= l.chunks) return;
#pragma unroll 8
    for (int i = threadIdx.x; i < 2 * TOTAL / 4; i += 32) own_cells[i] = ((const Sixteen*)(cells + s * 2 * TOTAL))[i];
    __syncwarp();
    const Cells look = {own_cells[0].word};
    const u8* from = data + offsets[s * CHUNKS + c];
    const i64 number = words[s * CHUNKS + c];
    u32* own_marks = marks + first / 32;
    Walk walk = walk_of(d, g0, g1);
    bool good;
    if (d[TAIL]) {
        clear_marks(own_marks, l, c);
        good = decode_walk(l, c, first, (int)d[RUN_OF], from, number, ring, walk, look, Out<true>{out + first, own_marks});
    } else {
        good = decode_walk(l, c, first, (int)d[RUN_OF], from, number, ring, walk, look, Out<false>{out + first, own_marks});
    }
    if (!good) state[WRONG] = CORRUPT;
}

// With dither; four chunks in a block.
extern "C" __global__ void __launch_bounds__(128) trellis_dithered_chunks(
    const u8* data, i64 count, i64 g0, i64 g1, i64 step_word, i64 who, i64 k0, i64 k1, const i64* segments, const u32* entries, const i64* offsets,
    const i64* words, u32* marks, float* out, i64* state
) {
    __shared__ u32 near[TABLES_MOST * (129 + TOTAL / 4)];
    __shared__ u16 rings[4][RING];
    __shared__ u32 rooms[4][128];
    __shared__ bool go;
    const i64 s = blockIdx.x % segments_of(count), begin = blockIdx.x / segments_of(count) * 4, c = begin + (threadIdx.x >> 5);
    const i64 n = segment_length(count, s), first = s * SEGMENT;
    const i64* d = segments + s * TRELLIS_PLACES;
    if (threadIdx.x == 0) go = !refused(state) && d[KIND] == CODED_KIND && d[FORM_OF] == CODED;
    __syncthreads();
    if (!go) return;
    const int tables = 1 << d[BITS_OF], stride = 2 * (int)d[WINDOW] + 1;
    const Layout l = layout_of(n, 2 * d[WINDOW], d[CHUNK_OF]);
    if (begin >= l.chunks) return;
    // So few tables have room for every slot.
    const int coarse = load_entries(entries + s * TABLES_MOST * 129, 129, tables, stride, near);
    if (c >= l.chunks) return;
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    const Listed<true> look = {{near, (const u8*)(near + tables * stride), coarse, stride}};
    const u8* from = data + offsets[s * CHUNKS + c];
    const i64 number = words[s * CHUNKS + c];
    u32* own_marks = marks + first / 32;
    u16* ring = rings[threadIdx.x >> 5];
    DitheredWalk walk = dithered_of(d, g0, g1, draws, (u16*)rooms[threadIdx.x >> 5]);
    bool good;
    if (d[TAIL]) {
        clear_marks(own_marks, l, c);
        good = decode_walk(l, c, first, (int)d[RUN_OF], from, number, ring, walk, look, Out<true>{out + first, own_marks});
    } else {
        good = decode_walk(l, c, first, (int)d[RUN_OF], from, number, ring, walk, look, Out<false>{out + first, own_marks});
    }
    if (!good) state[WRONG] = CORRUPT;
}

// A thread for each lane of a run: raw symbols, or symbols that tables leave no choice of.
template <class Walking>
__device__ void walk_plainly(const u8* data, const i64* d, i64 n, i64 first, i64 run, const u8* only, Walking& walk, u32* marks, float* out, i64* state) {
    const int window = (int)d[WINDOW], width = raw_bits(2 * window);
    const i64 begin = run << d[RUN_OF], end = smaller(begin + ((i64)1 << d[RUN_OF]), n);
    if (begin >= n) return;
    walk.restart(0, first + begin);
    for (i64 i = begin + threadIdx.x; i < end; i += LANES) {
        walk.draw_one(0, first + i);
        u32 symbol = only[walk.table(0, 0)];
        if (d[FORM_OF] == RAW) {
            const i64 bit = i * width;
            const u8* p = data + d[AT] + 1 + (bit >> 3);
            const int shift = bit & 7, last = (bit + width) & 7;
            u32 held = p[0];
            if (shift + width > 8) held |= (u32)p[1] << 8;
            symbol = held >> shift & ((1u << width) - 1);
            if (symbol >= 2 * window) state[WRONG] = CORRUPT;
            if (i + 1 == n && last && p[shift + width > 8] >> last) state[WRONG] = CORRUPT;
        }
        const bool end_of = at_end(symbol, window) && d[TAIL];
        const u32 code = walk.move(0, 0, symbol);
        out[i] = end_of ? __uint_as_float(code) : walk.value(code);
        if (end_of) atomicOr(&marks[i >> 5], 1u << (i & 31));
    }
}

// Everything but chunks: zero and raw segments, raw symbols, single symbols. A block of 64 threads for each run that a segment may have.
extern "C" __global__ void __launch_bounds__(64) trellis_plain(
    const u8* data, i64 count, i64 g0, i64 g1, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, i64 runs, const i64* segments, const u8* only,
    u32* marks, float* out, i64* state
) {
    const i64 s = blockIdx.x / runs, part = blockIdx.x % runs, n = segment_length(count, s), first = s * SEGMENT;
    const i64* d = segments + s * TRELLIS_PLACES;
    if (refused(state) || (d[KIND] == CODED_KIND && d[FORM_OF] == CODED)) return;
    if (d[KIND] != CODED_KIND) {
        for (i64 i = part * LANES + threadIdx.x; i < n; i += runs * LANES)
            out[first + i] = d[KIND] == ZERO_KIND ? 0.0f : __uint_as_float(load32(data + d[AT] + 4 * i));
        return;
    }
    // A run begins at a multiple of 32 coordinates.
    const i64 from = part << d[RUN_OF], until = smaller(from + ((i64)1 << d[RUN_OF]), n);
    for (i64 k = from / 32 + threadIdx.x; d[TAIL] && 32 * k < until; k += LANES) marks[first / 32 + k] = 0;
    __syncthreads();
    const u8* own = only + s * TABLES_MOST;
    if (drawn) {
        const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
        DitheredWalk walk = dithered_of(d, g0, g1, draws, nullptr);
        walk_plainly(data, d, n, first, part, own, walk, marks + first / 32, out + first, state);
    } else {
        Walk walk = walk_of(d, g0, g1);
        walk_plainly(data, d, n, first, part, own, walk, marks + first / 32, out + first, state);
    }
}

// A block for each segment with escapes. `places`: ESCAPES per segment.
extern "C" __global__ void __launch_bounds__(1024) trellis_escapes(
    const u8* data, i64 count, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, const i64* segments, const u32* marks, int* places, float* out,
    i64* state
) {
    __shared__ int ones[ESCAPES];
    const i64 s = blockIdx.x, n = segment_length(count, s), first = s * SEGMENT;
    const i64* d = segments + s * TRELLIS_PLACES;
    if (refused(state) || d[KIND] != CODED_KIND || !d[TAIL]) return;
    float* values = out + first;
    const i64 run = d[RUN_OF], most = drawn ? FAR_DITHERED : FAR_AWAY;
    const Draws draws = {(u32)step_word, (u32)who, (u32)k0, (u32)k1};
    const Walk walk = walk_of(d, 0, 0);
    const DitheredWalk dithered = dithered_of(d, 0, 0, draws, nullptr);
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
