// The k largest coordinates, by all threads of a team.
#include <atomic>
#include <cmath>
#include <functional>

#include "select_sample.hpp"
#include "tersegrad/select.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::select {
namespace {

// A stretch of the vector that some thread took, and where that thread's candidates of it lie.
struct Stretch {
    std::size_t begin = 0, end = 0;
    std::size_t first = 0, size = 0;      // candidates
    std::size_t above = 0, equal = 0;     // those with a key larger than the threshold and with that very key
};

// The k largest by all threads of a team. Every thread goes through all phases, takes the next stretch of the vector when it is
// done with one, and decides from what all of them found, so that all decide the same.
template <class I>
class TopK {
  public:
    TopK(const float* x, std::size_t n, std::size_t k, I* indices, float* values, Team& team)
        : x_(x), n_(n), k_(k), indices_(indices), values_(values), team_(team), sampled_(n >= 4096 ? sample_size(n) : 0) {
        sample_.reserve(sampled_);
        const std::size_t threads = static_cast<std::size_t>(team.size()), wanted = threads == 1 ? n : n / (64 * threads);
        const std::size_t length = std::min((wanted + block - 1) / block * block, std::size_t{1} << 30);  // positions take 31 bits
        for (std::size_t at = 0; at < n; at += length) stretches_.push_back({at, std::min(n, at + length)});
        parts_ = std::vector<Mine>(threads);
        for (Mine& mine : parts_) mine.histogram.resize(2 * bins);
    }

    // What thread `t` does; returns how many coordinates were chosen in all.
    std::size_t operator()(std::size_t t) {
        // A bracket of the k-th key from a sample: six standard deviations on both sides, so that one scan nearly always does.
        std::uint32_t low = 1, high = infinite_key;
        if (sampled_) {
            sample(x_, n_, t, parts_.size(), sample_.get());
            team_.meet();
            const double expected = static_cast<double>(k_) / static_cast<double>(n_) * static_cast<double>(sampled_);
            const double slack = 6 * std::sqrt(expected) + 8;
            const auto below = static_cast<std::size_t>(expected + slack);
            std::vector<std::uint32_t> keys = largest(sample_.get(), sampled_, below);
            if (keys.size() == below) low = std::clamp<std::uint32_t>(keys.back(), 1, infinite_key);
            if (expected > slack + 1) {
                const auto rank = static_cast<std::ptrdiff_t>(expected - slack);
                std::nth_element(keys.begin(), keys.begin() + rank - 1, keys.end(), std::greater<>());
                high = std::clamp<std::uint32_t>(keys[static_cast<std::size_t>(rank - 1)], low, infinite_key);
            }
        }
        const std::size_t most = 4 * k_ + (std::size_t{1} << 16);
        collect(t, low, most, k_ / parts_.size() + k_ / 2, queues_[0]);

        std::size_t size = 0, equal = 0;
        bool gave_up = false;
        for (const Mine& part : parts_) size += part.size, equal += part.equal, gave_up |= part.gave_up;

        std::uint32_t threshold = low;
        std::size_t ties = std::min(equal, k_ - std::min(k_, size - equal));
        if (gave_up || (size < k_ && low > 1)) {
            // The sample misled: find the k-th key in the whole vector, then scan again.
            ties = k_;
            const std::size_t from = n_ * t / parts_.size(), to = n_ * (t + 1) / parts_.size();
            threshold = kth_key(t, x_ + from, to - from, ties, 0, infinite_key);
            if (threshold == 0) threshold = 1, ties = n_;  // fewer than k are not zero: all of them
            collect(t, threshold, n_, k_, queues_[1]);
        } else if (size - equal >= k_) {
            ties = k_;
            threshold = kth_key(t, parts_[t].values.get(), parts_[t].size, ties, low, high);
        }
        return gather(t, threshold, ties);
    }

  private:
    static constexpr std::uint32_t bins = 2049;  // the last one: above the guess

    struct Queue {  // hands out stretches
        std::atomic<std::size_t> next{0};
        std::atomic<bool> stop{false};
    };

    struct alignas(64) Mine : Candidates {  // what one thread found
        std::size_t equal = 0;              // how many have exactly the threshold's key
        bool gave_up = false;
        std::vector<Stretch*> stretches;
        std::vector<std::uint32_t> histogram;
    };

    // Collects key >= threshold, but no more than about k coordinates with key == threshold a thread: those that it leaves out have
    // at least k before them, because stretches are handed out in order. Stops early above `most` coordinates with a larger key.
    void collect(std::size_t t, std::uint32_t threshold, std::size_t most, std::size_t expected, Queue& queue) {
        const Table& table = select::table();
        Mine& mine = parts_[t];
        mine.size = mine.equal = 0;
        mine.gave_up = false;
        mine.stretches.clear();
        mine.reserve(std::min(expected, n_) + block + 16);
        for (std::size_t s; !queue.stop && (s = queue.next++) < stretches_.size();) {
            Stretch& stretch = stretches_[s];
            stretch.first = mine.size;
            mine.stretches.push_back(&stretch);
            for (std::size_t at = stretch.begin; at < stretch.end && !mine.gave_up; at += block) {
                const std::size_t here = std::min(block, stretch.end - at);
                mine.reserve(mine.size + here + 16);
                const bool full = mine.equal >= k_;
                const float* values = mine.values.get() + mine.size;
                const std::size_t found = table.scan(x_ + at, here, threshold + full, static_cast<std::int32_t>(at - origin(stretch)),
                                                     mine.indices.get() + mine.size, mine.values.get() + mine.size);
                mine.size += found;
                if (!full) mine.equal += equal_to(threshold, values, found);
                if (mine.size - mine.equal > most) mine.gave_up = true;
            }
            stretch.size = mine.size - stretch.first;
            if (mine.gave_up) queue.stop = true;
        }
        team_.meet();
    }

    // The rank-th largest key (rank >= 1) among those in [low, 2^31) of the threads' values; `high` is a guess from above. Narrows a
    // range of keys by histograms until one is left. On return `rank` is the rank among those with that very key.
    std::uint32_t kth_key(std::size_t t, const float* v, std::size_t n, std::size_t& rank, std::uint32_t low, std::uint32_t high) {
        constexpr std::uint32_t last = 0x7fffffffu;
        std::uint64_t from = low, to = std::clamp<std::uint64_t>(high, low, last);  // inclusive; above `to` lies the overflow bin
        std::uint64_t top = last;
        std::vector<std::uint32_t> counts(4 * bins);
        for (int pass = 0;; ++pass) {
            int shift = 0;
            while (((to - from) >> shift) >= bins - 1) ++shift;
            std::fill(counts.begin(), counts.end(), 0);
            const std::uint32_t base = static_cast<std::uint32_t>(from), width = static_cast<std::uint32_t>(top - from);
            for (std::size_t i = 0; i < n; ++i) {
                const std::uint32_t d = key(v[i]) - base;
                if (d > width) continue;  // below `from` (wrapped) or above `top`
                ++counts[(i & 3) * bins + std::min(d >> shift, bins - 1)];
            }
            // Two histograms per thread, in turn: one may still be read while the other is written.
            const std::size_t turn = pass % 2 * bins;
            for (std::uint32_t b = 0; b < bins; ++b)
                parts_[t].histogram[turn + b] = counts[b] + counts[b + bins] + counts[b + 2 * bins] + counts[b + 3 * bins];
            team_.meet();
            std::size_t above = 0;
            std::uint32_t b = bins - 1;
            for (;; --b) {
                std::size_t here = 0;
                for (const Mine& part : parts_) here += part.histogram[turn + b];
                if (above + here >= rank || b == 0) break;
                above += here;
            }
            rank -= above;
            from += std::uint64_t{b} << shift;
            if (b < bins - 1) top = std::min(top, from + (std::uint64_t{1} << shift) - 1);
            to = top;
            if (from == to) return static_cast<std::uint32_t>(from);
        }
    }

    // Writes the candidates with key > threshold, and `ties` of key == threshold in index order; returns how many.
    std::size_t gather(std::size_t t, std::uint32_t threshold, std::size_t ties) {
        const Table& table = select::table();
        Mine& mine = parts_[t];
        if constexpr (sizeof(I) == 4)
            if (stretches_.size() == 1)
                return table.filter(mine.indices.get(), mine.values.get(), mine.size, threshold, &ties, indices_, values_);
        for (Stretch* s : mine.stretches) {
            const float* values = mine.values.get() + s->first;
            std::uint32_t above = 0, equal = 0;  // a stretch has at most 2^30
            for (std::size_t j = 0; j < s->size; ++j) {
                const auto k = static_cast<std::int32_t>(key(values[j])), limit = static_cast<std::int32_t>(threshold);
                above += k > limit;
                equal += k == limit;
            }
            s->above = above;
            s->equal = equal;
        }
        team_.meet();
        std::size_t total = 0;
        auto own = mine.stretches.begin();
        for (Stretch& stretch : stretches_) {
            std::size_t allowed = std::min(ties, stretch.equal);
            ties -= allowed;
            const std::size_t to = total;
            total += stretch.above + allowed;
            if (own == mine.stretches.end() || *own != &stretch) continue;
            ++own;
            std::int32_t* const indices = mine.indices.get() + stretch.first;
            const float* const values = mine.values.get() + stretch.first;
            if constexpr (sizeof(I) == 4) {
                table.filter(indices, values, stretch.size, threshold, &allowed, indices_ + to, values_ + to);
            } else {
                const std::size_t kept = table.filter(indices, values, stretch.size, threshold, &allowed, indices, values_ + to);
                for (std::size_t j = 0; j < kept; ++j) indices_[to + j] = static_cast<I>(stretch.begin) + indices[j];
            }
        }
        return total;
    }

    static std::size_t equal_to(std::uint32_t threshold, const float* values, std::size_t n) {
        std::uint32_t equal = 0;
        for (std::size_t j = 0; j < n; ++j) equal += key(values[j]) == threshold;
        return equal;
    }

    // What positions of a stretch's candidates are relative to: 32 bits hold them all, or only those within a stretch.
    static std::size_t origin(const Stretch& stretch) { return sizeof(I) == 4 ? 0 : stretch.begin; }

    const float* const x_;
    const std::size_t n_, k_;
    I* const indices_;
    float* const values_;
    Team& team_;
    const std::size_t sampled_;
    Scratch<float> sample_;
    std::vector<Stretch> stretches_;
    std::vector<Mine> parts_;
    Queue queues_[2];  // of the first and the second scan
};

}  // namespace

template <class I>
std::size_t top_k(const float* x, std::size_t n, std::size_t k, I* indices, float* values) {
    if (n == 0 || k == 0) return 0;
    Team team(plan_threads(n, grain));
    TopK<I> work(x, n, std::min(k, n), indices, values, team);
    std::size_t count = 0;
    team.run([&](int t) {
        const std::size_t found = work(static_cast<std::size_t>(t));
        if (t == 0) count = found;
    });
    return count;
}

template std::size_t top_k<std::int32_t>(const float*, std::size_t, std::size_t, std::int32_t*, float*);
template std::size_t top_k<std::int64_t>(const float*, std::size_t, std::size_t, std::int64_t*, float*);

}  // namespace tersegrad::select
