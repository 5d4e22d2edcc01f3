// Planar Golomb codes of index sets (spec/wire.md, 4.4 and 4.6). Running sums over the set are taken between the kernels.
#include "common.cuh"

// Places in what the kernels hand on.
enum { LENGTH, STATUS, USED };
enum { FINE, CORRUPT, TOO_SMALL, UNSORTED };

__device__ __forceinline__ i64 index_at(const void* indices, i64 wide, i64 j) {
    return wide ? ((const i64*)indices)[j] : ((const int*)indices)[j];
}
__device__ __forceinline__ i64 bytes_of(i64 bits) { return (bits + 7) / 8; }

// `width` bits of value at a bit position of zeroed words.
__device__ __forceinline__ void set_bits(u32* words, i64 at, u64 value, int width) {
    while (width > 0) {
        const int shift = at & 31, here = 32 - shift < width ? 32 - shift : width;
        const u32 part = (u32)(value & (((u64)1 << here) - 1));
        if (part) atomicOr(&words[at >> 5], part << shift);
        value >>= here;
        at += here;
        width -= here;
    }
}

// `width` bits, at most 57, at a bit position; all of them lie within the bytes.
__device__ __forceinline__ u64 get_bits(const u8* data, i64 at, int width) {
    u64 held = 0;
    const int shift = at & 7;
    for (int b = 0; 8 * b < shift + width; ++b) held |= (u64)data[(at >> 3) + b] << 8 * b;
    return held >> shift & (((u64)1 << width) - 1);
}

struct Part {
    i64 quotient, rest;
};
__device__ __forceinline__ Part part_of(const void* indices, i64 wide, i64 j, i64 divisor, i64* head) {
    const i64 gap = index_at(indices, wide, j) - (j ? index_at(indices, wide, j - 1) : -1) - 1;
    if (gap < 0) {
        head[STATUS] = UNSORTED;
        return {0, 0};
    }
    const i64 q = gap / divisor;
    return {q, gap - q * divisor};
}

// Rows of `parts`: the bits of each unary part, and whether a remainder is long.
extern "C" __global__ void golomb_parts(const void* indices, i64 wide, i64 count, i64 divisor, i64 shorts, i64* parts, i64* head) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count) return;
    const Part p = part_of(indices, wide, j, divisor, head);
    parts[j] = p.quotient + 1;
    parts[count + j] = p.rest >= shorts;
}

// The planes, given the running sums of those rows, into zeroed words of `room` bytes.
extern "C" __global__ void golomb_write(
    const void* indices, i64 wide, i64 count, i64 divisor, i64 width, i64 shorts, const i64* sums, i64 room, u32* words, i64* head
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 second = bytes_of(sums[count - 1]), third = second + bytes_of(count * width), length = third + bytes_of(sums[2 * count - 1]);
    if (j == 0) head[LENGTH] = length;
    if (j == 0 && length > room) head[STATUS] = TOO_SMALL;
    if (j >= count || length > room || head[STATUS] == UNSORTED) return;
    const Part p = part_of(indices, wide, j, divisor, head);
    set_bits(words, sums[j] - 1, 1, 1);
    const bool is_long = p.rest >= shorts;
    set_bits(words, 8 * second + j * width, is_long ? (p.rest + shorts) >> 1 : p.rest, (int)width);
    if (is_long) set_bits(words, 8 * third + sums[count + j] - 1, (p.rest + shorts) & 1, 1);
}

extern "C" __global__ void planes_copy(const u8* from, i64 room, u8* out, const i64* head) {
    if (head[STATUS] != FINE) return;
    const i64 stride = (i64)gridDim.x * blockDim.x, length = smaller(head[LENGTH], room);
    for (i64 b = (i64)blockIdx.x * blockDim.x + threadIdx.x; b < length; b += stride) out[b] = from[b];
}

// ---- classes of gaps ----

// Two classes for each power of two of gap + 1.
__device__ __forceinline__ int gap_class(const void* indices, i64 wide, i64 j) {
    const u64 g = (u64)(index_at(indices, wide, j) - (j ? index_at(indices, wide, j - 1) : -1));
    const int e = bit_length(g) - 1;
    return e > 0 ? 2 * e + (int)(g >> (e - 1) & 1) - 1 : 0;
}

extern "C" __global__ void gap_classes(const void* indices, i64 wide, i64 count, u8* classes) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j < count) classes[j] = (u8)gap_class(indices, wide, j);
}

extern "C" __global__ void gap_histogram(const void* indices, i64 wide, i64 count, u64* histogram) {
    __shared__ u32 own[128];
    if (threadIdx.x < 128) own[threadIdx.x] = 0;
    __syncthreads();
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x; j < count; j += stride) atomicAdd(&own[gap_class(indices, wide, j) & 127], 1u);
    __syncthreads();
    if (threadIdx.x < 128 && own[threadIdx.x]) atomicAdd(&histogram[threadIdx.x], (u64)own[threadIdx.x]);
}

// The bits that the classes of gaps leave open: all but the two highest of gap + 1.
extern "C" __global__ void gap_widths(const void* indices, i64 wide, i64 count, i64* widths) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j < count) widths[j] = larger((gap_class(indices, wide, j) + 1) / 2 - 1, 0);
}

extern "C" __global__ void gap_rests_write(const void* indices, i64 wide, i64 count, const i64* sums, i64 room, u32* words, i64* head) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 length = bytes_of(sums[count - 1]);
    if (j == 0) head[LENGTH] = length;
    if (j == 0 && length > room) head[STATUS] = TOO_SMALL;
    if (j >= count || length > room) return;
    const i64 begin = j ? sums[j - 1] : 0;
    const int width = (int)(sums[j] - begin);
    const u64 g = (u64)(index_at(indices, wide, j) - (j ? index_at(indices, wide, j - 1) : -1));
    if (width) set_bits(words, begin, g & (((u64)1 << width) - 1), width);
}

extern "C" __global__ void gap_class_widths(const u8* classes, i64 count, i64* widths, i64* head) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count) return;
    const i64 width = larger(((i64)classes[j] + 1) / 2 - 1, 0);
    if (width > 55) head[STATUS] = CORRUPT;
    widths[j] = smaller(width, 55);
}

// gap + 1 of every class, given the running sums of the widths.
extern "C" __global__ void gap_rests_read(
    const u8* data, i64 nbytes, const u8* classes, i64 count, i64 numel, const i64* sums, i64* steps, i64* head
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count) return;
    steps[j] = 0;
    const i64 total = sums[count - 1], used = bytes_of(total);
    if (j == 0) head[LENGTH] = used;
    if (used > nbytes || (total & 7 && data[used - 1] >> (total & 7))) {
        head[STATUS] = CORRUPT;
        return;
    }
    const i64 begin = j ? sums[j - 1] : 0;
    const int width = (int)(sums[j] - begin);
    const u64 top = classes[j] ? 2 + ((classes[j] + 1) & 1) : 1;
    const i64 step = (i64)(top << width | (width ? get_bits(data, begin, width) : 0));
    if (step > numel) head[STATUS] = CORRUPT;
    else steps[j] = step;
}

// The indices, given the running sums of the steps.
extern "C" __global__ void gap_indices(i64 count, i64 numel, const i64* sums, i64 wide, void* out, i64* head) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count || head[STATUS] != FINE) return;
    const i64 index = sums[j] - 1;
    if (index < 0 || index >= numel) head[STATUS] = CORRUPT;
    else if (wide) ((i64*)out)[j] = index;
    else ((int*)out)[j] = (int)index;
}

// ---- reading ----

__device__ __forceinline__ u32 four_bytes(const u8* data, i64 nbytes, i64 at) {
    u32 word = 0;
    for (int b = 0; b < 4; ++b)
        if (at + b < nbytes) word |= (u32)data[at + b] << 8 * b;
    return word;
}

// How many ones every 1024 bytes have; 256 threads.
extern "C" __global__ void ones_count(const u8* data, i64 nbytes, i64* counts) {
    i64 total;
    const u32 word = four_bytes(data, nbytes, 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x));
    block_scan(__popc(word), &total);
    if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// Where the first `count` ones stand, given the running sums of the counts; nothing but zeros may follow in the last one's byte.
extern "C" __global__ void ones_place(const u8* data, i64 nbytes, const i64* counts, const i64* sums, i64 count, i64* places, i64* head) {
    i64 total;
    const i64 at = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    u32 word = four_bytes(data, nbytes, at);
    const i64 before = block_scan(__popc(word), &total);
    i64 rank = sums[blockIdx.x] - counts[blockIdx.x] + before;
    if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 0 && sums[blockIdx.x] < count) head[STATUS] = CORRUPT;
    for (; word && rank < count; word &= word - 1, ++rank) {
        const int bit = __ffs((int)word) - 1;
        places[rank] = 8 * at + bit;
        if (rank + 1 == count) {
            head[USED] = at + bit / 8 + 1;
            if (data[at + bit / 8] >> bit % 8 >> 1) head[STATUS] = CORRUPT;
        }
    }
}

// Whether a plane of `bits` bits lies within the bytes and is padded with zeros.
__device__ __forceinline__ bool plane_fits(const u8* data, i64 nbytes, i64 at, i64 bits) {
    if (at + bytes_of(bits) > nbytes) return false;
    return bits % 8 == 0 || data[at + bits / 8] >> bits % 8 == 0;
}

// Rows of `parts`: the first bits of remainders, and whether they are long.
extern "C" __global__ void golomb_rests(
    const u8* data, i64 nbytes, i64 count, i64 numel, i64 divisor, i64 width, i64 shorts, const i64* places, i64* parts, i64* head
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count) return;
    parts[j] = parts[count + j] = 0;
    if (head[STATUS] != FINE) return;
    const i64 used = head[USED], quotients = places[count - 1] - (count - 1);
    if (quotients > numel / divisor || !plane_fits(data, nbytes, used, count * width)) {
        head[STATUS] = CORRUPT;
        return;
    }
    const i64 value = (i64)get_bits(data, 8 * used + j * width, (int)width);
    parts[j] = value;
    parts[count + j] = value >= shorts;
}

// The remainders, given the running sum of the long ones.
extern "C" __global__ void golomb_resolve(
    const u8* data, i64 nbytes, i64 count, i64 width, i64 shorts, const i64* longs, i64* parts, i64* head
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count || head[STATUS] != FINE) return;
    const i64 third = head[USED] + bytes_of(count * width), bits = longs[count - 1];
    if (!plane_fits(data, nbytes, third, bits)) {
        head[STATUS] = CORRUPT;
        return;
    }
    if (j == 0) head[LENGTH] = third + bytes_of(bits);
    if (parts[count + j]) parts[j] = 2 * parts[j] + (i64)get_bits(data, 8 * third + longs[j] - 1, 1) - shorts;
}

// The indices, given the running sum of the remainders.
extern "C" __global__ void golomb_indices(
    i64 count, i64 numel, i64 divisor, const i64* places, const i64* rests, i64 wide, void* out, i64* head
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count || head[STATUS] != FINE) return;
    const i64 index = divisor * (places[j] - j) + rests[j] + j;
    if (index < 0 || index >= numel) {
        head[STATUS] = CORRUPT;
        return;
    }
    if (wide) ((i64*)out)[j] = index;
    else ((int*)out)[j] = (int)index;
}
