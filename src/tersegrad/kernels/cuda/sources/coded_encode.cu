// What coding with one table has beside rans.cu: a look at levels as scale classes take them, at steps, and what the host is told.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "meaning.cuh"

// What is found of a segment: its largest magnitude, how many reach 15, 16, 31, 32 and 127, and how many blocks have looked.
enum { TOP, FROM_15, FROM_16, FROM_31, FROM_32, FROM_127, LOOKED, FOUND };
// What is found of steps.
enum { ANY, NOT_ONE, STEPS_FOUND };

// Levels of exponents are how far they lie below the largest, plus 1.
__device__ __forceinline__ int level_of(u32 byte, i64 means, i64 largest) {
    if (means == EXPONENTS) return byte ? (int)largest + 1 - (int)byte : 0;
    if (means == FOLDED) return byte & 1 ? -(int)(byte >> 1) : (int)(byte >> 1);
    return (signed char)byte;
}

// Blocks, `share` of them for each segment, make levels of bytes, which a byte may not hold; the last of a segment to be ready says what it is.
// Further blocks look at the steps: whether there is any but 0, and whether one is not a number.
extern "C" __global__ void __launch_bounds__(256) coded_look(
    const u8* bytes, i64 n, i64 share, i64 means, i64 exponent, const i64* head, signed char* levels, int* found, i64* segments, i64* result,
    const u8* steps, i64 number, int* steps_found
) {
    __shared__ int sums[FOUND];
    __shared__ bool last;
    const i64 looking = share * segments_of(n);
    const int t = threadIdx.x;
    if (blockIdx.x >= looking) {
        bool any = false, bad = false;
        for (i64 k = (blockIdx.x - looking) * blockDim.x + t; k < number; k += (gridDim.x - looking) * blockDim.x) {
            const u32 bits = load32(steps + 4 * k) & 0x7fffffffu;
            any |= bits != 0;
            bad |= bits >= 0x7f800000u;
        }
        if (any) steps_found[ANY] = 1;
        if (bad) steps_found[NOT_ONE] = 1;
        return;
    }
    const i64 s = blockIdx.x / share, size = segment_length(n, s), largest = head[LARGEST_OF];
    int* own = found + s * FOUND;
    if (t < FOUND) sums[t] = 0;
    __syncthreads();
    const Slice slice = slice_of(s * SEGMENT, size, blockIdx.x % share, share);
    int top = 0, counts[FOUND] = {};
    for (i64 i = slice.from + 4 * t; i < slice.to; i += 4 * blockDim.x) {
        u32 packed = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int level = i + k < slice.to ? level_of(bytes[i + k], means, largest) : 0, size = level < 0 ? -level : level;
            packed |= (u32)(size > 127 ? (level < 0 ? -127 : 127) & 255 : level & 255) << 8 * k;
            top = size > top ? size : top;
            if (size < 15) continue;
            counts[FROM_15] += 1, counts[FROM_16] += size >= 16, counts[FROM_31] += size >= 31, counts[FROM_32] += size >= 32;
            counts[FROM_127] += size >= 127;
        }
        *(u32*)(levels + i) = packed;
    }
    atomicMax(&sums[TOP], top);
    for (int k = FROM_15; k <= FROM_127; ++k)
        if (counts[k]) atomicAdd(&sums[k], counts[k]);
    __syncthreads();
    if (t == 0) {
        atomicMax(&own[TOP], sums[TOP]);
        for (int k = FROM_15; k <= FROM_127; ++k)
            if (sums[k]) atomicAdd(&own[k], sums[k]);
        __threadfence();
        last = atomicAdd(&own[LOOKED], 1) == share - 1;
    }
    __syncthreads();
    if (!last || t) return;
    __threadfence();
    int all[FOUND];
    for (int k = 0; k < LOOKED; ++k) all[k] = atomicAdd(&own[k], 0);
    // As for levels of Sparse Dithering (dither_segments.cu).
    const i64 few = size / 512;
    const int most = all[TOP], window = most <= 15 ? most : all[FROM_16] <= few ? 15 : most <= 31 ? most : all[FROM_32] <= few ? 31 : most < 127 ? most : 127;
    const int escapes = most <= window ? 0 : window == 15 ? all[FROM_15] : window == 31 ? all[FROM_31] : all[FROM_127];
    i64* d = segments + s * SEGMENT_PLACES;
    for (int k = 0; k < SEGMENT_PLACES; ++k) d[k] = 0;
    d[KIND] = most ? CODED_KIND : ZERO_KIND;
    d[WINDOW] = window;
    d[CHUNK_OF] = exponent;
    if (escapes > ESCAPES) result[RESULT_WRONG] = MANY_ESCAPES;
}

// The length, -1 where a byte means no symbol; how many segments have classes, -1 where escapes kept them from being looked for; then, of
// exponents, the least that is not 0 and the largest, else whether a step is not 0, and whether one is not a number. And how a message begins.
extern "C" __global__ void coded_told(
    i64 number, const i64* segments, const i64* result, const i64* head, i64 means, const int* steps_found, i64* told, u8* begin, i64 bytes
) {
    i64 classed = 0;
    for (i64 s = threadIdx.x; s < number; s += 32) classed += segments[s * SEGMENT_PLACES + KIND] == CLASSED_KIND;
    classed = warp_sum(classed);
    if (threadIdx.x) return;
    const bool exponents = means == EXPONENTS;
    told[0] = head[STATUS] == FINE ? head[LENGTH] : -1;
    told[1] = result[RESULT_WRONG] == FINE ? classed : -1;
    told[2] = exponents ? head[LEAST_OF] : steps_found[ANY];
    told[3] = exponents ? head[LARGEST_OF] : steps_found[NOT_ONE];
    for (i64 k = 0; k < bytes; ++k) begin[k] = k ? (u8)told[1 + k] : 0;
}
