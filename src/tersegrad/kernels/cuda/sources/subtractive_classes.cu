// Subtractive dithering: whether its symbols have scale classes, and which tables take the fewest bits (spec/wire.md, 4.11 and 5.18).
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "subtractive.cuh"
#include "subtractive_counts.cuh"
#include "dither_levels.cuh"
#include "classes.cuh"
#include "classes_estimate.cuh"
#include "classes_octaves.cuh"

#define WORTH_COUNTING 0.98
#define WORTH_SENDING 0.99
#define SPARSE 0.5
#define EXACT ((i64)1 << 16)
#define LONG_CHUNK 18
// About the bits of a table's entry and of its frame.
#define ENTRY 5.0
#define FRAME 30.0
// Levels up to this one are counted near.
#define NEAR_LEVELS 23

// One block: whether classes of all live parts together are worth counting; if so what tells them, but for which of them have tables.
extern "C" __global__ void __launch_bounds__(512) subtractive_octaves(
    i64 n, i64* parts, const i64* regions, const i64* firsts, const i64* told, const double* costs, const u8* listed, const int* side_counts,
    u8* octaves, u16* words, i64* numbers, u32* states, u8* side, i64* state
) {
    __shared__ OctavesRoom room;
    __shared__ double batch[512];
    __shared__ int counts[2 * OCTAVES];
    __shared__ bool worth;
    if (state[STATUS_OF] != FINE) return;
    const i64 number = segments_of(n), regions_number = firsts[number];
    i64 magnitudes = 0, all, told_regions = 0, here;
    for (i64 p = threadIdx.x; p < number; p += blockDim.x)
        if (parts[p * SEGMENT_PLACES + KIND] == CODED_KIND) magnitudes += (i64)costs[regions_number + p];
    block_scan(magnitudes, &all);
    double cost = 0.0;
    for (i64 base = 0; base < regions_number; base += blockDim.x) {
        const i64 r = base + threadIdx.x;
        const bool live = r < regions_number && parts[part_of(n, regions[r * REGION_PLACES + START]) * SEGMENT_PLACES + KIND] == CODED_KIND;
        batch[threadIdx.x] = live ? costs[r] + 8.0 : 0.0;
        const i64 rank = told_regions + block_scan(live, &here);
        told_regions += here;
        if (live) side[2 + rank] = (u8)told[r * TOLD_PLACES + FIELD];
        if (threadIdx.x == 0)
            for (int k = 0; k < smaller(blockDim.x, regions_number - base); ++k) cost += batch[k];
        __syncthreads();
    }
    if (threadIdx.x == 0) worth = cost < WORTH_COUNTING * bits_of(state[SYMBOLS], all);
    if (threadIdx.x < 2 * OCTAVES) counts[threadIdx.x] = 0;
    __syncthreads();
    for (i64 p = threadIdx.x; p < number; p += blockDim.x) parts[p * SEGMENT_PLACES + CLASSES_OF] = worth;
    if (!worth) return;
    i64 count = 0;
    for (i64 p = 0; p < number; ++p) {
        if (parts[p * SEGMENT_PLACES + KIND] != CODED_KIND) continue;
        const i64 own = parts[p * SEGMENT_PLACES + OCTAVES_OF];
        const u8* from = listed + regions[firsts[p] * REGION_PLACES + ROOM];
        for (i64 k = threadIdx.x; k < own; k += blockDim.x) octaves[count + k] = from[k];
        if (threadIdx.x < 2 * OCTAVES) counts[threadIdx.x] += side_counts[p * 2 * OCTAVES + threadIdx.x];
        count += own;
    }
    __syncthreads();
    const i64 bytes = write_octaves(octaves, count, counts, words, numbers, states, side + 2 + told_regions, room);
    if (threadIdx.x == 0) state[SIDE_BYTES] = 2 + told_regions + bytes;
}

// A block for each class adds up what live parts have counted of it.
extern "C" __global__ void __launch_bounds__(256) subtractive_class_counts(
    i64 n, const i64* parts, const int* counts, const int* tops, i64* sums, i64* largest, const i64* state
) {
    if (state[STATUS_OF] != FINE || !state[SIDE_BYTES]) return;
    const int c = blockIdx.x, alphabet = 2 * (int)state[WINDOW_WORD] + 1;
    i64 sum = 0, top = 0;
    for (i64 p = 0; p < segments_of(n); ++p) {
        if (parts[p * SEGMENT_PLACES + KIND] != CODED_KIND) continue;
        if (threadIdx.x < alphabet) sum += counts[p * CLASSES * 256 + c * alphabet + threadIdx.x];
        top = larger(top, tops[p * CLASSES + c]);
    }
    if (threadIdx.x < alphabet) sums[c * 256 + threadIdx.x] = sum;
    if (threadIdx.x == 0) largest[c] = top;
}

// One block, a warp for each class: whether classes are shorter than one table. Then each has its number, and the message says which there are.
extern "C" __global__ void __launch_bounds__(512) subtractive_classes(const i64* counts, const i64* tops, u8* side, i64* state) {
    __shared__ union {
        double terms[CLASSES * 255];
        struct {
            TableRoom rooms[CLASSES];
            short q[CLASSES * 256];
            u8 bits[CLASSES * TABLE_BYTES];
        };
    } pool;
    __shared__ double lone[256], alone, together;
    __shared__ i64 totals[CLASSES], lengths[CLASSES];
    if (state[STATUS_OF] != FINE || !state[SIDE_BYTES]) return;
    const int t = threadIdx.x, c = t >> 5, window = (int)state[WINDOW_WORD], alphabet = 2 * window + 1;
    const bool sampled = state[SYMBOLS] >= EXACT;
    i64 own = 0, all = 0, lone_count = 0;
    for (int k = t & 31; k < alphabet; k += 32) own += counts[c * 256 + k];
    own = warp_sum(own);
    if ((t & 31) == 0) totals[c] = own, lengths[c] = 0;
    __syncthreads();
    for (int k = 0; k < CLASSES; ++k) {
        all += totals[k];
        if (t < alphabet) lone_count += counts[k * 256 + t];
    }
    if (t < alphabet) lone[t] = shares_of(lone_count, all);
    for (int k = t; k < CLASSES * alphabet; k += blockDim.x) pool.terms[k] = shares_of(counts[k / alphabet * 256 + k % alphabet], totals[k / alphabet]);
    __syncthreads();
    const double share = (double)state[SYMBOLS] / (double)all;
    if (t == 0) together = share * added(pool.terms, CLASSES * alphabet);
    if (t == 32) alone = share * added(lone, alphabet);
    __syncthreads();
    const i64 top = tops[c] - 1;
    auto counted = [=](int a) { return counts[c * 256 + a] + (sampled && larger(a - window, window - a) <= top); };
    if (top >= 0) {
        const i64 length = write_table(counted, alphabet, pool.q + c * 256, pool.bits + c * TABLE_BYTES, pool.rooms[c]);
        if ((t & 31) == 0) lengths[c] = length;
    }
    __syncthreads();
    if (t) return;
    i64 bits = 0, names = 0, number = 0;
    int mask = 0;
    for (int k = 0; k < CLASSES; ++k) {
        bits += lengths[k];
        if (!tops[k]) continue;
        names |= number++ << 4 * k;
        mask |= 1 << k;
    }
    side[0] = (u8)mask, side[1] = (u8)(mask >> 8);
    state[NAMES] = names;
    state[CLASS_NUMBER] = number;
    state[WITH_CLASSES] = together + 8.0 * (double)(state[SIDE_BYTES] + (bits + 7) / 8) < WORTH_SENDING * alone;
}

// Counts of all symbols by class and octave.
extern "C" __global__ void __launch_bounds__(256) subtractive_fine(
    i64 n, const u8* levels, const u8* drawn, const u8* classes, const i64* parts, u64* fine, const i64* state
) {
    constexpr int wide = 2 * NEAR_LEVELS + 1;
    __shared__ u32 sums[TABLES_MOST * wide];
    if (state[STATUS_OF] != FINE || !state[WITH_CLASSES]) return;
    const int window = (int)state[WINDOW_WORD];
    for (int k = threadIdx.x; k < TABLES_MOST * wide; k += blockDim.x) sums[k] = 0;
    __syncthreads();
    for (i64 unit = (i64)blockIdx.x * blockDim.x + threadIdx.x; 16 * unit < n; unit += (i64)gridDim.x * blockDim.x) {
        if (parts[part_of(n, 16 * unit) * SEGMENT_PLACES + KIND] != CODED_KIND) continue;
        const Sixteen own = ((const Sixteen*)levels)[unit], kinds = ((const Sixteen*)drawn)[unit], of = ((const Sixteen*)classes)[unit];
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            if (16 * unit + k >= n) break;
            const int level = symbol_of((signed char)own.byte(k), window) - window, table = (int)(of.byte(k) * DEEPEST + (kinds.byte(k) >> 4));
            if (level >= -NEAR_LEVELS && level <= NEAR_LEVELS) atomicAdd(&sums[table * wide + level + NEAR_LEVELS], 1u);
            else atomicAdd(&fine[table * 256 + level + window], (u64)1);
        }
    }
    __syncthreads();
    for (int k = threadIdx.x; k < TABLES_MOST * wide; k += blockDim.x)
        if (sums[k]) atomicAdd(&fine[k / wide * 256 + k % wide - NEAR_LEVELS + window], (u64)sums[k]);
}

// A warp for each table that may be sent: its entropy, how many symbols occur, the bits that tell it, and what was counted.
extern "C" __global__ void __launch_bounds__(32) subtractive_rows(
    const u64* counts, const int* present, const u64* fine, double* entropies, i64* told, const i64* state
) {
    __shared__ TableRoom room;
    __shared__ u8 bits[TABLE_BYTES];
    __shared__ short q[256];
    __shared__ i64 row[256];
    const int r = blockIdx.x, k = r - BIN_ROWS;
    if (state[STATUS_OF] != FINE || (k >= 0 && (!state[WITH_CLASSES] || k % 16 == 7))) return;
    const Counted of = {counts, present, fine, state};
    const int level = bit_length((u64)r + 1) - 1, alphabet = of.alphabet();
    i64 total = 0, occur = 0;
    for (int a = threadIdx.x; a < alphabet; a += 32) {
        row[a] = k < 0 ? of.bins(level, r + 1 - (1 << level), a, true)
               : k % 16 < 8 ? of.octaves(k / 16, k % 16, k % 16 + 1, a)
                            : of.octaves(k / 16, k % 16 - 8, DEEPEST, a);
        total += row[a];
        occur += row[a] > 0;
    }
    total = warp_sum(total);
    occur = warp_sum(occur);
    double entropy = 0.0;
    for (int a = threadIdx.x; a < alphabet; a += 32) entropy += shares_of(row[a], total);
    entropy = fold(entropy);
    __syncwarp();
    const i64* counted = row;
    const i64 length = write_table([=](int a) { return counted[a]; }, alphabet, q, bits, room);
    if (threadIdx.x) return;
    entropies[r] = entropy;
    told[3 * r] = occur, told[3 * r + 1] = length, told[3 * r + 2] = total;
}

// The tables that take the fewest bits: of bins of |U|, or of classes and octaves. `given`: the log2 of the length of chunks, 0 as suits them.
extern "C" __global__ void subtractive_plan(i64 given, i64 usual, const double* entropies, const i64* told, const i64* tops, i64* state) {
    if (threadIdx.x || state[STATUS_OF] != FINE) return;
    double best = 0.0, alone = 0.0;
    for (int level = 0; level <= FINEST; ++level) {
        double entropy = 0.0;
        i64 occur = 0, bits = 0;
        for (int r = (1 << level) - 1; r < (2 << level) - 1; ++r) entropy += entropies[r], occur += told[3 * r], bits += told[3 * r + 1];
        const double cost = entropy + ENTRY * (double)occur + FRAME * (double)(1 << level);
        if (level && cost >= best) continue;
        best = cost;
        alone = entropy * (double)state[SYMBOLS] / (double)told[2] + 8.0 * (double)((bits + 7) / 8);
        state[FINENESS] = level;
    }
    state[NUMBER] = (i64)1 << state[FINENESS];
    state[EXPONENT] = given ? given : usual;
    if (!state[WITH_CLASSES]) return;
    double least = 0.0;
    i64 kept = 0;
    for (int k = 1; k <= DEEPEST; ++k) {
        double entropy = 0.0;
        i64 bits = 0;
        for (int c = 0; c < CLASSES; ++c) {
            if (!tops[c]) continue;
            const int row = BIN_ROWS + 16 * c;
            for (int o = 0; o < k; ++o) {
                const int r = row + (o < k - 1 ? o : 7 + k);
                entropy += entropies[r], bits += told[3 * r + 1];
            }
        }
        const double cost = entropy + 8.0 * (double)((bits + 7) / 8);
        if (kept && cost >= least) continue;
        least = cost, kept = k;
    }
    state[WITH_CLASSES] = least + 8.0 * (double)state[SIDE_BYTES] < WORTH_SENDING * alone;
    if (!state[WITH_CLASSES]) return;
    state[FINENESS] = kept;
    state[NUMBER] = kept * state[CLASS_NUMBER];
    if (!given && least < SPARSE * (double)state[SYMBOLS]) state[EXPONENT] = LONG_CHUNK;
}
