// Rate-distortion-optimised trellis codes: sequences with the least sum of squared error and bits.
#pragma once
#include "trellis_parts.hpp"

namespace tersegrad::trellis {

namespace rated {
inline constexpr int kWindow = 16;                 // integers of -16 .. 15 are counted by themselves, larger ones with the last of their parity
inline constexpr int kSymbols = 2 * kWindow;
inline constexpr int kFold = 640, kPlaces = 2 * kFold;  // numbers y wait within -640 .. 639: larger ones keep their lowest seven bits
inline constexpr int kMost = 96, kMetric = 32;     // sixteenths of a bit, and what each adds: half a squared step per bit
inline constexpr int kHighest = 64 * 64 + kMost * kMetric;  // no branch costs more

// What the four labels cost at each y of a class.
struct Metrics {
    std::uint16_t of[kPlaces][4];
};

struct Loops {
    // y = rint(x scale), folded.
    void (*fold)(const float* x, std::size_t n, float scale, std::int16_t* y);
    // The integers with these labels, kept within the window by multiples of two, plus kWindow.
    void (*symbols)(const std::int16_t* y, const std::uint8_t* labels, std::size_t n, std::uint8_t* out);
    // Labels of the cheapest admissible sequence of a run, which has `n` coordinates in rows of `lanes`. `numbers`: classes, or null, each with
    // its metrics, and with all bits of `stays` where it is still.
    void (*label[4])(const std::int16_t* y, const std::uint8_t* numbers, const Metrics* metrics, const std::uint16_t* stays, std::size_t n,
                     std::size_t lanes, std::uint8_t* labels, std::vector<std::uint16_t>& scratch);
};
extern const Loops portable, avx2, avx512;
}  // namespace rated

// A segment that was rounded to nearest.
struct Rounded {
    const float* x;
    std::size_t n, lanes, run;
    float scale;
    int which;  // of the codes
    const std::uint8_t* numbers;              // of classes, or null
    const std::vector<std::uint8_t>& still;  // by class
};

// Changes labels, n mod 4, of the nearest sequence to those of one that takes fewer bits for its error.
void rate(const Rounded& segment, std::uint8_t* labels);

}  // namespace tersegrad::trellis
