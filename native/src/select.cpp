#include "tersegrad/select.hpp"

#include <algorithm>
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

// Candidates of one contiguous part of the vector. Positions are relative to the part's begin, which is below 2^31 long.
struct Part {
    std::size_t begin = 0, end = 0, size = 0;
    std::size_t equal = 0;  // how many candidates have exactly the threshold's key
    bool gave_up = false;
    Scratch<std::int32_t> indices;
    Scratch<float> values;

    void reserve(std::size_t wanted) {
        indices.reserve(wanted);
        values.reserve(wanted);
    }
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

// Collects key >= threshold, but no more than about `ties` coordinates with key == threshold a part; stops early (gave_up) above
// `most` coordinates with a larger key.
void collect(const float* x, std::uint32_t threshold, std::size_t ties, std::size_t most, std::size_t expected, Part& part) {
    const Table& t = table();
    const std::size_t length = part.end - part.begin;
    part.size = part.equal = 0;
    part.reserve(std::min(expected, length) + block + 16);
    for (std::size_t at = 0; at < length; at += block) {
        const std::size_t here = std::min(block, length - at);
        part.reserve(part.size + here + 16);
        const bool full = part.equal >= ties;
        const float* values = part.values.get() + part.size;
        const std::size_t found = t.scan(x + part.begin + at, here, threshold + full, static_cast<std::int32_t>(at),
                                         part.indices.get() + part.size, part.values.get() + part.size);
        part.size += found;
        if (!full) {
            std::size_t equal = 0;
            for (std::size_t j = 0; j < found; ++j) equal += key(values[j]) == threshold;
            part.equal += equal;
        }
        if (part.size - part.equal > most) {
            part.gave_up = true;
            return;
        }
    }
}

// The rank-th largest key (rank >= 1) among those within [low, 2^31) over all parts; `high` is a guess from above. Narrows a range
// of keys by histograms until one is left. On return `rank` is the rank among those with that very key.
template <class Visit>
std::uint32_t kth_key(Visit&& visit, std::size_t& rank, std::uint32_t low, std::uint32_t high) {
    constexpr std::uint32_t bins = 2048, last = 0x7fffffffu;
    std::uint64_t from = low, to = std::clamp<std::uint64_t>(high, low, last);  // inclusive; above `to` lies the overflow bin
    std::uint64_t top = last;
    std::vector<std::uint32_t> histogram(4 * (bins + 1));
    for (;;) {
        int shift = 0;
        while (((to - from) >> shift) >= bins) ++shift;
        std::fill(histogram.begin(), histogram.end(), 0);
        visit([&](const float* v, std::size_t n) {
            const std::uint32_t base = static_cast<std::uint32_t>(from), width = static_cast<std::uint32_t>(top - from);
            std::uint32_t* const counts = histogram.data();
            for (std::size_t i = 0; i < n; ++i) {
                const std::uint32_t d = key(v[i]) - base;
                if (d > width) continue;  // below `from` (wrapped) or above `top`
                ++counts[(i & 3) * (bins + 1) + std::min(d >> shift, bins)];
            }
        });
        std::size_t above = 0;
        std::uint32_t b = bins;
        for (;; --b) {
            const std::size_t here = std::size_t{histogram[b]} + histogram[b + bins + 1] + histogram[b + 2 * (bins + 1)] +
                                     histogram[b + 3 * (bins + 1)];
            if (above + here >= rank || b == 0) break;
            above += here;
        }
        rank -= above;
        const std::uint64_t bin_from = from + (std::uint64_t{b} << shift);
        const std::uint64_t bin_to = b == bins ? top : std::min(top, bin_from + (std::uint64_t{1} << shift) - 1);
        from = bin_from;
        to = top = bin_to;
        if (from == to) return static_cast<std::uint32_t>(from);
    }
}

// Sampled runs of 16 coordinates: run j of `runs` lies in the j-th of `runs` equal strata of the n / 16 runs, at a place that
// a multiplicative hash of j chooses, so that no period of the data can meet all of them.
std::vector<std::uint32_t> sample(const float* x, std::size_t n) {
    const std::uint64_t all = n / 16;
    const std::uint64_t runs = std::min<std::uint64_t>(all, std::clamp<std::uint64_t>(all / 16, 64, 4096));
    std::vector<std::uint32_t> keys;
    keys.reserve(runs * 16);
    for (std::uint64_t j = 0; j < runs; ++j) {
        const std::uint64_t first = j * all / runs, width = (j + 1) * all / runs - first;
        const std::uint64_t hash = (j * 0x9e3779b1u) & 0xffffffffu;
        const float* run = x + 16 * (first + (hash * width >> 32));
        for (int i = 0; i < 16; ++i) keys.push_back(key(run[i]));
    }
    if (runs == 0)
        for (std::size_t i = 0; i < n; ++i) keys.push_back(key(x[i]));
    return keys;
}

std::uint32_t largest(std::vector<std::uint32_t>& keys, std::size_t rank) {
    if (rank > keys.size()) return 0;
    std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(rank - 1), keys.end(), std::greater<>());
    return keys[rank - 1];
}

// Writes what the parts hold with key > threshold, and `ties` of key == threshold in index order; returns how many.
template <class I>
std::size_t gather_parts(std::vector<Part>& parts, std::uint32_t threshold, std::size_t ties, I* indices, float* values) {
    const Table& t = table();
    if constexpr (sizeof(I) == 4)
        if (parts.size() == 1)
            return t.filter(parts[0].indices.get(), parts[0].values.get(), parts[0].size, threshold, &ties, indices, values);
    std::vector<std::size_t> allowed(parts.size());
    for (std::size_t p = 0; p < parts.size(); ++p) {
        std::size_t equal = 0;
        for (std::size_t j = 0; j < parts[p].size; ++j) equal += key(parts[p].values[j]) == threshold;
        allowed[p] = std::min(ties, equal);
        ties -= allowed[p];
    }
    parallel_for(parts.size(), 1, 1, [&](std::size_t b, std::size_t e) {
        for (std::size_t p = b; p < e; ++p) {
            Part& part = parts[p];
            part.size = t.filter(part.indices.get(), part.values.get(), part.size, threshold, &allowed[p], part.indices.get(),
                                 part.values.get());
        }
    });
    std::size_t total = 0;
    for (std::size_t p = 0; p < parts.size(); ++p) {
        for (std::size_t j = 0; j < parts[p].size; ++j)
            indices[total + j] = static_cast<I>(parts[p].begin) + static_cast<I>(parts[p].indices[j]);
        if (parts[p].size) std::memcpy(values + total, parts[p].values.get(), parts[p].size * 4);
        total += parts[p].size;
    }
    return total;
}

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
    each(parts, [&](Part& part) { part.gave_up = !table().finite(x + part.begin, part.end - part.begin); });
    return std::none_of(parts.begin(), parts.end(), [](const Part& p) { return p.gave_up; });
}

std::uint32_t sample_key(const float* x, std::size_t n, std::size_t k) {
    std::vector<std::uint32_t> keys = sample(x, n);
    if (keys.empty() || k == 0) return infinite_key;
    const auto rank = static_cast<std::size_t>((static_cast<unsigned __int128>(k) * keys.size() + n - 1) / n);
    return std::clamp<std::uint32_t>(largest(keys, rank), 1, infinite_key);
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
        part.equal = total;
    });
    std::size_t total = 0, written = 0;
    for (Part& part : parts) {
        const std::size_t take = std::min(part.size, limit - written);
        for (std::size_t j = 0; j < take; ++j) indices[written + j] = static_cast<I>(part.begin) + static_cast<I>(part.indices[j]);
        if (take) std::memcpy(values + written, part.values.get(), take * 4);
        written += take;
        total += part.equal;
    }
    return total;
}

template <class I>
std::size_t top_k(const float* x, std::size_t n, std::size_t k, I* indices, float* values) {
    if (n == 0 || k == 0) return 0;
    k = std::min(k, n);
    std::vector<Part> parts = split(n);

    // A bracket of the k-th key from a sample: six standard deviations on both sides, so that one scan nearly always does.
    std::uint32_t low = 1, high = infinite_key;
    if (n >= 4096) {
        std::vector<std::uint32_t> keys = sample(x, n);
        const double expected = static_cast<double>(k) / static_cast<double>(n) * static_cast<double>(keys.size());
        const double slack = 6 * std::sqrt(expected) + 8;
        const auto below = static_cast<std::size_t>(expected + slack);
        low = std::clamp<std::uint32_t>(largest(keys, below), 1, infinite_key);
        if (expected > slack + 1) {
            keys.resize(std::min(keys.size(), below));  // nth_element left the largest ones in front
            high = std::clamp<std::uint32_t>(largest(keys, static_cast<std::size_t>(expected - slack)), low, infinite_key);
        }
    }
    const std::size_t most = 4 * k + (std::size_t{1} << 16);
    each(parts, [&](Part& part) { collect(x, low, k, most, k / parts.size() + k / 2, part); });

    std::size_t size = 0, equal = 0;
    bool gave_up = false;
    for (const Part& part : parts) size += part.size, equal += part.equal, gave_up |= part.gave_up;

    std::uint32_t threshold = low;
    std::size_t ties = std::min(equal, k - std::min(k, size - equal));
    if (gave_up || (size < k && low > 1)) {
        // The sample misled: find the k-th key in the whole vector, then scan again.
        ties = k;
        threshold = kth_key([&](auto&& body) { body(x, n); }, ties, 0, infinite_key);
        if (threshold == 0) threshold = 1, ties = n;  // fewer than k are not zero: all of them
        each(parts, [&](Part& part) { collect(x, threshold, k, n, k, part); });
    } else if (size - equal >= k) {
        ties = k;
        threshold = kth_key(
            [&](auto&& body) {
                for (const Part& part : parts) body(part.values.get(), part.size);
            },
            ties, low, high);
    }
    return gather_parts(parts, threshold, ties, indices, values);
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
