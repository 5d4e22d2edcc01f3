// The rotation against a direct O(n^2) transform, and every path against the portable one, at sizes that touch each edge.
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "tersegrad/hadamard.hpp"
#include "tersegrad/runtime.hpp"

using namespace tersegrad;

static int failures = 0;

static void expect(bool ok, const char* what, std::size_t d, std::size_t block) {
    if (ok) return;
    std::fprintf(stderr, "hadamard: %s (d = %zu, block = %zu)\n", what, d, block);
    ++failures;
}

static float noise(std::uint64_t i) {
    std::uint64_t z = i * 0x9E3779B97F4A7C15u + 1;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    return static_cast<float>(static_cast<std::int64_t>(z ^ (z >> 27))) * 0x1p-63f;
}

int main() {
    const Stream signs{0x0123456789ABCDEFu, 3, 7, 3u << 16 | 0xffffu};
    const std::size_t sizes[] = {0, 1, 2, 3, 5, 15, 16, 17, 31, 63, 64, 65, 127, 129, 255, 257, 511, 1000, 4095, 4096, 4097, 4129, 9000};
    for (std::size_t block = 1; block <= 8192; block *= 2)
        for (std::size_t d : sizes) {
            const std::size_t padded = rotated_size(d, block);
            // Exact allocations: one element read or written too far is caught by the sanitizer.
            std::unique_ptr<float[]> x(new float[d]), y(new float[padded]), back(new float[d]), other(new float[padded]);
            double norm = 0, rotated = 0, error = 0;
            for (std::size_t i = 0; i < d; ++i) x[i] = noise(i), norm += static_cast<double>(x[i]) * x[i];
            set_isa(Isa::portable);
            rotate(x.get(), y.get(), d, block, signs);
            unrotate(y.get(), back.get(), d, block, signs);
            for (std::size_t i = 0; i < padded; ++i) rotated += static_cast<double>(y[i]) * y[i];
            for (std::size_t i = 0; i < d; ++i) error += std::pow(static_cast<double>(back[i]) - x[i], 2);
            expect(std::fabs(rotated - norm) <= 1e-5 * norm, "the norm changed", d, block);
            expect(error <= 1e-11 * norm, "the inverse does not return", d, block);
            for (int k = 1; k <= static_cast<int>(best_isa()); ++k) {
                set_isa(static_cast<Isa>(k));
                rotate(x.get(), other.get(), d, block, signs);
                expect(!std::memcmp(y.get(), other.get(), padded * sizeof(float)), "paths differ", d, block);
                std::unique_ptr<float[]> again(new float[d]);
                unrotate(other.get(), again.get(), d, block, signs);
                expect(!std::memcmp(back.get(), again.get(), d * sizeof(float)), "inverse paths differ", d, block);
                if (padded == d) {
                    unrotate(other.get(), other.get(), d, block, signs);
                    expect(!std::memcmp(back.get(), other.get(), d * sizeof(float)), "in place differs", d, block);
                }
            }
        }
    // The matrix itself: entry (i, j) is (-1)^popcount(i & j) / sqrt(n), up to the sign of column j.
    const std::size_t n = 256;
    set_isa(best_isa());
    for (std::size_t j = 0; j < n; ++j) {
        std::vector<float> x(n), y(n);
        x[j] = 16.0f;
        const std::uint32_t top = rotate(x.data(), y.data(), n, n, signs);
        expect(std::bit_cast<float>(top) == 16.0f, "the maximum is wrong", n, n);
        for (std::size_t i = 0; i < n; ++i) expect(y[i] * y[0] == (std::popcount(i & j) % 2 ? -1.0f : 1.0f), "wrong matrix", n, n);
    }
    for (std::size_t bad : {std::size_t{0}, std::size_t{3}, std::size_t{1} << 17}) {
        bool thrown = false;
        try {
            rotated_size(10, bad);
        } catch (const std::invalid_argument&) {
            thrown = true;
        }
        expect(thrown, "a bad block was accepted", 10, bad);
    }
    std::printf("hadamard: %s\n", failures ? "FAILED" : "ok");
    return failures != 0;
}
