// What encoding and decoding of Sparse Dithering share (spec/wire.md, 5.16).
#include "common.cuh"
#include "rans_chunks.cuh"

#define SEGMENT_BITS 18
#define SEGMENT ((i64)1 << SEGMENT_BITS)
#define SCALE_BLOCK ((i64)1 << 16)
#define SEGMENTS 0x80000000u
#define NON_FINITE 0x7fc00000u
#define HUGE_VALUE 0x7f7fffffu
// Places for the chunks of a segment, which has at most 24, and for escapes that are handled on the device.
#define CHUNKS 32
#define ESCAPES 8192
// Words for their planes: no code of a level below 2^26 takes more than 53 bits.
#define PLANE_WORDS (ESCAPES * 53 / 32 + 8)

// What is wrong with a message (its bytes, or that it has a form that these kernels do not know), and whether segments with too many escapes
// are left over; their ONLY is -1. OTHERS: a trellis-coded message has segments that these kernels do not know.
enum { WRONG, LEFT_OVER, OTHERS };
enum { ANOTHER = 3, MANY_ESCAPES = 4, NOT_FINITE = 5 };

// What comes of encoding; norm and error are float64.
enum { RESULT_LENGTH, RESULT_WRONG, RESULT_NORM, RESULT_ERROR };

// Kinds of segments, and what is known of one.
enum { ZERO_KIND, RAW_KIND, CODED_KIND, CLASSED_KIND };
enum { KIND, WINDOW, SCALES, AT, TAIL, END, FORM_OF, CHUNK_OF, TABLES_OF, ONLY, CLASSES_OF, OCTAVES_OF, SEGMENT_PLACES };

// Trellis codes: what more is known of a segment: the log2 of a run's length, the log2 of the number of its dither's classes, its scale as bits, that of
// still classes, and which classes are not still.
enum { RUN_OF = SEGMENT_PLACES, BITS_OF, SCALE_OF, STILL_SCALE, MOVING, TRELLIS_PLACES };

__device__ __forceinline__ bool has_levels(const i64* d) { return d[KIND] == CODED_KIND || d[KIND] == CLASSED_KIND; }

__device__ __forceinline__ i64 segments_of(i64 count) {
    return count == 0 ? 0 : count < SEGMENT ? 1 : (count + SEGMENT / 2) / SEGMENT;
}
__device__ __forceinline__ i64 segment_length(i64 count, i64 s) {
    return s + 1 < segments_of(count) ? SEGMENT : count - s * SEGMENT;
}

// A block finds where its segment begins and ends, in a message whose first `head` bytes are of no segment; whether that is in the message, and
// all segments fill it.
__device__ bool find_segment(const u8* data, i64 nbytes, i64 head, i64 number, i64 s, i64* begin, i64* end) {
    *begin = head, *end = nbytes;
    if (number == 1) return true;
    i64 before = 0, all = 0;
    if (head + 4 * number > nbytes) return false;
    for (i64 k = threadIdx.x; k < number; k += blockDim.x) {
        const i64 size = load32(data + head + 4 * k);
        before += k < s ? size : 0;
        all += size;
    }
    block_scan(before, &before);
    block_scan(all, &all);
    *begin = head + 4 * number + before;
    *end = *begin + load32(data + head + 4 * s);
    return head + 4 * number + all == nbytes;
}

// Blocks with a scale of their own that a segment has at most.
#define SCALES_MOST 8

__device__ __forceinline__ float scale_at(const u8* scales, i64 block) { return __uint_as_float(load32(scales + 4 * block)); }

// A level times the scale of its block, kept finite.
__device__ __forceinline__ float scaled(int level, float scale) {
    const u32 bits = __float_as_uint(__fmul_rn((float)level, scale));
    return __uint_as_float((bits & 0x7fffffffu) == 0x7f800000u ? (bits & 0x80000000u) | HUGE_VALUE : bits);
}

// Whether no level times one of these scales leaves the numbers of float32.
__device__ bool moderate(const float* scales, i64 number) {
    bool all = true;
    for (i64 k = 0; k < number; ++k) all &= fabsf(scales[k]) < 1.0e36f;
    return all;
}

// Values of a segment's symbols. The careful kind keeps them finite, and marks symbols at the ends of the window, which may be escapes, in a bitmap.
template <bool careful>
struct Values {
    float* out;
    const float* scales;
    u32* marks;
    int window;
    float scale;
    // Whether a symbol is 0 or the last.
    __device__ bool marked(u32 symbol) const { return symbol - 1 >= 2 * (u32)window - 1; }
    __device__ float value(u32 symbol, float scale) const {
        // The level by way of 2^23, which takes no conversion.
        const float level = __fsub_rn(__uint_as_float(0x4b000000u | symbol), (float)(8388608 + window));
        const float most = __uint_as_float(HUGE_VALUE), product = __fmul_rn(level, scale);
        return careful ? fminf(fmaxf(product, -most), most) : product;
    }
    __device__ void operator()(i64 i, u8 symbol) const {
        out[i] = value(symbol, scales[i >> 16]);
        if (careful && marked(symbol)) atomicOr(&marks[i >> 5], 1u << (i & 31));
    }
    // The symbols of the next steps, from i on, have one scale.
    __device__ void begin(i64 i) { scale = scales[i >> 16]; }
    // A warp's step of 64 symbols from i on.
    __device__ void step(i64 i, u32 a, u32 b) const {
        const int lane = threadIdx.x & 31;
        float* to = out + i + lane;
        to[0] = value(a, scale);
        to[32] = value(b, scale);
        if (!careful) return;
        // Most steps have none, and marks were cleared.
        if (!__ballot_sync(FULL, marked(a) || marked(b))) return;
        const u32 low = __ballot_sync(FULL, marked(a)), high = __ballot_sync(FULL, marked(b));
        if (lane < 2) marks[(i >> 5) + lane] = lane ? high : low;
    }
};

// A warp clears the marks of its chunk.
__device__ void clear_marks(u32* marks, const Layout& l, i64 c) {
    for (i64 k = c * l.size / 32 + (threadIdx.x & 31); 32 * k < c * l.size + l.length(c); k += 32) marks[k] = 0;
    __syncwarp();
}

// A warp reads the list of a segment's chunks, which fill the message up to `end`: where they begin, and their words. Whether it is right,
// as far as this thread saw.
__device__ bool chunk_places(const u8* data, i64 begin, i64 end, const Layout& l, i64* offsets, i64* words) {
    const int c = threadIdx.x & 31;
    const bool listed = begin + 4 * l.chunks <= end;
    i64 number = 0;
    bool good = listed;
    if (listed && c < l.chunks) {
        number = load32(data + begin + 4 * c);
        good = number <= l.coded(c);
    }
    const i64 bytes = c < l.chunks ? 4 * l.lanes + 2 * number : 0, upto = warp_scan(bytes);
    offsets[c] = begin + 4 * l.chunks + upto - bytes;
    words[c] = number;
    return good && (c < 31 || begin + 4 * l.chunks + upto == end);
}

// Pieces of sixteen bytes that a thread copies at once.
#define COPIED 4

// A block of at least 32 threads copies words to bytes of any alignment.
__device__ void copy_words(u8* to, const u16* from, i64 number) {
    const int t = threadIdx.x;
    const i64 bytes = 2 * number, lead = smaller(bytes, -(u64)to & 15), pieces = (bytes - lead) / 16, done = lead + 16 * pieces;
    auto byte = [=](i64 b) { return (u8)(from[b >> 1] >> 8 * (b & 1)); };
    const u64 begin = (u64)from + lead;
    const u32* base = (const u32*)(begin & ~(u64)3);
    const u32 shift = 8 * (begin & 3);
    Sixteen* whole = (Sixteen*)(to + lead);
    for (i64 k = t; k < pieces; k += COPIED * blockDim.x) {
        u32 w[COPIED][5];
#pragma unroll
        for (int a = 0; a < COPIED; ++a) {
            const i64 piece = k + a * blockDim.x;
#pragma unroll
            for (int q = 0; q < 5; ++q) w[a][q] = piece < pieces && (q < 4 || shift) ? base[4 * piece + q] : 0;
        }
#pragma unroll
        for (int a = 0; a < COPIED; ++a) {
            const i64 piece = k + a * blockDim.x;
            Sixteen held;
#pragma unroll
            for (int q = 0; q < 4; ++q) held.word[q] = __funnelshift_r(w[a][q], w[a][q + 1], shift);
            if (piece < pieces) whole[piece] = held;
        }
    }
    // What stands before and behind them, at most fifteen bytes each.
    const i64 b = t < 16 ? t : done + t - 16;
    if (t < 16 ? b < lead : b < bytes) to[b] = byte(b);
}

// A block folds two rows of a number for each segment, padded to a power of two; the sums are the first of each.
__device__ void fold_segments(double* sums, i64 number) {
    i64 half = 1;
    while (2 * half < number) half *= 2;
    for (i64 left = number; left > 1; left = half, half /= 2) {
        for (i64 k = threadIdx.x; k + half < left; k += blockDim.x) {
            sums[k] += sums[k + half];
            sums[number + k] += sums[number + k + half];
        }
        __syncthreads();
    }
}
