// Which coordinates of a chunk are sent: a chunk is halved again and again, and the number in the left half is coded as what it is for a
// random set, a hypergeometric number. Every set of a chunk takes the same number of bits, log2 C(n, k).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "tersegrad/chunks.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::chunks {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr std::size_t stream_places = 2048;  // a stream ends with the chunk that reaches them
constexpr u64 lowest = u64{1} << 31;         // states before a split are below it only where no words are left

[[noreturn]] void corrupt(const char* why) { throw std::invalid_argument(why); }

// Nodes of up to so many places with two chosen ones are not split: the pair is one digit.
constexpr u32 largest_pair = 4096;
u64 pairs(u64 size) { return size * (size - 1) / 2; }

// Quotient and rest of a division by a number below 2^24, which is made a product. Rarely the first quotient is one too large.
struct Divider {
    u64 base = 1, inverse = 0;
    u64 least = 0;  // states before a digit is read are below it only where no words are left: 2^31, rounded up to a multiple
    u64 limit = 0;  // states from there on are too large for one more digit
    explicit Divider(u64 b) : base(b), inverse(~u64{0} / b + 1), least((lowest + b - 1) / b * b), limit(least / b << 32) {}
    u64 operator()(u64 x, u64& rest) const {
        if (base == 1) return rest = 0, x;
        u64 quotient = static_cast<u64>((static_cast<unsigned __int128>(x) * inverse) >> 64);
        rest = x - quotient * base;
        if (rest >> 63) rest += base, --quotient;
        return quotient;
    }
};

// How many of the c chosen ones of a node lie in its left half: at least `first`; starts in units of 2^-16, the last one 65536.
struct Split {
    const u32* starts;
    const std::uint8_t* hint;  // where to look for a slot, by its upper five bits
    u32 first;
};

constexpr std::size_t hints = 32;

// The same for up to fifteen chosen ones, each in a cache line: e[1], e[2], ... are the last slots of the numbers, e[0] is the one before the
// first.
constexpr u32 few = 15;
struct alignas(64) SmallSplit {
    u16 e[few + 2];
    u16 first;

    u32 start(u32 j) const { return static_cast<u16>(e[j] + 1); }
    u32 frequency(u32 j) const { return static_cast<u16>(e[j + 1] - e[j]); }
    u32 find(u32 slot) const {
#if defined(__SSE2__)
        const __m128i all = _mm_set1_epi16(static_cast<short>(slot)), zero = _mm_setzero_si128();
        const auto* const last = reinterpret_cast<const __m128i*>(e + 1);
        const __m128i low = _mm_cmpeq_epi16(_mm_subs_epu16(all, _mm_loadu_si128(last)), zero);
        const __m128i high = _mm_cmpeq_epi16(_mm_subs_epu16(all, _mm_loadu_si128(last + 1)), zero);
        const int reached = _mm_movemask_epi8(_mm_packs_epi16(low, high));
        return static_cast<u32>(__builtin_ctz(static_cast<unsigned>(reached)));  // the last one is always reached
#else
        u32 j = 0;
        while (e[j + 1] < slot) ++j;
        return j;
#endif
    }
};

// A part of a chunk in one word: from the lowest bits on, how many are chosen in it, where the first of them stands among the places that are
// at hand, its first coordinate, and its kind. 16 bits each.
using Node = u64;
constexpr Node node_of(u64 chosen, u64 place, u64 kind = 0) { return chosen | place << 16 | kind << 48; }
constexpr u32 chosen_in(Node node) { return static_cast<u16>(node); }
constexpr u32 place_of(Node node) { return static_cast<u16>(node >> 16); }
constexpr u32 base_of(Node node) { return static_cast<u16>(node >> 32); }
constexpr u32 kind_of(Node node) { return static_cast<u32>(node >> 48); }

// What nodes of one size at one depth have in common, so that a node finds it all in one place.
struct Kind {
    SmallSplit small[few + 1];      // by the number of chosen ones, from two on
    const Split* splits;            // the same for any number
    u64 to_first, to_second;        // what is added to a node for its halves, but for their numbers of chosen ones
    u32 left;                       // the size of the left half
    u16 alone_first, alone_second;  // a half with so many or fewer is not split: the rest is a digit
    u32 whole_first, whole_second;  // a half with so many is sent whole
    Divider one, two;               // digits of nodes with one and with two chosen coordinates
};

// All splits of chunks of n coordinates that keep at most k. At a depth nodes have one of two sizes.
class Model {
  public:
    Model(u32 n, u32 k) {
        std::vector<std::size_t> offsets;
        for (int depth = 0;; ++depth) {
            const u32 small = n >> depth, large = (n + (u32{1} << depth) - 1) >> depth;
            if (large < 3) break;
            for (u32 size : {small, small + 1})
                for (u32 c = 0; c <= k; ++c) {
                    offsets.push_back(starts_.size());
                    splits_.push_back({nullptr, nullptr, 0});
                    if (c >= 2 && c < size && size <= large) splits_.back().first = add(size, c);
                    hint_.resize(splits_.size() * hints);
                }
        }
        for (std::size_t j = 0; j < splits_.size(); ++j) {
            splits_[j].starts = starts_.data() + offsets[j];
            splits_[j].hint = hint_.data() + j * hints;
        }
        for (u32 depth = 0; depth <= 17; ++depth)
            for (u32 size : {n >> depth, (n >> depth) + 1}) {
                const u32 left = (size + 1) / 2, right = size / 2, less = n >> (depth + 1), next = 2 * depth + 2;
                const u64 own = kinds_.size(), first = next + (left > less), second = next + (right > less);
                const Divider two(size < 2 || alone(size) < 2 ? 1 : pairs(size));
                kinds_.push_back({{}, nullptr, node_of(0, 0, first - own), node_of(0, 0, second - own) + (u64{left} << 32), left, alone(left),
                                  alone(right), std::max<u32>(left, 2), std::max<u32>(right, 2), Divider(std::max<u64>(size, 1)), two});
                if (own * (k + 1) < splits_.size()) kinds_.back().splits = splits_.data() + own * (k + 1);
            }
        for (std::size_t j = 0; j < splits_.size(); ++j) {
            const std::size_t kind = j / (k + 1), c = j % (k + 1);
            if (c < 2 || c > few || (j + 1 < offsets.size() ? offsets[j + 1] : starts_.size()) == offsets[j]) continue;
            SmallSplit& small = kinds_[kind].small[c];
            std::fill(small.e, small.e + few + 2, u16{0xffff});
            small.first = static_cast<u16>(splits_[j].first);
            for (std::size_t i = 1; splits_[j].starts[i - 1] != 65536; ++i) small.e[i] = static_cast<u16>(splits_[j].starts[i] - 1);
        }
    }
    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    // The kind of a chunk is the first one.
    const Kind* kinds() const { return kinds_.data(); }

    // A node of such a size with so many chosen ones or fewer is not split.
    static u16 alone(u32 size) { return size <= largest_pair ? 2 : 1; }

    // Models outlive a call: to make one takes longer than to use it.
    static std::shared_ptr<const Model> of(u32 n, u32 k) {
        static std::mutex mutex;
        static std::map<std::pair<u32, u32>, std::shared_ptr<const Model>> kept;
        const std::lock_guard lock(mutex);
        if (const auto found = kept.find({n, k}); found != kept.end()) return found->second;
        if (kept.size() >= 64) kept.clear();
        return kept[{n, k}] = std::make_shared<const Model>(n, k);
    }

  private:
    // Appends the starts of one split, and its hints; returns the least number.
    u32 add(u32 size, u32 c) {
        const u32 left = (size + 1) / 2, right = size / 2;
        const u32 first = c > right ? c - right : 0, last = std::min(c, left);
        const u32 mode = std::clamp<u32>(static_cast<u32>(u64{c + 1} * (left + 1) / (size + 2)), first, last);
        std::vector<double> w(last - first + 1);
        w[mode - first] = 1.0;
        for (u32 a = mode + 1; a <= last; ++a)
            w[a - first] = w[a - 1 - first] * static_cast<double>(u64{left - a + 1} * (c - a + 1)) / static_cast<double>(u64{a} * (right - c + a));
        for (u32 a = mode; a-- > first;)
            w[a - first] = w[a + 1 - first] * static_cast<double>(u64{a + 1} * (right - c + a + 1)) / static_cast<double>(u64{left - a} * (c - a));
        double sum = 0;
        for (double one : w) sum += one;
        const double scale = static_cast<double>(65536 - w.size()) / sum;
        std::vector<u32> f(w.size());
        u32 total = 0;
        for (std::size_t j = 0; j < w.size(); ++j) total += f[j] = 1 + static_cast<u32>(std::floor(w[j] * scale));
        f[mode - first] += 65536 - total;
        const std::size_t offset = starts_.size();
        starts_.push_back(0);
        for (u32 one : f) starts_.push_back(starts_.back() + one);
        hint_.resize(splits_.size() * hints);
        std::uint8_t* const hint = hint_.data() + (splits_.size() - 1) * hints;
        for (std::size_t h = 0, j = 0; h < hints; ++h) {
            while (starts_[offset + j + 1] <= h * (65536 / hints)) ++j;
            hint[h] = static_cast<std::uint8_t>(j);
        }
        return first;
    }

    std::vector<Split> splits_;
    std::vector<Kind> kinds_;
    std::vector<u32> starts_;
    std::vector<std::uint8_t> hint_;
};

struct Run {  // chunks of one region that one stream holds
    const Region* region;
    std::size_t chunks, first;  // the first of their places among all
    std::shared_ptr<const Model> model;
};

// What each stream holds. Chunks that are sent whole are in none.
std::vector<std::vector<Run>> streams(const std::vector<Region>& regions) {
    std::vector<std::vector<Run>> found;
    std::size_t held = stream_places, first = 0;
    for (const Region& r : regions) {
        if (r.kept < r.size() && r.count()) {
            const auto model = Model::of(static_cast<u32>(r.size()), static_cast<u32>(r.kept));
            for (std::size_t chunk = 0; chunk < r.count();) {
                if (held >= stream_places) found.emplace_back(), held = 0;
                const std::size_t here = std::min(r.count() - chunk, (stream_places - held + r.kept - 1) / r.kept);
                found.back().push_back({&r, here, first + chunk * r.kept, model});
                chunk += here;
                held += here * r.kept;
            }
        }
        first += r.places();
    }
    return found;
}

class Reader {
  public:
    // `padded`: the words of the stream, and one more that is never used.
    Reader(const u32* padded, std::size_t words) : next_(padded), end_(padded + words) {
        if (!words) corrupt("a stream of chunk sets has no words");
        state_ = *next_++;
    }
    u32 split(const Split& s) {
        fill(lowest);
        const u32 slot = static_cast<u32>(state_ & 0xffff);
        u32 j = s.hint[slot >> 11];
        while (s.starts[j + 1] <= slot) ++j;
        state_ = (s.starts[j + 1] - s.starts[j]) * (state_ >> 16) + (slot - s.starts[j]);
        return s.first + j;
    }
    u32 split(const SmallSplit& s) {
        fill(lowest);
        const u32 slot = static_cast<u32>(state_ & 0xffff), j = s.find(slot);
        state_ = s.frequency(j) * (state_ >> 16) + (slot - s.start(j));
        return s.first + j;
    }
    u32 digit(const Divider& by) {
        fill(by.least);
        u64 rest;
        state_ = by(state_, rest);
        return static_cast<u32>(rest);
    }
    void finish() const {
        if (state_ != 1 || next_ != end_) corrupt("a stream of chunk sets does not end where it should");
    }

  private:
    // Without a branch, which would often be foretold wrongly: compilers make one of a choice between two values.
    void fill(u64 least) {
        const u64 needed = (state_ < least) & (next_ != end_);
        state_ = state_ << (32 * needed) | (*next_ & (0 - needed));
        next_ += needed;
    }
    const u32 *next_, *end_;
    u64 state_ = 0;
};

// The chunks of a stream, one after another.
class Chunks {
  public:
    explicit Chunks(const std::vector<Run>& runs) : run_(runs.data()), end_(runs.data() + runs.size()) {}

    const Run& run() const { return *run_; }
    std::size_t first() const { return first_; }  // of its places among all
    bool next() {
        while (run_ != end_ && chunk_ == run_->chunks) ++run_, chunk_ = 0;
        if (run_ == end_) return false;
        first_ = run_->first + chunk_++ * run_->region->kept;
        return true;
    }

  private:
    const Run *run_, *end_;
    std::size_t chunk_ = 0, first_ = 0;
};

// Halves nodes until none is left. A lane is what becomes of a stream: split(node, kind) tells the number in the left half, whole(node) gets
// those that are sent whole, next() goes on to the next chunk and gives its node, and nodes with one or two chosen ones that are a digit are
// put where `waiting` points to. After a split the left half is looked at, then the right one; of those to be split, the left comes first.
// What nodes turn out to be cannot be foretold, so that there are no branches on it.
struct Walk {
    Node stack[24];
    std::size_t held = 0;

    // Whether there is a node to be split.
    template <class Lane>
    bool more(Lane& lane) {
        while (!held) {
            if (!lane.next(stack[0])) return false;
            const u16 alone = Model::alone(static_cast<u32>(lane.chunks.run().region->size()));
            const u32 chosen = chosen_in(stack[0]);
            wait(lane, stack[0], chosen, alone);
            held = chosen > alone;
        }
        return true;
    }

    template <class Lane>
    [[gnu::always_inline]] void step(Lane& lane) {
        const Node node = stack[--held];
        const Kind& kind = lane.kinds[kind_of(node)];
        const u32 a = lane.split(node, kind), b = chosen_in(node) - a;
        // Of the places, the left half has the first ones.
        const Node first = node + kind.to_first - b, second = node + kind.to_second + u64{a} * 0xffff;
        wait(lane, first, a, kind.alone_first);
        wait(lane, second, b, kind.alone_second);
        bool open_first = a > kind.alone_first, open_second = b > kind.alone_second;
        if ((a == kind.whole_first) | (b == kind.whole_second)) [[unlikely]] {
            if (open_second & (b == kind.whole_second)) lane.whole(second), open_second = false;
            if (open_first & (a == kind.whole_first)) lane.whole(first), open_first = false;
        }
        stack[held] = second;
        held += open_second;
        stack[held] = first;
        held += open_first;
    }

    // Nodes that do not wait are written over.
    template <class Lane>
    [[gnu::always_inline]] static void wait(Lane& lane, Node node, u32 chosen, u32 alone) {
        *lane.waiting = node;
        lane.waiting += chosen - 1 < alone;
    }
};

// Two streams in turn: while one waits for a number, the other goes on. Lanes are copied, so that they may lie in registers.
template <class Lane>
void walk(Lane& first, Lane& second) {
    Lane a = first, b = second;
    Walk one, two;
    while (one.more(a) && two.more(b))
        do one.step(a), two.step(b);
        while (one.held && two.held);
    while (one.more(a)) one.step(a);
    while (two.more(b)) two.step(b);
    first = a, second = b;
}

// each(node, its kind) for the nodes of a stream that wait. `stride`: from the places of a chunk to those of the next one, but for how many
// they are.
template <class Each>
void each_waiting(const std::vector<Run>& runs, std::size_t stride, const Node* node, const Node* last, Each&& each) {
    std::size_t end = 0;
    for (const Run& run : runs) {
        end += run.chunks * (run.region->kept + stride);
        for (const Kind* const kinds = run.model->kinds(); node != last && place_of(*node) < end; ++node) each(*node, kinds[kind_of(*node)]);
    }
}

struct Digit {  // of a node whose one or two chosen coordinates it tells
    Node node;
    const Divider* by;
};

// A stream that is read: first its splits, then the digits of the nodes that waited for them.
struct Reading {
    Chunks chunks;
    Reader reader;
    Node* waiting;         // behind the last one
    std::int32_t* places;  // of the stream
    std::int32_t* ranks;   // of pairs, behind the last one
    const Kind* kinds = nullptr;
    std::size_t read = 0;  // places of the chunks so far

    bool next(Node& node) {
        if (!chunks.next()) return false;
        const std::size_t kept = chunks.run().region->kept;
        kinds = chunks.run().model->kinds();
        node = node_of(kept, read);
        read += kept;
        return true;
    }
    [[gnu::always_inline]] u32 split(Node node, const Kind& kind) {
        const u32 c = chosen_in(node);
        return c <= few ? reader.split(kind.small[c]) : reader.split(kind.splits[c]);
    }
    void whole(Node node) {
        for (u32 j = 0; j < chosen_in(node); ++j) places[place_of(node) + j] = static_cast<std::int32_t>(base_of(node) + j);
    }
    void one(const Digit& d) { places[place_of(d.node)] = static_cast<std::int32_t>(base_of(d.node) + reader.digit(*d.by)); }
    void two(const Digit& d) { *ranks++ = static_cast<std::int32_t>(reader.digit(*d.by)); }
};

// Pairs by their ranks: the higher of both is the largest j with j (j - 1) / 2 <= rank. All roots first, several at once: one takes as long
// as to read a digit.
void put_pairs(const Digit* pairs, const std::int32_t* ranks, std::size_t count, std::int32_t* places) {
    constexpr std::size_t block = 64;
    std::int32_t highs[block];
    for (std::size_t first = 0; first < count; first += block) {
        const std::size_t here = std::min(block, count - first);
        for (std::size_t j = 0; j < here; ++j) {
            // Ranks are below 2^23, and roundings come to less than 2^-9: cut off, this is j or one less.
            const auto near = static_cast<std::int32_t>(std::sqrt(8.0f * static_cast<float>(ranks[first + j]) + 1.0f) * 0.5f + (0.5f - 0x1p-9f));
            highs[j] = near + (near * (near + 1) / 2 <= ranks[first + j]);
        }
        for (std::size_t j = 0; j < here; ++j) {
            const Node node = pairs[first + j].node;
            const std::int32_t high = highs[j], base = static_cast<std::int32_t>(base_of(node));
            places[place_of(node)] = base + ranks[first + j] - high * (high - 1) / 2;
            places[place_of(node) + 1] = base + high;
        }
    }
}

// each(first, one of its nodes) and each(second, one of its) in turn.
template <class Each>
void in_turn(Reading& first, const Digit* from, const Digit* to, Reading& second, const Digit* begin, const Digit* end, Each&& each) {
    Reading a = first, b = second;
    while (from != to && begin != end) each(a, *from++), each(b, *begin++);
    while (from != to) each(a, *from++);
    while (begin != end) each(b, *begin++);
    first = a, second = b;
}

// Memory of a stream that is read. Nodes are written before it is known whether they wait, so that there is room for one more.
struct Room {
    std::vector<u32> words;
    std::vector<Node> waiting;
    std::vector<Digit> ones, twos;
    Digit *end_of_ones, *end_of_twos;
    std::vector<std::int32_t> ranks, places;

    Reading begin(const std::uint8_t* data, std::size_t count, const std::vector<Run>& runs) {
        words.resize(count + 1);
        waiting.resize(stream_places + most_kept + 1);
        ones.resize(stream_places + most_kept + 1);
        twos.resize(stream_places + most_kept + 1);
        ranks.resize(stream_places + most_kept);
        places.resize(stream_places + most_kept);
        std::memcpy(words.data(), data, 4 * count);
        return {Chunks(runs), Reader(words.data(), count), waiting.data(), places.data(), ranks.data()};
    }
    // What waits, by the number of chosen ones.
    void sort(const Reading& read, const std::vector<Run>& runs) {
        Digit *one = ones.data(), *two = twos.data();
        each_waiting(runs, 0, waiting.data(), read.waiting, [&](Node node, const Kind& kind) {
            *one = {node, &kind.one}, *two = {node, &kind.two};
            const bool pair = chosen_in(node) == 2;
            one += !pair, two += pair;
        });
        end_of_ones = one, end_of_twos = two;
    }
    void end(const Reading& read, const std::vector<Run>& runs, std::int32_t* to) {
        read.reader.finish();
        put_pairs(twos.data(), ranks.data(), static_cast<std::size_t>(end_of_twos - twos.data()), places.data());
        const std::int32_t* from = places.data();
        for (const Run& run : runs) {
            const std::size_t count = run.chunks * run.region->kept;
            std::memcpy(to + run.first, from, 4 * count);
            from += count;
        }
    }
};

// One stream and another one in turn. A stream alone is read with one that holds nothing.
struct Source {
    const std::uint8_t* data;
    std::size_t words;
    const std::vector<Run>& runs;
};

void read_streams(Room& one, const Source& from, Room& two, const Source& of, std::int32_t* places) {
    Reading a = one.begin(from.data, from.words, from.runs), b = two.begin(of.data, of.words, of.runs);
    walk(a, b);
    one.sort(a, from.runs);
    two.sort(b, of.runs);
    in_turn(a, one.ones.data(), one.end_of_ones, b, two.ones.data(), two.end_of_ones, [](Reading& r, const Digit& d) { r.one(d); });
    in_turn(a, one.twos.data(), one.end_of_twos, b, two.twos.data(), two.end_of_twos, [](Reading& r, const Digit& d) { r.two(d); });
    one.end(a, from.runs, places);
    two.end(b, of.runs, places);
}

// One number to be coded: a split by its slots, or a digit `start` among `f`. States from `limit` on give a word away before.
struct Step {
    u32 start, f;
    u64 limit;
};

// Behind the places of a chunk stand some that lie in no node.
constexpr std::size_t behind = 8;

// What the chunks of a stream have to be coded as.
struct Collecting {
    Chunks chunks;
    const std::int32_t* places;
    Step* splits;      // behind the last one
    Node* waiting;     // likewise
    std::int32_t* at;  // the places of the stream
    const Kind* kinds = nullptr;
    std::size_t held = 0;  // places of the chunks so far, with those behind

    bool next(Node& node) {
        if (!chunks.next()) return false;
        kinds = chunks.run().model->kinds();
        const Region& region = *chunks.run().region;
        const std::size_t k = region.kept;
        std::int32_t* const mine = at + held;
        std::memcpy(mine, places + chunks.first(), 4 * k);
        std::fill(mine + k, mine + k + behind, std::numeric_limits<std::int32_t>::max());
        bool increase = mine[0] >= 0 && mine[k - 1] < static_cast<std::int32_t>(region.size());
        for (std::size_t j = 1; j < k; ++j) increase &= mine[j] > mine[j - 1];
        if (!increase) corrupt("places must increase within their chunk");
        node = node_of(k, held);
        held += k + behind;
        return true;
    }
    [[gnu::always_inline]] u32 split(Node node, const Kind& kind) {
        const u32 c = chosen_in(node);
        const std::int32_t* const mine = at + place_of(node);
        const auto border = static_cast<std::int32_t>(base_of(node) + kind.left);
        // Places of nodes to the right are beyond the border. The sign of the difference, which fits: GCC 12 for 64-bit Arm counts eight
        // comparisons as minus their number.
        u32 in_left = 0;
        for (u32 first = 0; first < c; first += behind)
            for (u32 j = 0; j < behind; ++j) in_left += static_cast<u32>(mine[first + j] - border) >> 31;
        u32 start, f;
        if (c <= few) {
            const SmallSplit& s = kind.small[c];
            start = s.start(in_left - s.first), f = s.frequency(in_left - s.first);
        } else {
            const Split& s = kind.splits[c];
            const u32 j = in_left - s.first;
            start = s.starts[j], f = s.starts[j + 1] - s.starts[j];
        }
        *splits++ = {start, f, u64{f} << 47};
        return in_left;
    }
    void whole(Node) {}
};

std::size_t most_words(const std::vector<Run>& runs) {
    std::size_t bits = 0;
    for (const Run& run : runs) bits += run.chunks * run.region->kept * static_cast<std::size_t>(std::bit_width(run.region->size() - 1));
    return (bits + 31) / 32 + 3;
}

// A stream in work. Its numbers are coded from the last to the first: pairs, single ones, splits.
class Writer {
  public:
    // Two streams at once; runs may be empty.
    static void collect(Writer& a, const std::vector<Run>& first, Writer& b, const std::vector<Run>& second, const std::int32_t* places) {
        Collecting one = a.begin(first, places), two = b.begin(second, places);
        walk(one, two);
        a.end(one, first), b.end(two, second);
    }

    // Codes two streams in turn: while one waits for a division, the other goes on.
    static void code(Writer& a, Writer& b) {
        in_turn(a, b, a.twos_.data(), a.number_of_twos_, b.twos_.data(), b.number_of_twos_, [](Writer& w, const Step& s) { w.digit(s); });
        in_turn(a, b, a.ones_.data(), a.number_of_ones_, b.ones_.data(), b.number_of_ones_, [](Writer& w, const Step& s) { w.digit(s); });
        in_turn(a, b, a.splits_.data(), a.number_of_splits_, b.splits_.data(), b.number_of_splits_, [](Writer& w, const Step& s) { w.split(s); });
    }

    // The words in the order of reading.
    std::vector<u32> finish() {
        put(true);
        put(state_ != 0);
        return {std::make_reverse_iterator(words_.begin() + static_cast<std::ptrdiff_t>(number_)), words_.rend()};
    }

  private:
    Collecting begin(const std::vector<Run>& runs, const std::int32_t* places) {
        // Steps are written before it is known whether there is one, so that there is room for one more.
        // At each of up to 17 depths a node that is split has at least two.
        splits_.resize(9 * (stream_places + most_kept) + 1);
        ones_.resize(stream_places + most_kept + 1);
        twos_.resize(stream_places + most_kept + 1);
        waiting_.resize(stream_places + most_kept + 1);
        at_.resize((1 + behind) * (stream_places + most_kept));
        words_.resize(most_words(runs) + 1);
        number_ = 0;
        state_ = 1;
        return {Chunks(runs), places, splits_.data(), waiting_.data(), at_.data()};
    }
    void end(const Collecting& found, const std::vector<Run>& runs) {
        number_of_splits_ = static_cast<std::size_t>(found.splits - splits_.data());
        Step *one = ones_.data(), *two = twos_.data();
        each_waiting(runs, behind, waiting_.data(), found.waiting, [&](Node node, const Kind& kind) {
            const std::int32_t* const mine = at_.data() + place_of(node);
            const u32 low = static_cast<u32>(mine[0]) - base_of(node), high = static_cast<u32>(mine[1]) - base_of(node);
            *one = {low, static_cast<u32>(kind.one.base), kind.one.limit};
            *two = {low + high * (high - 1) / 2, static_cast<u32>(kind.two.base), kind.two.limit};
            const bool pair = chosen_in(node) == 2;
            one += !pair, two += pair;
        });
        number_of_ones_ = static_cast<std::size_t>(one - ones_.data());
        number_of_twos_ = static_cast<std::size_t>(two - twos_.data());
    }

    template <class Code>
    static void in_turn(Writer& a, Writer& b, const Step* first, std::size_t n, const Step* second, std::size_t m, Code&& code) {
        while (n && m) code(a, first[--n]), code(b, second[--m]);
        while (n) code(a, first[--n]);
        while (m) code(b, second[--m]);
    }

    void split(const Step& s) {
        put(state_ >= s.limit);
        const u64 quotient = state_ / s.f;
        state_ = (quotient << 16) + (state_ - quotient * s.f) + s.start;
    }
    void digit(const Step& s) {
        put(state_ >= s.limit);
        state_ = state_ * s.f + s.start;
    }
    // Without a branch, as above.
    void put(u64 needed) {
        words_[number_] = static_cast<u32>(state_);
        number_ += needed;
        state_ >>= 32 * needed;
    }

    std::vector<Step> splits_, ones_, twos_;
    std::size_t number_of_splits_ = 0, number_of_ones_ = 0, number_of_twos_ = 0, number_ = 0;
    u64 state_ = 1;
    std::vector<u32> words_;
    std::vector<Node> waiting_;
    std::vector<std::int32_t> at_;
};

}  // namespace

std::size_t capacity(const std::vector<Region>& regions) {
    std::size_t total = 0;
    const auto all = streams(regions);
    for (const auto& runs : all) total += 4 * most_words(runs);
    return total + (all.empty() ? 0 : 2 * (all.size() - 1));
}

std::size_t encode(const std::int32_t* places, const std::vector<Region>& regions, std::uint8_t* out) {
    const auto all = streams(regions);
    if (all.empty()) return 0;
    std::vector<std::vector<u32>> written(all.size());
    const std::vector<Run> nothing;
    parallel_for(all.size(), 2, 4, [&](std::size_t begin, std::size_t end) {
        // They keep their memory.
        thread_local Writer one, two;
        for (std::size_t s = begin; s < end; s += 2) {
            const bool both = s + 1 < end;
            Writer::collect(one, all[s], two, both ? all[s + 1] : nothing, places);
            Writer::code(one, two);
            written[s] = one.finish();
            if (both) written[s + 1] = two.finish();
        }
    });
    std::uint8_t* at = out + 2 * (all.size() - 1);
    for (std::size_t s = 0; s < all.size(); ++s) {
        const auto length = static_cast<u16>(written[s].size());
        if (s + 1 < all.size()) std::memcpy(out + 2 * s, &length, 2);
        std::memcpy(at, written[s].data(), 4 * written[s].size());
        at += 4 * written[s].size();
    }
    return static_cast<std::size_t>(at - out);
}

void decode(const std::uint8_t* data, std::size_t size, const std::vector<Region>& regions, std::int32_t* places) {
    const auto all = streams(regions);
    std::size_t first = 0;
    for (const Region& r : regions) {
        if (r.kept == r.size())
            for (std::size_t j = 0; j < r.places(); ++j) places[first + j] = static_cast<std::int32_t>(j % r.size());
        first += r.places();
    }
    if (all.empty()) {
        if (size) corrupt("bytes follow the end of the message");
        return;
    }
    const std::size_t head = 2 * (all.size() - 1);
    if (size < head) corrupt("the lengths of the streams are missing");
    std::vector<std::size_t> begins(all.size() + 1, head);
    for (std::size_t s = 0; s + 1 < all.size(); ++s) {
        u16 length;
        std::memcpy(&length, data + 2 * s, 2);
        begins[s + 1] = begins[s] + 4 * std::size_t{length};
    }
    begins.back() = size;
    if (begins[all.size() - 1] > size || (size - begins[all.size() - 1]) % 4) corrupt("the streams do not fill the message");
    // What is read where there is no second stream.
    constexpr std::uint8_t end_alone[] = {1, 0, 0, 0};
    const std::vector<Run> nothing;
    parallel_for(all.size(), 2, 4, [&](std::size_t begin, std::size_t end) {
        thread_local Room one, two;
        for (std::size_t s = begin; s < end; s += 2) {
            const auto at = [&](std::size_t number) -> Source {
                return {data + begins[number], (begins[number + 1] - begins[number]) / 4, all[number]};
            };
            read_streams(one, at(s), two, s + 1 < end ? at(s + 1) : Source{end_alone, 1, nothing}, places);
        }
    });
}

}  // namespace tersegrad::chunks
