// Interleaved rANS (spec/wire.md, 4.5). A warp codes a chunk: thread t owns lanes t and t + 32.
#include "common.cuh"
#include "rans_tables.cuh"

struct Layout {
    i64 count, size, chunks;
    int lanes, rows, width;
    __device__ i64 length(i64 c) const { return c + 1 < chunks ? size : count - size * (chunks - 1); }
    __device__ i64 coded(i64 c) const { return length(c) - (i64)rows * lanes; }
};

__device__ Layout layout_of(i64 count, i64 alphabet, i64 exponent) {
    Layout l;
    l.count = count;
    l.size = (i64)1 << exponent;
    l.chunks = count < l.size ? 1 : (count + l.size / 2) / l.size;
    l.lanes = count >= 1 << 14 ? 64 : 1 << (int)larger(0, bit_length((u64)count) - 10);
    l.width = raw_bits(alphabet);
    l.rows = 16 / l.width;
    if (l.length(l.chunks - 1) < (i64)l.lanes * (l.rows + 1)) l.rows = 0;
    return l;
}

__device__ __forceinline__ u32 context_of(const u8* contexts, i64 each, i64 i) { return each ? contexts[each == 1 ? i : i >> 6] : 0; }

// ---- decoding ----

// Slots to frequency | place << 16, and to symbols; a block per table.
extern "C" __global__ void rans_cells(const int* frequencies, i64 alphabet, u32* cells, u8* symbols, const i64* head) {
    __shared__ int start[257];
    if (head[STATUS] != FINE || !head[INFORMATIVE]) return;
    const int* f = frequencies + blockIdx.x * alphabet;
    const int size = (int)alphabet;
    if (threadIdx.x == 0) {
        start[0] = 0;
        for (int s = 0; s < size; ++s) start[s + 1] = start[s] + f[s];
    }
    __syncthreads();
    for (int slot = threadIdx.x; slot < TOTAL; slot += blockDim.x) {
        int low = 0, high = size;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (start[middle] <= slot) low = middle;
            else high = middle;
        }
        cells[(i64)blockIdx.x * TOTAL + slot] = (u32)f[low] | (u32)(slot - start[low]) << 16;
        symbols[(i64)blockIdx.x * TOTAL + slot] = (u8)low;
    }
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

#define UNIT 128
#define RING (4 * UNIT)

// Words of a chunk from the bytes at p on, of any alignment, through a ring in shared memory; the next unit waits in registers.
struct Words {
    const u32* base;
    u32 shift, low, high;
    i64 whole, loaded;
    u16* ring;
    __device__ u32 word32(i64 i) const { return i < whole ? base[i] : 0; }
    __device__ void fetch() {
        const i64 i = loaded / 2 + 2 * (threadIdx.x & 31);
        const u32 a = word32(i), b = word32(i + 1), c = word32(i + 2);
        low = __funnelshift_r(a, b, shift);
        high = __funnelshift_r(b, c, shift);
    }
    __device__ void begin(const u8* p, const u8* end, u16* place) {
        const u64 address = (u64)p;
        base = (const u32*)(address & ~(u64)3);
        shift = 8 * (address & 3);
        whole = ((i64)((u64)end - (u64)base) + 3) / 4;
        loaded = 0;
        ring = place;
        fetch();
        for (int k = 0; k < 2; ++k) turn();
    }
    // Put the unit that waits into the ring, and ask for the next.
    __device__ void turn() {
        __syncwarp();
        u32* to = (u32*)(ring + loaded % RING) + 2 * (threadIdx.x & 31);
        to[0] = low;
        to[1] = high;
        loaded += UNIT;
        __syncwarp();
        fetch();
    }
};

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
    const int t = threadIdx.x;
    const bool one = tables == 1;
    if (one)
        for (int i = t; i < TOTAL; i += 32) own_cells[i] = cells[i], own_symbols[i] = symbols[i];
    const i64 number = words[c], coded = l.coded(c), first = c * l.size;
    const u8* states = data + offsets[c];
    Words in;
    in.begin(states + 4 * l.lanes, states + 4 * l.lanes + 2 * number, ring);
    u32 x[2];
    bool good = true;
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        x[h] = lane < l.lanes ? load32(states + 4 * lane) : 65536;
        good &= x[h] >= 65536;
    }
    i64 at = 0;
    for (i64 base = 0; base < coded; base += l.lanes) {
        bool needs[2];
        for (int h = 0; h < 2; ++h) {
            const int lane = t + 32 * h;
            const i64 i = base + lane;
            needs[h] = false;
            if (lane < l.lanes && i < coded) {
                const u32 slot = x[h] & (TOTAL - 1);
                const i64 place = one ? slot : (i64)context_of(contexts, each, first + i) * TOTAL + slot;
                const u32 cell = one ? own_cells[slot] : cells[place];
                out[first + i] = one ? own_symbols[slot] : symbols[place];
                x[h] = (cell & 0xffff) * (x[h] >> 12) + (cell >> 16);
                needs[h] = x[h] < 65536;
            }
        }
        const u32 votes = __ballot_sync(FULL, needs[0]), later = __ballot_sync(FULL, needs[1]), before = (1u << t) - 1;
        const i64 from0 = at + __popc(votes & before), from1 = at + __popc(votes) + __popc(later & before);
        if (needs[0]) x[0] = x[0] << 16 | ring[from0 % RING];
        if (needs[1]) x[1] = x[1] << 16 | ring[from1 % RING];
        at += __popc(votes) + __popc(later);
        if (at > number) break;
        if (at + 64 > in.loaded) in.turn();
    }
    good &= at == number;
    // The symbols that were not coded are what a state has above the smallest one.
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        if (lane >= l.lanes) continue;
        const u32 rest = x[h] - 65536;
        good &= x[h] >= 65536 && (l.rows * l.width >= 32 || rest >> l.rows * l.width == 0);
        for (int r = 0; r < l.rows; ++r) {
            const u32 s = rest >> r * l.width & ((1u << l.width) - 1);
            good &= s < alphabet;
            const i64 column = (lane - coded % l.lanes + l.lanes) % l.lanes;
            out[first + coded + (i64)r * l.lanes + column] = (u8)s;
        }
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

// Counts of symbols by context, exact or of every eighth block of 4096 (`sample`), and which occur at all.
extern "C" __global__ void rans_count(
    const u8* symbols, const u8* contexts, i64 each, i64 count, i64 alphabet, i64 tables, i64 sample, i64* counts, int* present, i64* head
) {
    __shared__ u32 sums[CELLS];
    __shared__ u8 seen[CELLS];
    const i64 cells = alphabet * tables;
    const bool own = cells <= CELLS;
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

// Symbols to frequency | start << 16; a thread per table.
extern "C" __global__ void rans_starts(const int* frequencies, i64 alphabet, i64 tables, u32* codes) {
    const i64 c = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= tables) return;
    u32 start = 0;
    for (i64 k = c * alphabet; k < (c + 1) * alphabet; ++k) {
        codes[k] = (u32)frequencies[k] | start << 16;
        start += (u32)frequencies[k];
    }
}

#define AHEAD 8

extern "C" __global__ void __launch_bounds__(32) rans_encode_chunks(
    const u8* symbols, const u8* contexts, i64 each, i64 count, i64 alphabet, i64 tables, i64 exponent, const u32* codes,
    u16* words, i64* numbers, u32* states, const i64* head
) {
    __shared__ u32 own[CELLS];
    if (head[STATUS] != FINE || !head[INFORMATIVE]) return;
    const Layout l = layout_of(count, alphabet, exponent);
    const i64 c = blockIdx.x, cells = alphabet * tables;
    if (c >= l.chunks) return;
    const int t = threadIdx.x;
    const bool mine = cells <= CELLS;
    if (mine)
        for (i64 k = t; k < cells; k += 32) own[k] = codes[k];
    __syncwarp();
    const i64 coded = l.coded(c), first = c * l.size;
    u32 x[2];
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        x[h] = 65536;
        if (lane >= l.lanes) continue;
        for (int r = 0; r < l.rows; ++r) {
            const i64 column = (lane - coded % l.lanes + l.lanes) % l.lanes;
            x[h] += (u32)symbols[first + coded + (i64)r * l.lanes + column] << r * l.width;
        }
    }
    i64 left = coded;
    const i64 steps = (coded + l.lanes - 1) / l.lanes;
    u32 cell[AHEAD][2];
    for (i64 group = (steps + AHEAD - 1) / AHEAD - 1; group >= 0; --group) {
        // All loads of a group are on their way before the first is used.
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            for (int h = 0; h < 2; ++h) {
                const int lane = t + 32 * h;
                const i64 i = (group * AHEAD + a) * l.lanes + lane;
                cell[a][h] = 0;
                if (lane < l.lanes && i < coded) cell[a][h] = 1 + context_of(contexts, each, first + i) * (u32)alphabet + symbols[first + i];
            }
#pragma unroll
        for (int a = AHEAD - 1; a >= 0; --a) {
            u32 code[2], word[2];
            bool emits[2];
            for (int h = 0; h < 2; ++h) {
                const u32 k = cell[a][h];
                code[h] = k == 0 ? 0 : mine ? own[k - 1] : codes[k - 1];
                emits[h] = k && x[h] >> 20 >= (code[h] & 0xffff);
                word[h] = x[h];
                if (emits[h]) x[h] >>= 16;
            }
            const u32 votes = __ballot_sync(FULL, emits[0]), later = __ballot_sync(FULL, emits[1]), before = (1u << t) - 1;
            for (int h = 0; h < 2; ++h) {
                if (!cell[a][h]) continue;
                const u32 f = code[h] & 0xffff, quotient = x[h] / f;
                x[h] = (quotient << 12) + (x[h] - quotient * f) + (code[h] >> 16);
            }
            left -= __popc(votes) + __popc(later);
            if (emits[0]) words[first + left + __popc(votes & before)] = (u16)word[0];
            if (emits[1]) words[first + left + __popc(votes) + __popc(later & before)] = (u16)word[1];
        }
    }
    for (int h = 0; h < 2; ++h)
        if (t + 32 * h < l.lanes) states[c * l.lanes + t + 32 * h] = x[h];
    if (t == 0) numbers[c] = coded - left;
}

// One block lays out the message: its form, where chunks begin, its length.
extern "C" __global__ void rans_close(i64 count, i64 alphabet, i64 exponent, const i64* numbers, i64* offsets, i64* head) {
    const Layout l = layout_of(count, alphabet, exponent);
    const i64 most = 1 + raw_bytes(count, alphabet), begin = 1 + head[TABLES];
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
    const bool raw = begin >= most || at >= most;
    head[FORM] = raw ? RAW : informative ? CODED : ONLY_TABLES;
    head[CHUNK] = exponent;
    head[LENGTH] = raw ? most : at;
}

// The message. Blocks take chunks, or stretches of raw symbols, in turn.
extern "C" __global__ void rans_write(
    const u8* symbols, i64 count, i64 alphabet, i64 exponent, const u8* tables, const u16* words, const i64* numbers, const u32* states,
    const i64* offsets, const i64* head, u8* out
) {
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
