// Scale classes (spec/wire.md, 4.11): where rows, columns and blocks of a segment lie, and the class of every coordinate.
#include "common.cuh"

#define BLOCK 64
#define CLASSES 16
#define OCTAVES 16
#define MIDDLE 8
#define MEAN 16
#define SIDE_CHUNK 14

// How far the codes of a class are from those of the next: those of one byte are mostly in different banks of memory.
#define APART 261

// How the classes of a region are told.
enum { ONE_SCALE, BY_ROWS, BY_GRID, BY_BLOCKS };
// What classes.py writes of a region: coordinates of one tensor in one segment. ROOM: where its sums and octaves may stand.
enum { START, COUNT, COLUMNS, GROUP, PHASE, ROWS, ROOM, REGION_PLACES };
// What a segment says of it: mode << 5 | base, and where its octaves begin among those of the segment.
enum { FIELD, OCTAVES_AT, TOLD_PLACES };

struct Region {
    i64 start, room;
    int count, columns, group, phase, rows;
    __device__ int blocks() const { return (count + BLOCK - 1) / BLOCK; }
    // How many rows or blocks, and how many columns, tell their scale.
    __device__ int lines(int mode) const { return mode == BY_BLOCKS ? blocks() : mode == ONE_SCALE ? 0 : rows; }
    __device__ int across(int mode) const { return mode == BY_GRID ? columns / group : 0; }
};

__device__ Region region_of(const i64* regions, i64 r) {
    const i64* p = regions + r * REGION_PLACES;
    return {p[START], p[ROOM], (int)p[COUNT], (int)p[COLUMNS], (int)p[GROUP], (int)p[PHASE], (int)p[ROWS]};
}

// Threads that work on one region: those of a block or of a warp.
struct Team {
    int rank, size;
    __device__ void sync() const {
        if (size == 32) __syncwarp();
        else __syncthreads();
    }
};
__device__ Team whole_block() { return {(int)threadIdx.x, (int)blockDim.x}; }
__device__ Team own_warp() { return {(int)threadIdx.x & 31, 32}; }

// Coordinates of a segment that block `part` of `share` takes: a multiple of 1024, but for the last.
struct Slice {
    i64 from, to;
};
__device__ Slice slice_of(i64 first, i64 size, i64 part, i64 share) {
    const i64 each = (size + 1024 * share - 1) / (1024 * share) * 1024;
    return {first + smaller(part * each, size), first + smaller((part + 1) * each, size)};
}

// Calls body(team, r, region, i0, i1) for the parts of a segment's regions among coordinates from .. to: coordinates i0 .. i1 of region r.
// Long parts are the work of the block, short ones of its warps in turn.
template <class Body>
__device__ void each_part(const i64* regions, const i64* firsts, i64 s, i64 from, i64 to, Body body) {
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    int turn = 0;
    for (i64 r = firsts[s]; r < firsts[s + 1]; ++r) {
        const i64 start = regions[r * REGION_PLACES + START], count = regions[r * REGION_PLACES + COUNT];
        if (start >= to) break;
        if (start + count <= from) continue;
        const int i0 = (int)larger(from - start, 0), i1 = (int)smaller(to - start, count);
        if (i1 - i0 > 1024) body(whole_block(), r, region_of(regions, r), i0, i1);
        else if (turn++ % warps == warp) body(own_warp(), r, region_of(regions, r), i0, i1);
    }
}

#define ONES 0x01010101u

// The classes of four coordinates from the octaves of their lines and columns; all are bytes.
__device__ __forceinline__ u32 classes_of(int base, u32 lines, u32 columns) {
    // Sums of classes, before these are kept within 1 .. 15, and 32; they are 11 .. 69.
    const u32 sums = lines + columns + (u32)(base + 32 - MEAN - MIDDLE) * ONES;
    const u32 above = (sums + 95 * ONES >> 7 & ONES) * 255, beyond = (sums + 80 * ONES >> 7 & ONES) * 15;
    const u32 there = base ? ((lines + 127 * ONES & columns + 127 * ONES) >> 7 & ONES) * 15 : 0;
    return ((sums & above) | (ONES & ~above) | beyond) & there;
}

// Sixteen bytes at any place.
__device__ __forceinline__ Sixteen sixteen_at(const u8* p) {
    const u32 shift = 8 * ((u64)p & 3), *words = (const u32*)((u64)p & ~(u64)3);
    const u32 last = shift ? words[4] : 0;
    Sixteen held;
#pragma unroll
    for (int q = 0; q < 4; ++q) held.word[q] = __funnelshift_r(words[q], q < 3 ? words[q + 1] : last, shift);
    return held;
}

// Calls put(i, named, from, to) for coordinates i0 .. i1 of a region, sixteen at a time, at places of the vector that are multiples of
// sixteen: byte k of `named` stands for coordinate i + k, for k from .. to. name(classes) gives what stands for four classes. The region's octaves
// begin at `octaves`.
template <class Name, class Put>
__device__ void each_class(const Team& team, const Region& g, i64 field, const u8* octaves, int i0, int i1, Name name, Put put) {
    const int mode = (int)field >> 5, base = field & 31, lead = (int)(g.start & 15), last = (i1 + lead + 15) / 16;
    const u8* across = octaves + g.rows;
    // A column's number divided by the group: exact, since both are below 2^19, unless the group is long.
    const u32 magic = g.group == 1 || g.group > 8192 ? 0 : 0xffffffffu / (u32)g.group + 1;
    auto own = [=](int column) { return (u32)across[magic ? __umulhi((u32)column, magic) : g.group == 1 ? (u32)column : (u32)column / (u32)g.group]; };
    const int length = mode == BY_BLOCKS ? BLOCK : g.columns, phase = mode == BY_BLOCKS ? 0 : g.phase;
    const int down = 16 * team.size / length, right = 16 * team.size % length;
    int unit = (i0 + lead) / 16 + team.rank;
    // The first coordinate may lie up to fifteen before the region.
    const int place = phase + 16 * unit - lead + 16 * length;
    int row = place / length - 16, column = place % length;
    for (; unit < last; unit += team.size) {
        const int i = 16 * unit - lead, from = i < i0 ? i0 - i : 0, to = i1 - i < 16 ? i1 - i : 16;
        Sixteen named = {{MIDDLE * ONES, MIDDLE * ONES, MIDDLE * ONES, MIDDLE * ONES}};
        if (mode == ONE_SCALE || (to - from == 16 && column + 16 <= length)) {
            // Sixteen of one row.
            const u32 lines = (mode == ONE_SCALE ? MIDDLE : octaves[row]) * ONES;
            if (mode == BY_GRID && g.group == 1) named = sixteen_at(across + column);
            else if (mode == BY_GRID)
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const int c = column + 4 * q;
                    named.word[q] = own(c) | own(c + 1) << 8 | own(c + 2) << 16 | own(c + 3) << 24;
                }
            named.word[0] = name(classes_of(base, lines, named.word[0]));
            // Without columns all sixteen have one class.
#pragma unroll
            for (int q = 1; q < 4; ++q) named.word[q] = mode == BY_GRID ? name(classes_of(base, lines, named.word[q])) : named.word[0];
        } else {
            int r = row, c = column;
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                u32 lines = 0, columns = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if (4 * q + k >= from && 4 * q + k < to) {
                        lines |= (u32)octaves[r] << 8 * k;
                        columns |= (mode == BY_GRID ? own(c) : MIDDLE) << 8 * k;
                    }
                    if (++c == length) c = 0, ++r;
                }
                named.word[q] = name(classes_of(base, lines, columns));
            }
        }
        put(i, named, from, to);
        row += down;
        column += right;
        if (column >= length) column -= length, ++row;
    }
}

__device__ __forceinline__ void put_sixteen(u8* to, const Sixteen& classes, int from, int until) {
    if (until - from == 16) *(Sixteen*)to = classes;
    else
#pragma unroll
        for (int k = 0; k < 16; ++k)
            if (k >= from && k < until) to[k] = (u8)classes.byte(k);
}

// Where the description of a segment's classes stands: its mask, the fields of its regions, and its octaves, of four bits each at most.
__device__ __forceinline__ i64 description_at(i64 first, i64 room, i64 s) { return first + room / 2 + 8 * s; }
