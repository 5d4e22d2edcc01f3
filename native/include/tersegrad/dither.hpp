// Sparse Dithering: scale, round and entropy-code a vector while it is in the cache; and back. Wire format: spec, "Sparse Dithering".
//
// A long vector is cut into segments of 2^18 coordinates, the last from half to one and a half of that. Each is
// self-contained, so that segments can be coded in parallel and in one pass over memory. Within a segment every block of 2^16
// coordinates has a scale of its own: a block is measured, then rounded while it lies in the second-level cache.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tersegrad/classes.hpp"
#include "tersegrad/philox.hpp"
#include "tersegrad/rans.hpp"

namespace tersegrad::dither {

inline constexpr std::size_t kScaleBlock = std::size_t{1} << 16;
inline constexpr std::size_t kSumChunk = 4096;        // sums run over chunks of that many coordinates, which are then folded
inline constexpr std::uint32_t kTooLarge = 1u << 26;  // levels from here on are not coded: below it float64 holds their squares
inline constexpr int kBias = 15;  // levels wait as bytes, this much added: those of -15..15 are then ready to be coded
inline constexpr std::size_t kSegment = std::size_t{1} << 18, kLongestSegment = kSegment + kSegment / 2;
inline constexpr std::size_t kMostScales = kLongestSegment / kScaleBlock;

// Chunks of 2^16 coordinates, but of 2^18 in segments with classes that take less than half a bit per coordinate: the states of all
// lanes would cost as much as the levels.
inline constexpr int kAutoChunk = 0, kUsualChunk = 16;

enum class Coder : int { automatic = 0, rans = 1, paper = 2 };

struct Options {
    double nu = 0;  // > 0: every block's step is 2 sqrt(nu / n) ||x|| of the block; else `step` serves all of them
    float step = 0;
    Coder coder = Coder::automatic;
    const Stream* draws = nullptr;  // stochastic rounding, and steps are sent; else least-squares scales are
    const float* carry = nullptr;   // added to x before anything else
    float* left = nullptr;          // wanted with `carry`: the sum minus what is decoded; not x, not carry. Undefined if not finite
    int chunk = kAutoChunk;         // log2 of the length of rANS chunks
    classes::Rows rows = {};        // where rows and columns are; without pieces there are no classes
    bool rdo = false;               // levels with the least sum of error and bits instead of the nearest ones; not with `draws`
};

struct Outcome {
    std::size_t bytes = 0;
    double norm = 0;   // ||x||^2; not finite where x is not
    double error = 0;  // ||x - decoded||^2: with `step` exact up to float64 rounding, with `nu` to seven digits of ||x||^2
};

// Whole messages. `out` holds max_bytes(n).
std::size_t max_bytes(std::size_t n);
Outcome encode(const float* x, std::size_t n, const Options&, std::uint8_t* out);
// out = decoded, or out += weight * decoded. False: malformed bytes, of which nothing was added. Without pieces the vector is one row.
// `symbols`: n bytes to work in, made anew if there are none.
bool decode(const std::uint8_t* data, std::size_t size, std::size_t n, const classes::Rows&, float* out);
bool decode_add(const std::uint8_t* data, std::size_t size, std::size_t n, const classes::Rows&, float weight, float* out,
                std::uint8_t* symbols = nullptr);

// Whether a segment of n levels with the step 1, those from `begin` on of the vector that has these rows, would have classes. Levels beyond
// +-127 are told as +-127.
bool may_have_classes(const std::int8_t* levels, std::size_t n, const classes::Rows&, std::size_t begin);

// What rounding to multiples of a step tells.
struct Moments {
    double dot = 0;         // <x, k>
    double energy = 0;      // ||k||^2
    double norm = 0;        // ||x||^2
    std::uint32_t top = 0;  // largest |k|, saturated
};
// Squared error (with the best scale for every scale block) and squared norm of a strided sample, for the search of a target: whole
// blocks of 4096, one in `stride`.
struct Sampled {
    double error = 0, norm = 0;
};
Sampled sample(const float* x, std::size_t n, float inverse, std::size_t stride, const float* carry = nullptr);

namespace detail {

// What quick rounding of at most 4096 coordinates adds up. Coordinate i adds fl(y k), y = fl(x * inverse), to lane i % 64.
struct Quick {
    float dot[64] = {};
    std::int64_t energy = 0;
    std::uint32_t top = 0;  // 127: some level may be larger, and nothing but the levels is meant
};

// One chunk of a segment on its way from words to floats.
struct Track {
    rans::detail::Chunk* chunk;
    rans::DecodeModel* model;
    const float* scales;   // of the segment
    std::size_t start;     // of the chunk, in the segment
    int window;
    std::size_t steps;     // of 64 coordinates
    float* out;
    std::uint8_t* symbols; // wanted for the escapes, else nullptr; adding then leaves their places alone
};

// From which |x| * inverse on a level of 0, 1, ... stays, by class; from kLowered + 1 on always.
inline constexpr int kLowered = 7;
struct Least {
    alignas(64) float of[classes::kClasses][16] = {};
};
// What lowered levels take off <x, k>, in 32 lanes, and ||k||^2.
struct Less {
    double dot[32] = {};
    std::int64_t energy = 0;
};

// Loops over at most 4096 coordinates, except where no sums are kept. `ahead`: memory to fetch meanwhile.
struct Implementation {
    void (*norm)(const float* x, std::size_t n, const char* ahead, double* lanes);  // 32 lanes, added to
    // k = rint(x * inverse), saturated to +-127, stored with the bias
    void (*quick)(const float* x, std::size_t n, float inverse, const char* ahead, std::uint8_t* k, Quick&);
    // the same with sums in float64: 3 * 32 lanes (dot, energy, norm), added to
    void (*exact)(const float* x, std::size_t n, float inverse, const char* ahead, std::uint8_t* k, double* lanes, std::uint32_t& top);
    // |k| = floor(|x| * inverse + draw / 2^16), saturated likewise
    void (*random)(const float* x, std::size_t n, float inverse, const std::uint16_t* draws, const char* ahead, std::uint8_t* k,
                   std::uint32_t& top);
    std::size_t (*above)(const std::uint8_t* k, std::size_t n, int limit);  // how many |k| > limit
    void (*shift)(std::uint8_t* k, std::size_t n, int window);              // k -> clamp(k, -window, window) + window
    std::size_t (*ends)(const std::uint8_t* symbols, std::size_t n, std::uint8_t last, std::uint16_t* at);  // where 0 and `last` are
    void (*scale)(const std::uint8_t* symbols, std::size_t n, int window, float step, bool add, float weight, float* out);
    void (*leave)(const std::uint8_t* k, std::size_t n, float step, const float* x, float* left);  // left = x - k * step
    // Levels one nearer to zero, stored with `center` added, where |x| * inverse is too small; `contexts`: their classes, or one for all.
    void (*lower)(const float* x, std::size_t n, float inverse, const std::uint8_t* contexts, const Least&, int center, std::uint8_t* k, Less&);
    // Decodes one or two chunks at once, all their whole steps; nullptr where there is nothing better than symbols first.
    bool (*decode)(Track&, Track*, bool add, float weight, bool stream);
};
inline constexpr std::size_t kNormAhead = 1, kRoundAhead = 1, kExactAhead = 3;  // lines that they fetch for every 64 coordinates

extern const Implementation portable;
#if defined(__x86_64__)
extern const Implementation avx2, avx512;
#endif
}  // namespace detail
}  // namespace tersegrad::dither
