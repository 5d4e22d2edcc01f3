// What the encoder and the decoder of segments share: how a vector is cut, the kinds of segments, and the memory that they work in.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "dither_round.hpp"
#include "tersegrad/classes.hpp"

namespace tersegrad::dither {

enum Kind : std::uint8_t { zero = 0, raw = 1, coded = 2, classed = 3 };

struct Segments : rans::Pieces {
    explicit Segments(std::size_t n_) : rans::Pieces{n_, kSegment} {}
    std::size_t table_bytes() const { return count() > 1 ? 4 * count() : 0; }
};

inline std::size_t scale_count(std::size_t n) { return (n + kScaleBlock - 1) / kScaleBlock; }
inline std::size_t raw_bytes(std::size_t n) { return 1 + 4 * n; }

// Calls body(i) for every symbol at either end of the window, in order, while it returns true.
template <class Body>
bool at_ends(const std::uint8_t* symbols, std::size_t n, int window, Body&& body) {
    std::uint16_t at[kSumChunk + 1];
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        const std::size_t count = ops().ends(symbols + i, std::min(kSumChunk, n - i), static_cast<std::uint8_t>(2 * window), at);
        for (std::size_t j = 0; j < count; ++j)
            if (!body(i + at[j])) return false;
    }
    return true;
}

// Memory that a thread keeps, below two megabytes in all: fresh pages would cost more than messages of some thousand coordinates.
struct Bytes {
    void fit(std::size_t n) {
        if (size >= n) return;
        data.reset(new std::uint8_t[n]);  // not initialised
        size = n;
    }
    std::size_t size = 0;
    std::unique_ptr<std::uint8_t[]> data;
};
struct Workspace {
    Bytes levels, words, head, sum, contexts;
    static Workspace& of_thread() {
        thread_local Workspace kept;
        return kept;
    }
};

// out = decoded, or out += weight * decoded.
struct Into {
    float* out;
    std::size_t n;
    float weight;
    bool add;
    classes::Rows rows = {};  // of the whole vector
    Into part(std::size_t begin, std::size_t length) const { return {out + begin, length, weight, add, rows}; }
    void put(std::size_t i, float v) const {
        if (add) out[i] += weight * v;
        else out[i] = v;
    }
};

// All segments of a vector; `norm` is not finite where x is not.
Outcome encode_segments(const float* x, std::size_t n, const Options& o, std::uint8_t* out);
// `symbols`: n bytes to work in when adding; made here if there are none.
bool decode_segments(const std::uint8_t* data, std::size_t size, const Into& to, std::uint8_t* symbols);

// A short vector: one scale and a sequential code. No bytes: not worth it, or not possible.
Outcome encode_short(const float* x, std::size_t n, double norm, const Options& o, std::uint8_t* out);
bool decode_short(const std::uint8_t* data, std::size_t size, const Into& to);

inline constexpr std::uint32_t kAllZero = 0;  // the first word of a message that is nothing else
inline std::size_t write_word(std::uint32_t word, std::uint8_t* out) {
    std::memcpy(out, &word, 4);
    return 4;
}

}  // namespace tersegrad::dither
