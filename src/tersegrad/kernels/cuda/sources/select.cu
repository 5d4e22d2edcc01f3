// Choosing coordinates by magnitude, and the step of variance-based compression.
//
// One pass over the vector: a warp collects what passes, in order, in the slots of its 4096 coordinates. After a running sum over the
// counts, the slots are laid one after the other; where they overflowed, those 4096 coordinates are looked at again.
#include "scan.cuh"

#define TILE 4096
#define SLOTS 256
#define AHEAD 8

__device__ __forceinline__ u32 key_of(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// Sources: what is read of coordinate i, what it would send, and whether that is sent; `keep` is called once for every coordinate.
struct Plain {
    using Held = float;
    const float* x;
    u32 least;
    __device__ float read(i64 i) const { return x[i]; }
    __device__ float value(float held) const { return held; }
    __device__ bool sent(float v) const { return key_of(v) >= least; }
    __device__ void keep(i64, float, float) {}
};

struct Step {
    struct Held {
        float total, spread;
    };
    const float *r, *v, *x, *s;
    float alpha, zeta, tau, twice, square;
    bool hybrid;
    float *next_r, *next_v;
    bool infinite;
    __device__ Held read(i64 i) const { return {__fadd_rn(r[i], x[i]), __fadd_rn(v[i], s[i])}; }
    __device__ bool chosen(const Held& h) const {
        const bool clear = __fmul_rn(h.total, h.total) > __fmul_rn(h.spread, alpha);
        return hybrid ? clear && __uint_as_float(key_of(h.total)) > tau : clear;
    }
    __device__ float value(const Held& h) const {
        if (!chosen(h)) return 0.0f;
        return hybrid ? __uint_as_float(__float_as_uint(tau) | (__float_as_uint(h.total) & 0x80000000u)) : h.total;
    }
    __device__ bool sent(float v) const { return key_of(v) >= 1; }
    __device__ void note(float v) { infinite |= key_of(v) >= 0x7f800000u; }
    __device__ void keep(i64 i, const Held& h, float out) {
        float a = hybrid ? __fsub_rn(h.total, out) : h.total, b = __fmul_rn(h.spread, zeta);
        if (chosen(h)) {
            if (hybrid) {
                b = __fadd_rn(__fsub_rn(h.spread, __fmul_rn(__uint_as_float(key_of(h.total)), twice)), square);
                b = b < 0.0f ? 0.0f : b;
            } else {
                a = b = 0.0f;
            }
        }
        next_r[i] = a;
        next_v[i] = b;
        note(a);
        note(b);
        if (sent(out)) note(out);
    }
};

// A warp goes through a tile; `take(rank, i, value)` gets what passes. Returns how many passed.
template <class S, class Take>
__device__ i64 collect(S& source, i64 n, i64 tile, bool keeping, Take take) {
    const i64 first = tile * TILE + (threadIdx.x & 31);
    const u32 before = (1u << (threadIdx.x & 31)) - 1;
    i64 count = 0;
    for (int group = 0; group < TILE; group += 32 * AHEAD) {
        const i64 here = first + group, left = n - here;
        typename S::Held held[AHEAD];
        if (left > 32 * (AHEAD - 1)) {
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) held[a] = source.read(here + 32 * a);
        } else {
#pragma unroll
            for (int a = 0; a < AHEAD; ++a) held[a] = 32 * a < left ? source.read(here + 32 * a) : typename S::Held();
        }
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const bool inside = 32 * a < left;
            const float value = source.value(held[a]);
            if (keeping && inside) source.keep(here + 32 * a, held[a], value);
            const bool passes = inside && source.sent(value);
            const u32 votes = __ballot_sync(FULL, passes);
            if (passes) take(count + __popc(votes & before), here + 32 * a, value);
            count += __popc(votes);
        }
    }
    return count;
}

template <class S>
__device__ void fill_slots(S& source, i64 n, u16* offsets, float* values, i64* counts) {
    const i64 tile = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (tile * TILE >= n) return;
    const i64 count = collect(source, n, tile, true, [=](i64 rank, i64 i, float v) {
        if (rank < SLOTS) {
            offsets[tile * SLOTS + rank] = (u16)(i - tile * TILE);
            values[tile * SLOTS + rank] = v;
        }
    });
    if ((threadIdx.x & 31) == 0) counts[tile] = count;
}

// Zeros behind the first `total` of `limit` indices and values.
__device__ void clear_behind(i64 total, i64 limit, i64 wide, void* indices, float* out) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 j = total + (i64)blockIdx.x * blockDim.x + threadIdx.x; j < limit; j += stride) {
        if (wide) ((i64*)indices)[j] = 0;
        else ((int*)indices)[j] = 0;
        out[j] = 0.0f;
    }
}

template <class S>
__device__ void lay_out(
    S& source, i64 n, const u16* offsets, const float* values, const i64* places, i64 limit, i64 wide, void* indices, float* out
) {
    clear_behind(places[(n + TILE - 1) / TILE], limit, wide, indices, out);
    const i64 tile = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (tile * TILE >= n) return;
    const i64 first = places[tile], count = places[tile + 1] - first;
    auto put = [=](i64 rank, i64 i, float v) {
        if (first + rank >= limit) return;
        if (wide) ((i64*)indices)[first + rank] = i;
        else ((int*)indices)[first + rank] = (int)i;
        out[first + rank] = v;
    };
    if (count > SLOTS) {
        collect(source, n, tile, false, put);
        return;
    }
    for (i64 k = threadIdx.x & 31; k < count; k += 32) put(k, tile * TILE + offsets[tile * SLOTS + k], values[tile * SLOTS + k]);
}

__device__ __forceinline__ u32 least_key(const i64* key) { return (u32)(*key < 1 ? 1 : *key > 0xffffffffLL ? 0xffffffffLL : *key); }

extern "C" __global__ void select_collect(const float* x, i64 n, const i64* key, u16* offsets, float* values, i64* counts) {
    Plain source = {x, least_key(key)};
    fill_slots(source, n, offsets, values, counts);
}

extern "C" __global__ void select_spread(
    const float* x, i64 n, const i64* key, const u16* offsets, const float* values, const i64* places, i64 limit, i64 wide, void* indices, float* out
) {
    Plain source = {x, least_key(key)};
    lay_out(source, n, offsets, values, places, limit, wide, indices, out);
}

extern "C" __global__ void variance_collect(
    const float* r, const float* v, const float* x, const float* s, i64 n, float alpha, float zeta, float tau, float twice, float square, i64 hybrid,
    float* next_r, float* next_v, u16* offsets, float* values, i64* counts, i64* infinite
) {
    Step source = {r, v, x, s, alpha, zeta, tau, twice, square, hybrid != 0, next_r, next_v, false};
    fill_slots(source, n, offsets, values, counts);
    if (source.infinite) *infinite = 1;
}

extern "C" __global__ void variance_spread(
    const float* r, const float* v, const float* x, const float* s, i64 n, float alpha, float zeta, float tau, float twice, float square, i64 hybrid,
    const u16* offsets, const float* values, const i64* places, i64 limit, i64 wide, void* indices, float* out
) {
    Step source = {r, v, x, s, alpha, zeta, tau, twice, square, hybrid != 0, 0, 0, false};
    lay_out(source, n, offsets, values, places, limit, wide, indices, out);
}

// ---- the k largest keys ----
//
// A sample gives a key that about a third more than k coordinates reach. These are collected, and the k-th largest key is found among them,
// ten bits at a time. Should there be too few or too many of them, the same kernels go through the whole vector.

struct Candidates {
    const float *x, *values;
    const void* indices;
    i64 n, room;
    bool enough;
    __device__ Candidates(const float* x, i64 n, const float* values, const void* indices, i64 room, const i64* key, const i64* found, i64 k)
        : x(x), values(values), indices(indices), n(n), room(room) {
        enough = room > 0 && *found <= room && (*found >= k || *key <= 1);
    }
    __device__ const float* from() const { return enough ? values : x; }
    __device__ i64 size() const { return enough ? room : n; }
    __device__ i64 index(i64 i, i64 wide) const {
        return !enough ? i : wide ? ((const i64*)indices)[i] : ((const int*)indices)[i];
    }
};

#define SAMPLE 16384
#define SAMPLERS 1024

// One block finds the key of the given rank among SAMPLE coordinates at even distances.
extern "C" __global__ void __launch_bounds__(SAMPLERS) select_bound(const float* x, i64 n, i64 rank, i64* key) {
    __shared__ u32 histogram[256];
    __shared__ u32 prefix;
    __shared__ i64 left;
    u32 keys[SAMPLE / SAMPLERS];
#pragma unroll
    for (int a = 0; a < SAMPLE / SAMPLERS; ++a) keys[a] = key_of(x[(i64)(a * SAMPLERS + threadIdx.x) * (n / SAMPLE)]);
    if (threadIdx.x == 0) prefix = 0, left = rank;
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
        __syncthreads();
        const u32 known = prefix;
#pragma unroll
        for (int a = 0; a < SAMPLE / SAMPLERS; ++a)
            if (shift == 24 || keys[a] >> (shift + 8) == known >> (shift + 8)) atomicAdd(&histogram[keys[a] >> shift & 255], 1u);
        __syncthreads();
        const int d = 255 - (int)threadIdx.x;
        const i64 mine = d >= 0 ? histogram[d] : 0, wanted = left;
        i64 total;
        const i64 above = block_scan(mine, &total);
        __syncthreads();
        if (d >= 0 && above < wanted && (wanted <= above + mine || d == 0)) prefix = known | (u32)d << shift, left = wanted - above;
        __syncthreads();
    }
    if (threadIdx.x == 0) *key = prefix;
}

// The state: the bits found so far, how many values are still to be taken among those that have them, and at last how many were chosen.
enum { PREFIX, LEFT, CHOSEN };

#define BINS 2048

// Counts one digit of those that have the bits found so far. The block that is done last takes the digit in which the value lies, and clears
// the histogram. 256 threads; `histogram` has a place more, for how many blocks are done.
extern "C" __global__ void __launch_bounds__(256) select_digit(
    const float* x, i64 n, const float* values, i64 room, const i64* key, const i64* found, i64 k, i64 shift, i64 bits, i64* state, u64* histogram
) {
    __shared__ u32 own[BINS];
    __shared__ bool last;
    const int bins = 1 << bits;
    const bool first = shift + bits == 31;
    for (int d = threadIdx.x; d < bins; d += blockDim.x) own[d] = 0;
    __syncthreads();
    const Candidates all(x, n, values, 0, room, key, found, k);
    const float* from = all.from();
    const i64 count = all.size();
    const u32 prefix = first ? 0 : (u32)state[PREFIX];
    const i64 stride = (i64)gridDim.x * blockDim.x, wanted = first ? k : state[LEFT];
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        const u32 seen = key_of(from[i]);
        if (first || seen >> (shift + bits) == prefix >> (shift + bits)) atomicAdd(&own[seen >> shift & (bins - 1)], 1u);
    }
    __syncthreads();
    for (int d = threadIdx.x; d < bins; d += blockDim.x)
        if (own[d]) atomicAdd(&histogram[d], (u64)own[d]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&histogram[BINS], (u64)1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    // From the highest digit down, as many to a thread as are there.
    const int share = bins / 256;
    volatile u64* seen = histogram;
    i64 mine = 0, total;
    for (int a = 0; a < share; ++a) mine += (i64)seen[bins - 1 - ((int)threadIdx.x * share + a)];
    i64 above = block_scan(mine, &total);
    for (int a = 0; a < share; ++a) {
        const int d = bins - 1 - ((int)threadIdx.x * share + a);
        const i64 here = (i64)seen[d];
        if (above < wanted && (wanted <= above + here || d == 0)) {
            state[PREFIX] = prefix | (u32)d << shift;
            state[LEFT] = wanted - above;
        }
        above += here;
        histogram[d] = 0;
    }
    if (threadIdx.x == 0) histogram[BINS] = 0;
}

// Keys above the k-th largest, and those equal to it: how many there are in each span, then their places, with the first of those that
// are equal. Zeros are never chosen. Rows of `counts`, and of `places` that they become: above; equal. A warp has a span.
__device__ __forceinline__ i64 span_of(i64 size, i64 spans) { return (size + spans * 32 * AHEAD - 1) / (spans * 32 * AHEAD) * (32 * AHEAD); }

extern "C" __global__ void select_count(
    const float* x, i64 n, const float* values, i64 room, const i64* key, const i64* found, i64 k, const i64* state, i64 spans, i64* counts
) {
    const i64 span = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (span >= spans) return;
    const Candidates all(x, n, values, 0, room, key, found, k);
    const float* from = all.from();
    const int lane = threadIdx.x & 31;
    const u32 prefix = (u32)state[PREFIX];
    const i64 length = span_of(all.size(), spans), stop = smaller((span + 1) * length, all.size());
    i64 above = 0, equal = 0;
    for (i64 base = span * length + lane; base < stop; base += 32 * AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const u32 seen = base + 32 * a < stop ? key_of(from[base + 32 * a]) : 0;
            above += seen > prefix;
            equal += seen == prefix && seen;
        }
    }
    above = warp_sum(above);
    equal = warp_sum(equal);
    if (lane == 0) counts[span] = above, counts[spans + 1 + span] = equal;
}

extern "C" __global__ void select_place(
    const float* x, i64 n, const float* values, const void* origins, i64 room, const i64* key, const i64* found, i64 k, i64* state, i64 spans,
    const i64* places, i64 wide, void* indices, float* out
) {
    const i64 left = state[LEFT], chosen = places[spans] + smaller(places[2 * spans + 1], left);
    if (blockIdx.x == 0 && threadIdx.x == 0) state[CHOSEN] = chosen;
    clear_behind(chosen, k, wide, indices, out);
    const i64 span = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (span >= spans) return;
    const Candidates all(x, n, values, origins, room, key, found, k);
    const float* from = all.from();
    const i64 length = span_of(all.size(), spans), stop = smaller((span + 1) * length, all.size());
    const int lane = threadIdx.x & 31;
    const u32 prefix = (u32)state[PREFIX], before = (1u << lane) - 1;
    i64 above = places[span], equal = places[spans + 1 + span];
    for (i64 base = span * length; base < stop; base += 32 * AHEAD) {
        u32 held[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) held[a] = base + 32 * a + lane < stop ? __float_as_uint(from[base + 32 * a + lane]) : 0;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const u32 seen = held[a] & 0x7fffffffu;
            const bool more = seen > prefix, tie = seen == prefix && seen;
            const u32 mores = __ballot_sync(FULL, more), ties = __ballot_sync(FULL, tie);
            const i64 rank = equal + __popc(ties & before);
            if (more || (tie && rank < left)) {
                const i64 at = above + __popc(mores & before) + smaller(rank, left), i = all.index(base + 32 * a + lane, wide);
                if (wide) ((i64*)indices)[at] = i;
                else ((int*)indices)[at] = (int)i;
                out[at] = __uint_as_float(held[a]);
            }
            above += __popc(mores);
            equal += __popc(ties);
        }
    }
}

// The sample of which a key is estimated (reference/select.py): runs of 16, one in each of equal strata, placed there by a hash.
extern "C" __global__ void select_sample(const float* x, i64 everything, i64 runs, float* out) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x, j = i / 16;
    if (j >= runs) return;
    const i64 first = j * everything / runs, width = (j + 1) * everything / runs - first;
    out[i] = x[16 * (first + ((i64)((u32)j * 0x9e3779b1u) * width >> 32)) + i % 16];
}

// ---- putting values back ----

// `indices` increase strictly and lie within the vector; else nothing is written there, and the flag says so.
extern "C" __global__ void sparse_put(const void* indices, const float* values, i64 count, i64 wide, i64 n, float weight, i64 adds, float* out, i64* bad) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count) return;
    const i64 i = wide ? ((const i64*)indices)[j] : ((const int*)indices)[j];
    const i64 before = j == 0 ? -1 : wide ? ((const i64*)indices)[j - 1] : ((const int*)indices)[j - 1];
    if (i <= before || i >= n || i < 0) {
        *bad = 1;
        return;
    }
    out[i] = adds ? __fadd_rn(out[i], __fmul_rn(values[j], weight)) : values[j];
}
