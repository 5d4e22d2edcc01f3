// Following the states of trellises while their symbols are decoded (spec/wire.md, 5.20 and 5.21). Thread t of a warp has lanes t and t + 32, of rANS
// and of the trellises alike.
#include "common.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "entries.cuh"
#include "trellis.cuh"

// Steps that are decoded without a look at where a run begins; with dither, a thread draws for eight of their coordinates.
#define GROUP 4

// Of the coordinates of a group of steps, or of one at a time: the classes of a thread's lanes, by their number among those that have tables.
template <bool classed>
struct Kinds {
    const u8* contexts;
    u8 soon[GROUP][2], now[GROUP][2];
    // Those of the group that begins at coordinate i are on their way while the group before is decoded.
    __device__ void fetch(i64 i) {
        if (!classed) return;
#pragma unroll
        for (int a = 0; a < GROUP; ++a)
            for (int h = 0; h < 2; ++h) soon[a][h] = contexts[i + 64 * a + 32 * h + (threadIdx.x & 31)];
    }
    __device__ void turn() {
        if (!classed) return;
#pragma unroll
        for (int a = 0; a < GROUP; ++a)
            for (int h = 0; h < 2; ++h) now[a][h] = soon[a][h];
    }
    __device__ void one(int h, i64 i) {
        if (classed) now[0][h] = contexts[i];
    }
    __device__ u32 at(int h, int a) const { return classed ? now[a][h] : 0; }
};

// Where a state begins in its word, with z0: there it chooses between tables of TOTAL slots. What is shifted out below means nothing.
#define STATE_AT 12

// What a slot stands for: the frequency of its symbol, less 1, its place among the slots of the symbol, and the symbol.
struct Slot {
    u32 less, place, symbol;
};

// The trellises of two lanes without dither. A symbol is known by symbol | z0 << 7 | whether it is still << 8.
template <bool classed>
struct Walk {
    u32 g0, g1, states[2];
    int window;
    float scale, still_scale;
    Kinds<classed> kinds;
    // Of a class: its first table | whether it is still << 7.
    const u8* names;
    // The values of all symbols, as they are known.
    float* values;
    __device__ void restart(int h, i64) { states[h] = 0; }
    __device__ void draw_ahead(i64 i) { kinds.fetch(i); }
    __device__ void draw() { kinds.turn(); }
    __device__ void draw_one(int h, i64 i) { kinds.one(h, i); }
    __device__ u32 z0(int h) const { return states[h] >> STATE_AT & 1; }
    __device__ u32 table(int h, int a) const {
        if (!classed) return z0(h);
        const u32 name = names[kinds.at(h, a)];
        return (name & 127) + (name >> 7 ? 0 : z0(h));
    }
    __device__ u32 move(int h, int a, u32 symbol) {
        // What is still leaves the state alone.
        if (classed && names[kinds.at(h, a)] >> 7) return symbol | 256;
        const u32 z = z0(h);
        states[h] = states[h] >> 1 ^ (symbol & 1) * g1 ^ z * g0;
        return symbol | z << 7;
    }
    __device__ float scaled_by(float number, u32 code) const {
        const float most = __uint_as_float(HUGE_VALUE);
        return fminf(fmaxf(__fmul_rn(number, classed && code >> 8 ? still_scale : scale), -most), most);
    }
    // A block computes the values.
    __device__ void prepare() {
        for (u32 code = threadIdx.x; code < (classed ? 512 : 256); code += blockDim.x)
            values[code] = scaled_by((float)(2 * ((int)(code & 127) - window) + (int)(code >> 7 & 1)), code);
    }
    __device__ float value(u32 code) const { return values[code]; }
    // Of a symbol that is at an end, with 2 more for each unit of `more`.
    __device__ float escaped(i64, u32 code, int more) const {
        const int a = (int)(code & 127) - window, all = a < 0 ? a - 2 * more : a + 2 * more;
        return scaled_by((float)(2 * all + (int)(code >> 7 & 1)), code);
    }
};

// The same with dither. A symbol is known by its value in 2^-13 of a step.
template <bool classed>
struct DitheredWalk {
    static constexpr u32 low = 1u << STATE_AT;
    u32 g0, g1, states[2];
    int window, bits, signs[2];
    float scale;
    Kinds<classed> kinds;
    Draws draws;
    u16* room;
    u32 next[4];
    // 2^13 less the dither.
    int held[GROUP][2];
    __device__ void restart(int h, i64 i) {
        states[h] = 0;
        signs[h] = sign_of(draws, i);
    }
    // The draws of the group that begins at coordinate i, a multiple of eight; and their way to the threads that need them.
    __device__ void draw_ahead(i64 i) {
        philox(draws, ((u64)i >> 3) + (threadIdx.x & 31), PURPOSE, next);
        kinds.fetch(i);
    }
    __device__ void draw() {
        const int t = threadIdx.x & 31;
        __syncwarp();
        for (int k = 0; k < 4; ++k) ((u32*)room)[4 * t + k] = next[k];
        __syncwarp();
#pragma unroll
        for (int a = 0; a < GROUP; ++a)
            for (int h = 0; h < 2; ++h) held[a][h] = (1 << DITHER) - (room[64 * a + 32 * h + t] & 0x7fff);
        kinds.turn();
    }
    __device__ void draw_one(int h, i64 i) {
        held[0][h] = (1 << DITHER) - dither_of(draws, i);
        kinds.one(h, i);
    }
    // By the dither u and z0: the distance t and 2^13 in the lower bits, (t + u) / 2^14 with its lowest bit above them, as flip_of has it.
    __device__ u32 distance(int h, int a) const { return (u32)held[a][h] + (states[h] & low) * ((1u << DITHER) / low); }
    __device__ static bool beyond(u32 distance) { return distance >> DITHER & 1; }
    // |t|, where t is negative unless it is `beyond`.
    __device__ static u32 size_of(u32 distance) {
        const u32 part = distance & ((1u << DITHER) - 1);
        return beyond(distance) ? part : (1u << DITHER) - part;
    }
    __device__ u32 table(int h, int a) const {
        const u32 size = size_of(distance(h, a)) << MOST_BITS >> DITHER, most = (1u << MOST_BITS) - 1;
        return kinds.at(h, a) << bits | (size < most ? size : most) >> (MOST_BITS - bits);
    }
    __device__ u32 move(int h, int a, u32 symbol) {
        const u32 at = distance(h, a), odd = (at >> (DITHER + 1) ^ symbol) & 1;
        states[h] = states[h] >> 1 ^ odd * g1 ^ (states[h] & low) * g0;
        return (u32)((beyond(at) ? signs[h] : -signs[h]) * ((((int)symbol - window) << (DITHER + 1)) + (int)size_of(at)));
    }
    __device__ static void prepare() {}
    __device__ float scaled_by(float number) const {
        const float most = __uint_as_float(HUGE_VALUE);
        return fminf(fmaxf(__fmul_rn(__fmul_rn(number, 1.0f / 8192.0f), scale), -most), most);
    }
    // The number by way of 2^10, which takes no conversion: there floats are 2^-13 apart.
    __device__ float value(u32 code) const {
        const float most = __uint_as_float(HUGE_VALUE), number = __fsub_rn(__uint_as_float(code + __float_as_uint(1536.0f)), 1536.0f);
        return fminf(fmaxf(__fmul_rn(number, scale), -most), most);
    }
    // `begin` is where the run begins.
    __device__ float escaped(i64 begin, u32 code, int more) const {
        const int sign = sign_of(draws, begin), v = sign * (int)code, m = (v + (1 << DITHER)) >> (DITHER + 1), t = v - (m << (DITHER + 1));
        const int a = t >= 0 ? m : -m;
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

// The state behind one, before it takes a word.
__device__ __forceinline__ u32 state_after(u32 x, const Slot& slot) { return slot.less * (x >> 12) + ((x >> 12) + slot.place); }

// A warp decodes chunk c of a segment that begins at coordinate `origin`: `look(table, slot)` gives what a slot stands for. Whether
// the chunk is well-formed, as far as this thread saw. (As decode_chunk, which knows the tables of symbols beforehand.)
template <class Walking, class Look, class Put>
__device__ bool decode_walk(
    const Layout& l, i64 c, i64 origin, int run, const u8* states, i64 number, u16* ring, Walking& walk, const Look& look, const Put& put
) {
    const int t = threadIdx.x & 31, coded = (int)l.coded(c), alphabet = 2 * walk.window, starts = (1 << run) - 1;
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
            Slot slot[2];
            bool needs[2];
            for (int h = 0; h < 2; ++h) slot[h] = look(walk.table(h, a), x[h] & (TOTAL - 1));
            if (a) put.step(walk, first + base - LANES, last, ends);
            for (int h = 0; h < 2; ++h) {
                x[h] = state_after(x[h], slot[h]);
                needs[h] = x[h] < 65536;
            }
            in.refill(x, needs, at);
            for (int h = 0; h < 2; ++h) last[h] = walk.move(h, a, slot[h].symbol), ends[h] = at_end(slot[h].symbol, walk.window);
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
                walk.draw_one(h, origin + first + i);
                const Slot slot = look(walk.table(h, 0), x[h] & (TOTAL - 1));
                put.one(walk, first + i, walk.move(h, 0, slot.symbol), at_end(slot.symbol, walk.window));
                x[h] = state_after(x[h], slot);
                needs[h] = x[h] < 65536;
            }
        }
        in.refill(x, needs, at);
    }
    good &= at == 2 * number;
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

// What a slot stands for, by cells: frequency - 1 | symbol << 12 | place << 20.
struct Cells {
    const u32* cells;
    __device__ Slot operator()(u32 table, u32 slot) const {
        const u32 held = cells[table * TOTAL + slot];
        return {held & 0xfff, held >> 20, held >> 12 & 0xff};
    }
};
// By entries, which are told for every slot (`exact`), or nearly so, as in entries.cuh.
template <bool exact, bool fine>
struct Listed {
    Entries<fine> entries;
    __device__ Slot operator()(u32 table, u32 slot) const {
        const u32 held = exact ? entries.entries[table * entries.stride + entries.guesses[table * TOTAL + slot]] : entries.find(table, slot);
        return {held >> 12 & 0xfff, slot - (held & 0xfff), held >> 24};
    }
};

template <bool classed>
__device__ Walk<classed> walk_of(const i64* d, i64 g0, i64 g1, const u8* contexts, const u8* names, float* values) {
    const float scale = __uint_as_float((u32)d[SCALE_OF]), still = __uint_as_float((u32)d[STILL_SCALE]);
    return {(u32)g0 << STATE_AT, (u32)g1 << STATE_AT, {0, 0}, (int)d[WINDOW], scale, still, {contexts, {}, {}}, names, values};
}
template <bool classed>
__device__ DitheredWalk<classed> dithered_of(const i64* d, i64 g0, i64 g1, const u8* contexts, const Draws& draws, u16* room) {
    return {(u32)g0, (u32)g1 << STATE_AT, {0, 0}, (int)d[WINDOW], (int)d[BITS_OF], {1, 1}, __uint_as_float((u32)d[SCALE_OF]), {contexts, {}, {}}, draws, room, {}, {}};
}
