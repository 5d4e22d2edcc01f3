#include "tersegrad/dither.hpp"

#include <atomic>
#include <memory>
#include <vector>

#include "dither_loops.hpp"
#include "tersegrad/bits.hpp"
#include "tersegrad/rans.hpp"
#include "tersegrad/runtime.hpp"

namespace tersegrad::dither {
namespace detail {
const Implementation portable = {norm_plain, quantise_plain, shift_plain, scale_plain, scale_add_plain};
}
namespace {

constexpr std::size_t sum_chunk = 4096;
enum Kind : std::uint8_t { zero = 0, raw = 1, coded = 2 };

const detail::Implementation& ops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return detail::avx512;
    if (isa() == Isa::avx2) return detail::avx2;
#endif
    return detail::portable;
}

// Adds the second half to the first until one is left, as if padded with zeros to a power of two.
double fold(double* a, std::size_t count) {
    std::size_t half = 1;
    while (2 * half < count) half *= 2;
    for (; half >= 1 && count > 1; half /= 2) {
        for (std::size_t i = half; i < count; ++i) a[i - half] += a[i];
        count = half;
    }
    return count ? a[0] : 0.0;
}

struct Segments {
    std::size_t n;
    std::size_t count() const { return rans::chunk_count(n); }
    std::size_t start(std::size_t s) const { return s * rans::kChunk; }
    std::size_t length(std::size_t s) const { return rans::chunk_length(n, s); }
    std::size_t table_bytes() const { return count() > 1 ? 4 * count() : 0; }
};

std::size_t segment_bound(std::size_t n) { return 1 + 4 * n; }

double segment_norm(const float* x, std::size_t n) {
    double sums[rans::kLongestChunk / sum_chunk + 1];
    std::size_t chunks = 0;
    for (std::size_t i = 0; i < n; i += sum_chunk) {
        double lanes[32] = {};
        ops().norm(x + i, std::min(sum_chunk, n - i), lanes);
        sums[chunks++] = fold(lanes, 32);
    }
    return fold(sums, chunks);
}

std::size_t write_varint(std::uint8_t* out, std::size_t value) {
    std::size_t n = 0;
    for (; value >= 128; value >>= 7) out[n++] = static_cast<std::uint8_t>(value | 128);
    out[n++] = static_cast<std::uint8_t>(value);
    return n;
}

// Canonical LEB128 of a length; 0 bytes read means malformed.
std::size_t read_varint(const std::uint8_t* data, std::size_t size, std::size_t& value) {
    value = 0;
    for (std::size_t n = 0; n < size && n < 5; ++n) {
        value |= static_cast<std::size_t>(data[n] & 127) << (7 * n);
        if (data[n] < 128) return n && data[n] == 0 ? 0 : n + 1;
    }
    return 0;
}

// The largest level that gets a symbol of its own: all levels if few are large, else the tail is escaped.
int choose_window(const Moments& m, std::size_t n) {
    if (m.top <= 15) return static_cast<int>(std::max<std::uint32_t>(m.top, 1));
    if (m.above15 <= n / 512) return 15;
    if (m.top <= 31) return static_cast<int>(m.top);
    if (m.above31 <= n / 512) return 31;
    return static_cast<int>(std::min<std::uint32_t>(m.top, 127));
}

// Calls body(i) for every symbol at either end of the window.
template <class Body>
bool at_ends(const std::uint8_t* symbols, std::size_t n, std::uint8_t last, Body&& body) {
    for (std::size_t i = 0; i < n; i += 64) {
        const std::size_t stop = std::min(n, i + 64);
        bool any = false;
        for (std::size_t j = i; j < stop; ++j) any |= (symbols[j] == 0) | (symbols[j] == last);
        if (any)
            for (std::size_t j = i; j < stop; ++j)
                if (symbols[j] == 0 || symbols[j] == last)
                    if (!body(j)) return false;
    }
    return true;
}

struct Scratch {
    std::unique_ptr<std::int8_t[]> levels{new std::int8_t[rans::kLongestChunk + 64]};
    std::vector<std::uint8_t> message = std::vector<std::uint8_t>(rans::max_message(rans::kLongestChunk, 256) + 64);
    std::vector<std::int64_t> escapes;
    std::vector<std::uint8_t> tail;
};

struct SegmentResult {
    std::size_t bytes = 0;
    double norm = 0, error = 0;
};

float usable_step(double step) {  // toward zero, inside the normal range
    if (step >= FLT_MAX) return FLT_MAX;
    if (step < 0x1p-126) return 0x1p-126f;
    float f = static_cast<float>(step);
    if (static_cast<double>(f) > step) f = std::nextafterf(f, 0.0f);
    return f;
}

SegmentResult store_raw(const float* x, std::size_t n, double norm, std::uint8_t* out) {
    out[0] = raw;
    std::memcpy(out + 1, x, 4 * n);
    return {segment_bound(n), norm, 0.0};
}

SegmentResult encode_segment(const float* x, std::size_t n, std::uint64_t start, const Options& o, Scratch& scratch, std::uint8_t* out) {
    float step = o.step;
    if (o.nu > 0) {
        const double norm = segment_norm(x, n);
        if (!std::isfinite(norm)) return {0, norm, 0};
        if (norm > 0) step = usable_step(2 * std::sqrt(o.nu / static_cast<double>(n) * norm));
        else {
            out[0] = zero;
            return {1, 0, 0};
        }
    }
    const float inverse = 1.0f / step;
    Moments m;
    quantise(x, n, inverse, o.draws, start, scratch.levels.get(), m);
    if (!std::isfinite(m.norm)) return {0, m.norm, 0};
    if (m.top == 0) {
        out[0] = zero;
        return {1, m.norm, m.norm};
    }
    if (m.top >= 0x7fffffffu) return store_raw(x, n, m.norm, out);
    if (o.gain) step = usable_step(m.dot / m.energy);
    const int window = choose_window(m, n);
    ops().shift(scratch.levels.get(), n, window);
    const auto* symbols = reinterpret_cast<const std::uint8_t*>(scratch.levels.get());

    scratch.tail.clear();
    if (m.top > static_cast<std::uint32_t>(window)) {
        scratch.escapes.clear();
        at_ends(symbols, n, static_cast<std::uint8_t>(2 * window), [&](std::size_t i) {
            const std::int64_t k = level(x[i], inverse, o.draws, start + i);
            scratch.escapes.push_back((k < 0 ? -k : k) - window + 1);
            return true;
        });
        const auto bits = bits::elias_bits(scratch.escapes.data(), scratch.escapes.size(), bits::Elias::gamma);
        scratch.tail.resize(static_cast<std::size_t>(bits + 7) / 8);
        bits::elias_encode(scratch.escapes.data(), scratch.escapes.size(), bits::Elias::gamma, scratch.tail.data(), scratch.tail.size());
    }
    const std::size_t body = rans::encode_message(symbols, n, 2 * window + 1, {}, 1, true, scratch.message.data());
    std::uint8_t head[16] = {coded};
    std::memcpy(head + 1, &step, 4);
    head[5] = static_cast<std::uint8_t>(window);
    const std::size_t head_bytes = 6 + write_varint(head + 6, scratch.tail.size());
    const std::size_t total = head_bytes + body + scratch.tail.size();
    if (total > segment_bound(n)) return store_raw(x, n, m.norm, out);
    std::memcpy(out, head, head_bytes);
    std::memcpy(out + head_bytes, scratch.message.data(), body);
    if (!scratch.tail.empty()) std::memcpy(out + head_bytes + body, scratch.tail.data(), scratch.tail.size());
    const double g = step;
    return {total, m.norm, m.norm - 2 * g * m.dot + g * g * m.energy};
}

template <class Put>
bool decode_segment(const std::uint8_t* data, std::size_t size, std::size_t n, Scratch& scratch, float* out, float weight, bool add, Put&& put) {
    if (size < 1) return false;
    if (data[0] == zero) {
        if (size != 1) return false;
        if (!add) std::fill(out, out + n, 0.0f);
        return true;
    }
    if (data[0] == raw) {
        if (size != segment_bound(n)) return false;
        for (std::size_t i = 0; i < n; ++i) {
            float v;
            std::memcpy(&v, data + 1 + 4 * i, 4);
            put(i, v);
        }
        return true;
    }
    if (data[0] != coded || size < 7) return false;
    float step;
    std::memcpy(&step, data + 1, 4);
    const int window = data[5];
    if (window < 1 || window > 127 || !std::isfinite(step)) return false;
    std::size_t tail;
    const std::size_t used = read_varint(data + 6, size - 6, tail);
    if (!used || tail > size - 6 - used) return false;
    const std::uint8_t* body = data + 6 + used;
    const std::size_t body_size = size - 6 - used - tail;
    auto* symbols = reinterpret_cast<std::uint8_t*>(scratch.levels.get());
    if (rans::decode_message(body, body_size, n, 2 * window + 1, {}, 1, symbols) != body_size) return false;
    if (add) ops().scale_add(symbols, n, window, step, weight, out);
    else ops().scale(symbols, n, window, step, out);
    if (!tail) return true;
    std::size_t count = 0;
    const auto last = static_cast<std::uint8_t>(2 * window);
    at_ends(symbols, n, last, [&](std::size_t) { return ++count, true; });
    scratch.escapes.resize(count);
    if (bits::elias_decode(body + body_size, tail, count, bits::Elias::gamma, scratch.escapes.data()) != static_cast<std::int64_t>(tail)) return false;
    std::size_t next = 0;
    return at_ends(symbols, n, last, [&](std::size_t i) {
        const std::int64_t more = scratch.escapes[next++] - 1;
        if (more > 0x7fffffff) return false;
        if (!more) return true;
        const auto k = static_cast<float>(symbols[i] ? window + more : -(window + more));
        const float edge = detail::limited(static_cast<float>(static_cast<int>(symbols[i]) - window) * step);
        const float full = detail::limited(k * step);
        if (add) out[i] += weight * (full - edge);
        else out[i] = full;
        return true;
    });
}

template <bool add>
bool decode_any(const std::uint8_t* data, std::size_t size, std::size_t n, float weight, float* out) {
    const Segments segments{n};
    const std::size_t count = segments.count();
    if (size < segments.table_bytes()) return false;
    std::vector<std::size_t> offset(count + 1);
    offset[0] = segments.table_bytes();
    for (std::size_t s = 0; s < count; ++s) {
        std::uint32_t length = static_cast<std::uint32_t>(size);
        if (count > 1) std::memcpy(&length, data + 4 * s, 4);
        if (length > size - offset[s]) return false;
        offset[s + 1] = offset[s] + length;
    }
    if (offset[count] != size) return false;
    std::atomic<bool> good{true};
    parallel_for(count, 1, 1, [&](std::size_t first, std::size_t last) {
        Scratch scratch;
        for (std::size_t s = first; s < last && good; ++s) {
            float* target = out + segments.start(s);
            const auto put = [&](std::size_t i, float v) {
                if constexpr (add) target[i] += weight * v;
                else target[i] = v;
            };
            if (!decode_segment(data + offset[s], offset[s + 1] - offset[s], segments.length(s), scratch, target, weight, add, put)) good = false;
        }
    });
    return good;
}

}  // namespace

void quantise(const float* x, std::size_t n, float inverse, const Stream* draws, std::uint64_t start, std::int8_t* k, Moments& m) {
    double dots[rans::kLongestChunk / sum_chunk + 1], norms[rans::kLongestChunk / sum_chunk + 1];
    std::uint16_t random[sum_chunk + 64];
    std::size_t chunks = 0;
    for (std::size_t i = 0; i < n; i += sum_chunk) {
        const std::size_t length = std::min(sum_chunk, n - i);
        if (draws) random_u16(*draws, start + i, length, random);
        double lanes[96] = {};
        ops().quantise(x + i, length, inverse, draws ? random : nullptr, k + i, lanes, m);
        m.energy += fold(lanes + 32, 32);
        dots[chunks] = fold(lanes, 32);
        norms[chunks++] = fold(lanes + 64, 32);
    }
    m.dot = fold(dots, chunks);
    m.norm = fold(norms, chunks);
}

std::int32_t level(float x, float inverse, const Stream* draws, std::uint64_t index) {
    std::uint16_t draw = 0;
    if (draws) random_u16(*draws, index, 1, &draw);
    return detail::round_one(x, inverse, draws != nullptr, draw);
}

std::size_t max_bytes(std::size_t n) {
    const Segments segments{n};
    return segments.table_bytes() + segments.count() + 4 * n;
}

Outcome encode(const float* x, std::size_t n, const Options& o, std::uint8_t* out) {
    const Segments segments{n};
    const std::size_t count = segments.count();
    std::vector<SegmentResult> results(count);
    const bool alone = plan_threads(count, 1) == 1;
    // One thread writes where the bytes belong; several write at the farthest place each segment could need, and close the gaps.
    std::vector<std::size_t> place(count + 1);
    place[0] = segments.table_bytes();
    for (std::size_t s = 0; s < count; ++s) place[s + 1] = place[s] + segment_bound(segments.length(s));
    std::size_t end = place[0];
    std::atomic<bool> finite{true};
    parallel_for(count, 1, 1, [&](std::size_t first, std::size_t last) {
        Scratch scratch;
        for (std::size_t s = first; s < last && finite; ++s) {
            std::uint8_t* target = out + (alone ? end : place[s]);
            results[s] = encode_segment(x + segments.start(s), segments.length(s), segments.start(s), o, scratch, target);
            if (!results[s].bytes) finite = false;
            if (alone) end += results[s].bytes;
        }
    });
    Outcome outcome;
    if (!finite) return outcome;
    std::vector<double> norms(count), errors(count);
    end = place[0];
    for (std::size_t s = 0; s < count; ++s) {
        if (!alone) std::memmove(out + end, out + place[s], results[s].bytes);
        const auto length = static_cast<std::uint32_t>(results[s].bytes);
        if (count > 1) std::memcpy(out + 4 * s, &length, 4);
        end += results[s].bytes;
        norms[s] = results[s].norm;
        errors[s] = results[s].error;
    }
    outcome.bytes = end;
    outcome.norm = fold(norms.data(), count);
    outcome.error = fold(errors.data(), count);
    return outcome;
}

bool decode(const std::uint8_t* data, std::size_t size, std::size_t n, float* out) { return decode_any<false>(data, size, n, 1.0f, out); }
bool decode_add(const std::uint8_t* data, std::size_t size, std::size_t n, float weight, float* out) {
    return decode_any<true>(data, size, n, weight, out);
}

Moments sample(const float* x, std::size_t n, float inverse, std::size_t stride) {
    Moments m;
    std::vector<double> dots, norms;
    std::int8_t k[sum_chunk];
    for (std::size_t i = 0; i < n; i += sum_chunk * stride) {
        double lanes[96] = {};
        ops().quantise(x + i, std::min(sum_chunk, n - i), inverse, nullptr, k, lanes, m);
        m.energy += fold(lanes + 32, 32);
        dots.push_back(fold(lanes, 32));
        norms.push_back(fold(lanes + 64, 32));
    }
    m.dot = fold(dots.data(), dots.size());
    m.norm = fold(norms.data(), norms.size());
    return m;
}

}  // namespace tersegrad::dither
