// From floats to trellis-coded messages.
#include <atomic>
#include <limits>
#include <memory>

#include "dither_round.hpp"
#include "tersegrad/planar.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"
#include "trellis_block.hpp"

namespace tersegrad::trellis {

const Implementation& ops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return avx512;
    if (isa() == Isa::avx2) return avx2;
#endif
    return portable;
}

namespace {

std::size_t lanes_of(std::size_t n) { return rans::Layout(n, 2, rans::kLongestChunk).lanes; }

// Memory that a thread keeps: fresh pages would cost more than small messages.
struct Workspace {
    std::vector<std::uint16_t> draws;
    Bytes low, rows, labels, kept_labels, planes, symbols, tables, words, message;
    static Workspace& of_thread() {
        thread_local Workspace kept;
        return kept;
    }
};

class SegmentEncoder {
public:
    SegmentEncoder(const Options& options)
        : options_(options), work_(Workspace::of_thread()), which_(code_of(options.states)), run_(std::min(kLongestRun, options.chunk)) {
        const float inverse = 1.0f / options.step;
        scale_ = inverse * (options.dither ? static_cast<float>(1 << kUnit) : 32.0f);
        limit_ = options.dither ? kFarDithered * static_cast<float>(1 << kUnit) : kFar * 32.0f;
    }

    double norm = 0, error = 0;
    bool finite() const { return std::isfinite(norm); }

    // Chooses the integers of a segment; `norm` and `error` are then known.
    void choose(const float* x, std::size_t n, std::uint64_t start) {
        x_ = x, n_ = n, start_ = start;
        kind_ = zero;
        error = 0;
        window_ = kUsual;
        top_ = 0;
        prepare();
        const std::size_t parts = (n + kSumChunk - 1) / kSumChunk;
        std::vector<double> norms(parts), dots(parts), energies(parts);
        bool far = false;
        for (std::size_t at = 0; at < n; at += longest_) {
            const std::size_t length = std::min(longest_, n - at);
            const float top = convert(at, length, &norms[at / kSumChunk]);
            // The largest of numbers does not show a NaN; the sum of squares does.
            for (std::size_t part = at / kSumChunk; part * kSumChunk < at + length; ++part) far |= !std::isfinite(norms[part]);
            far |= !(top < limit_);
            if (far) continue;
            label(at, length);
            place(at, length, top < kSmall, &dots[at / kSumChunk], &energies[at / kSumChunk]);
        }
        norm = dither::fold(norms.data(), parts);
        if (!finite() || norm == 0) return;
        kind_ = far ? raw : coded;
        if (far) return;
        sent_ = options_.step;
        if (options_.dither) return;
        const double dot = dither::fold(dots.data(), parts), energy = dither::fold(energies.data(), parts);
        if (energy == 0) {
            kind_ = zero;
            error = norm;
            return;
        }
        sent_ = dither::usable_step(dot / energy);
        error = norm - 2 * static_cast<double>(sent_) * dot + static_cast<double>(sent_) * sent_ * energy;
    }

    // Writes the segment that was chosen last, at most raw_bytes; returns its length.
    std::size_t write(std::uint8_t* out) {
        if (kind_ == coded) {
            Bytes& message = work_.message;
            code(message);
            if (message.size() <= raw_bytes(n_)) {
                std::memcpy(out, message.data(), message.size());
                return message.size();
            }
            kind_ = raw;
            error = 0;
        }
        out[0] = kind_;
        if (kind_ != raw) return 1;
        std::memcpy(out + 1, x_, 4 * n_);
        return raw_bytes(n_);
    }

private:
    void prepare() {
        const std::size_t run = std::size_t{1} << run_;
        lanes_ = lanes_of(n_);
        longest_ = n_ > run ? run : n_;
        const std::size_t rows = (longest_ + lanes_ - 1) / lanes_;
        fit(work_.low, longest_ + kPitch);
        fit(work_.rows, rows * kPitch);
        fit(work_.labels, rows * kPitch);
        fit(work_.symbols, n_);
        if (!options_.dither) return;
        if (work_.draws.size() < n_) work_.draws.resize(n_);
        fit(work_.kept_labels, n_);
        fit(work_.tables, n_);
        random_u16(options_.dither->draws, start_, n_, work_.draws.data());
    }

    Grid grid(std::size_t at) const {
        if (!options_.dither) return {scale_, 1, nullptr};
        return {scale_, sign_of(*options_.dither, start_ + at), work_.draws.data() + at};
    }
    static Grid later(Grid g, std::size_t i) { return {g.scale, g.sign, g.draws ? g.draws + i : nullptr}; }

    float convert(std::size_t at, std::size_t length, double* norms) {
        float top = 0;
        const Grid g = grid(at);
        for (std::size_t i = 0; i < length; i += kSumChunk) {
            const std::size_t m = std::min(kSumChunk, length - i);
            top = std::max(top, ops().convert(x_ + at + i, m, later(g, i), work_.low.data() + i, norms + i / kSumChunk));
        }
        return top;
    }

    // Labels of a run that was converted.
    void label(std::size_t at, std::size_t length) {
        const std::size_t rows = (length + lanes_ - 1) / lanes_, last = length - (rows - 1) * lanes_;
        std::uint8_t* low = work_.low.data();
        std::memset(low + length, 0, kPitch);
        if (lanes_ < rans::kLanes) {
            for (std::size_t t = 0; t < rows; ++t) {
                std::memset(work_.rows.data() + t * kPitch, 0, kPitch);
                std::memcpy(work_.rows.data() + t * kPitch, low + t * lanes_, std::min(lanes_, length - t * lanes_));
            }
            low = work_.rows.data();
        }
        std::uint8_t* const labels = work_.labels.data();
        ops().label[which_](low, rows, lanes_, last, labels, work_.planes);
        if (lanes_ < rans::kLanes)
            for (std::size_t t = 0; t < rows; ++t) std::memmove(labels + t * lanes_, labels + t * kPitch, lanes_);
        if (options_.dither) std::memcpy(work_.kept_labels.data() + at, labels, length);
    }

    // The symbols of a run that has labels; sums of every chunk.
    void place(std::size_t at, std::size_t length, bool small, double* dots, double* energies) {
        const Grid g = grid(at);
        for (std::size_t i = 0; i < length; i += kSumChunk) {
            const std::size_t m = std::min(kSumChunk, length - i);
            std::uint8_t* const symbols = work_.symbols.data() + at + i;
            if (options_.dither) {
                ops().place_dithered(x_ + at + i, work_.kept_labels.data() + at + i, m, later(g, i), window_, class_bits(n_), symbols,
                                     work_.tables.data() + at + i, top_);
                continue;
            }
            Sums sums;
            ops().place(x_ + at + i, work_.labels.data() + i, m, g, small, window_, symbols, sums);
            top_ = std::max(top_, sums.top);
            dots[i / kSumChunk] = sums.dot;
            energies[i / kSumChunk] = sums.energy;
        }
    }

    // All symbols again, in another window.
    void place_again(int window) {
        window_ = window;
        std::vector<double> unused(longest_ / kSumChunk + 1);
        for (std::size_t at = 0; at < n_; at += longest_) {
            const std::size_t length = std::min(longest_, n_ - at);
            if (!options_.dither)
                for (std::size_t i = 0; i < length; ++i) work_.labels[i] = work_.symbols[at + i] & 3;
            place(at, length, false, unused.data(), unused.data());
        }
    }

    // Symbols wait doubled, with their table in the lowest bit, unless they are dithered.
    int doubling() const { return options_.dither ? 1 : 2; }
    bool at_end(std::uint8_t s) const { return s < 2 * doubling() || s >= (2 * window_ - 2) * doubling(); }
    std::size_t ends() const {
        std::size_t count = 0;
        for (std::size_t i = 0; i < n_; ++i) count += at_end(work_.symbols[i]);
        return count;
    }

    // Half the number of symbols: all indices if few are large, else the tails are escaped.
    void choose_window() {
        const std::uint32_t size = (options_.dither ? top_ : top_ >> 1) + 1;
        const int most = static_cast<int>(std::min<std::uint32_t>(std::max((size + 1) & ~1u, 2u), 1u << 30));
        escaped_ = false;
        for (const int limit : {kUsual, 2 * kUsual}) {
            if (limit > window_) place_again(limit);
            if (most <= limit) return narrow(most);
            if (ends() <= n_ / 512) {
                escaped_ = true;
                return;
            }
        }
        place_again(std::min(most, kWidest));
        escaped_ = most > kWidest;
    }

    void narrow(int window) {
        if (window != window_) ops().shift(work_.symbols.data(), n_, static_cast<std::uint8_t>((window_ - window) * doubling()));
        window_ = window;
    }

    // By how many pairs the indices at either end of the window lie beyond it, as planar gamma codes of one more.
    Bytes escapes() {
        if (!escaped_) return {};
        std::vector<std::int64_t> values;
        for (std::size_t at = 0; at < n_; at += longest_) {
            const Grid g = grid(at);
            for (std::size_t i = at; i < std::min(at + longest_, n_); ++i) {
                const std::uint8_t s = work_.symbols[i];
                if (!at_end(s)) continue;
                const std::int32_t y = rounded(x_[i] * scale_);
                std::int32_t a = 0, kept = 0;
                if (options_.dither) {
                    const std::int32_t u = work_.draws[i] & 0x7fff, v = integer_of(with_dither(y, g.sign, work_.draws[i]), work_.kept_labels[i]);
                    const std::int32_t t = rest_of(v & 1, u), m = (v * (1 << kUnit) - u - t) >> (kUnit + 1);
                    a = t >= 0 ? m : -m;
                    kept = s - window_;
                } else {
                    a = integer_of(y, s & 3) >> 1;
                    kept = (s >> 1) - window_;
                }
                values.push_back(1 + std::abs(a - kept) / 2);
            }
        }
        Bytes out(static_cast<std::size_t>(planar::gamma_bytes(values.data(), values.size())));
        planar::gamma_encode(values.data(), values.size(), out.data());
        return out;
    }

    void code(Bytes& out) {
        choose_window();
        const Bytes tail = escapes();
        out.assign({coded, static_cast<std::uint8_t>(window_), static_cast<std::uint8_t>(run_)});
        if (options_.dither) out.push_back(static_cast<std::uint8_t>(class_bits(n_)));
        std::size_t left = tail.size();
        for (; left >= 128; left >>= 7) out.push_back(static_cast<std::uint8_t>(left | 128));
        out.push_back(static_cast<std::uint8_t>(left));
        const auto* scale = reinterpret_cast<const std::uint8_t*>(&sent_);
        out.insert(out.end(), scale, scale + 4);
        if (options_.dither) {
            const int tables = 1 << class_bits(n_);
            const std::size_t begin = out.size();
            out.resize(begin + rans::max_message(n_, 2 * window_));
            out.resize(begin + rans::encode_message(work_.symbols.data(), n_, 2 * window_, {tables > 1 ? work_.tables.data() : nullptr, false}, tables,
                                                    true, options_.chunk, out.data() + begin));
        } else {
            Coder(work_.symbols.data(), n_, window_, options_.chunk).write(out, work_.words);
        }
        out.insert(out.end(), tail.begin(), tail.end());
    }

    Options options_;
    Workspace& work_;
    int which_, run_, window_ = kUsual;
    float scale_ = 0, limit_ = 0, sent_ = 0;
    const float* x_ = nullptr;
    std::size_t n_ = 0, lanes_ = 0, longest_ = 0;
    std::uint64_t start_ = 0;
    std::uint32_t top_ = 0;
    bool escaped_ = false;
    Kind kind_ = zero;
};

}  // namespace

std::size_t max_bytes(std::size_t n) {
    const Segments segments(n);
    return 1 + segments.table_bytes() + segments.count() + 4 * n;
}

// Every thread writes a run of segments where the longest possible ones before it would end; then the gaps are closed.
Outcome encode(const float* x, std::size_t n, const Options& o, std::uint8_t* out) {
    const Segments segments(n);
    const std::size_t count = segments.count(), table = 1 + segments.table_bytes();
    std::vector<double> norms(count), errors(count);
    std::vector<std::size_t> sizes(count), runs(count + 1);  // runs[s]: where a run that starts with segment s was written
    std::atomic<bool> finite{true};
    parallel_for(count, 1, 1, [&](std::size_t first, std::size_t last) {
        SegmentEncoder encoder(o);
        std::size_t at = runs[first] = table + first * raw_bytes(kSegment);
        for (std::size_t s = first; s < last && finite.load(std::memory_order_relaxed); ++s) {
            encoder.choose(x + segments.start(s), segments.length(s), segments.start(s));
            if (!encoder.finite()) {
                finite = false;
                return;
            }
            at += sizes[s] = encoder.write(out + at);
            norms[s] = encoder.norm;
            errors[s] = encoder.error;
        }
    });
    if (!finite) {
        out[0] = not_finite;
        return {1, std::numeric_limits<double>::infinity(), 0};
    }
    const double norm = dither::fold(norms.data(), count), error = dither::fold(errors.data(), count);
    if (std::all_of(sizes.begin(), sizes.end(), [](std::size_t size) { return size == 1; })) {
        out[0] = all_zero;
        return {1, norm, error};
    }
    out[0] = normal;
    std::size_t end = table;
    for (std::size_t s = 0; s < count;) {
        const std::size_t from = runs[s];
        std::size_t length = 0;
        do {
            const auto size = static_cast<std::uint32_t>(sizes[s]);
            if (count > 1) std::memcpy(out + 1 + 4 * s, &size, 4);
            length += sizes[s++];
        } while (s < count && !runs[s]);
        if (from != end) std::memmove(out + end, out + from, length);
        end += length;
    }
    return {end, norm, error};
}

Outcome measure(const float* x, std::size_t n, float step, int states) {
    const Segments segments(n);
    const std::size_t count = segments.count();
    std::vector<double> norms(count), errors(count);
    parallel_for(count, 1, 1, [&](std::size_t first, std::size_t last) {
        SegmentEncoder encoder({step, states, rans::kLongestChunk, nullptr});
        for (std::size_t s = first; s < last; ++s) {
            encoder.choose(x + segments.start(s), segments.length(s), segments.start(s));
            norms[s] = encoder.norm;
            errors[s] = encoder.finite() ? encoder.error : 0;
        }
    });
    return {0, dither::fold(norms.data(), count), dither::fold(errors.data(), count)};
}

}  // namespace tersegrad::trellis
