// Sparse Dithering: decoding messages that are cut into segments (spec/wire.md, 5.16). All segments at once, their chunks side by side.
#include "common.cuh"
#include "rans_tables.cuh"
#include "rans_chunks.cuh"
#include "dither.cuh"
#include "classes.cuh"
#include "escapes.cuh"

// A thread reads the header of a segment, and the head and table of its symbols; whether they are well-formed.
__device__ bool parse_segment(const u8* data, i64 n, i64 at, i64 end, i64* d, short* q, short* present) {
    const i64 size = end - at;
    for (int k = 0; k < SEGMENT_PLACES; ++k) d[k] = 0;
    const int kind = at < end ? data[at] : -1;
    d[KIND] = kind;
    d[AT] = at + 1;
    d[END] = end;
    if (kind == ZERO_KIND && size == 1) return true;
    if (kind == RAW_KIND && size == 1 + 4 * n) return true;
    bool good = (kind == CODED_KIND || kind == CLASSED_KIND) && size >= 3;
    i64 tail = 0, used = 0, byte = 128;
    while (good && byte >= 128) {
        if (used == 5 || 2 + used >= size) return false;
        byte = data[at + 2 + used];
        tail |= (byte & 127) << 7 * used;
        ++used;
    }
    const i64 scales = (n + SCALE_BLOCK - 1) / SCALE_BLOCK, body = 2 + used + 4 * scales;
    const int window = good ? data[at + 1] : 1;
    if (good && ((used > 1 && byte == 0) || window < 1 || window > 127 || body + tail > size)) good = false;
    for (i64 k = 0; good && k < scales; ++k) good = (load32(data + at + 2 + used + 4 * k) & 0x7f800000u) != 0x7f800000u;
    if (!good) return false;
    d[WINDOW] = window;
    d[SCALES] = at + 2 + used;
    d[AT] = at + body;
    d[TAIL] = tail;
    // Classes come before the symbols.
    if (kind == CLASSED_KIND) return true;
    const i64 alphabet = 2 * window + 1, nbytes = size - body - tail;
    const u8* block = data + at + body;
    const int form = nbytes ? block[0] : 0;
    if (form == RAW) {
        d[FORM_OF] = RAW;
        return nbytes == 1 + raw_bytes(n, alphabet);
    }
    d[FORM_OF] = CODED;
    d[CHUNK_OF] = form;
    BitReader in = {block + 1, 8 * smaller(nbytes - 1, 32 * alphabet + 2), 0, form >= 14 && form <= 18};
    if (in.good) read_table(in, (int)alphabet, q, present);
    while (in.good && in.at & 7)
        if (in.bit()) in.good = false;
    d[TABLES_OF] = in.at / 8;
    return in.good;
}

// Bytes that a header and a table have at most, in words.
#define HEAD_WORDS ((64 + 32 * 255 + 32) / 4)

// A block for each segment: its header and table, frequencies, cells (frequency | place << 12 | symbol << 24), and where its chunks begin.
// `offsets` and `words` have CHUNKS places per segment.
extern "C" __global__ void dither_open(
    const u8* data, i64 nbytes, i64 count, i64* begins, i64* segments, u32* cells, i64* offsets, i64* words, i64* state
) {
    __shared__ u32 head[HEAD_WORDS], w[256];
    __shared__ int f[256], start[257];
    __shared__ short q[256], listed[256];
    __shared__ i64 d[SEGMENT_PLACES];
    __shared__ int present;
    __shared__ bool good;
    const i64 s = blockIdx.x, n = segment_length(count, s), number = segments_of(count);
    const u32 form = load32(data);
    i64 first, last;
    const bool found = find_segment(data, nbytes, 4, number, s, &first, &last);
    if (form != SEGMENTS || !found) {
        if (threadIdx.x == 0) state[WRONG] = form != SEGMENTS ? ANOTHER : CORRUPT;
        return;
    }
    // One thread reads what threads fetch together.
    const u64 begins_at = (u64)(data + first);
    const u32* from = (const u32*)(begins_at & ~(u64)3);
    const i64 lead = begins_at & 3, fetched = smaller(HEAD_WORDS, (lead + last - first + 3) / 4);
#pragma unroll 9
    for (i64 k = threadIdx.x; k < fetched; k += blockDim.x) head[k] = from[k];
    const u8* near = (const u8*)head + lead - first;
    __syncthreads();
    if (threadIdx.x == 0) {
        begins[s] = first, begins[s + 1] = last;
        good = parse_segment(near, n, first, last, d, q, listed);
        if (!good) state[WRONG] = CORRUPT;
    }
    __syncthreads();
    if (!good) return;
    const bool coded = d[KIND] == CODED_KIND && d[FORM_OF] == CODED;
    const i64 alphabet = 2 * d[WINDOW] + 1, begin = d[AT] + 1 + d[TABLES_OF], end = d[END] - d[TAIL];
    if (coded && threadIdx.x < 32) {
        const int number = make_frequencies(q, (int)alphabet, w, f);
        if (threadIdx.x == 0) {
            present = number;
            if (number < 2) {
                int only = 0;
                while (f[only] != TOTAL) ++only;
                d[FORM_OF] = ONLY_TABLES;
                d[ONLY] = only;
                if (begin != end) state[WRONG] = CORRUPT;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < SEGMENT_PLACES) segments[s * SEGMENT_PLACES + threadIdx.x] = d[threadIdx.x];
    if (!coded || present < 2) return;
    const int* frequencies = f;
    make_cells(f, (int)alphabet, start, [=](int slot, u32 symbol, u32 place) {
        cells[s * TOTAL + slot] = (u32)frequencies[symbol] | place << 12 | symbol << 24;
    });
    if (threadIdx.x >= 32) return;
    const Layout l = layout_of(n, alphabet, d[CHUNK_OF]);
    const bool there = begin + 4 * l.chunks - first + lead <= 4 * HEAD_WORDS;
    if (!chunk_places(there ? near : data, begin, end, l, offsets + s * CHUNKS, words + s * CHUNKS)) state[WRONG] = CORRUPT;
}

// A warp for each chunk, or for several of a segment: `share` blocks for each, and as many more as the last one may have chunks. Processors get as many
// blocks as others only where all blocks find room on them at once.
extern "C" __global__ void __launch_bounds__(32) dither_chunks(
    const u8* data, i64 count, i64 share, const i64* segments, const u32* cells, const i64* offsets, const i64* words, u32* marks, float* out, i64* state
) {
    __shared__ Sixteen own_cells[TOTAL / 4];
    __shared__ u16 ring[RING];
    __shared__ float scales[SCALES_MOST];
    const u32 number = (u32)segments_of(count), turn = blockIdx.x / number;
    const bool more = turn >= share, last = more || blockIdx.x % number == number - 1;
    const i64 s = last ? number - 1 : blockIdx.x % number, c = more ? blockIdx.x - share * (number - 1) : turn, n = segment_length(count, s);
    const i64* d = segments + s * SEGMENT_PLACES;
    // All that is far away is asked for at once.
    const i64 wrong = state[WRONG], kind = d[KIND], form = d[FORM_OF], exponent = d[CHUNK_OF], scales_at = d[SCALES], tail = d[TAIL];
    const int window = (int)d[WINDOW];
    i64 begin = offsets[s * CHUNKS + c], coded = words[s * CHUNKS + c];
    if (wrong != FINE || kind != CODED_KIND || form != CODED) return;
    const Layout l = layout_of(n, 2 * window + 1, exponent);
    if (c >= l.chunks) return;
    if (threadIdx.x < (n + SCALE_BLOCK - 1) / SCALE_BLOCK) scales[threadIdx.x] = scale_at(data + scales_at, threadIdx.x);
#pragma unroll 16
    for (int i = 0; i < TOTAL / 4; i += 32) own_cells[i + threadIdx.x] = ((const Sixteen*)(cells + s * TOTAL))[i + threadIdx.x];
    __syncwarp();
    const u32* near_cells = own_cells[0].word;
    auto look = [=](u32, u32 slot, u32* cell, u8* symbol) {
        const u32 held = near_cells[slot];
        *symbol = (u8)(held >> 24);
        *cell = (held & 0xfff) | (held >> 12 & 0xfff) << 16;
    };
    float* to = out + s * SEGMENT;
    u32* own_marks = marks + s * SEGMENT / 32;
    const bool careful = tail || !moderate(scales, (n + SCALE_BLOCK - 1) / SCALE_BLOCK);
    for (i64 k = c; k < l.chunks; k += last ? CHUNKS : share) {
        if (k != c) begin = offsets[s * CHUNKS + k], coded = words[s * CHUNKS + k];
        const u8* states = data + begin;
        bool good;
        if (careful) {
            clear_marks(own_marks, l, k);
            good = decode_chunk(l, k, 2 * window + 1, states, coded, ring, NoContext(), look, Values<true>{to, scales, own_marks, window, 0.0f});
        } else {
            good = decode_chunk(l, k, 2 * window + 1, states, coded, ring, NoContext(), look, Values<false>{to, scales, own_marks, window, 0.0f});
        }
        if (!good) state[WRONG] = CORRUPT;
        __syncwarp();
    }
}

// Everything else: zero and raw segments, raw symbols, a single symbol. Blocks share a segment.
extern "C" __global__ void dither_plain(
    const u8* data, i64 count, const i64* segments, i64 share, const u8* contexts, const u8* only, u32* marks, float* out, i64* state
) {
    const i64 s = blockIdx.x / share, n = segment_length(count, s), first = s * SEGMENT;
    const i64* d = segments + s * SEGMENT_PLACES;
    if (state[WRONG] != FINE || (has_levels(d) && d[FORM_OF] == CODED)) return;
    const int window = (int)d[WINDOW], width = has_levels(d) ? raw_bits(2 * window + 1) : 0;
    const int lane = threadIdx.x & 31;
    for (i64 base = blockIdx.x % share * blockDim.x + threadIdx.x - lane; base < n; base += share * blockDim.x) {
        const i64 i = smaller(base + lane, n - 1);
        if (!has_levels(d)) {
            out[first + i] = d[KIND] == ZERO_KIND ? 0.0f : __uint_as_float(load32(data + d[AT] + 4 * i));
            continue;
        }
        u32 symbol = (u32)d[ONLY];
        if (d[FORM_OF] == RAW) {
            const i64 bit = i * width;
            const u8* p = data + d[AT] + 1 + (bit >> 3);
            const int shift = bit & 7, end = (bit + width) & 7;
            u32 held = p[0];
            if (shift + width > 8) held |= (u32)p[1] << 8;
            symbol = held >> shift & ((1u << width) - 1);
            if (symbol > 2 * window) state[WRONG] = CORRUPT;
            if (i + 1 == n && end && p[shift + width > 8] >> end) state[WRONG] = CORRUPT;
        } else if (d[KIND] == CLASSED_KIND) {
            symbol = only[s * CLASSES + contexts[first + i]];
        }
        out[first + i] = scaled((int)symbol - window, scale_at(data + d[SCALES], i >> 16));
        const u32 votes = __ballot_sync(FULL, base + lane < n && (symbol == 0 || symbol == 2 * window));
        if (d[TAIL] && lane == 0) marks[(first + base) / 32] = votes;
    }
}

// A block for each segment with escapes: |k| - K + 1 at the ends of the window, which are marked. `places`: ESCAPES per segment.
extern "C" __global__ void __launch_bounds__(1024) dither_escapes(
    const u8* data, i64 count, i64* segments, const u32* marks, int* places, float* out, i64* state
) {
    __shared__ int ones[ESCAPES];
    const i64 s = blockIdx.x, n = segment_length(count, s);
    const i64* d = segments + s * SEGMENT_PLACES;
    if (state[WRONG] != FINE || !has_levels(d) || !d[TAIL]) return;
    const int window = (int)d[WINDOW];
    float* values = out + s * SEGMENT;
    const u8* scales = data + d[SCALES];
    const int good = read_escapes(data + d[END] - d[TAIL], d[TAIL], marks + s * SEGMENT / 32, n, places + s * ESCAPES, ones, [=](i64 i, i64 value) {
        // The value of the end of the window stands there, and tells which end it is.
        const float scale = scale_at(scales, i >> 16);
        const i64 level = window + (i64)(int)(value - 1);
        const bool minus = (__float_as_uint(values[i]) ^ __float_as_uint(scale)) >> 31;
        values[i] = scaled((int)(minus ? -level : level), scale);
        return value <= (i64)1 << 31;
    });
    if (threadIdx.x) return;
    if (good < 0) state[LEFT_OVER] = 1, segments[s * SEGMENT_PLACES + ONLY] = -1;
    else if (!good) state[WRONG] = CORRUPT;
}
