// What rANS blocks of levels and of exponents stand for (spec/wire.md, 5.9 and 5.11): a message is decoded to numbers, or to bytes, without symbols in
// between.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "classes.cuh"

// What is known of a message, and of what its symbols are. BELOW: what is added to symbols that are not 0.
enum { OF_FORM, OF_CHUNK, OF_ALPHABET, OF_BELOW, OF_ONLY, OF_FACTS };
// What is wrong with it, and whether a step is not finite.
enum { WRONG, POISONED = 2 };
#define ANOTHER 3
#define NORMAL_MODE 0

__device__ __forceinline__ bool finite(u32 bits) { return (bits & 0x7fffffffu) < 0x7f800000u; }

// The first block reads what stands before the chunks: the mode, the table, where chunks begin. It is `front` bytes from the start to the rANS block.
// Without an alphabet that is `given` the message tells the least and the largest exponent. Other blocks lay the steps where they are aligned.
extern "C" __global__ void values_open(
    const u8* data, i64 size, i64 front, i64 count, i64 given, i64 buckets, float* steps, u32* cells, i64* offsets, i64* words, i64* facts, i64* state
) {
    __shared__ u32 w[256];
    __shared__ int f[256], start[257];
    __shared__ short q[256], listed[256];
    __shared__ int present;
    __shared__ i64 alphabet, tables;
    __shared__ bool good;
    if (blockIdx.x) {
        bool all = true;
        for (i64 k = (i64)(blockIdx.x - 1) * blockDim.x + threadIdx.x; k < buckets; k += (i64)(gridDim.x - 1) * blockDim.x) {
            const u32 bits = load32(data + 1 + 4 * k);
            all &= finite(bits);
            steps[k] = __uint_as_float(bits);
        }
        if (!all) state[POISONED] = 1;
        return;
    }
    const u8* block = data + front;
    const i64 nbytes = size - front;
    if (threadIdx.x == 0) {
        const int form = nbytes > 0 ? block[0] : 0;
        good = nbytes > 0 && data[0] == NORMAL_MODE;
        alphabet = given;
        facts[OF_BELOW] = 0;
        if (good && !given) {
            const int least = data[1], largest = data[2];
            good = 1 <= least && least <= largest && largest <= 254;
            alphabet = largest - least + 2;
            facts[OF_BELOW] = least - 1;
        }
        facts[OF_FORM] = form == RAW ? RAW : CODED;
        facts[OF_CHUNK] = form;
        facts[OF_ALPHABET] = alphabet;
        if (good && form == RAW) good = nbytes == 1 + raw_bytes(count, alphabet);
        if (good && form != RAW) {
            BitReader in = {block + 1, 8 * smaller(nbytes - 1, 32 * alphabet + 2), 0, form >= 14 && form <= 18};
            if (in.good) read_table(in, (int)alphabet, q, listed);
            while (in.good && in.at & 7)
                if (in.bit()) in.good = false;
            tables = in.at / 8;
            good = in.good;
        }
        // Whatever it is, it is read again in another way.
        if (!good) state[WRONG] = ANOTHER;
    }
    __syncthreads();
    if (!good || facts[OF_FORM] == RAW) return;
    if (threadIdx.x < 32) {
        const int found = make_frequencies(q, (int)alphabet, w, f);
        if (threadIdx.x == 0) present = found;
    }
    __syncthreads();
    const i64 begin = front + 1 + tables;
    if (present < 2) {
        if (threadIdx.x) return;
        int only = 0;
        while (f[only] != TOTAL) ++only;
        facts[OF_FORM] = ONLY_TABLES;
        facts[OF_ONLY] = only;
        if (begin != size) state[WRONG] = CORRUPT;
        return;
    }
    const int* frequencies = f;
    make_cells(f, (int)alphabet, start, [=](int slot, u32 symbol, u32 place) {
        cells[slot] = (u32)frequencies[symbol] | place << 12 | symbol << 24;
    });
    const Layout l = layout_of(count, alphabet, facts[OF_CHUNK]);
    i64 at = begin + 4 * l.chunks;
    bool bad = at > size;
    for (i64 base = 0; base < l.chunks; base += blockDim.x) {
        const i64 c = base + threadIdx.x;
        i64 bytes = 0, total;
        if (c < l.chunks && begin + 4 * l.chunks <= size) {
            words[c] = load32(data + begin + 4 * c);
            bad |= words[c] > l.coded(c);
            bytes = 4 * l.lanes + 2 * words[c];
        }
        const i64 before = block_scan(bytes, &total);
        if (c < l.chunks) offsets[c] = at + before;
        at += total;
    }
    if (bad || at != size) state[WRONG] = CORRUPT;
}

// The bytes that symbols are: levels, or exponents.
struct ByteOf {
    u8* out;
    u32 below;
    bool exponents;
    __device__ void operator()(i64 i, u8 symbol) const { out[i] = (u8)(exponents && !symbol ? 0 : symbol + below); }
};

// Levels times the step of their bucket, which has a multiple of 512 coordinates: a group of steps has one, and a lane holds those of 512
// coordinates, the next ones being on their way.
struct LevelValue {
    float* out;
    const float* steps;
    u32 bucket, buckets;
    float middle;
    bool poisoned;
    float scale, held, soon;
    __device__ float at(i64 i) const {
        const u32 k = (u32)(i >> 9) / (bucket >> 9);
        const float step = steps[k < buckets ? k : buckets - 1];
        return poisoned ? __uint_as_float(0x7fc00000u) : step;
    }
    // 2^23 plus a symbol needs no conversion, and neither sum rounds.
    __device__ float value(u32 symbol, float step) const {
        return __fmul_rn(__fsub_rn(__uint_as_float(0x4b000000u | symbol), middle), step);
    }
    __device__ void operator()(i64 i, u8 symbol) const { out[i] = value(symbol, at(i)); }
    __device__ void begin(i64 i) {
        if ((i & 16383) == 0) {
            held = soon;
            soon = at(i + 16384 + 512 * (threadIdx.x & 31));
        }
        __syncwarp();
        scale = __shfl_sync(FULL, held, (int)(i >> 9 & 31));
    }
    __device__ void step(i64 i, u32 a, u32 b) const {
        float* to = out + i + (threadIdx.x & 31);
        to[0] = value(a, scale);
        to[32] = value(b, scale);
    }
};

// Cells of a message, near the warp that reads a chunk by them.
struct NearCells {
    const u32* cells;
    __device__ void operator()(u32, u32 slot, u32* cell, u8* symbol) const {
        const u32 held = cells[slot];
        *symbol = (u8)(held >> 24);
        *cell = (held & 0xfff) | (held >> 12 & 0xfff) << 16;
    }
};

__device__ __forceinline__ NearCells bring_near(const u32* cells, Sixteen* own) {
#pragma unroll 8
    for (int i = threadIdx.x; i < TOTAL / 4; i += 32) own[i] = ((const Sixteen*)cells)[i];
    __syncwarp();
    return {own[0].word};
}

// A warp for each chunk; into `bytes` where there are some.
extern "C" __global__ void __launch_bounds__(32) level_chunks(
    const u8* data, i64 count, i64 bucket, i64 buckets, i64 window, const float* steps, const u32* cells, const i64* offsets, const i64* words,
    const i64* facts, float* out, u8* bytes, i64* state
) {
    __shared__ Sixteen own_cells[TOTAL / 4];
    __shared__ u16 ring[RING];
    if (state[WRONG] != FINE || facts[OF_FORM] != CODED) return;
    const i64 alphabet = facts[OF_ALPHABET], c = blockIdx.x;
    const Layout l = layout_of(count, alphabet, facts[OF_CHUNK]);
    if (c >= l.chunks) return;
    const NearCells look = bring_near(cells, own_cells);
    const u8* states = data + offsets[c];
    const bool poisoned = state[POISONED] != 0;
    const float middle = (float)(8388608 + window);
    bool good;
    if (bytes) {
        good = decode_chunk(l, c, alphabet, states, words[c], ring, NoContext(), look, ByteOf{bytes, (u32)-window, false});
    } else {
        KEEP_TOGETHER(out);
        LevelValue put = {out, steps, (u32)bucket, (u32)buckets, middle, poisoned};
        put.soon = put.at(c * l.size + 512 * (threadIdx.x & 31));
        good = decode_chunk(l, c, alphabet, states, words[c], ring, NoContext(), look, put);
    }
    if (!good) state[WRONG] = CORRUPT;
}

__device__ __forceinline__ float power_of(u32 symbol, u32 below, u32 minus) {
    return __uint_as_float((symbol ? (symbol + below) << 23 : 0) | minus);
}

// Powers of two with the sign bits of the message. Those of 1024 coordinates are near a warp, the next ones on their way.
struct PowerValue {
    float* out;
    const u8* signs;
    i64 bytes;
    u32 below;
    u32* near;
    u32 soon;
    __device__ u32 word(i64 i) const {
        const i64 at = (i >> 3) + 4 * (threadIdx.x & 31);
        u32 held = 0;
        for (int k = 0; k < 4; ++k) held |= at + k < bytes ? (u32)signs[at + k] << 8 * k : 0;
        return held;
    }
    __device__ void operator()(i64 i, u8 symbol) const {
        out[i] = power_of(symbol, below, (u32)signs[i >> 3] >> (i & 7) << 31);
    }
    __device__ void begin(i64 i) {
        if (i & 1023) return;
        __syncwarp();
        near[threadIdx.x & 31] = soon;
        __syncwarp();
        soon = word(i + 1024);
    }
    __device__ void step(i64 i, u32 a, u32 b) const {
        const int lane = threadIdx.x & 31;
        float* to = out + i + lane;
        const u64 both = *(const u64*)(near + (i >> 5 & 31));
        to[0] = power_of(a, below, (u32)both << (31 - lane) & 0x80000000u);
        to[32] = power_of(b, below, (u32)(both >> 32) << (31 - lane) & 0x80000000u);
    }
};

extern "C" __global__ void __launch_bounds__(32) power_chunks(
    const u8* data, i64 count, const u32* cells, const i64* offsets, const i64* words, const i64* facts, float* out, u8* bytes, i64* state
) {
    __shared__ Sixteen own_cells[TOTAL / 4];
    __shared__ u16 ring[RING];
    __shared__ u64 near[16];
    if (state[WRONG] != FINE || facts[OF_FORM] != CODED) return;
    const i64 alphabet = facts[OF_ALPHABET], c = blockIdx.x;
    const Layout l = layout_of(count, alphabet, facts[OF_CHUNK]);
    if (c >= l.chunks) return;
    const NearCells look = bring_near(cells, own_cells);
    const u8* states = data + offsets[c];
    const u32 below = (u32)facts[OF_BELOW];
    bool good;
    if (bytes) {
        good = decode_chunk(l, c, alphabet, states, words[c], ring, NoContext(), look, ByteOf{bytes, below, true});
    } else {
        KEEP_TOGETHER(out);
        PowerValue put = {out, data + 3, (count + 7) / 8, below, (u32*)near};
        put.soon = put.word(c * l.size);
        good = decode_chunk(l, c, alphabet, states, words[c], ring, NoContext(), look, put);
    }
    if (!good) state[WRONG] = CORRUPT;
}

// Calls put(i, symbol) for all symbols of a message without chunks, by all threads.
template <class Put>
__device__ void each_plain(const u8* block, i64 count, const i64* facts, i64* state, Put put) {
    const i64 alphabet = facts[OF_ALPHABET], stride = (i64)gridDim.x * blockDim.x;
    const int width = raw_bits(alphabet);
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        u32 symbol = (u32)facts[OF_ONLY];
        if (facts[OF_FORM] == RAW) {
            const i64 bit = i * width;
            const u8* p = block + 1 + (bit >> 3);
            const int shift = bit & 7, end = (bit + width) & 7;
            u32 held = p[0];
            if (shift + width > 8) held |= (u32)p[1] << 8;
            symbol = held >> shift & ((1u << width) - 1);
            if (symbol >= alphabet) state[WRONG] = CORRUPT;
            // What lies behind the last symbol is zero.
            if (i + 1 == count && end && block[raw_bytes(count, alphabet)] >> end) state[WRONG] = CORRUPT;
        }
        put(i, (u8)symbol);
    }
}

extern "C" __global__ void level_plain(
    const u8* data, i64 front, i64 count, i64 bucket, i64 buckets, i64 window, const float* steps, const i64* facts, float* out, u8* bytes, i64* state
) {
    if (state[WRONG] != FINE || facts[OF_FORM] == CODED) return;
    const LevelValue value = {out, steps, (u32)bucket, (u32)buckets, (float)(8388608 + window), state[POISONED] != 0};
    if (bytes) each_plain(data + front, count, facts, state, ByteOf{bytes, (u32)-window, false});
    else each_plain(data + front, count, facts, state, value);
}

extern "C" __global__ void power_plain(
    const u8* data, i64 front, i64 count, const i64* facts, float* out, u8* bytes, i64* state
) {
    if (state[WRONG] != FINE || facts[OF_FORM] == CODED) return;
    const u32 below = (u32)facts[OF_BELOW];
    if (bytes) each_plain(data + front, count, facts, state, ByteOf{bytes, below, true});
    else each_plain(data + front, count, facts, state, PowerValue{out, data + 3, (count + 7) / 8, below, nullptr});
}
