// What index sets share on the device: bits at any position, places of results, how a set is cut.
#pragma once
#include "scan.cuh"

// Places in what the kernels hand on.
enum { STATUS, WHOLE, LENGTH, COUNT, INFINITE, CLASSES, USED = COUNT };
#define GOLOMB 250
#define ENTROPY_GAPS 253
enum { FINE, CORRUPT, TOO_SMALL, UNSORTED };
// What is known of values that are bytes: of how many coordinates they are, how many bytes, the message's mode.
enum { SENT, VALUE_BYTES, MODE };
// Places in the description of a rANS block (rans_tables.cuh), whose status is FINE as well.
enum { BLOCK_LENGTH = 3, BLOCK_STATUS = 4 };
// Bits that a class of gaps leaves open, at most.
#define WIDEST 55

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

// The same for bits that follow each other: those of a word go there at once.
struct Run {
    u32 *words, held;
    i64 word;
    __device__ explicit Run(u32* words) : words(words), held(0), word(0) {}
    __device__ void put(i64 at, u64 value, int width) {
        while (width > 0) {
            const int shift = at & 31, here = 32 - shift < width ? 32 - shift : width;
            if (at >> 5 != word) end();
            word = at >> 5;
            held |= (u32)(value & (((u64)1 << here) - 1)) << shift;
            value >>= here;
            at += here;
            width -= here;
        }
    }
    __device__ void end() {
        if (held) atomicOr(&words[word], held);
        held = 0;
    }
};

// `width` bits, at most 57, at a bit position; all of them lie within the bytes.
__device__ __forceinline__ u64 get_bits(const u8* data, i64 at, int width) {
    u64 held = 0;
    const int shift = at & 7;
    for (int b = 0; 8 * b < shift + width; ++b) held |= (u64)data[(at >> 3) + b] << 8 * b;
    return held >> shift & (((u64)1 << width) - 1);
}

// Whether a plane of `bits` bits lies within the bytes and is padded with zeros.
__device__ __forceinline__ bool plane_fits(const u8* data, i64 nbytes, i64 at, i64 bits) {
    if (at + bytes_of(bits) > nbytes) return false;
    return bits % 8 == 0 || data[at + bits / 8] >> bits % 8 == 0;
}

// Whether a message begins with these bytes.
__device__ __forceinline__ bool begins(const u8* data, i64 at, u64 front) {
    for (int k = 0; k < at; ++k)
        if (data[k] != (u8)(front >> 8 * k)) return false;
    return true;
}

// A thread has SHARE indices in a row, and a block is a span of the set.
#define SHARE 4

// Whether a block has none of `count` indices; the first always has work.
__device__ __forceinline__ bool idle(i64 count) { return blockIdx.x && (i64)blockIdx.x * blockDim.x * SHARE >= count; }

// Two classes for each power of two of gap + 1.
__device__ __forceinline__ int gap_class_of(u64 g) {
    const int e = bit_length(g) - 1;
    return e > 0 ? 2 * e + (int)(g >> (e - 1) & 1) - 1 : 0;
}

// The beginning of a message, up to the form of its set, into `out` if there is one; how many bytes it has.
__device__ __forceinline__ int put_front(u8* out, i64 mode, i64 count, int form) {
    int at = 1;
    if (out) out[0] = (u8)mode;
    for (i64 left = count; at == 1 || left; left >>= 7, ++at)
        if (out) out[at] = (u8)((left & 127) | (left >= 128 ? 128 : 0));
    if (out) out[at] = (u8)form;
    return at + 1;
}

// How values are written: as float32, as bfloat16, or as the bytes that they are already.
enum { WIDE, NARROW, CODED_BYTES };
__device__ __forceinline__ i64 size_of_each(i64 kind) { return kind == WIDE ? 4 : kind == NARROW ? 2 : 1; }

// Value j to its place behind a set.
__device__ __forceinline__ void put_value(u8* place, i64 j, const void* values, i64 kind) {
    if (kind == CODED_BYTES) {
        place[j] = ((const u8*)values)[j];
        return;
    }
    const u32 bits = ((const u32*)values)[j];
    if (kind == WIDE) {
        store32(place + 4 * j, bits);
        return;
    }
    // To the nearest, ties to even; what would become infinite becomes the largest number.
    u32 half = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    if ((half & 0x7fff) >= 0x7f80) half = (half & 0x8000) | 0x7f7f;
    store16(place + 2 * j, half);
}
