#include "tersegrad/dither.hpp"

#include <atomic>
#include <bit>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "dither_loops.hpp"
#include "tersegrad/bits.hpp"
#include "tersegrad/levels.hpp"
#include "tersegrad/rounding.hpp"
#include "tersegrad/runtime.hpp"

namespace tersegrad::dither {
namespace detail {
const Implementation portable = {norm_plain,  quick_plain, exact_plain, random_plain, above_plain,
                                 shift_plain, ends_plain,  scale_plain, leave_plain,  nullptr};
}
namespace {

enum Kind : std::uint8_t { zero = 0, raw = 1, coded = 2 };
constexpr std::uint32_t kNotFinite = 0x7fc00000u, kAllZero = 0, kSegments = 0x80000000u;  // first words; others are scales
constexpr std::size_t kShort = std::size_t{1} << 14;  // up to here the sequential codes are tried too,
constexpr std::size_t kTiny = 300;                    // and rANS, with its tables and lanes, is not below that many bytes
constexpr std::uint64_t kUnaryLimit = 16;             // mean level from which a unary code cannot be the shortest
constexpr std::size_t kStreamFrom = 4u << 20;         // outputs of that many floats leave the caches anyway: write around them

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

float usable_step(double step) {  // toward zero, inside the normal range
    if (step >= FLT_MAX) return FLT_MAX;
    if (step < 0x1p-126) return 0x1p-126f;
    float f = static_cast<float>(step);
    if (static_cast<double>(f) > step) f = std::nextafterf(f, 0.0f);
    return f;
}

float step_for(double nu, std::size_t n, double norm) { return usable_step(2 * std::sqrt(nu / static_cast<double>(n) * norm)); }

// The level of one coordinate in full.
std::int32_t level(float x, float inverse, const Stream* draws, std::uint64_t index) {
    if (!draws) return detail::round_one(x, inverse, false, 0);
    const std::uint32_t word = philox_block(*draws, index >> 3).w[index % 8 / 2];
    return detail::round_one(x, inverse, true, index & 1 ? word >> 16 : word & 0xffff);
}

void add(const float* x, const float* y, std::size_t n, float* sum) {
    for (std::size_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
}

// ---- rounding a block of at most 2^16 coordinates (or a short vector) ----

struct Ahead {  // walks through memory that will be needed soon
    const char* at;
    const char* next(std::size_t coordinates, std::size_t lines) {
        const char* here = at;
        at += coordinates * lines;
        return here;
    }
};

double block_norm(const float* x, std::size_t n, Ahead& ahead) {
    double sums[kScaleBlock / kSumChunk];
    std::size_t chunks = 0;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        double lanes[32] = {};
        ops().norm(x + i, std::min(kSumChunk, n - i), ahead.next(kSumChunk, detail::kNormAhead), lanes);
        sums[chunks++] = fold(lanes, 32);
    }
    return fold(sums, chunks);
}

Moments round_exact(const float* x, std::size_t n, float inverse, Ahead& ahead, std::uint8_t* k) {
    double dots[kScaleBlock / kSumChunk], energies[kScaleBlock / kSumChunk], norms[kScaleBlock / kSumChunk];
    std::size_t chunks = 0;
    Moments m;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        double lanes[96] = {};
        ops().exact(x + i, std::min(kSumChunk, n - i), inverse, ahead.next(kSumChunk, detail::kExactAhead), k + i, lanes, m.top);
        dots[chunks] = fold(lanes, 32);
        energies[chunks] = fold(lanes + 32, 32);
        norms[chunks++] = fold(lanes + 64, 32);
    }
    m.dot = fold(dots, chunks);
    m.energy = fold(energies, chunks);
    m.norm = fold(norms, chunks);
    return m;
}

// As above with <x, k> to about seven digits, unless a level exceeds 126. The norm is known already.
Moments round_quick(const float* x, std::size_t n, float step, double norm, Ahead& ahead, std::uint8_t* k) {
    double dots[kScaleBlock / kSumChunk];
    std::size_t chunks = 0;
    std::int64_t energy = 0;
    std::uint32_t top = 0;
    const float inverse = 1.0f / step;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        detail::Quick sums;
        ops().quick(x + i, std::min(kSumChunk, n - i), inverse, ahead.next(kSumChunk, detail::kRoundAhead), k + i, sums);
        double lanes[64];
        std::copy_n(sums.dot, 64, lanes);
        dots[chunks++] = fold(lanes, 64);
        energy += sums.energy;
        top = std::max(top, sums.top);
    }
    if (top >= 127) {
        Ahead nowhere{reinterpret_cast<const char*>(x)};
        return round_exact(x, n, inverse, nowhere, k);
    }
    return {static_cast<double>(step) * fold(dots, chunks), static_cast<double>(energy), norm, top};
}

std::uint32_t round_random(const float* x, std::size_t n, float inverse, const Stream& draws, std::uint64_t start, Ahead& ahead,
                           std::uint8_t* k) {
    std::uint16_t random[kSumChunk];
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        const std::size_t length = std::min(kSumChunk, n - i);
        random_u16(draws, start + i, length, random);
        ops().random(x + i, length, inverse, random, ahead.next(kSumChunk, detail::kRoundAhead), k + i, top);
    }
    if (top >= 127)  // saturated: look at those levels again
        for (std::size_t i = 0; i < n; ++i)
            if (detail::magnitude(detail::unbiased(k[i])) >= 127) top = std::max(top, detail::magnitude(level(x[i], inverse, &draws, start + i)));
    return top;
}

struct Block {
    float inverse = 0, scale = 0;
    double norm = 0, error = 0;
    std::uint32_t top = 0;
};

Block round_block(const float* x, std::size_t n, std::uint64_t start, const Options& o, Ahead& ahead, std::uint8_t* k) {
    Block b;
    float step = o.step;
    if (o.nu > 0 || o.draws) {
        b.norm = block_norm(x, n, ahead);
        if (!std::isfinite(b.norm)) return b;
        if (b.norm == 0) {
            std::memset(k, kBias, n);
            return b;
        }
        if (o.nu > 0) step = step_for(o.nu, n, b.norm);
    }
    b.inverse = 1.0f / step;
    if (o.draws) {
        b.top = round_random(x, n, b.inverse, *o.draws, start, ahead, k);
        if (b.top) b.scale = step;
        return b;
    }
    const Moments m = o.nu > 0 ? round_quick(x, n, step, b.norm, ahead, k) : round_exact(x, n, b.inverse, ahead, k);
    b.norm = m.norm;
    b.top = m.top;
    if (m.top && m.top < kTooLarge) b.scale = usable_step(m.dot / m.energy);
    const double g = b.scale;
    b.error = m.norm - 2 * g * m.dot + g * g * m.energy;
    return b;
}

// ---- segments ----

struct Segments {
    std::size_t n;
    std::size_t count() const { return rans::chunk_count(n); }
    std::size_t start(std::size_t s) const { return s * rans::kChunk; }
    std::size_t length(std::size_t s) const { return rans::chunk_length(n, s); }
    std::size_t table_bytes() const { return count() > 1 ? 4 * count() : 0; }
};

std::size_t scale_count(std::size_t n) { return (n + kScaleBlock - 1) / kScaleBlock; }
std::size_t raw_bytes(std::size_t n) { return 1 + 4 * n; }

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
int choose_window(const std::uint8_t* k, std::size_t n, std::uint32_t top) {
    if (top <= 15) return static_cast<int>(top);
    if (ops().above(k, n, 15) <= n / 512) return 15;
    if (top <= 31) return static_cast<int>(top);
    if (ops().above(k, n, 31) <= n / 512) return 31;
    return static_cast<int>(std::min<std::uint32_t>(top, 127));
}

// Calls body(i) for every symbol at either end of the window, in order, while it returns true.
template <class Body>
bool at_ends(const std::uint8_t* symbols, std::size_t n, int window, Body&& body) {
    std::uint16_t at[kSumChunk + 1];
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        const std::size_t count = ops().ends(symbols + i, std::min(kSumChunk, n - i), static_cast<std::uint8_t>(2 * window), at);
        for (std::size_t j = 0; j < count; ++j)
            if (!body(i + at[j])) return false;
    }
    return true;
}

// Memory that a thread keeps, below two megabytes in all: fresh pages would cost more than messages of some thousand coordinates.
struct Bytes {
    void fit(std::size_t n) {
        if (size >= n) return;
        data.reset(new std::uint8_t[n]);  // not initialised
        size = n;
    }
    std::size_t size = 0;
    std::unique_ptr<std::uint8_t[]> data;
};
struct Workspace {
    Bytes levels, words, head, sum;
    static Workspace& of_thread() {
        thread_local Workspace kept;
        return kept;
    }
};

// Codes segments one after the other; each stays in here until its place in the message is known.
class SegmentEncoder {
public:
    SegmentEncoder(const Options& options, std::size_t longest)
        : options_(options), levels_(Workspace::of_thread().levels), words_(Workspace::of_thread().words), head_(Workspace::of_thread().head),
          sum_(Workspace::of_thread().sum) {
        levels_.fit(longest + 64);
        words_.fit(2 * longest + rans::kSlack);
        head_.fit(16 + 4 * kMostScales + 4096);
        if (options.carry) sum_.fit(4 * std::min(longest, kScaleBlock));
    }

    // False: not finite. `next`: the coordinates that will be coded after these.
    bool encode(const float* x, std::size_t n, std::uint64_t start, rans::Ahead next) {
        x_ = x, n_ = n;
        carry_ = options_.carry ? options_.carry + start : nullptr;
        float* const left = options_.left ? options_.left + start : nullptr;
        norm = error = 0;
        head_size_ = words_size_ = 0;
        tail_.clear();
        std::uint8_t* k = levels_.data.get();
        Block blocks[kMostScales];
        double norms[kMostScales], errors[kMostScales];
        const std::size_t scales = scale_count(n);
        std::uint32_t top = 0;
        Ahead ahead{reinterpret_cast<const char*>(x) + fetched_};
        for (std::size_t b = 0; b < scales; ++b) {
            const std::size_t at = b * kScaleBlock, length = std::min(kScaleBlock, n - at);
            const float* here = x + at;
            if (carry_) {
                float* const sum = reinterpret_cast<float*>(sum_.data.get());
                add(here, carry_ + at, length, sum);
                here = sum;
            }
            blocks[b] = round_block(here, length, start + at, options_, ahead, k + at);
            if (!std::isfinite(blocks[b].norm)) {
                norm = blocks[b].norm;
                return false;
            }
            if (left) leave(here, length, start + at, blocks[b], k + at, left + at);
            norms[b] = blocks[b].norm;
            errors[b] = blocks[b].error;
            top = std::max(top, blocks[b].top);
        }
        norm = fold(norms, scales);
        error = fold(errors, scales);
        if (top == 0) {
            put(zero);
            return true;
        }
        if (top >= kTooLarge) {
            put(raw);
            error = 0;
            if (left) std::memset(left, 0, 4 * n);
            return true;
        }
        const int window = choose_window(k, n, top);
        if (top > kBias) ops().shift(k, n, window);
        if (top > static_cast<std::uint32_t>(window)) escape(blocks, start, window);
        put(coded);
        put(static_cast<std::uint8_t>(window));
        head_size_ += write_varint(head_.data.get() + head_size_, tail_.size());
        for (std::size_t b = 0; b < scales; ++b) put(&blocks[b].scale, 4);
        code_symbols(window, top > kBias ? 0 : kBias - window, next);
        if (bytes() > raw_bytes(n)) {
            head_size_ = words_size_ = 0;
            tail_.clear();
            put(raw);
            error = 0;
            if (left) std::memset(left, 0, 4 * n);
        }
        return true;
    }

    std::size_t bytes() const { return head_.data[0] == raw ? raw_bytes(n_) : head_size_ + words_size_ + tail_.size(); }
    void write(std::uint8_t* out) const {
        std::memcpy(out, head_.data.get(), head_size_);
        if (head_.data[0] == raw) {
            if (!carry_) std::memcpy(out + 1, x_, 4 * n_);
            else
                for (std::size_t i = 0; i < n_; ++i) {
                    const float v = value(i);
                    std::memcpy(out + 1 + 4 * i, &v, 4);
                }
            return;
        }
        if (words_size_) std::memcpy(out + head_size_, words_at_, words_size_);
        if (!tail_.empty()) std::memcpy(out + head_size_ + words_size_, tail_.data(), tail_.size());
    }

    double norm = 0, error = 0;

private:
    float value(std::size_t i) const { return carry_ ? x_[i] + carry_[i] : x_[i]; }

    // What the decoder of a block that was just rounded will not give back.
    void leave(const float* x, std::size_t n, std::uint64_t start, const Block& b, const std::uint8_t* k, float* left) const {
        ops().leave(k, n, b.scale, x, left);
        if (b.top < 127) return;
        for (std::size_t i = 0; i < n; ++i)  // those levels do not fit into bytes
            if (detail::magnitude(detail::unbiased(k[i])) >= 127)
                left[i] = x[i] - detail::limited(static_cast<float>(level(x[i], b.inverse, options_.draws, start + i)) * b.scale);
    }

    void put(std::uint8_t byte) { head_.data[head_size_++] = byte; }
    void put(const void* data, std::size_t size) {
        if (size) std::memcpy(head_.data.get() + head_size_, data, size);
        head_size_ += size;
    }

    void escape(const Block* blocks, std::uint64_t start, int window) {
        escapes_.clear();
        at_ends(levels_.data.get(), n_, window, [&](std::size_t i) {
            const std::int32_t k = level(value(i), blocks[i / kScaleBlock].inverse, options_.draws, start + i);
            escapes_.push_back(static_cast<std::int64_t>(detail::magnitude(k)) - window + 1);
            return true;
        });
        const auto bits = bits::elias_bits(escapes_.data(), escapes_.size(), bits::Elias::gamma);
        tail_.resize(static_cast<std::size_t>(bits + 7) / 8);
        bits::elias_encode(escapes_.data(), escapes_.size(), bits::Elias::gamma, tail_.data(), tail_.size());
    }

    // The bytes of rans::encode_counted for one chunk, without its copies. The first symbol of the window is stored as `base`.
    void code_symbols(int window, int base, rans::Ahead next) {
        const std::uint8_t* symbols = levels_.data.get();
        const int alphabet = 2 * window + 1;
        std::uint64_t counts[256];
        std::uint16_t frequencies[256] = {};
        rans::histogram_dense(symbols, n_, base, alphabet, counts);
        const std::vector<std::uint8_t> tables = rans::write_tables(counts + base, alphabet, 1);
        rans::read_tables(tables.data(), tables.size(), alphabet, 1, frequencies + base);
        const std::size_t most = rans::max_message(n_, alphabet), lanes = rans::lanes_of(n_), before = head_size_;
        const bool informative = std::none_of(frequencies, frequencies + base + alphabet, [](auto f) { return f == rans::kTotal; });
        if (!informative || 1 + tables.size() >= most) return code_rarely(window, base, counts + base);
        const rans::EncodeModel model(frequencies, base + alphabet, 1);
        std::uint32_t states[rans::kLanes];
        std::uint8_t* const end = words_.data.get() + words_.size;
        words_at_ = rans::encode_chunk(model, symbols, n_, {}, end, states, next);
        const auto later = static_cast<const char*>(next.end) - static_cast<const char*>(next.begin);
        fetched_ = std::min<std::size_t>(128 * (n_ / rans::kLanes), static_cast<std::size_t>(later));
        words_size_ = static_cast<std::size_t>(end - words_at_);
        if (1 + tables.size() + 4 + 4 * lanes + words_size_ >= most) return code_rarely(window, base, counts + base);
        const auto count = static_cast<std::uint32_t>(words_size_ / 2);
        head_size_ = before;
        put(0);
        put(tables.data(), tables.size());
        put(&count, 4);
        put(states, 4 * lanes);
    }

    void code_rarely(int window, int base, const std::uint64_t* counts) {
        if (base) ops().shift(levels_.data.get(), n_, window);
        std::vector<std::uint8_t> message(rans::max_message(n_, 2 * window + 1));
        message.resize(rans::encode_counted(levels_.data.get(), n_, 2 * window + 1, {}, 1, counts, message.data()));
        tail_.insert(tail_.begin(), message.begin(), message.end());
        words_size_ = 0;
    }

    Options options_;
    Bytes &levels_, &words_, &head_, &sum_;
    std::size_t head_size_ = 0, words_size_ = 0, n_ = 0, fetched_ = 0;
    const std::uint8_t* words_at_ = nullptr;
    const float *x_ = nullptr, *carry_ = nullptr;
    std::vector<std::int64_t> escapes_;
    std::vector<std::uint8_t> tail_;
};

// Every thread writes a run of segments where the longest possible ones before it would end; then the gaps are closed.
Outcome encode_segments(const float* x, std::size_t n, const Options& o, std::uint8_t* out) {
    const Segments segments{n};
    const std::size_t count = segments.count(), table = segments.table_bytes();
    std::vector<double> norms(count), errors(count);
    std::vector<std::size_t> sizes(count), runs(count + 1);  // runs[s]: where a run that starts with segment s was written
    std::atomic<bool> finite{true};
    parallel_for(count, 1, 1, [&](std::size_t first, std::size_t last) {
        SegmentEncoder encoder(o, std::min(n, rans::kLongestChunk));
        std::size_t at = runs[first] = table + first * raw_bytes(rans::kChunk);
        for (std::size_t s = first; s < last && finite.load(std::memory_order_relaxed); ++s) {
            const float* here = x + segments.start(s);
            const std::size_t later = std::min(s + 1, last - 1);
            const float* soon = x + segments.start(later);
            if (!encoder.encode(here, segments.length(s), segments.start(s), {soon, later > s ? soon + segments.length(later) : soon})) finite = false;
            else encoder.write(out + at);
            at += sizes[s] = encoder.bytes();
            norms[s] = encoder.norm;
            errors[s] = encoder.error;
        }
    });
    if (!finite) return {0, std::numeric_limits<double>::infinity(), 0};
    std::size_t end = table;
    for (std::size_t s = 0; s < count;) {
        const std::size_t from = runs[s];
        std::size_t length = 0;
        do {
            const auto size = static_cast<std::uint32_t>(sizes[s]);
            if (count > 1) std::memcpy(out + 4 * s, &size, 4);
            length += sizes[s++];
        } while (s < count && !runs[s]);
        if (from != end) std::memmove(out + end, out + from, length);
        end += length;
    }
    return {end, fold(norms.data(), count), fold(errors.data(), count)};
}

// ---- decoding ----

struct Into {
    float* out;
    std::size_t n;
    float weight;
    bool add;
    Into part(std::size_t begin, std::size_t length) const { return {out + begin, length, weight, add}; }
    void put(std::size_t i, float v) const {
        if (add) out[i] += weight * v;
        else out[i] = v;
    }
};

// A coded segment, taken apart.
struct Parsed {
    float scales[kMostScales];
    int window = 0;
    const std::uint8_t *body = nullptr, *tail = nullptr;  // the rANS message, and the escapes behind it
    std::size_t body_size = 0, tail_size = 0;
};

bool parse(const std::uint8_t* data, std::size_t size, std::size_t n, Parsed& p) {
    if (size < 3 || data[1] < 1 || data[1] > 127) return false;
    p.window = data[1];
    const std::size_t used = read_varint(data + 2, size - 2, p.tail_size), scales = 4 * scale_count(n);
    if (!used || size - 2 - used < scales || size - 2 - used - scales < p.tail_size) return false;
    std::memcpy(p.scales, data + 2 + used, scales);
    for (std::size_t b = 0; 4 * b < scales; ++b)
        if (!std::isfinite(p.scales[b])) return false;
    p.body = data + 2 + used + scales;
    p.body_size = size - 2 - used - scales - p.tail_size;
    p.tail = p.body + p.body_size;
    return true;
}

class SegmentDecoder {
public:
    explicit SegmentDecoder(std::size_t longest) : longest_(longest) {}

    bool decode(const std::uint8_t* data, std::size_t size, const Into& to, bool stream) {
        if (size < 1) return false;
        if (data[0] == zero) {
            if (size != 1) return false;
            if (!to.add) std::memset(to.out, 0, 4 * to.n);
            return true;
        }
        if (data[0] == raw) {
            if (size != raw_bytes(to.n)) return false;
            if (!to.add) std::memcpy(to.out, data + 1, 4 * to.n);
            else
                for (std::size_t i = 0; i < to.n; ++i) {
                    float v;
                    std::memcpy(&v, data + 1 + 4 * i, 4);
                    to.out[i] += to.weight * v;
                }
            return true;
        }
        Parsed p;
        if (data[0] != coded || !parse(data, size, to.n, p)) return false;
        Fast fast;
        if (open(p, to, 0, fast)) return fast.good && ops().decode(*fast.track, nullptr, to.add, to.weight, stream) && close(p, to, fast);
        std::uint8_t* symbols = buffer(0);
        if (rans::decode_message(p.body, p.body_size, to.n, 2 * p.window + 1, {}, 1, symbols) != p.body_size) return false;
        if (p.tail_size && to.add) keep(p, to, symbols);
        for (std::size_t b = 0; b < scale_count(to.n); ++b) {
            const std::size_t at = b * kScaleBlock;
            ops().scale(symbols + at, std::min(kScaleBlock, to.n - at), p.window, p.scales[b], to.add, to.weight, to.out + at);
        }
        return unescape(p, to, symbols, true);
    }

    // Two at once where both are coded plainly: each hides the other's latency.
    bool decode_two(const std::uint8_t* first, std::size_t first_size, const Into& to_first, const std::uint8_t* second,
                    std::size_t second_size, const Into& to_second, bool stream) {
        if (ops().decode && first_size && second_size && first[0] == coded && second[0] == coded) {
            Parsed a, b;
            if (!parse(first, first_size, to_first.n, a) || !parse(second, second_size, to_second.n, b)) return false;
            Fast x, y;
            const bool apart = to_first.add && a.tail_size + b.tail_size && std::max(a.window, b.window) > 15;
            if (!apart && open(a, to_first, 0, x) && open(b, to_second, 1, y))
                return x.good && y.good && ops().decode(*x.track, &*y.track, to_first.add, to_first.weight, stream) && close(a, to_first, x) &&
                       close(b, to_second, y);
        }
        return decode(first, first_size, to_first, stream) && decode(second, second_size, to_second, stream);
    }

private:
    // What a fused decoder needs. `good` false: the bytes are malformed.
    struct Fast {
        std::optional<rans::DecodeModel> model;
        std::optional<rans::detail::Chunk> chunk;
        std::optional<detail::Track> track;
        std::uint8_t* symbols = nullptr;
        bool good = true;
    };

    std::uint8_t* buffer(int which) {
        Bytes& bytes = which ? Workspace::of_thread().words : Workspace::of_thread().levels;
        bytes.fit(longest_ + 64);
        return bytes.data.get();
    }

    // Whether the segment suits the fused decoder; then the parts are made.
    bool open(const Parsed& p, const Into& to, int which, Fast& f) {
        const int alphabet = 2 * p.window + 1;
        if (!ops().decode || alphabet > 63 || to.n < rans::kLanes || p.body_size < 1 || p.body[0] != 0) return false;
        if (to.add && p.tail_size && alphabet > 32) return false;
        std::uint16_t frequencies[64];
        const std::size_t tables = rans::read_tables(p.body + 1, p.body_size - 1, alphabet, 1, frequencies);
        if (tables == rans::kBad) return f.good = false, true;
        if (std::any_of(frequencies, frequencies + alphabet, [](auto v) { return v == rans::kTotal; })) return false;
        const std::size_t head = 1 + tables + 4 + 4 * rans::kLanes;
        if (p.body_size < head) return f.good = false, true;
        std::uint32_t count;
        std::memcpy(&count, p.body + 1 + tables, 4);
        if (count > to.n || p.body_size - head != 2 * std::size_t{count}) return f.good = false, true;
        const rans::DecodeJob job{p.body + 1 + tables + 4, p.body + head, count, rest_, to.n, {}};
        if (!rans::detail::valid_states(job)) return f.good = false, true;
        f.model.emplace(frequencies, alphabet, 1, false);
        f.chunk.emplace(job);
        f.symbols = p.tail_size ? buffer(which) : nullptr;
        f.track.emplace(detail::Track{&*f.chunk, &*f.model, {}, p.window, to.n / rans::kLanes, to.out, f.symbols});
        std::copy_n(p.scales, kMostScales, f.track->scales);
        return true;
    }

    // The coordinates after the last whole step, the final check, the escapes.
    bool close(const Parsed& p, const Into& to, Fast& f) {
        const std::size_t done = to.n / rans::kLanes * rans::kLanes;
        auto& cursor = f.chunk->cursor;
        cursor.step = cursor.steps = 0;
        cursor.symbols = rest_;
        if (!f.chunk->finish(*f.model)) return false;
        if (f.symbols) std::memcpy(f.symbols + done, rest_, to.n - done);
        if (done < to.n)
            for (std::size_t i = done; i < to.n; ++i) {
                const int k = static_cast<int>(rest_[i - done]) - p.window;
                if (to.add && p.tail_size && (k == p.window || k == -p.window)) continue;  // as in the whole steps
                to.put(i, detail::limited(static_cast<float>(k) * p.scales[i / kScaleBlock]));
            }
        return unescape(p, to, f.symbols, false);
    }

    // Adding rounds, so what lies where the escapes belong is set aside.
    void keep(const Parsed& p, const Into& to, const std::uint8_t* symbols) {
        kept_.clear();
        at_ends(symbols, to.n, p.window, [&](std::size_t i) { return kept_.push_back(to.out[i]), true; });
    }

    // Puts the escaped levels where the symbols at the ends of the window are. Adding, these places must be as they were before:
    // untouched by the fused decoder, else restored from `kept_`.
    bool unescape(const Parsed& p, const Into& to, const std::uint8_t* symbols, bool restore) {
        if (!p.tail_size) return true;
        places_.clear();
        at_ends(symbols, to.n, p.window, [&](std::size_t i) { return places_.push_back(static_cast<std::uint32_t>(i)), true; });
        escapes_.resize(places_.size());
        const auto read = bits::elias_decode(p.tail, p.tail_size, places_.size(), bits::Elias::gamma, escapes_.data());
        if (read != static_cast<std::int64_t>(p.tail_size)) return false;
        for (std::size_t j = 0; j < places_.size(); ++j) {
            const std::size_t i = places_[j];
            const std::int64_t size = p.window + escapes_[j] - 1;
            if (escapes_[j] > 0x80000000) return false;
            if (restore && to.add) to.out[i] = kept_[j];
            to.put(i, detail::limited(static_cast<float>(symbols[i] ? size : -size) * p.scales[i / kScaleBlock]));
        }
        return true;
    }

    std::size_t longest_;
    std::uint8_t rest_[rans::kLanes];
    std::vector<std::uint32_t> places_;
    std::vector<std::int64_t> escapes_;
    std::vector<float> kept_;
};

bool decode_segments(const std::uint8_t* data, std::size_t size, const Into& to) {
    const Segments segments{to.n};
    const std::size_t count = segments.count();
    if (size < segments.table_bytes()) return false;
    std::vector<std::size_t> offset(count + 1);
    offset[0] = segments.table_bytes();
    for (std::size_t s = 0; s < count; ++s) {
        std::size_t length = size - offset[s];
        if (count > 1) {
            std::uint32_t sent;
            std::memcpy(&sent, data + 4 * s, 4);
            if (sent > length) return false;
            length = sent;
        }
        offset[s + 1] = offset[s] + length;
    }
    if (offset[count] != size) return false;
    const bool stream = !to.add && to.n >= kStreamFrom;
    std::atomic<bool> good{true};
    parallel_for(count, 2, 1, [&](std::size_t first, std::size_t last) {
        SegmentDecoder decoder(std::min(to.n, rans::kLongestChunk));
        const auto at = [&](std::size_t s) { return to.part(segments.start(s), segments.length(s)); };
        for (std::size_t s = first; s < last && good; s += 2) {
            const std::size_t length = offset[s + 1] - offset[s];
            const bool fine = s + 1 < last ? decoder.decode_two(data + offset[s], length, at(s), data + offset[s + 1],
                                                                offset[s + 2] - offset[s + 1], at(s + 1), stream)
                                           : decoder.decode(data + offset[s], length, at(s), stream);
            if (!fine) good = false;
        }
    });
    return good;
}

// ---- short vectors: one scale and a sequential code ----

std::size_t write_word(std::uint32_t word, std::uint8_t* out) {
    std::memcpy(out, &word, 4);
    return 4;
}

// Bits of the published code, but for the rounding of its enumeration.
double paper_bits(std::size_t n, std::size_t zeros, std::uint64_t sum) {
    const auto d = static_cast<double>(n), z = static_cast<double>(zeros);
    const double places = (std::lgamma(d + 1) - std::lgamma(z + 1) - std::lgamma(d - z + 1)) / std::log(2.0);
    return 1 + static_cast<double>(std::bit_width(n) + sum + (n - zeros)) + places;
}

Outcome encode_short(const float* x, std::size_t n, double norm, const Options& o, std::uint8_t* out) {
    const float step = o.nu > 0 ? step_for(o.nu, n, norm) : o.step;
    const float inverse = 1.0f / step;
    std::vector<std::int32_t> k(n);
    std::vector<double> dots, energies;
    std::size_t zeros = 0;
    std::uint64_t sum = 0;
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        double dot[32] = {}, energy[32] = {};
        for (std::size_t j = i; j < std::min(n, i + kSumChunk); ++j) {
            k[j] = level(x[j], inverse, o.draws, j);
            const std::uint32_t size = detail::magnitude(k[j]);
            zeros += size == 0;
            sum += size;
            top = std::max(top, size);
            dot[j % 32] += static_cast<double>(x[j]) * k[j];
            energy[j % 32] += static_cast<double>(k[j]) * k[j];
        }
        dots.push_back(fold(dot, 32));
        energies.push_back(fold(energy, 32));
    }
    if (top == 0) return {write_word(kAllZero, out), norm, norm};
    const double dot = fold(dots.data(), dots.size()), energy = fold(energies.data(), energies.size());
    if (top >= kTooLarge || (o.coder == Coder::paper && sum > kUnaryLimit * 64 * n)) return {0, norm, 0};
    const float scale = o.draws ? step : usable_step(dot / energy);
    const double g = scale;
    const Outcome outcome{0, norm, norm - 2 * g * dot + g * g * energy};
    std::vector<std::uint8_t> best;
    const auto consider = [&](LevelForm form) {
        auto code = levels_encode(k.data(), n, form);
        if (best.empty() || code.size() < best.size()) best = std::move(code);
    };
    if (o.coder != Coder::paper) consider(LevelForm::adaptive);
    if (o.coder == Coder::paper || (sum <= kUnaryLimit * n && (n < 256 || paper_bits(n, zeros, sum) < 8.0 * static_cast<double>(best.size()) + 16)))
        consider(LevelForm::paper);
    if (best.size() > 4 * n) return {0, norm, 0};
    std::memcpy(out, &scale, 4);
    if (!best.empty()) std::memcpy(out + 4, best.data(), best.size());
    return {4 + best.size(), outcome.norm, outcome.error};
}

template <bool add>
bool decode_any(const std::uint8_t* data, std::size_t size, std::size_t n, float weight, float* out) {
    if (size < 4) return false;
    std::uint32_t word;
    std::memcpy(&word, data, 4);
    const Into to{out, n, weight, add};
    if (word == kSegments) return decode_segments(data + 4, size - 4, to);
    if (word == kNotFinite || word == kAllZero) {
        if (size != 4) return false;
        if (word == kNotFinite) std::fill(out, out + n, std::numeric_limits<float>::quiet_NaN());
        else if (!add) std::fill(out, out + n, 0.0f);
        return true;
    }
    float scale;
    std::memcpy(&scale, &word, 4);
    if (!(scale > 0 && scale <= FLT_MAX)) return false;
    std::vector<std::int32_t> k(n);
    if (!levels_decode(data + 4, size - 4, k.data(), n)) return false;
    for (std::size_t i = 0; i < n; ++i) to.put(i, detail::limited(static_cast<float>(k[i]) * scale));
    return true;
}

}  // namespace

std::size_t max_bytes(std::size_t n) {
    const Segments segments{n};
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
        decode_add(out, outcome.bytes, n, -1.0f, o.left);
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

bool decode(const std::uint8_t* data, std::size_t size, std::size_t n, float* out) { return decode_any<false>(data, size, n, 1.0f, out); }
bool decode_add(const std::uint8_t* data, std::size_t size, std::size_t n, float weight, float* out) {
    return decode_any<true>(data, size, n, weight, out);
}

Sampled sample(const float* x, std::size_t n, float inverse, std::size_t stride, const float* carry) {
    std::vector<double> errors, norms;
    double dots[kScaleBlock / kSumChunk], energies[kScaleBlock / kSumChunk], squares[kScaleBlock / kSumChunk];
    std::size_t chunks = 0;
    std::uint8_t k[kSumChunk];
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < n; i += kSumChunk * stride) {
        double lanes[96] = {};
        float sum[kSumChunk];
        const std::size_t length = std::min(kSumChunk, n - i), later = i + kSumChunk * stride;
        if (carry) add(x + i, carry + i, length, sum);
        ops().exact(carry ? sum : x + i, length, inverse, reinterpret_cast<const char*>(x + later), k, lanes, top);
        dots[chunks] = fold(lanes, 32);
        energies[chunks] = fold(lanes + 32, 32);
        squares[chunks++] = fold(lanes + 64, 32);
        if (later < n && later / kScaleBlock == i / kScaleBlock) continue;
        const double dot = fold(dots, chunks), energy = fold(energies, chunks), norm = fold(squares, chunks);
        errors.push_back(energy > 0 ? norm - dot / energy * dot : norm);
        norms.push_back(norm);
        chunks = 0;
    }
    return {fold(errors.data(), errors.size()), fold(norms.data(), norms.size())};
}

}  // namespace tersegrad::dither
