// Values of sparse messages as the bytes behind an index set (spec/wire.md, "Signs and exponents"): powers of two, and signs.
#include "index.cuh"

// Modes of messages.
#define NON_FINITE 2
#define PACKED 4
// The number of tensors that send anything, beside what is known of values (index.cuh).
#define TENSORS 3
// The bits of the smallest normal number; those below it are never sent.
#define SMALLEST 0x00800000u
#define INFINITE_KEY 0x7f800000u

__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// Tensors one behind the other, and where they end.
struct Pieces {
    const i64* ends;
    i64 number;
    // In which one coordinate i lies.
    __device__ i64 of(i64 i) const {
        i64 low = 0, high = number - 1;
        while (low < high) {
            const i64 middle = (low + high) / 2;
            if (ends[middle] > i) high = middle;
            else low = middle + 1;
        }
        return low;
    }
    // The same where a coordinate before it lies in piece `last`, if it is not negative.
    __device__ i64 of(i64 i, i64 last) const { return last >= 0 && i < ends[last] ? last : of(i); }
};

// ---- writing ----

// The bits of the largest magnitude of every piece, which begin as zeros.
extern "C" __global__ void exp4_largest(
    const void* indices, i64 wide, const float* values, i64 room, const i64* counted, const i64* ends, i64 number, u32* tops
) {
    const Pieces pieces = {ends, number};
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x), stop = smaller(first + SHARE, smaller(*counted, room));
    i64 piece = -1;
    u32 most = 0;
    for (i64 j = first; j < stop; ++j) {
        const i64 here = pieces.of(index_at(indices, wide, j), piece);
        if (here != piece && piece >= 0) {
            atomicMax(&tops[piece], most);
            most = 0;
        }
        piece = here;
        most = magnitude(values[j]) > most ? magnitude(values[j]) : most;
    }
    // Most warps lie in one piece: then one thread speaks for all.
    const i64 shared = __shfl_sync(FULL, piece, 0);
    if (__ballot_sync(FULL, piece >= 0 && piece != shared) == 0) {
        for (int by = 16; by; by >>= 1) {
            const u32 other = __shfl_xor_sync(FULL, most, by);
            most = other > most ? other : most;
        }
        if (threadIdx.x & 31) piece = -1;
    }
    if (piece >= 0) atomicMax(&tops[piece], most);
}

// By how many powers of two a number lies below the largest of its piece once it is rounded; -1 where it is not sent.
__device__ __forceinline__ int below_top(u32 key, u32 top) {
    const int e = (int)((key + 0x00400000u) >> 23), most = (int)(top >> 23);
    if (key < SMALLEST || e + 7 < most) return -1;
    return e < most ? most - e : 0;
}

// How many of the values first .. stop - 1 are sent.
__device__ __forceinline__ i64 number_sent(
    const Pieces& pieces, const void* indices, i64 wide, const float* values, i64 first, i64 stop, const u32* tops
) {
    i64 piece = -1, sent = 0;
    for (i64 j = first; j < stop; ++j) {
        piece = pieces.of(index_at(indices, wide, j), piece);
        sent += below_top(magnitude(values[j]), tops[piece]) >= 0;
    }
    return sent;
}

// How many values of each span are sent.
extern "C" __global__ void exp4_survey(
    const void* indices, i64 wide, const float* values, i64 room, const i64* counted, const i64* ends, i64 number, const u32* tops, i64* sums
) {
    const Pieces pieces = {ends, number};
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x), stop = smaller(first + SHARE, smaller(*counted, room));
    i64 total;
    block_scan(number_sent(pieces, indices, wide, values, first, stop, tops), &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// One block writes the exponents of pieces that send anything: those whose largest magnitude is a normal number.
extern "C" __global__ void exp4_exponents(const u32* tops, i64 number, u8* data, i64* told) {
    i64 before = 0, total;
    for (i64 base = 0; base < number; base += blockDim.x) {
        const i64 p = base + threadIdx.x;
        const bool sends = p < number && tops[p] >= SMALLEST;
        const i64 rank = before + block_scan(sends, &total);
        if (sends) data[rank] = (u8)((tops[p] >> 23) - 127);
        if (p < number && tops[p] >= INFINITE_KEY) told[MODE] = NON_FINITE;
        before += total;
    }
    if (threadIdx.x == 0) told[TENSORS] = before;
}

// What each value becomes; indices and codes of those that are sent, one behind the other.
extern "C" __global__ void exp4_place(
    const void* indices, i64 wide, const float* values, i64 room, const i64* counted, const i64* ends, i64 number, const u32* tops,
    const i64* sums, i64 scanned, void* kept, u8* codes, float* decoded, i64* told
) {
    const Place place(sums, scanned);
    const Pieces pieces = {ends, number};
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x), stop = smaller(first + SHARE, smaller(*counted, room));
    i64 piece = -1, total, at = place.before + block_scan(number_sent(pieces, indices, wide, values, first, stop, tops), &total);
    for (i64 j = first; j < stop; ++j) {
        const i64 i = index_at(indices, wide, j);
        piece = pieces.of(i, piece);
        const u32 sign = __float_as_uint(values[j]) >> 31;
        const int below = below_top(magnitude(values[j]), tops[piece]);
        decoded[j] = below < 0 ? 0.0f : __uint_as_float(((tops[piece] >> 23) - (u32)below) << 23 | sign << 31);
        if (below < 0) continue;
        codes[at] = (u8)(sign << 3 | (u32)below);
        if (wide) ((i64*)kept)[at] = i;
        else ((int*)kept)[at] = (int)i;
        ++at;
    }
    if (first) return;
    told[SENT] = place.all;
    // An entropy coder asks for one code at least.
    if (place.all == 0) codes[0] = 0;
}

// Codes behind the exponents: the rANS block that is made of them, or four bits each where that is not shorter.
extern "C" __global__ void exp4_close(const u8* codes, const i64* block, const u8* coded, u8* data, i64* told) {
    const i64 me = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const i64 sent = told[SENT], tensors = told[TENSORS], plain = (sent + 1) / 2;
    const bool packs = block[BLOCK_LENGTH] >= plain;
    const i64 length = packs ? plain : block[BLOCK_LENGTH];
    if (me == 0) told[VALUE_BYTES] = tensors + length;
    if (me == 0 && packs && told[MODE] != NON_FINITE) told[MODE] = PACKED;
    for (i64 b = me; b < length; b += stride)
        data[tensors + b] = packs ? (u8)(codes[2 * b] | (2 * b + 1 < sent ? codes[2 * b + 1] << 4 : 0)) : coded[b];
}

// One bit per value, set where it is negative, behind two bytes for each tensor that is counted.
extern "C" __global__ void signs_write(const float* values, i64 room, const i64* counted, u8* data, i64* told) {
    const i64 b = (i64)blockIdx.x * blockDim.x + threadIdx.x, count = smaller(*counted, room), scales = 2 * told[TENSORS];
    if (b == 0) told[SENT] = *counted, told[VALUE_BYTES] = scales + bytes_of(count);
    if (b >= bytes_of(count)) return;
    u32 bits = 0;
    for (int k = 0; k < 8 && 8 * b + k < count; ++k) {
        bits |= __float_as_uint(values[8 * b + k]) >> 31 << k;
        if (magnitude(values[8 * b + k]) >= INFINITE_KEY) told[MODE] = NON_FINITE;
    }
    data[scales + b] = (u8)bits;
}

// Coordinates that are summed up together (reference/rounding.py).
#define CHUNK 4096

// One block: where the values of each piece begin, and its chunks; how many pieces before it send anything.
extern "C" __global__ void means_begin(
    const void* indices, i64 wide, i64 room, const i64* counted, const i64* ends, i64 number, i64* firsts, i64* chunks, u32* ranks, i64* told
) {
    const i64 count = smaller(*counted, room);
    auto below = [=](i64 end) {
        i64 low = 0, high = count;
        while (low < high) {
            const i64 middle = (low + high) / 2;
            if (index_at(indices, wide, middle) < end) low = middle + 1;
            else high = middle;
        }
        return low;
    };
    i64 chunks_before = 0, used_before = 0, total;
    for (i64 base = 0; base < number; base += blockDim.x) {
        const i64 p = base + threadIdx.x;
        const i64 first = p < number ? below(p ? ends[p - 1] : 0) : 0, size = p < number ? below(ends[p]) - first : 0;
        const i64 at = chunks_before + block_scan((size + CHUNK - 1) / CHUNK, &total);
        chunks_before += total;
        const i64 rank = used_before + block_scan(size > 0, &total);
        used_before += total;
        if (p < number) firsts[p] = first, chunks[p] = at, ranks[p] = (u32)rank;
    }
    if (threadIdx.x == 0) firsts[number] = count, chunks[number] = chunks_before, told[TENSORS] = used_before;
}

// Sums of magnitudes: a warp has a chunk.
extern "C" __global__ void means_sum(const float* values, const i64* firsts, const i64* chunks, i64 number, double* sums) {
    const i64 chunk = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (chunk >= chunks[number]) return;
    const Pieces pieces = {chunks + 1, number};
    const i64 piece = pieces.of(chunk), first = firsts[piece] + CHUNK * (chunk - chunks[piece]);
    const i64 stop = smaller(first + CHUNK, firsts[piece + 1]);
    double sum = 0.0;
    for (i64 j = first + (threadIdx.x & 31); j < stop; j += 32) sum += (double)__uint_as_float(magnitude(values[j]));
    for (int by = 16; by; by >>= 1) sum += __shfl_xor_sync(FULL, sum, by);
    if ((threadIdx.x & 31) == 0) sums[chunk] = sum;
}

// A warp folds the sums of a piece; their mean is its scale.
extern "C" __global__ void __launch_bounds__(32) means_scale(
    const i64* firsts, const i64* chunks, const u32* ranks, double* sums, u8* data
) {
    const i64 piece = blockIdx.x, many = chunks[piece + 1] - chunks[piece];
    if (many == 0) return;
    double* own = sums + chunks[piece];
    for (i64 half = ((i64)1 << bit_length((u64)(many - 1))) / 2; half; half >>= 1) {
        for (i64 k = threadIdx.x; k < half; k += 32)
            if (k + half < many) own[k] += own[k + half];
        __syncwarp();
    }
    if (threadIdx.x) return;
    const double mean = own[0] / (double)(firsts[piece + 1] - firsts[piece]), most = (double)__uint_as_float(0x7f7f0000u);
    const u32 bits = __float_as_uint((float)(mean > most ? most : mean));
    store16(data + 2 * ranks[piece], (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ u32 scale_bits(const u8* place) { return ((u32)place[0] | (u32)place[1] << 8) << 16; }

// What each value becomes.
extern "C" __global__ void means_decoded(
    const void* indices, i64 wide, const float* values, i64 room, const i64* counted, const i64* ends, i64 number, const u32* ranks, const u8* data,
    float* decoded
) {
    const Pieces pieces = {ends, number};
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x), stop = smaller(first + SHARE, smaller(*counted, room));
    i64 piece = -1;
    for (i64 j = first; j < stop; ++j) {
        piece = pieces.of(index_at(indices, wide, j), piece);
        decoded[j] = __uint_as_float(scale_bits(data + 2 * ranks[piece]) | (__float_as_uint(values[j]) & 0x80000000u));
    }
}

// ---- reading ----
//
// `found` is what is known of the set, places as in index.cuh: where it is no set, nothing is read. `head` becomes what is known of the message.

// Marks the pieces that indices lie in.
extern "C" __global__ void values_pieces(const void* indices, i64 wide, i64 count, const i64* found, const i64* ends, i64 number, u32* ranks) {
    if (found[STATUS] != FINE) return;
    const Pieces pieces = {ends, number};
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    i64 last = -1;
    for (i64 j = first; j < smaller(first + SHARE, count); ++j) {
        const i64 piece = pieces.of(index_at(indices, wide, j), last);
        if (piece != last) ranks[piece] = 1;
        last = piece;
    }
}

// One block: marks become the number of those before them.
extern "C" __global__ void values_ranks(u32* ranks, i64 number, i64* head) {
    i64 before = 0, total;
    for (i64 base = 0; base < number; base += blockDim.x) {
        const i64 p = base + threadIdx.x;
        const i64 rank = before + block_scan(p < number ? ranks[p] : 0, &total);
        if (p < number) ranks[p] = (u32)rank;
        before += total;
    }
    if (threadIdx.x == 0) head[COUNT] = before;
}

// What follows the exponents, with zeros behind it, in `most` bytes; the exponents are looked at.
extern "C" __global__ void exp4_fetch(const u8* data, i64 size, const i64* found, i64 count, i64 packed, u8* codes, i64 most, i64* head) {
    const i64 me = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const i64 at = found[LENGTH], tensors = head[COUNT], rest = size - at - tensors;
    bool fine = found[STATUS] == FINE && rest >= 0 && rest <= most;
    if (fine && packed) fine = rest == (count + 1) / 2 && (count % 2 == 0 || data[size - 1] >> 4 == 0);
    if (me == 0) head[LENGTH] = rest;
    if (me == 0 && !fine) head[STATUS] = CORRUPT;
    for (i64 b = me; fine && b < tensors; b += stride)
        if ((signed char)data[at + b] < -126) head[STATUS] = CORRUPT;
    for (i64 b = me; b < most; b += stride) codes[b] = fine && b < rest ? data[at + tensors + b] : 0;
}

// The values. `block`: that of the codes; without one they are four bits each.
extern "C" __global__ void exp4_values(
    const u8* data, const i64* found, const i64* block, const u8* codes, const void* indices, i64 wide, i64 count, const i64* ends, i64 number,
    const u32* ranks, float* values, i64* head
) {
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    if (head[STATUS] != FINE) return;
    if (block && (block[BLOCK_STATUS] != FINE || block[BLOCK_LENGTH] != head[LENGTH])) {
        if (first == 0) head[STATUS] = CORRUPT;
        return;
    }
    const Pieces pieces = {ends, number};
    i64 piece = -1;
    for (i64 j = first; j < smaller(first + SHARE, count); ++j) {
        piece = pieces.of(index_at(indices, wide, j), piece);
        const u32 code = block ? codes[j] : codes[j / 2] >> 4 * (j & 1) & 15;
        const int biased = (int)(signed char)data[found[LENGTH] + ranks[piece]] - (int)(code & 7) + 127;
        if (biased < 1) head[STATUS] = CORRUPT;
        values[j] = __uint_as_float((u32)biased << 23 | (code & 8) << 28);
    }
}

// Plus or minus tau by the bits behind a set; or, with `ranks`, the scale of the piece, which lies before the bits.
extern "C" __global__ void signs_values(
    const u8* data, i64 size, const i64* found, const void* indices, i64 wide, i64 count, const i64* ends, i64 number, const u32* ranks, float tau,
    float* values, i64* head
) {
    const i64 b = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    const i64 at = found[LENGTH] + 2 * head[COUNT], end = at + bytes_of(count);
    if (found[STATUS] != FINE || end != size || (count % 8 && data[end - 1] >> count % 8)) {
        if (b == 0) head[STATUS] = CORRUPT;
        return;
    }
    const Pieces pieces = {ends, number};
    i64 piece = -1;
    u32 scale = __float_as_uint(tau);
    for (i64 j = 8 * b; j < smaller(8 * b + 8, count); ++j) {
        if (ranks) {
            piece = pieces.of(index_at(indices, wide, j), piece);
            scale = scale_bits(data + found[LENGTH] + 2 * ranks[piece]);
        }
        values[j] = __uint_as_float(scale ^ (u32)(data[at + b] >> (j & 7) & 1) << 31);
    }
}
