// From floats to segments of a Sparse Dithering message.
#include <algorithm>
#include <cmath>
#include <limits>

#include "dither_lower.hpp"
#include "dither_segments.hpp"
#include "tersegrad/planar.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::dither {
namespace {

std::size_t write_varint(std::uint8_t* out, std::size_t value) {
    std::size_t n = 0;
    for (; value >= 128; value >>= 7) out[n++] = static_cast<std::uint8_t>(value | 128);
    out[n++] = static_cast<std::uint8_t>(value);
    return n;
}

// The largest level that gets a symbol of its own: all levels if few are large, else the tail is escaped.
int choose_window(const std::uint8_t* k, std::size_t n, std::uint32_t top) {
    if (top <= 15) return static_cast<int>(top);
    if (ops().above(k, n, 15) <= n / 512) return 15;
    if (top <= 31) return static_cast<int>(top);
    if (ops().above(k, n, 31) <= n / 512) return 31;
    return static_cast<int>(std::min<std::uint32_t>(top, 127));
}

// Levels as bytes with the bias; returns the largest magnitude. Unsigned comparisons, which every instruction set has.
std::uint32_t bias_levels(const std::int8_t* __restrict levels, std::size_t n, std::uint8_t* __restrict k) {
    std::uint8_t low = 255, high = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const auto u = static_cast<std::uint8_t>(levels[i] ^ 0x80);
        low = std::min(low, u);
        high = std::max(high, u);
        k[i] = static_cast<std::uint8_t>(u - 0x80 + kBias);
    }
    return static_cast<std::uint32_t>(std::max(high - 0x80, 0x80 - low));
}

// Which symbols stand for the levels k, the largest of which is `top`: first .. first + 2 window. Moves k where the bias cannot stay.
struct Alphabet {
    int window, first;
};
Alphabet settle(std::uint8_t* k, std::size_t n, std::uint32_t top) {
    const int window = choose_window(k, n, top);
    if (top > kBias) ops().shift(k, n, window);
    return {window, top > kBias ? 0 : kBias - window};
}

struct Piece {
    const std::uint8_t* data = nullptr;
    std::size_t size = 0;
};

// A segment on its way into the message. Coded: kind, window, length of the escapes, scales, classes if any, and the tables of the symbols;
// the words of the symbols; the escapes.
struct Segment {
    Kind kind = raw;
    Piece head, body, tail;

    std::size_t bytes() const { return head.size + body.size + tail.size; }
    void write(std::uint8_t* out) const {
        for (const Piece& piece : {head, body, tail}) {
            if (piece.size) std::memcpy(out, piece.data, piece.size);
            out += piece.size;
        }
    }
};

// Codes segments one after the other; each stays in here until its place in the message is known.
class SegmentEncoder {
public:
    SegmentEncoder(const Options& options, std::size_t longest)
        : options_(options), levels_(Workspace::of_thread().levels), words_(Workspace::of_thread().words), head_(Workspace::of_thread().head),
          sum_(Workspace::of_thread().sum), contexts_(Workspace::of_thread().contexts) {
        levels_.fit(longest + 64);
        words_.fit(rans::scratch_bytes(longest));
        if (options.rows.pieces) contexts_.fit(longest + 64);
        if (options.carry) sum_.fit(4 * std::min(longest, kScaleBlock));
    }

    // False: not finite. `next`: the coordinates that will be coded after these.
    bool encode(const float* x, std::size_t n, std::uint64_t start, rans::Ahead next) {
        x_ = x, n_ = n;
        carry_ = options_.carry ? options_.carry + start : nullptr;
        float* const left = options_.left ? options_.left + start : nullptr;
        norm = error = 0;
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
            if (left && !options_.rdo) leave(here, length, start + at, blocks[b], k + at, left + at);
            norms[b] = blocks[b].norm;
            errors[b] = blocks[b].error;
            top = std::max(top, blocks[b].top);
        }
        norm = fold(norms, scales);
        error = fold(errors, scales);
        segment_ = {};
        if (top == 0) {
            segment_.kind = zero;
            if (left && options_.rdo) leave_lowered(blocks, start, top, left);
            return true;
        }
        if (top < kTooLarge) code(blocks, start, top, next);
        if (options_.rdo && segment_.kind != raw) {
            for (std::size_t b = 0; b < scales; ++b) errors[b] = blocks[b].error;
            error = fold(errors, scales);
            if (left) leave_lowered(blocks, start, top, left);
        }
        if (segment_.kind == raw) {
            error = 0;
            if (left) std::memset(left, 0, 4 * n);
        }
        return true;
    }

    std::size_t bytes() const { return segment_.kind == zero ? 1 : segment_.kind == raw ? raw_bytes(n_) : segment_.bytes(); }
    void write(std::uint8_t* out) const {
        out[0] = segment_.kind;
        if (segment_.kind == coded || segment_.kind == classed) {
            segment_.write(out);
        } else if (segment_.kind == raw && !carry_) {
            std::memcpy(out + 1, x_, 4 * n_);
        } else if (segment_.kind == raw) {
            for (std::size_t i = 0; i < n_; ++i) {
                const float v = value(i);
                std::memcpy(out + 1 + 4 * i, &v, 4);
            }
        }
    }

    double norm = 0, error = 0;

private:
    // Makes a coded segment of the levels, or leaves it raw where that is shorter.
    void code(Block* blocks, std::uint64_t start, std::uint32_t top, rans::Ahead next) {
        std::uint8_t* const k = levels_.data.get();
        const auto [window, first] = settle(k, n_, top);
        window_ = window;
        escapes_.clear();
        if (top > static_cast<std::uint32_t>(window)) escape(blocks, start, window);
        const int alphabet = 2 * window + 1;
        const std::vector<classes::Region> regions = classes::cut(options_.rows, start, start + n_);
        const bool several = classes::choose(k, n_, first + window, window, regions, contexts_.data.get(), chosen_);
        std::uint64_t counts[256];
        if (!several) rans::histogram_dense(k, n_, first, alphabet, counts);
        if (options_.rdo && !lower(blocks, first, window, several, counts)) {
            segment_.kind = zero;
            return;
        }
        head_.fit(16 + 4 * kMostScales + (several ? chosen_.bytes.size() : 0) + rans::most_head(n_, several ? classes::kClasses : 1));
        std::uint8_t* const head = head_.data.get();
        std::size_t size = 0;
        head[size++] = several ? classed : coded;
        head[size++] = static_cast<std::uint8_t>(window);
        size += write_varint(head + size, escapes_.size());
        for (std::size_t b = 0; b < scale_count(n_); ++b, size += 4) std::memcpy(head + size, &blocks[b].scale, 4);
        rans::TwoPieces message;
        if (several) {
            std::memcpy(head + size, chosen_.bytes.data(), chosen_.bytes.size());
            size += chosen_.bytes.size();
            const int chunk = options_.chunk != kAutoChunk ? options_.chunk : 2 * chosen_.bits < static_cast<double>(n_) ? rans::kLongestChunk : kUsualChunk;
            message = rans::encode_in_pieces(k, n_, first, alphabet, {contexts_.data.get(), false}, chosen_.mask, chosen_.counts.data(),
                                             chunk, head + size, words_.data.get(), words_.size, next);
        } else {
            message = rans::encode_in_pieces(k, n_, first, alphabet, {}, 1, counts + first, options_.chunk == kAutoChunk ? kUsualChunk : options_.chunk,
                                             head + size, words_.data.get(), words_.size, next);
        }
        const auto later = static_cast<const char*>(next.end) - static_cast<const char*>(next.begin);
        fetched_ = std::min<std::size_t>(128 * (n_ / rans::kLanes), static_cast<std::size_t>(later));
        const Segment made{several ? classed : coded, {head, size + message.head}, {message.body, message.size}, {escapes_.data(), escapes_.size()}};
        if (made.bytes() <= raw_bytes(n_)) segment_ = made;
    }

    float value(std::size_t i) const { return carry_ ? x_[i] + carry_[i] : x_[i]; }

    // What the decoder of a block that was just rounded will not give back.
    void leave(const float* x, std::size_t n, std::uint64_t start, const Block& b, const std::uint8_t* k, float* left) const {
        ops().leave(k, n, b.scale, x, left);
        if (b.top < 127) return;
        for (std::size_t i = 0; i < n; ++i)  // those levels do not fit into bytes
            if (detail::magnitude(detail::unbiased(k[i])) >= 127)
                left[i] = x[i] - detail::limited(static_cast<float>(level(x[i], b.inverse, options_.draws, start + i)) * b.scale);
    }

    // Levels that take fewer bits, and the counts of their symbols; false where none but zeros are left.
    bool lower(Block* blocks, int first, int window, bool several, std::uint64_t* counts) {
        std::uint8_t* const k = levels_.data.get();
        const int alphabet = 2 * window + 1;
        const std::uint8_t* const contexts = several ? contexts_.data.get() : nullptr;
        const detail::Least least = several ? thresholds(chosen_.counts.data(), window, chosen_.mask) : thresholds(counts + first, window, 1);
        if (several) chosen_.count(k, contexts, n_, first, alphabet, -1);
        bool any = false;
        for (std::size_t b = 0; b < scale_count(n_); ++b) {
            const std::size_t at = b * kScaleBlock;
            lower_block(part(b), std::min(kScaleBlock, n_ - at), contexts ? contexts + at : nullptr, least, first + window, k + at, blocks[b]);
            any |= blocks[b].energy > 0;
        }
        if (several) chosen_.count(k, contexts, n_, first, alphabet, 1);
        else rans::histogram_dense(k, n_, first, alphabet, counts);
        return any;
    }

    // The coordinates of a block, with what is carried.
    const float* part(std::size_t block) const {
        const std::size_t at = block * kScaleBlock;
        if (!carry_) return x_ + at;
        float* const sum = reinterpret_cast<float*>(sum_.data.get());
        add(x_ + at, carry_ + at, std::min(kScaleBlock, n_ - at), sum);
        return sum;
    }

    // What the decoder will not give back once levels were lowered. Those beyond the window are told in full.
    void leave_lowered(const Block* blocks, std::uint64_t start, std::uint32_t top, float* left) const {
        const std::uint8_t* const k = levels_.data.get();
        const int window = window_, center = top > kBias ? window : kBias;
        for (std::size_t b = 0; b < scale_count(n_); ++b) {
            const float* const x = part(b);
            const std::size_t at = b * kScaleBlock, length = std::min(kScaleBlock, n_ - at);
            for (std::size_t i = 0; i < length; ++i) {
                std::int32_t here = k[at + i] - center;
                if (top > static_cast<std::uint32_t>(window) && (here == window || here == -window)) here = level(x[i], blocks[b].inverse, nullptr, start + at + i);
                left[at + i] = x[i] - detail::limited(static_cast<float>(here) * blocks[b].scale);
            }
        }
    }

    // The levels beyond the window, as planar gamma codes.
    void escape(const Block* blocks, std::uint64_t start, int window) {
        std::vector<std::int64_t> sizes;
        at_ends(levels_.data.get(), n_, window, [&](std::size_t i) {
            const std::int32_t k = level(value(i), blocks[i / kScaleBlock].inverse, options_.draws, start + i);
            sizes.push_back(static_cast<std::int64_t>(detail::magnitude(k)) - window + 1);
            return true;
        });
        escapes_.resize(static_cast<std::size_t>(planar::gamma_bytes(sizes.data(), sizes.size())));
        planar::gamma_encode(sizes.data(), sizes.size(), escapes_.data());
    }

    Options options_;
    Bytes &levels_, &words_, &head_, &sum_, &contexts_;
    classes::Chosen chosen_;
    std::size_t n_ = 0, fetched_ = 0;
    int window_ = 0;
    const float *x_ = nullptr, *carry_ = nullptr;
    std::vector<std::uint8_t> escapes_;
    Segment segment_;
};

}  // namespace

// Every thread writes a run of segments where the longest possible ones before it would end; then the gaps are closed.
Outcome encode_segments(const float* x, std::size_t n, const Options& o, std::uint8_t* out) {
    const Segments segments(n);
    const std::size_t count = segments.count(), table = segments.table_bytes();
    std::vector<double> norms(count), errors(count);
    std::vector<std::size_t> sizes(count), runs(count + 1);  // runs[s]: where a run that starts with segment s was written
    std::atomic<bool> finite{true};
    parallel_for(count, 1, 1, [&](std::size_t first, std::size_t last) {
        SegmentEncoder encoder(o, std::min(n, kLongestSegment));
        std::size_t at = runs[first] = table + first * raw_bytes(kSegment);
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

bool may_have_classes(const std::int8_t* levels, std::size_t n, const classes::Rows& rows, std::size_t begin) {
    const Segments segments(n);
    std::atomic<bool> found{false};
    parallel_for(segments.count(), 1, 1, [&](std::size_t first, std::size_t last) {
        Workspace& kept = Workspace::of_thread();
        kept.levels.fit(std::min(n, kLongestSegment) + 64);
        kept.contexts.fit(std::min(n, kLongestSegment) + 64);
        std::uint8_t* const k = kept.levels.data.get();
        classes::Chosen chosen;
        for (std::size_t s = first; s < last && !found.load(std::memory_order_relaxed); ++s) {
            const std::size_t start = segments.start(s), length = segments.length(s);
            const std::uint32_t top = bias_levels(levels + start, length, k);
            if (!top) continue;
            const auto [window, lowest] = settle(k, length, top);
            if (classes::choose(k, length, lowest + window, window, classes::cut(rows, begin + start, begin + start + length), kept.contexts.data.get(), chosen)) found = true;
        }
    });
    return found;
}

}  // namespace tersegrad::dither
