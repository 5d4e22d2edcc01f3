// The octaves of a segment as a rANS block with two contexts: lines and columns (spec/wire.md, 4.11).
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "classes.cuh"

// What a warp needs to make a table.
struct Bench {
    u32 w[256];
    int f[256];
    short q[256];
    TableRoom room;
};

// A warp writes the table of `count(k)` as bits, and its codes: frequency | start << 16.
template <class Count>
__device__ void make_table(Count count, int alphabet, Bench& bench, u8* bits, i64* length, int* present, u32* codes) {
    const int lane = threadIdx.x & 31;
    const i64 written = write_table(count, alphabet, bench.q, bits, bench.room);
    const int found = make_frequencies(bench.q, alphabet, bench.w, bench.f);
    i64 start = 0;
    for (int base = 0; base < alphabet; base += 32) {
        const int k = base + lane, f = k < alphabet ? bench.f[k] : 0;
        const i64 upto = warp_scan(f);
        if (k < alphabet) codes[k] = (u32)f | (u32)(start + upto - f) << 16;
        start += __shfl_sync(FULL, upto, 31);
    }
    if (lane == 0) *length = written, *present = found;
    __syncwarp();
}

// How an octave is coded: the largest state that it is added to, and the inverse of its frequency.
struct OctaveCode {
    u32 frequency, start, last, inverse;
};

// What a block that writes octaves shares.
struct OctavesRoom {
    Bench benches[2];
    u8 bits[2 * TABLE_BYTES], tables[2 * TABLE_BYTES];
    i64 lengths[2];
    int present[2];
    u32 codes[2 * OCTAVES];
    OctaveCode ready[2 * OCTAVES + 1];
};

// A warp encodes the only chunk of a block with so few octaves that a thread has one lane, if any. Octaves are read a group of steps ahead: a step
// waits for nothing but the one before. The number of words.
__device__ i64 encode_few(const Layout& l, const u8* symbols, const OctaveCode* codes, u16* words, u32* states) {
    constexpr int G = 8;
    const int t = threadIdx.x & 31, lanes = l.lanes, coded = (int)l.coded(0);
    const bool own = t < lanes;
    const u32 before = (1u << t) - 1;
    u32 x = 65536, soon[G];
    int left = coded, base = (coded - 1) / lanes * lanes;
    for (int r = 0; own && r < l.rows; ++r) x += (u32)symbols[coded + r * lanes + (t - coded % lanes + lanes) % lanes] % OCTAVES << r * l.width;
    // The last steps come first; the code behind those of octaves leaves a state as it is.
    auto fetch = [&]() {
#pragma unroll
        for (int a = 0; a < G; ++a) {
            const int i = base - a * lanes + t;
            soon[a] = own && i >= 0 && i < coded ? symbols[i] : 2 * OCTAVES;
        }
    };
    fetch();
    while (base >= 0) {
        OctaveCode now[G];
#pragma unroll
        for (int a = 0; a < G; ++a) now[a] = codes[soon[a]];
        base -= G * lanes;
        if (base >= 0) fetch();
#pragma unroll
        for (int a = 0; a < G; ++a) {
            const OctaveCode& code = now[a];
            const bool full = x > code.last;
            const u32 votes = __ballot_sync(FULL, full);
            left -= __popc(votes);
            if (full) words[left + __popc(votes & before)] = (u16)x, x >>= 16;
            // The quotient may be one too small. The state that follows is quotient * TOTAL + rest + start.
            const u32 quotient = __umulhi(x, code.inverse), rest = x - quotient * code.frequency;
            x += code.start + (quotient + (rest >= code.frequency)) * (TOTAL - code.frequency);
        }
    }
    if (own) states[t] = x;
    return coded - left;
}

// A block writes `count` octaves, those of columns with OCTAVES added, which `counts` has counted; returns the number of bytes. There is room
// for the raw form, for a word of each octave, and for the words' numbers and states of all chunks.
__device__ i64 write_octaves(
    const u8* symbols, i64 count, const int* counts, u16* words, i64* numbers, u32* states, u8* out, OctavesRoom& room
) {
    const int t = threadIdx.x, warp = own_number(), warps = blockDim.x >> 5;
    if (!count) return 0;
    if (warp < 2) {
        const int* from = counts + warp * OCTAVES;
        auto counted = [=](int k) { return (i64)from[k]; };
        make_table(counted, OCTAVES, room.benches[warp], room.bits + warp * TABLE_BYTES, room.lengths + warp, room.present + warp, room.codes + warp * OCTAVES);
    }
    __syncthreads();
    const i64 head = 1 + join_tables(room.bits, TABLE_BYTES, room.lengths, 2, room.tables), most = 1 + raw_bytes(count, OCTAVES);
    const bool informative = room.present[0] > 1 || room.present[1] > 1;
    const Layout l = layout_of(count, OCTAVES, SIDE_CHUNK);
    i64 bytes = head;
    if (informative && head < most) {
        const u32* codes = room.codes;
        auto load = [=](i64 i) { return Raw{symbols[i], 0}; };
        auto look = [=](const Raw& r) { return code_of(codes[r.symbol]); };
        // None of a code without a frequency is ever asked for, but for that behind the others.
        if (t <= 2 * OCTAVES) {
            const u32 f = t < 2 * OCTAVES ? codes[t] & 0xffff : 0;
            room.ready[t] = f ? OctaveCode{f, codes[t] >> 16, (f << 20) - 1, 0xffffffffu / f} : OctaveCode{TOTAL, 0, 0xffffffffu, 0};
        }
        __syncthreads();
        if (warp == 0 && l.lanes <= 32) {
            const i64 number = encode_few(l, symbols, room.ready, words, states);
            if (t == 0) numbers[0] = number;
        }
        for (i64 c = warp; l.lanes > 32 && c < l.chunks; c += warps) {
            const i64 number = encode_chunk(l, c, [=](i64 i) { return (u32)symbols[i] % OCTAVES; }, load, look, words, states);
            if ((t & 31) == 0) numbers[c] = number;
        }
        __syncthreads();
        for (i64 c = 0; c < l.chunks; ++c) bytes += 4 + 4 * l.lanes + 2 * numbers[c];
    }
    if (bytes >= most) {
        if (t == 0) out[0] = RAW;
        for (i64 b = t; 2 * b < count; b += blockDim.x)
            out[1 + b] = (u8)(symbols[2 * b] % OCTAVES | (2 * b + 1 < count ? symbols[2 * b + 1] % OCTAVES << 4 : 0));
        return most;
    }
    if (t == 0) out[0] = SIDE_CHUNK;
    for (i64 b = t; b < head - 1; b += blockDim.x) out[1 + b] = room.tables[b];
    if (!informative) return bytes;
    out += head;
    i64 at = 4 * l.chunks;
    for (i64 c = 0; c < l.chunks; ++c) {
        const u16* from = words + c * l.size + l.coded(c) - numbers[c];
        if (t == 0) store32(out + 4 * c, (u32)numbers[c]);
        for (int k = t; k < l.lanes; k += blockDim.x) store32(out + at + 4 * k, states[c * l.lanes + k]);
        at += 4 * l.lanes;
        for (i64 k = t; k < numbers[c]; k += blockDim.x) store16(out + at + 2 * k, from[k]);
        at += 2 * numbers[c];
    }
    return bytes;
}
