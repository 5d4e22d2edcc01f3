// The casts at every small size and instruction set, into buffers of exactly the right size: what the sanitizers then see is the
// point, together with equal bytes everywhere.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tersegrad/casts.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

using namespace tersegrad;
using std::size_t;
using Bytes = std::vector<std::uint8_t>;

static size_t over(size_t n, size_t unit) { return n / unit + (n % unit != 0); }

struct Format {
    const char* name;
    size_t (*nbytes)(size_t n);
    void (*encode)(const float* x, size_t n, std::uint8_t* out);
    bool (*decode)(const std::uint8_t* data, size_t n, casts::Sink sink);
};

static const Stream source{0x123456789abcdefull, 0, 3, 0x10002};
static size_t whole(size_t n) { return n ? over(n, 64) * 64 : 64; }

static const Format formats[] = {
    {"bf16", [](size_t n) { return 2 * n; }, casts::bf16_encode,
     [](const std::uint8_t* d, size_t n, casts::Sink s) { casts::bf16_decode(d, n, s); return true; }},
    {"fp16", [](size_t n) { return n ? 4 + 2 * n : 0; }, casts::fp16_encode,
     [](const std::uint8_t* d, size_t n, casts::Sink s) { casts::fp16_decode(d, n, s); return true; }},
    {"fp8", [](size_t n) { return over(n, 32) + n; }, [](const float* x, size_t n, std::uint8_t* o) { casts::fp8_encode(x, n, 32, o); },
     [](const std::uint8_t* d, size_t n, casts::Sink s) { casts::fp8_decode(d, n, 32, s); return true; }},
    {"sign", [](size_t n) { return casts::sign_nbytes(n, whole(n)); },
     [](const float* x, size_t n, std::uint8_t* o) { casts::sign_encode(x, n, whole(n), o); },
     [](const std::uint8_t* d, size_t n, casts::Sink s) { casts::sign_decode(d, n, whole(n), s); return true; }},
    {"sign(block=64)", [](size_t n) { return casts::sign_nbytes(n, 64); },
     [](const float* x, size_t n, std::uint8_t* o) { casts::sign_encode(x, n, 64, o); },
     [](const std::uint8_t* d, size_t n, casts::Sink s) { casts::sign_decode(d, n, 64, s); return true; }},
    {"sign split", [](size_t n) { return casts::sign_nbytes(n, 192); },
     [](const float* x, size_t n, std::uint8_t* o) {
         std::vector<float> none(n), left(n);
         casts::sign_split(x, none.data(), n, 192, o, left.data());
     },
     [](const std::uint8_t* d, size_t n, casts::Sink s) { casts::sign_decode(d, n, 192, s); return true; }},
    {"natural", [](size_t n) { return over(n, 8) + n; },
     [](const float* x, size_t n, std::uint8_t* o) { casts::natural_encode(x, n, source, o); },
     [](const std::uint8_t* d, size_t n, casts::Sink s) { casts::natural_decode(d, n, s); return true; }},
    {"ternary", [](size_t n) { return casts::ternary_nbytes(n, whole(n)); },
     [](const float* x, size_t n, std::uint8_t* o) { casts::ternary_encode(x, n, whole(n), source, o); },
     [](const std::uint8_t* d, size_t n, casts::Sink s) { return casts::ternary_decode(d, n, whole(n), s); }},
    {"ternary(bucket=64)", [](size_t n) { return casts::ternary_nbytes(n, 64); },
     [](const float* x, size_t n, std::uint8_t* o) { casts::ternary_encode(x, n, 64, source, o); },
     [](const std::uint8_t* d, size_t n, casts::Sink s) { return casts::ternary_decode(d, n, 64, s); }},
    {"natural levels", [](size_t n) { return casts::natural_levels_nbytes(n, whole(n), 5); },
     [](const float* x, size_t n, std::uint8_t* o) { casts::natural_levels_encode(x, n, whole(n), 8, 5, source, o); },
     [](const std::uint8_t* d, size_t n, casts::Sink s) { casts::natural_levels_decode(d, n, whole(n), 8, 5, s); return true; }},
    {"natural levels (bucket=128)", [](size_t n) { return casts::natural_levels_nbytes(n, 128, 8); },
     [](const float* x, size_t n, std::uint8_t* o) { casts::natural_levels_encode(x, n, 128, 64, 8, source, o); },
     [](const std::uint8_t* d, size_t n, casts::Sink s) { casts::natural_levels_decode(d, n, 128, 64, 8, s); return true; }},
};

static void fail(const std::string& what) {
    std::printf("casts: %s\n", what.c_str());
    std::exit(1);
}

int main() {
    std::mt19937 random(1);
    std::vector<size_t> sizes;
    for (size_t n = 0; n < 70; ++n) sizes.push_back(n);
    for (size_t n : {319, 320, 321, 640, 4095, 4096, 4097, 5119, 5121, 11000}) sizes.push_back(n);
    size_t checks = 0;
    for (const Format& f : formats)
        for (size_t n : sizes)
            for (int kind = 0; kind < 3; ++kind) {
                std::vector<float> x(n);
                for (float& v : x) {
                    if (kind == 0) {
                        v = std::normal_distribution<float>()(random);
                    } else {  // any bits at all; kind 1 keeps them finite
                        const std::uint32_t b = random();
                        std::memcpy(&v, &b, 4);
                        if (kind == 1 && !std::isfinite(v)) v = 1.0f;
                    }
                }
                Bytes first;
                std::vector<float> values;
                for (int k = 0; k <= static_cast<int>(best_isa()); ++k)
                    for (int threads : {1, 3}) {
                        set_isa(static_cast<Isa>(k));
                        set_threads(threads);
                        Bytes data(f.nbytes(n));
                        f.encode(x.data(), n, data.data());
                        std::vector<float> y(n, 1.0f), z(n, 1.0f);
                        if (!f.decode(data.data(), n, {y.data()})) fail(std::string(f.name) + " rejects its own message");
                        f.decode(data.data(), n, {z.data(), true, 0.5f});
                        for (size_t i = 0; i < n; ++i) {
                            if (kind < 2 && !std::isfinite(y[i])) fail(std::string(f.name) + " made a finite value infinite");
                            if (kind == 0 && z[i] != 1.0f + 0.5f * y[i]) fail(std::string(f.name) + " adds what it does not decode");
                        }
                        if (k == 0 && threads == 1) {
                            first = data;
                            values = y;
                        }
                        bool same = data == first;  // which NaN it is does not matter
                        for (size_t i = 0; i < n; ++i)
                            same = same && (std::memcmp(&y[i], &values[i], 4) == 0 || (std::isnan(y[i]) && std::isnan(values[i])));
                        if (!same) fail(std::string(f.name) + ": instruction sets differ at n = " + std::to_string(n));
                        ++checks;
                    }
            }
    std::printf("casts: %zu messages agree\n", checks);
}
