#include "dither_round.hpp"

#include <vector>

#include "tersegrad/runtime.hpp"

namespace tersegrad::dither {
namespace detail {
const Implementation portable = {norm_plain,  quick_plain, exact_plain, random_plain, above_plain,
                                 shift_plain, ends_plain,  scale_plain, leave_plain,  lower_plain, nullptr};
}

const detail::Implementation& ops() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return detail::avx512;
    if (isa() == Isa::avx2) return detail::avx2;
#endif
    return detail::portable;
}

double fold(double* a, std::size_t count) {
    std::size_t half = 1;
    while (2 * half < count) half *= 2;
    for (; half >= 1 && count > 1; half /= 2) {
        for (std::size_t i = half; i < count; ++i) a[i - half] += a[i];
        count = half;
    }
    return count ? a[0] : 0.0;
}

float usable_step(double step) {
    if (step >= FLT_MAX) return FLT_MAX;
    if (step < 0x1p-126) return 0x1p-126f;
    float f = static_cast<float>(step);
    if (static_cast<double>(f) > step) f = std::nextafterf(f, 0.0f);
    return f;
}

float step_for(double nu, std::size_t n, double norm) { return usable_step(2 * std::sqrt(nu / static_cast<double>(n) * norm)); }

std::int32_t level(float x, float inverse, const Stream* draws, std::uint64_t index) {
    if (!draws) return detail::round_one(x, inverse, false, 0);
    const std::uint32_t word = philox_block(*draws, index >> 3).w[index % 8 / 2];
    return detail::round_one(x, inverse, true, index & 1 ? word >> 16 : word & 0xffff);
}

void add(const float* x, const float* y, std::size_t n, float* sum) {
    for (std::size_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
}

void Block::fit() {
    scale = energy > 0 ? usable_step(dot / energy) : 0;
    const double g = scale;
    error = norm - 2 * g * dot + g * g * energy;
}

namespace {

double block_norm(const float* x, std::size_t n, Ahead& ahead) {
    double sums[kScaleBlock / kSumChunk];
    std::size_t chunks = 0;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        double lanes[32] = {};
        ops().norm(x + i, std::min(kSumChunk, n - i), ahead.next(kSumChunk, detail::kNormAhead), lanes);
        sums[chunks++] = fold<32>(lanes);
    }
    return fold(sums, chunks);
}

Moments round_exact(const float* x, std::size_t n, float inverse, Ahead& ahead, std::uint8_t* k) {
    double dots[kScaleBlock / kSumChunk], energies[kScaleBlock / kSumChunk], norms[kScaleBlock / kSumChunk];
    std::size_t chunks = 0;
    Moments m;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        double lanes[96] = {};
        ops().exact(x + i, std::min(kSumChunk, n - i), inverse, ahead.next(kSumChunk, detail::kExactAhead), k + i, lanes, m.top);
        dots[chunks] = fold<32>(lanes);
        energies[chunks] = fold<32>(lanes + 32);
        norms[chunks++] = fold<32>(lanes + 64);
    }
    m.dot = fold(dots, chunks);
    m.energy = fold(energies, chunks);
    m.norm = fold(norms, chunks);
    return m;
}

// As above with <x, k> to about seven digits, unless a level exceeds 126. The norm is known already.
Moments round_quick(const float* x, std::size_t n, float step, double norm, Ahead& ahead, std::uint8_t* k) {
    double dots[kScaleBlock / kSumChunk];
    std::size_t chunks = 0;
    std::int64_t energy = 0;
    std::uint32_t top = 0;
    const float inverse = 1.0f / step;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        detail::Quick sums;
        ops().quick(x + i, std::min(kSumChunk, n - i), inverse, ahead.next(kSumChunk, detail::kRoundAhead), k + i, sums);
        double lanes[64];
        std::copy_n(sums.dot, 64, lanes);
        dots[chunks++] = fold<64>(lanes);
        energy += sums.energy;
        top = std::max(top, sums.top);
    }
    if (top >= 127) {
        Ahead nowhere{reinterpret_cast<const char*>(x)};
        return round_exact(x, n, inverse, nowhere, k);
    }
    return {static_cast<double>(step) * fold(dots, chunks), static_cast<double>(energy), norm, top};
}

std::uint32_t round_random(const float* x, std::size_t n, float inverse, const Stream& draws, std::uint64_t start, Ahead& ahead,
                           std::uint8_t* k) {
    std::uint16_t random[kSumChunk];
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < n; i += kSumChunk) {
        const std::size_t length = std::min(kSumChunk, n - i);
        random_u16(draws, start + i, length, random);
        ops().random(x + i, length, inverse, random, ahead.next(kSumChunk, detail::kRoundAhead), k + i, top);
    }
    if (top >= 127)  // saturated: look at those levels again
        for (std::size_t i = 0; i < n; ++i)
            if (detail::magnitude(detail::unbiased(k[i])) >= 127) top = std::max(top, detail::magnitude(level(x[i], inverse, &draws, start + i)));
    return top;
}

}  // namespace

Block round_block(const float* x, std::size_t n, std::uint64_t start, const Options& o, Ahead& ahead, std::uint8_t* k) {
    Block b;
    float step = o.step;
    if (o.nu > 0 || o.draws) {
        b.norm = block_norm(x, n, ahead);
        if (!std::isfinite(b.norm)) return b;
        if (b.norm == 0) {
            std::memset(k, kBias, n);
            return b;
        }
        if (o.nu > 0) step = step_for(o.nu, n, b.norm);
    }
    b.inverse = 1.0f / step;
    if (o.draws) {
        b.top = round_random(x, n, b.inverse, *o.draws, start, ahead, k);
        if (b.top) b.scale = step;
        return b;
    }
    const Moments m = o.nu > 0 ? round_quick(x, n, step, b.norm, ahead, k) : round_exact(x, n, b.inverse, ahead, k);
    b.norm = m.norm;
    b.top = m.top;
    b.dot = m.dot;
    b.energy = m.top < kTooLarge ? m.energy : 0;
    b.fit();
    return b;
}

Sampled sample(const float* x, std::size_t n, float inverse, std::size_t stride, const float* carry) {
    stride = std::min(stride, n / kSumChunk + 1);  // beyond that only the first block is looked at anyway
    std::vector<double> errors, norms;
    double dots[kScaleBlock / kSumChunk], energies[kScaleBlock / kSumChunk], squares[kScaleBlock / kSumChunk];
    std::size_t chunks = 0;
    std::uint8_t k[kSumChunk];
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < n; i += kSumChunk * stride) {
        double lanes[96] = {};
        float sum[kSumChunk];
        const std::size_t length = std::min(kSumChunk, n - i), later = i + kSumChunk * stride;
        if (carry) add(x + i, carry + i, length, sum);
        ops().exact(carry ? sum : x + i, length, inverse, reinterpret_cast<const char*>(x + later), k, lanes, top);
        dots[chunks] = fold<32>(lanes);
        energies[chunks] = fold<32>(lanes + 32);
        squares[chunks++] = fold<32>(lanes + 64);
        if (later < n && later / kScaleBlock == i / kScaleBlock) continue;
        const double dot = fold(dots, chunks), energy = fold(energies, chunks), norm = fold(squares, chunks);
        errors.push_back(energy > 0 ? norm - dot / energy * dot : norm);
        norms.push_back(norm);
        chunks = 0;
    }
    return {fold(errors.data(), errors.size()), fold(norms.data(), norms.size())};
}

}  // namespace tersegrad::dither
