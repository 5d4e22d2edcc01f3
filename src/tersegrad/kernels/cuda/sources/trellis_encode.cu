// Trellis codes: what becomes of the integers that Viterbi's algorithm has chosen (spec/wire.md, 5.20 and 5.21). Sums give scales and errors;
// segments write their tables and escapes; chunks are coded side by side; then everything is laid into one message.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "classes_octaves.cuh"
#include "escapes.cuh"
#include "trellis.cuh"
#include "trellis_sums.cuh"
#include "search.cuh"

// Room for the counts of symbols by table; more than one copy of them where there are few tables.
#define COUNTS 2048
#define TABLES_MOST (1 << MOST_BITS)

// A warp for each 4096 coordinates: sums of x^2 and, without dither, of x n and n^2.
extern "C" __global__ void __launch_bounds__(512) trellis_sums(
    const float* x, i64 n, i64 run, float step, const double* there, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, const u8* bytes, double* norms, double* dots,
    double* powers
) {
    // The last parts first: Viterbi's algorithm has just read them.
    const i64 part = (i64)(gridDim.x - 1 - blockIdx.x) * 16 + (threadIdx.x >> 5);
    if (part * SUMMED >= n || ended(there)) return;
    const Given of = given_of(x, n, run, step, there, drawn, step_word, who, k0, k1);
    const PartSums sums = sum_part(of, bytes, part);
    if ((threadIdx.x & 31) == 0) norms[part] = sums.norm, dots[part] = sums.dot, powers[part] = sums.power;
}

// A warp for each segment: its kind, as far as it is known without sums; and what the search for scale classes is given.
extern "C" __global__ void __launch_bounds__(32) trellis_kinds(
    i64 n, i64 run, const double* there, i64 drawn, i64 exponent, const int* known, i64* segments, i64* scalars
) {
    const i64 s = blockIdx.x, size = segment_length(n, s);
    i64 *d = segments + s * TRELLIS_PLACES, *levels = scalars + s * SEGMENT_PLACES;
    for (int k = threadIdx.x; k < TRELLIS_PLACES; k += 32) d[k] = 0;
    for (int k = threadIdx.x; k < SEGMENT_PLACES; k += 32) levels[k] = 0;
    __syncwarp();
    if (threadIdx.x) return;
    const int* own = known + s * KNOWN_PLACES;
    d[CHUNK_OF] = exponent;
    d[RUN_OF] = run;
    d[BITS_OF] = drawn ? (size >= 1 << 16 ? 3 : size >= 1 << 13 ? 2 : 1) : 1;
    // Where nothing was chosen, nobody looks at it.
    d[KIND] = ended(there) ? ZERO_KIND : own[TOO_FAR] ? RAW_KIND : CODED_KIND;
    if (d[KIND] != CODED_KIND) return;
    const i64 height = drawn ? (own[HEIGHT] + 1024) >> 11 : (own[HEIGHT] + 32) >> 6;
    levels[KIND] = height ? CODED_KIND : ZERO_KIND;
    levels[WINDOW] = smaller(height, 127);
}

// A block for each segment: its norm, scale and error.
extern "C" __global__ void trellis_fit(
    i64 n, float step, const double* there, i64 drawn, const double* norms, const double* dots, const double* powers, const int* known,
    i64* segments, double* sums
) {
    __shared__ double shared[PARTS_MOST];
    const i64 s = blockIdx.x, number = segments_of(n), size = segment_length(n, s), first = s * SEGMENT / SUMMED, parts = (size + SUMMED - 1) / SUMMED;
    if (ended(there)) {
        if (threadIdx.x == 0) sums[s] = sums[number + s] = 0.0;
        return;
    }
    const double norm = fold_parts(norms + first, parts, shared), dot = fold_parts(dots + first, parts, shared);
    const double power = fold_parts(powers + first, parts, shared);
    if (threadIdx.x) return;
    segments[s * TRELLIS_PLACES + SCALE_OF] = __float_as_uint(drawn ? step_of(step, there) : best_scale(dot, power));
    sums[s] = norm;
    sums[number + s] = drawn ? 0.0 : error_of(norm, dot, power, known + s * KNOWN_PLACES);
}

// One block adds up norms and errors of all segments.
extern "C" __global__ void trellis_totals(i64 n, double* sums, i64* result) {
    const i64 number = segments_of(n);
    double* const found = (double*)result;
    fold_segments(sums, number);
    if (threadIdx.x == 0) found[RESULT_NORM] = sums[0], found[RESULT_ERROR] = sums[number];
}

// One look at the larger sample of a search, unless that has ended: sums as above, and the last block goes on with the search.
extern "C" __global__ void __launch_bounds__(512) trellis_aim_fine(
    const float* x, i64 n, i64 run, double aim, double tight, double near_tight, double factor, double divisor, double norm, const u8* bytes,
    double* norms, double* dots, double* powers, double* sums, int* known, Search* search, double* told
) {
    __shared__ double shared[PARTS_MOST];
    __shared__ bool last;
    if (search->stage == ENDED) return;
    const Given of = given_of(x, n, run, search->step, nullptr, 0, 0, 0, 0, 0);
    const i64 part = (i64)blockIdx.x * 16 + (threadIdx.x >> 5), number = segments_of(n);
    if (part * SUMMED < n) {
        const PartSums found = sum_part(of, bytes, part);
        if ((threadIdx.x & 31) == 0) norms[part] = found.norm, dots[part] = found.dot, powers[part] = found.power;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd((u64*)&search->arrived, (u64)1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (i64 s = 0; s < number; ++s) {
        const i64 first = s * SEGMENT / SUMMED, parts = (segment_length(n, s) + SUMMED - 1) / SUMMED;
        const double power = fold_parts(powers + first, parts, shared), dot = fold_parts(dots + first, parts, shared);
        const double square = fold_parts(norms + first, parts, shared);
        if (threadIdx.x == 0) sums[s] = square, sums[number + s] = error_of(square, dot, power, known + s * KNOWN_PLACES);
    }
    __syncthreads();
    fold_segments(sums, number);
    for (i64 k = threadIdx.x; k < number * KNOWN_PLACES; k += blockDim.x) known[k] = 0;
    if (threadIdx.x) return;
    go_on(search, sums[number], sums[0], Target{aim, tight, near_tight, factor, divisor, norm}, told);
}

// What a look at all of a vector, with its classes, has found.
extern "C" __global__ void trellis_aim_whole(
    i64 n, double aim, double tight, double near_tight, double factor, double divisor, double norm, double* sums, Search* search, double* told
) {
    if (search->stage == ENDED) return;
    const i64 number = segments_of(n);
    fold_segments(sums, number);
    if (threadIdx.x == 0) go_on(search, sums[number], sums[0], Target{aim, tight, near_tight, factor, divisor, norm}, told);
}

// From the largest index of a segment: half the number of symbols.
__device__ int window_from(const int* known, i64 size) {
    const i64 top = known[TOP_OF], even = larger((top + 1) & ~(i64)1, 2), few = size / 512;
    if (even <= 16) return (int)even;
    if (known[OVER_14] <= few) return 16;
    if (even <= 32) return (int)even;
    if (known[OVER_30] <= few) return 32;
    return (int)smaller(even, WIDEST);
}

// Units of sixteen bytes that a thread reads at once.
#define AT_ONCE 4

// A block counts the indices of a segment as bytes hold them, by table; without dither that is the byte itself. Of a sample every eighth block of 4096 is
// counted, and of all what occurs.
template <bool drawn>
__device__ void count_bytes(i64 size, bool sampled, int shift, const u8* bytes, const u8* contexts, u32* sums, u8* seen) {
    const Sixteen *units = (const Sixteen*)bytes, *distances = (const Sixteen*)contexts;
    const int whole = (int)(size / 16), stride = (int)blockDim.x;
    auto tell = [=](u32 place, bool counted) {
        seen[place] = 1;
        if (counted) atomicAdd(&sums[place], 1u);
    };
    for (int base = threadIdx.x; base < whole; base += AT_ONCE * stride) {
        Sixteen held[AT_ONCE], at[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int unit = base + j * stride < whole ? base + j * stride : base;
            held[j] = units[unit];
            if (drawn) at[j] = distances[unit];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int unit = base + j * stride;
            if (unit >= whole) break;
            if (drawn)
                for (int w = 0; w < 4; ++w) held[j].word[w] &= 0x7f7f7f7f, at[j].word[w] = at[j].word[w] >> shift & 0x07070707;
            auto place = [&](int k) { return drawn ? at[j].byte(k) << 7 | held[j].byte(k) : held[j].byte(k); };
            if (!sampled || unit / 256 % 8 == 0) {
#pragma unroll
                for (int k = 0; k < 16; ++k) tell(place(k), true);
            } else {
#pragma unroll
                for (int k = 0; k < 16; ++k) tell(place(k), false);
            }
        }
    }
    for (i64 i = 16 * (i64)whole + threadIdx.x; i < size; i += stride)
        tell(drawn ? (u32)contexts[i] >> shift << 7 | (bytes[i] & 127) : bytes[i], !sampled || i / 4096 % 8 == 0);
}

// A block writes the tables of a segment.
__device__ void write_tables(i64 s, i64 size, int window, bool drawn, const u8* bytes, const u8* contexts, i64* d, u8* tables, u32* codes) {
    __shared__ u32 sums[COUNTS];
    __shared__ u8 seen[COUNTS];
    __shared__ Bench benches[TABLES_MOST];
    __shared__ u8 bits[TABLES_MOST * TABLE_BYTES];
    __shared__ i64 lengths[TABLES_MOST];
    __shared__ int present[TABLES_MOST];
    const int t = threadIdx.x, warp = t >> 5, number = 1 << d[BITS_OF], alphabet = 2 * window;
    const int shift = MOST_BITS - (int)d[BITS_OF], stride = 128 * number, copies = COUNTS / stride;
    const bool sampled = size >= larger((i64)1 << 16, (i64)4096 * number * alphabet);
    for (int k = t; k < COUNTS; k += blockDim.x) sums[k] = 0, seen[k] = 0;
    __syncthreads();
    u32* const mine = sums + t % copies * stride;
    if (drawn) count_bytes<true>(size, sampled, shift, bytes, contexts, mine, seen);
    else count_bytes<false>(size, sampled, shift, bytes, contexts, mine, seen);
    __syncthreads();
    for (int k = t; k < stride; k += blockDim.x)
        for (int copy = 1; copy < copies; ++copy) sums[k] += sums[copy * stride + k];
    __syncthreads();
    // Those beyond the window join its ends. A thread has at most two of them.
    u32 count_of[2] = {}, seen_of[2] = {};
    for (int j = 0; j < 2; ++j) {
        const int k = t + j * (int)blockDim.x;
        if (k >= stride) break;
        count_of[j] = sums[k], seen_of[j] = seen[k], sums[k] = 0, seen[k] = 0;
    }
    __syncthreads();
    for (int j = 0; j < 2; ++j) {
        if (!seen_of[j]) continue;
        const u32 k = (u32)t + j * blockDim.x, place = (k & ~127u) + trellis_symbol(k & 127, window);
        seen[place] = 1, atomicAdd(&sums[place], count_of[j]);
    }
    __syncthreads();
    if (warp < number) {
        const u32* counts = sums + 128 * warp;
        const u8* there = seen + 128 * warp;
        auto count = [=](int k) { return (i64)counts[k] + (sampled ? there[k] : 0); };
        make_table(count, alphabet, benches[warp], bits + warp * TABLE_BYTES, lengths + warp, present + warp, codes + (s * TABLES_MOST + warp) * 128);
    }
    __syncthreads();
    close_tables(bits, lengths, present, number, tables + s * TABLES_ROOM, d);
}

// In place of the length of a segment's escapes: there are more of them than fit.
#define TOO_MANY (-1)

// Two blocks for each segment: the first half of them write its tables and codes; the others its escapes. `again`: one for each segment that has got
// classes, without tables, which are written by others.
extern "C" __global__ void __launch_bounds__(512, 2) trellis_segments(
    const float* x, i64 n, i64 run, float step, const double* there, i64 drawn, i64 step_word, i64 who, i64 k0, i64 k1, i64 again, const u8* bytes,
    const u8* contexts, const int* known, const u8* classes, const u32* info, const i64* scalars, i64* segments, u8* tables, u32* codes, int* escapes,
    u32* planes
) {
    const i64 number = segments_of(n), s = blockIdx.x % number, size = segment_length(n, s), first = s * SEGMENT;
    i64* d = segments + s * TRELLIS_PLACES;
    const bool classed = again, writes = !classed && blockIdx.x < number;
    if (d[KIND] != (classed ? CLASSED_KIND : CODED_KIND)) return;
    const int window = window_from(known + s * KNOWN_PLACES, size);
    if (threadIdx.x == 0 && (writes || classed)) d[WINDOW] = window;
    if (writes) return write_tables(s, size, window, drawn != 0, bytes + first, contexts + first, d, tables, codes);
    if (threadIdx.x == 0) d[TAIL] = 0;
    if (known[s * KNOWN_PLACES + TOP_OF] <= window) return;
    const Given of = given_of(x, n, run, step, there, drawn, step_word, who, k0, k1);
    const Classed by = {classes, info, scalars};
    const u32 stills = classed ? by.stills(s) : 0;
    int* values = escapes + s * ESCAPES;
    auto escaped = [=](u32 four) {
        u32 bits = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) bits |= (u32)at_end(trellis_symbol(four >> 8 * k & 255, window), window) << (8 * k + 7);
        return bits;
    };
    auto value = [=](i64 i, u32 byte) {
        int a = index_of(byte);
        // A byte holds no larger ones.
        if (at_end((u32)(a + WIDEST), WIDEST)) {
            const int c = classed ? classes[first + i] : 0;
            if (stills >> c & 1) a = by.still(s, c, nearest(__fmul_rn(x[first + i], of.scale)));
            else a = of.exact(first + i, byte);
        }
        const int more = a - clipped(a, window);
        return 1 + (more < 0 ? -more : more) / 2;
    };
    const i64 found = list_escapes((const Sixteen*)(bytes + first), size, values, escaped, value);
    if (found > ESCAPES) {
        if (threadIdx.x == 0) d[TAIL] = TOO_MANY;
        return;
    }
    __syncthreads();
    const i64 tail = write_planes(values, found, planes + s * PLANE_WORDS);
    if (threadIdx.x == 0) d[TAIL] = tail;
}

// A warp for each chunk.
extern "C" __global__ void __launch_bounds__(32) trellis_encode_chunks(
    i64 n, i64 exponent, i64 drawn, const u8* bytes, const u8* contexts, const i64* segments, const u32* codes, u16* words, i64* numbers, u32* states
) {
    __shared__ Code own[TABLES_MOST * 128];
    const Chunks place = chunks_of(n, exponent, 1);
    const i64 s = place.s, c = place.c, size = segment_length(n, s), first = s * SEGMENT;
    const i64* d = segments + s * TRELLIS_PLACES;
    if (d[KIND] != CODED_KIND || d[ONLY] < 2) return;
    const int window = (int)d[WINDOW], number = 1 << d[BITS_OF];
    const Layout l = layout_of(size, 2 * window, d[CHUNK_OF]);
    if (c >= l.chunks) return;
    // By table, the code of every index that a byte holds. Without dither the table is what bytes end with.
    for (int k = threadIdx.x; k < 128 * number; k += 32)
        own[k] = code_of(codes[(s * TABLES_MOST + k / 128) * 128 + trellis_symbol((u32)k & 127, window)]);
    __syncwarp();
    const Code* near = own;
    const u8 *held = bytes + first, *distances = contexts + first;
    KEEP_TOGETHER(held);
    auto symbol = [=](i64 i) { return trellis_symbol(held[i], window); };
    i64 found;
    if (drawn) {
        KEEP_TOGETHER(distances);
        const int shift = MOST_BITS - (int)d[BITS_OF];
        auto load = [=](i64 i) { return Raw{held[(u32)i], distances[(u32)i]}; };
        auto look = [=](const Raw& r) { return near[r.context >> shift << 7 | (r.symbol & 127)]; };
        found = encode_chunk(l, c, symbol, load, look, words + first, states + s * CHUNKS * 64);
    } else {
        auto load = [=](i64 i) { return Raw{held[(u32)i], 0}; };
        auto look = [=](const Raw& r) { return near[r.symbol]; };
        found = encode_chunk(l, c, symbol, load, look, words + first, states + s * CHUNKS * 64);
    }
    if (threadIdx.x == 0) numbers[s * CHUNKS + c] = found;
}

// Where the classes of a segment begin, if it has some: behind its scale or, without dither, two of them and which classes move; and its symbols.
__device__ __forceinline__ i64 classes_at(const i64* d, i64 drawn) { return d[SCALES] + (drawn || d[KIND] != CLASSED_KIND ? 4 : 10); }
__device__ __forceinline__ i64 body_at(const i64* d, i64 drawn) { return classes_at(d, drawn) + (d[KIND] == CLASSED_KIND ? d[CLASSES_OF] : 0); }

// One block lays out the message: the form and length of every segment, where they and their chunks begin; norm and error.
extern "C" __global__ void trellis_close(i64 n, i64 drawn, i64* segments, const i64* numbers, i64* offsets, double* sums, i64* result) {
    __shared__ int coded, wrong;
    const i64 number = segments_of(n);
    double* const found = (double*)result;
    if (threadIdx.x == 0) coded = 0, wrong = FINE;
    __syncthreads();
    for (i64 s = threadIdx.x; s < number; s += blockDim.x) {
        i64* d = segments + s * TRELLIS_PLACES;
        // What is not finite matters more.
        if (!(sums[s] < __longlong_as_double(0x7ff0000000000000LL))) atomicMax(&wrong, NOT_FINITE);
        else if (has_levels(d) && d[TAIL] == TOO_MANY) atomicMax(&wrong, MANY_ESCAPES);
        // Segments of zeros, and those all of whose integers are zero, which have no scale.
        if (sums[s] == 0 || (d[KIND] == CODED_KIND && !d[SCALE_OF])) d[KIND] = ZERO_KIND;
    }
    __syncthreads();
    if (wrong != FINE) {
        if (threadIdx.x) return;
        result[RESULT_WRONG] = wrong;
        if (wrong == MANY_ESCAPES) return;
        result[RESULT_LENGTH] = 1;
        found[RESULT_NORM] = __longlong_as_double(0x7ff0000000000000LL), found[RESULT_ERROR] = 0.0;
        return;
    }
    i64 at = 1 + (number > 1 ? 4 * number : 0);
    for (i64 base = 0; base < number; base += blockDim.x) {
        const i64 s = base + threadIdx.x;
        i64* d = segments + s * TRELLIS_PLACES;
        i64 bytes = 0, total;
        if (s < number) {
            const i64 size = segment_length(n, s);
            if (has_levels(d)) {
                const i64 alphabet = 2 * d[WINDOW], most = 1 + raw_bytes(size, alphabet);
                const Layout l = layout_of(size, alphabet, d[CHUNK_OF]);
                i64 body = 1 + d[TABLES_OF];
                const bool fits = body < most;
                if (d[ONLY] >= 2) {
                    body += 4 * l.chunks;
                    for (i64 c = 0; c < l.chunks; ++c) {
                        offsets[s * CHUNKS + c] = body;
                        body += 4 * l.lanes + 2 * numbers[s * CHUNKS + c];
                    }
                }
                d[FORM_OF] = !fits || body >= most ? RAW : d[ONLY] >= 2 ? CODED : ONLY_TABLES;
                if (d[FORM_OF] == RAW) body = most;
                i64 varint = 1;
                while (d[TAIL] >> 7 * varint) ++varint;
                d[SCALES] = 3 + drawn + varint;
                bytes = body_at(d, drawn) + body + d[TAIL];
                if (bytes > 1 + 4 * size) d[KIND] = RAW_KIND;
            }
            if (d[KIND] == RAW_KIND) bytes = 1 + 4 * size, sums[number + s] = 0.0;
            if (d[KIND] == ZERO_KIND) bytes = 1;
            else atomicOr(&coded, 1);
        }
        const i64 before = block_scan(bytes, &total);
        if (s < number) d[AT] = at + before, d[END] = at + before + bytes;
        at += total;
    }
    if (threadIdx.x == 0) result[RESULT_LENGTH] = coded ? at : 1;
    __syncthreads();
    fold_segments(sums, number);
    if (threadIdx.x == 0) found[RESULT_NORM] = sums[0], found[RESULT_ERROR] = sums[number];
}

// Parts of a chunk that blocks copy.
#define PARTS 4

// Blocks, `share` of them for each segment, write the message.
extern "C" __global__ void trellis_write(
    const float* x, i64 n, i64 drawn, i64 share, const u8* bytes, const i64* segments, const i64* regions, const i64* firsts, const u8* described,
    const u8* tables, const u16* words, const i64* numbers, const u32* states, const i64* offsets, const u32* planes, const i64* result, u8* out
) {
    const i64 s = blockIdx.x / share, part = blockIdx.x % share, size = segment_length(n, s), first = s * SEGMENT;
    const i64 stride = share * blockDim.x, begin = part * blockDim.x + threadIdx.x;
    const bool leads = begin == 0;
    if (result[RESULT_WRONG] == NOT_FINITE && leads && s == 0) out[0] = MODE_NON_FINITE;
    if (result[RESULT_WRONG] != FINE) return;
    const bool empty = result[RESULT_LENGTH] == 1;
    if (leads && s == 0) out[0] = empty ? MODE_ZERO : MODE_NORMAL;
    if (empty) return;
    const i64* d = segments + s * TRELLIS_PLACES;
    u8* to = out + d[AT];
    if (leads && segments_of(n) > 1) store32(out + 1 + 4 * s, (u32)(d[END] - d[AT]));
    if (leads) to[0] = (u8)d[KIND];
    if (d[KIND] == RAW_KIND)
        for (i64 i = begin; i < size; i += stride) store32(to + 1 + 4 * i, __float_as_uint(x[first + i]));
    if (!has_levels(d)) return;
    const int window = (int)d[WINDOW], width = raw_bits(2 * window), fixed = drawn ? 4 : 3;
    u8* body = to + body_at(d, drawn);
    if (leads) {
        to[1] = (u8)window;
        to[2] = (u8)d[RUN_OF];
        if (drawn) to[3] = (u8)d[BITS_OF];
        for (i64 k = fixed; k < d[SCALES]; ++k) to[k] = (u8)((d[TAIL] >> 7 * (k - fixed) & 127) | (k + 1 < d[SCALES] ? 128 : 0));
        store32(to + d[SCALES], (u32)d[SCALE_OF]);
        if (d[KIND] == CLASSED_KIND && !drawn) store32(to + d[SCALES] + 4, (u32)d[STILL_SCALE]), store16(to + d[SCALES] + 8, (u32)d[MOVING]);
        body[0] = d[FORM_OF] == RAW ? (u8)RAW : (u8)d[CHUNK_OF];
    }
    if (d[KIND] == CLASSED_KIND) {
        const u8* from = described + description_at(firsts[s], regions[firsts[s] * REGION_PLACES + ROOM], s);
        for (i64 b = begin; b < d[CLASSES_OF]; b += stride) to[classes_at(d, drawn) + b] = from[b];
    }
    for (i64 b = begin; b < d[TAIL]; b += stride) out[d[END] - d[TAIL] + b] = (u8)(planes[s * PLANE_WORDS + (b >> 2)] >> 8 * (b & 3));
    if (d[FORM_OF] == RAW) {
        for (i64 g = begin; 8 * g < size; g += stride) {
            u64 held = 0;
            const int here = (int)smaller(8, size - 8 * g);
            for (int k = 0; k < here; ++k) held |= (u64)trellis_symbol(bytes[first + 8 * g + k], window) << k * width;
            for (int b = 0; 8 * b < here * width; ++b) body[1 + g * width + b] = (u8)(held >> 8 * b);
        }
        return;
    }
    for (i64 b = begin; b < d[TABLES_OF]; b += stride) body[1 + b] = tables[s * TABLES_ROOM + b];
    if (d[FORM_OF] != CODED) return;
    const Layout l = layout_of(size, 2 * window, d[CHUNK_OF]);
    for (i64 piece = part; piece < l.chunks * PARTS; piece += share) {
        const i64 c = piece / PARTS, which = piece % PARTS, number = numbers[s * CHUNKS + c];
        const i64 from = number * which / PARTS, until = number * (which + 1) / PARTS;
        u8* chunk = body + offsets[s * CHUNKS + c];
        copy_words(chunk + 4 * l.lanes + 2 * from, words + first + c * l.size + l.coded(c) - number + from, until - from);
        if (which) continue;
        if (threadIdx.x == 0) store32(body + 1 + d[TABLES_OF] + 4 * c, (u32)number);
        for (int k = threadIdx.x; k < l.lanes; k += blockDim.x) store32(chunk + 4 * k, states[s * CHUNKS * 64 + c * l.lanes + k]);
    }
}
