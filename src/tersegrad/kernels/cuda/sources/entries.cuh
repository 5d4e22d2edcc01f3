// Tables as lists of their symbols, which take less room than a cell for each slot.
#include "common.cuh"
#include "rans_tables.cuh"

// A warp writes, for a table of frequencies, start | (frequency - 1) << 12 | symbol << 24 of each symbol that has any, one after the other,
// the last one twice; and which symbol is the only one, if any.
__device__ void make_entries(const int* f, int alphabet, u32* entries, u8* only) {
    const int lane = threadIdx.x & 31;
    int start = 0, number = 0;
    for (int base = 0; base < alphabet; base += 32) {
        const int k = base + lane, own = k < alphabet ? f[k] : 0;
        const int upto = (int)warp_scan(own);
        const u32 present = __ballot_sync(FULL, own > 0);
        if (own) {
            u32* to = entries + number + __popc(present & ((1u << lane) - 1));
            to[0] = (u32)(start + upto - own) | (u32)(own - 1) << 12 | (u32)k << 24;
            if (start + upto == TOTAL) to[1] = to[0];
        }
        if (own == TOTAL) *only = (u8)k;
        start += __shfl_sync(FULL, upto, 31);
        number += __popc(present);
    }
    __syncwarp();
}

// Bytes for the tables of a segment in a block: entries, and the entry of every slot, or of every second or fourth, as far as there is room.
#ifndef NEAR_BYTES
#define NEAR_BYTES 43008
#endif
// Not all slots have an entry told, but at least one in 2^6.
#define COARSEST 6

// Whether a slot lies behind those of an entry that begins at or before it.
__device__ __forceinline__ bool behind(u32 slot, u32 entry) { return slot - (entry & 0xfff) > (entry >> 12 & 0xfff); }

// Slots to entries. Every slot or every second (`fine`): the entry is the one that is told for it, or the next.
template <bool fine>
struct Entries {
    const u32* entries;
    const u8* guesses;
    int coarse, stride;
    __device__ __forceinline__ const u32* place(u32 context, u32 slot) const {
        return entries + context * stride + guesses[(context * TOTAL + slot) >> coarse];
    }
    __device__ __forceinline__ u32 entry_from(const u32* own, u32 slot) const {
        u32 entry = own[0];
        if (fine) {
            const u32 next = own[1];
            // All ones where the slot lies before those of the next one. Both are read at once: not one of them when it is known which.
            int before = (int)(slot - (next & 0xfff)) >> 31;
            KEEP_NUMBER(before);
            return next ^ ((next ^ entry) & (u32)before);
        }
        while (behind(slot, entry)) entry = *++own;
        return entry;
    }
    __device__ __forceinline__ u32 find(u32 context, u32 slot) const { return entry_from(place(context, slot), slot); }
    // Two at once: neither waits for the other.
    __device__ __forceinline__ void find_both(const u32 (&contexts)[2], const u32 (&slots)[2], u32 (&found)[2]) const {
        const u32 *first = place(contexts[0], slots[0]), *second = place(contexts[1], slots[1]);
        found[0] = entry_from(first, slots[0]);
        found[1] = entry_from(second, slots[1]);
    }
    __device__ __forceinline__ void open(u32 entry, u32 slot, u32* cell, u8* symbol) const {
        *symbol = (u8)(entry >> 24);
        *cell = ((entry >> 12 & 0xfff) + 1) | (slot - (entry & 0xfff)) << 16;
    }
    __device__ void operator()(u32 context, u32 slot, u32* cell, u8* symbol) const { open(find(context, slot), slot, cell, symbol); }
    __device__ __forceinline__ void both(const u32 (&contexts)[2], const u32 (&slots)[2], u32 (&cells)[2], u8 (&symbols)[2]) const {
        u32 found[2];
        find_both(contexts, slots, found);
        for (int h = 0; h < 2; ++h) open(found[h], slots[h], &cells[h], &symbols[h]);
    }
};

// A block fetches the entries of tables, which are `from_stride` apart, and makes guesses behind them; how coarse these are. One place more than
// entries, since the one behind an entry is read with it.
__device__ int load_entries(const u32* entries, int from_stride, int tables, int stride, u32* near) {
    for (int k = threadIdx.x; k < tables * stride; k += blockDim.x) near[k] = entries[k / stride * from_stride + k % stride];
    __syncthreads();
    int coarse = 0;
    while (4 * tables * stride + (tables * TOTAL >> coarse) > NEAR_BYTES) ++coarse;
    u8* const guesses = (u8*)(near + tables * stride);
    // A thread goes through 256 slots of a table: the last entry that starts at or before a slot.
    for (int run = threadIdx.x; run < tables * TOTAL / 256; run += blockDim.x) {
        const u32* own = near + run / 16 * stride;
        u32 slot = run % 16 * 256, k = 0, entry = own[0], *to = (u32*)(guesses + ((run / 16 * TOTAL + slot) >> coarse));
        for (const u32 end = slot + 256; slot < end; ++to) {
            u32 four = 0;
            for (int b = 0; b < 4; ++b, slot += 1 << coarse) {
                while (behind(slot, entry)) entry = own[++k];
                four |= k << 8 * b;
            }
            *to = four;
        }
    }
    __syncthreads();
    return coarse;
}
