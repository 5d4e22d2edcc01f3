// The octaves of a segment as a rANS block with two contexts: lines and columns (spec/wire.md, 4.11).
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "classes.cuh"

// A block writes octaves as a rANS block (two contexts), or tells only its length: `words`, `numbers` and `states` are its coded chunks.
struct Octaves {
    const u8 *symbols, *tables;
    const u16* words;
    const i64* numbers;
    const u32* states;
    i64 count, tables_bytes;
    bool informative;
    __device__ i64 length(bool* raw) const {
        *raw = false;
        if (!count) return 0;
        const Layout l = layout_of(count, OCTAVES, SIDE_CHUNK);
        const i64 most = 1 + raw_bytes(count, OCTAVES);
        i64 total = 1 + tables_bytes;
        *raw = total >= most;
        for (i64 c = 0; informative && c < l.chunks; ++c) total += 4 + 4 * l.lanes + 2 * numbers[c];
        *raw |= total >= most;
        return *raw ? most : total;
    }
    __device__ void write(u8* out) const {
        const int t = threadIdx.x;
        bool raw;
        if (!length(&raw)) return;
        if (t == 0) out[0] = raw ? RAW : SIDE_CHUNK;
        if (raw) {
            for (i64 b = t; 2 * b < count; b += blockDim.x)
                out[1 + b] = (u8)((symbols[2 * b] & 15) | (2 * b + 1 < count ? (symbols[2 * b + 1] & 15) << 4 : 0));
            return;
        }
        for (i64 b = t; b < tables_bytes; b += blockDim.x) out[1 + b] = tables[b];
        if (!informative) return;
        const Layout l = layout_of(count, OCTAVES, SIDE_CHUNK);
        out += 1 + tables_bytes;
        i64 at = 4 * l.chunks;
        for (i64 c = 0; c < l.chunks; ++c) {
            const u16* from = words + c * l.size + l.coded(c) - numbers[c];
            if (t == 0) store32(out + 4 * c, (u32)numbers[c]);
            for (int k = t; k < l.lanes; k += blockDim.x) store32(out + at + 4 * k, states[c * l.lanes + k]);
            at += 4 * l.lanes;
            for (i64 k = t; k < numbers[c]; k += blockDim.x) store16(out + at + 2 * k, from[k]);
            at += 2 * numbers[c];
        }
    }
};
