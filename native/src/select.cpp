// Looking through a whole vector: the portable kernels, whether all is finite, what exceeds a threshold.
#include "tersegrad/select.hpp"

#include <algorithm>
#include <cstring>

#include "select_feistel.inl"
#include "select_scratch.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

namespace tersegrad::select {
namespace {

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

template std::size_t compact<std::int32_t>(const float*, std::size_t, std::uint32_t, std::size_t, std::int32_t*, float*);
template std::size_t compact<std::int64_t>(const float*, std::size_t, std::uint32_t, std::size_t, std::int64_t*, float*);

}  // namespace tersegrad::select
