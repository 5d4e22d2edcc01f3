// Chunk sets (spec/wire.md, 4.10): which places of every chunk are sent. A thread goes through the nodes of a chunk, and a warp codes a
// stream of them.
#include "chunks.cuh"

#define LOWEST ((u64)1 << 31)
// Places that a stream has at most.
#define PLACES 2304

// ---- splits ----

// A thread makes one row: where the chances end for c chosen ones of a node of one size. `weights` has room for as many float64.
extern "C" __global__ void chunk_splits(i64 n, i64 keep, i64 depths, double* weights, u16* splits) {
    const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x, depth = row / (2 * (keep + 1));
    if (depth >= depths) return;
    const i64 c = row % (keep + 1), size = (n >> depth) + row / (keep + 1) % 2;
    if (c < 2 || c >= size || size > n) return;
    const i64 left = (size + 1) / 2, right = size / 2, first = larger(0, c - right), last = smaller(c, left);
    const i64 mode = smaller(larger((c + 1) * (left + 1) / (size + 2), first), last);
    double* const w = weights + row * (keep + 1) - first;
    w[mode] = 1.0;
    for (i64 a = mode + 1; a <= last; ++a) w[a] = w[a - 1] * (double)((left - a + 1) * (c - a + 1)) / (double)(a * (right - c + a));
    for (i64 a = mode - 1; a >= first; --a) w[a] = w[a + 1] * (double)((a + 1) * (right - c + a + 1)) / (double)((left - a) * (c - a));
    double sum = 0.0;
    for (i64 a = first; a <= last; ++a) sum += w[a];
    const double scale = (double)(65536 - (last - first + 1)) / sum;
    i64 rest = 65536, end = 0;
    for (i64 a = first; a <= last; ++a) rest -= 1 + (i64)(w[a] * scale);
    u16* const out = splits + row * (keep + 1) - first;
    for (i64 a = first; a <= last; ++a) {
        end += 1 + (i64)(w[a] * scale) + (a == mode ? rest : 0);
        out[a] = (u16)(end - 1);
    }
}

// ---- writing ----

// What is known of a coded chunk: where its steps and digits are, how many steps, digits of one and of two it has.
struct Steps {
    i64 steps, digits, keep, splits, ones, twos;
};

// A thread per coded chunk: start and frequency of its splits; values of its digits and among how many they are, those of two from the end.
extern "C" __global__ void chunk_steps(
    const int* places, const Region* regions, i64 number, i64 coded, const u16* splits, u32* steps, u64* digits, Steps* known
) {
    const i64 chunk = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (chunk >= coded) return;
    const Region& r = region_of(regions, number, &Region::coded, chunk);
    const i64 own = chunk - r.coded;
    const int* const mine = places + r.place + own * r.keep;
    Steps found = {r.steps + own * r.room, r.spot + own * r.keep, r.keep, 0, 0, 0};
    bool good = true;
    for (i64 k = 0; k < r.keep; ++k) good &= mine[k] > (k ? mine[k - 1] : -1) && mine[k] < r.size;
    u64 open[18];
    int top = 0;
    auto look = [&](const Node& node) {
        if (node.waits()) {
            const u64 low = (u64)(mine[node.place] - node.base);
            if (node.c == 1) {
                digits[found.digits + found.ones++] = low | (u64)node.size << 32;
            } else {
                const u64 high = (u64)(mine[node.place + 1] - node.base);
                digits[found.digits + r.keep - ++found.twos] = (low + pairs_of(high)) | pairs_of((u64)node.size) << 32;
            }
        } else if (node.c && !node.whole()) {
            open[top++] = node.packed();
        }
    };
    if (good) look({0, (int)r.size, (int)r.keep, 0, 0});
    while (top) {
        const Node node = unpacked(open[--top]);
        const int border = node.base + node.left();
        int a = 0, high = node.c;
        while (a < high) {
            const int middle = (a + high) / 2;
            if (mine[node.place + middle] < border) a = middle + 1;
            else high = middle;
        }
        const u16* const ends = splits_of(splits, r, node) + (a - node.first());
        const u32 start = a > node.first() ? (u32)ends[-1] + 1 : 0;
        steps[found.steps + found.splits++] = start | ((u32)ends[0] + 1 - start) << 16;
        // The left half is looked at first, and is on top if both are open.
        const int before = top;
        look(node.half(a, false));
        look(node.half(a, true));
        if (top == before + 2) {
            const u64 left = open[before];
            open[before] = open[before + 1];
            open[before + 1] = left;
        }
    }
    known[chunk] = found;
}

// A warp codes a stream, backwards from the end of its room; all lanes have the same state. `sizes`: the words of each stream.
extern "C" __global__ void __launch_bounds__(32) chunk_code(
    const i64* streams, const i64* rooms, const u32* steps, const u64* digits, const Steps* known, u32* words, i64* sizes
) {
    const int lane = threadIdx.x;
    const i64 first = streams[blockIdx.x], stop = streams[blockIdx.x + 1], floor = rooms[blockIdx.x];
    i64 left = rooms[blockIdx.x + 1];
    u64 x = 1;
    auto put = [&]() {
        if (left > floor) {
            --left;
            if (lane == 0) words[left] = (u32)x;
        }
        x >>= 32;
    };
    for (int two = 1; two >= 0; --two)
        for (i64 c = stop; c-- > first;) {
            const Steps& mine = known[c];
            for (i64 end = two ? mine.twos : mine.ones; end > 0; end -= 32) {
                const i64 j = end - 1 - lane;
                const u64 record = j >= 0 ? digits[mine.digits + (two ? mine.keep - 1 - j : j)] : (u64)1 << 32;
                const u32 value = (u32)record, choices = (u32)(record >> 32), limit = (u32)((LOWEST + choices - 1) / choices);
                for (int i = 0; i < 32 && i < end; ++i) {
                    const u32 by = __shfl_sync(FULL, choices, i), most = __shfl_sync(FULL, limit, i), more = __shfl_sync(FULL, value, i);
                    if (x >= (u64)most << 32) put();
                    x = x * by + more;
                }
            }
        }
    for (i64 c = stop; c-- > first;) {
        const Steps& mine = known[c];
        for (i64 end = mine.splits; end > 0; end -= 32) {
            const i64 j = end - 1 - lane;
            const u32 step = j >= 0 ? steps[mine.steps + j] : 1u << 16;
            const u64 inverse = inverse_of(step >> 16);
            for (int i = 0; i < 32 && i < end; ++i) {
                const u32 code = __shfl_sync(FULL, step, i), f = code >> 16;
                const u64 by = __shfl_sync(FULL, inverse, i);
                if (x >= (u64)f << 47) put();
                u64 rest;
                const u64 quotient = divided(x, f, by, &rest);
                x = (quotient << 16) + rest + (code & 0xffff);
            }
        }
    }
    put();
    if (x) put();
    if (lane == 0) sizes[blockIdx.x] = rooms[blockIdx.x + 1] - left;
}

// ---- reading ----

// One block finds the streams between `*begin` and the end of a message of `size` bytes: where each is, and its words. It reads nothing unless
// the `state` is 0, which becomes 1 where they do not fit.
extern "C" __global__ void chunk_streams(const u8* data, i64 size, const i64* begin, i64 number, i64* offsets, i64* words, i64* state) {
    if (*state) return;
    const i64 front = *begin + 2 * larger(0, number - 1);
    const bool there = front <= size;
    i64 at = front, last = 0;
    for (i64 base = 0; base < number; base += blockDim.x) {
        const i64 s = base + threadIdx.x;
        const u8* const place = data + *begin + 2 * s;
        const i64 mine = there && s + 1 < number ? (i64)place[0] | (i64)place[1] << 8 : 0;
        i64 total;
        const i64 before = block_scan(mine, &total);
        last = at + 4 * before;
        if (s < number) offsets[s] = last, words[s] = mine;
        at += 4 * total;
    }
    const bool fits = there && at <= size && (size - at) % 4 == 0 && (number || size == at);
    __syncthreads();
    if (threadIdx.x) return;
    if (!fits) *state = 1;
    else if (number) words[number - 1] = (size - at) / 4;
}

// The words of a stream, at any address: a warp has those of two turns.
struct Words {
    const u8* data;
    i64 number, next;
    u32 held, ahead;
    __device__ u32 load(i64 from) const { return from + threadIdx.x < number ? load32(data + 4 * (from + threadIdx.x)) : 0; }
    __device__ u32 take() {
        if (next % 32 == 0) {
            held = ahead;
            ahead = load(next + 32);
        }
        return __shfl_sync(FULL, held, (int)(next++ % 32));
    }
};

// A warp reads a stream; places of coded chunks, one behind the other. Nothing happens unless the `state` is 0, which becomes 1 where a
// stream is none.
extern "C" __global__ void __launch_bounds__(32) chunk_read(
    const u8* data, const i64* offsets, const i64* numbers, const i64* streams, const Region* regions, i64 number, const u16* splits,
    u16* places, i64* state
) {
    // Nodes that wait: the place of the first one in the stream, the first coordinate, the size. Those of two from the end.
    __shared__ u64 waiting[PLACES];
    const int lane = threadIdx.x;
    // Others may change it meanwhile.
    if (__shfl_sync(FULL, *state, 0)) return;
    const i64 stop = streams[blockIdx.x + 1];
    Words words = {data + offsets[blockIdx.x], numbers[blockIdx.x], 0, 0, 0};
    words.ahead = words.load(0);
    u64 x = words.number ? words.take() : 0;
    auto fill = [&](u64 least) {
        if (x < least && words.next < words.number) x = x << 32 | words.take();
    };
    i64 chunk = streams[blockIdx.x];
    const Region* r = &region_of(regions, number, &Region::coded, chunk);
    u16* const first = places + r->spot + (chunk - r->coded) * r->keep;
    int ones = 0, twos = 0;
    for (; chunk < stop; ++chunk) {
        while (chunk >= r[1].coded) ++r;
        u16* const mine = places + r->spot + (chunk - r->coded) * r->keep;
        // The open nodes, one in a lane each.
        u64 open = 0;
        int top = 0;
        auto look = [&](const Node& node) {
            if (node.waits()) {
                const int to = node.c == 1 ? ones++ : PLACES - ++twos;
                if (lane == 0) waiting[to] = (u64)(mine - first + node.place) | (u64)node.base << 16 | (u64)node.size << 32;
            } else if (node.whole()) {
                for (int k = lane; k < node.c; k += 32) mine[node.place + k] = (u16)(node.base + k);
            } else if (node.c) {
                if (lane == top) open = node.packed();
                ++top;
            }
        };
        look({0, (int)r->size, (int)r->keep, 0, 0});
        while (top) {
            const Node node = unpacked(__shfl_sync(FULL, open, --top));
            const u16* const ends = splits_of(splits, *r, node);
            const int options = node.options();
            fill(LOWEST);
            const u32 slot = (u32)x & 0xffff;
            u32 end, start = 0;
            int j = 0;
            for (;; j += 32) {
                const u32 own = j + lane < options ? ends[j + lane] : 0xffff;
                const int before = __popc(__ballot_sync(FULL, own < slot));
                end = __shfl_sync(FULL, own, before) + 1;
                const u32 last = __shfl_sync(FULL, own, before - 1) + 1;
                if (before) start = last;
                if (before < 32) {
                    j += before;
                    break;
                }
            }
            x = (u64)(end - start) * (x >> 16) + slot - start;
            const int a = node.first() + j, bottom = top;
            look(node.half(a, false));
            const u64 left = __shfl_sync(FULL, open, bottom);
            look(node.half(a, true));
            if (top == bottom + 2) {
                // The left half is on top.
                const u64 right = __shfl_sync(FULL, open, bottom + 1);
                if (lane == bottom) open = right;
                if (lane == bottom + 1) open = left;
            }
        }
    }
    __syncwarp();
    for (int two = 0; two < 2; ++two)
        for (int base = 0, count = two ? twos : ones; base < count; base += 32) {
            const int j = base + lane;
            const u64 node = j < count ? waiting[two ? PLACES - 1 - j : j] : (u64)1 << 32;
            const u32 size = (u32)(node >> 32), choices = two && j < count ? (u32)pairs_of(size) : size;
            const u64 inverse = inverse_of(choices);
            const u32 least = (u32)((LOWEST + choices - 1) / choices) * choices;
            u32 found = 0;
            for (int i = 0; i < 32 && base + i < count; ++i) {
                const u32 by = __shfl_sync(FULL, choices, i), lowest = __shfl_sync(FULL, least, i);
                const u64 times = __shfl_sync(FULL, inverse, i);
                fill(lowest);
                u64 rest;
                x = divided(x, by, times, &rest);
                if (lane == i) found = (u32)rest;
            }
            if (j >= count) continue;
            u16* const to = first + (node & 0xffff);
            const u32 from = (u32)(node >> 16 & 0xffff);
            if (two) {
                u32 high = (u32)((1.0 + sqrt(1.0 + 8.0 * (double)found)) / 2.0);
                while (pairs_of(high) > found) --high;
                while (pairs_of(high + 1) <= found) ++high;
                to[1] = (u16)(from + high);
                found -= (u32)pairs_of(high);
            }
            to[0] = (u16)(from + found);
        }
    if (lane == 0 && (x != 1 || words.next != words.number)) *state = 1;
}
