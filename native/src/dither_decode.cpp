// From segments of a Sparse Dithering message to floats.
#include <algorithm>
#include <cmath>
#include <deque>
#include <optional>

#include "dither_segments.hpp"
#include "tersegrad/planar.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::dither {
namespace {

constexpr std::size_t kStreamFrom = 4u << 20;  // outputs of that many floats leave the caches anyway: write around them

// Canonical LEB128 of a length; 0 bytes read means malformed.
std::size_t read_varint(const std::uint8_t* data, std::size_t size, std::size_t& value) {
    value = 0;
    for (std::size_t n = 0; n < size && n < 5; ++n) {
        value |= static_cast<std::size_t>(data[n] & 127) << (7 * n);
        if (data[n] < 128) return n && data[n] == 0 ? 0 : n + 1;
    }
    return 0;
}

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
    // For vectors of `whole` coordinates.
    explicit SegmentDecoder(std::size_t whole) : whole_(whole), longest_(std::min(whole, kLongestSegment)) {}

    // `start`: where in the vector the segment begins.
    bool decode(const std::uint8_t* data, std::size_t size, const Into& to, std::size_t start, bool stream) {
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
        if ((data[0] != coded && data[0] != classed) || !parse(data, size, to.n, p)) return false;
        rans::Contexts contexts;
        int tables = 1;
        if (data[0] == classed) {
            if (!read_classes(p, to, start, contexts, tables)) return false;
        } else {
            Fast fast;
            if (open(p, to, 0, fast)) return fast.good && run(fast.tracks, to, stream) && close(p, to, fast);
        }
        std::uint8_t* symbols = buffer(0);
        if (rans::decode_message(p.body, p.body_size, to.n, 2 * p.window + 1, contexts, tables, symbols) != p.body_size) return false;
        find_escapes(p, to, symbols);
        for (std::size_t b = 0; b < scale_count(to.n); ++b) {
            const std::size_t at = b * kScaleBlock;
            ops().scale(symbols + at, std::min(kScaleBlock, to.n - at), p.window, p.scales[b], to.add, to.weight, to.out + at);
        }
        return unescape(p, to, symbols);
    }

    // Two at once where both are coded plainly, so that no chunk is alone: each hides the other's latency.
    bool decode_two(const std::uint8_t* first, std::size_t first_size, const Into& to_first, const std::uint8_t* second,
                    std::size_t second_size, const Into& to_second, std::size_t start, bool stream) {
        if (ops().decode && first_size && second_size && first[0] == coded && second[0] == coded) {
            Parsed a, b;
            if (!parse(first, first_size, to_first.n, a) || !parse(second, second_size, to_second.n, b)) return false;
            Fast x, y;
            const bool apart = to_first.add && a.tail_size + b.tail_size && std::max(a.window, b.window) > 15;
            if (!apart && open(a, to_first, 0, x) && open(b, to_second, 1, y)) {
                if (!x.good || !y.good) return false;
                std::vector<detail::Track> both = x.tracks;
                both.insert(both.end(), y.tracks.begin(), y.tracks.end());
                return run(both, to_first, stream) && close(a, to_first, x) && close(b, to_second, y);
            }
        }
        return decode(first, first_size, to_first, start, stream) && decode(second, second_size, to_second, start + to_first.n, stream);
    }

private:
    // What a fused decoder needs. `good` false: the bytes are malformed.
    struct Fast {
        std::unique_ptr<rans::Opened> message;
        std::optional<rans::DecodeModel> model;
        std::deque<rans::detail::Chunk> chunks;
        std::vector<detail::Track> tracks;
        std::uint8_t* symbols = nullptr;
        bool good = true;
    };

    std::uint8_t* buffer(int which) {
        Bytes& bytes = which ? Workspace::of_thread().words : Workspace::of_thread().levels;
        bytes.fit(longest_ + 64);
        return bytes.data.get();
    }

    // Takes the classes off the front of the body.
    bool read_classes(Parsed& p, const Into& to, std::size_t start, rans::Contexts& contexts, int& tables) {
        Bytes& bytes = Workspace::of_thread().contexts;
        bytes.fit(longest_ + 64);
        const std::vector<classes::Region> regions =
            to.rows.pieces ? classes::cut(to.rows, start, start + to.n) : std::vector<classes::Region>{{to.n, whole_, 1, start}};
        const std::size_t used = classes::read(p.body, p.body_size, regions, bytes.data.get(), tables);
        if (used == rans::kBad) return false;
        p.body += used;
        p.body_size -= used;
        contexts = {bytes.data.get(), false};
        return true;
    }

    // Whether the segment suits the fused decoder; then the parts are made.
    bool open(const Parsed& p, const Into& to, int which, Fast& f) {
        const int alphabet = 2 * p.window + 1;
        if (!ops().decode || alphabet > 63 || p.body_size < 1 || p.body[0] == rans::kRaw) return false;
        if (to.add && p.tail_size && alphabet > 32) return false;
        f.message = rans::open_message(p.body, p.body_size, to.n, alphabet, {}, 1, buffer(which));
        if (!f.message || f.message->size != p.body_size) return f.good = false, true;
        const rans::Layout& layout = f.message->layout;
        if (f.message->jobs.empty() || layout.lanes < rans::kLanes) return false;
        if (!std::all_of(f.message->jobs.begin(), f.message->jobs.end(), rans::detail::valid_states)) return f.good = false, true;
        f.model.emplace(f.message->frequencies.data(), alphabet, 1, false, layout);
        f.symbols = p.tail_size ? buffer(which) : nullptr;
        for (std::size_t c = 0; c < f.message->jobs.size(); ++c) {
            const rans::DecodeJob& job = f.message->jobs[c];
            const std::size_t start = layout.chunks.start(c);
            f.chunks.emplace_back(job);
            f.tracks.push_back({&f.chunks.back(), &*f.model, p.scales, start, p.window, layout.coded(job.n) / rans::kLanes, to.out + start,
                                f.symbols ? f.symbols + start : nullptr});
        }
        return true;
    }

    // All whole steps of some chunks, two at a time.
    static bool run(std::vector<detail::Track>& tracks, const Into& to, bool stream) {
        for (std::size_t t = 0; t < tracks.size(); t += 2)
            if (!ops().decode(tracks[t], t + 1 < tracks.size() ? &tracks[t + 1] : nullptr, to.add, to.weight, stream)) return false;
        return true;
    }

    // What follows the last whole step of every chunk, the final check, the escapes.
    bool close(const Parsed& p, const Into& to, Fast& f) {
        for (std::size_t c = 0; c < f.chunks.size(); ++c) {
            const std::size_t start = f.tracks[c].start, done = start + f.tracks[c].steps * rans::kLanes, end = start + f.message->jobs[c].n;
            auto& cursor = f.chunks[c].cursor;
            cursor.step = cursor.steps = 0;
            cursor.symbols = rest_;
            if (!f.chunks[c].finish(*f.model)) return false;
            if (f.symbols) std::memcpy(f.symbols + done, rest_, end - done);
            for (std::size_t i = done; i < end; ++i) {
                const int k = static_cast<int>(rest_[i - done]) - p.window;
                if (to.add && p.tail_size && (k == p.window || k == -p.window)) continue;  // as in the whole steps
                to.put(i, detail::limited(static_cast<float>(k) * p.scales[i / kScaleBlock]));
            }
        }
        find_escapes(p, to, f.symbols);
        return unescape(p, to, f.symbols);
    }

    // Where the escapes belong, at the symbols of either end of the window, and what lies there before anything was added.
    void find_escapes(const Parsed& p, const Into& to, const std::uint8_t* symbols) {
        places_.clear();
        kept_.clear();
        if (!p.tail_size) return;
        at_ends(symbols, to.n, p.window, [&](std::size_t i) {
            places_.push_back(static_cast<std::uint32_t>(i));
            if (to.add) kept_.push_back(to.out[i]);
            return true;
        });
    }

    // Puts the escaped levels in their places. Adding rounds, so it starts from what lay there before.
    bool unescape(const Parsed& p, const Into& to, const std::uint8_t* symbols) {
        if (!p.tail_size) return true;
        escapes_.resize(places_.size());
        const auto read = planar::gamma_decode(p.tail, p.tail_size, places_.size(), escapes_.data());
        if (read != static_cast<std::int64_t>(p.tail_size)) return false;
        for (std::size_t j = 0; j < places_.size(); ++j) {
            const std::size_t i = places_[j];
            const std::int64_t size = p.window + escapes_[j] - 1;
            if (escapes_[j] > 0x80000000) return false;
            if (to.add) to.out[i] = kept_[j];
            to.put(i, detail::limited(static_cast<float>(symbols[i] ? size : -size) * p.scales[i / kScaleBlock]));
        }
        return true;
    }

    std::size_t whole_, longest_;
    std::uint8_t rest_[rans::kLanes * 17];  // a part of a step, and up to 16 rows that are not coded
    std::vector<std::uint32_t> places_;
    std::vector<std::int64_t> escapes_;
    std::vector<float> kept_;
};

}  // namespace

bool decode_segments(const std::uint8_t* data, std::size_t size, const Into& to) {
    const Segments segments(to.n);
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
        SegmentDecoder decoder(to.n);
        const auto at = [&](std::size_t s) { return to.part(segments.start(s), segments.length(s)); };
        for (std::size_t s = first; s < last && good; s += 2) {
            const std::size_t length = offset[s + 1] - offset[s];
            const bool fine = s + 1 < last ? decoder.decode_two(data + offset[s], length, at(s), data + offset[s + 1],
                                                                offset[s + 2] - offset[s + 1], at(s + 1), segments.start(s), stream)
                                           : decoder.decode(data + offset[s], length, at(s), segments.start(s), stream);
            if (!fine) good = false;
        }
    });
    return good;
}

}  // namespace tersegrad::dither
