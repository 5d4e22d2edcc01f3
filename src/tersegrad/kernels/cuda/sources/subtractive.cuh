// Subtractive dithering (spec/wire.md, 5.18): what is drawn for a coordinate, and what is known of a message. Parts are the segments of 5.16,
// whether or not they share a step; those whose step is zero have no symbols.
#include "common.cuh"
#include "philox.cuh"
#include "dither.cuh"

#define DITHER_PURPOSE 1
#define FOLDED 32768
// Rows of bins, near: those of one level or symbol lie in different banks.
#define BYTE_ROW 260
#define WORD_ROW 257
#define FINEST 4
#define DEEPEST 8
#define CLASSED_WINDOW 128
// Tables are told for at most so many bins, or classes and octaves.
#define BINS 16
#define TABLES_MOST 128
#define LEVEL_LIMIT ((i64)1 << 30)

// What is known of a message. SYMBOLS: how many symbols there are, of LIVE parts. FINENESS: bits of |U|, or octaves that are told apart.
// NAMES: the table of each class, four bits for each. BODY: where the rANS block begins.
enum {
    MESSAGE_LENGTH, STATUS_OF, SYMBOLS, LIVE, LARGEST, ABOVE, ABOVE_LAST = ABOVE + 3, WINDOW_WORD, WITH_CLASSES, FINENESS, NUMBER, EXPONENT, NAMES,
    CLASS_NUMBER, SIDE_BYTES, BODY, FORM_WORD, TABLE_BYTES_OF, MORE_THAN_ONE, TAIL_BYTES, ARRIVED, STATE_PLACES
};
// What else may be wrong with a vector than that it is not finite.
enum { ALL_ZERO = 6, TOO_LARGE_TO_CODE = 7 };

__device__ __forceinline__ i64 part_of(i64 n, i64 i) { return smaller(i / SEGMENT, segments_of(n) - 1); }

// The draws of eight coordinates from 8 `index` on.
struct Drawn {
    u32 words[4];
    __device__ Drawn(const Draws& draws, i64 index) { philox(draws, (u64)index, DITHER_PURPOSE, words); }
    __device__ int operator()(int k) const { return (int)(words[k >> 1] >> 16 * (k & 1) & 0xffff); }
};

// The magnitude of the dither, in 15 bits; its finest class; and its octave.
__device__ __forceinline__ int size_of_draw(int u) { return u >= FOLDED ? u - FOLDED : FOLDED - 1 - u; }
__device__ __forceinline__ int bin_of(int size) { return size >> 11; }
__device__ __forceinline__ int octave_of(int size) {
    const int octave = __clz(FOLDED - 1 - size) - 17;
    return octave < DEEPEST ? octave : DEEPEST - 1;
}

// The folded level of x, or 0 where it is too large to be coded.
__device__ __forceinline__ int folded_level(float x, float inverse, int u, bool* large) {
    const float y = __fmul_rn(x, inverse), size = fabsf(y);
    *large = !(size < 1073741824.0f);
    if (*large) return 0;
    const float fixed = __fmul_rn(y, 65536.0f);
    // Adding 1.5 * 2^23 to a number below 2^22 rounds it to nearest.
    const float shifter = 12582912.0f;
    const int near = (int)(__float_as_uint(__fadd_rn(fixed, shifter)) - __float_as_uint(shifter));
    const int q = size < 64.0f ? near + u >> 16 : (int)((i64)rintf(fixed) + u >> 16);
    return u >= FOLDED ? q : -q;
}

// The value of a folded level, so many times; `Wide` holds 2^17 times the level.
template <class Wide>
__device__ __forceinline__ float weighted(int level, int u, float step, float weight) {
    const Wide q = u >= FOLDED ? level : -(Wide)level;
    const float most = __uint_as_float(HUGE_VALUE);
    const float value = __fmul_rn(__fmul_rn((float)(q * ((Wide)1 << 17) - 2 * u + 65535), 7.62939453125e-06f), step);
    return __fmul_rn(fminf(fmaxf(value, -most), most), weight);
}

// Whether nothing is wrong so far, for all threads of a block alike: others may find something meanwhile.
__device__ __forceinline__ bool goes_on(const i64* state) {
    __shared__ bool fine;
    if (threadIdx.x == 0) fine = state[STATUS_OF] == FINE;
    __syncthreads();
    return fine;
}
