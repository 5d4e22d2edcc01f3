// Arbitrary bytes as steps and codes, of every width and instruction set: never a sanitizer report. Usage: fuzz_rounding [iterations]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "tersegrad/rounding.hpp"
#include "tersegrad/runtime.hpp"
#include "tersegrad/threads.hpp"

using namespace tersegrad;

int main(int argc, char** argv) {
    const long iterations = argc > 1 ? std::atol(argv[1]) : 20000;
    std::mt19937_64 rng(1);
    for (long k = 0; k < iterations; ++k) {
        set_isa(static_cast<Isa>(rng() % (static_cast<unsigned>(best_isa()) + 1)));
        set_threads(k % 64 == 0 ? 2 : 1);
        const std::size_t n = k % 1000 == 0 ? 300000 + rng() % 100 : rng() % 700;
        Quantiser q;
        const std::size_t blocks[] = {8, 16, 24, 32, 64, 512, 1024, 4096, 1 << 17};
        q.block = blocks[rng() % 9];
        q.width = 2 + static_cast<int>(rng() % 7);
        q.levels = 1 + static_cast<int>(rng() % ((1u << (q.width - 1)) - 1));
        q.format = rng() % 2 ? StepFormat::float32 : StepFormat::bfloat16;
        q.rule = static_cast<Rule>(rng() % 3);
        const std::size_t nsteps = block_count(n, q.block) * step_bytes(q.format), ncodes = code_bytes(n, q.width);
        const std::unique_ptr<std::uint8_t[]> steps(new std::uint8_t[nsteps]), codes(new std::uint8_t[ncodes]);
        const std::unique_ptr<float[]> out(new float[n]());
        for (std::size_t i = 0; i < nsteps; ++i) steps[i] = static_cast<std::uint8_t>(rng() % 4 ? rng() & 0x3f : rng());
        for (std::size_t i = 0; i < ncodes; ++i) codes[i] = static_cast<std::uint8_t>(rng());
        if (rng() % 2)
            dequantise(steps.get(), codes.get(), n, q, out.get());
        else
            dequantise_add(steps.get(), codes.get(), n, q, 0.5f, out.get());
        // And back: whatever was decoded, NaN and Inf included, is an input.
        const Stream stream{rng(), 0, static_cast<std::uint32_t>(rng()), 0};
        if (!(q.format == StepFormat::bfloat16 && q.rule != Rule::nearest)) quantise(out.get(), n, q, stream, steps.get(), codes.get());
    }
    std::printf("rounding: %ld messages\n", iterations);
}
