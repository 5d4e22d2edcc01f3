// From floats to trellis-coded messages.
#include <atomic>
#include <limits>
#include <memory>

#include "dither_lower.hpp"
#include "dither_round.hpp"
#include "tersegrad/planar.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"
#include "trellis_block.hpp"
#include "trellis_rated.hpp"

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
    Bytes low, rows, labels, kept_labels, planes, symbols, tables, words, message, levels, numbers, adds;
    static Workspace& of_thread() {
        thread_local Workspace kept;
        return kept;
    }
};

class SegmentEncoder {
public:
    SegmentEncoder(const Options& options)
        : options_(options), work_(Workspace::of_thread()), which_(code_of(options.states)), run_(std::min(kLongestRun, usual_chunk())) {
        const float inverse = 1.0f / options.step;
        scale_ = inverse * (options.dither ? static_cast<float>(1 << kUnit) : 32.0f);
        limit_ = options.dither ? kFarDithered * static_cast<float>(1 << kUnit) : kFar * 32.0f;
    }

    double norm = 0, error = 0;
    bool finite() const { return std::isfinite(norm); }

    // Chooses the integers of a segment; `norm` and `error` are then known. `following` more floats stand behind it.
    void choose(const float* x, std::size_t n, std::uint64_t start, std::size_t following) {
        x_ = x, n_ = n, start_ = start, following_ = following;
        kind_ = zero;
        error = 0;
        window_ = kUsual;
        top_ = 0;
        prepare();
        const std::size_t parts = (n + kSumChunk - 1) / kSumChunk;
        std::vector<double> norms(parts);
        for (auto& sums : {&dots_, &energies_, &still_dots_, &still_energies_}) sums->assign(parts, 0.0);
        bool far = false;
        float top = 0;
        // Classes are known only once the whole segment was seen. Where the last one had none, none are expected, and runs are finished while
        // they are in the cache. Bits are known only then too.
        const bool waits = waits_ = options_.rdo || (looks() && several_);
        several_ = false;
        for (std::size_t at = 0; at < n; at += longest_) {
            const std::size_t length = std::min(longest_, n - at);
            double* const here = &norms[at / kSumChunk];
            // Squares are added up where the symbols are found, which needs the same conversions, if the last run was near and this one is.
            bool later = near_ && !far && !waits && !options_.dither;
            const float highest = convert(at, length, later ? nullptr : here);
            near_ = highest < kNear;
            if (later && !near_) convert(at, length, here), later = false;
            far |= !(highest < limit_);
            // The largest of numbers does not show a NaN; the sum of squares does.
            const auto look = [&] { far |= !std::all_of(here, here + (length + kSumChunk - 1) / kSumChunk, [](double v) { return std::isfinite(v); }); };
            if (!later) look();
            top = std::max(top, highest);
            if (!far && !waits) finish(at, length, highest, later ? here : nullptr);
            if (later) look();
        }
        norm = dither::fold(norms.data(), parts);
        if (!finite() || norm == 0) return;
        kind_ = far ? raw : coded;
        if (far) return;
        if (looks()) find_classes(top);
        if (waits || several_) {
            top_ = 0;
            if (options_.rdo) choose_by_bits();
            for (std::size_t at = 0; at < n; at += longest_) finish(at, std::min(longest_, n - at), top, nullptr);
        }
        scales_[0] = options_.step;
        if (options_.dither) return;
        error = norm;
        least_squares(dots_, energies_, scales_[0]);
        least_squares(still_dots_, still_energies_, scales_[1]);
        if (scales_[0] == 0 && scales_[1] == 0) kind_ = zero;
    }

    // Writes the segment that was chosen last, at most raw_bytes; returns its length.
    std::size_t write(std::uint8_t* out) {
        if (kind_ == coded) {
            Bytes& message = work_.message;
            const Bytes tail = code(message);
            const std::size_t size = message.size() + left_ + tail.size();
            if (size <= raw_bytes(n_)) {
                std::memcpy(out, message.data(), message.size());
                if (left_) std::memcpy(out + message.size(), work_.words.data() + work_.words.size() - left_, left_);
                if (!tail.empty()) std::memcpy(out + size - tail.size(), tail.data(), tail.size());
                return size;
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
    int usual_chunk() const { return options_.chunk == kAutoChunk ? dither::kUsualChunk : options_.chunk; }
    bool looks() const { return options_.rows.pieces != 0; }

    void prepare() {
        const std::size_t run = std::size_t{1} << run_;
        lanes_ = lanes_of(n_);
        longest_ = n_ > run ? run : n_;
        const std::size_t rows = (longest_ + lanes_ - 1) / lanes_;
        fit(work_.low, n_ + kPitch);
        if (!options_.dither || looks()) fit(work_.levels, n_);
        if (looks()) {
            fit(work_.numbers, n_ + kPitch);
            fit(work_.adds, n_);
        }
        fit(work_.rows, rows * kPitch);
        fit(work_.labels, rows * kPitch);
        fit(work_.symbols, n_);
        if (options_.rdo) fit(work_.kept_labels, n_);
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

    // Where the bytes of a run wait for their labels: in the place of the last run's, so that they stay in the cache, if no others wait.
    std::uint8_t* low(std::size_t at) { return work_.low.data() + (waits_ ? at : 0); }

    // Of every chunk the sum of squares, unless `norms` is null.
    float convert(std::size_t at, std::size_t length, double* norms) {
        float top = 0;
        const Grid g = grid(at);
        for (std::size_t i = 0; i < length; i += kSumChunk) {
            const std::size_t m = std::min(kSumChunk, length - i);
            std::uint8_t* const levels = !options_.dither || looks() ? work_.levels.data() + at + i : nullptr;
            top = std::max(top, ops().convert(x_ + at + i, m, later(g, i), low(at) + i, levels, norms ? norms + i / kSumChunk : nullptr));
        }
        return top;
    }

    // The classes of a segment that was converted, and in which of them coordinates are still. `top`: the largest |x| times the scale.
    void find_classes(float top) {
        const int bits = options_.dither ? kDitheredLevelBits : kLevelBits;
        const int window = std::min((rounded(top) + (1 << (bits - 1))) >> bits, kHighest);
        const auto regions = classes::cut(options_.rows, start_, start_ + n_);
        std::uint8_t* const numbers = work_.numbers.data();
        several_ = window > 0 && classes::choose(work_.levels.data(), n_, kCenter, window, regions, numbers, chosen_);
        if (!several_) return;
        if (!waits_) {
            waits_ = true;
            for (std::size_t at = 0; at < n_; at += longest_) convert(at, std::min(longest_, n_ - at), nullptr);
        }
        std::uint8_t number_of[classes::kClasses] = {}, add_of[classes::kClasses] = {};
        const unsigned stays = options_.dither ? 0 : still_classes();
        still_.clear();
        moving_ = 0;
        for (unsigned c = 0; c < classes::kClasses; ++c) {
            if (!(chosen_.mask >> c & 1)) continue;
            const auto row = chosen_.counts.data() + still_.size() * static_cast<std::size_t>(2 * window + 1);
            number_of[c] = static_cast<std::uint8_t>(still_.size());
            add_of[c] = static_cast<std::uint8_t>(stays >> c & 1 ? added(row, window) : 0);
            still_.push_back(add_of[c] != 0);
            moving_ |= static_cast<unsigned>(add_of[c] == 0) << c;
        }
        ops().translate(numbers, n_, add_of, work_.adds.data());
        ops().translate(numbers, n_, number_of, numbers);
        const std::uint8_t* __restrict adds = work_.adds.data();
        std::uint8_t* __restrict lows = work_.low.data();
        // A local number: stores to bytes might change a member.
        for (std::size_t i = 0, n = n_; i < n; ++i) lows[i] = static_cast<std::uint8_t>(lows[i] | (adds[i] ? kStill : 0));
    }

    // The classes with more than a quarter of their coordinates within a quarter of a step from zero, or more than seven eighths of their levels
    // at zero, of those that were counted.
    unsigned still_classes() const {
        std::uint32_t all[classes::kClasses] = {}, near[classes::kClasses] = {}, zeros[classes::kClasses] = {};
        const std::uint8_t *const numbers = work_.numbers.data(), *const levels = work_.levels.data(), *const lows = work_.low.data();
        for (std::size_t at = 0; at < n_; at += classes::kBlock * (n_ < classes::kExact ? 1 : classes::kCounted))
            for (std::size_t i = at; i < std::min(n_, at + classes::kBlock); ++i) {
                const bool is_zero = levels[i] == kCenter;
                ++all[numbers[i]];
                zeros[numbers[i]] += is_zero;
                // The lowest seven bits of a number of -7 .. 7, whose level is zero.
                near[numbers[i]] += is_zero && ((lows[i] + 7) & 127) < 15;
            }
        unsigned mask = 0;
        for (int c = 0; c < classes::kClasses; ++c) mask |= static_cast<unsigned>(4 * near[c] > all[c] || 8 * zeros[c] > 7 * all[c]) << c;
        return mask;
    }

    // What rounding adds in a still class with these counts of levels: the spec tells why.
    int added(const std::uint64_t* counts, int window) const {
        const std::uint64_t zeros = counts[window], ones = counts[window - 1] + counts[window + 1];
        // Half a squared step for each bit, in sixteenths of a bit.
        if (options_.rdo) return 32 - (!ones ? 112 : 2 * zeros > ones ? std::min(dither::log2_sixteenths(2 * zeros, ones), 112) : 0) / 4;
        return 32 - 3 * (ones ? std::clamp(classes::log2_near(2 * zeros, ones), 0, 8) : 8);
    }

    // Labels of all runs, first of the nearest integers, then of some that take fewer bits.
    void choose_by_bits() {
        std::uint8_t* const labels = work_.kept_labels.data();
        for (std::size_t at = 0; at < n_; at += longest_) {
            label(at, std::min(longest_, n_ - at));
            std::memcpy(labels + at, work_.labels.data(), std::min(longest_, n_ - at));
        }
        const std::vector<std::uint8_t> one = {0};
        rate({x_, n_, lanes_, longest_, scale_, which_, several_ ? work_.numbers.data() : nullptr, several_ ? still_ : one}, labels);
    }

    // Labels and symbols of a run that was converted. `top`: no |x| times the scale is larger. `norms`: as in convert, but only of runs that are near.
    void finish(std::size_t at, std::size_t length, float top, double* norms) {
        if (options_.rdo) std::memcpy(work_.labels.data(), work_.kept_labels.data() + at, length);
        else label(at, length);
        place(at, length, top, norms);
    }

    // The scale that leaves the least error; 0 where all integers are.
    void least_squares(std::vector<double>& dots, std::vector<double>& energies, float& scale) {
        const double dot = dither::fold(dots.data(), dots.size()), energy = dither::fold(energies.data(), energies.size());
        scale = energy == 0 ? 0.0f : dither::usable_step(dot / energy);
        error = error - 2 * static_cast<double>(scale) * dot + static_cast<double>(scale) * scale * energy;
    }

    // The floats of the run that starts there, which will be read once that before it is finished.
    rans::Ahead next(std::size_t at) const { return {x_ + at, x_ + std::min(at + longest_, n_ + following_)}; }

    // Labels of a run that was converted.
    void label(std::size_t at, std::size_t length) {
        const std::size_t rows = (length + lanes_ - 1) / lanes_, last = length - (rows - 1) * lanes_;
        std::uint8_t* low = this->low(at);
        if (at + length == n_) std::memset(low + length, 0, kPitch);
        if (lanes_ < rans::kLanes) {
            for (std::size_t t = 0; t < rows; ++t) {
                std::memset(work_.rows.data() + t * kPitch, 0, kPitch);
                std::memcpy(work_.rows.data() + t * kPitch, low + t * lanes_, std::min(lanes_, length - t * lanes_));
            }
            low = work_.rows.data();
        }
        std::uint8_t* const labels = work_.labels.data();
        ops().label[which_](low, rows, lanes_, last, several_ && !options_.dither, labels, work_.planes, next(at + length));
        if (lanes_ < rans::kLanes)
            for (std::size_t t = 0; t < rows; ++t) std::memmove(labels + t * lanes_, labels + t * kPitch, lanes_);
        if (options_.dither) std::memcpy(work_.kept_labels.data() + at, labels, length);
    }

    // The symbols of a run that has labels, and sums of every chunk.
    void place(std::size_t at, std::size_t length, float top, double* norms) {
        const Grid g = grid(at);
        for (std::size_t i = 0; i < length; i += kSumChunk) {
            const std::size_t m = std::min(kSumChunk, length - i);
            std::uint8_t* const symbols = work_.symbols.data() + at + i;
            if (options_.dither) {
                ops().place_dithered(x_ + at + i, work_.kept_labels.data() + at + i, m, later(g, i), window_, several_ ? kMostBits : class_bits(n_),
                                     symbols, work_.tables.data() + at + i, top_);
                continue;
            }
            Sums sums;
            const std::uint8_t* const labels = work_.labels.data() + i;
            if (top < kNear && window_ == kUsual && !several_) ops().place_near(x_ + at + i, low(at) + i, work_.levels.data() + at + i, labels, m, symbols, sums, norms ? norms + i / kSumChunk : nullptr);
            else ops().place(x_ + at + i, labels, several_ ? work_.adds.data() + at + i : nullptr, m, g, top < kSmall, window_, symbols, sums);
            top_ = std::max(top_, sums.top);
            const std::size_t part = (at + i) / kSumChunk;
            dots_[part] = sums.dot[0], energies_[part] = sums.energy[0];
            still_dots_[part] = sums.dot[1], still_energies_[part] = sums.energy[1];
        }
    }

    // All symbols again, in another window.
    void place_again(int window) {
        window_ = window;
        for (std::size_t at = 0; at < n_; at += longest_) {
            const std::size_t length = std::min(longest_, n_ - at);
            if (!options_.dither) {
                const std::uint8_t* __restrict symbols = work_.symbols.data() + at;
                std::uint8_t* __restrict labels = work_.labels.data();
                for (std::size_t i = 0; i < length; ++i) labels[i] = symbols[i] & 3;
            }
            place(at, length, std::numeric_limits<float>::infinity(), nullptr);
        }
    }

    // Symbols wait doubled, with their table in the lowest bit, unless they are dithered.
    int doubling() const { return options_.dither ? 1 : 2; }
    // Calls body(i) for all symbols at either end of the window that `first` .. `last` hold. Most blocks have none.
    template <class Body>
    void each_end(std::size_t first, std::size_t last, Body&& body) const {
        const auto low = static_cast<std::uint8_t>(2 * doubling()), high = static_cast<std::uint8_t>((2 * window_ - 2) * doubling());
        const std::uint8_t* const symbols = work_.symbols.data();
        for (std::size_t at = first; at < last; at += kPitch) {
            const std::size_t end = std::min(last, at + kPitch);
            std::uint8_t any = 0;
            for (std::size_t i = at; i < end; ++i) any |= static_cast<std::uint8_t>((symbols[i] < low) | (symbols[i] >= high));
            for (std::size_t i = at; any && i < end; ++i)
                if (symbols[i] < low || symbols[i] >= high) body(i);
        }
    }
    std::size_t ends() const {
        std::size_t count = 0;
        each_end(0, n_, [&](std::size_t) { ++count; });
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
            each_end(at, std::min(at + longest_, n_), [&](std::size_t i) {
                const std::uint8_t s = work_.symbols[i];
                const std::int32_t y = rounded(x_[i] * scale_);
                std::int32_t a = 0, kept = 0;
                if (options_.dither) {
                    const std::int32_t u = work_.draws[i] & 0x7fff, v = integer_of(with_dither(y, g.sign, work_.draws[i]), work_.kept_labels[i]);
                    const std::int32_t t = rest_of(v & 1, u), m = (v * (1 << kUnit) - u - t) >> (kUnit + 1);
                    a = t >= 0 ? m : -m;
                    kept = s - window_;
                } else {
                    a = (several_ && work_.adds[i] ? alone_of(y, work_.adds[i]) : integer_of(y, s & 3)) >> 1;
                    kept = (s >> 1) - window_;
                }
                values.push_back(1 + std::abs(a - kept) / 2);
            });
        }
        Bytes out(static_cast<std::size_t>(planar::gamma_bytes(values.data(), values.size())));
        planar::gamma_encode(values.data(), values.size(), out.data());
        return out;
    }

    // With dither: log2 of the classes of |t|, and whether scale classes save 1 %. Tables are named for that.
    int choose_tables() {
        const int usual = class_bits(n_);
        if (!several_) return usual;
        const auto width = static_cast<std::size_t>(2 * window_), classes = still_.size();
        std::uint8_t *const tables = work_.tables.data(), *const numbers = work_.numbers.data();
        for (std::size_t i = 0; i < n_; ++i) tables[i] = static_cast<std::uint8_t>(tables[i] | numbers[i] << kMostBits);
        std::vector<std::uint64_t> counts((classes << kMostBits) * width);
        rans::histogram(work_.symbols.data(), n_, 2 * window_, {tables, false}, static_cast<int>(classes << kMostBits), false, counts.data());
        // Neighbouring classes of |t| joined, until there are 2^bits of `groups` times as many.
        const auto cost = [&](int bits, std::size_t groups) {
            std::vector<std::uint64_t> merged((groups << bits) * width);
            for (std::size_t k = 0; k < counts.size(); ++k) merged[((k / width >> (kMostBits - bits)) % (groups << bits)) * width + k % width] += counts[k];
            const int number = static_cast<int>(groups << bits);
            return classes::entropy(merged.data(), groups << bits, width) + 8 * static_cast<double>(rans::write_tables(merged.data(), 2 * window_, number).size());
        };
        int best = 0;
        double least = cost(0, classes);
        for (int bits = 1; bits <= kMostBits; ++bits)
            if (const double here = cost(bits, classes); here < least) least = here, best = bits;
        several_ = least + 8 * static_cast<double>(chosen_.bytes.size()) < 0.99 * cost(usual, 1);
        chosen_.bits = least;
        const int bits = several_ ? best : usual;
        const auto mask = static_cast<std::uint8_t>(several_ ? 255 : (1 << usual) - 1);
        for (std::size_t i = 0; i < n_; ++i) tables[i] = tables[i] >> (kMostBits - bits) & mask;
        return bits;
    }

    // The message up to the last `left_` bytes of words; returns what follows those.
    Bytes code(Bytes& out) {
        choose_window();
        const Bytes tail = escapes();
        left_ = 0;
        const int bits = options_.dither ? choose_tables() : 1;
        int chunk = usual_chunk();
        if (several_ && options_.chunk == kAutoChunk && 2 * chosen_.bits < static_cast<double>(n_)) chunk = rans::kLongestChunk;
        out.assign({several_ ? classed : coded, static_cast<std::uint8_t>(window_), static_cast<std::uint8_t>(run_)});
        if (options_.dither) out.push_back(static_cast<std::uint8_t>(bits));
        std::size_t left = tail.size();
        for (; left >= 128; left >>= 7) out.push_back(static_cast<std::uint8_t>(left | 128));
        out.push_back(static_cast<std::uint8_t>(left));
        const auto* scales = reinterpret_cast<const std::uint8_t*>(scales_);
        out.insert(out.end(), scales, scales + (several_ && !options_.dither ? 8 : 4));
        if (several_ && !options_.dither) out.insert(out.end(), {static_cast<std::uint8_t>(moving_), static_cast<std::uint8_t>(moving_ >> 8)});
        if (several_) out.insert(out.end(), chosen_.bytes.begin(), chosen_.bytes.end());
        if (options_.dither) {
            const int tables = static_cast<int>(several_ ? still_.size() : 1) << bits;
            const std::size_t begin = out.size();
            out.resize(begin + rans::max_message(n_, 2 * window_));
            out.resize(begin + rans::encode_message(work_.symbols.data(), n_, 2 * window_, {tables > 1 ? work_.tables.data() : nullptr, false}, tables,
                                                    !several_, chunk, out.data() + begin));
        } else {
            const Classes classes = several_ ? Classes{work_.numbers.data(), still_} : Classes{};
            left_ = Coder(work_.symbols.data(), n_, window_, chunk, classes).write(out, work_.words);
        }
        return tail;
    }

    Options options_;
    Workspace& work_;
    int which_, run_, window_ = kUsual;
    float scale_ = 0, limit_ = 0, scales_[2] = {};  // those that are sent, of coordinates on trellises and of still ones
    const float* x_ = nullptr;
    std::size_t n_ = 0, following_ = 0, lanes_ = 0, longest_ = 0, left_ = 0;
    std::uint64_t start_ = 0;
    std::uint32_t top_ = 0;
    bool escaped_ = false, several_ = true, waits_ = true, near_ = true;  // several: there are classes; waits: labels wait for them; near: of the last run
    classes::Chosen chosen_;
    std::vector<std::uint8_t> still_;  // by class
    unsigned moving_ = 0;
    std::vector<double> dots_, energies_, still_dots_, still_energies_;
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
            encoder.choose(x + segments.start(s), segments.length(s), segments.start(s), n - segments.start(s) - segments.length(s));
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

Outcome measure(const float* x, std::size_t n, float step, int states, const classes::Rows& rows) {
    const Segments segments(n);
    const std::size_t count = segments.count();
    std::vector<double> norms(count), errors(count);
    parallel_for(count, 1, 1, [&](std::size_t first, std::size_t last) {
        SegmentEncoder encoder({step, states, rans::kLongestChunk, nullptr, rows});
        for (std::size_t s = first; s < last; ++s) {
            encoder.choose(x + segments.start(s), segments.length(s), segments.start(s), n - segments.start(s) - segments.length(s));
            norms[s] = encoder.norm;
            errors[s] = encoder.finite() ? encoder.error : 0;
        }
    });
    return {0, dither::fold(norms.data(), count), dither::fold(errors.data(), count)};
}

}  // namespace tersegrad::trellis
