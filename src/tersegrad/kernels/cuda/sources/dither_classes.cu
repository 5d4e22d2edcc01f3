// Sparse Dithering: choosing scale classes for segments, and coding with them (spec/wire.md, 4.11). Magnitudes are added up by rows, columns
// and blocks; segments describe their regions; coordinates get classes and are counted; segments write tables and decide.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "dither_levels.cuh"
#include "classes.cuh"
#include "classes_estimate.cuh"
#include "classes_octaves.cuh"

#define SHORTEST 512
#define EXACT ((i64)1 << 16)
#define COUNTED 8
#define WORTH_COUNTING 0.98
#define WORTH_SENDING 0.99
#define USUAL_CHUNK 16
#define LONG_CHUNK 18
#define WARPS 8

__device__ __forceinline__ int magnitude_of(int level, int window) {
    const int size = level < 0 ? -level : level;
    return size > window ? window : size;
}

// Whether a segment may have classes, for all threads of a block alike.
__device__ bool coded_segment(const i64* d, i64 size, const i64* result) {
    __shared__ bool is;
    if (threadIdx.x == 0) is = result[RESULT_WRONG] == FINE && d[KIND] == CODED_KIND && size >= SHORTEST;
    __syncthreads();
    return is;
}

// Coordinates of a segment that block `part` of `share` takes.
struct Slice {
    i64 from, to;
};
__device__ Slice slice_of(i64 first, i64 size, i64 part, i64 share) {
    const i64 each = (size + share - 1) / share;
    return {first + smaller(part * each, size), first + smaller((part + 1) * each, size)};
}

// The sums of rows of `length` coordinates, from `phase` on, among i0 .. i1: one, 8 or 32 threads for each 1024 of a row.
__device__ void add_lines(const Team& team, const signed char* levels, int window, int phase, int length, int i0, int i1, int* sums) {
    const int width = length < 32 ? 1 : length < 256 ? 8 : 32, parts = (length + 1023) / 1024;
    const int groups = team.size / width, group = team.rank / width, lane = team.rank % width;
    const int first = (phase + i0) / length, items = ((phase + i1 - 1) / length - first + 1) * parts;
    for (int base = 0; base < items; base += groups) {
        const int item = base + group, line = first + item / parts, part = item % parts;
        const i64 begin = (i64)line * length - phase + 1024 * part, end = smaller(begin + 1024, (i64)(line + 1) * length - phase);
        int sum = 0;
        if (item < items)
#pragma unroll 4
            for (int i = (int)larger(begin, i0) + lane; i < smaller(end, i1); i += width) sum += magnitude_of(levels[i], window);
        for (int by = width / 2; by; by >>= 1) sum += __shfl_xor_sync(FULL, sum, by);
        if (lane == 0 && sum) atomicAdd(&sums[line], sum);
    }
}

// The sums of columns: a thread stays in a column.
__device__ void add_columns(const Team& team, const signed char* levels, int window, const Region& g, int i0, int i1, int* sums) {
    const int at = (g.phase + i0) % g.columns, narrow = team.size / g.columns * g.columns;
    if (narrow) {
        if (team.rank >= narrow) return;
        int sum = 0;
#pragma unroll 4
        for (int i = i0 + team.rank; i < i1; i += narrow) sum += magnitude_of(levels[i], window);
        if (sum) atomicAdd(&sums[(at + team.rank) % g.columns / g.group], sum);
        return;
    }
    for (int c = team.rank; c < g.columns; c += team.size) {
        int sum = 0;
#pragma unroll 4
        for (int i = i0 + c - at + (c < at ? g.columns : 0); i < i1; i += g.columns) sum += magnitude_of(levels[i], window);
        if (sum) atomicAdd(&sums[c / g.group], sum);
    }
}

// Blocks, `share` of them for each segment, add up magnitudes by rows and columns, or by blocks where there are few rows.
extern "C" __global__ void classes_sums(
    i64 n, i64 share, const signed char* levels, const i64* segments, const i64* regions, const i64* firsts, int* sums, const i64* result
) {
    const i64 s = blockIdx.x / share, size = segment_length(n, s);
    const i64* d = segments + s * SEGMENT_PLACES;
    if (!coded_segment(d, size, result)) return;
    const int window = (int)d[WINDOW];
    const Slice slice = slice_of(s * SEGMENT, size, blockIdx.x % share, share);
    each_part(regions, firsts, s, slice.from, slice.to, [=](const Team& team, i64, const Region& g, int i0, int i1) {
        const signed char* own = levels + g.start;
        if (g.count <= BLOCK || g.rows < FEW_ROWS) return add_lines(team, own, window, 0, BLOCK, i0, i1, sums + g.room);
        add_lines(team, own, window, g.phase, g.columns, i0, i1, sums + g.room);
        add_columns(team, own, window, g, i0, i1, sums + g.room + g.rows);
    });
}

// A block for each segment describes its regions: mode, base, octaves and where they stand; and says whether classes are worth counting.
extern "C" __global__ void classes_describe(
    i64 n, i64* segments, const i64* regions, const i64* firsts, const int* sums, u8* octaves, i64* told, double* costs, int* side, const i64* result
) {
    __shared__ Work works[WARPS];
    __shared__ int side_counts[2 * OCTAVES], all;
    const i64 s = blockIdx.x, size = segment_length(n, s);
    const int t = threadIdx.x, warp = t >> 5;
    i64* d = segments + s * SEGMENT_PLACES;
    if (!coded_segment(d, size, result)) return;
    if (t < 2 * OCTAVES) side_counts[t] = 0;
    if (t == 0) all = 0;
    __syncthreads();
    auto by = [&](const Team& team, i64 r, Work& work) {
        const Region g = region_of(regions, r);
        double bits;
        const int field = describe(team, g, sums + g.room, octaves + g.room, work, &bits), mode = field >> 5;
        if (team.rank == 0) {
            told[r * TOLD_PLACES + FIELD] = field;
            costs[r] = bits;
            atomicAdd(&all, work.total);
        }
        if (team.rank < OCTAVES && mode != ONE_SCALE) atomicAdd(&side_counts[team.rank], work.lines.numbers[team.rank]);
        if (team.rank < OCTAVES && mode == BY_GRID) atomicAdd(&side_counts[OCTAVES + team.rank], work.across.numbers[team.rank]);
    };
    // Long regions by the block, others by warps, those of one block by threads.
    const i64 first = firsts[s], last = firsts[s + 1];
    for (i64 r = first; r < last; ++r)
        if (regions[r * REGION_PLACES + COUNT] > 4096) by(whole_block(), r, works[0]);
    __syncthreads();
    for (i64 r = first + warp; r < last; r += WARPS)
        if (regions[r * REGION_PLACES + COUNT] > BLOCK && regions[r * REGION_PLACES + COUNT] <= 4096) by(own_warp(), r, works[warp]);
    for (i64 r = first + t; r < last; r += blockDim.x) {
        const i64* p = regions + r * REGION_PLACES;
        if (p[COUNT] > BLOCK) continue;
        const int total = sums[p[ROOM]];
        told[r * TOLD_PLACES + FIELD] = total ? within(MEAN + log2_near((u64)total, (u64)p[COUNT]), 1, TOP_BASE) : 0;
        costs[r] = bits_of(p[COUNT], total);
        if (total) atomicAdd(&all, total);
    }
    __syncthreads();
    i64 number = 0, here;
    for (i64 base = first; base < last; base += blockDim.x) {
        const i64 r = base + t;
        i64 own = 0;
        if (r < last) {
            const int mode = (int)told[r * TOLD_PLACES + FIELD] >> 5;
            const Region g = region_of(regions, r);
            own = g.lines(mode) + g.across(mode);
        }
        const i64 before = block_scan(own, &here);
        if (r < last) told[r * TOLD_PLACES + OCTAVES_AT] = number + before;
        number += here;
    }
    if (t < 2 * OCTAVES) side[s * 2 * OCTAVES + t] = side_counts[t];
    if (t) return;
    double cost = 0.0;
#pragma unroll 4
    for (i64 r = first; r < last; ++r) cost += costs[r] + 8.0;
    d[OCTAVES_OF] = number;
    d[CLASSES_OF] = cost < WORTH_COUNTING * bits_of(size, all);
}

// Blocks, `share` of them for each segment, write the class of every coordinate, count symbols by class, and find the largest magnitude of
// a class, plus 1. The octaves that are told are laid one after the other; those of columns have OCTAVES added.
extern "C" __global__ void classes_count(
    i64 n, i64 share, const signed char* levels, const i64* segments, const i64* regions, const i64* firsts, const i64* told, const u8* octaves,
    u8* symbols, u8* classes, int* counts, int* tops, const i64* result
) {
    __shared__ int held[CLASSES * 256], largest[CLASSES];
    const i64 s = blockIdx.x / share, size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * SEGMENT_PLACES;
    if (!coded_segment(d, size, result) || !d[CLASSES_OF]) return;
    const int window = (int)d[WINDOW], alphabet = 2 * window + 1;
    const bool sampled = size >= EXACT;
    for (int k = threadIdx.x; k < CLASSES * alphabet; k += blockDim.x) held[k] = 0;
    if (threadIdx.x < CLASSES) largest[threadIdx.x] = 0;
    __syncthreads();
    int* const near_counts = held;
    int* const near_tops = largest;
    u8* const side = symbols + regions[firsts[s] * REGION_PLACES + ROOM];
    const Slice slice = slice_of(first, size, blockIdx.x % share, share);
    each_part(regions, firsts, s, slice.from, slice.to, [=](const Team& team, i64 r, const Region& g, int i0, int i1) {
        const i64 field = told[r * TOLD_PLACES + FIELD];
        const signed char* own = levels + g.start;
        u8* to = classes + g.start;
        const i64 before = g.start - first;
        each_class(team, g, field, octaves + g.room, i0, i1, [=](int i, int c) {
            const int level = own[i], size = magnitude_of(level, window) + 1;
            to[i] = (u8)c;
            if (size > near_tops[c]) atomicMax(&near_tops[c], size);
            if (!sampled || (before + i) / BLOCK % COUNTED == 0) atomicAdd(&near_counts[c * alphabet + symbol_of(level, window)], 1);
        });
        if (i0) return;
        const int lines = g.lines((int)field >> 5), number = lines + g.across((int)field >> 5);
        u8* place = side + told[r * TOLD_PLACES + OCTAVES_AT];
        for (int k = team.rank; k < number; k += team.size) place[k] = (u8)(octaves[g.room + k] + (k < lines ? 0 : OCTAVES));
    });
    __syncthreads();
    for (int k = threadIdx.x; k < CLASSES * alphabet; k += blockDim.x)
        if (held[k]) atomicAdd(&counts[s * CLASSES * 256 + k], held[k]);
    if (threadIdx.x < CLASSES) atomicMax(&tops[s * CLASSES + threadIdx.x], largest[threadIdx.x]);
}

// ---- deciding ----

// What a warp needs to make a table.
struct Bench {
    u32 w[256];
    int f[256];
    short q[256];
    TableRoom room;
};

// A warp writes the table of `count(k)` as bits, and its codes: frequency | start << 16.
template <class Count>
__device__ void make_table(Count count, int alphabet, Bench& bench, u8* bits, i64* length, int* present, u32* codes) {
    const int lane = threadIdx.x & 31;
    const i64 written = write_table(count, alphabet, bench.q, bits, bench.room);
    const int found = make_frequencies(bench.q, alphabet, bench.w, bench.f);
    i64 start = 0;
    for (int base = 0; base < alphabet; base += 32) {
        const int k = base + lane, f = k < alphabet ? bench.f[k] : 0;
        const i64 upto = warp_scan(f);
        if (k < alphabet) codes[k] = (u32)f | (u32)(start + upto - f) << 16;
        start += __shfl_sync(FULL, upto, 31);
    }
    if (lane == 0) *length = written, *present = found;
    __syncwarp();
}

// A block for each segment that was counted: entropies, tables and the octaves' rANS block; and whether there are classes.
extern "C" __global__ void classes_decide(
    i64 n, i64 given, i64* segments, const i64* regions, const i64* firsts, const i64* told, const u8* symbols, const int* side, const int* counts,
    const int* tops, u16* words, i64* numbers, u32* states, u8* described, u8* tables, u32* codes, const i64* result
) {
    __shared__ union {
        double terms[CLASSES * 255];
        struct {
            Bench benches[WARPS];
            u8 bits[(CLASSES + 2) * TABLE_BYTES];
        };
    } pool;
    __shared__ double lone[256], alone, together;
    __shared__ i64 totals[CLASSES], lengths[CLASSES + 2];
    __shared__ int present[CLASSES + 2], used[CLASSES], next;
    __shared__ u32 side_codes[2 * OCTAVES];
    __shared__ u8 side_tables[2 * TABLE_BYTES];
    const i64 s = blockIdx.x, size = segment_length(n, s), first = firsts[s], room = regions[first * REGION_PLACES + ROOM];
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    i64* d = segments + s * SEGMENT_PLACES;
    if (!coded_segment(d, size, result) || !d[CLASSES_OF]) return;
    const int window = (int)d[WINDOW], alphabet = 2 * window + 1;
    const bool sampled = size >= EXACT;
    const int *own = counts + s * CLASSES * 256, *own_tops = tops + s * CLASSES;
    for (int c = warp; c < CLASSES; c += WARPS) {
        i64 sum = 0;
        for (int k = lane; k < alphabet; k += 32) sum += own[c * alphabet + k];
        sum = warp_sum(sum);
        if (lane == 0) totals[c] = sum;
    }
    __syncthreads();
    i64 all = 0, lone_count = 0;
    for (int c = 0; c < CLASSES; ++c) {
        all += totals[c];
        if (t < alphabet) lone_count += own[c * alphabet + t];
    }
    if (t < alphabet) lone[t] = shares_of(lone_count, all);
    for (int k = t; k < CLASSES * alphabet; k += blockDim.x) pool.terms[k] = shares_of(own[k], totals[k / alphabet]);
    __syncthreads();
    const double share = (double)size / (double)all;
    if (t == 0) together = share * added(pool.terms, CLASSES * alphabet);
    if (t == 32) alone = share * added(lone, alphabet);
    int mask = 0, number = 0;
    for (int c = 0; c < CLASSES; ++c) {
        if (!own_tops[c]) continue;
        if (t == 0) used[number] = c;
        mask |= 1 << c;
        ++number;
    }
    if (t == 0) next = 0;
    __syncthreads();
    Bench& bench = pool.benches[warp];
    // Tables of the octaves come first, then their chunks and the tables of classes, in turn.
    if (warp < 2) {
        const int* from = side + s * 2 * OCTAVES + warp * OCTAVES;
        make_table([=](int k) { return (i64)from[k]; }, OCTAVES, bench, pool.bits + warp * TABLE_BYTES, lengths + warp, present + warp, side_codes + warp * OCTAVES);
    }
    __syncthreads();
    const i64 tables_bytes = join_tables(pool.bits, TABLE_BYTES, lengths, 2, side_tables);
    const i64 count = d[OCTAVES_OF];
    const bool informative = present[0] > 1 || present[1] > 1;
    const Layout l = layout_of(larger(count, 1), OCTAVES, SIDE_CHUNK);
    const int chunks = count && informative ? (int)l.chunks : 0;
    const u8* octaves = symbols + room;
    i64* const side_numbers = numbers + room / 8192 + 2 * s;
    u32* const side_states = states + room / 64 + 64 * s;
    for (;;) {
        int job = 0;
        if (lane == 0) job = atomicAdd(&next, 1);
        job = __shfl_sync(FULL, job, 0);
        if (job >= chunks + number) break;
        if (job < chunks) {
            const u32* near = side_codes;
            const i64 made = encode_chunk(
                l, job, [=](i64 i) { return (u32)octaves[i] & 15; }, [=](i64 i) { return near[octaves[i]]; }, words + room, side_states
            );
            if (lane == 0) side_numbers[job] = made;
        } else {
            const int k = job - chunks, c = used[k], top = own_tops[c] - 1;
            auto counted = [=](int a) { return (i64)own[c * alphabet + a] + (sampled && magnitude_of(a - window, window) <= top); };
            make_table(
                counted, alphabet, bench, pool.bits + (2 + k) * TABLE_BYTES, lengths + 2 + k, present + 2 + k, codes + (s * CLASSES + c) * 256
            );
        }
    }
    __syncthreads();
    const Octaves block = {octaves, side_tables, words + room, side_numbers, side_states, count, tables_bytes, informative};
    bool raw;
    const i64 described_bytes = 2 + firsts[s + 1] - first + block.length(&raw);
    i64 bits = 0;
    int most = 0;
    for (int k = 0; k < number; ++k) bits += lengths[2 + k], most = (int)larger(most, present[2 + k]);
    const bool worth = together + 8.0 * (double)(described_bytes + (bits + 7) / 8) < WORTH_SENDING * alone;
    __syncthreads();
    if (!worth) {
        if (t == 0) d[CLASSES_OF] = 0;
        return;
    }
    u8* to = described + description_at(first, room, s);
    if (t < 2) to[t] = (u8)(mask >> 8 * t);
    for (i64 r = first + t; r < firsts[s + 1]; r += blockDim.x) to[2 + r - first] = (u8)told[r * TOLD_PLACES + FIELD];
    block.write(to + 2 + firsts[s + 1] - first);
    join_tables(pool.bits + 2 * TABLE_BYTES, TABLE_BYTES, lengths + 2, number, tables + s * 8192);
    if (t) return;
    d[KIND] = CLASSED_KIND;
    d[CLASSES_OF] = described_bytes;
    d[TABLES_OF] = (bits + 7) / 8;
    d[ONLY] = most;
    d[CHUNK_OF] = given ? given : 2.0 * together < (double)size ? LONG_CHUNK : USUAL_CHUNK;
}

extern "C" __global__ void __launch_bounds__(32) classes_encode_chunks(
    i64 n, const signed char* levels, const u8* classes, const i64* segments, const u32* codes, u16* words, i64* numbers, u32* states, const i64* result
) {
    __shared__ u32 own[CLASSES * 255];
    const i64 s = blockIdx.x / CHUNKS, c = blockIdx.x % CHUNKS, size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * SEGMENT_PLACES;
    if (result[RESULT_WRONG] != FINE || d[KIND] != CLASSED_KIND || d[ONLY] < 2) return;
    const int window = (int)d[WINDOW], alphabet = 2 * window + 1;
    const Layout l = layout_of(size, alphabet, d[CHUNK_OF]);
    if (c >= l.chunks) return;
    for (int k = threadIdx.x; k < CLASSES * alphabet; k += 32) own[k] = codes[(s * CLASSES + k / alphabet) * 256 + k % alphabet];
    __syncwarp();
    const u32* from = own;
    auto symbol = [=](i64 i) { return (u32)symbol_of(levels[first + i], window); };
    auto look = [=](i64 i) { return from[classes[first + i] * alphabet + symbol(i)]; };
    const i64 number = encode_chunk(l, c, symbol, look, words + first, states + s * CHUNKS * 64);
    if (threadIdx.x == 0) numbers[s * CHUNKS + c] = number;
}
