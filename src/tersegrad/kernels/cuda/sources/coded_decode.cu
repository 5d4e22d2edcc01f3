// What rANS blocks of levels and of exponents stand for (spec/wire.md, 5.9 and 5.11): a message is decoded to numbers, or to bytes, without symbols in
// between.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "classes.cuh"

// What is known of a message, and of what its symbols are: whether it is well-formed so far. BELOW: what is added to symbols that are not 0.
enum { OF_FORM, OF_CHUNK, OF_ALPHABET, OF_BELOW, OF_ONLY, OF_FACTS };
#define ANOTHER 3
#define NORMAL_MODE 0
// Blocks that look at steps, at most.
#define LOOKING 64
// Bytes of a table that are read, and of a list of chunks behind it, in words.
#define HEAD_WORDS ((8 + 32 * 256 + 4096) / 4)

__device__ __forceinline__ bool finite(u32 bits) { return (bits & 0x7fffffffu) < 0x7f800000u; }

// Whether one of the blocks that looked at steps found one that is not finite, for all threads of a warp.
__device__ __forceinline__ bool any_poison(const u32* poison, i64 looking) {
    bool found = false;
    for (i64 k = threadIdx.x & 31; k < looking; k += 32) found |= poison[k] != 0;
    return __ballot_sync(FULL, found) != 0;
}

// The first block reads what stands before the chunks: the mode, the table, where chunks begin. It is `front` bytes from the start to the rANS block.
// Without an alphabet that is `given` the message tells the least and the largest exponent. Other blocks lay the steps where they are aligned.
extern "C" __global__ void __launch_bounds__(256) values_open(
    const u8* data, i64 size, i64 front, i64 count, i64 given, i64 buckets, float* steps, u32* poison, u32* cells, i64* offsets, i64* words, i64* facts,
    i64* wrong
) {
    __shared__ u32 head[HEAD_WORDS], w[256];
    __shared__ int f[256], start[257];
    __shared__ short q[256], listed[256];
    __shared__ int present, problem;
    __shared__ i64 alphabet, tables;
    const int t = threadIdx.x;
    if (blockIdx.x) {
        bool all = true;
        for (i64 k = (i64)(blockIdx.x - 1) * blockDim.x + t; k < buckets; k += (i64)(gridDim.x - 1) * blockDim.x) {
            const u32 bits = load32(data + 1 + 4 * k);
            all &= finite(bits);
            steps[k] = __uint_as_float(bits);
        }
        const int good = __syncthreads_count(all);
        if (t == 0) poison[blockIdx.x - 1] = good < blockDim.x;
        return;
    }
    const i64 nbytes = size - front;
    // One thread reads what threads fetch together.
    const u64 begins_at = (u64)(data + front);
    const u32* from = (const u32*)(begins_at & ~(u64)3);
    const i64 lead = begins_at & 3, fetched = smaller(HEAD_WORDS, (lead + nbytes + 3) / 4);
    const int mode = data[0], least = given ? 1 : data[1], largest = given ? 1 : data[2];
#pragma unroll 4
    for (i64 k = t; k < fetched; k += blockDim.x) head[k] = from[k];
    __syncthreads();
    const u8* block = (const u8*)head + lead;
    const int form = block[0];
    if (t == 0) {
        const bool known = mode == NORMAL_MODE && 1 <= least && least <= largest && largest <= 254;
        bool good = known && form == RAW;
        alphabet = given ? given : known ? largest - least + 2 : 2;
        if (good) good = nbytes == 1 + raw_bytes(count, alphabet);
        else if (known) {
            BitReader in = {block + 1, 8 * smaller(nbytes - 1, 32 * alphabet + 2), 0, form >= 14 && form <= 18};
            if (in.good) read_table(in, (int)alphabet, q, listed);
            while (in.good && in.at & 7)
                if (in.bit()) in.good = false;
            tables = in.at / 8;
            good = in.good;
        }
        facts[OF_FORM] = form == RAW ? RAW : CODED, facts[OF_CHUNK] = form, facts[OF_ALPHABET] = alphabet, facts[OF_BELOW] = least - 1;
        // Whatever it is, it is read again in another way.
        problem = good ? FINE : ANOTHER;
    }
    __syncthreads();
    const bool coded = problem == FINE && form != RAW;
    const i64 begin = front + 1 + tables;
    if (coded && t < 32) {
        const int found = make_frequencies(q, (int)alphabet, w, f);
        if (t == 0) {
            present = found;
            if (found < 2) {
                int only = 0;
                while (f[only] != TOTAL) ++only;
                facts[OF_FORM] = ONLY_TABLES, facts[OF_ONLY] = only;
                if (begin != size) problem = CORRUPT;
            }
        }
    }
    __syncthreads();
    if (!coded || present < 2) {
        if (t == 0) *wrong = problem;
        return;
    }
    const int* frequencies = f;
    make_cells(f, (int)alphabet, start, [=](int slot, u32 symbol, u32 place) {
        cells[slot] = (u32)frequencies[symbol] | place << 12 | symbol << 24;
    });
    const Layout l = layout_of(count, alphabet, form);
    const i64 listed_at = 1 + tables, chunks_at = begin + 4 * l.chunks;
    const bool fits = chunks_at <= size, near = lead + listed_at + 4 * l.chunks <= 4 * HEAD_WORDS;
    const u8* list = near ? block + listed_at : data + begin;
    i64 at = chunks_at;
    bool bad = !fits;
    for (i64 base = 0; base < l.chunks; base += blockDim.x) {
        const i64 c = base + t;
        i64 bytes = 0, total;
        if (c < l.chunks && fits) {
            const i64 number = load32(list + 4 * c);
            words[c] = number;
            bad |= number > l.coded(c);
            bytes = 4 * l.lanes + 2 * number;
        }
        const i64 before = block_scan(bytes, &total);
        if (c < l.chunks) offsets[c] = at + before;
        at += total;
    }
    const int refused = __syncthreads_count(bad || at != size);
    if (t == 0) *wrong = refused ? CORRUPT : FINE;
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
#pragma unroll 16
    for (int i = 0; i < TOTAL / 4; i += 32) own[i + threadIdx.x] = ((const Sixteen*)cells)[i + threadIdx.x];
    __syncwarp();
    return {own[0].word};
}

// Calls put(i, symbol) for all symbols of a message without chunks, by all threads; whether they are well-formed, as far as this thread saw.
template <class Put>
__device__ bool each_plain(const u8* block, i64 count, i64 alphabet, i64 form, i64 only, Put put) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    const int width = raw_bits(alphabet);
    bool good = true;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        u32 symbol = (u32)only;
        if (form == RAW) {
            const i64 bit = i * width;
            const u8* p = block + 1 + (bit >> 3);
            const int shift = bit & 7, end = (bit + width) & 7;
            u32 held = p[0];
            if (shift + width > 8) held |= (u32)p[1] << 8;
            symbol = held >> shift & ((1u << width) - 1);
            // What lies behind the last symbol is zero.
            good &= symbol < alphabet && !(i + 1 == count && end && block[raw_bytes(count, alphabet)] >> end);
        }
        put(i, (u8)symbol);
    }
    return good;
}

// A warp for each chunk, or all for what is not cut into chunks; into `bytes` where there are some. All that is far away is asked for at once.
extern "C" __global__ void __launch_bounds__(32) level_chunks(
    const u8* data, i64 front, i64 count, i64 bucket, i64 buckets, i64 window, i64 looking, const float* steps, const u32* poison, const u32* cells,
    const i64* offsets, const i64* words, const i64* facts, float* out, u8* bytes, i64* wrong
) {
    __shared__ Sixteen own_cells[TOTAL / 4];
    __shared__ u16 ring[RING];
    const i64 c = blockIdx.x, problem = *wrong, form = facts[OF_FORM], alphabet = facts[OF_ALPHABET], only = facts[OF_ONLY], exponent = facts[OF_CHUNK];
    const i64 begin = offsets[c], number = words[c];
    const bool poisoned = any_poison(poison, looking);
    if (problem != FINE) return;
    const ByteOf byte = {bytes, (u32)-window, false};
    LevelValue value = {out, steps, (u32)bucket, (u32)buckets, (float)(8388608 + window), poisoned};
    bool good;
    if (form != CODED) {
        good = bytes ? each_plain(data + front, count, alphabet, form, only, byte) : each_plain(data + front, count, alphabet, form, only, value);
    } else {
        const Layout l = layout_of(count, alphabet, exponent);
        if (c >= l.chunks) return;
        const NearCells look = bring_near(cells, own_cells);
        if (bytes) {
            good = decode_chunk(l, c, alphabet, data + begin, number, ring, NoContext(), look, byte);
        } else {
            KEEP_TOGETHER(value.out);
            value.soon = value.at(c * l.size + 512 * (threadIdx.x & 31));
            good = decode_chunk(l, c, alphabet, data + begin, number, ring, NoContext(), look, value);
        }
    }
    if (!good) *wrong = CORRUPT;
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
    const u8* data, i64 front, i64 count, const u32* cells, const i64* offsets, const i64* words, const i64* facts, float* out, u8* bytes, i64* wrong
) {
    __shared__ Sixteen own_cells[TOTAL / 4];
    __shared__ u16 ring[RING];
    __shared__ u64 near[16];
    const i64 c = blockIdx.x, problem = *wrong, form = facts[OF_FORM], alphabet = facts[OF_ALPHABET], only = facts[OF_ONLY], exponent = facts[OF_CHUNK];
    const i64 begin = offsets[c], number = words[c];
    const u32 below = (u32)facts[OF_BELOW];
    if (problem != FINE) return;
    const ByteOf byte = {bytes, below, true};
    PowerValue value = {out, data + 3, (count + 7) / 8, below, (u32*)near};
    bool good;
    if (form != CODED) {
        good = bytes ? each_plain(data + front, count, alphabet, form, only, byte) : each_plain(data + front, count, alphabet, form, only, value);
    } else {
        const Layout l = layout_of(count, alphabet, exponent);
        if (c >= l.chunks) return;
        const NearCells look = bring_near(cells, own_cells);
        if (bytes) {
            good = decode_chunk(l, c, alphabet, data + begin, number, ring, NoContext(), look, byte);
        } else {
            KEEP_TOGETHER(value.out);
            value.soon = value.word(c * l.size);
            good = decode_chunk(l, c, alphabet, data + begin, number, ring, NoContext(), look, value);
        }
    }
    if (!good) *wrong = CORRUPT;
}
