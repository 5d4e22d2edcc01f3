#include "tersegrad/chunks.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>

#include "around_caches.hpp"
#include "chunks_loops.hpp"
#include "rounding_ops.hpp"
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

// Some sums over n terms in the order of all sums (rounding.hpp). `add(begin, i, places)` adds term begin + i to place i of the 32 that a sum has.
constexpr std::size_t lanes = 32;
using rounding::kSumChunk;
template <class Add>
void in_order(std::size_t n, std::size_t sums, Add&& add, double* out) {
    const std::size_t chunks = (n + kSumChunk - 1) / kSumChunk;
    std::vector<double> by_chunk(sums * chunks), places(sums * lanes);
    for (std::size_t c = 0; c < chunks; ++c) {
        std::fill(places.begin(), places.end(), 0.0);
        const std::size_t end = std::min(n, (c + 1) * kSumChunk);
        double* const at = places.data();
        std::size_t begin = c * kSumChunk;
        for (; begin + lanes <= end; begin += lanes)
            for (std::size_t i = 0; i < lanes; ++i) add(begin, i, at);
        for (std::size_t i = 0; begin + i < end; ++i) add(begin, i, at);
        for (std::size_t s = 0; s < sums; ++s) by_chunk[s * chunks + c] = rounding::fold(at + s * lanes, lanes);
    }
    for (std::size_t s = 0; s < sums && chunks; ++s) out[s] = rounding::fold(by_chunk.data() + s * chunks, chunks);
}

// A vector that lies in memory, read from `data`.
struct Plain {
    const float* data;

    void ready(std::size_t, std::size_t) const {}
    // Candidates of tiles, the first of which begins at coordinate `at`; they become ready.
    void scan(std::size_t at, const Scan& of) const {
        for (std::size_t row = 0; row < of.rows; ++row) scan_row(data + at + row * of.stride, of, row);
    }
};

// One that is added up on the way, from x and what is carried over. Coordinates can be read from `data` after they became ready.
struct Carried {
    float* data;
    const float *x, *carry;
    float decay;
    bool around;  // the caches: they could not hold it

    void ready(std::size_t at, std::size_t n) const { loops().add(x + at, carry + at, decay, data + at, n); }
    void scan(std::size_t at, const Scan& of) const { loops().add_and_scan(x + at, carry + at, decay, data + at, around, of); }
};

// Chooses from the chunks of a region, band by band: a row of chunks each.
template <class Source>
class Chooser {
  public:
    Chooser(const Region& r, const Source& source)
        : r_(r), source_(source), across_(r.cols / r.width), room_(most() + r.width + 16), tile_(r.size() + 16), values_(r.size() + 32),
          indices_(r.size() + 32), keys_(r.size() + 32), guesses_(across_), counts_(across_) {}

    // Of the band at a coordinate; false where one is not finite.
    bool operator()(std::size_t band, std::int32_t* places, float* values) {
        const std::size_t k = r_.kept;
        const std::uint32_t before = guesses_[0];
        // Chunks of one row lie one after another anyway.
        const bool ahead = k < r_.size() && r_.height > 1 && across_ > 1 && before;
        if (!one(band, before, false, guesses_[0], places, values)) return false;
        const std::int64_t change = static_cast<std::int64_t>(guesses_[0]) - before;
        for (std::size_t first = 1; first < across_; first += together) {
            const std::size_t last = std::min(first + together, across_);
            if (ahead) look_ahead(band, first, last, change);
            for (std::size_t c = first; c < last; ++c) {
                const std::size_t chunk = band + c * r_.width;
                std::int32_t* const p = places + c * k;
                float* const v = values + c * k;
                if (ahead && fits(counts_[c])) {
                    const std::size_t at = (c - first) * room_;
                    if (!narrow(band_indices_.data() + at, band_values_.data() + at, counts_[c], guesses_[c], guesses_[c], p, v)) return false;
                    continue;
                }
                if (c + 1 < last) prefetch(source_.data + chunk + r_.width);
                if (!one(chunk, guesses_[c - 1], ahead, guesses_[c], p, v)) return false;
            }
        }
        return true;
    }

  private:
    static constexpr std::uint32_t margin = 1 << 19;  // 3 to 6 per cent
    static constexpr std::size_t together = 64;       // chunks that are looked at row by row

    // So many candidates are worth going through.
    std::size_t most() const { return 4 * r_.kept + 32; }
    bool fits(std::size_t found) const { return found >= r_.kept && found <= most(); }

    // Candidates of some chunks, whose guesses are those of the band before, changed as that of the first was. Row by row, as they lie in
    // memory. To find too few takes longer than to find some more.
    void look_ahead(std::size_t band, std::size_t first, std::size_t last, std::int64_t change) {
        band_values_.resize(together * room_);
        band_indices_.resize(together * room_);
        for (std::size_t c = first; c < last; ++c) {
            guesses_[c] = static_cast<std::uint32_t>(std::clamp<std::int64_t>(guesses_[c] + change - margin / 2, 0, select::infinite_key));
            // Where there is no guess, there are too many.
            counts_[c] = guesses_[c] ? 0 : most() + 1;
        }
        source_.scan(band + first * r_.width, {r_.height, r_.cols, r_.width, last - first, guesses_.data() + first, most(), band_indices_.data(),
                                               band_values_.data(), room_, counts_.data() + first});
    }

    // From one chunk, which is looked at with a guess; what is a good one for the next. Its coordinates may be ready.
    bool one(std::size_t chunk, std::uint32_t low, bool ready, std::uint32_t& guess, std::int32_t* places, float* values) {
        const std::size_t n = r_.size();
        const float* const x = source_.data + chunk;
        const bool whole = r_.kept == n;
        if (!ready && (whole || !low))
            for (std::size_t row = 0; row < r_.height; ++row) source_.ready(chunk + row * r_.cols, r_.width);
        if (whole) {
            for (std::size_t i = 0; i < n; ++i) places[i] = static_cast<std::int32_t>(i);
            for (std::size_t row = 0; row < r_.height; ++row) std::memcpy(values + row * r_.width, x + row * r_.cols, 4 * r_.width);
            return select::all_finite(values, n);
        }
        std::size_t found = 0;
        if (low) found = ready ? scan(Plain{source_.data}, chunk, low) : scan(source_, chunk, low);
        if (!fits(found)) {
            low = bound(x);
            found = scan(Plain{source_.data}, chunk, low);
        }
        return narrow(indices_.data(), values_.data(), found, low, guess, places, values);
    }

    // The largest among candidates with a key of at least `low`; false where one is not finite.
    bool narrow(const std::int32_t* indices, const float* candidates, std::size_t found, std::uint32_t low, std::uint32_t& guess,
                std::int32_t* places, float* values) {
        std::uint32_t top = 0;
        for (std::size_t j = 0; j < found; ++j) top = std::max(top, keys_[j] = select::key(candidates[j]));
        if (top >= select::infinite_key) return false;
        const std::uint32_t threshold = loops().kth(keys_.data(), found, r_.kept, low, top);
        guess = threshold > margin ? threshold - margin : 0;
        std::size_t above = 0;
        for (std::size_t j = 0; j < found; ++j) above += keys_[j] > threshold;
        loops().pick(indices, candidates, keys_.data(), found, threshold, r_.kept, r_.kept - above, places, values);
        return true;
    }

    // Coordinates of a chunk with a key of at least `low`, in order; how many there are.
    template <class From>
    std::size_t scan(const From& from, std::size_t chunk, std::uint32_t low) {
        std::size_t found = 0;
        from.scan(chunk, {r_.height, r_.cols, r_.width, 1, &low, r_.size(), indices_.data(), values_.data(), 0, &found});
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
    const Source& source_;
    std::size_t across_, room_;
    std::vector<float> tile_, values_;
    std::vector<std::int32_t> indices_;
    std::vector<std::uint32_t> keys_, maxima_, guesses_;
    // Of the chunks of a band: how many candidates there are, and these.
    std::vector<std::size_t> counts_;
    std::vector<float> band_values_;
    std::vector<std::int32_t> band_indices_;
};

template <class Source>
bool by_chunks(const Source& source, const std::vector<Region>& regions, std::int32_t* places, float* values) {
    std::atomic<bool> finite{true};
    for (const Region& r : regions) {
        const std::size_t across = r.cols / r.width;
        parallel_for(r.rows / r.height, 1, std::max<std::size_t>(1, grain / across), [&](std::size_t begin, std::size_t end) {
            Chooser<Source> chooser(r, source);
            for (std::size_t band = begin; band < end; ++band) {
                const std::size_t first = band * across * r.kept;
                if (!chooser(r.offset(band * across), places + first, values + first)) {
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

const Loops loops_portable = {maxima_of, kth_of, pick_of, sum_of, sum_and_scan};

bool choose(const float* x, const std::vector<Region>& regions, std::int32_t* places, float* values) {
    return by_chunks(Plain{x}, regions, places, values);
}

bool carry_and_choose(const float* x, const float* carry, float decay, float* sum, const std::vector<Region>& regions, std::int32_t* places,
                      float* values) {
    std::size_t numel = 0;
    for (const Region& r : regions) numel += r.numel();
    const bool around = 4 * numel > select::cache_bytes;
    const bool finite = by_chunks(Carried{sum, x, carry, decay, around}, regions, places, values);
    if (around) select::stream_done();
    return finite;
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
        double sum = 0, squares = 0, sums[16] = {};
        in_order(n, 1, [&](std::size_t begin, std::size_t i, double* lane) { lane[i] += static_cast<double>(values[begin + i]); }, &sum);
        const auto centre = static_cast<float>(sum / static_cast<double>(n));
        for (std::size_t j = 0; j < n; ++j) around[j] = std::clamp(values[j] - centre, -most, most);
        const float* const a = around.data();
        in_order(n, 1, [&](std::size_t begin, std::size_t i, double* lane) { lane[i] += static_cast<double>(a[begin + i]) * static_cast<double>(a[begin + i]); },
                 &squares);
        auto width = static_cast<float>(6 * std::sqrt(squares / (static_cast<double>(n) - 1)) / static_cast<double>(bins));
        if (!(width > 0 && width <= most)) width = 1;
        const auto middle = static_cast<float>(bins / 2), last = static_cast<float>(bins - 1);
        // In a loop of its own, which is made of vectors: 1.5 * 2^23 more, a number below 2^22 is rounded to nearest.
        for (std::size_t j = 0; j < n; ++j) {
            const float place = a[j] / width + middle;
            chosen[j] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(std::min(std::max(place, 0.0f), last) + 12582912.0f));
        }
        for (std::size_t j = 0; j < n; ++j) ++filled[chosen[j]];
        in_order(n, bins, [&](std::size_t begin, std::size_t i, double* lane) { lane[lanes * chosen[begin + i] + i] += static_cast<double>(a[begin + i]); }, sums);
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
        const std::size_t chunks = r.cols / r.width, k = r.kept;
        // The places of the next chunk are on their way while those of this one are added to.
        put_chunks(r, 1, r.cols, p, v, [&](std::size_t at, float) { __builtin_prefetch(to + at, 1); });
        for (std::size_t c = 0; c < chunks; ++c) {
            float* const here = to + c * r.width;
            const std::int32_t* const mine = p + c * k;
            if (c + 1 < chunks) put_chunks(r, 1, r.cols, mine + k, v, [&](std::size_t at, float) { __builtin_prefetch(here + r.width + at, 1); });
            put_chunks(r, 1, r.cols, mine, v + c * k, [&](std::size_t at, float value) { here[at] += weight * value; });
        }
    });
}

}  // namespace tersegrad::chunks
