// Escapes: planar gamma codes for the coordinates at the ends of a window (spec/wire.md, 4.4, 5.16 and 5.20).
#include "common.cuh"
#include "dither.cuh"
#include "classes.cuh"

// A block lists the escapes of a segment, whose coordinates are bytes: those of which escaped(four bytes) sets the upper bit, each as value(i, byte);
// how many there are.
template <class Escaped, class Value>
__device__ i64 list_escapes(const Sixteen* bytes, i64 size, int* values, Escaped escaped, Value value) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // A warp goes through a stretch of its own, 512 coordinates at a time.
    const i64 rows = (size + 16 * blockDim.x - 1) / (16 * blockDim.x);
    auto found_in = [=](const Sixteen& held, i64 unit) {
        Sixteen found;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const i64 left = size - 16 * unit - 4 * q;
            found.word[q] = left > 0 ? escaped(held.word[q]) & 0x80808080u >> 8 * (4 - (int)smaller(left, 4)) : 0;
        }
        return found;
    };
    auto count = [=](const Sixteen& found) { return __popc(found.word[0]) + __popc(found.word[1]) + __popc(found.word[2]) + __popc(found.word[3]); };
    i64 mine = 0, total;
    // Most rows have none; those with some, or that share a bit with one, are gone through once more.
    u32 some = 0;
#pragma unroll 4
    for (i64 row = 0; row < rows; ++row) {
        const i64 unit = (warp * rows + row) * 32 + lane;
        const int own = 16 * unit < size ? count(found_in(bytes[unit], unit)) : 0;
        mine += own;
        some |= (u32)(own > 0) << (row & 31);
    }
    i64 rank = __shfl_sync(FULL, block_scan(mine, &total), 0);
    for (i64 row = 0; row < rows; ++row) {
        if (!__ballot_sync(FULL, some >> (row & 31) & 1)) continue;
        const i64 unit = (warp * rows + row) * 32 + lane;
        Sixteen held = {{0, 0, 0, 0}};
        if (16 * unit < size) held = bytes[unit];
        const Sixteen found = found_in(held, unit);
        const int own = count(found), upto = (int)warp_scan(own);
        i64 at = rank + upto - own;
        for (int k = 0; own && k < 16; ++k) {
            if (!(found.byte(k) >> 7)) continue;
            if (at < ESCAPES) values[at] = value(16 * unit + k, held.byte(k));
            ++at;
        }
        rank += __shfl_sync(FULL, upto, 31);
    }
    return total;
}

// A block writes the planes of `found` values: gamma codes; the number of bytes.
__device__ i64 write_planes(const int* values, i64 found, u32* words) {
    i64 low = 0, unary = 0;
    for (int pass = 0; pass < 2; ++pass) {
        // First the lengths, and zeros; then the bits. The unary plane has the width of a value as zeros, and a one.
        const i64 second = 8 * ((unary + 7) / 8);
        i64 lows = 0;
        for (i64 base = 0; base < found; base += blockDim.x) {
            const i64 j = base + threadIdx.x;
            const int value = j < found ? values[j] : 1, width = bit_length((u64)value) - 1;
            i64 here;
            const i64 before = lows + block_scan(width, &here), end = before + j + width, at = second + before;
            if (pass && j < found) {
                atomicOr(&words[end >> 5], 1u << (end & 31));
                for (int b = 0; b < width; ++b)
                    if (value >> b & 1) atomicOr(&words[(at + b) >> 5], 1u << ((at + b) & 31));
            }
            lows += here;
        }
        low = lows, unary = lows + found;
        if (!pass)
            for (i64 k = threadIdx.x; k < ((unary + 7) / 8 + (low + 7) / 8 + 3) / 4; k += blockDim.x) words[k] = 0;
        __syncthreads();
    }
    return (unary + 7) / 8 + (low + 7) / 8;
}

// A block reads planar gamma codes, `tail` bytes of them, for the coordinates among n that are marked, and calls settle(i, value) for each;
// whether they are well-formed, settle() says yes to all of them, and they fill their bytes. -1 where there are too many. `places` and `ones`
// have room for ESCAPES numbers, `ones` in shared memory.
template <class Settle>
__device__ int read_escapes(const u8* codes, i64 tail, const u32* marked, i64 n, int* places, int* ones, Settle settle) {
    __shared__ bool malformed;
    const int t = threadIdx.x;
    i64 ends = 0, total;
    if (t == 0) malformed = false;
    // Eight words per thread, one after the other.
    for (i64 base = 0; 32 * base < n; base += 8 * blockDim.x) {
        u32 word[8];
        int own = 0;
        for (int k = 0; k < 8; ++k) {
            word[k] = 32 * (base + 8 * t + k) < n ? marked[base + 8 * t + k] : 0;
            own += __popc(word[k]);
        }
        i64 rank = ends + block_scan(own, &total);
        for (int k = 0; own && k < 8; ++k)
            for (; word[k] && rank < ESCAPES; word[k] &= word[k] - 1, ++rank) places[rank] = (int)(32 * (base + 8 * t + k)) + __ffs((int)word[k]) - 1;
        ends += total;
    }
    if (ends > ESCAPES) return -1;
    // Where the ones of the unary plane stand.
    i64 found = 0, used = 0;
    for (i64 base = 0; found < ends && base < tail; base += blockDim.x) {
        u32 byte = base + t < tail ? codes[base + t] : 0;
        i64 rank = found + block_scan(__popc(byte), &total);
        for (; byte && rank < ends; byte &= byte - 1, ++rank) ones[rank] = (int)(8 * (base + t) + __ffs((int)byte) - 1);
        found += total;
    }
    __syncthreads();
    if (found < ends) return 0;
    if (ends) {
        const int last = ones[ends - 1];
        used = last / 8 + 1;
        if (codes[last / 8] >> last % 8 >> 1) return 0;
    }
    // The low bits give what is added to the ends.
    i64 at = 8 * used;
    for (i64 base = 0; base < ends; base += blockDim.x) {
        const i64 j = base + t;
        const i64 width = j < ends ? ones[j] - (j ? ones[j - 1] : -1) - 1 : 0;
        const i64 begin = at + block_scan(width, &total);
        if (j < ends) {
            i64 value = (i64)1 << smaller(width, 32);
            // What is too large for its place is refused, and so is a width that only such numbers have.
            if (width > 31 || begin + width > 8 * tail) malformed = true;
            else
                for (int b = 0; b < width; ++b) value |= (i64)(codes[(begin + b) >> 3] >> ((begin + b) & 7) & 1) << b;
            if (!settle((i64)places[j], value)) malformed = true;
        }
        at += total;
    }
    if (t == 0 && ((at + 7) / 8 != tail || (at & 7 && codes[at >> 3] >> (at & 7)))) malformed = true;
    __syncthreads();
    return !malformed;
}
