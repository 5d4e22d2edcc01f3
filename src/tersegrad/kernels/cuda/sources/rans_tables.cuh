// Probability tables of rANS blocks (spec/wire.md, 4.5). A table in work is a row of q, eighths of a bit, -1 where a symbol is absent.
#include "common.cuh"

#define TOTAL 4096
#define MAX_Q 96
#define MAX_RICE 5

// Places in the description of a block that the kernels hand on.
enum { FORM, CHUNK, TABLES, LENGTH, STATUS, INFORMATIVE, ALPHABET_OF, LEAST_OF, LARGEST_OF };
// Of bytes that mean symbols in another way, the alphabet that was found; of exponents, the least that is not 0 and the largest.
// Forms: nothing follows the tables of ONLY_TABLES.
enum { RAW = 1, CODED = 2, ONLY_TABLES = 3 };
// What is wrong, if anything.
enum { FINE, CORRUPT, BAD_SYMBOL };

__device__ __forceinline__ int raw_bits(i64 alphabet) { return bit_length((u64)alphabet - 1); }
__device__ __forceinline__ i64 raw_bytes(i64 count, i64 alphabet) { return (count * raw_bits(alphabet) + 7) / 8; }

__device__ __forceinline__ u32 weight_of(int q) {
    const u32 weights[8] = {16777216, 15384775, 14107901, 12937002, 11863283, 10878679, 9975792, 9147842};
    return weights[q & 7] >> (q >> 3);
}

__device__ __forceinline__ int predicted(int linear, const short* q, int i) {
    if (!linear || i < 2) return q[i - 1];
    const int p = 2 * q[i - 1] - q[i - 2];
    return p < 0 ? 0 : p > MAX_Q ? MAX_Q : p;
}
__device__ __forceinline__ u32 zigzag(int d) { return d >= 0 ? 2 * d : -2 * d - 1; }

// ---- reading ----

#define PEEKED 25

struct BitReader {
    const u8* data;
    i64 bits, at;
    bool good;
    // The 64 bits from there on, zeros after the last.
    u64 held = 0;
    i64 from = -64;
    // The next bits, at least PEEKED of them.
    __device__ u32 peek() {
        if (at - from > 64 - PEEKED) {
            const i64 first = at >> 3, bytes = (bits + 7) >> 3;
            u32 half[2] = {0, 0};
            for (int k = 0; k < 8; ++k) half[k >> 2] |= first + k < bytes ? (u32)data[first + k] << 8 * (k & 3) : 0;
            held = (u64)half[1] << 32 | half[0];
            from = 8 * first;
        }
        return (u32)(held >> (int)(at - from));
    }
    __device__ void skip(int number) {
        at += number;
        if (at > bits) good = false;
    }
    __device__ u32 get(int width) {
        const u32 value = peek() & ((1u << width) - 1);
        skip(width);
        return value;
    }
    __device__ u32 bit() { return get(1); }
    __device__ i64 gamma(i64 most) {
        const int extra = __ffs((int)peek()) - 1;
        if (extra < 0 || extra > 9) good = false;
        if (!good) return 0;
        skip(extra + 1);
        const i64 value = (i64)1 << extra | get(extra);
        if (value > most) good = false;
        return value;
    }
    // Ones before a zero, then k bits; after `most` ones there is no zero.
    __device__ int rice(int k, int most) {
        u32 value = peek();
        int quotient = 0, run = __ffs((int)~value) - 1;
        // Nearly all are short.
        if (run >= 0 && run < PEEKED - MAX_RICE && run < most) {
            skip(run + 1 + k);
            return run << k | (int)(value >> (run + 1) & ((1u << k) - 1));
        }
        run = PEEKED;
        while (good && quotient < most && run == PEEKED) {
            value = peek();
            run = ~value & ((1u << PEEKED) - 1) ? __ffs((int)~value) - 1 : PEEKED;
            if (quotient + run >= most) run = PEEKED, skip(most - quotient), quotient = most;
            else skip(run + (run < PEEKED)), quotient += run;
        }
        if (run < PEEKED - MAX_RICE) {
            skip(k);
            return quotient << k | (int)(value >> (run + 1) & ((1u << k) - 1));
        }
        return quotient << k | (int)get(k);
    }
};

__device__ void read_table(BitReader& in, int alphabet, short* q, short* present) {
    int count = 0;
    for (int s = 0; s < alphabet; ++s) q[s] = -1;
    if (in.bit()) {
        for (int s = 0; s < alphabet; ++s) present[count++] = (short)s;
    } else {
        int position = 0, first = 1;
        bool here = false;
        while (in.good && position < alphabet) {
            const int run = (int)in.gamma(alphabet - position + first) - first;
            if (!in.good) return;
            if (here)
                for (int s = position; s < position + run; ++s) present[count++] = (short)s;
            position += run;
            here = !here;
            first = 0;
        }
    }
    if (!in.good) return;
    if (count < 2) {
        q[count ? present[0] : 0] = 0;
        return;
    }
    const int linear = in.bit(), k = in.get(3);
    if (k > MAX_RICE) in.good = false;
    int before = 0, last = in.get(7);
    for (int i = 0; in.good; ++i) {
        if (last < 0 || last > MAX_Q) in.good = false;
        if (!in.good) return;
        q[present[i]] = (short)last;
        if (i + 1 == count) return;
        const int z = in.rice(k, 2 * MAX_Q + 1);
        int p = last;
        if (linear && i >= 1) {
            p = 2 * last - before;
            p = p < 0 ? 0 : p > MAX_Q ? MAX_Q : p;
        }
        before = last;
        last = p + (z & 1 ? -(z >> 1) - 1 : z >> 1);
    }
}

// ---- frequencies ----

// Whether w[i] / d[i] comes before w[j] / d[j] for the search of the least (or greatest, `most`), the first on ties.
__device__ __forceinline__ bool earlier(bool most, u64 wi, u64 di, int i, u64 wj, u64 dj, int j) {
    const u64 a = wi * dj, b = wj * di;
    return a == b ? i < j : most ? a > b : a < b;
}

// A warp makes the frequencies of a row of q: in proportion to the weights, at least 1 each, moved to the exact sum where a unit costs
// least. Returns how many symbols are present. `w` and `f` are shared, with room for 256.
__device__ int make_frequencies(const short* row, int size, u32* w, int* f) {
    const int lane = threadIdx.x & 31;
    i64 total = 0, present = 0;
    for (int s = lane; s < size; s += 32) {
        w[s] = row[s] < 0 ? 0 : weight_of(row[s]);
        total += w[s];
        present += row[s] >= 0;
    }
    total = warp_sum(total);
    present = warp_sum(present);
    i64 sum = 0;
    for (int s = lane; s < size; s += 32) {
        f[s] = row[s] < 0 ? 0 : present < 2 ? TOTAL : (int)larger(1, (2 * TOTAL * (i64)w[s] + total) / (2 * total));
        sum += f[s];
    }
    sum = warp_sum(sum);
    if (!present) {
        // A context that never occurs is read as symbol 0.
        if (lane == 0) f[0] = TOTAL;
        sum = TOTAL;
    }
    __syncwarp();
    while (sum != TOTAL) {
        const bool grow = sum < TOTAL;
        u64 bw = 0, bd = 1;
        int best = -1;
        for (int s = lane; s < size; s += 32) {
            if (grow ? f[s] < 1 : f[s] < 2) continue;
            const u64 d = grow ? 2 * f[s] + 1 : 2 * f[s] - 1;
            if (best < 0 || earlier(grow, w[s], d, s, bw, bd, best)) bw = w[s], bd = d, best = s;
        }
        for (int by = 16; by; by >>= 1) {
            const u64 ow = __shfl_xor_sync(FULL, bw, by), od = __shfl_xor_sync(FULL, bd, by);
            const int other = __shfl_xor_sync(FULL, best, by);
            if (other >= 0 && (best < 0 || earlier(grow, ow, od, other, bw, bd, best))) bw = ow, bd = od, best = other;
        }
        if (lane == 0) f[best] += grow ? 1 : -1;
        sum += grow ? 1 : -1;
        __syncwarp();
    }
    return (int)present;
}

// Calls put(slot, symbol, place of the slot among those of the symbol) by all threads of a block; `start` is shared, with room for 257.
template <class Put>
__device__ void make_cells(const int* f, int size, int* start, Put put) {
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
        put(slot, (u32)low, (u32)(slot - start[low]));
    }
}

// ---- writing ----

struct BitWriter {
    u8* data;
    i64 at;
    // The bits of the byte that is not yet full.
    u64 held;
    __device__ void put(u64 value, int width) {
        held |= (value & (((u64)1 << width) - 1)) << (at & 7);
        for (int have = (int)(at & 7) + width, k = (int)(at >> 3); have >= 8; have -= 8, ++k) {
            data[k] = (u8)held;
            held >>= 8;
        }
        at += width;
    }
    __device__ void ones(int count) {
        for (; count > 32; count -= 32) put(0xffffffffu, 32);
        put(0xffffffffu, count);
    }
    __device__ void gamma(u64 value) {
        const int extra = bit_length(value) - 1;
        put((u64)1 << extra, extra + 1);
        put(value, extra);
    }
    __device__ void finish() {
        if (at & 7) data[at >> 3] = (u8)held;
    }
};

// What a warp needs to write a table.
struct TableRoom {
    short dense[256];
    u8 here[256];
};
// No table takes more bytes: at most 13.5 bits per symbol, and 15.
#define TABLE_BYTES 448

// A warp writes a table as bits, from its counts (`count(s)`), and its row of q; the number of bits.
template <class Count>
__device__ i64 write_table(Count count, int size, short* q, u8* bits, TableRoom& room) {
    short* const dense = room.dense;
    u8* const here = room.here;
    const u32 halves[8] = {68438, 74632, 81387, 88753, 96786, 105546, 115098, 125515};
    const int lane = threadIdx.x & 31;
    i64 total = 0;
    for (int s = lane; s < size; s += 32) total += count(s);
    total = warp_sum(total);
    int present = 0;
    for (int base = 0; base < size; base += 32) {
        const int s = base + lane;
        const i64 c = s < size ? count(s) : 0;
        int value = -1;
        if (c > 0) {
            const u64 ratio = ((u64)total << 16) / (u64)c;
            int low = 0, high = MAX_Q;
            while (low < high) {
                const int middle = (low + high) / 2;
                if ((u64)halves[middle & 7] << (middle >> 3) <= ratio) low = middle + 1;
                else high = middle;
            }
            value = low;
        }
        const u32 votes = __ballot_sync(FULL, value >= 0);
        if (value >= 0) dense[present + __popc(votes & ((1u << lane) - 1))] = (short)value;
        if (s < size) q[s] = (short)value, here[s] = value >= 0;
        present += __popc(votes);
    }
    __syncwarp();
    // Twelve threads price the twelve ways to write the numbers.
    u64 price = ~(u64)0;
    if (lane < 12) {
        price = 0;
        for (int i = 1; i < present; ++i) price += (zigzag(dense[i] - predicted(lane / 6, dense, i)) >> lane % 6) + 1 + lane % 6;
        price = price << 4 | lane;
    }
    for (int by = 16; by; by >>= 1) {
        const u64 other = __shfl_xor_sync(FULL, price, by);
        if (other < price) price = other;
    }
    BitWriter out = {bits, 0, 0};
    if (lane == 0) {
        out.put(present == size, 1);
        if (present < size) {
            int position = 0, first = 1;
            bool on = false;
            while (position < size) {
                const int begin = position;
                while (position < size && (here[position] != 0) == on) ++position;
                out.gamma(position - begin + first);
                on = !on;
                first = 0;
            }
        }
        if (present >= 2) {
            const int choice = (int)(price & 15), linear = choice / 6, k = choice % 6;
            out.put(linear, 1);
            out.put(k, 3);
            out.put(dense[0], 7);
            for (int i = 1; i < present; ++i) {
                const u32 d = zigzag(dense[i] - predicted(linear, dense, i));
                out.ones(d >> k);
                out.put(0, 1);
                out.put(d, k);
            }
        }
        out.finish();
    }
    const i64 length = __shfl_sync(FULL, out.at, 0);
    __syncwarp();
    return length;
}

// A block lays tables, `stride` bytes apart, one after the other without gaps between their bits; the number of bytes.
__device__ i64 join_tables(const u8* bits, i64 stride, const i64* lengths, i64 number, u8* out) {
    i64 at = 0;
    for (i64 c = 0; c < number; ++c) {
        const u8* from = bits + c * stride;
        const i64 length = lengths[c], first = at >> 3, last = (at + length + 7) >> 3;
        const int shift = at & 7;
        for (i64 b = first + threadIdx.x; b < last; b += blockDim.x) {
            // Bits of this byte: the upper ones of source byte b - first - 1, the lower ones of source byte b - first.
            const i64 j = b - first, bytes = (length + 7) >> 3;
            u32 value = j < bytes ? (u32)from[j] << shift : 0;
            if (j > 0 && j - 1 < bytes) value |= (u32)from[j - 1] >> (8 - shift);
            out[b] = (u8)(value | (b == first && shift ? out[b] : 0));
        }
        at += length;
        __syncthreads();
    }
    return (at + 7) >> 3;
}
