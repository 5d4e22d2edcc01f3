#include "tersegrad/bits.hpp"

#include <atomic>
#include <cmath>
#include <limits>

#include "bits_codes.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

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

// Outputs of this many bytes are written around the cache.
constexpr std::size_t beyond_cache = std::size_t{16} << 20;

constexpr i64 unlimited = std::numeric_limits<i64>::max();
constexpr unsigned powers_of_3[] = {1, 3, 9, 27, 81, 243};

}  // namespace

void pack(const u8* codes, std::size_t count, unsigned width, u8* out) {
    const auto part = chosen().pack8[width];
    const bool far = packed_bytes(count, width) >= beyond_cache;
    parallel_for(count, unit, grain, [=](std::size_t b, std::size_t e) { part(codes + b, e - b, out + b / 8 * width, far); });
}

void pack(const i32* codes, std::size_t count, unsigned width, u8* out) {
    const auto part = chosen().pack32[width];
    const bool far = packed_bytes(count, width) >= beyond_cache;
    parallel_for(count, unit, grain / 4, [=](std::size_t b, std::size_t e) { part(codes + b, e - b, out + b / 8 * width, far); });
}

void unpack(const u8* data, std::size_t count, unsigned width, u8* out) {
    const auto part = chosen().unpack8[width];
    const bool far = count >= beyond_cache;
    parallel_for(count, unit, grain, [=](std::size_t b, std::size_t e) { part(data + b / 8 * width, e - b, out + b, far); });
}

void unpack(const u8* data, std::size_t count, unsigned width, i32* out) {
    const auto part = chosen().unpack32[width];
    const bool far = 4 * count >= beyond_cache;
    parallel_for(count, unit, grain / 4, [=](std::size_t b, std::size_t e) { part(data + b / 8 * width, e - b, out + b, far); });
}

bool pack_trits(const u8* trits, std::size_t count, u8* out) {
    const auto part = chosen().pack_trits;
    std::atomic<bool> good{true};
    parallel_for(count, 5 * 64, grain, [=, &good](std::size_t b, std::size_t e) {
        if (!part(trits + b, e - b, out + b / 5)) good = false;
    });
    return good;
}

bool unpack_trits(const u8* data, std::size_t count, u8* out) {
    const auto part = chosen().unpack_trits;
    std::atomic<bool> good{true};
    parallel_for(count, 5 * 64, grain, [=, &good](std::size_t b, std::size_t e) {
        if (!part(data + b / 5, e - b, out + b)) good = false;
    });
    if (count % 5 && data[count / 5] >= powers_of_3[count % 5]) good = false;
    return good;
}

i64 elias_bits(const i64* values, std::size_t count, Elias code) { return chosen().elias_bits(values, count, code); }

bool elias_encode(const i64* values, std::size_t count, Elias code, u8* out, std::size_t bytes) {
    return chosen().elias_encode(values, count, code, out, bytes);
}
i64 elias_decode(const u8* data, std::size_t bytes, std::size_t count, Elias code, i64* out) {
    return chosen().elias_decode(data, bytes, count, code, out);
}

}  // namespace tersegrad::bits
