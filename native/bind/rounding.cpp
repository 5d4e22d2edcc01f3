#include "tersegrad/rounding.hpp"

#include "bind.hpp"

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::Work;

namespace {

Stream stream_of(std::uint64_t seed, std::uint32_t purpose, std::uint32_t step, std::uint32_t buffer, std::uint32_t sender,
                 std::uint64_t start, std::uint64_t count) {
    expect(buffer < 65536 && sender < 65536, "buffer and sender take 16 bits each");
    return bind::stream_of(seed, purpose, step, buffer << 16 | sender, start, count);
}

Quantiser quantiser_of(std::size_t block, int levels, int width, int rule, bool bfloat16) {
    expect(rule >= 0 && rule <= 2, "rules are 0 (l2), 1 (max) and 2 (nearest)");
    expect(block > 0 && block % 8 == 0 && block <= std::size_t{1} << 56, "a block is a positive multiple of 8 coordinates, at most 2^56");
    expect(width >= 2 && width <= 8, "codes take 2 to 8 bits");
    return {block, levels, width, static_cast<Rule>(rule), bfloat16 ? StepFormat::bfloat16 : StepFormat::float32};
}

void expect_sizes(std::size_t n, const Quantiser& q, std::size_t steps, std::size_t codes) {
    expect(steps == block_count(n, q.block) * step_bytes(q.format), "the steps have another length");
    expect(codes == code_bytes(n, q.width), "the codes have another length");
}

template <class T>
void per_block(void (*f)(const float*, std::size_t, std::size_t, T*), Array<const float> x, std::size_t block, Array<T> out) {
    expect(block > 0 && out.size() == block_count(x.size(), block), "one result per block");
    apart(out, x);
    const Work work;
    f(x.data(), x.size(), block, out.data());
}

const bind::Registrar rounding([](nb::module_& m) {
    m.def("random_u16", [](std::uint64_t seed, std::uint32_t purpose, std::uint32_t step, std::uint32_t buffer, std::uint32_t sender,
                           std::uint64_t start, Array<std::int32_t> out) {
        const Stream stream = stream_of(seed, purpose, step, buffer, sender, start, out.size());
        const Work work;
        random_u16(stream, start, out.size(), out.data());
    });
    m.def("abs_max", [](Array<const float> x) {
        const Work work;
        return abs_max(x.data(), x.size());
    });
    m.def("sum_squares", [](Array<const float> x) {
        const Work work;
        return sum_squares(x.data(), x.size());
    });
    m.def("sum_abs", [](Array<const float> x) {
        const Work work;
        return sum_abs(x.data(), x.size());
    });
    m.def("block_abs_max",
          [](Array<const float> x, std::size_t block, Array<float> out) { per_block(&block_abs_max, x, block, out); });
    m.def("block_sum_squares",
          [](Array<const float> x, std::size_t block, Array<double> out) { per_block(&block_sum_squares, x, block, out); });
    m.def("block_sum_abs",
          [](Array<const float> x, std::size_t block, Array<double> out) { per_block(&block_sum_abs, x, block, out); });
    m.def("quantise", [](Array<const float> x, std::size_t block, int levels, int width, int rule, bool bfloat16, std::uint64_t seed,
                         std::uint32_t purpose, std::uint32_t step, std::uint32_t buffer, std::uint32_t sender,
                         Array<std::uint8_t> steps, Array<std::uint8_t> codes) {
        const Quantiser q = quantiser_of(block, levels, width, rule, bfloat16);
        const Stream stream = stream_of(seed, purpose, step, buffer, sender, 0, x.size());
        expect(levels >= 1 && levels < 1 << (width - 1), "the levels do not fit the width");
        expect_sizes(x.size(), q, steps.size(), codes.size());
        apart(steps, x, codes);
        apart(codes, x);
        const Work work;
        quantise(x.data(), x.size(), q, stream, steps.data(), codes.data());
    });
    m.def("dequantise", [](Array<const std::uint8_t> steps, Array<const std::uint8_t> codes, std::size_t block, int width,
                           bool bfloat16, Array<float> out) {
        const Quantiser q = quantiser_of(block, 1, width, 0, bfloat16);
        expect_sizes(out.size(), q, steps.size(), codes.size());
        apart(out, steps, codes);
        const Work work;
        dequantise(steps.data(), codes.data(), out.size(), q, out.data());
    });
    m.def("dequantise_add", [](Array<const std::uint8_t> steps, Array<const std::uint8_t> codes, std::size_t block, int width,
                               bool bfloat16, float weight, Array<float> out) {
        const Quantiser q = quantiser_of(block, 1, width, 0, bfloat16);
        expect_sizes(out.size(), q, steps.size(), codes.size());
        apart(out, steps, codes);
        const Work work;
        dequantise_add(steps.data(), codes.data(), out.size(), q, weight, out.data());
    });
});

}  // namespace
