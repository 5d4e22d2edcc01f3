#include "tersegrad/casts.hpp"

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "casts_loops.hpp"
#include "tersegrad/bits.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::casts {

const Table portable_table = local_table;

namespace {

constexpr size_t grain = size_t{1} << 17;     // coordinates that pay for starting a thread
constexpr size_t beyond_cache = size_t{8} << 20;  // coordinates of an output that no cache holds
constexpr size_t stretch = 5120;              // codes held at a time: whole bytes for trits and every width, and they stay in L1

const Table& table() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return avx512_table;
    if (isa() == Isa::avx2) return avx2_table;
#endif
    return portable_table;
}

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 64 == 0; }

struct Output {
    float* at;
    Emit how;
    float weight;
    Output(Sink s, size_t n) : at(s.out), how(Emit::store), weight(s.weight) {
        if (s.add) how = Emit::add;
        else if (n >= beyond_cache && aligned(s.out)) how = Emit::stream;
    }
    Out from(size_t i) const { return {at + i, how, weight}; }
};

void put_float(u8* p, float v) { std::memcpy(p, &v, 4); }
float get_float(const u8* p) {
    float v;
    std::memcpy(&v, p, 4);
    return v;
}

// As parallel_for, and what a thread streamed past the caches is visible to whoever joins it.
template <class Body>
void in_parts(size_t n, size_t unit, Body&& body) {
    parallel_for(n, unit, grain, [&](size_t b, size_t e) {
        body(b, e);
#if defined(__x86_64__)
        _mm_sfence();
#endif
    });
}

size_t over(size_t n, size_t unit) { return n / unit + (n % unit != 0); }

// The bits of the largest magnitude, with threads.
u32 largest_of(const Table& t, const float* x, size_t n) {
    std::atomic<u32> most{0};
    parallel_for(n, 64, grain, [&](size_t b, size_t e) {
        const u32 mine = t.largest(x + b, e - b);
        u32 seen = most.load();
        while (seen < mine && !most.compare_exchange_weak(seen, mine)) {
        }
    });
    return most.load();
}

// Adds the upper half onto the lower, halving, as if the sums were followed by zeros up to the power of two that holds `bucket`.
double fold(double* s, size_t count, size_t bucket) {
    size_t width = 1;
    while (width < over(bucket, chunk)) width *= 2;
    for (size_t h = width / 2; h; h /= 2)
        for (size_t k = 0; k < h && k + h < count; ++k) s[k] += s[k + h];
    return count ? s[0] : 0.0;
}

float float_of(u32 b) {
    float f;
    std::memcpy(&f, &b, 4);
    return f;
}

// Scales are normal numbers, so that their inverses are finite; NaN tells of input that is not.
float ternary_scale(u32 most) { return most >= infinity ? NAN : std::fmax(float_of(most), FLT_MIN); }
float natural_levels_scale(double squares) {
    if (!std::isfinite(squares)) return NAN;
    return static_cast<float>(std::fmin(std::fmax(std::sqrt(squares), static_cast<double>(FLT_MIN)), static_cast<double>(FLT_MAX)));
}

// Scales first, codes after them. `whole(x, n)` computes one scale with threads, `scale(x, n, work)` without;
// `codes(x, n, first, inverse, out)` rounds; `pack(codes, n, at)` appends at the byte where coordinate `at` lies.
template <class Whole, class Scale, class Codes, class Pack>
void encode_buckets(const float* x, size_t n, size_t bucket, u8* out, size_t nbytes, Whole&& whole, Scale&& scale, Codes&& codes,
                    Pack&& pack) {
    const size_t buckets = over(n, bucket);
    std::atomic<bool> finite{true};
    auto inverse = [](float s) { return s == s ? 1.0f / s : 0.0f; };
    auto round = [&](size_t begin, size_t end) {  // scales are known; begin is a multiple of 320
        alignas(64) u8 held[stretch];
        for (; begin < end; begin += stretch) {
            const size_t stop = std::min(begin + stretch, end);
            for (size_t i = begin; i < stop;) {
                const size_t run = std::min(stop, (i / bucket + 1) * bucket);
                codes(x + i, run - i, i, inverse(get_float(out + i / bucket * 4)), held + (i - begin));
                i = run;
            }
            pack(held, stop - begin, begin);
        }
    };
    if (buckets == 1) {
        const float s = whole(x, n);
        put_float(out, s);
        if (s == s) parallel_for(n, stretch, grain, round);
        else finite = false;
    } else {
        const size_t tile = bucket * 5 * over(stretch, bucket * 5);  // small enough to stay in cache between its two passes
        parallel_for(n, tile, grain, [&](size_t begin, size_t end) {
            std::vector<double> work(over(bucket, chunk));
            for (; begin < end; begin += tile) {
                const size_t stop = std::min(begin + tile, end);
                for (size_t i = begin; i < stop; i += bucket) {
                    const float s = scale(x + i, std::min(bucket, stop - i), work.data());
                    put_float(out + i / bucket * 4, s);
                    if (!(s == s)) finite = false;
                }
                round(begin, stop);
            }
        });
    }
    if (!finite) {
        for (size_t k = 0; k < buckets; ++k) put_float(out + 4 * k, float_of(0x7fc00000));
        std::memset(out + 4 * buckets, 0, nbytes - 4 * buckets);
    }
}

template <class Unpack, class Values>
void decode_buckets(const u8* data, size_t n, size_t bucket, Output out, Unpack&& unpack, Values&& values) {
    in_parts(n, stretch, [&](size_t begin, size_t end) {
        alignas(64) u8 held[stretch];
        for (; begin < end; begin += stretch) {
            const size_t stop = std::min(begin + stretch, end);
            unpack(begin, stop - begin, held);
            for (size_t i = begin; i < stop;) {
                const size_t run = std::min(stop, (i / bucket + 1) * bucket);
                values(held + (i - begin), run - i, get_float(data + i / bucket * 4), out.from(i));
                i = run;
            }
        }
    });
}

}  // namespace

void bf16_encode(const float* x, size_t n, u8* out) {
    const Table& t = table();
    const bool stream = n >= beyond_cache && aligned(out);
    in_parts(n, 64, [&](size_t b, size_t e) { t.bf16_encode(x + b, e - b, stream, out + 2 * b); });
}

void bf16_decode(const u8* data, size_t n, Sink sink) {
    const Table& t = table();
    const Output out(sink, n);
    in_parts(n, 64, [&](size_t b, size_t e) { t.bf16_decode(data + 2 * b, e - b, out.from(b)); });
}

void fp16_encode(const float* x, size_t n, u8* out) {
    if (n == 0) return;
    const Table& t = table();
    const u32 most = largest_of(t, x, n);
    if (most >= infinity) {
        put_float(out, float_of(0x7fc00000));
        std::memset(out + 4, 0, 2 * n);
        return;
    }
    const int e = std::max(static_cast<int>(most >> 23) - 127 - 14, -126);  // the largest lands in [2^14, 2^15)
    put_float(out, power(e));
    parallel_for(n, 64, grain, [&](size_t b, size_t end) { t.fp16_encode(x + b, end - b, power(-e), out + 4 + 2 * b); });
}

void fp16_decode(const u8* data, size_t n, Sink sink) {
    if (n == 0) return;
    const Table& t = table();
    const Output out(sink, n);
    const float scale = std::fabs(get_float(data));  // signs are the numbers' own
    in_parts(n, 64, [&](size_t b, size_t e) { t.fp16_decode(data + 4 + 2 * b, e - b, scale, out.from(b)); });
}

void fp8_encode(const float* x, size_t n, size_t block, u8* out) {
    const Table& t = table();
    const size_t blocks = over(n, block);
    std::atomic<bool> finite{true};
    parallel_for(n, std::max<size_t>(block, 64), grain, [&](size_t b, size_t e) {
        if (t.fp8_encode(x + b, e - b, block, out + b / block, out + blocks + b) >= infinity) finite = false;
    });
    if (!finite) {
        std::memset(out, 255, blocks);
        std::memset(out + blocks, 0, n);
    }
}

void fp8_decode(const u8* data, size_t n, size_t block, Sink sink) {
    const Table& t = table();
    const Output out(sink, n);
    const size_t blocks = over(n, block);
    in_parts(n, std::max<size_t>(block, 64), [&](size_t b, size_t e) {
        t.fp8_decode(data + b / block, data + blocks + b, e - b, block, out.from(b));
    });
}

size_t sign_nbytes(size_t n, size_t block) { return 4 * over(n, block) + over(n, 8); }

namespace {

// Writes the scale; whether it is one.
bool put_mean(u8* at, double total, size_t count) {
    const bool finite = std::isfinite(total);
    if (finite) put_float(at, static_cast<float>(total / static_cast<double>(count)));
    return finite;
}

bool sign_done(u8* out, size_t n, size_t block, bool finite) {
    const size_t blocks = over(n, block);
    if (!finite) {
        for (size_t k = 0; k < blocks; ++k) put_float(out + 4 * k, float_of(0x7fc00000));
        std::memset(out + 4 * blocks, 0, over(n, 8));
    }
    return finite;
}

// Blocks whose sums need several chunks are shared out by block: there are many of them, or they are one.
size_t block_grain(size_t block) { return std::max<size_t>(1, grain / block); }

}  // namespace

void sign_encode(const float* x, size_t n, size_t block, u8* out) {
    if (n == 0) return;
    const Table& t = table();
    const size_t blocks = over(n, block);
    u8* const signs = out + 4 * blocks;
    std::atomic<bool> finite{true};
    if (blocks == 1) {
        std::vector<double> chunks(over(n, chunk));
        parallel_for(n, chunk, grain, [&](size_t b, size_t e) { t.sign_encode(x + b, e - b, chunks.data() + b / chunk, signs + b / 8); });
        finite = put_mean(out, fold(chunks.data(), chunks.size(), n), n);
    } else {
        parallel_for(blocks, 1, block_grain(block), [&](size_t first, size_t last) {
            std::vector<double> chunks(over(block, chunk));
            for (size_t k = first; k < last; ++k) {
                const size_t b = k * block, count = std::min(block, n - b);
                t.sign_encode(x + b, count, chunks.data(), signs + b / 8);
                if (!put_mean(out + 4 * k, fold(chunks.data(), over(count, chunk), block), count)) finite = false;
            }
        });
    }
    sign_done(out, n, block, finite);
}

void sign_decode(const u8* data, size_t n, size_t block, Sink sink) {
    const Table& t = table();
    const Output out(sink, n);
    const u8* const signs = data + 4 * over(n, block);
    in_parts(n, 64, [&](size_t begin, size_t end) {
        while (begin < end) {
            const size_t k = begin / block, stop = block < end - k * block ? (k + 1) * block : end;
            t.sign_decode(signs + begin / 8, stop - begin, get_float(data + 4 * k), out.from(begin));
            begin = stop;
        }
    });
}

bool sign_split(const float* x, const float* carry, size_t n, size_t block, u8* out, float* left) {
    const Table& t = table();
    const size_t blocks = over(n, block);
    u8* const signs = out + 4 * blocks;
    std::atomic<bool> finite{true};
    parallel_for(blocks, 1, block_grain(block), [&](size_t first, size_t last) {
        for (size_t k = first; k < last; ++k) {
            const size_t b = k * block, count = std::min(block, n - b);
            for (size_t i = b; i < b + count; ++i) left[i] = x[i] + carry[i];
            double total;
            t.sign_encode(left + b, count, &total, signs + b / 8);
            if (put_mean(out + 4 * k, total, count)) t.sign_decode(signs + b / 8, count, get_float(out + 4 * k), {left + b, Emit::add, -1.0f});
            else finite = false;
        }
    });
    return sign_done(out, n, block, finite);
}

void natural_encode(const float* x, size_t n, const Stream& stream, u8* out) {
    const Table& t = table();
    u8* const exponents = out + over(n, 8);
    std::atomic<bool> finite{true};
    parallel_for(n, 64, grain, [&](size_t b, size_t e) {
        if (t.natural_encode(x + b, e - b, b, stream, out + b / 8, exponents + b) >= infinity) finite = false;
    });
    if (!finite) {
        std::memset(out, 0, over(n, 8));
        std::memset(exponents, 255, n);
    }
}

void natural_decode(const u8* data, size_t n, Sink sink) {
    const Table& t = table();
    const Output out(sink, n);
    const u8* const exponents = data + over(n, 8);
    in_parts(n, 64, [&](size_t b, size_t e) { t.natural_decode(data + b / 8, exponents + b, e - b, out.from(b)); });
}

size_t ternary_nbytes(size_t n, size_t bucket) { return 4 * over(n, bucket) + bits::trit_bytes(n); }

void ternary_encode(const float* x, size_t n, size_t bucket, const Stream& stream, u8* out) {
    const Table& t = table();
    u8* const body = out + 4 * over(n, bucket);
    encode_buckets(
        x, n, bucket, out, ternary_nbytes(n, bucket), [&](const float* p, size_t k) { return ternary_scale(largest_of(t, p, k)); },
        [&](const float* p, size_t k, double*) { return ternary_scale(t.largest(p, k)); },
        [&](const float* p, size_t k, size_t first, float inverse, u8* c) { t.ternary_codes(p, k, first, inverse, stream, c); },
        [&](const u8* c, size_t k, size_t first) {
            const size_t done = t.trits_pack(c, k, body + first / 5);
            bits::pack_trits(c + done, k - done, body + (first + done) / 5);
        });
}

// Whether bytes hold n trits as an encoder writes them. What is added cannot be taken back, so this is asked before.
static bool canonical_trits(const Table& t, const u8* body, size_t n) {
    const size_t bytes = over(n, 5);
    std::atomic<bool> good{true};
    parallel_for(bytes, 64, grain, [&](size_t b, size_t e) {
        if (t.trits_largest(body + b, e - b) > 242) good = false;
    });
    static constexpr u8 powers[5] = {0, 3, 9, 27, 81};
    return good && (n % 5 == 0 || body[bytes - 1] < powers[n % 5]);
}

bool ternary_decode(const u8* data, size_t n, size_t bucket, Sink sink) {
    const Table& t = table();
    const u8* const body = data + 4 * over(n, bucket);
    if (sink.add && !canonical_trits(t, body, n)) return false;
    std::atomic<bool> good{true};
    decode_buckets(
        data, n, bucket, Output(sink, n),
        [&](size_t first, size_t k, u8* c) {
            u32 largest_byte = 0;
            const size_t done = t.trits_unpack(body + first / 5, k, c, largest_byte);
            if (largest_byte > 242 || !bits::unpack_trits(body + (first + done) / 5, k - done, c + done)) good = false;
        },
        [&](const u8* c, size_t k, float scale, Out out) { t.ternary_values(c, k, scale, out); });
    return good;
}

size_t natural_levels_nbytes(size_t n, size_t bucket, int width) {
    return 4 * over(n, bucket) + bits::packed_bytes(n, static_cast<unsigned>(width));
}

void natural_levels_encode(const float* x, size_t n, size_t bucket, int levels, int width, const Stream& stream, u8* out) {
    const Table& t = table();
    const unsigned w = static_cast<unsigned>(width);
    u8* const body = out + 4 * over(n, bucket);
    encode_buckets(
        x, n, bucket, out, natural_levels_nbytes(n, bucket, width),
        [&](const float* p, size_t k) {
            std::vector<double> chunks(over(k, chunk));
            parallel_for(k, chunk, grain, [&](size_t b, size_t e) { t.sums(p + b, e - b, chunks.data() + b / chunk); });
            return natural_levels_scale(fold(chunks.data(), chunks.size(), bucket));
        },
        [&](const float* p, size_t k, double* work) {
            t.sums(p, k, work);
            return natural_levels_scale(fold(work, over(k, chunk), bucket));
        },
        [&](const float* p, size_t k, size_t first, float inverse, u8* c) {
            t.natural_levels_codes(p, k, first, inverse, levels, stream, c);
        },
        [&](const u8* c, size_t k, size_t first) { bits::pack(c, k, w, body + first / 8 * w); });
}

void natural_levels_decode(const u8* data, size_t n, size_t bucket, int levels, int width, Sink sink) {
    const Table& t = table();
    const unsigned w = static_cast<unsigned>(width);
    const u8* const body = data + 4 * over(n, bucket);
    decode_buckets(
        data, n, bucket, Output(sink, n), [&](size_t first, size_t k, u8* c) { bits::unpack(body + first / 8 * w, k, w, c); },
        [&](const u8* c, size_t k, float scale, Out out) { t.natural_levels_values(c, k, scale, levels, out); });
}

}  // namespace tersegrad::casts
