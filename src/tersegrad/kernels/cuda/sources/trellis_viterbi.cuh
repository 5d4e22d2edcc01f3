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
    // The one bit of g1.
    static constexpr int place = S == 4 ? 0 : S == 32 ? 2 : 1;
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

// The larger one, and NaN where one of them is.
__device__ __forceinline__ float larger_number(float a, float b) {
#if defined(CUDA_ON_CPU) || __CUDA_ARCH__ < 800
    return a != a || a > b ? a : b;
#else
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#endif
}

__device__ __forceinline__ int between(int v, int low, int high) {
#ifdef CUDA_ON_CPU
    return v < low ? low : v > high ? high : v;
#else
    return min(max(v, low), high);
#endif
}

// One step of all states. Of the branches into a state the first comes from the lower one; the second has its bit set, and so it is taken only
// if its metric is smaller.
template <int S>
__device__ __forceinline__ void advance(u32 (&cost)[S], int y, u32 bit) {
    constexpr int g0 = Trellis<S>::g0, g1 = Trellis<S>::g1, bits = Trellis<S>::bits;
    // The distance to a label's nearest integer times 2^8: a whole turn of 2^32 is that between two of its integers.
    const u32 turn = (u32)y << 25;
    u32 m[4], second[4];
#pragma unroll
    for (int label = 0; label < 4; ++label) {
        const int distance = (int)(turn - ((u32)label << 30)) >> 17;
        m[label] = (u32)(distance * distance);
        second[label] = m[label] + bit;
    }
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
    // A group all of whose steps the lane has.
    __device__ void fetch(int group) {
        const float* const here = from + (i64)LANES * GROUP * group;
        const u8* const known = classes + (i64)LANES * GROUP * group;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            ahead[j] = here[LANES * j];
            kinds[j] = classed ? known[LANES * j] : 0;
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

// The way back through a trellis: the bits of the state, each the lowest of a word whose others mean nothing.
template <int S>
struct Path {
    static constexpr int bits = Trellis<S>::bits, place = Trellis<S>::place;
    u32 state[bits];
    int z0, z1;
    __device__ void begin(u32 at) {
        for (int b = 0; b < bits; ++b) state[b] = at >> b;
    }
    __device__ u32 at() const {
        u32 all = 0;
        for (int b = 0; b < bits; ++b) all |= (state[b] & 1) << b;
        return all;
    }
    // To the state before, by the decision, and the label z0 + 2 z1 of the branch between them.
    __device__ __forceinline__ void back(u32 decision) {
        const u32 top = state[bits - 1];
        u32 before[bits];
        for (int b = 0; b < bits - 1; ++b) before[b] = Trellis<S>::g0 >> b & 1 ? state[b] ^ top : state[b];
        z0 = (int)(top & 1), z1 = (int)((before[place] ^ decision) & 1);
        before[place] = decision;
        for (int b = bits - 1; b; --b) state[b] = before[b - 1];
        state[0] = top;
    }
};

template <bool yes>
struct Bool {
    static constexpr bool value = yes;
};

// Up to this size indices are not counted.
#define FEW 14

// What is found in the steps of a lane, of which the next are those from `at` on.
struct Found {
    u8 *bytes, *contexts;
    signed char* levels;
    i64 at;
    // The size of an index a is a + 1, or -a.
    int top, more14, more30;
    __device__ __forceinline__ static int size_of(int a) { return 1 + (a ^ a >> 31); }
    __device__ __forceinline__ void count(int a) { more14 += size_of(a) > FEW, more30 += size_of(a) > 30; }
    // Step i is an index and z0.
    __device__ __forceinline__ int keep(int i, int a, int z0) {
        bytes[at + LANES * i] = (u8)byte_of(a, z0);
        return a;
    }
    // Step i has the label z0 + 2 z1 for y; `v` is the number in units of the grid or the dither. Its index. `small`: |y| is below SMALL.
    template <bool drawn, bool small>
    __device__ __forceinline__ int put(int i, float v, int y, int z0, int z1, int u) {
        // The integer is 4 quarter + z0 + 2 z1.
        const int quarter = (y + 2 * GRID - GRID * z0 - 2 * GRID * z1) >> 7;
        if (levels) {
            // Levels of a scalar quantiser, for scale classes: of two steps, or of a quarter with dither.
            const int level = drawn ? (nearest(v) + 1024) >> 11 : (y + 32) >> 6;
            levels[at + LANES * i] = (signed char)(small ? level : between(level, -127, 127));
        }
        if (drawn) {
            const int t = distance_of(u, z0);
            contexts[at + LANES * i] = (u8)fine_class(t);
            return keep(i, dithered_index(4 * quarter + z0 + 2 * z1, u, t), z0);
        }
        // As keep does, for the index 2 quarter + z1.
        const int half = quarter + WIDEST / 2;
        bytes[at + LANES * i] = (u8)(2 * (small ? half : between(half, 0, WIDEST - 1)) + z1 + 128 * z0);
        return 2 * quarter + z1;
    }
};
// Indices of such y, and levels, fit into bytes.
#define SMALL 3840.0f

// `kept` has S / 2 words per group and thread. `warp`: which half of which run.
template <int S, bool drawn, bool classed>
__device__ void viterbi(
    const Given& of, i64 warp, u32* kept, u16* room, u8* bytes, u8* contexts, signed char* levels, const Classed& by, int* known
) {
    constexpr int bits = Trellis<S>::bits;
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
    float largest = 0.0f;
    u32 cost[S];
#pragma unroll
    for (int s = 0; s < S; ++s) cost[s] = s ? Trellis<S>::penalty : 0;
    u32* const own = kept + t;
    if (whole) lane.fetch(0);
    for (int g = 0; g < whole; ++g) {
        float now[GROUP];
        u8 kinds[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) now[j] = __fmul_rn(lane.ahead[j], of.scale), kinds[j] = lane.kinds[j];
        if (g + 1 < whole) lane.fetch(g + 1);
        lane.draw(g);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            largest = larger_number(largest, fabsf(now[j]));
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
            largest = larger_number(largest, fabsf(v));
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
    Path<S> path;
    path.begin(best);
    Found found = {bytes + mine, drawn ? contexts + mine : nullptr, levels ? levels + mine : nullptr, 0, 0, 0, 0};
    KEEP_TOGETHER(found.bytes);
    auto put = [&](auto small, int i, float v, int kind, u32 decided, int j) {
        const int u = lane.dither(j), y = lane.y(v, u);
        if (classed && stills >> kind & 1) return found.keep(i, by.still(segment, kind, y), 0);
        path.back(decided >> j);
        return found.template put<drawn, decltype(small)::value>(i, v, y, path.z0, path.z1, u);
    };
    auto decisions = [&](int g) {
        const u32 state = path.at();
        return own[(g * (S / 2) + (state >> 1)) * 32] >> 16 * (state & 1);
    };
    if (whole < groups) {
        lane.draw(whole);
        const u32 decided = decisions(whole);
        found.at = (i64)LANES * GROUP * whole;
#pragma unroll 1
        for (int j = lane.steps - GROUP * whole - 1; j >= 0; --j) {
            const i64 i = found.at + LANES * j;
            const int a = put(Bool<false>(), j, __fmul_rn(lane.from[i], of.scale), classed ? lane.classes[i] : 0, decided, j);
            const int size = Found::size_of(a);
            found.top = size > found.top ? size : found.top;
            found.count(a);
        }
    }
    if (whole) lane.fetch(whole - 1);
    auto back = [&](auto small, int g) {
        float now[GROUP];
        u8 kinds[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) now[j] = __fmul_rn(lane.ahead[j], of.scale), kinds[j] = lane.kinds[j];
        if (g) lane.fetch(g - 1);
        lane.draw(g);
        const u32 decided = decisions(g);
        found.at = (i64)LANES * GROUP * g;
        int indices[GROUP], least = 0, most = -1;
#pragma unroll
        for (int j = GROUP - 1; j >= 0; --j) {
            indices[j] = put(small, j, now[j], kinds[j], decided, j);
            least = indices[j] < least ? indices[j] : least;
            most = indices[j] > most ? indices[j] : most;
        }
        const int size = most + 1 > -least ? most + 1 : -least;
        found.top = size > found.top ? size : found.top;
        if (size > FEW) {
#pragma unroll
            for (int j = 0; j < GROUP; ++j) found.count(indices[j]);
        }
    };
    if (!drawn && !__ballot_sync(FULL, !(largest < SMALL)))
        for (int g = whole - 1; g >= 0; --g) back(Bool<!drawn>(), g);
    else
        for (int g = whole - 1; g >= 0; --g) back(Bool<false>(), g);
    int more14 = found.more14, more30 = found.more30, top = found.top, height = levels ? nearest(largest) : 0;
    for (int by = 16; by; by >>= 1) {
        more14 += __shfl_xor_sync(FULL, more14, by);
        more30 += __shfl_xor_sync(FULL, more30, by);
        const int other = __shfl_xor_sync(FULL, top, by), higher = __shfl_xor_sync(FULL, height, by);
        top = other > top ? other : top;
        height = higher > height ? higher : height;
    }
    const u32 any = __ballot_sync(FULL, !(largest < of.limit));
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
