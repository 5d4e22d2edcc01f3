// Messages of Sparse Dithering: which code a vector gets, and which one a message holds.
#include "tersegrad/dither.hpp"

#include <cmath>
#include <limits>

#include "dither_segments.hpp"
#include "tersegrad/rounding.hpp"

namespace tersegrad::dither {
namespace {

constexpr std::uint32_t kNotFinite = 0x7fc00000u, kSegments = 0x80000000u;  // first words, beside kAllZero; others are scales
constexpr std::size_t kShort = std::size_t{1} << 10;  // up to here the sequential codes are tried too,
constexpr std::size_t kTiny = 300;                    // and rANS, with its tables, is not below that many bytes

bool decode_any(const std::uint8_t* data, std::size_t size, const Into& to, std::uint8_t* symbols = nullptr) {
    if (size < 4) return false;
    std::uint32_t word;
    std::memcpy(&word, data, 4);
    if (word == kSegments) return decode_segments(data + 4, size - 4, to, symbols);
    if (word != kNotFinite && word != kAllZero) return decode_short(data, size, to);
    if (size != 4) return false;
    if (word == kNotFinite) std::fill(to.out, to.out + to.n, std::numeric_limits<float>::quiet_NaN());
    else if (!to.add) std::fill(to.out, to.out + to.n, 0.0f);
    return true;
}

}  // namespace

std::size_t max_bytes(std::size_t n) {
    const Segments segments(n);
    return 4 + segments.table_bytes() + segments.count() + 4 * n;
}

Outcome encode(const float* x, std::size_t n, const Options& o, std::uint8_t* out) {
    if (o.left && (o.coder == Coder::paper || n <= kShort)) {  // several codes may be tried: ask the decoder of the one that is sent
        Options plain = o;
        plain.left = nullptr;
        plain.carry = nullptr;
        if (o.carry) add(x, o.carry, n, o.left);
        else if (n) std::memcpy(o.left, x, 4 * n);
        const Outcome outcome = encode(o.left, n, plain, out);
        decode_add(out, outcome.bytes, n, o.rows, -1.0f, o.left);
        return outcome;
    }
    Outcome best;
    if (o.coder == Coder::paper || (o.coder == Coder::automatic && n <= kShort)) {
        const double norm = sum_squares(x, n);
        if (!std::isfinite(norm)) return {write_word(kNotFinite, out), norm, 0};
        if (norm == 0) return {write_word(kAllZero, out), 0, 0};
        best = encode_short(x, n, norm, o, out);
        if (best.bytes && (o.coder == Coder::paper || best.bytes < kTiny)) return best;
    }
    if (best.bytes) {  // both; the longer one is dropped
        std::vector<std::uint8_t> other(max_bytes(n));
        const Outcome segments = encode_segments(x, n, o, other.data() + 4);
        if (best.bytes <= 4 + segments.bytes) return best;
        write_word(kSegments, other.data());
        std::memcpy(out, other.data(), 4 + segments.bytes);
        return {4 + segments.bytes, segments.norm, segments.error};
    }
    const Outcome segments = encode_segments(x, n, o, out + 4);
    if (!std::isfinite(segments.norm)) return {write_word(kNotFinite, out), segments.norm, 0};
    write_word(kSegments, out);
    return {4 + segments.bytes, segments.norm, segments.error};
}

bool decode(const std::uint8_t* data, std::size_t size, std::size_t n, const classes::Rows& rows, float* out) {
    return decode_any(data, size, {out, n, 1.0f, false, rows});
}
bool decode_add(const std::uint8_t* data, std::size_t size, std::size_t n, const classes::Rows& rows, float weight, float* out,
                std::uint8_t* symbols) {
    return decode_any(data, size, {out, n, weight, true, rows}, symbols);
}

}  // namespace tersegrad::dither
