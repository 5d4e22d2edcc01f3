// rANS messages: tables, then chunks that threads code and decode on their own; or the symbols as they are.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "tersegrad/rans.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::rans {
namespace {

std::uint32_t load32(const std::uint8_t* p) {
    return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 | static_cast<std::uint32_t>(p[2]) << 16 |
           static_cast<std::uint32_t>(p[3]) << 24;
}
void store32(std::uint8_t* p, std::uint32_t v) {
    for (int k = 0; k < 4; ++k) p[k] = static_cast<std::uint8_t>(v >> 8 * k);
}

// ---- raw: ceil(log2 alphabet) bits per symbol, least significant first ----

void pack_raw(const std::uint8_t* symbols, std::size_t n, int first, int bits, std::uint8_t* out) {
    std::uint64_t held = 0;
    int have = 0;
    for (std::size_t i = 0; i < n; ++i) {
        held |= static_cast<std::uint64_t>(symbols[i] - first) << have;
        have += bits;
        for (; have >= 8; have -= 8, held >>= 8) *out++ = static_cast<std::uint8_t>(held);
    }
    if (have) *out = static_cast<std::uint8_t>(held);
}

bool unpack_raw(const std::uint8_t* data, std::size_t n, int bits, int alphabet, std::uint8_t* symbols) {
    std::uint64_t held = 0;
    int have = 0;
    bool fits = true;
    for (std::size_t i = 0; i < n; ++i) {
        if (have < bits) held |= static_cast<std::uint64_t>(*data++) << have, have += 8;
        const auto s = static_cast<std::uint8_t>(held & ((1u << bits) - 1));
        held >>= bits;
        have -= bits;
        fits &= s < alphabet;
        symbols[i] = s;
    }
    return fits && held == 0;
}

std::size_t raw_bytes(std::size_t n, int alphabet) {
    const std::size_t bits = raw_bits(alphabet);
    return n / 8 * bits + (n % 8 * bits + 7) / 8;
}

}  // namespace

std::size_t raw_bits(int alphabet) { return static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(alphabet) - 1)); }

std::size_t max_message(std::size_t n, int alphabet) { return n == 0 || alphabet == 1 ? 0 : 1 + raw_bytes(n, alphabet); }

namespace {

// Whether any table can tell two symbols apart; if not, the message ends after the tables.
bool informative(const std::uint16_t* frequencies, std::size_t cells) {
    return std::any_of(frequencies, frequencies + cells, [](std::uint16_t f) { return f && f < kTotal; });
}

enum class Form { coded, tables, raw };  // tables: nothing follows them, because they leave no choice

// How a message starts: its tables, and the form that they allow.
struct Start {
    Start(const std::uint64_t* counts, std::size_t n, int alphabet, int contexts)
        : tables(write_tables(counts, alphabet, contexts)), frequencies(static_cast<std::size_t>(alphabet) * static_cast<std::size_t>(contexts)) {
        if (1 + tables.size() >= max_message(n, alphabet)) return;
        read_tables(tables.data(), tables.size(), alphabet, contexts, frequencies.data());
        form = informative(frequencies.data(), frequencies.size()) ? Form::coded : Form::tables;
    }
    // The frequencies of symbols that are stored with `first` added, by contexts of which only those of `mask` have a table.
    std::vector<std::uint16_t> moved(int first, int alphabet, unsigned mask) const {
        const auto shift = static_cast<std::size_t>(first), used = static_cast<std::size_t>(alphabet), contexts = static_cast<std::size_t>(std::bit_width(mask));
        std::vector<std::uint16_t> all((shift + used) * contexts);
        const std::uint16_t* from = frequencies.data();
        for (std::size_t c = 0; c < contexts; ++c)
            if (mask >> c & 1) std::copy_n(from, used, all.data() + c * (shift + used) + shift), from += used;
        return all;
    }
    std::size_t write(std::uint8_t* out, int chunk) const {
        out[0] = static_cast<std::uint8_t>(chunk);
        if (!tables.empty()) std::memcpy(out + 1, tables.data(), tables.size());
        return 1 + tables.size();
    }

    std::vector<std::uint8_t> tables;
    std::vector<std::uint16_t> frequencies;
    Form form = Form::raw;
};

// Pairs of chunks are taken in order by whichever thread is free, coded in its own scratch, and copied out once those before
// them have their sizes. Returns the length, or kBad where it would exceed `room`.
std::size_t encode_chunks(const EncodeModel& model, const Layout& layout, const std::uint8_t* symbols, Contexts ctx, std::uint8_t* out,
                          std::size_t room) {
    const Pieces pieces = layout.chunks;
    const std::size_t chunks = pieces.count(), pairs = (chunks + 1) / 2, head = 4 * layout.lanes;
    if (4 * chunks > room) return kBad;
    std::atomic<std::size_t> next{0}, ready{0};  // ready: pairs whose place is known
    std::atomic<bool> full{false};
    std::size_t offset = 4 * chunks;  // written by the thread that owns pair `ready`
    const auto workers = static_cast<std::size_t>(plan_threads(pairs, 1));
    // The symbols of a pair that is coded later.
    const auto following = [&](std::size_t pair) -> Ahead {
        if (pair >= chunks / 2) return {};
        const std::uint8_t* const begin = symbols + pieces.start(2 * pair);
        return {begin, begin + pieces.length(2 * pair) + pieces.length(2 * pair + 1)};
    };
    parallel_for(workers, 1, 1, [&](std::size_t, std::size_t) {
        const std::size_t size = 2 * pieces.longest() + kSlack;
        thread_local std::vector<std::uint8_t> kept;  // about a megabyte at most; fresh pages would cost more than small messages
        if (kept.size() < 2 * size) kept.resize(2 * size);
        for (std::size_t pair; (pair = next.fetch_add(1)) < pairs;) {
            std::uint32_t states[2][kLanes];
            EncodeJob jobs[2];
            std::size_t bodies[2] = {}, whole = 0;
            const std::size_t first = 2 * pair, count = std::min<std::size_t>(2, chunks - first);
            const bool coded = !full.load(std::memory_order_relaxed);
            if (coded) {
                for (std::size_t k = 0; k < count; ++k) {
                    const std::size_t start = pieces.start(first + k);
                    jobs[k] = {symbols + start, pieces.length(first + k), ctx.at(start), kept.data() + (k + 1) * size, states[k]};
                }
                if (count == 2) encode_two_chunks(model, layout, 0, jobs[0], jobs[1], following(pair + workers));
                else jobs[0].words = encode_chunk(model, layout, jobs[0].symbols, jobs[0].n, 0, jobs[0].contexts, jobs[0].words, states[0]);
                for (std::size_t k = 0; k < count; ++k) {
                    bodies[k] = static_cast<std::size_t>(kept.data() + (k + 1) * size - jobs[k].words);
                    whole += head + bodies[k];
                }
            }
            for (std::size_t seen; (seen = ready.load(std::memory_order_acquire)) != pair;) ready.wait(seen);
            std::size_t at = offset;
            if (!coded || room - at < whole) full.store(true);
            const bool fits = !full.load();
            if (fits) offset = at + whole;
            ready.store(pair + 1);  // not weaker, else notify may look for waiters before it is seen
            ready.notify_all();
            for (std::size_t k = 0; fits && k < count; ++k) {
                store32(out + 4 * (first + k), static_cast<std::uint32_t>(bodies[k] / 2));
                for (std::size_t lane = 0; lane < layout.lanes; ++lane) store32(out + at + 4 * lane, states[k][lane]);
                if (bodies[k]) std::memcpy(out + at + head, jobs[k].words, bodies[k]);
                at += head + bodies[k];
            }
        }
    });
    return full ? kBad : offset;
}

// Where the chunks lie; false if they reach beyond the data. Adds to `opened.size`.
bool find_chunks(const std::uint8_t* data, std::size_t size, Contexts ctx, std::uint8_t* symbols, Opened& opened) {
    const Layout& layout = opened.layout;
    const std::size_t chunks = layout.chunks.count(), head = 4 * layout.lanes;
    if (size / 4 < chunks) return false;
    opened.jobs.resize(chunks);
    std::size_t at = 4 * chunks;
    for (std::size_t c = 0; c < chunks; ++c) {
        const std::size_t start = layout.chunks.start(c), length = layout.chunks.length(c), words = load32(data + 4 * c);
        if (words > layout.coded(length) || size - at < head + 2 * words) return false;
        const std::size_t end = at + head + 2 * words;
        opened.jobs[c] = {&layout, data + at, data + at + head, words, symbols + start, length, ctx.at(start), size - end};
        at = end;
    }
    opened.size += at;
    return true;
}

}  // namespace

std::size_t encode_message(const std::uint8_t* symbols, std::size_t n, int alphabet, Contexts ctx, int contexts, bool sample,
                           int chunk, std::uint8_t* out) {
    const std::size_t cells = static_cast<std::size_t>(alphabet) * static_cast<std::size_t>(contexts);
    std::vector<std::uint64_t> counts(cells);
    if (!histogram(symbols, n, alphabet, ctx, contexts, sample && worth_sampling(n, alphabet, contexts), counts.data())) return kBad;
    const std::size_t most = max_message(n, alphabet);
    if (most == 0) return 0;
    const Start start(counts.data(), n, alphabet, contexts);
    if (start.form != Form::raw) {
        const std::size_t head = start.write(out, chunk);
        if (start.form == Form::tables) return head;
        const EncodeModel model(start.frequencies.data(), alphabet, contexts);
        const std::size_t body = encode_chunks(model, Layout(n, alphabet, chunk), symbols, ctx, out + head, most - 1 - head);
        if (body != kBad) return head + body;
    }
    out[0] = kRaw;
    pack_raw(symbols, n, 0, static_cast<int>(raw_bits(alphabet)), out + 1);
    return most;
}

namespace {
std::size_t most_chunks(std::size_t n) { return Pieces{n, std::size_t{1} << kShortestChunk}.count(); }
}  // namespace

std::size_t most_head(std::size_t n, int contexts) { return 1 + 1024 * static_cast<std::size_t>(contexts) + 4 * most_chunks(n); }
std::size_t scratch_bytes(std::size_t n) { return 2 * n + (kSlack + 4 * kLanes) * most_chunks(n); }

// The last chunks first, each in front of those before: so they stand in order and next to each other.
std::uint8_t* encode_backwards(const EncodeModel& model, const Layout& layout, const std::uint8_t* symbols, int first, Contexts ctx,
                               std::uint8_t* numbers, std::uint8_t* end, Ahead ahead) {
    std::uint8_t* at = end;
    std::uint32_t states[2][kLanes];
    const auto job = [&](std::size_t c, std::uint8_t* last, std::uint32_t* own) -> EncodeJob {
        const std::size_t begin = layout.chunks.start(c);
        return {symbols + begin, layout.chunks.length(c), ctx.at(begin), last, own};
    };
    // Words that end at `last`, to stand in front of `at`.
    const auto put = [&](std::size_t c, const std::uint8_t* words, const std::uint8_t* last, const std::uint32_t* own) {
        const auto bytes = static_cast<std::size_t>(last - words);
        store32(numbers + 4 * c, static_cast<std::uint32_t>(bytes / 2));
        at -= bytes;
        if (at != words) std::memmove(at, words, bytes);
        at -= 4 * layout.lanes;
        for (std::size_t k = 0; k < layout.lanes; ++k) store32(at + 4 * k, own[k]);
        const std::size_t fetched = 128 * (layout.chunks.length(c) / kLanes);
        const auto later = static_cast<std::size_t>(static_cast<const char*>(ahead.end) - static_cast<const char*>(ahead.begin));
        ahead.begin = static_cast<const char*>(ahead.begin) + std::min(fetched, later);
    };
    std::size_t c = layout.chunks.count();
    for (; c >= 2; c -= 2) {
        // `before`: where the words of the later chunk cannot reach.
        std::uint8_t *const last = at, *const before = at - 2 * layout.chunks.length(c - 1) - 4 * layout.lanes - kSlack;
        EncodeJob later = job(c - 1, last, states[0]), earlier = job(c - 2, before, states[1]);
        encode_two_chunks(model, layout, first, later, earlier, ahead);
        put(c - 1, later.words, last, states[0]);
        put(c - 2, earlier.words, before, states[1]);
    }
    if (c) {
        const EncodeJob only = job(0, at, states[0]);
        std::uint8_t* const last = at;
        put(0, encode_chunk(model, layout, only.symbols, only.n, first, only.contexts, last, states[0], ahead), last, states[0]);
    }
    return at;
}

TwoPieces encode_in_pieces(const std::uint8_t* symbols, std::size_t n, int first, int alphabet, Contexts ctx, unsigned mask, const std::uint64_t* counts,
                           int chunk, std::uint8_t* head, std::uint8_t* scratch, std::size_t room, Ahead ahead) {
    const std::size_t most = max_message(n, alphabet);
    if (most == 0) return {};
    const Start start(counts, n, alphabet, std::popcount(mask));
    if (start.form != Form::raw) {
        std::size_t size = start.write(head, chunk);
        if (start.form == Form::tables) return {size, nullptr, 0};
        const EncodeModel model(start.moved(first, alphabet, mask).data(), first + alphabet, static_cast<int>(std::bit_width(mask)));
        const Layout layout(n, alphabet, chunk);
        std::uint8_t* const end = scratch + room;
        const std::uint8_t* const at = encode_backwards(model, layout, symbols, first, ctx, head + size, end, ahead);
        size += 4 * layout.chunks.count();
        const auto body = static_cast<std::size_t>(end - at);
        if (size + body < most) return {size, at, body};
    }
    head[0] = kRaw;
    pack_raw(symbols, n, first, static_cast<int>(raw_bits(alphabet)), scratch);
    return {1, scratch, most - 1};
}

std::size_t decode_message(const std::uint8_t* data, std::size_t size, std::size_t n, int alphabet, Contexts ctx, int contexts,
                           std::uint8_t* symbols, bool stream) {
    if (n == 0) return 0;
    if (alphabet == 1) {
        std::memset(symbols, 0, n);
        return 0;
    }
    if (size && data[0] == kRaw) {
        const std::size_t bytes = raw_bytes(n, alphabet);
        if (size - 1 < bytes || !unpack_raw(data + 1, n, static_cast<int>(raw_bits(alphabet)), alphabet, symbols)) return kBad;
        return 1 + bytes;
    }
    const auto opened = open_message(data, size, n, alphabet, ctx, contexts, symbols);
    if (!opened) return kBad;
    const std::uint16_t* const frequencies = opened->frequencies.data();
    for (DecodeJob& job : opened->jobs) job.stream = stream;
    const auto& jobs = opened->jobs;
    if (jobs.empty()) {
        std::uint8_t only[256];
        for (int c = 0; c < contexts; ++c) {
            const auto* row = frequencies + c * alphabet;
            only[c] = static_cast<std::uint8_t>(std::find(row, row + alphabet, kTotal) - row);
        }
        if (!ctx.data)
            std::memset(symbols, only[0], n);
        else
            for (std::size_t i = 0; i < n; ++i) symbols[i] = only[ctx.of(i)];
        return opened->size;
    }
    const DecodeModel model(frequencies, alphabet, contexts, ctx.data && !ctx.per_step, opened->layout);
    std::atomic<bool> good{true};
    parallel_for(jobs.size(), 1, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t c = begin; c < end && good.load(std::memory_order_relaxed); c += 2) {
            const bool fine = c + 1 < end ? decode_two_chunks(model, jobs[c], jobs[c + 1]) : decode_chunk(model, jobs[c]);
            if (!fine) good.store(false);
        }
    });
    return good ? opened->size : kBad;
}

std::unique_ptr<Opened> open_message(const std::uint8_t* data, std::size_t size, std::size_t n, int alphabet, Contexts ctx, int contexts,
                                     std::uint8_t* symbols) {
    if (size == 0 || !is_chunk(data[0])) return nullptr;
    auto opened = std::make_unique<Opened>(Layout(n, alphabet, data[0]));
    opened->frequencies.resize(static_cast<std::size_t>(alphabet) * static_cast<std::size_t>(contexts));
    const std::size_t tables = read_tables(data + 1, size - 1, alphabet, contexts, opened->frequencies.data());
    if (tables == kBad) return nullptr;
    opened->size = 1 + tables;
    if (!informative(opened->frequencies.data(), opened->frequencies.size())) return opened;
    return find_chunks(data + opened->size, size - opened->size, ctx, symbols, *opened) ? std::move(opened) : nullptr;
}

}  // namespace tersegrad::rans
