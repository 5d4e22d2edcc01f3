// Scale classes (spec/wire.md, 4.11): where rows, columns and blocks of a segment lie, and the class of every coordinate.
#include "common.cuh"

#define BLOCK 64
#define CLASSES 16
#define OCTAVES 16
#define MIDDLE 8
#define MEAN 16
#define SIDE_CHUNK 14
// Where decoders begin to look for the symbol of a slot: one guess for each four slots.
#define GUESSES 1024

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

// Calls put(i, class) for coordinates i0 .. i1 of a region, whose octaves begin at `octaves`.
template <class Put>
__device__ void each_class(const Team& team, const Region& g, i64 field, const u8* octaves, int i0, int i1, Put put) {
    const int mode = (int)field >> 5, base = field & 31;
    if (mode == ONE_SCALE) {
        const int one = class_of(base, MIDDLE, MIDDLE);
        for (int i = i0 + team.rank; i < i1; i += team.size) put(i, one);
    } else if (mode == BY_BLOCKS) {
        for (int i = i0 + team.rank; i < i1; i += team.size) put(i, class_of(base, octaves[i / BLOCK], MIDDLE));
    } else {
        const u8* across = octaves + g.rows;
        const int down = team.size / g.columns, right = team.size % g.columns;
        int row = (g.phase + i0 + team.rank) / g.columns, column = (g.phase + i0 + team.rank) % g.columns;
#pragma unroll 4
        for (int i = i0 + team.rank; i < i1; i += team.size) {
            const int own = mode == BY_GRID ? across[g.group == 1 ? column : column / g.group] : MIDDLE;
            put(i, class_of(base, octaves[row], own));
            row += down;
            column += right;
            if (column >= g.columns) column -= g.columns, ++row;
        }
    }
}

// Where the description of a segment's classes stands: its mask, the fields of its regions, and its octaves, of four bits each at most.
__device__ __forceinline__ i64 description_at(i64 first, i64 room, i64 s) { return first + room / 2 + 8 * s; }
