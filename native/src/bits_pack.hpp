// The scalar steps of packing codes and trits. Included by one file per instruction set, so everything is in an unnamed namespace:
// the same source, compiled with and without bit-manipulation instructions, must never be merged by the linker.
#pragma once
#include <array>
#include <utility>

#include "tersegrad/bits.hpp"

namespace tersegrad::bits {
namespace {

using u8 = std::uint8_t;
using i32 = std::int32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;

TERSEGRAD_INLINE u64 load64(const void* p) {
    u64 x;
    std::memcpy(&x, p, 8);
    return x;
}
TERSEGRAD_INLINE void store64(void* p, u64 x) { std::memcpy(p, &x, 8); }

TERSEGRAD_INLINE unsigned log2_floor(u64 x) { return 63u - static_cast<unsigned>(__builtin_clzll(x)); }
TERSEGRAD_INLINE unsigned zeros(u64 x, unsigned limit) { return static_cast<unsigned>(__builtin_ctzll(x | u64{1} << limit)); }

// ---- packing, eight codes at a time ----

// A constant with `value` in every lane of `lane` bits.
constexpr u64 lanes(u64 value, unsigned lane) {
    u64 all = 0;
    for (unsigned at = 0; at < 64; at += lane) all |= value << at;
    return all;
}

// Eight codes in eight bytes <-> 8 W bits: neighbours are joined in three steps.
template <unsigned W>
TERSEGRAD_INLINE u64 squeeze(u64 x) {
    if constexpr (W < 8) {
        constexpr u64 m1 = lanes(mask(W), 16), m2 = lanes(mask(2 * W), 32), m3 = mask(4 * W);
        x = (x & m1) | (x >> (8 - W) & m1 << W);
        x = (x & m2) | (x >> (16 - 2 * W) & m2 << 2 * W);
        x = (x & m3) | (x >> (32 - 4 * W) & m3 << 4 * W);
    }
    return x;
}

template <unsigned W>
TERSEGRAD_INLINE u64 spread(u64 x) {
    if constexpr (W < 8) {
        constexpr u64 m1 = lanes(mask(W), 16), m2 = lanes(mask(2 * W), 32), m3 = mask(4 * W);
        x = (x & m3) | (x << (32 - 4 * W) & m3 << 32);
        x = (x & m2) | (x << (16 - 2 * W) & m2 << 16);
        x = (x & m1) | (x << (8 - W) & m1 << 8);
    }
    return x;
}

template <unsigned W>
void pack8(const u8* codes, std::size_t count, u8* out, bool = false) {
    if constexpr (W == 8) {
        if (count) std::memcpy(out, codes, count);
        return;
    }
    const u8* const end = out + packed_bytes(count, W);
    std::size_t i = 0;
    for (; i + 8 <= count && end - out >= 8; i += 8, out += W) store64(out, squeeze<W>(load64(codes + i)));
    for (; i < count; i += 8, out += W) {
        const std::size_t n = count - i < 8 ? count - i : 8;
        u64 x = 0;
        std::memcpy(&x, codes + i, n);
        x = squeeze<W>(x);
        std::memcpy(out, &x, (n * W + 7) / 8);
    }
}

template <unsigned W>
void unpack8(const u8* data, std::size_t count, u8* out, bool = false) {
    if constexpr (W == 8) {
        if (count) std::memcpy(out, data, count);
        return;
    }
    const u8* const end = data + packed_bytes(count, W);
    std::size_t i = 0;
    for (; i + 8 <= count && end - data >= 8; i += 8, data += W) store64(out + i, spread<W>(load64(data)));
    for (; i < count; i += 8, data += W) {
        const std::size_t n = count - i < 8 ? count - i : 8;
        u64 x = 0;
        std::memcpy(&x, data, (n * W + 7) / 8);
        x = spread<W>(x);
        std::memcpy(out + i, &x, n);
    }
}

template <unsigned W>
void pack32(const i32* codes, std::size_t count, u8* out, bool = false) {
    constexpr u64 m = mask(W);
    const u8* const end = out + packed_bytes(count, W);
    std::size_t i = 0;
    for (; i + 8 <= count && end - out >= 16; i += 8, out += W) {
        auto code = [&](std::size_t j) { return static_cast<u64>(codes[i + j]) & m; };
        const u64 a = code(0) | code(1) << W | code(2) << 2 * W | code(3) << 3 * W;
        const u64 b = code(4) | code(5) << W | code(6) << 2 * W | code(7) << 3 * W;
        if constexpr (W == 16) {
            store64(out, a);
            store64(out + 8, b);
        } else {
            store64(out, a | b << 4 * W);
            store64(out + 8, b >> (64 - 4 * W));
        }
    }
    BitWriter writer(out, static_cast<std::size_t>(end - out));
    for (; i < count; ++i) writer.put(static_cast<u64>(codes[i]) & m, W);
    writer.finish();
}

template <unsigned W>
void unpack32(const u8* data, std::size_t count, i32* out, bool = false) {
    const u8* const end = data + packed_bytes(count, W);
    std::size_t i = 0;
    for (; i + 8 <= count && end - data >= 16; i += 8, data += W) {
        const u64 a = load64(data);
        u64 b = load64(data + 8);
        if constexpr (W < 16) b = a >> 4 * W | b << (64 - 4 * W);
        for (unsigned j = 0; j < 4; ++j) {
            out[i + j] = static_cast<i32>(a >> j * W & mask(W));
            out[i + 4 + j] = static_cast<i32>(b >> j * W & mask(W));
        }
    }
    BitReader reader(data, static_cast<std::size_t>(end - data));
    for (; i < count; ++i) out[i] = static_cast<i32>(reader.get(W));
}

// ---- trits ----

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

// Byte 4 of the product is t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4, and no lower byte carries into it.
TERSEGRAD_INLINE u8 join_trits(u64 five) { return static_cast<u8>((five & mask(40)) * 0x010309'1b51 >> 32); }

bool pack_trits_loop(const u8* trits, std::size_t count, u8* out) {
    u64 any = 0, threes = 0;
    std::size_t i = 0;
    for (; i + 8 <= count; i += 5) {
        const u64 x = load64(trits + i);
        any |= x;
        threes |= x & x >> 1;
        *out++ = join_trits(x);
    }
    for (; i < count; i += 5) {
        u64 x = 0;
        std::memcpy(&x, trits + i, count - i < 5 ? count - i : 5);
        any |= x;
        threes |= x & x >> 1;
        *out++ = join_trits(x);
    }
    return ((any & lanes(0xfc, 8)) | (threes & lanes(1, 8))) == 0;
}

bool unpack_trits_loop(const u8* data, std::size_t count, u8* out) {
    unsigned largest = 0;
    std::size_t i = 0;
    for (; i + 8 <= count; i += 5) {
        largest = *data > largest ? *data : largest;
        store64(out + i, trits_of[*data++]);
    }
    for (; i < count; i += 5) {
        largest = *data > largest ? *data : largest;
        std::memcpy(out + i, &trits_of[*data++], count - i < 5 ? count - i : 5);
    }
    return largest <= 242;
}

}  // namespace
}  // namespace tersegrad::bits
