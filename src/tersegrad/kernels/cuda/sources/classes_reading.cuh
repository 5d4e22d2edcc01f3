// Reading what says of classes: the octaves of lines and columns, by one block (spec/wire.md, 4.11).
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"

#define WARPS 8

// What a block that reads classes shares.
struct Reading {
    union {
        u32 cells[2 * TOTAL];
        struct {
            u32 w[WARPS][256];
            int f[WARPS][256];
        };
    };
    u16 rings[WARPS][RING];
    short q[2 * OCTAVES], present[256];
    // Of the octaves' block: where it ends, its form, and its chunks if they are to be decoded.
    i64 at, chunks;
    int side_form;
    // Of the symbols' block: bytes of its tables, its form.
    i64 tables;
    int form, found;
    bool bad;
    // Whether anything is wrong, for all threads alike: nobody goes on to find more before all have looked.
    __device__ bool refused() const {
        __syncthreads();
        const bool is = bad;
        __syncthreads();
        return is;
    }
};

// A block reads the rANS block of `count` octaves, with 0 or 1 as their contexts in `octaves`, but for its chunks, of which it says where they begin and how long they are.
__device__ void open_octaves(const u8* data, i64 nbytes, i64 count, u8* octaves, i64* offsets, i64* words, Reading& in) {
    const int t = threadIdx.x, warp = own_number();
    if (t == 0) {
        in.side_form = nbytes ? data[0] : 0;
        in.found = 0;
        if (in.side_form == RAW) {
            in.at = 1 + raw_bytes(count, OCTAVES);
            in.bad |= nbytes < in.at || (count % 2 && data[in.at - 1] >> 4);
        } else {
            BitReader bits = {data + 1, 8 * smaller(nbytes - 1, 2 * (32 * OCTAVES + 2)), 0, in.side_form >= 14 && in.side_form <= 18};
            for (int c = 0; c < 2 && bits.good; ++c) read_table(bits, OCTAVES, in.q + c * OCTAVES, in.present);
            while (bits.good && bits.at & 7)
                if (bits.bit()) bits.good = false;
            in.bad |= !bits.good;
            in.at = 1 + bits.at / 8;
        }
    }
    if (in.refused()) return;
    if (in.side_form == RAW) {
        for (i64 i = t; i < count; i += blockDim.x) octaves[i] = data[1 + i / 2] >> 4 * (i & 1) & 15;
        return;
    }
    if (warp < 2) {
        const int found = make_frequencies(in.q + warp * OCTAVES, OCTAVES, in.w[warp], in.f[warp]);
        if ((t & 31) == 0 && found > 1) atomicMax(&in.found, found);
    }
    __syncthreads();
    // Frequencies leave the place where the cells will stand.
    __shared__ int f[2 * OCTAVES];
    if (t < 2 * OCTAVES) f[t] = in.f[t / OCTAVES][t % OCTAVES];
    __syncthreads();
    if (in.found < 2) {
        for (i64 i = t; i < count; i += blockDim.x) {
            int k = 0;
            while (f[octaves[i] * OCTAVES + k] != TOTAL) ++k;
            octaves[i] = (u8)k;
        }
        return;
    }
    for (int slot = t; slot < 2 * TOTAL; slot += blockDim.x) {
        const int* own = f + slot / TOTAL * OCTAVES;
        int k = 0, rest = slot % TOTAL;
        while (rest >= own[k]) rest -= own[k++];
        in.cells[slot] = (u32)k << 28 | (u32)(own[k] - 1) << 12 | (u32)rest;
    }
    const Layout l = layout_of(count, OCTAVES, in.side_form);
    if (t == 0) {
        i64 at = in.at + 4 * l.chunks;
        bool bad = at > nbytes;
        for (i64 c = 0; !bad && c < l.chunks; ++c) {
            const i64 number = load32(data + in.at + 4 * c);
            offsets[c] = at;
            words[c] = number;
            at += 4 * l.lanes + 2 * number;
            bad = number > l.coded(c) || at > nbytes;
        }
        in.at = at;
        in.bad = bad;
        in.chunks = l.chunks;
    }
}

__device__ __forceinline__ void open_cell(u32 held, u32* cell, u8* symbol) {
    *symbol = (u8)(held >> 28);
    *cell = ((held >> 12 & 0xfff) + 1) | (held & 0xfff) << 16;
}

// A warp decodes the only chunk of a block with so few octaves that a thread has one lane, if any. Contexts are read a group of steps ahead: a step
// waits for nothing but the one before.
__device__ bool decode_few(const Layout& l, const u8* states, i64 number, u16* ring, u8* octaves, const u32* cells) {
    constexpr int G = 8;
    const int t = threadIdx.x & 31, lanes = l.lanes, coded = (int)l.coded(0);
    const bool own = t < lanes;
    const u32 before = (1u << t) - 1;
    Words in;
    in.begin(states + 4 * lanes, states + 4 * lanes + 2 * number, ring);
    u32 x = own ? load32(states + 4 * t) : 65536, soon[G];
    bool good = x >= 65536;
    int at = 0;
    auto fetch = [&](int base) {
#pragma unroll
        for (int a = 0; a < G; ++a) soon[a] = own && base + a * lanes + t < coded ? octaves[base + a * lanes + t] * TOTAL : 0;
    };
    fetch(0);
    for (int base = 0; base < coded;) {
        u32 now[G];
#pragma unroll
        for (int a = 0; a < G; ++a) now[a] = soon[a];
        if (base + G * lanes < coded) fetch(base + G * lanes);
#pragma unroll
        for (int a = 0; a < G; ++a, base += lanes) {
            // Read by all threads, without a branch.
            u32 held = cells[now[a] + (x & (TOTAL - 1))], cell;
            u8 symbol;
            KEEP_NUMBER(held);
            open_cell(held, &cell, &symbol);
            const bool has = own && base + t < coded;
            const u32 next = (cell & 0xffff) * (x >> 12) + (cell >> 16);
            if (has) octaves[base + t] = symbol;
            x = has ? next : x;
            const bool needs = has && x < 65536;
            const u32 votes = __ballot_sync(FULL, needs), word = ring[(u32)(at + __popc(votes & before)) % RING];
            if (needs) x = x << 16 | word;
            at += __popc(votes);
            if (at + 32 > in.loaded) in.turn();
        }
    }
    good &= at == number;
    if (!own) return good;
    // The last octaves are what a state has above the smallest one.
    const u32 rest = x - 65536;
    for (int r = 0; r < l.rows; ++r) octaves[coded + r * lanes + (t - coded % lanes + lanes) % lanes] = (u8)(rest >> r * l.width & (OCTAVES - 1));
    return good && x >= 65536 && rest >> l.rows * l.width == 0;
}

// The chunks of octaves, a warp for each.
__device__ void decode_octaves(const u8* data, i64 count, u8* octaves, i64* offsets, i64* words, Reading& in) {
    const int warp = own_number();
    const Layout l = layout_of(count, OCTAVES, in.side_form);
    const u32* cells = in.cells;
    if (l.lanes <= 32) {
        if (warp == 0 && !decode_few(l, data + offsets[0], words[0], in.rings[0], octaves, cells)) in.bad = true;
        return;
    }
    for (i64 c = warp; c < in.chunks; c += WARPS) {
        auto look = [=](u32 context, u32 slot, u32* cell, u8* symbol) { open_cell(cells[context * TOTAL + slot], cell, symbol); };
        auto put = [=](i64 i, u8 symbol) { octaves[i] = symbol; };
        if (!decode_chunk(l, c, OCTAVES, data + offsets[c], words[c], in.rings[warp], ContextOf{octaves}, look, put)) in.bad = true;
    }
}
