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
// Steps of 64 lanes whose words are in the ring before the first of them.
#define STEPS 4

// Words of a chunk from the bytes at p on, of any alignment, through a ring in shared memory. The next unit waits in registers, and is
// shifted into place when it is stored: nothing waits for memory before that.
struct Words {
    const u32* base;
    u32 shift, a, b, c;
    int whole, loaded;
    u16* ring;
    __device__ u32 word32(int i) const { return i < whole ? base[i] : 0; }
    __device__ void fetch() {
        const int i = loaded / 2 + 2 * (threadIdx.x & 31);
        a = word32(i), b = word32(i + 1), c = word32(i + 2);
    }
    __device__ void begin(const u8* p, const u8* end, u16* place) {
        const u64 address = (u64)p;
        base = (const u32*)(address & ~(u64)3);
        shift = 8 * (address & 3);
        whole = (int)(((i64)((u64)end - (u64)base) + 3) / 4);
        loaded = 0;
        ring = place;
        fetch();
        for (int k = 0; k < 2; ++k) turn();
    }
    // Put the unit that waits into the ring, and ask for the next.
    __device__ void turn() {
        __syncwarp();
        u32* to = (u32*)(ring + (u32)loaded % RING) + 2 * (threadIdx.x & 31);
        to[0] = __funnelshift_r(a, b, shift);
        to[1] = __funnelshift_r(b, c, shift);
        loaded += UNIT;
        __syncwarp();
        fetch();
    }
    // Before STEPS steps, or fewer.
    __device__ __forceinline__ void prepare(int at) {
        while (at + 2 * 64 * STEPS > 2 * loaded) turn();
    }
    // The next words, in the order of lanes, to the states that need one; `at`: how many bytes were taken. A malformed chunk may ask for more words than
    // it has. What lies in the ring then is as good as anything: the count tells.
    __device__ __forceinline__ void refill(u32 (&x)[2], const bool (&needs)[2], int& at) {
        const u32 before = (1u << (threadIdx.x & 31)) - 1;
        const u32 votes = __ballot_sync(FULL, needs[0]), later = __ballot_sync(FULL, needs[1]);
        const u32 from0 = at + 2 * __popc(votes & before), middle = at + 2 * __popc(votes), from1 = middle + 2 * __popc(later & before);
        const u32 word0 = ring[from0 % (2 * RING) / 2], word1 = ring[from1 % (2 * RING) / 2];
        if (needs[0]) x[0] = x[0] << 16 | word0;
        if (needs[1]) x[1] = x[1] << 16 | word1;
        at = middle + 2 * __popc(later);
    }
};

// What `decode_chunk` takes where symbols have no contexts.
struct NoContext {
    static constexpr int ahead = 4;
    __device__ u32 operator()(i64) const { return 0; }
};
// One context per symbol, in memory far away: those of a group of steps are on their way while the group before is decoded.
struct ContextOf {
    static constexpr int ahead = 8;
    const u8* contexts;
    __device__ u32 operator()(i64 i) const { return contexts[(u32)i]; }
};

// Hands on the symbols of a whole step, which begins at symbol i: at once, where `put` takes them so, or one by one.
template <class Put>
__device__ __forceinline__ auto put_step(const Put& put, i64 i, u8 a, u8 b, int) -> decltype(put.step(i, a, b)) {
    put.step(i, a, b);
}
template <class Put>
__device__ __forceinline__ void put_step(const Put& put, i64 i, u8 a, u8 b, long) {
    const int t = threadIdx.x & 31;
    put(i + t, a);
    put(i + t + 32, b);
}

// Tells contexts, or what takes symbols, where a group of whole steps begins, if they ask for that (`begin`): at most 512 symbols, none of them beyond
// the next multiple of 2^14. A warp may make contexts together there, and then has them near.
template <class T>
__device__ __forceinline__ auto begin_group(T& thing, i64 i, int) -> decltype(thing.begin(i)) {
    thing.begin(i);
}
template <class T>
__device__ __forceinline__ void begin_group(T&, i64, long) {}
template <class Context>
__device__ __forceinline__ auto context_near(const Context& context, i64 i, int) -> decltype(context.near(i)) {
    return context.near(i);
}
template <class Context>
__device__ __forceinline__ u32 context_near(const Context& context, i64 i, long) {
    return context(i);
}

// The cells and symbols of a thread's two slots: at once, where `look` finds them so, or one by one.
template <class Look>
__device__ __forceinline__ auto look_up(const Look& look, const u32 (&contexts)[2], const u32 (&slots)[2], u32 (&cells)[2], u8 (&symbols)[2], int)
    -> decltype(look.both(contexts, slots, cells, symbols)) {
    look.both(contexts, slots, cells, symbols);
}
template <class Look>
__device__ __forceinline__ void look_up(const Look& look, const u32 (&contexts)[2], const u32 (&slots)[2], u32 (&cells)[2], u8 (&symbols)[2], long) {
    for (int h = 0; h < 2; ++h) look(contexts[h], slots[h], &cells[h], &symbols[h]);
}

// Which warp of its block this thread's is, so that the compiler knows that its threads do the same.
__device__ __forceinline__ int own_number() { return __shfl_sync(FULL, (int)(threadIdx.x >> 5), 0); }

// A warp decodes chunk c: `look(context, slot)` gives the cell and symbol of a slot, `put(i, symbol)` takes symbol i of the block. Whether
// the chunk is well-formed, as far as this thread saw.
template <class Context, class Look, class Put>
__device__ bool decode_chunk(
    const Layout& l, i64 c, i64 alphabet, const u8* states, i64 number, u16* ring, Context context, Look look, Put put
) {
    constexpr int G = Context::ahead;
    const int t = threadIdx.x & 31, coded = (int)l.coded(c), lanes = l.lanes;
    const i64 first = c * l.size;
    Words in;
    in.begin(states + 4 * lanes, states + 4 * lanes + 2 * number, ring);
    u32 x[2];
    bool good = true;
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        x[h] = lane < lanes ? load32(states + 4 * lane) : 65536;
        good &= x[h] >= 65536;
    }
    int at = 0, base = 0;
    // Whole steps of 64 lanes, which are nearly all, have no lane that waits.
    const int groups = lanes == 64 ? coded / (64 * G) : 0;
    u32 soon[G][2];
    auto fetch = [&](int group) {
        begin_group(context, first + group * G * 64, 0);
#pragma unroll
        for (int a = 0; a < G; ++a)
            for (int h = 0; h < 2; ++h) soon[a][h] = context_near(context, first + (group * G + a) * 64 + t + 32 * h, 0);
    };
    if (groups) fetch(0);
    for (int group = 0; group < groups; ++group) {
        u32 now[G][2];
#pragma unroll
        for (int a = 0; a < G; ++a)
            for (int h = 0; h < 2; ++h) now[a][h] = soon[a][h];
        if (group + 1 < groups) fetch(group + 1);
        begin_group(put, first + base, 0);
        // Symbols are handed on while the next ones are looked up.
        u8 last[2] = {0, 0};
#pragma unroll
        for (int a = 0; a < G; ++a, base += 64) {
            if (a % STEPS == 0) in.prepare(at);
            u32 cell[2];
            u8 symbol[2];
            bool needs[2];
            const u32 slots[2] = {x[0] & (TOTAL - 1), x[1] & (TOTAL - 1)};
            look_up(look, now[a], slots, cell, symbol, 0);
            if (a) put_step(put, first + base - 64, last[0], last[1], 0);
            for (int h = 0; h < 2; ++h) {
                x[h] = (cell[h] & 0xffff) * (x[h] >> 12) + (cell[h] >> 16);
                needs[h] = x[h] < 65536;
            }
            in.refill(x, needs, at);
            for (int h = 0; h < 2; ++h) last[h] = symbol[h];
        }
        put_step(put, first + base - 64, last[0], last[1], 0);
    }
    for (; base < coded; base += lanes) {
        bool needs[2];
        in.prepare(at);
        for (int h = 0; h < 2; ++h) {
            const int lane = t + 32 * h, i = base + lane;
            needs[h] = false;
            if (lane < lanes && i < coded) {
                u32 cell;
                u8 symbol;
                look(context(first + i), x[h] & (TOTAL - 1), &cell, &symbol);
                put(first + i, symbol);
                x[h] = (cell & 0xffff) * (x[h] >> 12) + (cell >> 16);
                needs[h] = x[h] < 65536;
            }
        }
        in.refill(x, needs, at);
    }
    good &= at == 2 * number;
    // The symbols that were not coded are what a state has above the smallest one.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        if (lane >= lanes) continue;
        const u32 rest = x[h] - 65536;
        good &= x[h] >= 65536 && rest >> l.rows * l.width == 0;
        for (int r = 0; r < l.rows; ++r) {
            const u32 s = rest >> r * l.width & ((1u << l.width) - 1);
            good &= s < alphabet;
            const int column = (lane - coded % lanes + lanes) % lanes;
            put(first + coded + r * lanes + column, (u8)(s < alphabet ? s : 0));
        }
    }
    return good;
}

#define AHEAD 16

// How a symbol is coded: more | start + more << 16, where more is TOTAL - frequency, and the inverse of the frequency. All zeros leave a state as it is.
struct Code {
    u32 code, inverse;
};

__device__ __forceinline__ Code code_of(u32 code) {
    const u32 f = code & 0xffff;
    Code made = {f ? code - f + (TOTAL - f) * 0x10001u : 0, f ? 0xffffffffu / f : 0};
    return made;
}

// What is read of memory for a symbol; what it means is found out later, so that nothing waits for it.
struct Raw {
    u32 symbol, context;
};

// The states of a warp's lanes, and where their words go, backwards. A step's words are counted and stored in the next one: the processor would wait
// for the counts.
struct Encoder {
    u32 x[2], word[2], left, number[2], before[2];
    bool emits[2];
    u16* words;
    __device__ void store() {
        left -= number[0] + number[1];
        if (emits[0]) words[left + before[0]] = (u16)word[0];
        if (emits[1]) words[left + number[0] + before[1]] = (u16)word[1];
    }
    // One symbol per lane; lanes without one have a code of zeros.
    __device__ __forceinline__ void step(const Code& first, const Code& second) {
        const Code code[2] = {first, second};
        const u32 lower = (1u << (threadIdx.x & 31)) - 1;
        u32 out[2];
        bool full[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // The largest state that the symbol is added to: frequency << 20, less 1.
            const u32 last = code[h].code * (0u - (1u << 20)) - 1;
            out[h] = x[h];
            full[h] = x[h] > last;
            if (full[h]) x[h] >>= 16;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // The state that follows is x + start + quotient * more. The quotient may be one too small: then the rest is a frequency or more.
            const u32 more = code[h].code & (TOTAL - 1), less = more | (0u - TOTAL), after = x[h] + (code[h].code >> 16);
            const u32 quotient = __umulhi(x[h], code[h].inverse);
            const int beyond = (int)(quotient * less + (x[h] + less));
            x[h] = after + (quotient + (u32)(beyond >> 31)) * more;
        }
        store();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 votes = __ballot_sync(FULL, full[h]);
            number[h] = __popc(votes), before[h] = __popc(votes & lower);
            word[h] = out[h], emits[h] = full[h];
        }
    }
};

// A warp encodes chunk c: `symbol(i)` is symbol i of the block, `load(i)` what is read for it, `look(raw)` its code. The number of words,
// which end where those of all coded symbols would.
template <class Symbol, class Load, class Look>
__device__ i64 encode_chunk(const Layout& l, i64 c, Symbol symbol, Load load, Look look, u16* words, u32* states) {
    const int t = threadIdx.x & 31, coded = (int)l.coded(c), lanes = l.lanes;
    const i64 first = c * l.size;
    Encoder e;
    for (int h = 0; h < 2; ++h) {
        const int lane = t + 32 * h;
        e.x[h] = 65536;
        e.emits[h] = false, e.number[h] = 0;
        if (lane >= lanes) continue;
        for (int r = 0; r < l.rows; ++r) {
            const int column = (lane - coded % lanes + lanes) % lanes;
            e.x[h] += (u32)symbol(first + coded + r * lanes + column) << r * l.width;
        }
    }
    e.left = (u32)coded;
    e.words = words + first;
    KEEP_TOGETHER(e.words);
    // Groups of whole steps at the front are coded with their symbols read ahead; what follows them comes first, step by step.
    const int groups = lanes == 64 ? coded / (64 * AHEAD) : 0;
    for (int s = (coded + lanes - 1) / lanes - 1; s >= groups * AHEAD; --s) {
        Code code[2];
        for (int h = 0; h < 2; ++h) {
            const int lane = t + 32 * h, i = s * lanes + lane;
            code[h] = lane < lanes && i < coded ? look(load(first + i)) : Code{0, 0};
        }
        e.step(code[0], code[1]);
    }
    Raw ahead[AHEAD][2];
    auto read = [&](int group) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            for (int h = 0; h < 2; ++h) ahead[a][h] = load(first + (group * AHEAD + a) * 64 + t + 32 * h);
    };
    if (groups) read(groups - 1);
    for (int group = groups - 1; group >= 0; --group) {
        Raw now[AHEAD][2];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            for (int h = 0; h < 2; ++h) now[a][h] = ahead[a][h];
        if (group) read(group - 1);
#pragma unroll
        for (int a = AHEAD - 1; a >= 0; --a) e.step(look(now[a][0]), look(now[a][1]));
    }
    e.store();
    for (int h = 0; h < 2; ++h)
        if (t + 32 * h < lanes) states[c * lanes + t + 32 * h] = e.x[h];
    return coded - (int)e.left;
}
