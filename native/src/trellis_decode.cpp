// From trellis-coded messages to floats.
#include <atomic>
#include <bit>
#include <cfloat>
#include <limits>
#include <optional>

#include "around_caches.hpp"
#include "select_scratch.hpp"
#include "tersegrad/planar.hpp"
#include "tersegrad/threads.hpp"
#include "trellis_parts.hpp"

namespace tersegrad::trellis {
namespace {

using Bytes = std::vector<std::uint8_t>;

// A coded segment, taken apart.
struct Parsed {
    int window = 0, run = 0, bits = 1;
    float scale = 0, still = 0;  // of coordinates on trellises, and of still ones
    int tables = 2;
    const std::uint8_t* firsts = nullptr;  // of each coordinate the first table of its class, and kStill
    const std::uint8_t *body = nullptr, *tail = nullptr;
    std::size_t body_size = 0, tail_size = 0;
};

bool parse(const std::uint8_t* data, std::size_t size, bool dithered, Parsed& p) {
    std::size_t at = dithered ? 4 : 3, used = 0;
    std::uint8_t byte = 128;
    while (byte >= 128) {
        if (used == 5 || at + used >= size) return false;
        byte = data[at + used];
        p.tail_size |= static_cast<std::size_t>(byte & 127) << 7 * used++;
    }
    at += used;
    p.window = data[1];
    p.run = data[2];
    if (dithered) p.bits = data[3];
    if ((used > 1 && byte == 0) || p.window % 2 || p.window < 2 || p.window > kWidest || p.run < kShortestRun || p.run > kLongestRun || p.bits > 3)
        return false;
    const bool two = data[0] == classed && !dithered;
    const std::size_t scales = two ? 8 : 4;
    if (size - at < scales || size - at - scales < p.tail_size) return false;
    std::memcpy(&p.scale, data + at, 4);
    if (two) std::memcpy(&p.still, data + at + 4, 4);
    const auto usable = [&](float scale) { return (scale >= FLT_MIN && scale <= FLT_MAX) || (two && scale == 0); };
    if (!usable(p.scale) || (two && !usable(p.still))) return false;
    p.body = data + at + scales;
    p.body_size = size - at - scales - p.tail_size;
    p.tail = p.body + p.body_size;
    p.tables = 1 << p.bits;
    return true;
}

// Takes the classes off the front of the body; `firsts` has room for all coordinates.
bool read_classes(Parsed& p, bool dithered, const std::vector<classes::Region>& regions, std::uint8_t* firsts) {
    const std::size_t head = dithered ? 0 : 2;
    if (p.body_size < head + 2) return false;
    int number = 0;
    const std::size_t used = classes::read(p.body + head, p.body_size - head, regions, firsts, number);
    if (used == rans::kBad) return false;
    const unsigned moving = dithered ? 0 : p.body[0] | static_cast<unsigned>(p.body[1]) << 8, mask = p.body[head] | static_cast<unsigned>(p.body[head + 1]) << 8;
    if (moving & ~mask) return false;
    std::uint8_t first_of[classes::kClasses] = {};
    p.tables = 0;
    for (unsigned c = 0, k = 0; c < classes::kClasses; ++c) {
        if (!(mask >> c & 1)) continue;
        const bool still = !dithered && !(moving >> c & 1);
        first_of[k++] = static_cast<std::uint8_t>(p.tables | (still ? kStill : 0));
        p.tables += dithered ? 1 << p.bits : still ? 1 : 2;
    }
    std::size_t n = 0;
    for (const classes::Region& r : regions) n += r.count;
    ops().translate(firsts, n, first_of, firsts);
    p.firsts = firsts;
    p.body += head + used;
    p.body_size -= head + used;
    return true;
}

// Decodes the symbols of one rANS block into bytes symbol | z0 << 7.
class BlockDecoder {
public:
    BlockDecoder(const Parsed& p, std::size_t n, const Code& code, const std::uint8_t* facts, std::uint8_t* out)
        : p_(p), n_(n), code_(code), facts_(facts), out_(out), alphabet_(2 * p.window), tables_(p.tables) {}

    // Values go to `values` at once where that is faster; then `restored` is true.
    bool run(float* values, bool around) {
        if (p_.body_size && p_.body[0] == rans::kRaw) {
            if (rans::decode_message(p_.body, p_.body_size, n_, alphabet_, {}, 1, out_) != p_.body_size) return false;
            const std::size_t lanes = rans::Layout(n_, alphabet_, rans::kLongestChunk).lanes;
            follow_all(lanes);
            return true;
        }
        if (p_.body_size == 0 || p_.body[0] < p_.run) return false;
        const auto opened = rans::open_message(p_.body, p_.body_size, n_, alphabet_, {}, tables_, out_);
        if (!opened || opened->size != p_.body_size) return false;
        frequencies_ = opened->frequencies.data();
        const rans::Layout& layout = opened->layout;
        if (opened->jobs.empty()) {
            certain(layout.lanes);
            return true;
        }
        const bool paired = ops().walk_pair && !facts_ && !p_.firsts && alphabet_ <= 32 && layout.lanes == rans::kLanes;
        if (paired) {
            pair_.emplace(frequencies_, alphabet_);
            restored = p_.scale <= FLT_MAX / (4 * kUsual) && p_.scale >= FLT_MIN * 0x1p24f;
            if (restored) values_ = values, around_ = around;
        } else {
            make_slots();
        }
        const rans::DecodeModel model(frequencies_, alphabet_, tables_, true, layout);
        const auto& jobs = opened->jobs;
        if (!std::all_of(jobs.begin(), jobs.end(), rans::detail::valid_states)) return false;
        if (layout.lanes < rans::kLanes) return few(jobs[0], layout);
        for (std::size_t c = 0; c < jobs.size();) {
            Flight one(*this, jobs[c], layout.chunks.start(c));
            if (paired && c + 1 < jobs.size()) {
                Flight two(*this, jobs[c + 1], layout.chunks.start(c + 1));
                if (!one.go(&two) || !rest(one, jobs[c], layout, model) || !rest(two, jobs[c + 1], layout, model)) return false;
                c += 2;
            } else {
                if (!one.go(nullptr) || !rest(one, jobs[c], layout, model)) return false;
                ++c;
            }
        }
        return true;
    }

    bool restored = false;

private:
    std::uint32_t facts_at(std::size_t i, std::uint32_t z0) const { return facts_ ? facts_[i] >> 4 * z0 & 15 : z0; }
    bool still_at(std::size_t i) const { return p_.firsts && p_.firsts[i] & kStill; }
    std::uint32_t table_at(std::size_t i, std::uint32_t state) const {
        const std::uint32_t first = p_.firsts ? p_.firsts[i] & 127u : 0;
        return first + (still_at(i) ? 0 : facts_at(i, state & 1) & 7);
    }
    std::uint32_t flip_at(std::size_t i, std::uint32_t state) const { return facts_at(i, state & 1) >> 3; }

    // Puts z0 beside symbol i and moves on.
    void follow(std::size_t i, std::uint32_t& state) {
        if (still_at(i)) return;
        const std::uint32_t z0 = state & 1, z1 = (out_[i] & 1) ^ flip_at(i, state);
        out_[i] = static_cast<std::uint8_t>(out_[i] | z0 << 7);
        state = static_cast<std::uint32_t>(next_state(code_, static_cast<std::int32_t>(state), static_cast<std::int32_t>(z1)));
    }
    bool starts(std::size_t i) const { return (i & ((std::size_t{1} << p_.run) - 1)) == 0; }

    void follow_all(std::size_t lanes) {
        std::uint32_t states[rans::kLanes] = {};
        for (std::size_t i = 0; i < n_; ++i) {
            if (starts(i)) std::fill_n(states, rans::kLanes, 0);
            follow(i, states[i & (lanes - 1)]);
        }
    }

    // Every table has one symbol.
    void certain(std::size_t lanes) {
        std::uint8_t only[kMostTables];
        for (int t = 0; t < tables_; ++t) {
            const auto* row = frequencies_ + t * alphabet_;
            only[t] = static_cast<std::uint8_t>(std::find(row, row + alphabet_, rans::kTotal) - row);
        }
        std::uint32_t states[rans::kLanes] = {};
        for (std::size_t i = 0; i < n_; ++i) {
            if (starts(i)) std::fill_n(states, rans::kLanes, 0);
            std::uint32_t& state = states[i & (lanes - 1)];
            out_[i] = only[table_at(i, state)];
            follow(i, state);
        }
    }

    // symbol | (f - 1) << 8 | (slot - start) << 20, table after table.
    void make_slots() {
        slots_.resize(static_cast<std::size_t>(tables_) * rans::kTotal);
        std::uint32_t* slot = slots_.data();
        for (int t = 0; t < tables_; ++t)
            for (int s = 0; s < alphabet_; ++s) {
                const std::uint32_t f = frequencies_[t * alphabet_ + s];
                for (std::uint32_t k = 0; k < f; ++k) *slot++ = static_cast<std::uint32_t>(s) | (f - 1) << 8 | k << 20;
            }
    }

    // The whole steps of a chunk of 64 lanes. Chunks start runs.
    struct Flight {
        Flight(const BlockDecoder& of, const rans::DecodeJob& job, std::size_t first)
            : chunk(job), start(first), steps(chunk.cursor.steps), period((std::size_t{1} << of.p_.run) / rans::kLanes),
              walk{chunk.cursor.states, states, chunk.cursor.words, chunk.cursor.limit, of.slots_.data(), of.facts_ ? of.facts_ + start : nullptr,
                   of.p_.firsts ? of.p_.firsts + start : nullptr, of.out_ + start, 0, 0, of.code_, of.pair_ ? &*of.pair_ : nullptr,
                   of.values_ ? of.values_ + start : nullptr, of.p_.scale, of.p_.window, of.around_} {}
        Flight(const Flight&) = delete;

        // Both to their ends; false where words are missing.
        bool go(Flight* other) {
            for (;;) {
                Flight* open[2];
                int count = 0;
                for (Flight* f : {this, other})
                    if (f && f->walk.step < f->steps) open[count++] = f;
                if (!count) return true;
                for (int k = 0; k < count; ++k) open[k]->begin();
                if (walk.pair) ops().walk_pair(open[0]->walk, count == 2 ? &open[1]->walk : nullptr);
                else ops().walk(open[0]->walk);
                for (int k = 0; k < count; ++k)
                    if (!open[k]->more()) return false;
            }
        }

        rans::detail::Chunk chunk;
        alignas(64) std::uint32_t states[rans::kLanes] = {};
        std::size_t start, steps, period;
        Walk walk;

    private:
        void begin() {
            if (walk.step % period == 0) std::fill_n(states, rans::kLanes, 0);
            walk.steps = std::min(steps, (walk.step / period + 1) * period);
        }
        // After a stop; one for want of words asks for the last of them.
        bool more() {
            if (walk.step == walk.steps || walk.words <= walk.limit) return true;
            chunk.cursor.words = walk.words;
            if (!chunk.extend()) return false;
            walk.words = chunk.cursor.words;
            walk.limit = chunk.cursor.limit;
            return true;
        }
    };

    // What follows the whole steps of a chunk.
    bool rest(Flight& flight, const rans::DecodeJob& job, const rans::Layout& layout, const rans::DecodeModel& model) {
        rans::detail::Cursor& cursor = flight.chunk.cursor;
        std::uint32_t* const states = flight.states;
        const Walk& walk = flight.walk;
        const Code code = code_;  // what is stored as bytes cannot change this one
        const std::size_t start = flight.start, steps = flight.steps;
        // The tables of the symbols that are left of a step, if any, are known now.
        const std::size_t done = start + steps * rans::kLanes, coded = layout.coded(job.n) % rans::kLanes;
        if (starts(done)) std::fill_n(states, rans::kLanes, 0);
        std::uint8_t tables[rans::kLanes] = {}, rest[rans::kLanes * 17 + 64];
        for (std::size_t k = 0; k < coded; ++k) tables[k] = static_cast<std::uint8_t>(table_at(done + k, states[k]));
        cursor.words = walk.words;
        cursor.limit = walk.limit;
        cursor.step = cursor.steps = 0;
        cursor.symbols = rest;
        cursor.contexts = {tables, false};
        if (!flight.chunk.finish(model)) return false;
        const std::size_t end = start + job.n;
        std::size_t i = done;
        // Whole rows of the usual kind, in a loop that is made of vectors.
        for (; !facts_ && !p_.firsts && i + rans::kLanes <= end; i += rans::kLanes) {
            if (starts(i)) std::fill_n(states, rans::kLanes, 0);
            for (std::size_t k = 0; k < rans::kLanes; ++k) {
                const std::uint32_t symbol = rest[i - done + k], state = states[k];
                out_[i + k] = static_cast<std::uint8_t>(symbol | (state & 1) << 7);
                states[k] = static_cast<std::uint32_t>(next_state(code, static_cast<std::int32_t>(state), static_cast<std::int32_t>(symbol & 1)));
            }
        }
        for (; i < end; ++i) {
            out_[i] = rest[i - done];
            if (starts(i)) std::fill_n(states, rans::kLanes, 0);
            follow(i, states[i & (rans::kLanes - 1)]);
        }
        if (values_) ops().restore(out_ + done, start + job.n - done, p_.window, p_.scale, false, values_ + done);
        return true;
    }

    // The one chunk of a small block.
    bool few(const rans::DecodeJob& job, const rans::Layout& layout) {
        const std::size_t lanes = layout.lanes, coded = layout.coded(job.n);
        std::uint32_t x[rans::kLanes], states[rans::kLanes] = {};
        std::memcpy(x, job.states, 4 * lanes);
        const std::uint8_t *words = job.words, *const end = words + 2 * job.word_count;
        for (std::size_t i = 0; i < coded; ++i) {
            const std::size_t lane = i & (lanes - 1);
            const std::uint32_t e = slots_[table_at(i, states[lane]) << rans::kPrecision | (x[lane] & (rans::kTotal - 1))];
            std::uint32_t y = ((e >> 8 & (rans::kTotal - 1)) + 1) * (x[lane] >> rans::kPrecision) + (e >> 20);
            if (y < rans::kFirst) {
                if (words >= end) return false;
                y = y << 16 | words[0] | static_cast<std::uint32_t>(words[1]) << 8;
                words += 2;
            }
            x[lane] = y;
            out_[i] = static_cast<std::uint8_t>(e);
            follow(i, states[lane]);
        }
        if (words != end) return false;
        for (std::size_t i = coded; i < job.n; ++i) {
            const std::size_t lane = i & (lanes - 1);
            const std::uint32_t free = x[lane] - rans::kFirst, symbol = free & ((1u << layout.width) - 1);
            if (symbol >= static_cast<std::uint32_t>(alphabet_)) return false;
            x[lane] = rans::kFirst + (free >> layout.width);
            out_[i] = static_cast<std::uint8_t>(symbol);
            follow(i, states[lane]);
        }
        return std::all_of(x, x + lanes, [](std::uint32_t v) { return v == rans::kFirst; });
    }

    const Parsed& p_;
    std::size_t n_;
    Code code_;
    const std::uint8_t* facts_;
    std::uint8_t* out_;
    int alphabet_, tables_;
    const std::uint16_t* frequencies_ = nullptr;
    std::vector<std::uint32_t> slots_;
    std::optional<Pair> pair_;
    float* values_ = nullptr;
    bool around_ = false;
};

class SegmentDecoder {
public:
    // For vectors of `whole` coordinates.
    SegmentDecoder(const Source& source, std::size_t whole)
        : code_(kCodes[code_of(source.states)]), dither_(source.dither), rows_(source.rows), whole_(whole), around_(4 * whole > select::cache_bytes) {}

    bool decode(const std::uint8_t* data, std::size_t size, std::uint64_t start, std::size_t n, float* out) {
        if (size < 1) return false;
        if (data[0] == zero) {
            if (size != 1) return false;
            std::memset(out, 0, 4 * n);
            return true;
        }
        if (data[0] == raw) {
            if (size != raw_bytes(n)) return false;
            std::memcpy(out, data + 1, 4 * n);
            return true;
        }
        Parsed p;
        if ((data[0] != coded && data[0] != classed) || !parse(data, size, dither_ != nullptr, p)) return false;
        if (data[0] == classed) {
            if (firsts_.size() < n + 64) firsts_.resize(n + 64);
            const auto regions = rows_.pieces ? classes::cut(rows_, start, start + n) : std::vector<classes::Region>{{n, whole_, 1, start}};
            if (!read_classes(p, dither_ != nullptr, regions, firsts_.data())) return false;
        }
        if (bytes_.size() < n + 64) bytes_.resize(n + 64);
        if (dither_) {
            draws_.resize(n);
            facts_.resize(n + 64);
            random_u16(dither_->draws, start, n, draws_.data());
            ops().learn(draws_.data(), n, p.bits, facts_.data());
        }
        BlockDecoder block(p, n, code_, dither_ ? facts_.data() : nullptr, bytes_.data());
        if (!block.run(out, around_)) return false;
        if (!block.restored) restore(p, start, n, out);
        return !p.tail_size || unescape(p, start, n, out);
    }

private:
    template <class Body>
    void over_runs(const Parsed& p, std::size_t n, Body&& body) const {
        const std::size_t run = std::size_t{1} << p.run;
        for (std::size_t at = 0; at < n; at += run) body(at, std::min(run, n - at));
    }

    void restore(const Parsed& p, std::uint64_t start, std::size_t n, float* out) const {
        if (p.firsts && !dither_) return ops().restore_still(bytes_.data(), p.firsts, n, p.window, p.scale, p.still, out);
        if (!dither_) return ops().restore(bytes_.data(), n, p.window, p.scale, around_, out);
        over_runs(p, n, [&](std::size_t at, std::size_t length) {
            ops().restore_dithered(bytes_.data() + at, length, p.window, p.scale, sign_of(*dither_, start + at), draws_.data() + at, out + at);
        });
    }

    // The indices at either end of the window, in full.
    bool unescape(const Parsed& p, std::uint64_t start, std::size_t n, float* out) {
        std::vector<std::size_t> places;
        for (std::size_t i = 0; i < n; ++i) {
            const int s = bytes_[i] & 127;
            if (s < 2 || s >= 2 * p.window - 2) places.push_back(i);
        }
        std::vector<std::int64_t> more(places.size());
        if (planar::gamma_decode(p.tail, p.tail_size, places.size(), more.data()) != static_cast<std::int64_t>(p.tail_size)) return false;
        const auto most = static_cast<std::int64_t>(dither_ ? kFarDithered : kFar);
        const std::size_t mask = ~((std::size_t{1} << p.run) - 1);
        for (std::size_t j = 0; j < places.size(); ++j) {
            if (more[j] > most) return false;
            const std::size_t i = places[j];
            const auto beyond = static_cast<std::int32_t>(2 * (more[j] - 1)), z0 = bytes_[i] >> 7;
            const std::int32_t kept = (bytes_[i] & 127) - p.window, a = kept < 0 ? kept - beyond : kept + beyond;
            float v;
            if (dither_) {
                const std::int32_t t = rest_of(z0, draws_[i] & 0x7fff);
                v = static_cast<float>(sign_of(*dither_, start + (i & mask)) * ((t >= 0 ? a : -a) * (2 << kUnit) + t)) * 0x1p-13f * p.scale;
            } else {
                v = static_cast<float>(2 * a + z0) * (p.firsts && p.firsts[i] & kStill ? p.still : p.scale);
            }
            out[i] = v > FLT_MAX ? FLT_MAX : v < -FLT_MAX ? -FLT_MAX : v;
        }
        return true;
    }

    Code code_;
    const Dither* dither_;
    classes::Rows rows_;
    std::size_t whole_;
    bool around_;  // the caches, which could not hold the vector
    Bytes bytes_, facts_, firsts_;
    std::vector<std::uint16_t> draws_;
};

bool decode_segments(const std::uint8_t* data, std::size_t size, std::size_t n, const Source& source, float* out) {
    const Segments segments(n);
    const std::size_t count = segments.count(), table = segments.table_bytes();
    if (size < table) return false;
    std::vector<std::size_t> offset(count + 1);
    offset[0] = table;
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
    std::atomic<bool> good{true};
    parallel_for(count, 1, 1, [&](std::size_t first, std::size_t last) {
        SegmentDecoder decoder(source, n);
        for (std::size_t s = first; s < last && good; ++s)
            if (!decoder.decode(data + offset[s], offset[s + 1] - offset[s], segments.start(s), segments.length(s), out + segments.start(s)))
                good = false;
        select::stream_done();
    });
    return good;
}

}  // namespace

Pair::Pair(const std::uint16_t* frequencies, int alphabet) : image{}, coarse{} {
    std::uint8_t symbol_at[2][rans::kTotal / 64][2];  // of the first and the last slot of every 64
    for (int z0 = 0; z0 < 2; ++z0) {
        std::uint32_t start = 0;
        for (int s = 0; s < 32; ++s) {
            // Behind the alphabet no slot reaches the start.
            const std::uint32_t f = s < alphabet ? frequencies[z0 * alphabet + s] : 0, scaled = f << 4;
            const int at = 32 * z0 + s;
            full |= f == rans::kTotal;
            image.start_low[at] = static_cast<std::uint8_t>(start);
            image.start_high[at] = static_cast<std::uint8_t>(start >> 8);
            image.scaled_low[at] = static_cast<std::uint8_t>(scaled);
            image.scaled_high[at] = static_cast<std::uint8_t>(scaled >> 8);
            for (std::uint32_t slot = start; slot < start + f; ++slot)
                if (slot % 64 == 0 || slot % 64 == 63) symbol_at[z0][slot / 64][slot % 64 == 63] = static_cast<std::uint8_t>(s);
            start += f;
        }
        for (const auto& ends : symbol_at[z0]) probes = std::max(probes, static_cast<int>(std::bit_width(static_cast<unsigned>(ends[1] - ends[0]))));
    }
    probes = std::max(probes, 1);
    // Probes look up to 2^probes - 1 further: they stay within the table.
    for (int z0 = 0; z0 < 2; ++z0)
        for (std::size_t k = 0; k < 64; ++k) coarse[z0][k] = static_cast<std::uint8_t>(32 * z0 + std::min<int>(symbol_at[z0][k][0], 32 - (1 << probes)));
}

bool decode(const std::uint8_t* data, std::size_t size, std::size_t n, const Source& source, float* out) {
    if (size == 0 || data[0] > not_finite) return false;
    if (data[0] == normal) return decode_segments(data + 1, size - 1, n, source, out);
    if (size != 1) return false;
    std::fill(out, out + n, data[0] == not_finite ? std::numeric_limits<float>::quiet_NaN() : 0.0f);
    return true;
}

bool decode_add(const std::uint8_t* data, std::size_t size, std::size_t n, const Source& source, float weight, float* values, float* out) {
    if (size == 1 && data[0] != normal) return data[0] == all_zero || decode(data, size, n, source, out);
    // Bad bytes may show late, and must not have been added then.
    select::Scratch<float> own;
    if (!values) {
        own.reserve(n);
        values = own.get();
    }
    if (!decode(data, size, n, source, values)) return false;
    parallel_for(n, 1, std::size_t{1} << 17, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) out[i] += weight * values[i];
    });
    return true;
}

}  // namespace tersegrad::trellis
