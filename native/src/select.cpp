#include "tersegrad/select.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "select_feistel.inl"
#include "tersegrad/runtime.hpp"

namespace tersegrad::select {
namespace {

constexpr std::size_t block = 1 << 14;        // coordinates scanned between two looks at the buffers
constexpr std::size_t grain = 1 << 18;        // coordinates that pay for a thread
constexpr std::size_t cache_bytes = 16 << 20;  // outputs above this go around the caches

// ---- portable kernels ---------------------------------------------------------------------------------------------------------

std::size_t scan(const float* x, std::size_t n, std::uint32_t threshold, std::int32_t base, std::int32_t* indices, float* values) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < n; ++i) {
        indices[count] = base + static_cast<std::int32_t>(i);
        values[count] = x[i];
        count += key(x[i]) >= threshold;
    }
    return count;
}

std::size_t filter(const std::int32_t* indices, const float* values, std::size_t n, std::uint32_t threshold, std::size_t* ties,
                   std::int32_t* out_indices, float* out_values) {
    std::size_t count = 0, left = *ties;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t k = key(values[i]);
        bool keep = k > threshold;
        if (k == threshold && left) --left, keep = true;
        if (keep) out_indices[count] = indices[i], out_values[count] = values[i], ++count;
    }
    *ties = left;
    return count;
}

bool finite(const float* x, std::size_t n) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < n; ++i) largest = std::max(largest, key(x[i]));
    return largest < infinite_key;
}

// ---- growing buffers of candidates --------------------------------------------------------------------------------------------

// Buffers outlive the call: fresh memory costs more in page faults than the selection itself. A few, up to 64 MiB each.
class Pool {
  public:
    struct Buffer {
        void* data = nullptr;
        std::size_t bytes = 0;
    };

    Buffer take() {
        const std::lock_guard lock(mutex_);
        if (free_.empty()) return {};
        const auto most = std::max_element(free_.begin(), free_.end(), [](const Buffer& a, const Buffer& b) { return a.bytes < b.bytes; });
        const Buffer found = *most;
        free_.erase(most);
        return found;
    }

    void give(Buffer buffer) {
        if (!buffer.data) return;
        if (buffer.bytes <= std::size_t{64} << 20) {
            const std::lock_guard lock(mutex_);
            if (free_.size() < 16) {
                free_.push_back(buffer);
                return;
            }
        }
        std::free(buffer.data);
    }

    Pool() { free_.reserve(16); }
    ~Pool() {
        for (const Buffer& buffer : free_) std::free(buffer.data);
    }

  private:
    std::mutex mutex_;
    std::vector<Buffer> free_;
};

Pool& pool() {
    static Pool shared;
    return shared;
}

template <class T>
class Scratch {
  public:
    Scratch() = default;
    Scratch(Scratch&& other) noexcept : buffer_(std::exchange(other.buffer_, {})) {}
    Scratch& operator=(Scratch&&) = delete;
    ~Scratch() { pool().give(buffer_); }

    T* get() const { return static_cast<T*>(buffer_.data); }
    T& operator[](std::size_t i) const { return get()[i]; }

    void reserve(std::size_t wanted) {
        if (!buffer_.data) buffer_ = pool().take();
        if (wanted * sizeof(T) <= buffer_.bytes) return;
        const std::size_t bytes = std::max(wanted * sizeof(T), buffer_.bytes * 2);
        void* grown = std::realloc(buffer_.data, bytes);
        if (!grown) throw std::bad_alloc();
        buffer_ = {grown, bytes};
    }

  private:
    Pool::Buffer buffer_;
};

// A growing list of coordinates.
struct Candidates {
    std::size_t size = 0;
    Scratch<std::int32_t> indices;
    Scratch<float> values;

    void reserve(std::size_t wanted) {
        indices.reserve(wanted);
        values.reserve(wanted);
    }
};

// One contiguous part of the vector, and what was chosen there. Positions are relative to the part's begin, which is below 2^31
// long.
struct Part : Candidates {
    std::size_t begin = 0, end = 0, total = 0;
    bool finite = true;
};

// Parts of [0, n) for the threads; at most 2^30 coordinates each, so that positions fit in 32 bits.
std::vector<Part> split(std::size_t n) {
    std::size_t parts = static_cast<std::size_t>(plan_threads(n, grain));
    parts = std::max(parts, (n + (std::size_t{1} << 30) - 1) >> 30);
    std::vector<Part> out(std::max<std::size_t>(parts, 1));
    for (std::size_t p = 0; p < out.size(); ++p) {
        const std::size_t blocks = (n + block - 1) / block;
        out[p].begin = std::min(n, blocks * p / out.size() * block);
        out[p].end = std::min(n, blocks * (p + 1) / out.size() * block);
    }
    return out;
}

template <class Body>
void each(std::vector<Part>& parts, Body&& body) {
    parallel_for(parts.size(), 1, 1, [&](std::size_t b, std::size_t e) {
        for (std::size_t p = b; p < e; ++p) body(parts[p]);
    });
}

// Sampled runs of 16 coordinates: run j of `runs` lies in the j-th of `runs` equal strata of the n / 16 runs, at a place that
// a multiplicative hash of j chooses, so that no period of the data can meet all of them. Below 16 coordinates: all.
std::size_t sample_size(std::size_t n) {
    const std::uint64_t all = n / 16;
    return all == 0 ? n : 16 * std::min<std::uint64_t>(all, std::clamp<std::uint64_t>(all / 16, 64, 4096));
}

// Writes the share of one of `threads` threads of the sample.
void sample(const float* x, std::size_t n, std::size_t thread, std::size_t threads, float* out) {
    const std::uint64_t all = n / 16, runs = sample_size(n) / 16;
    if (all == 0) {
        if (thread == 0) std::copy(x, x + n, out);
        return;
    }
    for (std::uint64_t j = runs * thread / threads; j < runs * (thread + 1) / threads; ++j) {
        const std::uint64_t first = j * all / runs, width = (j + 1) * all / runs - first;
        const std::uint64_t hash = (j * 0x9e3779b1u) & 0xffffffffu;
        std::memcpy(out + 16 * j, x + 16 * (first + (hash * width >> 32)), 64);
    }
}

// The `rank` largest keys of a sample, of which the last is the smallest; fewer if the sample has fewer.
std::vector<std::uint32_t> largest(const float* sample, std::size_t size, std::size_t rank) {
    if (rank == 0 || size == 0) return {};
    const auto leading = [](std::uint32_t* keys, std::size_t count, std::size_t wanted) {
        std::nth_element(keys, keys + wanted - 1, keys + count, std::greater<>());
        return keys[wanted - 1];
    };
    Scratch<std::uint32_t> keys;
    keys.reserve(size);
    std::uint32_t least = 0;
    if (size >= 4096 && rank < size / 4) {  // a part of the sample tells which keys need not be looked at
        const std::size_t part = size / 16;
        for (std::size_t i = 0; i < part; ++i) keys[i] = key(sample[16 * i]);
        const double expected = static_cast<double>(rank) / 16;
        least = leading(keys.get(), part, std::min(part, static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 4)));
    }
    const auto collect = [&] {
        std::size_t count = 0;
        for (std::size_t i = 0; i < size; ++i) {
            keys[count] = key(sample[i]);
            count += key(sample[i]) >= least;
        }
        return count;
    };
    std::size_t count = collect();
    if (count < rank && least > 0) least = 0, count = collect();
    rank = std::min(rank, count);
    leading(keys.get(), count, rank);
    return {keys.get(), keys.get() + rank};
}

// ---- the k largest ------------------------------------------------------------------------------------------------------------

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
            // Two histograms a thread in turn: one may still be read while the other is written.
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

// A block's worth of indices that the network maps, with those that landed at or above n sent round again.
template <class Each>
void walk(const Permutation& p, std::size_t begin, std::size_t end, Each&& each) {
    const Table& t = table();
    const int bits = p.n > 1 ? 64 - std::countl_zero(p.n - 1) : 0, left_bits = bits / 2, right_bits = bits - left_bits;
    const std::uint64_t right_mask = (std::uint64_t{1} << right_bits) - 1;
    constexpr std::size_t width = 512;
    std::uint32_t left[width], right[width];
    std::uint16_t slot[width];
    std::uint64_t image[width];
    for (std::size_t at = begin; at < end; at += width) {
        const std::size_t here = std::min(width, end - at);
        for (std::size_t i = 0; i < here; ++i) {
            left[i] = static_cast<std::uint32_t>((at + i) >> right_bits);
            right[i] = static_cast<std::uint32_t>((at + i) & right_mask);
            slot[i] = static_cast<std::uint16_t>(i);
        }
        for (std::size_t open = here; open;) {
            t.feistel(p.keys, left_bits, right_bits, left, right, open);
            std::size_t again = 0;
            for (std::size_t i = 0; i < open; ++i) {
                const std::uint64_t v = std::uint64_t{left[i]} << right_bits | right[i];
                image[slot[i]] = v;
                left[again] = left[i], right[again] = right[i], slot[again] = slot[i];
                again += v >= p.n;
            }
            open = again;
        }
        for (std::size_t i = 0; i < here; ++i) {
            image[i] += p.rotation;
            image[i] -= image[i] >= p.n ? p.n : 0;
        }
        each(at, here, image);
    }
}

constexpr std::size_t window = 1024;

// Stores a window of floats to 16-byte aligned memory around the caches.
void stream(float* out, const float* from) {
#if defined(__SSE2__)
    for (std::size_t i = 0; i < window; i += 4) _mm_stream_ps(out + i, _mm_loadu_ps(from + i));
#else
    std::memcpy(out, from, window * 4);
#endif
}

}  // namespace

const Table table_portable = {scan, filter, finite, feistel_network};

const Table& table() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return table_avx512;
    if (isa() == Isa::avx2) return table_avx2;
#endif
    return table_portable;
}

bool all_finite(const float* x, std::size_t n) {
    std::vector<Part> parts = split(n);
    each(parts, [&](Part& part) { part.finite = table().finite(x + part.begin, part.end - part.begin); });
    return std::all_of(parts.begin(), parts.end(), [](const Part& p) { return p.finite; });
}

std::uint32_t sample_key(const float* x, std::size_t n, std::size_t k) {
    if (n == 0 || k == 0) return infinite_key;
    const std::size_t size = sample_size(n);
    Scratch<float> sampled;
    sampled.reserve(size);
    sample(x, n, 0, 1, sampled.get());
    const auto rank = static_cast<std::size_t>((static_cast<unsigned __int128>(k) * size + n - 1) / n);
    const std::vector<std::uint32_t> keys = largest(sampled.get(), size, rank);
    return keys.size() == rank ? std::clamp<std::uint32_t>(keys.back(), 1, infinite_key) : 1;
}

template <class I>
std::size_t compact(const float* x, std::size_t n, std::uint32_t threshold, std::size_t limit, I* indices, float* values) {
    threshold = std::max<std::uint32_t>(threshold, 1);
    std::vector<Part> parts = split(n);
    const Table& t = table();
    each(parts, [&](Part& part) {
        const std::size_t length = part.end - part.begin;
        std::size_t total = 0;
        part.reserve(std::min(limit, length) / parts.size() + block + 16);
        for (std::size_t at = 0; at < length; at += block) {
            const std::size_t here = std::min(block, length - at), keep = std::min(part.size, limit);
            part.reserve(keep + here + 16);
            const std::size_t found = t.scan(x + part.begin + at, here, threshold, static_cast<std::int32_t>(at),
                                             part.indices.get() + keep, part.values.get() + keep);
            part.size = keep + found;
            total += found;
        }
        part.size = std::min(part.size, limit);
        part.total = total;
    });
    std::size_t total = 0, written = 0;
    for (Part& part : parts) {
        const std::size_t take = std::min(part.size, limit - written);
        for (std::size_t j = 0; j < take; ++j) indices[written + j] = static_cast<I>(part.begin) + static_cast<I>(part.indices[j]);
        if (take) std::memcpy(values + written, part.values.get(), take * 4);
        written += take;
        total += part.total;
    }
    return total;
}

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

template <class I>
void scatter(const I* indices, const float* values, std::size_t count, float* out, std::size_t n) {
    if (!increasing(indices, count, n)) throw std::invalid_argument("indices must increase strictly and lie within the vector");
    const bool around = n * 4 > cache_bytes;
    parallel_for(n, block, grain, [&](std::size_t b, std::size_t e) {
        const I* at = std::lower_bound(indices, indices + count, static_cast<I>(b));
        const I* const end = indices + count;
        auto place = [&](float* target, std::size_t from, std::size_t to) {
            for (; at != end && static_cast<std::size_t>(*at) < to; ++at)
                target[static_cast<std::size_t>(*at) - from] = values[at - indices];
        };
        alignas(64) float buffer[window];
        std::size_t i = b;
        if (around) {
            const std::size_t ahead = (64 - reinterpret_cast<std::uintptr_t>(out + i) % 64) % 64 / 4;
            const std::size_t head = std::min(e, i + ahead);
            std::memset(out + i, 0, (head - i) * 4);
            place(out + i, i, head);
            i = head;
            for (; i + window <= e; i += window) {
                std::memset(buffer, 0, sizeof buffer);
                place(buffer, i, i + window);
                stream(out + i, buffer);
            }
#if defined(__SSE2__)
            _mm_sfence();
#endif
        }
        for (; i < e; i += std::min(block, e - i)) {
            const std::size_t to = std::min(e, i + block);
            std::memset(out + i, 0, (to - i) * 4);
            place(out + i, i, to);
        }
    });
}

template <class I>
void scatter_add(const I* indices, const float* values, std::size_t count, float weight, float* out, std::size_t n) {
    if (!increasing(indices, count, n)) throw std::invalid_argument("indices must increase strictly and lie within the vector");
    constexpr std::size_t ahead = 32;
    parallel_for(count, 16, grain / 16, [&](std::size_t b, std::size_t e) {
        for (std::size_t j = b; j < e; ++j) {
            if (j + ahead < e) __builtin_prefetch(out + indices[j + ahead], 1);
            const float product = weight * values[j];
            out[indices[j]] += product;
        }
    });
}

template <class I>
void permuted_indices(const Permutation& p, std::size_t k, I* indices) {
    parallel_for(k, 512, grain / 16, [&](std::size_t b, std::size_t e) {
        walk(p, b, e, [&](std::size_t at, std::size_t here, const std::uint64_t* image) {
            for (std::size_t i = 0; i < here; ++i) indices[at + i] = static_cast<I>(image[i]);
        });
    });
}

void permuted_gather(const Permutation& p, const float* x, std::size_t k, float* values) {
    parallel_for(k, 512, grain / 16, [&](std::size_t b, std::size_t e) {
        walk(p, b, e, [&](std::size_t at, std::size_t here, const std::uint64_t* image) {
            for (std::size_t i = 0; i < here; ++i) __builtin_prefetch(x + image[i]);
            for (std::size_t i = 0; i < here; ++i) values[at + i] = x[image[i]];
        });
    });
}

void permuted_scatter(const Permutation& p, const float* values, std::size_t k, float* out) {
    const bool around = p.n * 4 > cache_bytes;
    parallel_for(p.n, block, grain, [&](std::size_t b, std::size_t e) {
        std::size_t i = b;
        if (around) {
            alignas(64) static const float zeros[window] = {};
            const std::size_t ahead = (64 - reinterpret_cast<std::uintptr_t>(out + i) % 64) % 64 / 4;
            const std::size_t head = std::min(e, i + ahead);
            std::memset(out + i, 0, (head - i) * 4);
            for (i = head; i + window <= e; i += window) stream(out + i, zeros);
#if defined(__SSE2__)
            _mm_sfence();
#endif
        }
        std::memset(out + i, 0, (e - i) * 4);
    });
    parallel_for(k, 512, grain / 16, [&](std::size_t b, std::size_t e) {
        walk(p, b, e, [&](std::size_t at, std::size_t here, const std::uint64_t* image) {
            for (std::size_t i = 0; i < here; ++i) __builtin_prefetch(out + image[i], 1);
            for (std::size_t i = 0; i < here; ++i) out[image[i]] = values[at + i];
        });
    });
}

void permuted_scatter_add(const Permutation& p, const float* values, std::size_t k, float weight, float* out) {
    parallel_for(k, 512, grain / 16, [&](std::size_t b, std::size_t e) {
        walk(p, b, e, [&](std::size_t at, std::size_t here, const std::uint64_t* image) {
            for (std::size_t i = 0; i < here; ++i) __builtin_prefetch(out + image[i], 1);
            for (std::size_t i = 0; i < here; ++i) {
                const float product = weight * values[at + i];
                out[image[i]] += product;
            }
        });
    });
}

#define INSTANTIATE(I)                                                                                                        \
    template std::size_t compact<I>(const float*, std::size_t, std::uint32_t, std::size_t, I*, float*);                       \
    template std::size_t top_k<I>(const float*, std::size_t, std::size_t, I*, float*);                                        \
    template void scatter<I>(const I*, const float*, std::size_t, float*, std::size_t);                                       \
    template void scatter_add<I>(const I*, const float*, std::size_t, float, float*, std::size_t);                            \
    template void permuted_indices<I>(const Permutation&, std::size_t, I*);
INSTANTIATE(std::int32_t)
INSTANTIATE(std::int64_t)

}  // namespace tersegrad::select
