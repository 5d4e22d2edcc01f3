// Choosing coordinates by magnitude, and the step of variance-based compression.
//
// One pass over the vector: a warp collects what passes, in order, in the slots of its 4096 coordinates. After a running sum over the
// counts, the slots are laid one after the other; where they overflowed, those 4096 coordinates are looked at again.
#include "scan.cuh"

#define TILE 4096
#define SLOTS 256
#define AHEAD 8
#define NEAR 4
// Of a block, where it is said.
#define THREADS 256

__device__ __forceinline__ u32 key_of(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// Sources: what is read of coordinate i, what it would send, and whether that is sent; `keep` is called once for every coordinate. A thread
// reads `ahead` coordinates at a time.
struct Plain {
    static constexpr int ahead = 16;
    using Held = float;
    const float* x;
    u32 least;
    __device__ float read(i64 i) const { return x[i]; }
    __device__ float value(float held) const { return held; }
    __device__ bool sent(float v) const { return key_of(v) >= least; }
    __device__ void keep(i64, float, float) {}
};

// The sum of two vectors, which goes to a third.
struct Sum {
    static constexpr int ahead = 8;
    using Held = float;
    const float *x, *y;
    float* sum;
    u32 least;
    __device__ float read(i64 i) const { return __fadd_rn(x[i], y[i]); }
    __device__ float value(float held) const { return held; }
    __device__ bool sent(float v) const { return key_of(v) >= least; }
    __device__ void keep(i64 i, float, float v) { sum[i] = v; }
};

struct Step {
    static constexpr int ahead = 8;
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
    for (int group = 0; group < TILE; group += 32 * S::ahead) {
        const i64 here = first + group, left = n - here;
        typename S::Held held[S::ahead];
        if (left > 32 * (S::ahead - 1)) {
#pragma unroll
            for (int a = 0; a < S::ahead; ++a) held[a] = source.read(here + 32 * a);
        } else {
#pragma unroll
            for (int a = 0; a < S::ahead; ++a) held[a] = 32 * a < left ? source.read(here + 32 * a) : typename S::Held();
        }
#pragma unroll
        for (int a = 0; a < S::ahead; ++a) {
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

// How many pass in each tile, and in those of each block.
template <class S>
__device__ void fill_slots(S& source, i64 n, u16* offsets, float* values, i64* counts, i64* sums) {
    const i64 tile = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    i64 count = 0, total;
    if (tile * TILE < n) {
        count = collect(source, n, tile, true, [=](i64 rank, i64 i, float v) {
            if (rank < SLOTS) {
                offsets[tile * SLOTS + rank] = (u16)(i - tile * TILE);
                values[tile * SLOTS + rank] = v;
            }
        });
        if ((threadIdx.x & 31) == 0) counts[tile] = count;
    }
    block_scan((threadIdx.x & 31) == 0 ? count : 0, &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
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

// What was collected, in order: `take(rank, i, value)` gets the first `limit`. How many passed, in all threads. Blocks, of as many threads as
// those that collected, divide these among themselves; a warp has several tiles at a time.
template <class S, class Take>
__device__ i64 lay_out(
    S& source, i64 n, const u16* offsets, const float* values, const i64* counts, const i64* sums, i64 scanned, i64 limit, Take take
) {
    __shared__ i64 firsts[THREADS + 1];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const i64 tiles = (n + TILE - 1) / TILE, parts = (tiles + warps - 1) / warps, share = (parts + gridDim.x - 1) / gridDim.x;
    const Place place(sums, scanned, smaller(blockIdx.x * share, parts), parts);
    const i64 stop = smaller((blockIdx.x + 1) * share * warps, tiles);
    i64 before = place.before;
    for (i64 base = blockIdx.x * share * warps; base < stop; base += blockDim.x) {
        i64 total;
        const i64 first = before + block_scan(base + threadIdx.x < stop ? counts[base + threadIdx.x] : 0, &total);
        before += total;
        firsts[threadIdx.x] = first;
        if (threadIdx.x == 0) firsts[blockDim.x] = before;
        __syncthreads();
        const int here = (int)smaller(stop - base, blockDim.x);
        for (int group = warp; group < here; group += NEAR * warps) {
            // The first 64 of each tile are loaded together.
            u16 places[NEAR][2];
            float held[NEAR][2];
#pragma unroll
            for (int a = 0; a < NEAR; ++a) {
                const int t = group + a * warps;
                const i64 count = t < here ? firsts[t + 1] - firsts[t] : 0, at = (base + t) * SLOTS + lane;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (count > SLOTS || lane + 32 * h >= count) continue;
                    places[a][h] = offsets[at + 32 * h];
                    held[a][h] = values[at + 32 * h];
                }
            }
#pragma unroll
            for (int a = 0; a < NEAR; ++a) {
                const int t = group + a * warps;
                const i64 begin = t < here ? firsts[t] : 0, count = t < here ? firsts[t + 1] - begin : 0;
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (count <= SLOTS && lane + 32 * h < count && begin + lane + 32 * h < limit)
                        take(begin + lane + 32 * h, (base + t) * TILE + places[a][h], held[a][h]);
            }
#pragma unroll 1
            for (int t = group; t < here && t < group + NEAR * warps; t += warps) {
                const i64 begin = firsts[t], count = firsts[t + 1] - begin, tile = base + t;
                auto put = [=](i64 rank, i64 i, float v) {
                    if (begin + rank < limit) take(begin + rank, i, v);
                };
                if (count > SLOTS) collect(source, n, tile, false, put);
                else
                    for (i64 k = lane + 64; k < count; k += 32) put(k, tile * TILE + offsets[tile * SLOTS + k], values[tile * SLOTS + k]);
            }
        }
    }
    return place.all;
}

// To `indices` and `out`, with zeros behind them; how many passed to `found`.
template <class S>
__device__ void spread(
    S& source, i64 n, const u16* offsets, const float* values, const i64* counts, const i64* sums, i64 scanned, i64 limit, i64 wide, void* indices,
    float* out, i64* found
) {
    const i64 all = lay_out(source, n, offsets, values, counts, sums, scanned, limit, [=](i64 j, i64 i, float v) {
        if (wide) ((i64*)indices)[j] = i;
        else ((int*)indices)[j] = (int)i;
        out[j] = v;
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) *found = all;
    clear_behind(all, limit, wide, indices, out);
}

__device__ __forceinline__ u32 least_key(const i64* key) { return (u32)(*key < 1 ? 1 : *key > 0xffffffffLL ? 0xffffffffLL : *key); }

extern "C" __global__ void select_collect(const float* x, i64 n, const i64* key, u16* offsets, float* values, i64* counts, i64* sums) {
    Plain source = {x, least_key(key)};
    fill_slots(source, n, offsets, values, counts, sums);
}

extern "C" __global__ void select_collect_sum(
    const float* x, const float* y, float* sum, i64 n, const i64* key, u16* offsets, float* values, i64* counts, i64* sums
) {
    Sum source = {x, y, sum, least_key(key)};
    fill_slots(source, n, offsets, values, counts, sums);
}

extern "C" __global__ void select_spread(
    const float* x, i64 n, const i64* key, const u16* offsets, const float* values, const i64* counts, const i64* sums, i64 scanned, i64 limit,
    i64 wide, void* indices, float* out, i64* found
) {
    Plain source = {x, least_key(key)};
    spread(source, n, offsets, values, counts, sums, scanned, limit, wide, indices, out, found);
}

// Where something becomes infinite the flag `finite`, which is set, is cleared.
extern "C" __global__ void variance_collect(
    const float* r, const float* v, const float* x, const float* s, i64 n, float alpha, float zeta, float tau, float twice, float square, i64 hybrid,
    float* next_r, float* next_v, u8* finite, u16* offsets, float* values, i64* counts, i64* sums
) {
    Step source = {r, v, x, s, alpha, zeta, tau, twice, square, hybrid != 0, next_r, next_v, false};
    fill_slots(source, n, offsets, values, counts, sums);
    if (source.infinite) *finite = 0;
}

extern "C" __global__ void variance_spread(
    const float* r, const float* v, const float* x, const float* s, i64 n, float alpha, float zeta, float tau, float twice, float square, i64 hybrid,
    const u16* offsets, const float* values, const i64* counts, const i64* sums, i64 scanned, i64 limit, i64 wide, void* indices, float* out,
    i64* found
) {
    Step source = {r, v, x, s, alpha, zeta, tau, twice, square, hybrid != 0, 0, 0, false};
    spread(source, n, offsets, values, counts, sums, scanned, limit, wide, indices, out, found);
}

// ---- the k largest keys ----
//
// A sample gives a key that about a third more than k coordinates reach. These are collected, and the k-th largest key is found among them,
// ten bits at a time. Should there be too few or too many of them, the same kernels go through the whole vector.

// Whether the k largest are among those that were found.
__device__ __forceinline__ bool suffices(i64 found, i64 room, const i64* key, i64 k) {
    return room > 0 && found <= room && (found >= k || *key <= 1);
}

struct Candidates {
    const float *x, *values;
    const void* indices;
    i64 n, room;
    bool enough;
    __device__ Candidates(const float* x, i64 n, const float* values, const void* indices, i64 room, const i64* key, const i64* found, i64 k)
        : x(x), values(values), indices(indices), n(n), room(room) {
        enough = suffices(room > 0 ? *found : 0, room, key, k);
    }
    __device__ const float* from() const { return enough ? values : x; }
    __device__ i64 size() const { return enough ? room : n; }
    __device__ i64 index(i64 i, i64 wide) const {
        return !enough ? i : wide ? ((const i64*)indices)[i] : ((const int*)indices)[i];
    }
};

#define SAMPLE 16384
#define SAMPLERS 1024
#define BINS 2048

// The keys of SAMPLE coordinates at even distances, of x or of a sum, by as many threads. Clears the histogram, which has a place more.
extern "C" __global__ void select_spaced(const float* x, const float* y, i64 n, u32* sampled, u64* cleared) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x, i = j * (n / SAMPLE);
    sampled[j] = key_of(y ? __fadd_rn(x[i], y[i]) : x[i]);
    if (j <= BINS) cleared[j] = 0;
}

// One block finds the key of the given rank among them, to sixteen bits and rounded down.
extern "C" __global__ void __launch_bounds__(SAMPLERS) select_bound(const u32* sampled, i64 rank, i64* key) {
    __shared__ u32 histogram[256];
    __shared__ u32 prefix;
    __shared__ i64 left;
    u32 keys[SAMPLE / SAMPLERS];
#pragma unroll
    for (int a = 0; a < SAMPLE / SAMPLERS; ++a) keys[a] = sampled[a * SAMPLERS + threadIdx.x];
    if (threadIdx.x == 0) prefix = 0, left = rank;
    for (int shift = 23; shift >= 15; shift -= 8) {
        if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
        __syncthreads();
        const u32 known = prefix;
#pragma unroll
        for (int a = 0; a < SAMPLE / SAMPLERS; ++a)
            if (keys[a] >> (shift + 8) == known >> (shift + 8)) atomicAdd(&histogram[keys[a] >> shift & 255], 1u);
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

// The first digit of a key has eleven bits, the others ten.
#define FIRST_SHIFT 20
#define FIRST_BITS 11
// So many values are loaded at once.
#define DIGITS_AHEAD 16

// Blocks of 256 threads bring together what they have counted of a digit. The block that is done last takes the digit in which the value lies,
// and clears the histogram, which has a place more, for how many blocks are done.
__device__ void take_digit(const u32* own, u32 prefix, i64 wanted, i64 shift, i64 bits, i64* state, u64* histogram) {
    __shared__ bool last;
    const int bins = 1 << bits;
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

// Clears a block's counts of a digit.
__device__ __forceinline__ void begin_digit(u32* own, i64 bits) {
    for (int d = threadIdx.x; d < 1 << bits; d += blockDim.x) own[d] = 0;
    __syncthreads();
}

// Counts one digit of those that have the bits found so far, and takes it; 256 threads.
extern "C" __global__ void __launch_bounds__(THREADS) select_digit(
    const float* x, i64 n, const float* values, i64 room, const i64* key, const i64* found, i64 k, i64 shift, i64 bits, i64* state, u64* histogram
) {
    __shared__ u32 own[BINS];
    const bool first = shift + bits == 31;
    begin_digit(own, bits);
    const Candidates all(x, n, values, 0, room, key, found, k);
    const float* from = all.from();
    const i64 count = all.size();
    const u32 prefix = first ? 0 : (u32)state[PREFIX];
    const i64 stride = (i64)gridDim.x * blockDim.x, wanted = first ? k : state[LEFT];
    for (i64 base = (i64)blockIdx.x * blockDim.x + threadIdx.x; base < count; base += DIGITS_AHEAD * stride) {
        u32 seen[DIGITS_AHEAD];
#pragma unroll
        for (int a = 0; a < DIGITS_AHEAD; ++a) seen[a] = base + a * stride < count ? key_of(from[base + a * stride]) : 0;
#pragma unroll
        for (int a = 0; a < DIGITS_AHEAD; ++a)
            if (base + a * stride < count && (first || seen[a] >> (shift + bits) == prefix >> (shift + bits)))
                atomicAdd(&own[seen[a] >> shift & ((1 << bits) - 1)], 1u);
    }
    take_digit(own, prefix, wanted, shift, bits, state, histogram);
}

// Lays out the candidates, with zeros behind them, and takes the first digit; 256 threads.
extern "C" __global__ void __launch_bounds__(THREADS, 2) select_candidates(
    const float* x, i64 n, const i64* key, const u16* offsets, const float* values, const i64* counts, const i64* sums, i64 scanned, i64 limit,
    i64 wide, void* indices, float* out, i64* found, i64 k, i64* state, u64* histogram
) {
    __shared__ u32 own[BINS];
    begin_digit(own, FIRST_BITS);
    Plain source = {x, least_key(key)};
    u32* near = own;
    const i64 all = lay_out(source, n, offsets, values, counts, sums, scanned, limit, [=](i64 j, i64 i, float v) {
        if (wide) ((i64*)indices)[j] = i;
        else ((int*)indices)[j] = (int)i;
        out[j] = v;
        atomicAdd(&near[key_of(v) >> FIRST_SHIFT], 1u);
    });
    if (blockIdx.x == 0 && threadIdx.x == 0) *found = all;
    clear_behind(all, limit, wide, indices, out);
    if (!suffices(all, limit, key, k)) {
        __syncthreads();
        begin_digit(own, FIRST_BITS);
        const i64 stride = (i64)gridDim.x * blockDim.x;
        for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) atomicAdd(&own[key_of(x[i]) >> FIRST_SHIFT], 1u);
    } else if (blockIdx.x == 0 && threadIdx.x == 0) {
        // The zeros behind them count as well.
        atomicAdd(&own[0], (u32)(limit - all));
    }
    take_digit(own, 0, k, FIRST_SHIFT, FIRST_BITS, state, histogram);
}

// Keys above the k-th largest, and those equal to it: how many each span and each block have, then their places, with the first of those that
// are equal. Zeros are never chosen. Rows of `counts` and of `sums`: above; equal. A warp has a span.
__device__ __forceinline__ i64 span_of(i64 size, i64 spans) { return (size + spans * 32 * AHEAD - 1) / (spans * 32 * AHEAD) * (32 * AHEAD); }

extern "C" __global__ void select_count(
    const float* x, i64 n, const float* values, i64 room, const i64* key, const i64* found, i64 k, const i64* state, i64 spans, i64* counts, i64* sums
) {
    const i64 span = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const Candidates all(x, n, values, 0, room, key, found, k);
    const float* from = all.from();
    const int lane = threadIdx.x & 31;
    const u32 prefix = (u32)state[PREFIX];
    const i64 length = span_of(all.size(), spans), stop = smaller((span + 1) * length, all.size());
    i64 above = 0, equal = 0, total;
    for (i64 base = span * length + lane; base < stop; base += 32 * AHEAD) {
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const u32 seen = base + 32 * a < stop ? key_of(from[base + 32 * a]) : 0;
            above += seen > prefix;
            equal += seen == prefix && seen;
        }
    }
    block_scan(above, &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
    block_scan(equal, &total);
    if (threadIdx.x == 0) sums[gridDim.x + 1 + blockIdx.x] = total;
    above = warp_sum(above);
    equal = warp_sum(equal);
    if (lane == 0) counts[span] = above, counts[gridDim.x * (blockDim.x / 32) + span] = equal;
}

// `rest`, if it is given, loses what is chosen.
extern "C" __global__ void select_place(
    const float* x, i64 n, const float* values, const void* origins, i64 room, const i64* key, const i64* found, i64 k, i64* state, i64 spans,
    const i64* counts, const i64* sums, i64 scanned, i64 wide, void* indices, float* out, float* rest
) {
    const i64 span = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x & 31;
    const Place mores_of(sums, scanned), ties_of(sums + gridDim.x + 1, scanned);
    const i64 left = state[LEFT], chosen = mores_of.all + smaller(ties_of.all, left);
    if (blockIdx.x == 0 && threadIdx.x == 0) state[CHOSEN] = chosen;
    clear_behind(chosen, k, wide, indices, out);
    const Candidates all(x, n, values, origins, room, key, found, k);
    const float* from = all.from();
    const i64 length = span_of(all.size(), spans), stop = smaller((span + 1) * length, all.size());
    const u32 prefix = (u32)state[PREFIX], before = (1u << lane) - 1;
    i64 total;
    i64 above = mores_of.before + __shfl_sync(FULL, block_scan(lane ? 0 : counts[span], &total), 0);
    i64 equal = ties_of.before + __shfl_sync(FULL, block_scan(lane ? 0 : counts[gridDim.x * (blockDim.x / 32) + span], &total), 0);
    for (i64 base = span * length; base < stop; base += 32 * AHEAD) {
        u32 held[AHEAD];
        i64 where[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) held[a] = base + 32 * a + lane < stop ? __float_as_uint(from[base + 32 * a + lane]) : 0;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) where[a] = base + 32 * a + lane < stop ? all.index(base + 32 * a + lane, wide) : 0;
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const u32 seen = held[a] & 0x7fffffffu;
            const bool more = seen > prefix, tie = seen == prefix && seen;
            const u32 mores = __ballot_sync(FULL, more), ties = __ballot_sync(FULL, tie);
            const i64 rank = equal + __popc(ties & before);
            if (more || (tie && rank < left)) {
                const i64 at = above + __popc(mores & before) + smaller(rank, left), i = where[a];
                if (wide) ((i64*)indices)[at] = i;
                else ((int*)indices)[at] = (int)i;
                out[at] = __uint_as_float(held[a]);
                if (rest) rest[i] = 0.0f;
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
