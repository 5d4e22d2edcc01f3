// Trellis codes: the admissible integers nearest to a vector (Viterbi's algorithm; spec/wire.md, 5.20, "Encoder"). A warp for each half of the
// lanes of a run, a thread for each lane: forwards through the costs of all states, and back along the best path.
#include "common.cuh"
#include "trellis.cuh"

// Steps whose decisions are kept together: the lower half of a state's cost has a bit for each, the upper half the metric.
#define GROUP 16

template <int S>
struct Trellis {
    static constexpr int g0 = S == 4 ? 2 : S == 8 ? 5 : S == 16 ? 9 : 18, g1 = S == 4 ? 1 : S == 32 ? 4 : 2;
    static constexpr int bits = S == 4 ? 2 : S == 8 ? 3 : S == 16 ? 4 : 5;
    // More than any path can gain by a start outside of state 0.
    static constexpr u32 penalty = (u32)(4096 * bits + 1) << 16;
};

__device__ __forceinline__ u32 add_min(u32 a, u32 b, u32 c) {
#ifdef CUDA_ON_CPU
    return a + b < c ? a + b : c;
#else
    return __viaddmin_u32(a, b, c);
#endif
}

// One step of all states. Of the branches into a state the first comes from the lower one; the second has its bit set, and so it is taken only
// if its metric is smaller.
template <int S>
__device__ __forceinline__ void advance(u32 (&cost)[S], int y, u32 bit) {
    constexpr int g0 = Trellis<S>::g0, g1 = Trellis<S>::g1, bits = Trellis<S>::bits;
    const int f0 = ((y + 64) & 127) - 64, f1 = ((y + 32) & 127) - 64;
    const u32 p = (u32)(f0 < 0 ? -f0 : f0) << 8, q = (u32)(f1 < 0 ? -f1 : f1) << 8;
    const u32 m[4] = {p * p, q * q, (16384 - p) * (16384 - p), (16384 - q) * (16384 - q)};
    const u32 second[4] = {m[0] + bit, m[1] + bit, m[2] + bit, m[3] + bit};
    u32 next[S];
#pragma unroll
    for (int t = 0; t < S; ++t) {
        const int z0 = t >> (bits - 1), w = z0 ? t ^ g0 : t, low = w & ~g1, z1 = w & g1 ? 1 : 0;
        next[t] = add_min(cost[2 * (low | g1) + z0], second[z0 + 2 * (1 - z1)], cost[2 * low + z0] + m[z0 + 2 * z1]);
    }
#pragma unroll
    for (int t = 0; t < S; ++t) cost[t] = next[t];
}

// Keep the decisions of a group, and begin the next with the smallest metric at zero.
template <int S>
__device__ __forceinline__ void keep(u32 (&cost)[S], u32* kept) {
    u32 least = cost[0];
#pragma unroll
    for (int t = 1; t < S; ++t) least = cost[t] < least ? cost[t] : least;
    least &= 0xffff0000u;
#pragma unroll
    for (int t = 0; t < S; t += 2) kept[t / 2 * 32] = (cost[t] & 0xffff) | cost[t + 1] << 16;
#pragma unroll
    for (int t = 0; t < S; ++t) cost[t] = (cost[t] & 0xffff0000u) - least;
}

// The numbers of one lane, and their classes: sixteen of them are on their way while those before are worked on.
template <bool drawn, bool classed>
struct Lane {
    const float* from;
    float scale;
    int steps, sign;
    Draws draws;
    // With dither: the coordinate of the warp's first lane, and room for the draws of a group.
    i64 first;
    u16* room;
    // With classes: those of the lane.
    const u8* classes;
    float ahead[GROUP];
    u8 kinds[GROUP];
    __device__ void fetch(int group) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const int i = GROUP * group + j;
            ahead[j] = i < steps ? from[(u32)(LANES * i)] : 0.0f;
            kinds[j] = classed && i < steps ? classes[(u32)(LANES * i)] : 0;
        }
    }
    // The draws of a group: a thread draws for eight coordinates of one step, twice.
    __device__ void draw(int group) {
        if (!drawn) return;
        const int t = threadIdx.x & 31;
        __syncwarp();
        for (int k = t; k < 4 * GROUP; k += 32) {
            u32 w[4];
            philox(draws, (u64)(first + LANES * (GROUP * group + (k >> 2)) + 8 * (k & 3)) >> 3, PURPOSE, w);
            u32* to = (u32*)room + 4 * k;
            for (int b = 0; b < 4; ++b) to[b] = w[b];
        }
        __syncwarp();
    }
    __device__ int dither(int j) const { return drawn ? room[32 * j + (threadIdx.x & 31)] & 0x7fff : 0; }
    __device__ int y(float v, int u) const { return drawn ? dithered_y(v, sign, u) : nearest(v); }
};

struct Found {
    u8 *bytes, *contexts;
    signed char* levels;
    int top, more14, more30, height;
    __device__ __forceinline__ void keep(u32 i, int a, int z0) {
        const int size = a >= 0 ? a + 1 : -a;
        top = size > top ? size : top;
        more14 += size > 14;
        more30 += size > 30;
        bytes[i] = (u8)byte_of(a, z0);
    }
    // Coordinate i, which is the label of y; `v` is the number in units of the grid or the dither.
    template <bool drawn>
    __device__ __forceinline__ void put(u32 i, float v, int y, int label, int u) {
        const int n = integer_of(y, label), z0 = label & 1;
        int a = n >> 1;
        if (drawn) {
            const int t = distance_of(u, z0);
            a = dithered_index(n, u, t);
            contexts[i] = (u8)fine_class(t);
        }
        keep(i, a, z0);
        if (!levels) return;
        // Levels of a scalar quantiser, for scale classes: of two steps, or of a quarter with dither.
        const int number = nearest(v), high = number < 0 ? -number : number;
        const int level = drawn ? (number + 1024) >> 11 : (number + 32) >> 6;
        height = high > height ? high : height;
        levels[i] = (signed char)(level < -127 ? -127 : level > 127 ? 127 : level);
    }
};

// `kept` has S / 2 words per group and thread. `warp`: which half of which run.
template <int S, bool drawn, bool classed>
__device__ void viterbi(
    const Given& of, i64 warp, u32* kept, u16* room, u8* bytes, u8* contexts, signed char* levels, const Classed& by, int* known
) {
    constexpr int g0 = Trellis<S>::g0, g1 = Trellis<S>::g1, bits = Trellis<S>::bits;
    const int t = threadIdx.x & 31;
    const i64 run = warp >> 1, begin = run << of.run, end = smaller(begin + ((i64)1 << of.run), of.n);
    const i64 first = begin + 32 * (warp & 1), mine = first + t, segment = segment_of(of.n, begin);
    if (classed && !by.has(segment)) return;
    const u32 stills = classed ? by.stills(segment) : 0;
    Lane<drawn, classed> lane;
    lane.classes = by.classes + mine;
    lane.from = of.x + mine;
    lane.scale = of.scale;
    lane.steps = mine < end ? (int)((end - mine + LANES - 1) / LANES) : 0;
    lane.sign = drawn ? sign_of(of.draws, begin) : 1;
    lane.draws = of.draws;
    lane.first = first;
    lane.room = room;
    KEEP_TOGETHER(lane.from);
    // Threads of a warp go through as many groups; the last has steps that not all of them have.
    const int groups = (int)((end - begin + LANES * GROUP - 1) / (LANES * GROUP)), whole = (int)((end - begin) / (LANES * GROUP));
    bool far = false;
    u32 cost[S];
#pragma unroll
    for (int s = 0; s < S; ++s) cost[s] = s ? Trellis<S>::penalty : 0;
    u32* const own = kept + t;
    lane.fetch(0);
    for (int g = 0; g < whole; ++g) {
        float now[GROUP];
        u8 kinds[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) now[j] = __fmul_rn(lane.ahead[j], of.scale), kinds[j] = lane.kinds[j];
        if (g + 1 < whole) lane.fetch(g + 1);
        lane.draw(g);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            far |= !(fabsf(now[j]) < of.limit);
            // Still coordinates cost nothing and change no state.
            if (classed && stills >> kinds[j] & 1) continue;
            advance<S>(cost, lane.y(now[j], lane.dither(j)), 1u << j);
        }
        keep<S>(cost, own + g * (S / 2) * 32);
    }
    if (whole < groups) {
        lane.draw(whole);
#pragma unroll 1
        for (int j = 0; GROUP * whole + j < lane.steps; ++j) {
            const float v = __fmul_rn(lane.from[(u32)(LANES * (GROUP * whole + j))], of.scale);
            far |= !(fabsf(v) < of.limit);
            if (classed && stills >> lane.classes[(u32)(LANES * (GROUP * whole + j))] & 1) continue;
            advance<S>(cost, lane.y(v, lane.dither(j)), 1u << j);
        }
        keep<S>(cost, own + whole * (S / 2) * 32);
    }
    // The lowest state among the cheapest.
    u32 best = cost[0] >> 16 << bits;
#pragma unroll
    for (int s = 1; s < S; ++s) {
        const u32 here = cost[s] >> 16 << bits | (u32)s;
        best = here < best ? here : best;
    }
    int state = (int)(best & (S - 1));
    Found found = {bytes + first, drawn ? contexts + first : nullptr, levels ? levels + first : nullptr, 0, 0, 0, 0};
    KEEP_TOGETHER(found.bytes);
    auto back = [&](u32 decided, int j) {
        const int z0 = state >> (bits - 1), w = z0 ? state ^ g0 : state, before = decided >> j & 1 ? w | g1 : w & ~g1;
        state = 2 * before + z0;
        return z0 + ((w ^ before) & g1 ? 2 : 0);
    };
    auto put = [&](u32 i, float v, int kind, u32 decided, int j) {
        const int u = lane.dither(j), y = lane.y(v, u);
        if (classed && stills >> kind & 1) found.keep(i, by.still(segment, kind, y), 0);
        else found.put<drawn>(i, v, y, back(decided, j), u);
    };
    auto decisions = [&](int g) { return own[(g * (S / 2) + (state >> 1)) * 32] >> 16 * (state & 1); };
    if (whole < groups) {
        lane.draw(whole);
        const u32 decided = decisions(whole);
#pragma unroll 1
        for (int j = lane.steps - GROUP * whole - 1; j >= 0; --j) {
            const u32 i = (u32)(LANES * (GROUP * whole + j));
            put(i + t, __fmul_rn(lane.from[i], of.scale), classed ? lane.classes[i] : 0, decided, j);
        }
    }
    if (whole) lane.fetch(whole - 1);
    for (int g = whole - 1; g >= 0; --g) {
        float now[GROUP];
        u8 kinds[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) now[j] = __fmul_rn(lane.ahead[j], of.scale), kinds[j] = lane.kinds[j];
        if (g) lane.fetch(g - 1);
        lane.draw(g);
        const u32 decided = decisions(g);
#pragma unroll
        for (int j = GROUP - 1; j >= 0; --j) put((u32)(LANES * (GROUP * g + j)) + t, now[j], kinds[j], decided, j);
    }
    int more14 = found.more14, more30 = found.more30, top = found.top, height = found.height;
    for (int by = 16; by; by >>= 1) {
        more14 += __shfl_xor_sync(FULL, more14, by);
        more30 += __shfl_xor_sync(FULL, more30, by);
        const int other = __shfl_xor_sync(FULL, top, by), higher = __shfl_xor_sync(FULL, height, by);
        top = other > top ? other : top;
        height = higher > height ? higher : height;
    }
    const u32 any = __ballot_sync(FULL, far);
    if (t) return;
    int* to = known + segment * KNOWN_PLACES;
    atomicMax(&to[TOP_OF], top);
    if (more14) atomicAdd(&to[OVER_14], more14);
    if (more30) atomicAdd(&to[OVER_30], more30);
    atomicMax(&to[HEIGHT], height);
    if (any) atomicOr(&to[TOO_FAR], 1);
}

// Of all segments, or, where classes are given, of those that have some: these are gone through once more without their still coordinates.
template <int S>
__device__ __forceinline__ void viterbi_of(
    const Given& of, u32* kept, u16* room, u8* bytes, u8* contexts, signed char* levels, const Classed& by, int* known
) {
    if (of.drawn) viterbi<S, true, false>(of, blockIdx.x, kept, room, bytes, contexts, levels, by, known);
    else if (by.classes) viterbi<S, false, true>(of, blockIdx.x, kept, room, bytes, contexts, levels, by, known);
    else viterbi<S, false, false>(of, blockIdx.x, kept, room, bytes, contexts, levels, by, known);
}

// A run has at most 512 steps, so 32 groups. Up to 16 states the decisions of a warp lie in shared memory.
#define GROUPS 32
