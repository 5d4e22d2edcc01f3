// Any bytes into every decoder of the casts. Usage: fuzz_casts [messages] [seed]
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "tersegrad/casts.hpp"
#include "tersegrad/runtime.hpp"

using namespace tersegrad;
using std::size_t;

int main(int argc, char** argv) {
    const long messages = argc > 1 ? std::atol(argv[1]) : 20000;
    std::mt19937 random(argc > 2 ? static_cast<unsigned>(std::atol(argv[2])) : 1u);
    auto pick = [&](size_t below) { return static_cast<size_t>(random() % below); };
    auto over = [](size_t n, size_t unit) { return n / unit + (n % unit != 0); };
    double total = 0;
    for (long m = 0; m < messages; ++m) {
        set_isa(static_cast<Isa>(pick(static_cast<size_t>(best_isa()) + 1)));
        const size_t n = pick(4) ? pick(400) : pick(12000);
        const size_t bucket = 64 * (1 + pick(8)), block = size_t{16} << pick(5);
        const int levels = 1 + static_cast<int>(pick(64));
        int width = 2;
        while (2 * levels + 1 >= 1 << width) ++width;
        if (pick(3) == 0) width = 8;
        std::vector<float> x(n), out(n, 0.0f);
        for (float& v : x) v = std::normal_distribution<float>()(random);
        const casts::Sink sink{out.data(), pick(2) == 0, 0.25f};
        const Stream source{random(), 0, static_cast<std::uint32_t>(random()), static_cast<std::uint32_t>(random())};
        std::vector<std::uint8_t> data;
        auto spoil = [&] {  // a valid message with a few bytes changed, or noise
            const bool noise = pick(4) == 0;
            const size_t changes = noise ? data.size() : pick(6);
            for (size_t k = 0; k < changes && !data.empty(); ++k) data[noise ? k : pick(data.size())] = static_cast<std::uint8_t>(random());
        };
        switch (m % 7) {
            case 0:
                data.resize(2 * n);
                casts::bf16_encode(x.data(), n, data.data());
                spoil();
                casts::bf16_decode(data.data(), n, sink);
                break;
            case 1:
                data.resize(n ? 4 + 2 * n : 0);
                casts::fp16_encode(x.data(), n, data.data());
                spoil();
                casts::fp16_decode(data.data(), n, sink);
                break;
            case 2:
                data.resize(over(n, block) + n);
                casts::fp8_encode(x.data(), n, block, data.data());
                spoil();
                casts::fp8_decode(data.data(), n, block, sink);
                break;
            case 3:
                data.resize(casts::sign_nbytes(n, bucket));
                casts::sign_encode(x.data(), n, bucket, data.data());
                spoil();
                casts::sign_decode(data.data(), n, bucket, sink);
                break;
            case 4:
                data.resize(over(n, 8) + n);
                casts::natural_encode(x.data(), n, source, data.data());
                spoil();
                casts::natural_decode(data.data(), n, sink);
                break;
            case 5:
                data.resize(casts::ternary_nbytes(n, bucket));
                casts::ternary_encode(x.data(), n, bucket, source, data.data());
                spoil();
                casts::ternary_decode(data.data(), n, bucket, sink);
                break;
            default:
                data.resize(casts::natural_levels_nbytes(n, bucket, width));
                casts::natural_levels_encode(x.data(), n, bucket, levels, width, source, data.data());
                spoil();
                casts::natural_levels_decode(data.data(), n, bucket, levels, width, sink);
        }
        if (n) total += out[0] == out[0] ? 1 : 0;
    }
    std::printf("casts: %ld spoilt messages decoded (%.0f began with a number)\n", messages, total);
}
