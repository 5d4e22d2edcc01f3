// Planar Golomb codes of index sets (spec/wire.md, 4.4 and 4.6), and sparse messages made of them.
#include "index.cuh"
#include "zeros.cuh"

struct Set {
    const void* indices;
    i64 wide, count, divisor, width, shorts;
    // `divisor` 0: the one for random sets (codecs/index.py).
    __device__ Set(const void* indices, i64 wide, i64 room, i64 counted, i64 numel, i64 given) : indices(indices), wide(wide) {
        count = counted > room ? 0 : counted;
        divisor = given ? given : larger(1, count ? (numel * 45426 / count + 11141) >> 16 : 1);
        width = bit_length((u64)divisor) - 1;
        shorts = ((i64)2 << width) - divisor;
    }
    __device__ i64 before(i64 j) const { return j ? index_at(indices, wide, j - 1) : -1; }
};

struct Part {
    i64 quotient, rest;
    __device__ Part(i64 gap, i64 divisor) {
        quotient = (u64)(gap | divisor) >> 32 ? gap / divisor : (i64)((u32)gap / (u32)divisor);
        rest = gap - quotient * divisor;
    }
};

// Rows of `sums`: bits of unary parts, and long remainders, by span. Where facts are asked for, the histogram of the gaps' classes and,
// where it is 1, whether all values are finite. Clears the words.
extern "C" __global__ void golomb_survey(
    const void* indices, i64 wide, i64 room, const i64* counted, i64 numel, i64 divisor, const float* values, i64 asked, i64* sums, u32* words,
    i64 num_words, i64* head
) {
    __shared__ u32 classes[128];
    const Set set(indices, wide, room, *counted, numel, divisor);
    const i64 stride = (i64)gridDim.x * blockDim.x, me = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    for (i64 w = me; w < num_words; w += stride) words[w] = 0;
    if (me == 0) {
        head[COUNT] = *counted;
        if (*counted < 1 || *counted > room) head[STATUS] = TOO_SMALL;
    }
    if (idle(set.count)) {
        if (threadIdx.x == 0) sums[blockIdx.x] = sums[gridDim.x + 1 + blockIdx.x] = 0;
        return;
    }
    if (threadIdx.x < 128) classes[threadIdx.x] = 0;
    __syncthreads();
    i64 bits = 0, longs = 0, total;
    bool infinite = false;
    const i64 first = me * SHARE, stop = smaller(first + SHARE, set.count);
    i64 last = first < stop ? set.before(first) : 0;
    for (i64 j = first; j < stop; ++j) {
        const i64 here = index_at(indices, wide, j), gap = here - last - 1;
        last = here;
        if (gap < 0 || here >= numel) {
            head[STATUS] = UNSORTED;
            continue;
        }
        const Part p(gap, set.divisor);
        bits += p.quotient + 1;
        longs += p.rest >= set.shorts;
        if (asked) {
            atomicAdd(&classes[gap_class_of((u64)gap + 1)], 1u);
            infinite |= asked == 1 && (__float_as_uint(values[j]) & 0x7fffffffu) >= 0x7f800000u;
        }
    }
    block_scan(bits, &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
    block_scan(longs, &total);
    if (threadIdx.x == 0) sums[gridDim.x + 1 + blockIdx.x] = total;
    if (infinite) head[INFINITE] = 1;
    if (asked && threadIdx.x < 128 && classes[threadIdx.x]) atomicAdd((u64*)&head[CLASSES + threadIdx.x], (u64)classes[threadIdx.x]);
}

// The planes into cleared words of `capacity` bytes; a negative one asks for their length alone.
extern "C" __global__ void golomb_write(
    const void* indices, i64 wide, i64 room, const i64* counted, i64 numel, i64 divisor, const i64* sums, i64 scanned, i64 capacity, u32* words,
    i64* head
) {
    const Set set(indices, wide, room, *counted, numel, divisor);
    if (idle(set.count)) return;
    const i64 me = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const Place unaries(sums, scanned), extras(sums + gridDim.x + 1, scanned);
    const i64 second = bytes_of(unaries.all), third = second + bytes_of(set.count * set.width), length = third + bytes_of(extras.all);
    const bool fits = length <= capacity, sorted = head[STATUS] != UNSORTED;
    if (me == 0) head[LENGTH] = length;
    if (me == 0 && !fits && sorted && capacity >= 0) head[STATUS] = TOO_SMALL;
    if (!fits || !sorted) return;
    i64 quotients[SHARE], rests[SHARE], bits = 0, longs = 0, total;
    const i64 first = me * SHARE;
    i64 last = first < set.count ? set.before(first) : 0;
#pragma unroll
    for (int a = 0; a < SHARE; ++a) {
        if (first + a >= set.count) continue;
        const i64 here = index_at(indices, wide, first + a);
        const Part p(here - last - 1, set.divisor);
        last = here;
        quotients[a] = p.quotient;
        rests[a] = p.rest;
        bits += p.quotient + 1;
        longs += p.rest >= set.shorts;
    }
    i64 unary = unaries.before + block_scan(bits, &total), extra = extras.before + block_scan(longs, &total);
    Run ones(words), shorts(words), lasts(words);
#pragma unroll
    for (int a = 0; a < SHARE; ++a) {
        if (first + a >= set.count) continue;
        unary += quotients[a] + 1;
        ones.put(unary - 1, 1, 1);
        const bool is_long = rests[a] >= set.shorts;
        shorts.put(8 * second + (first + a) * set.width, is_long ? (rests[a] + set.shorts) >> 1 : rests[a], (int)set.width);
        if (is_long) lasts.put(8 * third + extra++, (rests[a] + set.shorts) & 1, 1);
    }
    ones.end();
    shorts.end();
    lasts.end();
}

// The message: its mode, the count, the form of the set, its planes, and values. `told`: what is known of values that are bytes.
extern "C" __global__ void sparse_write(const u8* words, const void* values, i64 kind, const i64* told, i64 room, u8* out, i64* head) {
    if (head[STATUS] != FINE) return;
    const i64 count = head[COUNT], planes = head[LENGTH], stride = (i64)gridDim.x * blockDim.x;
    const i64 me = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 at = put_front(0, 0, count, GOLOMB), number = kind == CODED_BYTES ? told[VALUE_BYTES] : count, total = at + planes + size_of_each(kind) * number;
    if (total > room) {
        head[STATUS] = TOO_SMALL;
        return;
    }
    if (me == 0) {
        head[WHOLE] = total;
        put_front(out, kind == CODED_BYTES ? told[MODE] : 0, count, GOLOMB);
    }
    for (i64 b = me; b < planes; b += stride) out[at + b] = words[b];
    for (i64 j = me; j < number; j += stride) put_value(out + at + planes, j, values, kind);
}

extern "C" __global__ void planes_copy(const u8* from, i64 room, u8* out, const i64* head) {
    if (head[STATUS] != FINE) return;
    const i64 stride = (i64)gridDim.x * blockDim.x, length = smaller(head[LENGTH], room);
    for (i64 b = (i64)blockIdx.x * blockDim.x + threadIdx.x; b < length; b += stride) out[b] = from[b];
}

// ---- reading ----

// Of a message of `size` bytes what follows the first `at` is read here, `most` bytes of it.
// How many ones the bytes of each block have, one byte for each thread. Nothing is read of a message that begins otherwise than by `front`, `at` bytes of it.
// What is known of the message begins here.
extern "C" __global__ void ones_count(const u8* data, i64 size, i64 at, u64 front, i64 most, i64* sums, i64* head) {
    const i64 from = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (from < CLASSES) head[threadIdx.x] = threadIdx.x == STATUS && !begins(data, at, front) ? CORRUPT : 0;
    i64 total;
    block_scan(from < smaller(size - at, most) ? __popc(data[at + from]) : 0, &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// Where the first `count` ones stand; nothing but zeros may follow in the last one's byte.
extern "C" __global__ void ones_place(
    const u8* data, i64 size, i64 at, i64 most, const i64* sums, i64 scanned, i64 count, i64* ones, i64* head
) {
    i64 total;
    const i64 from = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 byte = from < smaller(size - at, most) ? data[at + from] : 0;
    const Place place(sums, scanned);
    i64 rank = place.before + block_scan(__popc(byte), &total);
    if (blockIdx.x == 0 && threadIdx.x == 0 && place.all < count) head[STATUS] = CORRUPT;
    for (u32 left = byte; left && rank < count; left &= left - 1, ++rank) {
        const int bit = __ffs((int)left) - 1;
        ones[rank] = 8 * from + bit;
        if (rank + 1 == count) {
            head[USED] = from + 1;
            if (byte >> bit >> 1) head[STATUS] = CORRUPT;
        }
    }
}

// The planes of a set as they lie in a message of `size` bytes: `nbytes` follow the first `at`.
struct Planes {
    const u8* data;
    i64 nbytes, count, width, shorts;
    __device__ Planes(const u8* message, i64 size, i64 at, i64 count, i64 divisor) : data(message + at), nbytes(size - at), count(count) {
        width = bit_length((u64)divisor) - 1;
        shorts = ((i64)2 << width) - divisor;
    }
    // The first bits of a remainder.
    __device__ i64 rest(i64 used, i64 j) const { return (i64)get_bits(data, 8 * used + j * width, (int)width); }
};

// How many remainders of each span are long.
extern "C" __global__ void golomb_longs(
    const u8* message, i64 size, i64 at, i64 count, i64 numel, i64 divisor, const i64* ones, i64* sums, i64* head
) {
    const Planes planes(message, size, at, count, divisor);
    i64 longs = 0, total;
    if (head[STATUS] == FINE) {
        const i64 used = head[USED], quotients = ones[count - 1] - (count - 1);
        if (quotients > numel / divisor || !plane_fits(planes.data, planes.nbytes, used, count * planes.width)) {
            head[STATUS] = CORRUPT;
        } else {
            const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
            for (i64 j = first; j < smaller(first + SHARE, count); ++j) longs += planes.rest(used, j) >= planes.shorts;
        }
    }
    block_scan(longs, &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// The remainders, and their sums over spans.
extern "C" __global__ void golomb_rests(
    const u8* message, i64 size, i64 at, i64 count, i64 divisor, const i64* longs_before, i64 scanned, i64* rests, i64* sums, i64* head
) {
    const Planes planes(message, size, at, count, divisor);
    const Place place(longs_before, scanned);
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x), used = head[USED], third = used + bytes_of(count * planes.width);
    bool fine = head[STATUS] == FINE;
    if (fine && !plane_fits(planes.data, planes.nbytes, third, place.all)) {
        head[STATUS] = CORRUPT;
        fine = false;
    }
    if (fine && first == 0) head[LENGTH] = at + third + bytes_of(place.all);
    i64 held[SHARE], longs = 0, sum = 0, total;
#pragma unroll
    for (int a = 0; a < SHARE; ++a) {
        held[a] = fine && first + a < count ? planes.rest(used, first + a) : 0;
        longs += fine && first + a < count && held[a] >= planes.shorts;
    }
    i64 extra = place.before + block_scan(longs, &total);
#pragma unroll
    for (int a = 0; a < SHARE; ++a) {
        if (!fine || first + a >= count) continue;
        if (held[a] >= planes.shorts) held[a] = 2 * held[a] + (i64)get_bits(planes.data, 8 * third + extra++, 1) - planes.shorts;
        rests[first + a] = held[a];
        sum += held[a];
    }
    block_scan(sum, &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// The indices. Behind the planes so many bytes must follow for each, if it is not negative.
extern "C" __global__ void golomb_indices(
    i64 size, i64 count, i64 numel, i64 divisor, const i64* ones, const i64* rests, const i64* sums, i64 scanned, i64 each, i64 wide, void* out,
    i64* head
) {
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    const Place place(sums, scanned);
    const bool fine = head[STATUS] == FINE;
    if (fine && first == 0 && each >= 0 && head[LENGTH] + each * count != size) head[STATUS] = CORRUPT;
    i64 held[SHARE], sum = 0, total;
#pragma unroll
    for (int a = 0; a < SHARE; ++a) sum += held[a] = fine && first + a < count ? rests[first + a] : 0;
    i64 before = place.before + block_scan(sum, &total);
#pragma unroll
    for (int a = 0; a < SHARE; ++a) {
        const i64 j = first + a;
        if (!fine || j >= count) continue;
        before += held[a];
        const i64 index = divisor * (ones[j] - j) + before + j;
        if (index < 0 || index >= numel) head[STATUS] = CORRUPT;
        else if (wide) ((i64*)out)[j] = index;
        else ((int*)out)[j] = (int)index;
    }
}

// ---- values to their places ----

// The values of a set: float32 or, `narrow`, bfloat16, one behind the other up to byte `end`; from the first byte on if that is negative.
struct Values {
    const u8* first;
    bool narrow;
    __device__ Values(const u8* data, i64 end, i64 narrow, i64 count) : narrow(narrow != 0) {
        first = end < 0 ? data : data + end - (narrow ? 2 : 4) * count;
    }
    __device__ float operator()(i64 j) const {
        return __uint_as_float(narrow ? ((u32)first[2 * j] | (u32)first[2 * j + 1] << 8) << 16 : load32(first + 4 * j));
    }
};

// How many of `count` indices, which increase, lie below `limit`; for a warp.
__device__ i64 number_below(const void* indices, i64 wide, i64 count, i64 limit) {
    const int lane = threadIdx.x & 31;
    i64 low = 0, high = count;
    while (low < high) {
        const i64 step = (high - low + 31) / 32, at = low + lane * step;
        const int passed = __popc(__ballot_sync(FULL, at < high && index_at(indices, wide, at) < limit));
        if (!passed) return low;
        high = smaller(high, low + passed * step);
        low += (passed - 1) * step + 1;
    }
    return low;
}

#define LAID 8192

// The vector of `n` coordinates: values at their places and zeros elsewhere, or nothing but zeros where the message is not right, and in
// place WHOLE whether it is. Blocks divide pieces of LAID coordinates among themselves, those of a block in a row: it clears one, and puts
// values there while they are still in the cache. What comes next is loaded before that.
extern "C" __global__ void __launch_bounds__(256) sparse_lay(
    const u8* data, i64 end, i64 narrow, i64 count, const void* indices, i64 wide, i64 n, float* out, i64* head
) {
    __shared__ i64 begin;
    const bool fine = head[STATUS] == FINE;
    const i64 share = ((n + LAID - 1) / LAID + gridDim.x - 1) / gridDim.x * LAID;
    const i64 first = blockIdx.x * share, last = smaller(first + share, n);
    if (first == 0 && threadIdx.x == 0) head[WHOLE] = fine;
    if (first >= last) return;
    if (!fine) {
        clear((u8*)(out + first), 4 * (last - first), threadIdx.x, blockDim.x);
        return;
    }
    if (threadIdx.x < 32) {
        const i64 below = number_below(indices, wide, count, first);
        if (threadIdx.x == 0) begin = below;
    }
    __syncthreads();
    const Values values(data, end, narrow, count);
    i64 j = begin + threadIdx.x, i = j < count ? index_at(indices, wide, j) : n;
    float value = j < count ? values(j) : 0.0f;
    for (i64 piece = first; piece < last; piece += LAID) {
        const i64 stop = smaller(piece + LAID, last);
        clear((u8*)(out + piece), 4 * (stop - piece), threadIdx.x, blockDim.x);
        __syncthreads();
        for (i64 put = blockDim.x; put == blockDim.x;) {
            if (i < stop) out[i] = value;
            put = __syncthreads_count(i < stop);
            j += put;
            i = j < count ? index_at(indices, wide, j) : n;
            value = j < count ? values(j) : 0.0f;
        }
    }
}

// `weight` times the values added at their places, if the message is right, and in place WHOLE whether it is.
extern "C" __global__ void sparse_add(
    const u8* data, i64 end, i64 narrow, i64 count, const void* indices, i64 wide, float weight, float* out, i64* head
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j == 0) head[WHOLE] = head[STATUS] == FINE;
    if (j >= count || head[STATUS] != FINE) return;
    const i64 i = index_at(indices, wide, j);
    out[i] = __fadd_rn(out[i], __fmul_rn(Values(data, end, narrow, count)(j), weight));
}
