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

// Chooses from the chunks of a region, band by band: a row of chunks each.
class Chooser {
  public:
    explicit Chooser(const Region& r)
        : r_(r), across_(r.cols / r.width), room_(most() + r.width + 16), tile_(r.size() + 16), values_(r.size() + 32),
          indices_(r.size() + 32), keys_(r.size() + 32), guesses_(across_), counts_(across_) {}

    // Of the band at x; false where a coordinate is not finite. ready(first, count) comes before any of these coordinates is looked at.
    template <class Ready>
    bool operator()(const float* x, std::int32_t* places, float* values, Ready&& ready) {
        const std::size_t k = r_.kept;
        const std::uint32_t before = guesses_[0];
        // Chunks of one row lie one after another anyway.
        const bool ahead = k < r_.size() && r_.height > 1 && across_ > 1 && before;
        const std::size_t first = ahead ? r_.width : r_.cols;
        for (std::size_t row = 0; row < r_.height; ++row) ready(row * r_.cols, first);
        if (!one(x, before, guesses_[0], places, values)) return false;
        if (ahead) look_ahead(x, static_cast<std::int64_t>(guesses_[0]) - before, ready);
        for (std::size_t c = 1; c < across_; ++c) {
            const float* const chunk = x + c * r_.width;
            std::int32_t* const p = places + c * k;
            float* const v = values + c * k;
            if (ahead && fits(counts_[c])) {
                const std::uint32_t low = guesses_[c];
                if (!narrow(band_indices_.data() + c * room_, band_values_.data() + c * room_, counts_[c], low, guesses_[c], p, v)) return false;
                continue;
            }
            if (c + 1 < across_) prefetch(chunk + r_.width);
            if (!one(chunk, guesses_[c - 1], guesses_[c], p, v)) return false;
        }
        return true;
    }

  private:
    static constexpr std::uint32_t margin = 1 << 19;  // 3 to 6 per cent

    // So many candidates are worth going through.
    std::size_t most() const { return 4 * r_.kept + 32; }
    bool fits(std::size_t found) const { return found >= r_.kept && found <= most(); }

    // Candidates of all chunks but the first, whose guesses are those of the band before, changed as that of the first was. Row by row, as
    // they lie in memory.
    template <class Ready>
    void look_ahead(const float* x, std::int64_t change, Ready&& ready) {
        const select::Table& table = select::table();
        band_values_.resize(across_ * room_);
        band_indices_.resize(across_ * room_);
        for (std::size_t c = 1; c < across_; ++c) {
            guesses_[c] = static_cast<std::uint32_t>(std::clamp<std::int64_t>(guesses_[c] + change, 0, select::infinite_key));
            // Where there is no guess, there are too many.
            counts_[c] = guesses_[c] ? 0 : most() + 1;
        }
        for (std::size_t row = 0; row < r_.height; ++row) {
            ready(row * r_.cols + r_.width, r_.cols - r_.width);
            for (std::size_t c = 1; c < across_; ++c) {
                std::size_t& found = counts_[c];
                if (found > most()) continue;
                found += table.scan(x + row * r_.cols + c * r_.width, r_.width, guesses_[c], static_cast<std::int32_t>(row * r_.width),
                                    band_indices_.data() + c * room_ + found, band_values_.data() + c * room_ + found);
            }
        }
    }

    // From one chunk, which is looked at with a guess; what is a good one for the next.
    bool one(const float* x, std::uint32_t low, std::uint32_t& guess, std::int32_t* places, float* values) {
        const std::size_t n = r_.size();
        if (r_.kept == n) {
            for (std::size_t i = 0; i < n; ++i) places[i] = static_cast<std::int32_t>(i);
            for (std::size_t row = 0; row < r_.height; ++row) std::memcpy(values + row * r_.width, x + row * r_.cols, 4 * r_.width);
            return select::all_finite(values, n);
        }
        std::size_t found = low ? scan(x, low) : 0;
        if (!fits(found)) {
            low = bound(x);
            found = scan(x, low);
        }
        return narrow(indices_.data(), values_.data(), found, low, guess, places, values);
    }

    // The largest among candidates with a key of at least `low`; false where one is not finite.
    bool narrow(const std::int32_t* indices, const float* candidates, std::size_t found, std::uint32_t low, std::uint32_t& guess,
                std::int32_t* places, float* values) {
        const std::size_t k = r_.kept;
        std::uint32_t top = 0;
        for (std::size_t j = 0; j < found; ++j) top = std::max(top, keys_[j] = select::key(candidates[j]));
        if (top >= select::infinite_key) return false;
        const std::uint32_t threshold = loops().kth(keys_.data(), found, k, low, top);
        guess = threshold > margin ? threshold - margin : 0;
        std::size_t above = 0;
        for (std::size_t j = 0; j < found; ++j) above += keys_[j] > threshold;
        std::size_t ties = k - above, to = 0;
        for (std::size_t j = 0; j < found; ++j) {
            const bool tie = keys_[j] == threshold, keep = keys_[j] > threshold || (tie && ties);
            ties -= tie && keep;
            if (to == k) break;
            places[to] = indices[j];
            values[to] = candidates[j];
            to += keep;
        }
        return true;
    }

    // Coordinates with a key of at least `low`, in order; how many there are.
    std::size_t scan(const float* x, std::uint32_t low) {
        const select::Table& table = select::table();
        std::size_t found = 0;
        for (std::size_t row = 0; row < r_.height; ++row)
            found += table.scan(x + row * r_.cols, r_.width, low, static_cast<std::int32_t>(row * r_.width), indices_.data() + found, values_.data() + found);
        return found;
    }

    // A key that at least k coordinates reach: the k-th largest among the maxima of some 2 k groups. About 1.4 k reach it.
    std::uint32_t bound(const float* x) {
        const std::size_t n = r_.size(), k = r_.kept, groups = std::max<std::size_t>(64, std::bit_ceil(2 * k));
        if (groups > n / 2) return 0;
        for (std::size_t row = 0; row < r_.height; ++row) std::memcpy(tile_.data() + row * r_.width, x + row * r_.cols, 4 * r_.width);
        maxima_.resize(groups);
        loops().maxima(tile_.data(), n, groups, maxima_.data());
        std::nth_element(maxima_.begin(), maxima_.begin() + static_cast<std::ptrdiff_t>(k - 1), maxima_.end(), std::greater<>());
        return std::min(maxima_[k - 1], select::infinite_key);
    }

    void prefetch(const float* x) const {
        for (std::size_t row = 0; row < r_.height; ++row)
            for (std::size_t at = 0; at < r_.width; at += 16) __builtin_prefetch(x + row * r_.cols + at);
    }

    const Region& r_;
    std::size_t across_, room_;
    std::vector<float> tile_, values_;
    std::vector<std::int32_t> indices_;
    std::vector<std::uint32_t> keys_, maxima_, guesses_;
    // Of the chunks of a band: how many candidates there are, and these.
    std::vector<std::size_t> counts_;
    std::vector<float> band_values_;
    std::vector<std::int32_t> band_indices_;
};

// Chooses from chunks. ready(first, count) comes before any of these coordinates is looked at.
template <class Ready>
bool by_chunks(const float* x, const std::vector<Region>& regions, std::int32_t* places, float* values, Ready&& ready) {
    std::atomic<bool> finite{true};
    for (const Region& r : regions) {
        const std::size_t across = r.cols / r.width;
        parallel_for(r.rows / r.height, 1, std::max<std::size_t>(1, grain / across), [&](std::size_t begin, std::size_t end) {
            Chooser chooser(r);
            for (std::size_t band = begin; band < end; ++band) {
                const std::size_t at = r.offset(band * across), first = band * across * r.kept;
                if (!chooser(x + at, places + first, values + first, [&](std::size_t from, std::size_t count) { ready(at + from, count); })) {
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
    // A row is still in a cache when it is looked at.
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
