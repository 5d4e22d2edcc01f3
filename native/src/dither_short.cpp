// Short vectors of Sparse Dithering: one scale and a sequential code.
#include <bit>
#include <cmath>

#include "dither_lower.hpp"
#include "dither_segments.hpp"
#include "tersegrad/levels.hpp"

namespace tersegrad::dither {
namespace {

constexpr std::uint64_t kUnaryLimit = 16;  // mean level from which a unary code cannot be the shortest

// Bits of the published code, but for the rounding of its enumeration.
double paper_bits(std::size_t n, std::size_t zeros, std::uint64_t sum) {
    const auto d = static_cast<double>(n), z = static_cast<double>(zeros);
    const double places = (std::lgamma(d + 1) - std::lgamma(z + 1) - std::lgamma(d - z + 1)) / std::log(2.0);
    return 1 + static_cast<double>(std::bit_width(n) + sum + (n - zeros)) + places;
}

}  // namespace

Outcome encode_short(const float* x, std::size_t n, double norm, const Options& o, std::uint8_t* out) {
    const float step = o.nu > 0 ? step_for(o.nu, n, norm) : o.step;
    const float inverse = 1.0f / step;
    std::vector<std::int32_t> k(n);
    std::vector<double> dots, energies;
    std::size_t zeros = 0;
    std::uint64_t sum = 0;
    std::uint32_t top = 0;
    for (std::size_t j = 0; j < n; ++j) k[j] = level(x[j], inverse, o.draws, j);
    if (o.rdo) lower_alone(x, n, inverse, k.data());
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        double dot[32] = {}, energy[32] = {};
        for (std::size_t j = i; j < std::min(n, i + kSumChunk); ++j) {
            const std::uint32_t size = detail::magnitude(k[j]);
            zeros += size == 0;
            sum += size;
            top = std::max(top, size);
            dot[j % 32] += static_cast<double>(x[j]) * k[j];
            energy[j % 32] += static_cast<double>(k[j]) * k[j];
        }
        dots.push_back(fold<32>(dot));
        energies.push_back(fold<32>(energy));
    }
    if (top == 0) return {write_word(kAllZero, out), norm, norm};
    const double dot = fold(dots.data(), dots.size()), energy = fold(energies.data(), energies.size());
    if (top >= kTooLarge || (o.coder == Coder::paper && sum > kUnaryLimit * 64 * n)) return {0, norm, 0};
    const float scale = o.draws ? step : usable_step(dot / energy);
    const double g = scale;
    const Outcome outcome{0, norm, norm - 2 * g * dot + g * g * energy};
    std::vector<std::uint8_t> best;
    const auto consider = [&](LevelForm form) {
        auto code = levels_encode(k.data(), n, form);
        if (best.empty() || code.size() < best.size()) best = std::move(code);
    };
    if (o.coder != Coder::paper) consider(LevelForm::adaptive);
    if (o.coder == Coder::paper || (sum <= kUnaryLimit * n && (n < 256 || paper_bits(n, zeros, sum) < 8.0 * static_cast<double>(best.size()) + 16)))
        consider(LevelForm::paper);
    if (best.size() > 4 * n) return {0, norm, 0};
    std::memcpy(out, &scale, 4);
    if (!best.empty()) std::memcpy(out + 4, best.data(), best.size());
    return {4 + best.size(), outcome.norm, outcome.error};
}

bool decode_short(const std::uint8_t* data, std::size_t size, const Into& to) {
    if (size < 4) return false;
    float scale;
    std::memcpy(&scale, data, 4);
    if (!(scale > 0 && scale <= FLT_MAX)) return false;
    std::vector<std::int32_t> k(to.n);
    if (!levels_decode(data + 4, size - 4, k.data(), to.n)) return false;
    for (std::size_t i = 0; i < to.n; ++i) to.put(i, detail::limited(static_cast<float>(k[i]) * scale));
    return true;
}

}  // namespace tersegrad::dither
