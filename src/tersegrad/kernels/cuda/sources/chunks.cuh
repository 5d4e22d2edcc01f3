// Chunks of a vector, of each of which some coordinates are sent (spec/wire.md, 4.10).
#pragma once
#include "scan.cuh"

// A region as the host describes it: the columns of a row of a table, whose last row tells what is before its end.
struct Region {
    // Where it begins, its columns, what a chunk is, how many of its places are sent, how many chunks lie side by side.
    i64 start, cols, height, width, keep, size, across;
    // What is before it: chunks, places, chunks that are coded, and places of these.
    i64 chunk, place, coded, spot;
    // Where its splits are, steps of its first chunk, and how many a chunk may have. Chunks that are sent whole have none.
    i64 splits, steps, room;
    __device__ bool whole() const { return keep == size; }
};

// The last region before which there are at most `i` of what `column` counts.
__device__ __forceinline__ const Region& region_of(const Region* regions, i64 number, i64 Region::*column, i64 i) {
    i64 low = 0, high = number - 1;
    while (low < high) {
        const i64 middle = (low + high + 1) / 2;
        if (regions[middle].*column <= i) low = middle;
        else high = middle - 1;
    }
    return regions[low];
}

// The first coordinate of a chunk of a region.
__device__ __forceinline__ i64 corner_of(const Region& r, i64 own) {
    // Division of short numbers takes a fraction of the time.
    const bool fits = own >> 32 == 0 && r.across >> 32 == 0;
    const i64 row = fits ? (i64)((u32)own / (u32)r.across) : own / r.across;
    return r.start + row * r.height * r.cols + (own - row * r.across) * r.width;
}

// How far a place is from the first one of its chunk.
struct Across {
    i64 cols;
    u32 width, inverse;
    __device__ explicit Across(const Region& r) : cols(r.cols), width((u32)r.width), inverse(0xffffffffu / width + 1) {}
    __device__ i64 operator()(int i) const {
        const u32 row = width > 1 ? __umulhi((u32)i, inverse) : (u32)i;
        return (i64)row * cols + ((u32)i - row * width);
    }
};

// The same for things with ends: the one in which the i-th lies.
__device__ __forceinline__ i64 owner_of(const i64* firsts, i64 number, i64 i) {
    i64 low = 0, high = number - 1;
    while (low < high) {
        const i64 middle = (low + high + 1) / 2;
        if (firsts[middle] <= i) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Places `base` .. `base + size` of a chunk, with c chosen ones, of which the first is number `place` of the chunk.
struct Node {
    int base, size, c, place, depth;
    __device__ bool waits() const { return c == 1 || (c == 2 && size <= 4096); }
    __device__ bool whole() const { return c == size; }
    __device__ int left() const { return (size + 1) / 2; }
    __device__ int right() const { return size / 2; }
    // The least number of chosen ones in the left half, and how many numbers there are.
    __device__ int first() const { return c > right() ? c - right() : 0; }
    __device__ int options() const { return (c < left() ? c : left()) - first() + 1; }
    __device__ u64 packed() const { return (u64)base | (u64)size << 16 | (u64)c << 34 | (u64)place << 44 | (u64)depth << 54; }
    __device__ Node half(int a, bool second) const {
        if (second) return {base + left(), right(), c - a, place + a, depth + 1};
        return {base, left(), a, place, depth + 1};
    }
};
__device__ __forceinline__ Node unpacked(u64 p) {
    return {(int)(p & 0xffff), (int)(p >> 16 & 0x3ffff), (int)(p >> 34 & 0x3ff), (int)(p >> 44 & 0x3ff), (int)(p >> 54)};
}
__device__ __forceinline__ u64 pairs_of(u64 size) { return size * (size - 1) / 2; }

// The last slots of the numbers that a node's left half may have, one behind the other.
__device__ __forceinline__ const u16* splits_of(const u16* splits, const Region& r, const Node& node) {
    const i64 row = (2 * node.depth + (node.size - (r.size >> node.depth))) * (r.keep + 1) + node.c;
    return splits + r.splits + row * (r.keep + 1);
}

// The quotient of a division by a number below 2^24, and the rest, by what `inverse_of` makes of it.
__device__ __forceinline__ u64 inverse_of(u64 by) { return by > 1 ? ~(u64)0 / by + 1 : 0; }
__device__ __forceinline__ u64 divided(u64 x, u32 by, u64 inverse, u64* rest) {
    u64 quotient = by > 1 ? __umul64hi(x, inverse) : x, left = x - quotient * by;
    // Rarely it is one too large.
    if (left >> 63) left += by, --quotient;
    *rest = left;
    return quotient;
}
