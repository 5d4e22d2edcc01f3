// The largest coordinates of every chunk, and values back to their places (spec/wire.md, 5.22).
#include "chunks.cuh"

#define INFINITE_KEY 0x7f800000u

// Threads that have a chunk in common: a warp of a block, or a block of THREADS. What they share has room for CAPACITY keys, and a bit for
// each of 32 * WORDS places.
template <int CAPACITY, int WORDS>
struct Shared {
    u32 keys[CAPACITY];
    u32 chosen[WORDS], equal[WORDS];
    int found;
};
struct OfWarp {
    static constexpr int threads = 32, groups = 1;
    __device__ int rank() const { return threadIdx.x & 31; }
    __device__ void sync() const { __syncwarp(); }
    __device__ int count(bool v) const { return __popc(__ballot_sync(FULL, v)); }
    __device__ i64 scan(i64 v, i64* total) const {
        const i64 upto = warp_scan(v);
        *total = __shfl_sync(FULL, upto, 31);
        return upto - v;
    }
};
template <int THREADS>
struct OfBlock {
    static constexpr int threads = THREADS;
    __device__ int rank() const { return threadIdx.x; }
    __device__ void sync() const { __syncthreads(); }
    __device__ int count(bool v) const { return __syncthreads_count(v); }
    __device__ i64 scan(i64 v, i64* total) const { return block_scan(v, total); }
};

// The least key that is still among the k largest, by halving low .. high: at least k keys reach `low`, none reaches `high`; `count(key)` tells
// how many do. It stops where exactly k do, or once no more than `grain` keys are left.
template <class Count>
__device__ u32 kth_largest(u32 low, u32 high, u32 grain, int k, Count count) {
    while (high - low > grain) {
        const u32 middle = low + (high - low) / 2;
        const int reached = count(middle);
        if (reached == k) return middle;
        if (reached > k) low = middle;
        else high = middle;
    }
    return low;
}

// R coordinates for each thread of a team; `total` of them, where there is something to be added to x.
template <int R, class Team, class Room>
__device__ void chosen_of(
    const Team& team, Room& room, const Region& r, i64 own, const float* x, const float* carry, float decay, float* total, int* places, float* values,
    u8* finite
) {
    const int size = (int)r.size, k = (int)r.keep, me = team.rank(), words = (size + 31) / 32;
    const i64 corner = corner_of(r, own), to = r.place + own * k;
    const Across across(r);
    float v[R];
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < R; ++j) {
        const int i = me + j * Team::threads;
        if (i >= size) break;
        const i64 at = corner + across(i);
        v[j] = x[at];
        if (carry) total[at] = v[j] = __fadd_rn(__fmul_rn(carry[at], decay), v[j]);
        const u32 key = __float_as_uint(v[j]) & 0x7fffffffu;
        most = key > most ? key : most;
    }
    if (most >= INFINITE_KEY) *finite = 0;
    if (me == 0) room.found = 0;
    for (int w = me; w < words; w += Team::threads) room.chosen[w] = room.equal[w] = 0;
    // The k-th largest of what is largest in each thread bounds the k-th largest of all; zeros are looked at only where there is nothing else.
    u32 low = 1;
    if (k <= Team::threads) low = kth_largest(0, 0x80000000u, 1 << 14, k, [&](u32 key) { return team.count(most >= key); });
    if (low == 0) low = 1;
    team.sync();
#pragma unroll
    for (int j = 0; j < R; ++j) {
        if (j * Team::threads >= size) break;
        const bool there = me + j * Team::threads < size;
        const u32 key = there ? __float_as_uint(v[j]) & 0x7fffffffu : 0;
        const u32 votes = __ballot_sync(FULL, key >= low);
        const int lane = threadIdx.x & 31;
        int first = 0;
        if (lane == 0 && votes) first = atomicAdd(&room.found, __popc(votes));
        first = __shfl_sync(FULL, first, 0) + __popc(votes & ((1u << lane) - 1));
        if (key >= low && first < (int)(sizeof room.keys / 4)) room.keys[first] = key;
    }
    team.sync();
    const int found = room.found;
    u32 least = 0;
    if (found >= k) {
        if (found <= (int)(sizeof room.keys / 4)) {
            least = kth_largest(low, 0x80000000u, 1, k, [&](u32 key) {
                int reached = 0;
                for (int base = 0; base < found; base += Team::threads) reached += team.count(base + me < found && room.keys[base + me] >= key);
                return reached;
            });
        } else {
            least = kth_largest(low, 0x80000000u, 1, k, [&](u32 key) {
                int reached = 0;
#pragma unroll
                for (int j = 0; j < R; ++j) {
                    if (j * Team::threads >= size) break;
                    reached += team.count(me + j * Team::threads < size && (__float_as_uint(v[j]) & 0x7fffffffu) >= key);
                }
                return reached;
            });
        }
    }
    // A bit for each place: whether its key is among these, and whether it is the least.
#pragma unroll
    for (int j = 0; j < R; ++j) {
        if (j * Team::threads >= size) break;
        const int i = me + j * Team::threads;
        const u32 key = __float_as_uint(v[j]) & 0x7fffffffu;
        const u32 above = __ballot_sync(FULL, i < size && key > least), equal = __ballot_sync(FULL, i < size && key == least);
        if ((threadIdx.x & 31) == 0 && i / 32 < words) room.chosen[i / 32] = above, room.equal[i / 32] = equal;
    }
    team.sync();
    i64 sure = 0, all;
    for (int base = 0; base < words; base += Team::threads) {
        team.scan(base + me < words ? __popc(room.chosen[base + me]) : 0, &all);
        sure += all;
    }
    // Ties go to the lowest places.
    i64 ties = 0, before = 0;
    for (int base = 0; base < words; base += Team::threads) {
        const int w = base + me;
        u32 equal = w < words ? room.equal[w] : 0, take = w < words ? room.chosen[w] : 0;
        i64 left = k - sure - ties - team.scan(__popc(equal), &all);
        ties += all;
        for (; left > 0 && equal; --left, equal &= equal - 1) take |= equal & (0u - equal);
        i64 at = to + before + team.scan(__popc(take), &all);
        before += all;
        for (; take; take &= take - 1, ++at) {
            const int i = 32 * w + __ffs((int)take) - 1;
            places[at] = i;
            values[at] = (carry ? total : x)[corner + across(i)];
        }
    }
}

extern "C" __global__ void chunk_begin(u8* finite) { *finite = 1; }

// Chunks of up to 1024 coordinates: a warp has one. Others are passed over.
extern "C" __global__ void __launch_bounds__(256) chunk_choose_small(
    const Region* regions, i64 number, i64 chunks, const float* x, const float* carry, float decay, float* total, int* places, float* values, u8* finite
) {
    __shared__ Shared<1024, 32> rooms[8];
    const i64 chunk = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (chunk >= chunks) return;
    const Region& r = region_of(regions, number, &Region::chunk, chunk);
    if (r.size > 1024) return;
    chosen_of<32>(OfWarp(), rooms[threadIdx.x / 32], r, chunk - r.chunk, x, carry, decay, total, places, values, finite);
}

// Of up to 4096: a block has one.
extern "C" __global__ void __launch_bounds__(256) chunk_choose_usual(
    const Region* regions, i64 number, const float* x, const float* carry, float decay, float* total, int* places, float* values, u8* finite
) {
    __shared__ Shared<1024, 128> room;
    const Region& r = region_of(regions, number, &Region::chunk, blockIdx.x);
    if (r.size <= 1024 || r.size > 4096) return;
    chosen_of<16>(OfBlock<256>(), room, r, blockIdx.x - r.chunk, x, carry, decay, total, places, values, finite);
}

// All others.
extern "C" __global__ void __launch_bounds__(1024) chunk_choose_large(
    const Region* regions, i64 number, const float* x, const float* carry, float decay, float* total, int* places, float* values, u8* finite
) {
    __shared__ Shared<4096, 2048> room;
    const Region& r = region_of(regions, number, &Region::chunk, blockIdx.x);
    if (r.size <= 4096) return;
    chosen_of<64>(OfBlock<1024>(), room, r, blockIdx.x - r.chunk, x, carry, decay, total, places, values, finite);
}

// A thread per value: to its place, or `weight` times as much added there.
extern "C" __global__ void chunk_lay(
    const Region* regions, i64 number, i64 count, const int* places, const float* values, float weight, i64 adds, float* out
) {
    const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= count) return;
    const Region& r = region_of(regions, number, &Region::place, j);
    const int place = places[j];
    if (place < 0 || place >= r.size) return;
    float* const to = out + corner_of(r, (j - r.place) / r.keep) + Across(r)(place);
    *to = adds ? __fadd_rn(*to, __fmul_rn(weight, values[j])) : values[j];
}
