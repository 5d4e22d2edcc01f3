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

constexpr std::size_t kStreamFrom = 4u << 20;          // outputs of that many floats leave the caches anyway: write around them
constexpr std::size_t kStreamSymbolsFrom = 32u << 20;  // and so do that many symbols

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

// The levels beyond the window: where they are, and their sizes above it.
struct Escapes {
    std::vector<std::uint32_t> places;
    std::vector<std::int64_t> sizes;
};

// A segment whose bytes are good.
struct Checked {
    const std::uint8_t *data = nullptr, *symbols = nullptr;
    Parsed parsed;
    Escapes escapes;
};

class SegmentDecoder {
public:
    // For vectors of `whole` coordinates.
    explicit SegmentDecoder(std::size_t whole) : whole_(whole), longest_(std::min(whole, kLongestSegment)) {}

    // `start`: where in the vector the segment begins.
    bool decode(const std::uint8_t* data, std::size_t size, const Into& to, std::size_t start, bool stream) {
        if (size < 1) return false;
        if (data[0] == zero) {
            if (size != 1) return false;
            std::memset(to.out, 0, 4 * to.n);
            return true;
        }
        if (data[0] == raw) {
            if (size != raw_bytes(to.n)) return false;
            std::memcpy(to.out, data + 1, 4 * to.n);
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
            if (open(p, to, 0, fast)) return fast.good && run(fast.tracks, stream) && close(p, to, fast);
        }
        std::uint8_t* symbols = buffer(0);
        if (rans::decode_message(p.body, p.body_size, to.n, 2 * p.window + 1, contexts, tables, symbols) != p.body_size) return false;
        scale(p, symbols, to, 0, to.n);
        return unescape(p, to, symbols);
    }

    // Two at once where both are coded plainly, so that no chunk is alone: each hides the other's latency.
    bool decode_two(const std::uint8_t* first, std::size_t first_size, const Into& to_first, const std::uint8_t* second,
                    std::size_t second_size, const Into& to_second, std::size_t start, bool stream) {
        if (ops().decode && first_size && second_size && first[0] == coded && second[0] == coded) {
            Parsed a, b;
            if (!parse(first, first_size, to_first.n, a) || !parse(second, second_size, to_second.n, b)) return false;
            Fast x, y;
            if (open(a, to_first, 0, x) && open(b, to_second, 1, y)) {
                if (!x.good || !y.good) return false;
                std::vector<detail::Track> both;
                for (std::size_t c = 0; c < std::max(x.tracks.size(), y.tracks.size()); ++c)
                    for (const Fast* one : {&x, &y})
                        if (c < one->tracks.size()) both.push_back(one->tracks[c]);
                return run(both, stream) && close(a, to_first, x) && close(b, to_second, y);
            }
        }
        return decode(first, first_size, to_first, start, stream) && decode(second, second_size, to_second, start + to_first.n, stream);
    }

    // All of a segment but its floats: the symbols and escapes are read, and what no encoder writes is refused.
    bool check(const std::uint8_t* data, std::size_t size, const Into& to, std::size_t start, std::uint8_t* symbols, Checked& c) {
        const std::size_t n = to.n;
        if (size < 1) return false;
        c.data = data;
        c.symbols = symbols;
        if (data[0] == zero) return size == 1;
        if (data[0] == raw) return size == raw_bytes(n);
        Parsed& p = c.parsed;
        if ((data[0] != coded && data[0] != classed) || !parse(data, size, n, p)) return false;
        rans::Contexts contexts;
        int tables = 1;
        if (data[0] == classed && !read_classes(p, to, start, contexts, tables)) return false;
        const bool stream = whole_ >= kStreamSymbolsFrom && !p.tail_size;  // escapes are looked for among the symbols
        return rans::decode_message(p.body, p.body_size, n, 2 * p.window + 1, contexts, tables, symbols, stream) == p.body_size &&
               read_escapes(p, symbols, n, c.escapes);
    }

    // Adds what was checked.
    static void add(const Checked& c, const Into& to) {
        if (c.data[0] == zero) return;
        if (c.data[0] == raw) {
            for (std::size_t i = 0; i < to.n; ++i) {
                float v;
                std::memcpy(&v, c.data + 1 + 4 * i, 4);
                to.put(i, v);
            }
            return;
        }
        // Adding rounds, so at escapes it starts from what lay there before.
        std::vector<float> kept;
        for (const std::size_t i : c.escapes.places) kept.push_back(to.out[i]);
        scale(c.parsed, c.symbols, to, 0, to.n);
        for (std::size_t j = 0; j < kept.size(); ++j) to.out[c.escapes.places[j]] = kept[j];
        put_escapes(c.parsed, c.symbols, c.escapes, to);
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
    static bool run(std::vector<detail::Track>& tracks, bool stream) {
        for (std::size_t t = 0; t < tracks.size(); t += 2)
            if (!ops().decode(tracks[t], t + 1 < tracks.size() ? &tracks[t + 1] : nullptr, false, 1.0f, stream)) return false;
        return true;
    }

    // Coordinates begin .. end of the segment, whose symbols these are.
    static void scale(const Parsed& p, const std::uint8_t* symbols, const Into& to, std::size_t begin, std::size_t end) {
        for (std::size_t i = begin, stop; i < end; i = stop) {
            stop = std::min(end, (i / kScaleBlock + 1) * kScaleBlock);
            ops().scale(symbols + (i - begin), stop - i, p.window, p.scales[i / kScaleBlock], to.add, to.weight, to.out + i);
        }
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
            scale(p, rest_, to, done, end);
        }
        return unescape(p, to, f.symbols);
    }

    // The escapes belong to the symbols at either end of the window.
    static bool read_escapes(const Parsed& p, const std::uint8_t* symbols, std::size_t n, Escapes& e) {
        e.places.clear();
        e.sizes.clear();
        if (!p.tail_size) return true;
        at_ends(symbols, n, p.window, [&](std::size_t i) { return e.places.push_back(static_cast<std::uint32_t>(i)), true; });
        e.sizes.resize(e.places.size());
        const auto read = planar::gamma_decode(p.tail, p.tail_size, e.places.size(), e.sizes.data());
        return read == static_cast<std::int64_t>(p.tail_size) &&
               std::all_of(e.sizes.begin(), e.sizes.end(), [](std::int64_t size) { return size <= 0x80000000; });
    }

    static void put_escapes(const Parsed& p, const std::uint8_t* symbols, const Escapes& e, const Into& to) {
        for (std::size_t j = 0; j < e.places.size(); ++j) {
            const std::size_t i = e.places[j];
            const std::int64_t size = p.window + e.sizes[j] - 1;
            to.put(i, detail::limited(static_cast<float>(symbols[i] ? size : -size) * p.scales[i / kScaleBlock]));
        }
    }

    bool unescape(const Parsed& p, const Into& to, const std::uint8_t* symbols) {
        if (!read_escapes(p, symbols, to.n, escapes_)) return false;
        put_escapes(p, symbols, escapes_, to);
        return true;
    }

    std::size_t whole_, longest_;
    std::uint8_t rest_[rans::kLanes * 17];  // a part of a step, and up to 16 rows that are not coded
    Escapes escapes_;
};

}  // namespace

bool decode_segments(const std::uint8_t* data, std::size_t size, const Into& to, std::uint8_t* symbols) {
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
    const auto at = [&](std::size_t s) { return to.part(segments.start(s), segments.length(s)); };
    std::atomic<bool> good{true};
    if (to.add) {
        // A message that is refused must add nothing, so all of it is read before anything is added.
        std::unique_ptr<std::uint8_t[]> own(symbols ? nullptr : new std::uint8_t[to.n + 128]);
        if (!symbols) symbols = own.get() + 64 - reinterpret_cast<std::uintptr_t>(own.get()) % 64;
        std::vector<Checked> checked(count);
        parallel_for(count, 2, 1, [&](std::size_t first, std::size_t last) {
            SegmentDecoder decoder(to.n);
            for (std::size_t s = first; s < last && good; ++s)
                if (!decoder.check(data + offset[s], offset[s + 1] - offset[s], at(s), segments.start(s), symbols + segments.start(s), checked[s]))
                    good = false;
        });
        if (!good) return false;
        parallel_for(count, 2, 1, [&](std::size_t first, std::size_t last) {
            // The last symbols are still in the caches.
            for (std::size_t s = last; s-- > first;) SegmentDecoder::add(checked[s], at(s));
        });
        return true;
    }
    const bool stream = to.n >= kStreamFrom;
    parallel_for(count, 2, 1, [&](std::size_t first, std::size_t last) {
        SegmentDecoder decoder(to.n);
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
