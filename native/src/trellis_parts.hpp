// What the files of trellis-coded quantisation share: how a vector is cut, and the loops that each instruction set provides.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tersegrad/rans.hpp"
#include "tersegrad/trellis.hpp"

// Functions are local to the including files, so that none that was compiled for one machine ends up running on another.
namespace tersegrad::trellis {

enum Kind : std::uint8_t { zero = 0, raw = 1, coded = 2, classed = 3 };
enum Mode : std::uint8_t { normal = 0, all_zero = 1, not_finite = 2 };

inline constexpr std::size_t kSegment = std::size_t{1} << 18;
inline constexpr std::size_t kSumChunk = 4096;   // sums run over chunks of that many coordinates, which are then folded
inline constexpr int kLongestRun = 15, kShortestRun = 14;  // log2 of the coordinates after which all trellises start anew
inline constexpr int kSigns = 14;                // a sign for every 2^14 coordinates that start a run
inline constexpr int kUnit = 13;                 // dithered numbers count in 2^-13 of a step
inline constexpr int kWidest = 64, kUsual = 16;  // windows are even; indices wait in the usual one until all are known
inline constexpr float kFar = 0x1p25f, kFarDithered = 0x1p15f;  // |x / step| from here on is not coded
inline constexpr float kSmall = 32000.0f;          // |y| below this: |n| < 1024, and 32 bits hold the sum of 4096 / 16 squares
inline constexpr float kNear = 896.0f;             // |y| below this: |n| <= 30, which the usual window holds
inline constexpr int kPitch = 64;                // bytes of a row: one step of up to 64 lanes
inline constexpr int kStill = 128;               // in bytes of coordinates: leaves the state of its trellis alone
inline constexpr int kLevelBits = 6, kDitheredLevelBits = kUnit - 2;  // log2 of the distance of levels, among which classes are looked for
inline constexpr int kHighest = 127, kCenter = 128;  // levels are at most this, and stored with that added
inline constexpr int kMostBits = 3;              // log2 of the most classes of |t|
inline constexpr int kMostTables = classes::kClasses << kMostBits;

struct Segments : rans::Pieces {
    explicit Segments(std::size_t n_) : rans::Pieces{n_, kSegment} {}
    std::size_t table_bytes() const { return count() > 1 ? 4 * count() : 0; }
};
[[maybe_unused]] static inline std::size_t raw_bytes(std::size_t n) { return 1 + 4 * n; }

[[maybe_unused]] static inline int class_bits(std::size_t n) { return n >= 1u << 16 ? 3 : n >= 1u << 13 ? 2 : n >= 1u << 10 ? 1 : 0; }

// t of a dithered coordinate: n steps - U = 2m steps + t, in 2^-13 of a step.
[[maybe_unused]] static inline std::int32_t rest_of(std::int32_t z0, std::int32_t u) { return (((z0 << kUnit) - u + (1 << kUnit)) & ((2 << kUnit) - 1)) - (1 << kUnit); }
// The class of |t|, and in bit 3 what z1 is besides the lowest bit of the index.
[[maybe_unused]] static inline std::uint8_t facts_of(std::int32_t z0, std::int32_t u, int bits) {
    const std::int32_t t = rest_of(z0, u), size = t < 0 ? -t : t;
    return static_cast<std::uint8_t>(std::min(size << bits >> kUnit, (1 << bits) - 1) | (((t + u) >> kUnit >> 1 & 1) << 3));
}
// Those of an even state in the lower half of a byte, of an odd one in the upper half.
[[maybe_unused]] static inline std::uint8_t both_facts(std::uint16_t draw, int bits) {
    const std::int32_t u = draw & 0x7fff;
    return static_cast<std::uint8_t>(facts_of(0, u, bits) | facts_of(1, u, bits) << 4);
}
[[maybe_unused]] static inline std::int32_t sign_of(const Dither& d, std::uint64_t at) {
    std::uint16_t draw;
    random_u16(d.signs, at >> kSigns, 1, &draw);
    return draw & 1 ? -1 : 1;
}
[[maybe_unused]] static inline std::int32_t rounded(float v) { return static_cast<std::int32_t>(std::nearbyintf(v)); }
[[maybe_unused]] static inline std::int32_t with_dither(std::int32_t y, std::int32_t sign, std::uint16_t draw) { return (sign * y + (draw & 0x7fff) + 128) >> (kUnit - 5); }
[[maybe_unused]] static inline std::int32_t integer_of(std::int32_t y, std::int32_t label) { return 4 * ((y - 32 * label + 64) >> 7) + label; }
// The even integer of a still coordinate.
[[maybe_unused]] static inline std::int32_t alone_of(std::int32_t y, std::int32_t add) { return y < 0 ? -((-y + add) >> kLevelBits << 1) : (y + add) >> kLevelBits << 1; }
[[maybe_unused]] static inline std::int32_t next_state(const Code& c, std::int32_t s, std::int32_t z1) { return s >> 1 ^ (z1 ? c.g1 : 0) ^ (s & 1 ? c.g0 : 0); }

struct Sums {
    double dot[2] = {}, energy[2] = {};  // of coordinates on trellises, and of those that are still
    std::uint32_t top = 0;  // the largest of n and -n - 1
};

// Two tables of up to 32 symbols, small enough for byte shuffles: that of z0 at 32 z0 + symbol. Coarse ones tell the least symbol + 32 z0
// by slot >> 6; `probes` of a binary search follow. `full`: some symbol has all slots of its table.
struct Pair {
    rans::Images image;
    alignas(64) std::uint8_t coarse[2][64];
    int probes = 0;
    bool full = false;
    Pair(const std::uint16_t* frequencies, int alphabet);
};

// A decoder of whole steps of 64 lanes in flight.
struct Walk {
    std::uint32_t* x;          // 64 rANS states
    std::uint32_t* s;          // 64 trellis states
    const std::uint8_t* words;
    const std::uint8_t* limit; // a step may start only while words <= limit
    const std::uint32_t* slots;
    const std::uint8_t* facts; // one byte per coordinate, or nullptr: tables belong to z0
    const std::uint8_t* firsts; // of each coordinate the first table of its class, and kStill; or nullptr: there are no classes
    std::uint8_t* out;         // symbol | z0 << 7
    std::size_t step, steps;
    Code code;
    const Pair* pair = nullptr;  // instead of the slots, for walk_pair
    // For walk_pair: where values go at once, unless it is null; products of the scale do not overflow, and the scale / 2^24 is normal. `around`: see restore.
    float* values = nullptr;
    float scale = 0;
    int window = 0;
    bool around = false;
};

// How a run of floats becomes integers: y = rint(x scale), or with dither (sign rint(x scale) + draw mod 2^15 + 128) >> 8.
struct Grid {
    float scale = 0;
    std::int32_t sign = 1;
    const std::uint16_t* draws = nullptr;
};

struct Implementation {
    // The lowest 7 bits of y; squares are added up (n <= kSumChunk) unless `norm` is null. Returns the largest |x scale|, NaN aside. `levels`, unless it is null:
    // x scale as a multiple of 2^kLevelBits (kDitheredLevelBits), ties upwards, within +-kHighest, plus kCenter.
    float (*convert)(const float* x, std::size_t n, const Grid& grid, std::uint8_t* low, std::uint8_t* levels, double* norm);
    // Labels n mod 4 of the nearest admissible integers. Rows of kPitch bytes, of which `lanes` count, in the last row `last`. `still`:
    // bytes of `low` with kStill leave the states alone. `ahead`: as for rANS.
    void (*label[4])(const std::uint8_t* low, std::size_t rows, std::size_t lanes, std::size_t last, bool still, std::uint8_t* labels,
                     std::vector<std::uint8_t>& scratch, rans::Ahead ahead);
    // n, kept within the window by multiples of 4, + 2 window as bytes; n <= kSumChunk. `small`: all |y| are below 2^15 - 64. `adds`: what
    // rounding adds to |y| of still coordinates, 0 for others; null where there are none.
    void (*place)(const float* x, const std::uint8_t* labels, const std::uint8_t* adds, std::size_t n, const Grid& grid, bool small, int window,
                  std::uint8_t* out, Sums& sums);
    // The same of |y| below kNear in the usual window, where the lowest bits of y and its level tell n. `norm`: as in convert.
    void (*place_near)(const float* x, const std::uint8_t* low, const std::uint8_t* levels, const std::uint8_t* labels, std::size_t n, std::uint8_t* out,
                       Sums& sums, double* norm);
    // With dither: symbols, and their tables out of 2^bits; raises `top` to the largest of index and -index - 1.
    void (*place_dithered)(const float* x, const std::uint8_t* labels, std::size_t n, const Grid& grid, int window, int bits, std::uint8_t* symbols,
                           std::uint8_t* tables, std::uint32_t& top);
    // What a decoder knows beforehand of each dithered coordinate (both_facts).
    void (*learn)(const std::uint16_t* draws, std::size_t n, int bits, std::uint8_t* facts);
    // out[i] = table[in[i]], all in[i] below 16; `out` may be `in`.
    void (*translate)(const std::uint8_t* in, std::size_t n, const std::uint8_t* table, std::uint8_t* out);
    // Subtracts from bytes.
    void (*shift)(std::uint8_t* bytes, std::size_t n, std::uint8_t by);
    // symbol | z0 << 7 to values, and what dither is to be taken off. `around`: they may be stored around the caches.
    void (*restore)(const std::uint8_t* in, std::size_t n, int window, float scale, bool around, float* out);
    // With another scale where `firsts` say kStill.
    void (*restore_still)(const std::uint8_t* in, const std::uint8_t* firsts, std::size_t n, int window, float scale, float still, float* out);
    void (*restore_dithered)(const std::uint8_t* in, std::size_t n, int window, float scale, std::int32_t sign, const std::uint16_t* draws,
                             float* out);
    void (*walk)(Walk&);
    // One or two chunks with the same tables, without facts and firsts, until one of them stops. nullptr where it would be no faster.
    void (*walk_pair)(Walk&, Walk*);
};
extern const Implementation portable, avx2, avx512;
void walk_pair_avx512(Walk&, Walk*);
const Implementation& ops();

}  // namespace tersegrad::trellis
