// rANS blocks (spec/wire.md, 4.5): the kernels of whole messages.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"

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

extern "C" __global__ void rans_table(
    const i64* counts, const int* extra, i64 asked, i64 most, const i64* number, i64 given, const i64* there, short* q, u8* bits, i64* lengths
) {
    const i64 count = number_of(most, number);
    const i64 alphabet = size_of(given, there);
    __shared__ TableRoom room;
    const i64 row = blockIdx.x * alphabet;
    const bool extended = counts_sample(asked, count, alphabet * gridDim.x);
    const i64 length = write_table(
        [=](int s) { return counts[row + s] + (extended ? extra[row + s] : 0); }, (int)alphabet, q + row,
        bits + blockIdx.x * (32 * alphabet + 2), room
    );
    if (threadIdx.x == 0) lengths[blockIdx.x] = length;
}

// One block lays the tables one after the other.
extern "C" __global__ void rans_join(const u8* bits, const i64* lengths, i64 given, const i64* there, i64 contexts, u8* tables, i64* head) {
    const i64 alphabet = size_of(given, there);
    const i64 bytes = join_tables(bits, 32 * alphabet + 2, lengths, contexts, tables);
    if (threadIdx.x == 0) head[TABLES] = bytes;
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

// Counts of symbols by context, exact or of every eighth block of 4096 (`sample`), and which occur at all.
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
    i64 from = 0;
    if (tables == 1 && alphabet <= 64 && ((u64)symbols & 3) == 0) {
        // Four symbols at a time, those that occur as bits of a word.
        u64 occur = 0;
        from = count / 4 * 4;
        for (i64 k = (i64)blockIdx.x * blockDim.x + threadIdx.x; k < from / 4; k += stride) {
            const u32 four = ((const u32*)symbols)[k];
            const bool counted = !sample || (4 * k >> 12) % 8 == 0;
            for (int b = 0; b < 32; b += 8) {
                const u32 s = four >> b & 255;
                if (s >= alphabet) {
                    head[STATUS] = BAD_SYMBOL;
                    continue;
                }
                occur |= (u64)1 << s;
                if (counted) atomicAdd(&sums[s], 1u);
            }
        }
        for (; occur; occur &= occur - 1) seen[__ffsll((i64)occur) - 1] = 1;
    }
    for (i64 i = from + (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
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

// How symbols are coded; a thread per table.
extern "C" __global__ void rans_codes(const int* frequencies, i64 given, const i64* there, i64 tables, Code* codes) {
    const i64 alphabet = size_of(given, there);
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= tables) return;
    u32 start = 0;
    for (i64 k = c * alphabet; k < (c + 1) * alphabet; ++k) {
        codes[k] = code_of((u32)frequencies[k] | start << 16);
        start += (u32)frequencies[k];
    }
}

extern "C" __global__ void __launch_bounds__(32) rans_encode_chunks(
    const u8* symbols, const u8* contexts, i64 each, i64 most, const i64* counted, i64 given, const i64* there, i64 tables, i64 exponent,
    const Code* codes, u16* words, i64* numbers, u32* states, const i64* head
) {
    const i64 count = number_of(most, counted);
    const i64 alphabet = size_of(given, there);
    __shared__ Code own[NEAR];
    if (head[STATUS] != FINE || !head[INFORMATIVE]) return;
    const Layout l = layout_of(count, alphabet, exponent);
    const i64 c = blockIdx.x, cells = alphabet * tables;
    if (c >= l.chunks) return;
    const bool mine = cells <= NEAR;
    if (mine)
        for (i64 k = threadIdx.x; k < cells; k += 32) own[k] = codes[k];
    __syncwarp();
    const Code* near = own;
    const u32 size = (u32)alphabet;
    auto symbol = [=](i64 i) { return (u32)symbols[i]; };
    i64 number;
    if (tables == 1) {
        auto load = [=](i64 i) { return Raw{symbols[i], 0}; };
        number = encode_chunk(l, c, symbol, load, [=](const Raw& r) { return near[r.symbol]; }, words, states);
    } else {
        auto load = [=](i64 i) { return Raw{symbols[i], context_of(contexts, each, i)}; };
        // Wherever they lie: to ask in every step would take longer.
        const Code* held = mine ? near : codes;
        auto look = [=](const Raw& r) { return held[r.context * size + r.symbol]; };
        number = encode_chunk(l, c, symbol, load, look, words, states);
    }
    if (threadIdx.x == 0) numbers[c] = number;
}

// One block lays out the message: its form, where chunks begin, its length.
extern "C" __global__ void rans_close(
    i64 most, const i64* counted, i64 given, const i64* there, i64 exponent, const i64* numbers, i64* offsets, i64* head
) {
    const i64 alphabet = size_of(given, there), count = number_of(most, counted);
    const Layout l = layout_of(count, alphabet, exponent);
    const i64 plain = 1 + raw_bytes(count, alphabet), begin = 1 + head[TABLES];
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
    head[LENGTH] = raw ? plain : at;
}

// The message. Blocks take chunks, or stretches of raw symbols, in turn.
extern "C" __global__ void rans_write(
    const u8* symbols, i64 most, const i64* counted, i64 given, const i64* there, i64 exponent, const u8* tables, const u16* words,
    const i64* numbers, const u32* states, const i64* offsets, const i64* head, u8* out
) {
    const i64 alphabet = size_of(given, there), count = number_of(most, counted);
    const i64 form = head[FORM];
    if (head[STATUS] != FINE) return;
    if (form == RAW) {
        const int width = raw_bits(alphabet);
        const i64 groups = (count + 7) / 8, stride = (i64)gridDim.x * blockDim.x;
        if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = RAW;
        for (i64 g = (i64)blockIdx.x * blockDim.x + threadIdx.x; g < groups; g += stride) {
            u64 held = 0;
            const int here = (int)smaller(8, count - 8 * g);
            for (int k = 0; k < here; ++k) held |= (u64)symbols[8 * g + k] << k * width;
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
    for (i64 c = blockIdx.x; c < l.chunks; c += gridDim.x) {
        u8* to = out + offsets[c];
        const u16* from = words + c * l.size + l.coded(c) - numbers[c];
        if (threadIdx.x == 0) store32(out + 1 + head[TABLES] + 4 * c, (u32)numbers[c]);
        for (int k = threadIdx.x; k < l.lanes; k += blockDim.x) store32(to + 4 * k, states[c * l.lanes + k]);
        for (i64 k = threadIdx.x; k < numbers[c]; k += blockDim.x) store16(to + 4 * l.lanes + 2 * k, from[k]);
    }
}
