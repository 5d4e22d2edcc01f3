// Values of chunks as bytes (codecs/chunk_values.py), and whole messages of them (spec/wire.md, 5.22).
#include "chunks.cuh"

// How values are written.
enum { FLOAT32, BFLOAT16, SIGNS, BINS };
// Modes of messages.
enum { NORMAL, ZERO, NON_FINITE };
// What is known of a message: its length; the bytes before the rANS block; whether a value is not zero.
enum { LENGTH, FRONT, NONZERO };
// Of one that is read: what became of it; its mode; where the block, and where the sets begin; whether it is good.
enum { STATE, MODE, BLOCK, SETS, GOOD };
enum { READING, CORRUPT, NOTHING_TO_READ };
// Places in the description of a rANS block (rans_tables.cuh).
enum { BLOCK_LENGTH = 3, BLOCK_STATUS = 4 };
// Coordinates that are summed up together (reference/rounding.py).
#define CHUNK 4096
#define MOST_BINS 16
#define LARGEST 3.4028234663852886e38f

// Tensors of values, one behind the other: where each begins, and its chunks of sums; `number` of them, and the ends.
struct Tensors {
    const i64 *firsts, *chunks;
    i64 number;
    __device__ i64 of(i64 j) const { return owner_of(firsts, number, j); }
};

__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }
__device__ __forceinline__ float kept_finite(float v) { return v < -LARGEST ? -LARGEST : v > LARGEST ? LARGEST : v; }
// To nearest, ties to even; what would become infinite becomes the largest number.
__device__ __forceinline__ u32 bfloat16_of(float v) {
    const u32 bits = __float_as_uint(v), half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (half & 0x7fff) >= 0x7f80 ? (half & 0x8000) | 0x7f7f : half;
}
__device__ __forceinline__ u32 bytes_behind(i64 form) { return form == FLOAT32 ? 3 : form == BFLOAT16 ? 1 : 0; }

// ---- sums in the order of all sums: a warp has a chunk, then a warp has a tensor ----

// The sum of term(j) over a chunk of values, in every lane; `begin` and `stop` tell where it lies.
template <class Term>
__device__ double chunk_sum(i64 begin, i64 stop, Term term) {
    double sum = 0.0;
    for (i64 j = begin + (threadIdx.x & 31); j < stop; j += 32) sum += term(j);
    for (int by = 16; by; by >>= 1) sum += __shfl_xor_sync(FULL, sum, by);
    return sum;
}

// A warp folds `many` sums; the total is the first of them.
__device__ void folded(double* sums, i64 many) {
    for (i64 half = ((i64)1 << bit_length((u64)(many - 1))) / 2; half; half >>= 1) {
        for (i64 k = threadIdx.x & 31; k < half; k += 32)
            if (k + half < many) sums[k] += sums[k + half];
        __syncwarp();
    }
}

// What the sums are for: a centre, a width, or the scale of signs.
enum { CENTRE, WIDTH, SCALE };

extern "C" __global__ void value_sums(
    const float* values, const i64* firsts, const i64* chunks, i64 number, i64 what, const float* centres, double* sums, i64* told
) {
    const Tensors tensors = {firsts, chunks, number};
    const i64 chunk = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (chunk >= chunks[number]) return;
    const i64 t = owner_of(chunks, number, chunk), begin = firsts[t] + CHUNK * (chunk - chunks[t]), stop = smaller(begin + CHUNK, firsts[t + 1]);
    bool other = false;
    double sum;
    if (what == WIDTH) {
        const float centre = centres[t];
        sum = chunk_sum(begin, stop, [=](i64 j) {
            const double a = (double)kept_finite(values[j] - centre);
            return a * a;
        });
    } else {
        sum = chunk_sum(begin, stop, [&](i64 j) {
            other |= magnitude(values[j]) != 0;
            return (double)(what == SCALE ? __uint_as_float(magnitude(values[j])) : values[j]);
        });
    }
    if (other) told[NONZERO] = 1;
    if ((threadIdx.x & 31) == 0) sums[chunk] = sum;
}

// A warp per tensor. `made`: its centre, or the width of its bins; scales go to `data`.
extern "C" __global__ void __launch_bounds__(32) value_means(
    const i64* firsts, const i64* chunks, i64 what, i64 bins, double* sums, float* made, u8* data
) {
    const i64 t = blockIdx.x, count = firsts[t + 1] - firsts[t];
    double* const own = sums + chunks[t];
    folded(own, chunks[t + 1] - chunks[t]);
    if (threadIdx.x) return;
    if (what == CENTRE) {
        made[t] = (float)(own[0] / (double)count);
    } else if (what == WIDTH) {
        const float width = (float)(6.0 * sqrt(own[0] / (double)(count - 1)) / (double)bins);
        made[t] = width > 0.0f && width <= LARGEST ? width : 1.0f;
    } else {
        const double mean = own[0] / (double)count;
        store16(data + 2 * t, bfloat16_of((float)(mean > (double)LARGEST ? (double)LARGEST : mean)));
    }
}

// ---- bins ----

// A warp per chunk of sums: the bin of each value, the sum of what fell into each bin (by tensor, bin and chunk), and how much did.
extern "C" __global__ void bins_pick(
    const float* values, const i64* firsts, const i64* chunks, i64 number, i64 bins, const float* centres, const float* widths, u8* chosen,
    double* sums, i64* filled
) {
    const i64 chunk = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (chunk >= chunks[number]) return;
    const i64 t = owner_of(chunks, number, chunk), many = chunks[t + 1] - chunks[t], at = chunk - chunks[t];
    const i64 begin = firsts[t] + CHUNK * at, stop = smaller(begin + CHUNK, firsts[t + 1]);
    const float centre = centres[t], width = widths[t], middle = (float)(bins / 2), last = (float)(bins - 1);
    double in[MOST_BINS];
    int count[MOST_BINS];
#pragma unroll
    for (int b = 0; b < MOST_BINS; ++b) in[b] = 0.0, count[b] = 0;
    for (i64 j = begin + (threadIdx.x & 31); j < stop; j += 32) {
        const float around = kept_finite(values[j] - centre), place = around / width + middle;
        // 1.5 * 2^23 more, a number below 2^22 is rounded to nearest.
        const u32 pick = __float_as_uint((place > 0.0f ? place < last ? place : last : 0.0f) + 12582912.0f) & 15;
        chosen[j] = (u8)pick;
#pragma unroll
        for (int b = 0; b < MOST_BINS; ++b) in[b] += pick == b ? (double)around : 0.0, count[b] += pick == b;
    }
#pragma unroll
    for (int b = 0; b < MOST_BINS; ++b) {
        if (b >= bins) break;
        double sum = in[b];
        for (int by = 16; by; by >>= 1) sum += __shfl_xor_sync(FULL, sum, by);
        const i64 here = warp_sum(count[b]);
        if (threadIdx.x & 31) continue;
        sums[bins * chunks[t] + b * many + at] = sum;
        atomicAdd((u64*)&filled[t * bins + b], (u64)here);
    }
}

// A warp per bin: what stands for it.
extern "C" __global__ void __launch_bounds__(32) bins_stand(
    const i64* chunks, i64 bins, const float* centres, const i64* filled, double* sums, float* stands
) {
    const i64 t = blockIdx.x / bins, many = chunks[t + 1] - chunks[t];
    double* const own = sums + bins * chunks[t] + blockIdx.x % bins * many;
    folded(own, many);
    if (threadIdx.x == 0) stands[blockIdx.x] = kept_finite((float)(own[0] / (double)larger(1, filled[blockIdx.x])) + centres[t]);
}

// One block writes which bins there are, and what stands for them.
extern "C" __global__ void bins_front(i64 cells, const i64* filled, const float* stands, u8* front, i64* told) {
    const i64 marks = (cells + 7) / 8;
    for (i64 b = threadIdx.x; b < marks; b += blockDim.x) {
        u32 bits = 0;
        for (int k = 0; k < 8 && 8 * b + k < cells; ++k) bits |= (u32)(filled[8 * b + k] > 0) << k;
        front[b] = (u8)bits;
    }
    i64 before = 0, total;
    for (i64 base = 0; base < cells; base += blockDim.x) {
        const i64 c = base + threadIdx.x;
        const bool here = c < cells && filled[c] > 0;
        const i64 rank = before + block_scan(here, &total);
        if (here) store32(front + marks + 4 * rank, __float_as_uint(stands[c]));
        before += total;
    }
    if (threadIdx.x == 0) told[FRONT] = marks + 4 * before;
}

// ---- messages ----

// What is coded of float32 or bfloat16 values: their highest bytes.
extern "C" __global__ void floats_split(const float* values, i64 count, i64 form, u8* high, i64* told) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count) return;
    high[j] = (u8)(form == FLOAT32 ? __float_as_uint(values[j]) >> 24 : bfloat16_of(values[j]) >> 8);
    if (magnitude(values[j])) told[NONZERO] = 1;
}

// The signs of values as bits behind the scales.
extern "C" __global__ void signs_pack(const float* values, i64 count, i64 number, u8* front, i64* told) {
    const i64 b = (i64)blockIdx.x * blockDim.x + threadIdx.x, bytes = (count + 7) / 8;
    if (b == 0) told[FRONT] = 2 * number + bytes;
    if (b >= bytes) return;
    u32 bits = 0;
    for (int k = 0; k < 8 && 8 * b + k < count; ++k) bits |= __float_as_uint(values[8 * b + k]) >> 31 << k;
    front[2 * number + b] = (u8)bits;
}

// What a receiver will have for each value.
extern "C" __global__ void values_kept(
    const float* values, i64 count, i64 form, const i64* firsts, i64 number, i64 bins, const u8* chosen, const float* stands, const u8* front, float* kept
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count) return;
    if (form == FLOAT32) kept[j] = values[j];
    if (form == BFLOAT16) kept[j] = __uint_as_float(bfloat16_of(values[j]) << 16);
    if (form < SIGNS) return;
    const i64 t = owner_of(firsts, number, j);
    if (form == BINS) kept[j] = stands[t * bins + chosen[j]];
    else kept[j] = __uint_as_float(((u32)front[2 * t] | (u32)front[2 * t + 1] << 8) << 16 | (__float_as_uint(values[j]) & 0x80000000u));
}

// The message: its mode; front, block (if there is one) and low bytes of the values; lengths and words of the streams, `words` of which lie
// before the end of their rooms, with `sums` of them before each.
extern "C" __global__ void chunk_write(
    const float* values, i64 count, i64 form, const u8* finite, const u8* front, const u8* coded, const i64* block, i64 streams, const i64* rooms,
    const u32* words, const i64* sums, u8* out, i64* told
) {
    const i64 me = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const i64 mode = !*finite ? NON_FINITE : told[NONZERO] ? NORMAL : ZERO;
    const i64 begun = 1 + told[FRONT], length = block ? block[BLOCK_LENGTH] : 0, each = bytes_behind(form), sets = begun + length + each * count;
    if (me == 0) {
        out[0] = (u8)mode;
        told[LENGTH] = mode == NORMAL ? sets + 2 * larger(0, streams - 1) + 4 * sums[streams] : 1;
    }
    if (mode != NORMAL) return;
    for (i64 b = me; b + 1 < begun; b += stride) out[1 + b] = front[b];
    for (i64 b = me; b < length; b += stride) out[begun + b] = coded[b];
    for (i64 b = me; b < each * count; b += stride) {
        const u32 bits = form == FLOAT32 ? __float_as_uint(values[b / each]) : bfloat16_of(values[b / each]);
        out[begun + length + b] = (u8)(bits >> 8 * (b % each));
    }
    u8* const to = out + sets + 2 * larger(0, streams - 1);
    for (i64 s = blockIdx.x; s < streams; s += gridDim.x) {
        const i64 number = sums[s + 1] - sums[s];
        const u32* const from = words + rooms[s + 1] - number;
        if (threadIdx.x == 0 && s + 1 < streams) store16(out + sets + 2 * s, (u32)number);
        for (i64 k = threadIdx.x; k < number; k += blockDim.x) store32(to + 4 * (sums[s] + k), from[k]);
    }
}

// One block looks at what is before the block of a message: its mode, and its bins or the end of its signs.
extern "C" __global__ void chunk_open(const u8* data, i64 size, i64 form, i64 count, i64 number, i64 bins, float* stands, i64* told) {
    const int mode = data[0];
    if (size == 1 && (mode == ZERO || mode == NON_FINITE)) {
        if (threadIdx.x == 0) told[MODE] = mode, told[STATE] = NOTHING_TO_READ;
        return;
    }
    i64 at = 1;
    bool bad = mode != NORMAL;
    if (form == SIGNS) {
        at += 2 * number + (count + 7) / 8;
        bad |= at > size || (count % 8 && data[at - 1] >> count % 8);
    }
    if (form == BINS) {
        const i64 cells = number * bins, marks = (cells + 7) / 8;
        bad |= 1 + marks > size || (cells % 8 && data[marks] >> cells % 8);
        i64 before = 0, total;
        for (i64 base = 0; !bad && base < cells; base += blockDim.x) {
            const i64 c = base + threadIdx.x, from = 1 + marks + 4 * before;
            const bool here = c < cells && data[1 + c / 8] >> c % 8 & 1;
            const i64 place = from + 4 * block_scan(here, &total);
            if (c < cells) stands[c] = here && place + 4 <= size ? __uint_as_float(load32(data + place)) : 0.0f;
            before += total;
        }
        at += marks + 4 * before;
        bad |= at > size;
    }
    if (threadIdx.x) return;
    told[BLOCK] = told[SETS] = at;
    if (bad) told[STATE] = CORRUPT;
}

// What follows, with zeros behind it.
extern "C" __global__ void chunk_rest(const u8* data, i64 size, const i64* told, u8* rest) {
    const i64 stride = (i64)gridDim.x * blockDim.x, at = told[BLOCK];
    for (i64 b = (i64)blockIdx.x * blockDim.x + threadIdx.x; b < size; b += stride) rest[b] = b + at < size ? data[b + at] : 0;
}

// Where the sets begin, behind a block and the low bytes of values.
extern "C" __global__ void chunk_behind(const i64* block, i64 form, i64 count, i64* told) {
    if (told[STATE] != READING) return;
    told[SETS] = told[BLOCK] + block[BLOCK_LENGTH] + bytes_behind(form) * count;
    if (block[BLOCK_STATUS]) told[STATE] = CORRUPT;
}

// What does not depend on values: zeros unless they are added, or what a message that is not finite stands for.
extern "C" __global__ void chunk_clear(i64 numel, i64 adds, const i64* told, float* out) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    const bool bad = told[MODE] == NON_FINITE;
    if (adds && !bad) return;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < numel; i += stride) out[i] = bad ? __uint_as_float(0x7fc00000u) : 0.0f;
}

// Every value of a good message to its place, or `weight` times as much added there.
extern "C" __global__ void chunk_put(
    const u8* data, i64 count, i64 form, const u8* symbols, const i64* firsts, i64 number, i64 bins, const float* stands, const Region* regions,
    i64 areas, const u16* places, float weight, i64 adds, float* out, i64* told
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (told[STATE] == CORRUPT) return;
    if (j == 0) told[GOOD] = 1;
    if (j >= count || told[STATE] == NOTHING_TO_READ) return;
    float value;
    if (form >= SIGNS) {
        const i64 t = owner_of(firsts, number, j);
        if (form == BINS) {
            value = stands[t * bins + symbols[j]];
        } else {
            const u32 scale = ((u32)data[1 + 2 * t] | (u32)data[2 + 2 * t] << 8) << 16, sign = data[1 + 2 * number + j / 8] >> j % 8 & 1;
            value = __uint_as_float(scale ^ sign << 31);
        }
    } else {
        const i64 each = bytes_behind(form);
        const u8* const low = data + told[SETS] - each * (count - j);
        u32 bits = (u32)symbols[j] << 24;
        for (int b = 0; b < each; ++b) bits |= (u32)low[b] << (8 * b + (form == FLOAT32 ? 0 : 16));
        value = __uint_as_float(bits);
    }
    const Region& r = region_of(regions, areas, &Region::place, j);
    const i64 own = (j - r.place) / r.keep, k = (j - r.place) % r.keep;
    float* const to = out + corner_of(r, own) + Across(r)(r.whole() ? (int)k : places[r.spot + own * r.keep + k]);
    *to = adds ? __fadd_rn(*to, __fmul_rn(weight, value)) : value;
}
