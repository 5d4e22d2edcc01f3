// Random points on the sphere (spec/wire.md, 5.19): norms in notches, the first word that is close enough, and its point.
#include "philox.cuh"

// What draws are for.
#define ROUNDING 0
#define CODEBOOK 4
#define SIGN 5
// The smallest norm that counts, and the k of those that do not.
#define TINY 1.1754943508222875e-38
#define LARGEST 3.4028234663852886e38f
#define NO_NORM (-2147483647 - 1)
#define NO_WORD (((i64)1 << 62))

// Draws of a purpose one after another, eight at a time.
struct Drawn {
    Draws of;
    u32 purpose;
    u32 held[4];
    i64 at;
    __device__ Drawn(const Draws& draws, u32 what) : of(draws), purpose(what), at(-1) {}
    __device__ u32 operator()(i64 i) {
        if (i >> 3 != at) philox(of, (u64)(at = i >> 3), purpose, held);
        const u32 word = held[(i & 7) / 2];
        return i & 1 ? word >> 16 : word & 0xffff;
    }
};

// ---- norms ----

// 2^(k / g), from the table of 2^(j / g).
__device__ __forceinline__ double power_of(const double* powers, i64 g, i64 k) {
    const i64 octave = k >= 0 ? k / g : -((g - 1 - k) / g);
    return __longlong_as_double(__double_as_longlong(powers[k - octave * g]) + (octave << 52));
}

// `borders`: those between notches, or with draws the notches themselves, within an octave. k of each norm, and what it stands for.
extern "C" __global__ void sphere_norms(
    const double* square, i64 count, i64 g, const double* powers, const double* borders, i64 drawn, i64 step, i64 who, i64 k0, i64 k1, int* found,
    double* sent
) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const double norm = sqrt(square[i]);
    if (!(norm >= TINY && norm < __longlong_as_double(0x7ff0000000000000ll))) {
        found[i] = NO_NORM;
        sent[i] = 0.0;
        return;
    }
    const i64 bits = __double_as_longlong(norm), exponent = (bits >> 52) - 1023;
    const double part = __longlong_as_double((bits & 0xfffffffffffffll) | 0x3ff0000000000000ll);
    i64 k = g * exponent;
    for (i64 low = 0, high = g;;) {
        // The number of borders that it reaches.
        if (low == high) {
            k += low;
            break;
        }
        const i64 middle = (low + high) / 2;
        if (borders[middle] <= part) low = middle + 1;
        else high = middle;
    }
    if (drawn) {
        --k;
        Drawn draw({(u32)step, (u32)who, (u32)k0, (u32)k1}, ROUNDING);
        const double low = power_of(powers, g, k), high = power_of(powers, g, k + 1);
        k += ((i64)rint((norm - low) / (high - low) * 65536.0) + (i64)draw(i)) >> 16;
    }
    found[i] = (int)k;
    sent[i] = power_of(powers, g, k);
}

// ---- words ----

// The integers of a word: calls put(j, z) for the first d of them; the sum of their squares.
template <class Put>
__device__ __forceinline__ i64 word_of(const Draws& draws, const int* table, i64 number, i64 groups, i64 d, Put put) {
    i64 square = 0;
    for (i64 g = 0; g < groups && 8 * g < d; ++g) {
        u32 w[4];
        philox(draws, (u64)(number * groups + g), CODEBOOK, w);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            if (8 * g + k >= d) break;
            const int z = table[k & 1 ? w[k / 2] >> 16 : w[k / 2] & 0xffff];
            square += (i64)z * z;
            put(8 * g + k, z);
        }
    }
    return square;
}

// A thread per word: the first ones, of length one, each coordinate of all of them after another.
extern "C" __global__ void sphere_book(i64 count, i64 groups, i64 d, const int* table, i64 step, i64 who, i64 k0, i64 k1, float* book) {
    const Draws draws = {(u32)step, (u32)who, (u32)k0, (u32)k1};
    const i64 number = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    const i64 square = word_of(draws, table, number, groups, d, [=](i64 j, int z) { book[j * count + number] = (float)z; });
    const float length = sqrtf((float)square);
    for (i64 j = 0; j < d; ++j) book[j * count + number] /= length;
}

// Rows with their signs, and these divided by their norms. `start` below 0: no signs.
template <class Real>
__device__ void turned(const float* x, i64 rows, i64 d, i64 start, const double* square, const Draws& draws, float* flipped, Real* units) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * d) return;
    Drawn draw(draws, SIGN);
    const float v = start >= 0 && draw(start + i) & 1 ? -x[i] : x[i];
    flipped[i] = v;
    units[i] = (Real)((double)v / sqrt(square[i / d]));
}
extern "C" __global__ void sphere_turn_32(
    const float* x, i64 rows, i64 d, i64 start, const double* square, i64 step, i64 who, i64 k0, i64 k1, float* flipped, float* units
) {
    turned(x, rows, d, start, square, {(u32)step, (u32)who, (u32)k0, (u32)k1}, flipped, units);
}
extern "C" __global__ void sphere_turn_64(
    const float* x, i64 rows, i64 d, i64 start, const double* square, i64 step, i64 who, i64 k0, i64 k1, float* flipped, double* units
) {
    turned(x, rows, d, start, square, {(u32)step, (u32)who, (u32)k0, (u32)k1}, flipped, units);
}

// ---- the search ----

__device__ __forceinline__ float point_of(double factor, int z) {
    const float y = (float)(factor * (double)z);
    return y < -LARGEST ? -LARGEST : y > LARGEST ? LARGEST : y;
}

// Whether the point of a word is close enough to a row: what decides.
__device__ bool close_enough(
    const Draws& draws, const int* table, i64 number, i64 groups, i64 d, double scale, const float* row, double most
) {
    const i64 square = word_of(draws, table, number, groups, d, [](i64, int) {});
    const double factor = scale / sqrt((double)square);
    double total = 0.0;
    word_of(draws, table, number, groups, d, [&](i64 j, int z) {
        const double e = (double)point_of(factor, z) - (double)row[j];
        total += e * e;
    });
    return total <= most;
}

// `team` warps search for the first word of a row, each in turns of 32 words. The first `known` words lie in a book. What falls short of the
// least cosine by more than `margin` is not looked at closely: products of `Real` err by less.
template <class Real>
__device__ void searched(
    const float* flipped, const Real* units, i64 rows, i64 d, i64 groups, const double* scale, const double* square, double alpha, double margin,
    i64 limit, i64 team, i64 known, const float* book, const int* table, const Draws& draws, i64* found
) {
    const int lane = threadIdx.x & 31;
    const i64 warp = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32, row = warp / team;
    if (row >= rows || !(square[row] > 0.0 && square[row] < __longlong_as_double(0x7ff0000000000000ll))) return;
    const double size = sqrt(square[row]), reach = scale[row] / size, far = alpha * square[row];
    const Real least = (Real)((reach * reach + 1.0 - alpha) / (2.0 * reach) - margin);
    const Real* const unit = units + row * d;
    for (i64 base = 32 * (warp % team); base < limit; base += 32 * team) {
        // Others of the team may have found one before.
        if (team > 1 && __shfl_sync(FULL, *(volatile i64*)&found[row], 0) < base) return;
        const i64 number = base + lane;
        bool near;
        if (base + 32 <= known) {
            Real product = 0;
            for (i64 j = 0; j < d; ++j) product += unit[j] * (Real)book[j * known + number];
            near = product >= least;
        } else {
            Real product = 0;
            const i64 length = word_of(draws, table, number, groups, d, [&](i64 j, int z) { product += unit[j] * (Real)z; });
            near = product >= least * (Real)sqrt((double)length);
        }
        if (number >= limit) near = false;
        if (!__ballot_sync(FULL, near)) continue;
        const bool good = near && close_enough(draws, table, number, groups, d, scale[row], flipped + row * d, far);
        const u32 votes = __ballot_sync(FULL, good);
        if (!votes) continue;
        if (lane == 0) atomicMin(&found[row], base + __ffs((int)votes) - 1);
        return;
    }
}

extern "C" __global__ void __launch_bounds__(256) sphere_search_32(
    const float* flipped, const float* units, i64 rows, i64 d, i64 groups, const double* scale, const double* square, double alpha, double margin,
    i64 limit, i64 team, i64 known, const float* book, const int* table, i64 step, i64 who, i64 k0, i64 k1, i64* found
) {
    const Draws draws = {(u32)step, (u32)who, (u32)k0, (u32)k1};
    searched(flipped, units, rows, d, groups, scale, square, alpha, margin, limit, team, known, book, table, draws, found);
}
extern "C" __global__ void __launch_bounds__(256) sphere_search_64(
    const float* flipped, const double* units, i64 rows, i64 d, i64 groups, const double* scale, const double* square, double alpha, double margin,
    i64 limit, i64 team, i64 known, const float* book, const int* table, i64 step, i64 who, i64 k0, i64 k1, i64* found
) {
    const Draws draws = {(u32)step, (u32)who, (u32)k0, (u32)k1};
    searched(flipped, units, rows, d, groups, scale, square, alpha, margin, limit, team, known, book, table, draws, found);
}

// Words before the search, and after it.
extern "C" __global__ void sphere_begin(i64 rows, i64* found) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows) found[i] = NO_WORD;
}
extern "C" __global__ void sphere_end(i64 rows, i64* found) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows && found[i] == NO_WORD) found[i] = -1;
}

// ---- points ----

// `team` threads of a warp, a power of two, have a row: its point, zeros where it has no word; with signs unless `start` is below 0.
extern "C" __global__ void sphere_points(
    const i64* words, const double* scale, i64 rows, i64 d, i64 groups, i64 start, i64 team, const int* table, i64 step, i64 who, i64 k0, i64 k1,
    float weight, i64 adds, float* out
) {
    const Draws draws = {(u32)step, (u32)who, (u32)k0, (u32)k1};
    const i64 me = (i64)blockIdx.x * blockDim.x + threadIdx.x, row = smaller(me / team, rows - 1), share = me % team;
    const i64 number = words[row];
    auto integers = [&](auto put) {
        for (i64 g = share; number >= 0 && 8 * g < d; g += team) {
            u32 w[4];
            philox(draws, (u64)(number * groups + g), CODEBOOK, w);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                if (8 * g + k >= d) break;
                put(8 * g + k, table[k & 1 ? w[k / 2] >> 16 : w[k / 2] & 0xffff]);
            }
        }
    };
    i64 square = 0;
    integers([&](i64, int z) { square += (i64)z * z; });
    for (i64 by = team / 2; by; by >>= 1) square += __shfl_xor_sync(FULL, square, (int)by);
    if (me / team >= rows) return;
    Drawn draw(draws, SIGN);
    float* const to = out + row * d;
    auto put = [&](i64 j, float v) {
        if (start >= 0 && draw(start + row * d + j) & 1) v = -v;
        to[j] = adds ? __fadd_rn(to[j], __fmul_rn(weight, v)) : v;
    };
    const double factor = scale[row] / sqrt((double)square);
    integers([&](i64 j, int z) { put(j, point_of(factor, z)); });
    for (i64 j = share; number < 0 && j < d; j += team) put(j, 0.0f);
}
