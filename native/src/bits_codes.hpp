// Elias loops, and the table of one instruction set. As bits_pack.hpp, local to the including file.
#pragma once
#include "bits_pack.hpp"

namespace tersegrad::bits {
namespace {

// ---- Elias: every code of v with N = floor(log2 v) is a prefix that depends on N, the N low bits of v, and zero or one 0 bit ----

struct Prefix {
    u64 bits;
    unsigned length, total;  // total: length of the whole code
};

constexpr unsigned log2_table(u64 x) {
    unsigned n = 0;
    while (x >>= 1) ++n;
    return n;
}

constexpr std::array<Prefix, 63> prefixes(Elias code) {
    std::array<Prefix, 63> table{};
    for (unsigned n = 0; n < 63; ++n) {
        u64 bits = 0;
        unsigned length = 0, tail = 0;
        if (code == Elias::gamma) {
            bits = u64{1} << n;
            length = n + 1;
        } else if (code == Elias::delta) {
            const unsigned l = n + 1, m = log2_table(l);
            bits = u64{1} << m | (l - (u64{1} << m)) << (m + 1);
            length = 2 * m + 1;
        } else {
            // From the inside out: the group of n, before it the group of floor(log2 n), down to 1.
            tail = 1;
            for (unsigned group = n; group > 1; group = log2_table(group)) {
                const unsigned l = log2_table(group);
                bits = 1 | (group - (u64{1} << l)) << 1 | bits << (l + 1);
                length += l + 1;
            }
            if (n >= 1) {
                bits |= u64{1} << length;  // the flag of the last group, v itself
                ++length;
            }
        }
        table[n] = {bits, length, length + n + tail};
    }
    return table;
}

constexpr std::array<Prefix, 63> prefix_tables[3] = {prefixes(Elias::gamma), prefixes(Elias::delta), prefixes(Elias::omega)};

TERSEGRAD_INLINE void put_elias(BitWriter& writer, u64 v, const Prefix* table) {
    const unsigned n = log2_floor(v);
    const Prefix& p = table[n];
    const u64 low = v ^ u64{1} << n;
    if (p.total <= 56) [[likely]] {
        writer.put(p.bits | low << p.length, p.total);
    } else {
        writer.put_long(p.bits, p.length);
        writer.put_long(low, n);
        writer.put(0, p.total - p.length - n);
    }
}

bool elias_encode_loop(const i64* values, std::size_t count, Elias code, u8* out, std::size_t bytes) {
    const Prefix* const table = prefix_tables[static_cast<int>(code)].data();
    BitWriter writer(out, bytes);
    std::size_t i = 0;
    for (; i + 2 <= count; i += 2) {
        if (values[i] < 1 || values[i + 1] < 1) return false;
        const u64 a = static_cast<u64>(values[i]), b = static_cast<u64>(values[i + 1]);
        const unsigned n = log2_floor(a), m = log2_floor(b);
        const Prefix &p = table[n], &q = table[m];
        if (p.total + q.total <= 56) [[likely]] {
            const u64 first = p.bits | (a ^ u64{1} << n) << p.length, second = q.bits | (b ^ u64{1} << m) << q.length;
            writer.put(first | second << p.total, p.total + q.total);
        } else {
            put_elias(writer, a, table);
            put_elias(writer, b, table);
        }
    }
    if (i < count) {
        if (values[i] < 1) return false;
        put_elias(writer, static_cast<u64>(values[i]), table);
    }
    return writer.finish() == bytes && !writer.overflowed();
}

i64 elias_bits_loop(const i64* values, std::size_t count, Elias code) {
    const Prefix* const table = prefix_tables[static_cast<int>(code)].data();
    i64 sum = 0;
    bool good = true;
    for (std::size_t i = 0; i < count; ++i) {
        good &= values[i] >= 1;
        sum += table[log2_floor((static_cast<u64>(values[i]) & mask(63)) | 1)].total;
    }
    return good ? sum : -1;
}

// Whole omega codes of at most 12 bits by their bits: value and length, length 0 where the code is longer.
struct Short {
    u8 value, length;
};

constexpr std::array<Short, 4096> short_omega() {
    std::array<Short, 4096> table{};
    constexpr auto prefix = prefixes(Elias::omega);
    for (u64 v = 1; v < 64; ++v) {
        const unsigned n = log2_table(v);
        const Prefix p = prefix[n];
        const u64 bits = p.bits | (v - (u64{1} << n)) << p.length;
        if (p.total <= 12)
            for (u64 rest = 0; rest < u64{1} << (12 - p.total); ++rest)
                table[bits | rest << p.total] = {static_cast<u8>(v), static_cast<u8>(p.total)};
    }
    return table;
}

constexpr auto omega_table = short_omega();

// Each reader returns the value, or 0 for bits that are no code of a value below 2^63.
TERSEGRAD_INLINE u64 get_gamma(BitReader& reader) {
    const u64 w = reader.peek();
    const unsigned n = zeros(w, 57);
    if (n <= 28) [[likely]] {
        reader.skip(2 * n + 1);
        return u64{1} << n | (w >> (n + 1) & mask(n));
    }
    unsigned run = n;
    if (n >= 57) {  // the one lies further away: a run of 57..62 zeros
        reader.skip(57);
        run = 57 + zeros(reader.peek(), 8);
        if (run > 62) return 0;
        reader.skip(run - 57 + 1);
    } else {
        reader.skip(run + 1);
    }
    return u64{1} << run | reader.get_long(run);
}

TERSEGRAD_INLINE u64 get_delta(BitReader& reader) {
    const u64 w = reader.peek();
    const unsigned m = zeros(w, 6);
    if (m > 5) return 0;
    const unsigned n = static_cast<unsigned>(u64{1} << m | (w >> (m + 1) & mask(m))) - 1, used = 2 * m + 1;
    if (n + used <= 57) [[likely]] {
        reader.skip(n + used);
        return u64{1} << n | (w >> used & mask(n));
    }
    reader.skip(used);
    return u64{1} << n | reader.get_long(n);
}

TERSEGRAD_INLINE u64 get_omega(BitReader& reader) {
    const u64 w = reader.peek();
    const Short s = omega_table[w & 4095];
    if (s.length) [[likely]] {
        reader.skip(s.length);
        return s.value;
    }
    u64 n = 1;
    while (reader.get(1)) {
        if (n > 62) return 0;
        n = u64{1} << n | reader.get_long(static_cast<unsigned>(n));
        if (reader.overrun()) return 0;
    }
    return n;
}

template <class Get>
TERSEGRAD_INLINE i64 decode_all(const u8* data, std::size_t bytes, std::size_t count, i64* out, Get get) {
    BitReader reader(data, bytes);
    for (std::size_t i = 0; i < count; ++i) {
        i64 value;
        if (!get(reader, value) || reader.overrun()) return -1;
        out[i] = value;
    }
    return reader.clean_end() ? static_cast<i64>((reader.position() + 7) / 8) : -1;
}

i64 elias_decode_loop(const u8* data, std::size_t bytes, std::size_t count, Elias code, i64* out) {
    auto with = [&](auto get) __attribute__((always_inline)) {
        return decode_all(data, bytes, count, out, [get](BitReader & reader, i64 & value) __attribute__((always_inline)) {
            const u64 v = get(reader);
            value = static_cast<i64>(v);
            return v != 0;
        });
    };
    switch (code) {
        case Elias::gamma: return with([](BitReader & r) __attribute__((always_inline)) { return get_gamma(r); });
        case Elias::delta: return with([](BitReader & r) __attribute__((always_inline)) { return get_delta(r); });
        default: return with([](BitReader & r) __attribute__((always_inline)) { return get_omega(r); });
    }
}

// The table of one instruction set, filled with the scalar versions.
template <unsigned... W>
constexpr void fill8(Implementation& t, std::integer_sequence<unsigned, W...>) {
    ((t.pack8[W + 1] = pack8<W + 1>, t.unpack8[W + 1] = unpack8<W + 1>), ...);
}
template <unsigned... W>
constexpr void fill32(Implementation& t, std::integer_sequence<unsigned, W...>) {
    ((t.pack32[W + 9] = pack32<W + 9>, t.unpack32[W + 9] = unpack32<W + 9>), ...);
}

constexpr Implementation scalar_implementation() {
    Implementation t{};
    fill8(t, std::make_integer_sequence<unsigned, 8>{});
    fill32(t, std::make_integer_sequence<unsigned, 8>{});
    t.pack_trits = pack_trits_loop;
    t.unpack_trits = unpack_trits_loop;
    t.elias_encode = elias_encode_loop;
    t.elias_decode = elias_decode_loop;
    t.elias_bits = elias_bits_loop;
    return t;
}

}  // namespace
}  // namespace tersegrad::bits
