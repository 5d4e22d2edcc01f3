// Scale classes (spec/wire.md, 4.11): where rows, columns and blocks of a segment lie, and the class of every coordinate.
#include "common.cuh"

#define BLOCK 64
#define CLASSES 16
#define OCTAVES 16
#define MIDDLE 8
#define MEAN 16
#define SIDE_CHUNK 14

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

__device__ __forceinline__ int class_of(int base, int line, int column) {
    const int sum = base + line + column - MEAN - MIDDLE;
    return base && line && column ? (sum < 1 ? 1 : sum > CLASSES - 1 ? CLASSES - 1 : sum) : 0;
}

// Sixteen bytes that are loaded and stored at once, at places that are multiples of sixteen.
struct alignas(16) Sixteen {
    u32 word[4];
    __device__ u32 byte(int k) const { return word[k >> 2] >> 8 * (k & 3) & 255; }
    // Whether all bytes are the same.
    __device__ bool even() const {
        return word[0] == word[0] % 256 * 0x01010101u && word[0] == word[1] && word[0] == word[2] && word[0] == word[3];
    }
};

// Calls put(i, classes, from, to) for coordinates i0 .. i1 of a region, sixteen at a time, at places of the vector that are multiples of
// sixteen: byte k of `classes` is what name(class) gives for coordinate i + k, for k from .. to. The region's octaves begin at `octaves`.
template <class Name, class Put>
__device__ void each_class(const Team& team, const Region& g, i64 field, const u8* octaves, int i0, int i1, Name name, Put put) {
    const int mode = (int)field >> 5, base = field & 31, lead = (int)(g.start & 15), last = (i1 + lead + 15) / 16;
    const u8* across = octaves + g.rows;
    // A column's number divided by the group: exact, since both are below 2^19, unless the group is long.
    const u32 magic = g.group == 1 || g.group > 8192 ? 0 : 0xffffffffu / (u32)g.group + 1;
    auto own = [=](int column) { return (int)across[magic ? __umulhi((u32)column, magic) : g.group == 1 ? (u32)column : (u32)column / (u32)g.group]; };
    const int length = mode == BY_BLOCKS ? BLOCK : g.columns, phase = mode == BY_BLOCKS ? 0 : g.phase;
    const int down = 16 * team.size / length, right = 16 * team.size % length;
    int unit = (i0 + lead) / 16 + team.rank;
    // The first coordinate may lie up to fifteen before the region.
    const int place = phase + 16 * unit - lead + 16 * length;
    int row = place / length - 16, column = place % length;
    for (; unit < last; unit += team.size) {
        const int i = 16 * unit - lead, from = i < i0 ? i0 - i : 0, to = i1 - i < 16 ? i1 - i : 16;
        Sixteen classes;
        int r = row, c = column;
        // Sixteen of one row mostly have one class.
        if (mode != BY_GRID && to - from == 16 && (mode == ONE_SCALE || c + 16 <= length)) {
            const u32 all = name(class_of(base, mode == ONE_SCALE ? MIDDLE : octaves[r], MIDDLE)) * 0x01010101u;
            classes = {{all, all, all, all}};
        } else
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const bool full = from <= 4 * q && to >= 4 * q + 4;
                u32 packed = 0;
                if (mode == ONE_SCALE) {
                    packed = name(class_of(base, MIDDLE, MIDDLE)) * 0x01010101u;
                } else if (full && c + 4 <= length) {
                    const int line = octaves[r];
                    if (mode != BY_GRID) packed = name(class_of(base, line, MIDDLE)) * 0x01010101u;
                    else if (!line) packed = name(0) * 0x01010101u;
                    else
#pragma unroll
                        for (int k = 0; k < 4; ++k) packed |= name(class_of(base, line, own(c + k))) << 8 * k;
                    c += 4;
                    if (c == length) c = 0, ++r;
                } else {
                    for (int k = 0; k < 4; ++k) {
                        if (4 * q + k >= from && 4 * q + k < to)
                            packed |= name(class_of(base, octaves[r], mode == BY_GRID ? own(c) : MIDDLE)) << 8 * k;
                        if (++c == length) c = 0, ++r;
                    }
                }
                classes.word[q] = packed;
            }
        put(i, classes, from, to);
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
