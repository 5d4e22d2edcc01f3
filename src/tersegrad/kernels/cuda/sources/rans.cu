// rANS blocks (spec/wire.md, 4.5): the kernels of whole messages.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "meaning.cuh"

__device__ __forceinline__ u32 context_of(const u8* contexts, i64 each, i64 i) { return each ? contexts[each == 1 ? i : i >> 6] : 0; }

struct GivenContext {
    static constexpr int ahead = 4;
    const u8* contexts;
    i64 each;
    __device__ u32 operator()(i64 i) const { return context_of(contexts, each, i); }
};

// Encoders take the size of an alphabet as a number, or where it lies on the device.
__device__ __forceinline__ i64 size_of(i64 given, const i64* there) { return there ? *there : given; }
// And the number of symbols, which then is at most the given one, and taken for one at least.
__device__ __forceinline__ i64 number_of(i64 most, const i64* there) { return there ? larger(1, smaller(*there, most)) : most; }

// Whether a sample is counted that was asked for: long input has one.
__device__ __forceinline__ bool counts_sample(i64 asked, i64 count, i64 cells) { return asked && count >= larger((i64)1 << 16, 4096 * cells); }

// ---- tables ----

// One thread reads the first byte and the tables of a block of `count` symbols.
extern "C" __global__ void rans_parse(const u8* data, i64 nbytes, i64 count, i64 alphabet, i64 contexts, short* q, i64* head) {
    __shared__ short present[256];
    if (threadIdx.x != 0) return;
    const int form = nbytes ? data[0] : 0;
    if (form == RAW) {
        const i64 end = 1 + raw_bytes(count, alphabet);
        head[FORM] = RAW;
        head[LENGTH] = end;
        if (nbytes < end) head[STATUS] = CORRUPT;
        return;
    }
    head[FORM] = CODED;
    head[CHUNK] = form;
    BitReader in = {data + 1, 8 * smaller(nbytes - 1, contexts * (32 * alphabet + 2)), 0, form >= 14 && form <= 18};
    for (i64 c = 0; c < contexts && in.good; ++c) read_table(in, (int)alphabet, q + c * alphabet, present);
    while (in.good && in.at & 7)
        if (in.bit()) in.good = false;
    head[TABLES] = in.at / 8;
    if (!in.good) head[STATUS] = CORRUPT;
}

extern "C" __global__ void rans_frequencies(const short* q, i64 given, const i64* there, int* frequencies, i64* head) {
    const i64 alphabet = size_of(given, there);
    __shared__ u32 w[256];
    __shared__ int f[256];
    if (head[STATUS] != FINE || head[FORM] == RAW) return;
    const int present = make_frequencies(q + blockIdx.x * alphabet, (int)alphabet, w, f);
    for (int s = threadIdx.x; s < alphabet; s += 32) frequencies[blockIdx.x * alphabet + s] = f[s];
    if (threadIdx.x == 0 && present >= 2) atomicMax(&head[INFORMATIVE], (i64)1);
}

// A warp for each table writes it as bits, and how symbols are coded. With one table, bytes were counted as they are: all of them must mean symbols.
extern "C" __global__ void __launch_bounds__(32) rans_table(
    const i64* counts, const int* present, i64 asked, i64 most, const i64* number, i64 given, const i64* there, i64 means, i64 shift, u8* bits,
    i64* lengths, Code* codes, i64* head
) {
    __shared__ TableRoom room;
    __shared__ short q[256];
    __shared__ u32 w[256];
    __shared__ int f[256];
    const int lane = threadIdx.x & 31;
    const i64 count = number_of(most, number), tables = gridDim.x;
    i64 alphabet = size_of(given, there);
    Meaning meaning = {(int)means, (u32)shift};
    if (means == EXPONENTS) {
        u32 least = 255, largest = 0;
        for (u32 b = lane; b < 256; b += 32)
            if (b && present[b]) least = b < least ? b : least, largest = b;
        for (int by = 16; by; by >>= 1) {
            const u32 lower = __shfl_xor_sync(FULL, least, by), higher = __shfl_xor_sync(FULL, largest, by);
            least = lower < least ? lower : least;
            largest = higher > largest ? higher : largest;
        }
        if (!largest) least = 1;
        meaning.shift = 1 - least;
        alphabet = larger(2, (i64)largest - least + 2);
        if (lane == 0) head[LEAST_OF] = least, head[LARGEST_OF] = largest;
    }
    if (lane == 0 && blockIdx.x == 0) head[ALPHABET_OF] = alphabet;
    const bool sampled = counts_sample(asked, count, alphabet * tables);
    const i64 row = tables == 1 ? 0 : blockIdx.x * alphabet, rest = tables == 1 ? 256 : tables * alphabet;
    if (tables == 1)
        for (u32 b = lane; b < 256; b += 32)
            if (present[b] && meaning.symbol(b) >= alphabet) head[STATUS] = BAD_SYMBOL;
    auto counted = [=](int s) {
        const i64 k = row + (tables == 1 ? meaning.byte(s) : s);
        return counts[k] + (sampled ? present[k] : counts[rest + k]);
    };
    const i64 length = write_table(counted, (int)alphabet, q, bits + blockIdx.x * TABLE_BYTES, room);
    const int different = make_frequencies(q, (int)alphabet, w, f);
    u32 start = 0;
    for (int base = 0; base < alphabet; base += 32) {
        const int s = base + lane;
        const u32 mine = s < alphabet ? (u32)f[s] : 0, upto = (u32)warp_scan(mine);
        if (s < alphabet) codes[blockIdx.x * alphabet + s] = code_of(mine | (start + upto - mine) << 16);
        start += __shfl_sync(FULL, upto, 31);
    }
    if (lane == 0) lengths[blockIdx.x] = length;
    if (lane == 0 && different >= 2) atomicMax(&head[INFORMATIVE], (i64)1);
}

// ---- decoding ----

extern "C" __global__ void rans_cells(const int* frequencies, i64 alphabet, u32* cells, u8* symbols, const i64* head) {
    __shared__ int start[257];
    if (head[STATUS] != FINE || !head[INFORMATIVE]) return;
    const int* f = frequencies + blockIdx.x * alphabet;
    const i64 row = (i64)blockIdx.x * TOTAL;
    make_cells(f, (int)alphabet, start, [=](int slot, u32 symbol, u32 place) {
        cells[row + slot] = (u32)f[symbol] | place << 16;
        symbols[row + slot] = (u8)symbol;
    });
}

// One block reads the number of words of every chunk: where chunks begin, and where the message ends.
extern "C" __global__ void rans_offsets(const u8* data, i64 nbytes, i64 count, i64 alphabet, i64* offsets, i64* words, i64* head) {
    if (head[STATUS] != FINE || head[FORM] == RAW) return;
    const i64 begin = 1 + head[TABLES];
    if (!head[INFORMATIVE]) {
        __syncthreads();
        if (threadIdx.x == 0) head[FORM] = ONLY_TABLES, head[LENGTH] = begin;
        return;
    }
    const Layout l = layout_of(count, alphabet, head[CHUNK]);
    i64 at = begin + 4 * l.chunks;
    bool bad = at > nbytes;
    for (i64 base = 0; base < l.chunks; base += blockDim.x) {
        const i64 c = base + threadIdx.x;
        i64 bytes = 0, total;
        if (c < l.chunks && begin + 4 * l.chunks <= nbytes) {
            words[c] = load32(data + begin + 4 * c);
            bad |= words[c] > l.coded(c);
            bytes = 4 * l.lanes + 2 * words[c];
        }
        const i64 before = block_scan(bytes, &total);
        if (c < l.chunks) offsets[c] = at + before;
        at += total;
    }
    bad |= at > nbytes;
    if (bad) head[STATUS] = CORRUPT;
    if (threadIdx.x == 0) head[LENGTH] = at;
}

extern "C" __global__ void __launch_bounds__(32) rans_decode_chunks(
    const u8* data, i64 nbytes, const u8* contexts, i64 each, i64 count, i64 alphabet, i64 tables, const u32* cells, const u8* symbols,
    const i64* offsets, const i64* words, i64* head, u8* out
) {
    __shared__ u32 own_cells[TOTAL];
    __shared__ u8 own_symbols[TOTAL];
    __shared__ u16 ring[RING];
    if (head[STATUS] != FINE || head[FORM] != CODED) return;
    const Layout l = layout_of(count, alphabet, head[CHUNK]);
    const i64 c = blockIdx.x;
    if (c >= l.chunks) return;
    const u8* states = data + offsets[c];
    auto put = [=](i64 i, u8 symbol) { out[i] = symbol; };
    bool good;
    if (tables == 1) {
        for (int i = threadIdx.x; i < TOTAL; i += 32) own_cells[i] = cells[i], own_symbols[i] = symbols[i];
        __syncwarp();
        const u32* near_cells = own_cells;
        const u8* near_symbols = own_symbols;
        auto look = [=](u32, u32 slot, u32* cell, u8* symbol) { *cell = near_cells[slot], *symbol = near_symbols[slot]; };
        good = decode_chunk(l, c, alphabet, states, words[c], ring, NoContext(), look, put);
    } else {
        auto look = [=](u32 context, u32 slot, u32* cell, u8* symbol) {
            const i64 place = (i64)context * TOTAL + slot;
            *cell = cells[place], *symbol = symbols[place];
        };
        good = decode_chunk(l, c, alphabet, states, words[c], ring, GivenContext{contexts, each}, look, put);
    }
    if (!good) head[STATUS] = CORRUPT;
}

// Raw blocks, and those whose tables leave no choice.
extern "C" __global__ void rans_decode_plain(
    const u8* data, const u8* contexts, i64 each, i64 count, i64 alphabet, i64 tables, const int* frequencies, i64* head, u8* out
) {
    const i64 form = head[FORM];
    if (head[STATUS] != FINE || form == CODED) return;
    const int width = raw_bits(alphabet);
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        if (form == RAW) {
            const i64 bit = i * width;
            const u8* p = data + 1 + (bit >> 3);
            const int shift = bit & 7;
            u32 held = p[0];
            if (shift + width > 8) held |= (u32)p[1] << 8;
            const u32 s = held >> shift & ((1u << width) - 1);
            if (s >= alphabet) head[STATUS] = CORRUPT;
            out[i] = (u8)s;
            // What lies behind the last symbol is zero.
            const int end = (bit + width) & 7;
            if (i + 1 == count && end && data[raw_bytes(count, alphabet)] >> end) head[STATUS] = CORRUPT;
        } else {
            const int* f = frequencies + context_of(contexts, each, i) * alphabet;
            int s = 0;
            while (f[s] != TOTAL) ++s;
            out[i] = (u8)s;
        }
    }
}

// ---- encoding ----

#define CELLS 4096
// Codes that a warp has near.
#define NEAR 1024

// Counts of bytes, and which occur at all. With `asked`, those of every eighth block of 4096 are counted apart, and where that is a sample for
// any alphabet the others are not counted. A lane counts for itself: most bytes are the same few. Stretches are read from the last on, which
// may still be in the cache.
extern "C" __global__ void __launch_bounds__(256) rans_count_bytes(
    const u8* bytes, i64 most, const i64* number, i64 asked, i64 given, i64* counts, int* present
) {
    __shared__ u32 sums[256 * 32];
    __shared__ u8 seen[256];
    const i64 count = number_of(most, number);
    // Shorter ones are counted whole, whatever the alphabet.
    const bool apart = asked && count >= (i64)1 << 16;
    const int lane = threadIdx.x & 31, turns = apart && !counts_sample(asked, count, given) ? 2 : 1;
    seen[threadIdx.x] = 0;
    const i64 lead = smaller((16 - (i64)((u64)bytes & 15)) & 15, count), units = (count - lead) / 16;
    for (int turn = 0; turn < turns; ++turn) {
        for (int k = threadIdx.x; k < 256 * 32; k += 256) sums[k] = 0;
        __syncthreads();
        auto add = [&](u32 b) { atomicAdd(&sums[b * 32 + lane], 1u); };
        // Whether coordinate i is counted this time.
        auto chosen = [=](i64 i) { return (!apart || (i >> 12) % 8 == 0) == (turn == 0); };
        for (i64 k = (i64)blockIdx.x * 256 + threadIdx.x; k < units; k += (i64)gridDim.x * 256) {
            const i64 unit = units - 1 - k, i = lead + 16 * unit;
            const Sixteen held = *(const Sixteen*)(bytes + i);
            if (turn == 0) {
#pragma unroll
                for (int b = 0; b < 16; ++b) seen[held.byte(b)] = 1;
            }
            if (chosen(i) && chosen(i + 15)) {
#pragma unroll
                for (int b = 0; b < 16; ++b) add(held.byte(b));
            } else if (chosen(i) || chosen(i + 15)) {
                for (int b = 0; b < 16; ++b)
                    if (chosen(i + b)) add(held.byte(b));
            }
        }
        // What lies before and behind them.
        const i64 i = threadIdx.x < lead ? threadIdx.x : 16 * units + threadIdx.x;
        if (blockIdx.x == 0 && i < count && (i < lead || i >= lead + 16 * units)) {
            seen[bytes[i]] = 1;
            if (chosen(i)) add(bytes[i]);
        }
        __syncthreads();
        u32 sum = 0;
        for (int copy = 0; copy < 32; ++copy) sum += sums[threadIdx.x * 32 + (copy + lane) % 32];
        if (sum) atomicAdd((u64*)&counts[256 * turn + threadIdx.x], (u64)sum);
        __syncthreads();
    }
    if (seen[threadIdx.x]) present[threadIdx.x] = 1;
}

// Counts of symbols by context, exact or of every eighth block of 4096 (`asked`), and which occur at all.
extern "C" __global__ void rans_count(
    const u8* symbols, const u8* contexts, i64 each, i64 most, const i64* number, i64 given, const i64* there, i64 tables, i64 asked, i64* counts,
    int* present, i64* head
) {
    const i64 count = number_of(most, number);
    const i64 alphabet = size_of(given, there);
    __shared__ u32 sums[CELLS];
    __shared__ u8 seen[CELLS];
    const i64 cells = alphabet * tables;
    const bool own = cells <= CELLS, sample = counts_sample(asked, count, cells);
    if (own)
        for (i64 k = threadIdx.x; k < cells; k += blockDim.x) sums[k] = 0, seen[k] = 0;
    __syncthreads();
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        const u32 s = symbols[i], c = context_of(contexts, each, i);
        if (s >= alphabet || c >= tables) {
            head[STATUS] = BAD_SYMBOL;
            continue;
        }
        const i64 k = c * alphabet + s;
        const bool counted = !sample || (i >> 12) % 8 == 0;
        if (own) {
            seen[k] = 1;
            if (counted) atomicAdd(&sums[k], 1u);
        } else {
            present[k] = 1;
            if (counted) atomicAdd((u64*)&counts[k], (u64)1);
        }
    }
    __syncthreads();
    if (own)
        for (i64 k = threadIdx.x; k < cells; k += blockDim.x) {
            if (sums[k]) atomicAdd((u64*)&counts[k], (u64)sums[k]);
            if (seen[k]) present[k] = 1;
        }
}

extern "C" __global__ void __launch_bounds__(32) rans_encode_chunks(
    const u8* symbols, const u8* contexts, i64 each, i64 most, const i64* counted, i64 means, i64 shift, i64 tables, i64 exponent,
    const Code* codes, u16* words, i64* numbers, u32* states, const i64* head
) {
    const i64 count = number_of(most, counted), alphabet = head[ALPHABET_OF];
    __shared__ Code own[NEAR];
    if (head[STATUS] != FINE || !head[INFORMATIVE]) return;
    const Layout l = layout_of(count, alphabet, exponent);
    const i64 c = blockIdx.x, cells = alphabet * tables;
    if (c >= l.chunks) return;
    const Meaning meaning = meaning_of(means, shift, head);
    const bool mine = cells <= NEAR;
    // With one table, by the byte that means a symbol.
    if (tables == 1)
        for (u32 s = threadIdx.x; s < alphabet; s += 32) own[meaning.byte(s)] = codes[s];
    else if (mine)
        for (i64 k = threadIdx.x; k < cells; k += 32) own[k] = codes[k];
    __syncwarp();
    const Code* near = own;
    const u32 size = (u32)alphabet;
    i64 number;
    if (tables == 1) {
        auto symbol = [=](i64 i) { return meaning.symbol(symbols[i]); };
        auto load = [=](i64 i) { return Raw{symbols[i], 0}; };
        number = encode_chunk(l, c, symbol, load, [=](const Raw& r) { return near[r.symbol]; }, words, states);
    } else {
        auto symbol = [=](i64 i) { return (u32)symbols[i]; };
        auto load = [=](i64 i) { return Raw{symbols[i], context_of(contexts, each, i)}; };
        // Wherever they lie: to ask in every step would take longer.
        const Code* held = mine ? near : codes;
        auto look = [=](const Raw& r) { return held[r.context * size + r.symbol]; };
        number = encode_chunk(l, c, symbol, load, look, words, states);
    }
    if (threadIdx.x == 0) numbers[c] = number;
}

// One block lays out the message: its tables, its form, where chunks begin, its length.
extern "C" __global__ void rans_close(
    i64 most, const i64* counted, i64 contexts, i64 exponent, const u8* bits, const i64* lengths, const i64* numbers, u8* tables, i64* offsets, i64* head
) {
    const i64 alphabet = head[ALPHABET_OF], count = number_of(most, counted), bytes = join_tables(bits, TABLE_BYTES, lengths, contexts, tables);
    const Layout l = layout_of(count, alphabet, exponent);
    const i64 plain = 1 + raw_bytes(count, alphabet), begin = 1 + bytes;
    const bool informative = head[INFORMATIVE] != 0;
    i64 at = begin + (informative ? 4 * l.chunks : 0);
    for (i64 base = 0; informative && base < l.chunks; base += blockDim.x) {
        const i64 c = base + threadIdx.x;
        i64 total;
        const i64 before = block_scan(c < l.chunks ? 4 * l.lanes + 2 * numbers[c] : 0, &total);
        if (c < l.chunks) offsets[c] = at + before;
        at += total;
    }
    if (threadIdx.x) return;
    const bool raw = begin >= plain || at >= plain;
    head[FORM] = raw ? RAW : informative ? CODED : ONLY_TABLES;
    head[CHUNK] = exponent;
    head[TABLES] = bytes;
    head[LENGTH] = raw ? plain : at;
}

// Parts of a chunk that blocks copy.
#define PARTS 4

// The message, unless it is longer than `room`. Blocks take parts of chunks, or stretches of raw symbols, in turn.
extern "C" __global__ void rans_write(
    const u8* symbols, i64 most, const i64* counted, i64 means, i64 shift, i64 exponent, const u8* tables, const u16* words,
    const i64* numbers, const u32* states, const i64* offsets, i64 room, const i64* head, u8* out
) {
    const i64 alphabet = head[ALPHABET_OF], count = number_of(most, counted);
    const i64 form = head[FORM];
    if (head[STATUS] != FINE || head[LENGTH] > room) return;
    if (form == RAW) {
        const Meaning meaning = meaning_of(means, shift, head);
        const int width = raw_bits(alphabet);
        const i64 groups = (count + 7) / 8, stride = (i64)gridDim.x * blockDim.x;
        if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = RAW;
        for (i64 g = (i64)blockIdx.x * blockDim.x + threadIdx.x; g < groups; g += stride) {
            u64 held = 0;
            const int here = (int)smaller(8, count - 8 * g);
            for (int k = 0; k < here; ++k) held |= (u64)meaning.symbol(symbols[8 * g + k]) << k * width;
            for (int b = 0; 8 * b < here * width; ++b) out[1 + g * width + b] = (u8)(held >> 8 * b);
        }
        return;
    }
    const Layout l = layout_of(count, alphabet, exponent);
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) out[0] = (u8)exponent;
        for (i64 b = threadIdx.x; b < head[TABLES]; b += blockDim.x) out[1 + b] = tables[b];
    }
    if (form != CODED) return;
    for (i64 piece = blockIdx.x; piece < l.chunks * PARTS; piece += gridDim.x) {
        const i64 c = piece / PARTS, which = piece % PARTS, number = numbers[c];
        const i64 from = number * which / PARTS, until = number * (which + 1) / PARTS;
        u8* to = out + offsets[c];
        copy_words(to + 4 * l.lanes + 2 * from, words + c * l.size + l.coded(c) - number + from, until - from);
        if (which) continue;
        if (threadIdx.x == 0) store32(out + 1 + head[TABLES] + 4 * c, (u32)number);
        for (int k = threadIdx.x; k < l.lanes; k += blockDim.x) store32(to + 4 * k, states[c * l.lanes + k]);
    }
}
