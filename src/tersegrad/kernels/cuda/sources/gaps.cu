// Classes of gaps between indices (spec/wire.md, 4.4 and 4.6), and sparse messages whose sets are coded by them.
#include "index.cuh"

__device__ __forceinline__ int gap_class(const void* indices, i64 wide, i64 j) {
    return gap_class_of((u64)(index_at(indices, wide, j) - (j ? index_at(indices, wide, j - 1) : -1)));
}

extern "C" __global__ void gap_histogram(const void* indices, i64 wide, i64 count, u64* histogram) {
    __shared__ u32 own[128];
    if (threadIdx.x < 128) own[threadIdx.x] = 0;
    __syncthreads();
    const i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x; j < count; j += stride) atomicAdd(&own[gap_class(indices, wide, j) & 127], 1u);
    __syncthreads();
    if (threadIdx.x < 128 && own[threadIdx.x]) atomicAdd(&histogram[threadIdx.x], (u64)own[threadIdx.x]);
}

// The bits that a class leaves open: all but the two highest of gap + 1.
__device__ __forceinline__ i64 open_bits(i64 c) { return larger((c + 1) / 2 - 1, 0); }

// Where the device knows how many indices there are, at most as many as given.
__device__ __forceinline__ i64 number_of(i64 most, const i64* there) { return there ? smaller(*there, most) : most; }

// Classes of gaps, and by span how many bits they leave open. Clears the words.
extern "C" __global__ void gap_survey(
    const void* indices, i64 wide, i64 most, const i64* counted, u8* classes, i64* sums, u32* words, i64 num_words
) {
    const i64 count = number_of(most, counted);
    const i64 stride = (i64)gridDim.x * blockDim.x, me = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    for (i64 w = me; w < num_words; w += stride) words[w] = 0;
    // An entropy coder asks for one class at least.
    if (me == 0 && count == 0 && classes) classes[0] = 0;
    i64 bits = 0, total;
    for (i64 j = me * SHARE; j < smaller(me * SHARE + SHARE, count); ++j) {
        const int c = gap_class(indices, wide, j);
        if (classes) classes[j] = (u8)c;
        bits += open_bits(c);
    }
    block_scan(bits, &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

extern "C" __global__ void gap_rests_write(
    const void* indices, i64 wide, i64 most, const i64* counted, const i64* sums, i64 scanned, i64 room, u32* words, i64* head
) {
    const i64 count = number_of(most, counted);
    const Place place(sums, scanned);
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x), length = bytes_of(place.all);
    if (first == 0) head[LENGTH] = length;
    if (first == 0 && length > room) head[STATUS] = TOO_SMALL;
    if (length > room) return;
    i64 bits = 0, total;
    const i64 stop = smaller(first + SHARE, count);
    for (i64 j = first; j < stop; ++j) bits += open_bits(gap_class(indices, wide, j));
    i64 at = place.before + block_scan(bits, &total);
    i64 last = first < stop && first ? index_at(indices, wide, first - 1) : -1;
    for (i64 j = first; j < stop; ++j) {
        const i64 here = index_at(indices, wide, j);
        const u64 g = (u64)(here - last);
        const int width = (int)open_bits(gap_class_of(g));
        if (width) set_bits(words, at, g & (((u64)1 << width) - 1), width);
        at += width;
        last = here;
    }
}

// The size of the alphabet of classes, by their counts in `head`; 128 threads. It has two at least.
extern "C" __global__ void gaps_alphabet(i64* head, i64* alphabet) {
    __shared__ int last;
    if (threadIdx.x == 0) last = 0;
    __syncthreads();
    if (head[CLASSES + threadIdx.x]) atomicMax(&last, (int)threadIdx.x);
    __syncthreads();
    if (threadIdx.x) return;
    if (last == 0) head[STATUS] = TOO_SMALL;
    *alphabet = larger(last, 1) + 1;
}

// The message whose set has entropy-coded gaps: `at` bytes that begin it; a rANS block; the bits that classes leave open, whose length is
// `told`; and `number` values. With `counted`, what is known of the values, the device knows the beginning and the number. `head`: whether it
// was written.
extern "C" __global__ void gaps_close(
    u64 front, i64 at, const i64* counted, const i64* alphabet, const i64* block, const u8* coded, const u8* words, const void* values, i64 kind,
    i64 number, i64 room, u8* out, const i64* told, i64* head
) {
    if (head[STATUS] != FINE) return;
    const i64 me = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    if (counted) {
        at = put_front(0, 0, *counted, ENTROPY_GAPS) + 1;
        number = kind == CODED_BYTES ? counted[VALUE_BYTES] : *counted;
    }
    const i64 rests = told[LENGTH], second = at + block[BLOCK_LENGTH], third = second + rests, total = third + size_of_each(kind) * number;
    if (told[STATUS] != FINE || block[BLOCK_STATUS] != FINE || total > room) {
        head[STATUS] = TOO_SMALL;
        return;
    }
    if (me == 0) {
        head[WHOLE] = total;
        for (int k = 0; k < at && !counted; ++k) out[k] = (u8)(front >> 8 * k);
        if (counted) out[put_front(out, kind == CODED_BYTES ? counted[MODE] : 0, *counted, ENTROPY_GAPS)] = (u8)*alphabet;
    }
    for (i64 b = me; b < block[BLOCK_LENGTH]; b += stride) out[at + b] = coded[b];
    for (i64 b = me; b < rests; b += stride) out[second + b] = words[b];
    for (i64 j = me; j < number; j += stride) put_value(out + third, j, values, kind);
}

// How many bits the classes leave open, by span. Nothing is read of a message that begins otherwise than by `front`, `at` bytes of it.
extern "C" __global__ void gap_spans(const u8* data, i64 at, u64 front, const u8* classes, i64 count, i64* sums, i64* head) {
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    if (first == 0 && !begins(data, at, front)) head[STATUS] = CORRUPT;
    i64 bits = 0, total;
    for (i64 j = first; j < smaller(first + SHARE, count); ++j) {
        if (open_bits(classes[j]) > WIDEST) head[STATUS] = CORRUPT;
        bits += smaller(open_bits(classes[j]), WIDEST);
    }
    block_scan(bits, &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// gap + 1 of every class, and their sums by span. Their bits follow `at` bytes and the rANS block, if there is one.
extern "C" __global__ void gap_steps(
    const u8* data, i64 at, i64 nbytes, const i64* block, const u8* classes, i64 count, i64 numel, const i64* bits_before, i64 scanned,
    i64* steps, i64* sums, i64* head
) {
    const Place place(bits_before, scanned);
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x), stop = smaller(first + SHARE, count);
    at += block ? block[BLOCK_LENGTH] : 0;
    const bool fine = !(block && block[BLOCK_STATUS] != FINE) && at <= nbytes && plane_fits(data, nbytes, at, place.all);
    if (first == 0) {
        head[LENGTH] = at + bytes_of(place.all);
        if (!fine) head[STATUS] = CORRUPT;
    }
    i64 bits = 0, sum = 0, total;
    for (i64 j = first; j < stop; ++j) bits += smaller(open_bits(classes[j]), WIDEST);
    i64 from = 8 * at + place.before + block_scan(bits, &total);
    for (i64 j = first; j < stop; ++j) {
        const int width = (int)smaller(open_bits(classes[j]), WIDEST);
        const u64 top = classes[j] ? 2 + ((classes[j] + 1) & 1) : 1;
        const i64 step = fine ? (i64)(top << width | (width ? get_bits(data, from, width) : 0)) : 0;
        from += width;
        if (step > numel) head[STATUS] = CORRUPT;
        steps[j] = step > numel ? 0 : step;
        sum += steps[j];
    }
    block_scan(sum, &total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// The indices. Behind the set so many bytes must follow for each, if it is not negative.
extern "C" __global__ void gap_indices(
    i64 nbytes, i64 count, i64 numel, const i64* steps, const i64* sums, i64 scanned, i64 each, i64 wide, void* out, i64* head
) {
    const Place place(sums, scanned);
    const i64 first = SHARE * ((i64)blockIdx.x * blockDim.x + threadIdx.x), stop = smaller(first + SHARE, count);
    if (first == 0 && each >= 0 && head[LENGTH] + each * count != nbytes) head[STATUS] = CORRUPT;
    i64 sum = 0, total;
    for (i64 j = first; j < stop; ++j) sum += steps[j];
    i64 index = place.before + block_scan(sum, &total) - 1;
    for (i64 j = first; j < stop; ++j) {
        index += steps[j];
        if (index < 0 || index >= numel) head[STATUS] = CORRUPT;
        else if (wide) ((i64*)out)[j] = index;
        else ((int*)out)[j] = (int)index;
    }
}
