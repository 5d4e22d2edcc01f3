// Planar codes: sizes, the choice of a parameter, and the choice of an instruction set.
#include "tersegrad/planar.hpp"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "planar_loops.hpp"
#include "tersegrad/runtime.hpp"

namespace tersegrad::planar {

const Table table_portable = planar_table();

const Table& table() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return table_avx512;
    if (isa() == Isa::avx2) return table_avx2;
#endif
    return table_portable;
}

Golomb::Golomb(std::uint64_t divisor) : m(divisor) {
    if (m == 0 || m >> 56) throw std::invalid_argument("the divisor must lie in [1, 2^56)");
    width = static_cast<unsigned>(std::bit_width(m)) - 1;
    few = (std::uint64_t{2} << width) - m;  // all of them where m is a power of two
}

std::int64_t gamma_bytes(const std::int64_t* values, std::size_t count) {
    u64 low = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (values[i] < 1) return -1;
        low += log2_floor(values[i]);
    }
    return static_cast<i64>(bytes_of(low + count) + bytes_of(low));
}

void gamma_encode(const std::int64_t* values, std::size_t count, std::uint8_t* out) { table().gamma_encode(values, count, out); }

std::int64_t gamma_decode(const std::uint8_t* data, std::size_t size, std::size_t count, std::int64_t* out) {
    return table().gamma_decode(data, size, count, out);
}

std::int64_t rice_bits(const std::int64_t* values, std::size_t count, unsigned k) {
    RiceSums s;
    return table().rice_measure(values, count, k, s) ? static_cast<i64>(s.zeros + count * (k + 1) + s.escapes + 2 * s.low) : -1;
}

std::int64_t rice_bytes(const std::int64_t* values, std::size_t count, unsigned k) {
    RiceSums s;
    if (!table().rice_measure(values, count, k, s)) return -1;
    return static_cast<i64>(bytes_of(s.zeros + count) + bytes_of(u64{count} * k) + bytes_of(s.escapes + s.low) + bytes_of(s.low));
}

std::int64_t rice_encode(const std::int64_t* values, std::size_t count, unsigned k, std::uint8_t* out, std::size_t capacity) {
    return table().rice_encode(values, count, k, out, capacity);
}

std::int64_t rice_decode(const std::uint8_t* data, std::size_t size, std::size_t count, unsigned k, std::int64_t* out) {
    return table().rice_decode(data, size, count, k, out);
}

int rice_best(const std::int64_t* values, std::size_t count) {
    if (count == 0) return 0;
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]);
    const double mean = sum / static_cast<double>(count);
    // Any first guess is right, a good one is fast: a code takes at least k + 1 bits, so the search ends where that alone costs more.
    int best = mean > 2 ? std::min<int>(static_cast<int>(rice_max), std::ilogb(0.7 * mean)) : 0;
    i64 least = rice_bits(values, count, static_cast<unsigned>(best));
    if (least < 0) return -1;
    for (int k = 0; k <= static_cast<int>(rice_max) && static_cast<i64>(count) * (k + 1) <= least; ++k) {
        if (k == best) continue;
        const i64 bits = rice_bits(values, count, static_cast<unsigned>(k));
        if (bits < least || (bits == least && k < best)) best = k, least = bits;
    }
    return best;
}

}  // namespace tersegrad::planar
