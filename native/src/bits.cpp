#include "tersegrad/bits.hpp"

#include <atomic>
#include <cmath>

#include "bits_codes.hpp"
#include "tersegrad/runtime.hpp"

namespace tersegrad::bits {

const Implementation portable = scalar_implementation();

namespace {

const Implementation& chosen() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return avx512;
    if (isa() == Isa::avx2) return avx2;
#endif
    return portable;
}

// Parts start at multiples of 512 codes: whole bytes, and whole cache lines of codes.
constexpr std::size_t unit = 512, grain = std::size_t{1} << 20;

// Every byte value as five trits; bytes above 242 read as 242, so that values stay in range whatever the bytes.
constexpr std::array<u64, 256> trit_table() {
    std::array<u64, 256> table{};
    for (unsigned byte = 0; byte < 256; ++byte) {
        unsigned rest = byte < 243 ? byte : 242;
        for (unsigned j = 0; j < 5; ++j, rest /= 3) table[byte] |= u64{rest % 3} << 8 * j;
    }
    return table;
}

constexpr auto trits_of = trit_table();
constexpr unsigned powers_of_3[] = {1, 3, 9, 27, 81, 243};

// Byte 4 of the product is t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4, and no lower byte carries into it.
TERSEGRAD_INLINE u8 join_trits(u64 five) { return static_cast<u8>((five & mask(40)) * 0x010309'1b51 >> 32); }

// Non-zero if one of the bytes is above 2.
TERSEGRAD_INLINE u64 above_two(u64 x) { return (x & 0xfcfcfcfcfcfcfcfc) | (x & x >> 1 & 0x0101010101010101); }

}  // namespace

void pack(const u8* codes, std::size_t count, unsigned width, u8* out) {
    const auto part = chosen().pack8[width];
    parallel_for(count, unit, grain, [=](std::size_t b, std::size_t e) { part(codes + b, e - b, out + b / 8 * width); });
}

void pack(const i32* codes, std::size_t count, unsigned width, u8* out) {
    const auto part = chosen().pack32[width];
    parallel_for(count, unit, grain / 4, [=](std::size_t b, std::size_t e) { part(codes + b, e - b, out + b / 8 * width); });
}

void unpack(const u8* data, std::size_t count, unsigned width, u8* out) {
    const auto part = chosen().unpack8[width];
    parallel_for(count, unit, grain, [=](std::size_t b, std::size_t e) { part(data + b / 8 * width, e - b, out + b); });
}

void unpack(const u8* data, std::size_t count, unsigned width, i32* out) {
    const auto part = chosen().unpack32[width];
    parallel_for(count, unit, grain / 4, [=](std::size_t b, std::size_t e) { part(data + b / 8 * width, e - b, out + b); });
}

bool pack_trits(const u8* trits, std::size_t count, u8* out) {
    std::atomic<bool> good{true};
    parallel_for(count, 5 * 64, grain, [=, &good](std::size_t b, std::size_t e) {
        const u8* t = trits + b;
        u8* to = out + b / 5;
        u64 wrong = 0;
        std::size_t i = 0;
        const std::size_t n = e - b;
        for (; i + 8 <= n; i += 5) {
            const u64 x = load64(t + i);
            wrong |= above_two(x);
            *to++ = join_trits(x);
        }
        for (; i < n; i += 5) {
            u64 x = 0;
            std::memcpy(&x, t + i, std::min<std::size_t>(5, n - i));
            wrong |= above_two(x);
            *to++ = join_trits(x);
        }
        if (wrong) good = false;
    });
    return good;
}

bool unpack_trits(const u8* data, std::size_t count, u8* out) {
    std::atomic<bool> good{true};
    parallel_for(count, 5 * 64, grain, [=, &good](std::size_t b, std::size_t e) {
        const u8* from = data + b / 5;
        u8* to = out + b;
        unsigned largest = 0;
        std::size_t i = 0;
        const std::size_t n = e - b;
        for (; i + 8 <= n; i += 5) {
            largest = std::max<unsigned>(largest, *from);
            store64(to + i, trits_of[*from++]);
        }
        for (; i < n; i += 5) {
            largest = std::max<unsigned>(largest, *from);
            std::memcpy(to + i, &trits_of[*from++], std::min<std::size_t>(5, n - i));
        }
        if (largest > 242) good = false;
    });
    if (count % 5 && data[count / 5] >= powers_of_3[count % 5]) good = false;
    return good;
}

i64 elias_bits(const i64* values, std::size_t count, Elias code) { return chosen().elias_bits(values, count, code); }
i64 rice_bits(const i64* values, std::size_t count, unsigned k) { return chosen().rice_bits(values, count, k); }

bool elias_encode(const i64* values, std::size_t count, Elias code, u8* out, std::size_t bytes) {
    return chosen().elias_encode(values, count, code, out, bytes);
}
bool rice_encode(const i64* values, std::size_t count, unsigned k, u8* out, std::size_t bytes) {
    return chosen().rice_encode(values, count, k, out, bytes);
}
i64 elias_decode(const u8* data, std::size_t bytes, std::size_t count, Elias code, i64* out) {
    return chosen().elias_decode(data, bytes, count, code, out);
}
i64 rice_decode(const u8* data, std::size_t bytes, std::size_t count, unsigned k, i64* out) {
    return chosen().rice_decode(data, bytes, count, k, out);
}

int rice_best(const i64* values, std::size_t count) {
    if (count == 0) return 0;
    const auto cost = chosen().rice_bits;
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]);
    const double mean = sum / static_cast<double>(count);
    // Any first guess is right, a good one is fast: a code takes at least k + 1 bits, so the search ends where that alone costs more.
    int best = mean > 1 ? std::min<int>(static_cast<int>(rice_max), std::ilogb(mean)) : 0;
    i64 least = cost(values, count, static_cast<unsigned>(best));
    if (least < 0) return -1;
    for (int k = 0; k <= static_cast<int>(rice_max) && static_cast<i64>(count) * (k + 1) <= least; ++k) {
        const i64 bits = cost(values, count, static_cast<unsigned>(k));
        if (bits < least || (bits == least && k < best)) best = k, least = bits;
    }
    return best;
}

}  // namespace tersegrad::bits
