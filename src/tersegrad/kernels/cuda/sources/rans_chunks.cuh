// Chunks of rANS blocks (spec/wire.md, 4.5). A warp codes a chunk: thread t owns lanes t and t + 32.
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

#define UNIT 128
#define RING (4 * UNIT)

// Words of a chunk from the bytes at p on, of any alignment, through a ring in shared memory; the next unit waits in registers.
struct Words {
    const u32* base;
    u32 shift, low, high;
    i64 whole;
    u32 loaded;
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

// What `decode_chunk` takes where symbols have no contexts.
struct NoContext {
    static constexpr int ahead = 1;
    __device__ u32 operator()(i64) const { return 0; }
};
// One context per symbol, in memory far away: those of a group of steps are on their way while the group before is decoded.
struct ContextOf {
    static constexpr int ahead = 8;
    const u8* contexts;
    __device__ u32 operator()(i64 i) const { return contexts[i]; }
};

// A warp decodes chunk c: `look(context, slot)` gives the cell and symbol of a slot, `put(i, symbol)` takes symbol i of the block. Whether
// the chunk is well-formed, as far as this thread saw.
template <class Context, class Look, class Put>
__device__ bool decode_chunk(
    const Layout& l, i64 c, i64 alphabet, const u8* states, i64 number, u16* ring, Context context, Look look, Put put
) {
    constexpr int G = Context::ahead;
    const int t = threadIdx.x & 31, lanes = l.lanes, coded = (int)l.coded(c);
    const u32 most = (u32)number;
    const i64 first = c * l.size;
    Words in;
    in.begin(states + 4 * l.lanes, states + 4 * l.lanes + 2 * number, ring);
    u32 x[2], soon[G][2], now[G][2];
    bool good = true;
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        x[h] = lane < l.lanes ? load32(states + 4 * lane) : 65536;
        good &= x[h] >= 65536;
    }
    auto fetch = [&](int base) {
#pragma unroll
        for (int a = 0; a < G; ++a)
            for (int h = 0; h < 2; ++h) {
                const int i = base + a * lanes + t + 32 * h;
                soon[a][h] = t + 32 * h < lanes && i < coded ? context(first + i) : 0;
            }
    };
    fetch(0);
    u32 at = 0;
    for (int group = 0; group < coded && at <= most; group += G * lanes) {
#pragma unroll
        for (int a = 0; a < G; ++a)
            for (int h = 0; h < 2; ++h) now[a][h] = soon[a][h];
        fetch(group + G * lanes);
#pragma unroll
        for (int a = 0; a < G; ++a) {
            const int base = group + a * lanes;
            if (base >= coded || at > most) break;
            bool needs[2];
            for (int h = 0; h < 2; ++h) {
                const int lane = t + 32 * h, i = base + lane;
                needs[h] = false;
                if (lane < lanes && i < coded) {
                    u32 cell;
                    u8 symbol;
                    look(now[a][h], x[h] & (TOTAL - 1), &cell, &symbol);
                    put(first + i, symbol);
                    x[h] = (cell & 0xffff) * (x[h] >> 12) + (cell >> 16);
                    needs[h] = x[h] < 65536;
                }
            }
            const u32 votes = __ballot_sync(FULL, needs[0]), later = __ballot_sync(FULL, needs[1]), before = (1u << t) - 1;
            const u32 from0 = at + __popc(votes & before), from1 = at + __popc(votes) + __popc(later & before);
            if (needs[0]) x[0] = x[0] << 16 | ring[from0 % RING];
            if (needs[1]) x[1] = x[1] << 16 | ring[from1 % RING];
            at += __popc(votes) + __popc(later);
            if (at <= most && at + 64 > in.loaded) in.turn();
        }
    }
    good &= at == most;
    // The symbols that were not coded are what a state has above the smallest one.
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        if (lane >= l.lanes) continue;
        const u32 rest = x[h] - 65536;
        good &= x[h] >= 65536 && rest >> l.rows * l.width == 0;
        for (int r = 0; r < l.rows; ++r) {
            const u32 s = rest >> r * l.width & ((1u << l.width) - 1);
            good &= s < alphabet;
            const i64 column = (lane - coded % l.lanes + l.lanes) % l.lanes;
            put(first + coded + (i64)r * l.lanes + column, (u8)(s < alphabet ? s : 0));
        }
    }
    return good;
}

// What a frequency is divided by: x / f is the high word of the product with x, or 1 more.
__device__ __forceinline__ u32 inverse_of(u32 code) { return code & 0xffff ? 0xffffffffu / (code & 0xffff) : 0; }

// A warp encodes chunk c: `symbol(i)` is symbol i of the block; `load(i)` loads what `look` makes its frequency | start << 16 of, and the
// inverse of that. The number of words, which end where those of all coded symbols would. What AHEAD steps need is on its way while the
// steps that come before them are taken.
template <int AHEAD = 8, class Symbol, class Load, class Look>
__device__ i64 encode_chunk(const Layout& l, i64 c, Symbol symbol, Load load, Look look, u16* words, u32* states) {
    const int t = threadIdx.x & 31, lanes = l.lanes, coded = (int)l.coded(c);
    const i64 first = c * l.size;
    u32 x[2], code[AHEAD][2], inverse[AHEAD][2];
    decltype(load((i64)0)) soon[AHEAD][2];
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        x[h] = 65536;
        if (lane >= lanes) continue;
        for (int r = 0; r < l.rows; ++r) {
            const int column = (lane - coded % lanes + lanes) % lanes;
            x[h] += (u32)symbol(first + coded + r * lanes + column) << r * l.width;
        }
    }
    // Where the symbol stands that this thread codes in a step, or after all.
    auto place = [=](int group, int a, int h) { return t + 32 * h < lanes ? (group * AHEAD + a) * lanes + t + 32 * h : coded; };
    auto fetch = [&](int group) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            for (int h = 0; h < 2; ++h)
                if (place(group, a, h) < coded) soon[a][h] = load(first + place(group, a, h));
    };
    words += first;
    int left = coded, group = ((coded + lanes - 1) / lanes + AHEAD - 1) / AHEAD - 1;
    if (group >= 0) fetch(group);
    for (; group >= 0; --group) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            for (int h = 0; h < 2; ++h) {
                code[a][h] = 0;
                if (place(group, a, h) < coded) look(soon[a][h], &code[a][h], &inverse[a][h]);
            }
        if (group) fetch(group - 1);
#pragma unroll
        for (int a = AHEAD - 1; a >= 0; --a) {
            u32 word[2];
            bool emits[2];
            for (int h = 0; h < 2; ++h) {
                emits[h] = code[a][h] && x[h] >> 20 >= (code[a][h] & 0xffff);
                word[h] = x[h];
                if (emits[h]) x[h] >>= 16;
            }
            const u32 votes = __ballot_sync(FULL, emits[0]), later = __ballot_sync(FULL, emits[1]), before = (1u << t) - 1;
            for (int h = 0; h < 2; ++h) {
                if (!code[a][h]) continue;
                const u32 f = code[a][h] & 0xffff, quotient = __umulhi(x[h], inverse[a][h]), rest = x[h] - quotient * f;
                x[h] = (quotient << 12) + rest + (rest >= f ? TOTAL - f : 0) + (code[a][h] >> 16);
            }
            left -= __popc(votes) + __popc(later);
            if (emits[0]) words[left + __popc(votes & before)] = (u16)word[0];
            if (emits[1]) words[left + __popc(votes) + __popc(later & before)] = (u16)word[1];
        }
    }
    for (int h = 0; h < 2; ++h)
        if (t + 32 * h < lanes) states[c * lanes + t + 32 * h] = x[h];
    return coded - left;
}
