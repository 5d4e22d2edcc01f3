// Trellis codes by scale classes, with dither (spec/wire.md, 5.21): symbols are counted by class and by their distance to the dither; segments decide
// how many classes of distances pay, and whether classes do; chunks are coded with a table for each pair.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "classes_estimate.cuh"
#include "classes_octaves.cuh"
#include "trellis.cuh"

#define FINE_CLASSES (1 << MOST_BITS)
#define TABLES_MOST (FINE_CLASSES * CLASSES)
#define CELLS_MOST (TABLES_MOST * 128)
#define BENCHES 8
// Cells that a block has near.
#define NEAR_CELLS 4096
#define WORTH_SENDING 0.99
#define USUAL_CHUNK 16
#define LONG_CHUNK 18

// Whether a segment may have classes.
__device__ __forceinline__ bool is_searched(const i64* d, const i64* levels) {
    return d[KIND] == CODED_KIND && levels[KIND] == CLASSED_KIND;
}

// A warp for each segment numbers the classes that have tables.
extern "C" __global__ void __launch_bounds__(32) trellis_dithered_names(const int* tops, u32* info) {
    const int c = threadIdx.x;
    const bool used = c < CLASSES && tops[blockIdx.x * CLASSES + c];
    const u32 mask = __ballot_sync(FULL, used);
    if (c < CLASSES) info[blockIdx.x * CLASSES + c] = __popc(mask & ((1u << c) - 1));
}

// Blocks, `share` of them for each segment, count symbols by class and distance.
extern "C" __global__ void trellis_dithered_count(
    i64 n, i64 share, const u8* bytes, const u8* contexts, const u8* classes, const u32* info, const i64* scalars, const i64* segments, int* counts
) {
    __shared__ int held[NEAR_CELLS];
    __shared__ bool go;
    const i64 s = blockIdx.x / share, size = segment_length(n, s);
    const i64* d = segments + s * TRELLIS_PLACES;
    if (threadIdx.x == 0) go = is_searched(d, scalars + s * SEGMENT_PLACES);
    __syncthreads();
    if (!go) return;
    const int window = (int)d[WINDOW], alphabet = 2 * window, cells = TABLES_MOST * alphabet;
    const bool near = cells <= NEAR_CELLS;
    int* const own = counts + s * CELLS_MOST;
    for (int k = threadIdx.x; near && k < cells; k += blockDim.x) held[k] = 0;
    __syncthreads();
    const Slice slice = slice_of(s * SEGMENT, size, blockIdx.x % share, share);
    for (i64 i = slice.from + threadIdx.x; i < slice.to; i += blockDim.x) {
        const int table = (int)info[s * CLASSES + classes[i]] * FINE_CLASSES + contexts[i];
        const int cell = table * alphabet + (int)trellis_symbol(bytes[i], window);
        if (near) atomicAdd(&held[cell], 1);
        else atomicAdd(&own[cell], 1);
    }
    __syncthreads();
    for (int k = threadIdx.x; near && k < cells; k += blockDim.x)
        if (held[k]) atomicAdd(&own[k], held[k]);
}

// What a block that decides shares.
struct Deciding {
    Bench benches[BENCHES];
    double terms[512];
    i64 lengths[TABLES_MOST], totals[TABLES_MOST];
    int present[TABLES_MOST];
    double sum;
    i64 bits;
};

// A block makes `number` tables, count(table, symbol) being their counts: how many bits they and the symbols take.
template <class Count>
__device__ double cost_of(Count count, int number, int alphabet, u8* bits, u32* codes, Deciding& in) {
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    __syncthreads();
    for (int k = warp; warp < BENCHES && k < number; k += BENCHES) {
        i64 total = 0;
        for (int a = lane; a < alphabet; a += 32) total += count(k, a);
        total = warp_sum(total);
        if (lane == 0) in.totals[k] = total;
        make_table(
            [=](int a) { return count(k, a); }, alphabet, in.benches[warp], bits + k * TABLE_BYTES, in.lengths + k, in.present + k, codes + k * 128
        );
    }
    if (t == 0) in.sum = 0.0, in.bits = 0;
    __syncthreads();
    for (int base = 0; base < number * alphabet; base += blockDim.x) {
        const int cell = base + t, k = cell / alphabet;
        in.terms[t] = cell < number * alphabet ? shares_of(count(k, cell % alphabet), in.totals[k]) : 0.0;
        __syncthreads();
        // Added up in order.
        if (t == 0)
            for (int j = 0; j < blockDim.x; ++j) in.sum += in.terms[j];
        __syncthreads();
    }
    if (t == 0)
        for (int k = 0; k < number; ++k) in.bits += in.lengths[k];
    __syncthreads();
    return in.sum + 8.0 * (double)((in.bits + 7) / 8);
}

// A block of 512 threads for each segment: how many classes of distances, and whether there are scale classes. `bits` and `codes` have room for the
// tables of a segment.
extern "C" __global__ void __launch_bounds__(512) trellis_dithered_decide(
    i64 n, i64 given, const int* counts, const int* tops, const i64* scalars, i64* segments, u8* bits, u8* tables, u32* codes
) {
    __shared__ Deciding in;
    __shared__ bool go;
    const i64 s = blockIdx.x, size = segment_length(n, s), *levels = scalars + s * SEGMENT_PLACES;
    i64* d = segments + s * TRELLIS_PLACES;
    if (threadIdx.x == 0) go = is_searched(d, levels);
    __syncthreads();
    if (!go) return;
    int used = 0;
    for (int c = 0; c < CLASSES; ++c) used += tops[s * CLASSES + c] > 0;
    const int alphabet = 2 * (int)d[WINDOW], usual = (int)d[BITS_OF];
    const int* own = counts + s * CELLS_MOST;
    u8* const own_bits = bits + s * TABLES_MOST * TABLE_BYTES;
    u32* const own_codes = codes + s * CELLS_MOST;
    // With 2^b classes of distances.
    auto merged = [=](int b) {
        return [=](int k, int a) {
            const int each = FINE_CLASSES >> b;
            i64 sum = 0;
            for (int j = 0; j < each; ++j) sum += own[(k * each + j) * alphabet + a];
            return sum;
        };
    };
    const auto usually = merged(usual);
    const double alone = cost_of(
        [=](int k, int a) {
            i64 sum = 0;
            for (int c = 0; c < used; ++c) sum += usually((c << usual) + k, a);
            return sum;
        },
        1 << usual, alphabet, own_bits, own_codes, in
    );
    int best = 0;
    double least = 0.0;
    for (int b = 0; b <= MOST_BITS; ++b) {
        const double cost = cost_of(merged(b), used << b, alphabet, own_bits, own_codes, in);
        if (b == 0 || cost < least) least = cost, best = b;
    }
    if (!(least + 8.0 * (double)levels[CLASSES_OF] < WORTH_SENDING * alone)) return;
    cost_of(merged(best), used << best, alphabet, own_bits, own_codes, in);
    close_tables(own_bits, in.lengths, in.present, used << best, tables + s * TABLES_ROOM, d);
    if (threadIdx.x) return;
    d[KIND] = CLASSED_KIND;
    d[BITS_OF] = best;
    d[CLASSES_OF] = levels[CLASSES_OF];
    d[OCTAVES_OF] = used << best;
    d[CHUNK_OF] = given ? given : 2.0 * least < (double)size ? LONG_CHUNK : USUAL_CHUNK;
}

// A warp for each chunk of a segment with classes, four of them in a block.
extern "C" __global__ void __launch_bounds__(128) trellis_dithered_class_chunks(
    i64 n, i64 exponent, const u8* bytes, const u8* contexts, const u8* classes, const u32* info, const i64* segments, const u32* codes, u16* words, i64* numbers,
    u32* states
) {
    __shared__ Code own[NEAR_CELLS];
    __shared__ u32 names[CLASSES];
    const Chunks place = chunks_of(n, exponent, 4);
    const i64 s = place.s, c = place.c, size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * TRELLIS_PLACES;
    if (d[KIND] != CLASSED_KIND || d[ONLY] < 2) return;
    const int window = (int)d[WINDOW], bits = (int)d[BITS_OF], shift = MOST_BITS - bits;
    const u32 alphabet = 2 * (u32)window, cells = (u32)d[OCTAVES_OF] * alphabet;
    const Layout l = layout_of(size, alphabet, d[CHUNK_OF]);
    if (c >= l.chunks) return;
    const u32* far = codes + s * CELLS_MOST;
    const bool mine = cells <= NEAR_CELLS;
    for (u32 k = threadIdx.x; mine && k < cells; k += blockDim.x) own[k] = code_of(far[k / alphabet * 128 + k % alphabet]);
    if (threadIdx.x < CLASSES) names[threadIdx.x] = info[s * CLASSES + threadIdx.x];
    __syncthreads();
    const i64 chunk = c + (threadIdx.x >> 5);
    if (chunk >= l.chunks) return;
    const Code* near = own;
    const u32* known = names;
    const u8 *held = bytes + first, *distances = contexts + first, *kinds = classes + first;
    KEEP_TOGETHER(held);
    KEEP_TOGETHER(distances);
    KEEP_TOGETHER(kinds);
    auto symbol = [=](i64 i) { return trellis_symbol(held[i], window); };
    auto load = [=](i64 i) { return Raw{held[(u32)i], (u32)kinds[(u32)i] << 8 | distances[(u32)i]}; };
    auto encode = [&](auto code) {
        auto look = [=](const Raw& r) {
            return code(known[r.context >> 8] << bits | (r.context & 255) >> shift, trellis_symbol(r.symbol, window));
        };
        return encode_chunk(l, chunk, symbol, load, look, words + first, states + s * CHUNKS * 64);
    };
    const i64 number = mine ? encode([=](u32 table, u32 a) { return near[table * alphabet + a]; })
                            : encode([=](u32 table, u32 a) { return code_of(far[table * 128 + a]); });
    if ((threadIdx.x & 31) == 0) numbers[s * CHUNKS + chunk] = number;
}
