#include "tersegrad/chunks.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

#include "around_caches.hpp"
#include "chunks_loops.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/select.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::chunks {
namespace {

// Chunks that are worth a thread.
constexpr std::size_t grain = 32;

const Loops& loops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return loops_avx512;
    if (isa() == Isa::avx2) return loops_avx2;
#endif
    return loops_portable;
}

// Chooses from one chunk after another.
class Chooser {
  public:
    explicit Chooser(std::size_t most) : tile_(most + 16), values_(most + 32), indices_(most + 32), keys_(most + 32) {}

    // Of the chunk at x; false where a coordinate is not finite.
    bool operator()(const float* x, const Region& r, std::int32_t* places, float* values) {
        const std::size_t n = r.size(), k = r.kept;
        if (k == n) {
            for (std::size_t i = 0; i < n; ++i) places[i] = static_cast<std::int32_t>(i);
            for (std::size_t row = 0; row < r.height; ++row) std::memcpy(values + row * r.width, x + row * r.cols, 4 * r.width);
            return select::all_finite(values, n);
        }
        // What the chunk before kept tells about where to look.
        std::uint32_t low = guess_;
        std::size_t found = low ? scan(x, r, low) : 0;
        if (found < k || found > 4 * k + 32) {
            low = bound(x, r);
            found = scan(x, r, low);
        }
        std::uint32_t top = 0;
        for (std::size_t j = 0; j < found; ++j) top = std::max(top, keys_[j] = select::key(values_[j]));
        if (top >= select::infinite_key) return false;
        const std::uint32_t threshold = loops().kth(keys_.data(), found, k, low, top);
        guess_ = threshold > margin ? threshold - margin : 0;
        std::size_t above = 0;
        for (std::size_t j = 0; j < found; ++j) above += keys_[j] > threshold;
        std::size_t ties = k - above, to = 0;
        for (std::size_t j = 0; j < found; ++j) {
            const bool tie = keys_[j] == threshold, keep = keys_[j] > threshold || (tie && ties);
            ties -= tie && keep;
            if (to == k) break;
            places[to] = indices_[j];
            values[to] = values_[j];
            to += keep;
        }
        return true;
    }

  private:
    static constexpr std::uint32_t margin = 1 << 19;  // 3 to 6 per cent

    // Coordinates with a key of at least `low`, in order; how many there are.
    std::size_t scan(const float* x, const Region& r, std::uint32_t low) {
        const select::Table& table = select::table();
        std::size_t found = 0;
        for (std::size_t row = 0; row < r.height; ++row)
            found += table.scan(x + row * r.cols, r.width, low, static_cast<std::int32_t>(row * r.width), indices_.data() + found, values_.data() + found);
        return found;
    }

    // A key that at least k coordinates reach: the k-th largest among the maxima of some 2 k groups. About 1.4 k reach it.
    std::uint32_t bound(const float* x, const Region& r) {
        const std::size_t n = r.size(), k = r.kept, groups = std::max<std::size_t>(64, std::bit_ceil(2 * k));
        if (groups > n / 2) return 0;
        for (std::size_t row = 0; row < r.height; ++row) std::memcpy(tile_.data() + row * r.width, x + row * r.cols, 4 * r.width);
        maxima_.resize(groups);
        loops().maxima(tile_.data(), n, groups, maxima_.data());
        std::nth_element(maxima_.begin(), maxima_.begin() + static_cast<std::ptrdiff_t>(k - 1), maxima_.end(), std::greater<>());
        return std::min(maxima_[k - 1], select::infinite_key);
    }

    std::uint32_t guess_ = 0;
    std::vector<float> tile_, values_;
    std::vector<std::int32_t> indices_;
    std::vector<std::uint32_t> keys_, maxima_;
};

void prefetch(const float* x, const Region& r) {
    for (std::size_t row = 0; row < r.height; ++row)
        for (std::size_t at = 0; at < r.width; at += 16) __builtin_prefetch(x + row * r.cols + at);
}

// Chooses from chunks one after another, band by band: a row of chunks each. begin(first coordinate of a band, how many) comes before.
template <class Begin>
bool by_chunks(const float* x, const std::vector<Region>& regions, std::int32_t* places, float* values, Begin&& begin_band) {
    std::atomic<bool> finite{true};
    for (const Region& r : regions) {
        const std::size_t across = r.cols / r.width;
        parallel_for(r.rows / r.height, 1, std::max<std::size_t>(1, grain / across), [&](std::size_t begin, std::size_t end) {
            Chooser chooser(r.size());
            for (std::size_t c = begin * across; c < end * across; ++c) {
                if (c % across == 0) begin_band(r.offset(c), r.height * r.cols);
                if (c + 1 < end * across) prefetch(x + r.offset(c + 1), r);
                if (!chooser(x + r.offset(c), r, places + c * r.kept, values + c * r.kept)) {
                    finite = false;
                    return;
                }
            }
        });
        if (!finite) return false;
        places += r.places();
        values += r.places();
    }
    return true;
}

// body(region, its places, its values, first and last band) over the bands of all regions: a row of chunks each.
template <class Body>
void by_bands(const std::int32_t* places, const float* values, const std::vector<Region>& regions, Body&& body) {
    for (const Region& r : regions) {
        parallel_for(r.rows / r.height, 1, std::max<std::size_t>(1, (std::size_t{1} << 17) / (r.height * r.cols)),
                     [&](std::size_t begin, std::size_t end) {
                         const std::size_t across = r.cols / r.width;
                         for (std::size_t band = begin; band < end; ++band) {
                             const std::size_t first = band * across * r.kept;
                             body(r, band, places + first, values + first);
                         }
                     });
        places += r.places();
        values += r.places();
    }
}

// The places of some chunks that lie side by side; put(position, value), positions within an area whose rows are `stride` apart.
template <class Put>
void put_chunks(const Region& r, std::size_t chunks, std::size_t stride, const std::int32_t* places, const float* values, Put&& put) {
    const std::size_t n = r.size();
    const bool power = std::has_single_bit(r.width);
    const int shift = std::countr_zero(r.width);
    for (std::size_t chunk = 0; chunk < chunks; ++chunk)
        for (std::size_t j = 0; j < r.kept; ++j) {
            const auto at = static_cast<std::uint32_t>(*places++);
            if (at >= n) throw std::invalid_argument("a place lies outside its chunk");
            const std::size_t row = power ? at >> shift : at / r.width;
            put(row * stride + (at - row * r.width) + chunk * r.width, *values++);
        }
}

// Stores floats to 16-byte aligned memory around the caches; n is a multiple of four.
void stream_row(float* to, const float* from, std::size_t n) {
#if defined(__SSE2__)
    for (std::size_t i = 0; i < n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
#else
    std::memcpy(to, from, 4 * n);
#endif
}

// Chunks side by side are put together in a cache, and stored around the caches.
constexpr std::size_t together = 1 << 16;  // coordinates

void scatter_around(const Region& r, float* to, const std::int32_t* places, const float* values, std::vector<float>& area) {
    const std::size_t across = r.cols / r.width, most = std::clamp<std::size_t>(together / r.size(), 1, across);
    for (std::size_t chunk = 0; chunk < across; chunk += most) {
        const std::size_t chunks = std::min(most, across - chunk), stride = chunks * r.width, first = chunk * r.kept;
        area.resize(r.height * stride);
        put_chunks(r, chunks, stride, places + first, values + first, [&](std::size_t at, float value) { area[at] = value; });
        for (std::size_t row = 0; row < r.height; ++row)
            stream_row(to + chunk * r.width + row * r.cols, area.data() + row * stride, stride);
        put_chunks(r, chunks, stride, places + first, values + first, [&](std::size_t at, float) { area[at] = 0; });
    }
}

}  // namespace

const Loops loops_portable = {maxima_of, kth_of, sum_of};

bool choose(const float* x, const std::vector<Region>& regions, std::int32_t* places, float* values) {
    return by_chunks(x, regions, places, values, [](std::size_t, std::size_t) {});
}

bool carry_and_choose(const float* x, const float* carry, float decay, float* sum, const std::vector<Region>& regions, std::int32_t* places,
                      float* values) {
    const Loops& loop = loops();
    // A band is summed as a whole, and still in a cache when its chunks are looked at.
    return by_chunks(sum, regions, places, values,
                     [&](std::size_t at, std::size_t count) { loop.add(x + at, carry + at, decay, sum + at, count); });
}

void scatter(const std::int32_t* places, const float* values, const std::vector<Region>& regions, float* out) {
    std::size_t numel = 0;
    for (const Region& r : regions) numel += r.numel();
    const bool large = 4 * numel > select::cache_bytes;
    by_bands(places, values, regions, [&](const Region& r, std::size_t band, const std::int32_t* p, const float* v) {
        float* const to = out + r.start + band * r.height * r.cols;
        if (large && reinterpret_cast<std::uintptr_t>(to) % 16 == 0 && r.cols % 4 == 0 && r.width % 4 == 0) {
            thread_local std::vector<float> area;
            scatter_around(r, to, p, v, area);
            return;
        }
        std::memset(to, 0, 4 * r.height * r.cols);
        put_chunks(r, r.cols / r.width, r.cols, p, v, [&](std::size_t at, float value) { to[at] = value; });
    });
    if (large) select::stream_done();
}

void to_bins(const float* values, const std::int64_t* counts, std::size_t tensors, std::size_t bins, std::uint8_t* chosen, float* stands,
             std::int64_t* filled) {
    constexpr float most = std::numeric_limits<float>::max();
    std::vector<float> around;
    for (std::size_t t = 0; t < tensors; ++t) {
        const auto n = static_cast<std::size_t>(counts[t]);
        around.resize(n);
        double sum = 0, squares = 0;
        for (std::size_t j = 0; j < n; ++j) sum += static_cast<double>(values[j]);
        const auto centre = static_cast<float>(sum / static_cast<double>(n));
        for (std::size_t j = 0; j < n; ++j) around[j] = std::clamp(values[j] - centre, -most, most);
        for (std::size_t j = 0; j < n; ++j) squares += static_cast<double>(around[j]) * static_cast<double>(around[j]);
        auto width = static_cast<float>(6 * std::sqrt(squares / (static_cast<double>(n) - 1)) / static_cast<double>(bins));
        if (!(width > 0 && width <= most)) width = 1;
        const auto middle = static_cast<float>(bins / 2), last = static_cast<float>(bins - 1);
        double sums[16] = {};
        for (std::size_t j = 0; j < n; ++j) {
            const float place = around[j] / width + middle;
            const auto bin = static_cast<std::uint8_t>(std::nearbyint(std::clamp(place, 0.0f, last)));
            chosen[j] = bin;
            sums[bin] += static_cast<double>(around[j]);
            ++filled[bin];
        }
        for (std::size_t b = 0; b < bins; ++b) {
            const auto mean = static_cast<float>(sums[b] / static_cast<double>(std::max<std::int64_t>(filled[b], 1)));
            stands[b] = std::clamp(mean + centre, -most, most);
        }
        values += n, chosen += n, stands += bins, filled += bins;
    }
}

void scatter_add(const std::int32_t* places, const float* values, const std::vector<Region>& regions, float weight, float* out) {
    by_bands(places, values, regions, [&](const Region& r, std::size_t band, const std::int32_t* p, const float* v) {
        float* const to = out + r.start + band * r.height * r.cols;
        put_chunks(r, r.cols / r.width, r.cols, p, v, [&](std::size_t at, float value) { to[at] += weight * value; });
    });
}

}  // namespace tersegrad::chunks
