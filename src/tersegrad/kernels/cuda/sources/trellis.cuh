// What encoding and decoding of trellis codes share (spec/wire.md, 5.20 and 5.21). Segments have 64 lanes here: shorter ones are the host's.
#include "common.cuh"
#include "dither.cuh"
#include "dither_levels.cuh"
#include "philox.cuh"

#define LANES 64
// Bytes for the tables of a segment, of which there are at most 128.
#define TABLES_ROOM ((i64)1 << 15)
#define GRID 32
#define DITHER 13
#define WIDEST 64
#define MOST_BITS 3
// |x / step| from here on is not coded, without and with dither.
#define FAR_AWAY (1 << 25)
#define FAR_DITHERED (1 << 15)
#define PURPOSE 6
#define SIGN_PURPOSE 7
// Modes of messages.
enum { MODE_NORMAL, MODE_ZERO, MODE_NON_FINITE };
// A coordinate before its window is known, as a byte: the index kept within the widest window, plus that, and 128 times z0.
__device__ __forceinline__ int clipped(int a, int window) {
    const int odd = a & 1, least = odd - window, most = odd + window - 2;
    return a < least ? least : a > most ? most : a;
}
__device__ __forceinline__ u32 byte_of(int a, int z0) {
    // As clipped(a, WIDEST) + WIDEST: all bits but the lowest, which stays.
    const int half = (a >> 1) + WIDEST / 2, kept = half < 0 ? 0 : half < WIDEST ? half : WIDEST - 1;
    return (u32)(2 * kept + (a & 1)) | (u32)z0 << 7;
}
__device__ __forceinline__ int index_of(u32 byte) { return (int)(byte & 127) - WIDEST; }
__device__ __forceinline__ u32 trellis_symbol(u32 byte, int window) { return (u32)(clipped(index_of(byte), window) + window); }
// Whether a symbol is one of two at either end of a window: these are the ones that escapes belong to.
__device__ __forceinline__ bool at_end(u32 symbol, int window) { return symbol - 2 >= 2 * (u32)window - 4; }

// To nearest, ties to even; |v| is below 2^31.
__device__ __forceinline__ int nearest(float v) { return __float2int_rn(v); }

// The integer of a label, which is its remainder by 4, nearest to y / GRID.
__device__ __forceinline__ int integer_of(int y, int label) { return 4 * ((y - GRID * label + 2 * GRID) >> 7) + label; }

// For z0: the distance t between dither and integer in 2^-13 of a step, and (t + u) / 2^13.
__device__ __forceinline__ int distance_of(int u, int z0) {
    return (((z0 << DITHER) - u + (1 << DITHER)) & ((2 << DITHER) - 1)) - (1 << DITHER);
}
__device__ __forceinline__ int fine_class(int t) {
    const int size = (t < 0 ? -t : t) << MOST_BITS >> DITHER;
    return size < (1 << MOST_BITS) ? size : (1 << MOST_BITS) - 1;
}
// z1 of a symbol (or index) with dither.
__device__ __forceinline__ int flip_of(int t, int u) { return ((t + u) >> (DITHER + 1)) & 1; }

__device__ __forceinline__ int dither_of(const Draws& draws, i64 i) {
    u32 w[4];
    philox(draws, (u64)i >> 3, PURPOSE, w);
    return (int)(w[(i & 7) >> 1] >> 16 * (i & 1) & 0x7fff);
}
// The sign of the run that starts at coordinate j.
__device__ __forceinline__ int sign_of(const Draws& draws, i64 j) {
    u32 w[4];
    const i64 i = j >> 14;
    philox(draws, (u64)i >> 3, SIGN_PURPOSE, w);
    return w[(i & 7) >> 1] >> 16 * (i & 1) & 1 ? -1 : 1;
}

// y of a coordinate with dither u, and the index of the integer of a label.
__device__ __forceinline__ int dithered_y(float scaled, int sign, int u) { return (sign * nearest(scaled) + u + 128) >> (DITHER - 5); }
__device__ __forceinline__ int dithered_index(int n, int u, int t) {
    const int m = ((n << DITHER) - u - t) >> (DITHER + 1);
    return t >= 0 ? m : -m;
}

// Scale classes of segments, where `scalars` says that they have some. Of a class: its first table | whether it is still << 8 | what rounding adds
// there << 16.
#define CLASS_MOST 16
struct Classed {
    const u8* classes;
    const u32* info;
    const i64* scalars;
    __device__ bool has(i64 s) const { return scalars[s * SEGMENT_PLACES + KIND] == CLASSED_KIND; }
    __device__ u32 stills(i64 s) const {
        u32 mask = 0;
        for (int c = 0; c < CLASS_MOST; ++c) mask |= (info[s * CLASS_MOST + c] >> 8 & 1) << c;
        return mask;
    }
    // The index of a coordinate of a still class, of which this is told.
    __device__ static int still_of(u32 told, int y) {
        const int size = ((y < 0 ? -y : y) + (int)(told >> 16)) >> 6;
        return y < 0 ? -size : size;
    }
    __device__ int still(i64 s, int c, int y) const { return still_of(info[s * CLASS_MOST + c], y); }
};

// What the kernels of an encoder know of the numbers: x times `scale` is in units of 1/32 or, with dither, 2^-13 of a step.
struct Given {
    const float* x;
    i64 n, run;
    float scale, limit;
    bool drawn;
    Draws draws;
    // The index of coordinate i, whose byte is known.
    __device__ int exact(i64 i, u32 byte) const {
        const int z0 = (int)byte >> 7, odd = index_of(byte) & 1;
        if (!drawn) return integer_of(nearest(__fmul_rn(x[i], scale)), z0 + 2 * odd) >> 1;
        const int u = dither_of(draws, i), t = distance_of(u, z0);
        // Runs begin anew in each segment, whose lengths they divide.
        const int y = dithered_y(__fmul_rn(x[i], scale), sign_of(draws, i >> run << run), u);
        return dithered_index(integer_of(y, z0 + 2 * (odd ^ flip_of(t, u))), u, t);
    }
};
// Where the step lies on the device, 0 says that there is nothing left to do.
__device__ __forceinline__ bool ended(const double* there) { return there && *there == 0; }
// The step is what lies `there`, or `step`.
__device__ __forceinline__ float step_of(float step, const double* there) { return there ? (float)*there : step; }
__device__ Given given_of(const float* x, i64 n, i64 run, float step, const double* there, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1) {
    const float inverse = 1.0f / step_of(step, there);
    Given made = {x, n, run, __fmul_rn(inverse, drawn ? 8192.0f : 32.0f), drawn ? 268435456.0f : 1073741824.0f, drawn != 0,
                  {(u32)step_word, (u32)who, (u32)k0, (u32)k1}};
    return made;
}

// The segment of a coordinate.
__device__ __forceinline__ i64 segment_of(i64 n, i64 i) { return smaller(i / SEGMENT, segments_of(n) - 1); }

// Of blocks for the chunks of all segments, `together` of them in one: the segment of this one, and its first chunk. Chunks have 2^exponent symbols or more.
struct Chunks {
    i64 s, c;
};
__device__ __forceinline__ Chunks chunks_of(i64 n, i64 exponent, i64 together) {
    const i64 each = larger((SEGMENT >> exponent) / together, 1), s = smaller(blockIdx.x / each, segments_of(n) - 1);
    return {s, (blockIdx.x - s * each) * together};
}

// What is known of the indices of a segment: the largest a' (a + 1, or -a), how many are above 14 and 30, the largest |y|, and whether one of
// the numbers is too large.
enum { TOP_OF, OVER_14, OVER_30, HEIGHT, TOO_FAR, KNOWN_PLACES };

// A block joins the tables of a segment, and its first thread notes their length and the most symbols that one of them has.
__device__ void close_tables(const u8* bits, const i64* lengths, const int* present, int number, u8* out, i64* d) {
    const i64 length = join_tables(bits, TABLE_BYTES, lengths, number, out);
    if (threadIdx.x) return;
    i64 most = 0;
    for (int k = 0; k < number; ++k) most = larger(most, present[k]);
    d[TABLES_OF] = length;
    d[ONLY] = most;
}
