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

// Of four levels the magnitudes, none above the window, which stands in each byte of `limit`.
__device__ __forceinline__ u32 magnitudes(u32 levels, u32 limit) {
    const u32 minus = levels >> 7 & 0x01010101u, sizes = (levels ^ minus * 255u) + minus;
    const u32 over = (sizes + (0x7f7f7f7fu - limit) >> 7 & 0x01010101u) * 255u;
    return (sizes & ~over) | (limit & over);
}

// The largest of sixteen bytes below 128.
__device__ __forceinline__ u32 largest(const Sixteen& of) {
    auto more = [](u32 a, u32 b) {
        const u32 mask = (((a | 0x80808080u) - b) >> 7 & 0x01010101u) * 255u;
        return (a & mask) | (b & ~mask);
    };
    u32 most = more(more(of.word[0], of.word[1]), more(of.word[2], of.word[3]));
    most = more(most, most >> 16);
    return more(most, most >> 8) & 255;
}

// Levels of a region, four at a time at places that are multiples of four: those of coordinates begin .. end, zeros around them.
struct Fours {
    const u32* words;
    int lead;
    u32 limit;
    __device__ Fours(const signed char* levels, const Region& g, int window)
        : words((const u32*)(levels + (g.start & ~(i64)3))), lead((int)(g.start & 3)), limit((u32)window * 0x01010101u) {}
    __device__ int first(int begin) const { return (begin + lead) / 4; }
    __device__ int last(int end) const { return (end - 1 + lead) / 4; }
    __device__ u32 sizes(int quad, int begin, int end) const {
        u32 word = words[quad];
        if (quad == first(begin)) word &= 0xffffffffu << 8 * ((begin + lead) & 3);
        if (quad == last(end)) word &= 0xffffffffu >> 8 * (3 - ((end - 1 + lead) & 3));
        return magnitudes(word, limit);
    }
};

// The sums of rows of `length` coordinates, from `phase` on, among i0 .. i1: one, 8 or 32 threads for each 1024 of a row.
__device__ void add_lines(const Team& team, const Fours& levels, int phase, int length, int i0, int i1, int* sums) {
    const int width = length < 32 ? 1 : length < 512 ? 8 : 32, parts = (length + 1023) / 1024;
    const int groups = team.size / width, group = team.rank / width, lane = team.rank % width;
    const int first = (phase + i0) / length, items = ((phase + i1 - 1) / length - first + 1) * parts;
    for (int base = 0; base < items; base += groups) {
        const int item = base + group, line = first + item / parts, from = line * length - phase;
        int begin = from + 1024 * (item % parts), end = begin + 1024 < from + length ? begin + 1024 : from + length;
        begin = begin < i0 ? i0 : begin;
        end = end > i1 ? i1 : end;
        int sum = 0;
        if (item < items && begin < end)
#pragma unroll 4
            for (int k = levels.first(begin) + lane; k <= levels.last(end); k += width)
                sum = (int)__dp4a(levels.sizes(k, begin, end), 0x01010101u, (u32)sum);
        for (int by = width / 2; by; by >>= 1) sum += __shfl_xor_sync(FULL, sum, by);
        if (lane == 0 && sum) atomicAdd(&sums[line], sum);
    }
}

// The sums of blocks of a region that begins at a multiple of sixteen, four threads for each.
__device__ void add_blocks(const Team& team, const signed char* levels, u32 limit, int i0, int i1, int* sums) {
    for (int base = i0 / BLOCK * 4; 16 * base < i1; base += team.size) {
        const int unit = base + team.rank, i = 16 * unit;
        int sum = 0;
        if (i >= i0 && i < i1) {
            const Sixteen held = *(const Sixteen*)(levels + i);
            for (int q = 0; q < 4; ++q) {
                const int left = i1 - i - 4 * q;
                const u32 word = left >= 4 ? held.word[q] : left > 0 ? held.word[q] & 0xffffffffu >> 8 * (4 - left) : 0;
                sum = (int)__dp4a(magnitudes(word, limit), 0x01010101u, (u32)sum);
            }
        }
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        if (unit % 4 == 0 && sum) atomicAdd(&sums[unit / 4], sum);
    }
}

// The sums of columns: a thread stays in its column, or in four of them where rows begin at multiples of four. No sum of a slice has more than
// 16 bits.
__device__ void add_columns(const Team& team, const Fours& levels, const signed char* bytes, int window, const Region& g, int i0, int i1, int* sums) {
    const bool four = g.columns % 4 == 0 && (g.phase - levels.lead) % 4 == 0;
    const int wide = four ? g.columns / 4 : g.columns, begin = four ? levels.first(i0) : i0, end = four ? levels.last(i1) + 1 : i1;
    const int at = four ? (4 * begin - levels.lead + g.phase + g.columns) % g.columns / 4 : (g.phase + i0) % g.columns;
    const int narrow = team.size / wide * wide, step = narrow ? narrow : wide;
    for (int c = team.rank; c < step; c += team.size) {
        u32 even = 0, odd = 0;
#pragma unroll 4
        for (int i = begin + c; i < end; i += step) {
            const u32 sizes = four ? levels.sizes(i, i0, i1) : magnitude_of(bytes[i], window);
            even += sizes & 0xff00ffu;
            odd += sizes >> 8 & 0xff00ffu;
        }
        const int column = (at + c) % wide * (four ? 4 : 1);
        for (int k = 0; k < 4; ++k) {
            const u32 sum = (k & 1 ? odd : even) >> 8 * (k & 2) & 0xffff;
            if (sum) atomicAdd(&sums[(column + k) / g.group], (int)sum);
        }
    }
}

// The sums of rows and of columns where all consist of units of sixteen coordinates, no more in a row than there are threads: a thread stays in
// its columns. `room` has a place for each column, if the team is a block. No sum of a slice has more than 16 bits.
__device__ void add_units(const Team& team, const signed char* levels, u32 limit, const Region& g, int i0, int i1, int* sums, int* room) {
    const int wide = g.columns / 16, narrow = team.size / wide * wide, unit = team.rank % wide, own = team.rank / wide;
    // So many threads side by side have units of one row.
    const int group = wide & 31 ? wide & -wide : 32, last = (g.phase + i1 - 1) / g.columns;
    u32 even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int base = (g.phase + i0) / g.columns; base <= last; base += narrow / wide) {
        const int line = base + own, i = line * g.columns - g.phase + 16 * unit;
        int sum = 0;
        if (team.rank < narrow && i >= i0 && i < i1) {
            const Sixteen held = *(const Sixteen*)(levels + i);
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const u32 sizes = magnitudes(held.word[q], limit);
                sum = (int)__dp4a(sizes, 0x01010101u, (u32)sum);
                even[q] += sizes & 0xff00ffu;
                odd[q] += sizes >> 8 & 0xff00ffu;
            }
        }
        for (int by = group / 2; by; by >>= 1) sum += __shfl_xor_sync(FULL, sum, by);
        if (team.rank % group == 0 && sum) atomicAdd(&sums[line], sum);
    }
    int* const across = sums + g.rows;
    if (team.size > 32) {
        for (int k = team.rank; k < g.columns; k += team.size) room[k] = 0;
        __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        const u32 sum = (k & 1 ? odd : even)[k / 4] >> 8 * (k & 2) & 0xffff;
        if (sum) atomicAdd(team.size > 32 ? &room[k * wide + unit] : &across[(16 * unit + k) / g.group], (int)sum);
    }
    if (team.size == 32) return;
    __syncthreads();
    for (int c = team.rank; c < g.columns; c += team.size)
        if (room[c % 16 * wide + c / 16]) atomicAdd(&across[c / g.group], room[c % 16 * wide + c / 16]);
    __syncthreads();
}

// Blocks, `share` of them for each segment, add up magnitudes by rows and columns, or by blocks where there are few rows.
extern "C" __global__ void classes_sums(
    i64 n, i64 share, const signed char* levels, const i64* segments, const i64* regions, const i64* firsts, int* sums, const i64* result
) {
    const i64 s = blockIdx.x / share, size = segment_length(n, s);
    const i64* d = segments + s * SEGMENT_PLACES;
    if (!coded_segment(d, size, result)) return;
    __shared__ int room[16 * 256];
    int* const near_room = room;
    const int window = (int)d[WINDOW];
    const Slice slice = slice_of(s * SEGMENT, size, blockIdx.x % share, share);
    each_part(regions, firsts, s, slice.from, slice.to, [=](const Team& team, i64, const Region& g, int i0, int i1) {
        const Fours fours(levels, g, window);
        if (g.count <= BLOCK || g.rows < FEW_ROWS) {
            if (g.start % 16) return add_lines(team, fours, 0, BLOCK, i0, i1, sums + g.room);
            return add_blocks(team, levels + g.start, fours.limit, i0, i1, sums + g.room);
        }
        if (g.columns % 16 == 0 && g.columns / 16 <= team.size && !((g.start - g.phase | g.start + i0 | g.start + i1) & 15))
            return add_units(team, levels + g.start, fours.limit, g, i0, i1, sums + g.room, near_room);
        add_lines(team, fours, g.phase, g.columns, i0, i1, sums + g.room);
        add_columns(team, fours, levels + g.start, window, g, i0, i1, sums + g.room + g.rows);
    });
}

// A block for each segment describes its regions: mode, base and octaves, which are listed with OCTAVES added for columns; and says whether
// classes are worth counting.
extern "C" __global__ void classes_describe(
    i64 n, i64* segments, const i64* regions, const i64* firsts, const int* sums, u8* octaves, u8* symbols, i64* told, double* costs, int* side,
    const i64* result
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
    __syncthreads();
    // The octaves that are told, one after the other.
    u8* const listed = symbols + regions[first * REGION_PLACES + ROOM];
    each_part(regions, firsts, s, s * SEGMENT, s * SEGMENT + size, [=](const Team& team, i64 r, const Region& g, int, int) {
        const int mode = (int)told[r * TOLD_PLACES + FIELD] >> 5, lines = g.lines(mode), all = lines + g.across(mode);
        u8* to = listed + told[r * TOLD_PLACES + OCTAVES_AT];
        for (int k = team.rank; k < all; k += team.size) to[k] = (u8)(octaves[g.room + k] + (k < lines ? 0 : OCTAVES));
    });
    if (t < 2 * OCTAVES) side[s * 2 * OCTAVES + t] = side_counts[t];
    if (t) return;
    double cost = 0.0;
#pragma unroll 4
    for (i64 r = first; r < last; ++r) cost += costs[r] + 8.0;
    d[OCTAVES_OF] = number;
    // Behind all costs, the magnitudes.
    costs[firsts[segments_of(n)] + s] = all;
    d[CLASSES_OF] = cost < WORTH_COUNTING * bits_of(size, all);
}

// A block for each segment that is counted writes what tells its classes, but for which of them have tables.
extern "C" __global__ void __launch_bounds__(128) classes_octaves(
    i64 n, i64* segments, const i64* regions, const i64* firsts, const i64* told, const u8* symbols, const int* side, u16* words, i64* numbers,
    u32* states, u8* described, const i64* result
) {
    __shared__ OctavesRoom room;
    const i64 s = blockIdx.x, first = firsts[s], last = firsts[s + 1], place = regions[first * REGION_PLACES + ROOM];
    i64* d = segments + s * SEGMENT_PLACES;
    if (!coded_segment(d, segment_length(n, s), result) || !d[CLASSES_OF]) return;
    u8* to = described + description_at(first, place, s) + 2;
    for (i64 r = first + threadIdx.x; r < last; r += blockDim.x) to[r - first] = (u8)told[r * TOLD_PLACES + FIELD];
    const i64 bytes = write_octaves(
        symbols + place, d[OCTAVES_OF], side + s * 2 * OCTAVES, words + place, numbers + place / 8192 + 2 * s, states + place / 64 + 64 * s,
        to + last - first, room
    );
    if (threadIdx.x == 0) d[OCTAVES_OF] = bytes;
}

// Blocks, `share` of them for each segment, write the class of every coordinate, count symbols by class, and find the largest magnitude of a
// class, plus 1.
extern "C" __global__ void __launch_bounds__(256, 4) classes_count(
    i64 n, i64 share, const signed char* levels, const i64* segments, const i64* regions, const i64* firsts, const i64* told, const u8* octaves,
    u8* classes, int* counts, int* tops, const i64* result
) {
    __shared__ int held[CLASSES * 256];
    // By magnitude, and by class: those of a step have mostly different words.
    __shared__ u8 seen[128 * CLASSES];
    const i64 s = blockIdx.x / share, part = blockIdx.x % share, size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * SEGMENT_PLACES;
    if (!coded_segment(d, size, result) || !d[CLASSES_OF]) return;
    const int window = (int)d[WINDOW], alphabet = 2 * window + 1;
    const bool sampled = size >= EXACT;
    for (int k = threadIdx.x; k < CLASSES * alphabet; k += blockDim.x) held[k] = 0;
    for (int k = threadIdx.x; k < CLASSES * 128; k += blockDim.x) seen[k] = 0;
    __syncthreads();
    u8* const near_seen = seen;
    const Slice slice = slice_of(first, size, part, share);
    each_part(regions, firsts, s, slice.from, slice.to, [=](const Team& team, i64 r, const Region& g, int i0, int i1) {
        const signed char* own = levels + g.start;
        u8* place = classes + g.start;
        auto put = [=](int i, const Sixteen& mine, int from, int to) {
            Sixteen sizes = *(const Sixteen*)(own + i);
            put_sixteen(place + i, mine, from, to);
            for (int q = 0; q < 4; ++q) sizes.word[q] = magnitudes(sizes.word[q], (u32)window * 0x01010101u);
            if (to - from == 16 && mine.even()) {
                near_seen[largest(sizes) * CLASSES + mine.byte(0)] = 1;
                return;
            }
#pragma unroll
            for (int k = 0; k < 16; ++k)
                if (k >= from && k < to) near_seen[sizes.byte(k) * CLASSES + mine.byte(k)] = 1;
        };
        each_class(team, g, told[r * TOLD_PLACES + FIELD], octaves + g.room, i0, i1, [](u32 c) { return c; }, put);
    });
    __syncthreads();
    // Sixteen coordinates at a time; of a sample those of every eighth block of 64. Slices begin at multiples of 512.
    for (i64 j = threadIdx.x;; j += blockDim.x) {
        const i64 i = slice.from + 16 * (sampled ? j / 4 * 4 * COUNTED + j % 4 : j);
        if (i >= slice.to) break;
        const Sixteen held_levels = *(const Sixteen*)(levels + i), mine = *(const Sixteen*)(classes + i);
#pragma unroll
        for (int k = 0; k < 16; ++k)
            if (i + k < slice.to) atomicAdd(&held[mine.byte(k) * alphabet + symbol_of((signed char)held_levels.byte(k), window)], 1);
    }
    __syncthreads();
    for (int k = threadIdx.x; k < CLASSES * alphabet; k += blockDim.x)
        if (held[k]) atomicAdd(&counts[s * CLASSES * 256 + k], held[k]);
    for (int k = threadIdx.x; k < CLASSES * 128; k += blockDim.x)
        if (seen[k]) atomicMax(&tops[s * CLASSES + k % CLASSES], k / CLASSES + 1);
}

// A block for each segment that was counted: entropies and tables; and whether there are classes.
extern "C" __global__ void classes_decide(
    i64 n, i64 given, i64* segments, const i64* regions, const i64* firsts, const int* counts, const int* tops, u8* described, u8* tables,
    u32* codes, const i64* result
) {
    __shared__ union {
        double terms[CLASSES * 255];
        struct {
            Bench benches[WARPS];
            u8 bits[CLASSES * TABLE_BYTES];
        };
    } pool;
    __shared__ double lone[256], alone, together;
    __shared__ i64 totals[CLASSES], lengths[CLASSES];
    __shared__ int present[CLASSES], used[CLASSES];
    const i64 s = blockIdx.x, size = segment_length(n, s), first = firsts[s];
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
    __syncthreads();
    for (int k = warp; k < number; k += WARPS) {
        const int c = used[k], top = own_tops[c] - 1;
        auto counted = [=](int a) { return (i64)own[c * alphabet + a] + (sampled && magnitude_of(a - window, window) <= top); };
        u32* to = codes + (s * CLASSES + c) * 256;
        make_table(counted, alphabet, pool.benches[warp], pool.bits + k * TABLE_BYTES, lengths + k, present + k, to);
    }
    __syncthreads();
    const i64 described_bytes = 2 + firsts[s + 1] - first + d[OCTAVES_OF];
    i64 bits = 0;
    int most = 0;
    for (int k = 0; k < number; ++k) bits += lengths[k], most = (int)larger(most, present[k]);
    const bool worth = together + 8.0 * (double)(described_bytes + (bits + 7) / 8) < WORTH_SENDING * alone;
    if (worth) join_tables(pool.bits, TABLE_BYTES, lengths, number, tables + s * 8192);
    __syncthreads();
    if (t) return;
    d[CLASSES_OF] = worth ? described_bytes : 0;
    if (!worth) return;
    for (int k = 0; k < 2; ++k) described[description_at(first, regions[first * REGION_PLACES + ROOM], s) + k] = (u8)(mask >> 8 * k);
    d[KIND] = CLASSED_KIND;
    d[TABLES_OF] = (bits + 7) / 8;
    d[ONLY] = most;
    d[CHUNK_OF] = given ? given : 2.0 * together < (double)size ? LONG_CHUNK : USUAL_CHUNK;
}

// A warp for each chunk, four of them in a block, of a segment or of what is left of it. No chunk is shorter than 2^exponent symbols.
extern "C" __global__ void __launch_bounds__(128) classes_encode_chunks(
    i64 n, i64 exponent, const signed char* levels, const u8* classes, const i64* segments, const u32* codes, u16* words, i64* numbers, u32* states, const i64* result
) {
    __shared__ Code own[CLASSES * APART];
    const int fewer = (int)larger(0, SEGMENT_BITS - exponent - 2);
    const i64 s = smaller(blockIdx.x >> fewer, segments_of(n) - 1), c = 4 * (blockIdx.x - (s << fewer)), size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * SEGMENT_PLACES;
    if (result[RESULT_WRONG] != FINE || d[KIND] != CLASSED_KIND || d[ONLY] < 2) return;
    const int window = (int)d[WINDOW], alphabet = 2 * window + 1;
    const Layout l = layout_of(size, alphabet, d[CHUNK_OF]);
    if (c >= l.chunks) return;
    // By class, the code of every level that a byte holds.
#pragma unroll 8
    for (int k = threadIdx.x; k < CLASSES * 256; k += 128) {
        own[k / 256 * APART + k % 256] = code_of(codes[s * CLASSES * 256 + (k & ~255) + symbol_of((signed char)k, window)]);
    }
    __syncthreads();
    const i64 mine = c + own_number();
    if (mine >= l.chunks) return;
    const Code* near = own;
    auto symbol = [=](i64 i) { return (u32)symbol_of(levels[first + i], window); };
    const u8 *bytes = (const u8*)levels + first, *own_classes = classes + first;
    KEEP_TOGETHER(bytes);
    KEEP_TOGETHER(own_classes);
    auto load = [=](i64 i) { return Raw{bytes[(u32)i], own_classes[(u32)i]}; };
    auto look = [=](const Raw& r) { return near[r.context * APART + r.symbol]; };
    const i64 number = encode_chunk(l, mine, symbol, load, look, words + first, states + s * CHUNKS * 64);
    if ((threadIdx.x & 31) == 0) numbers[s * CHUNKS + mine] = number;
}
