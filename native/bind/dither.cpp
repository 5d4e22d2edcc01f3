#include "tersegrad/dither.hpp"

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind.hpp"
#include "layout.hpp"
#include "tersegrad/levels.hpp"

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::rows_of;
using bind::Work;

namespace {

// (whether rounding is random, seed, purpose, step, salt).
using Draws = std::tuple<bool, std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t>;

std::size_t max_bytes(std::size_t n) {
    expect(n <= std::size_t{1} << 56, "vectors have at most 2^56 coordinates");
    return dither::max_bytes(n);
}

std::tuple<std::size_t, double, double> encode(Array<const float> x, double nu, float step, int coder, int chunk, Draws draws, Array<std::uint8_t> out,
                                               Array<float> left, Array<const float> carry, Array<const std::int64_t> layout, bool rdo) {
    expect(carry.size() == 0 || (carry.size() == x.size() && left.size() == x.size()),
           "what is carried and what is left have as many coordinates as x");
    expect(left.size() == 0 || left.size() == x.size(), "what is left has as many coordinates as x");
    apart(left, x, carry);
    apart(out, x, carry, left);
    expect(out.size() >= dither::max_bytes(x.size()), "the output buffer is too small");
    expect(std::isfinite(nu), "nu must be finite");
    if (nu <= 0) bind::expect_step(step);
    expect(coder >= 0 && coder <= 2, "no such coder");
    expect(static_cast<dither::Coder>(coder) != dither::Coder::paper || x.size() < kMostLevels,
           "the published code is for vectors of less than 2^30 coordinates");
    expect(chunk == dither::kAutoChunk || rans::is_chunk(chunk), "chunks have 2^14 to 2^18 symbols");
    expect(!rdo || !std::get<0>(draws), "levels that are rounded at random are not chosen");
    const Stream stream = bind::stream_of(std::get<1>(draws), std::get<2>(draws), std::get<3>(draws), std::get<4>(draws), 0, x.size());
    const dither::Options options{nu, step, static_cast<dither::Coder>(coder), std::get<0>(draws) ? &stream : nullptr,
                                  carry.size() ? carry.data() : nullptr, left.size() ? left.data() : nullptr, chunk,
                                  rows_of(layout, x.size()), rdo};
    const Work work;
    const auto outcome = dither::encode(x.data(), x.size(), options, out.data());
    return {outcome.bytes, outcome.norm, outcome.error};
}

bool decode(Array<const std::uint8_t> data, Array<float> out, Array<const std::int64_t> layout) {
    apart(out, data);
    const classes::Rows rows = rows_of(layout, out.size());
    const Work work;
    return dither::decode(data.data(), data.size(), out.size(), rows, out.data());
}

// `symbols`: as many bytes as there are coordinates, to work in, or none.
bool decode_add(Array<const std::uint8_t> data, Array<float> out, float weight, Array<std::uint8_t> symbols, Array<const std::int64_t> layout) {
    apart(out, data, symbols);
    apart(symbols, data);
    expect(symbols.size() == 0 || symbols.size() == out.size(), "give one byte per coordinate to work in, or none");
    const classes::Rows rows = rows_of(layout, out.size());
    const Work work;
    return dither::decode_add(data.data(), data.size(), out.size(), rows, weight, out.data(), symbols.size() ? symbols.data() : nullptr);
}

// `levels`: those from `begin` on of n.
bool may_have_classes(Array<const std::int8_t> levels, Array<const std::int64_t> layout, std::size_t begin, std::size_t n) {
    expect(begin <= n && levels.size() <= n - begin, "there are fewer levels in all");
    const classes::Rows rows = rows_of(layout, n);
    const Work work;
    return dither::may_have_classes(levels.data(), levels.size(), rows, begin);
}

std::tuple<double, double> sample(Array<const float> x, float step, std::size_t stride, Array<const float> carry) {
    expect(carry.size() == 0 || carry.size() == x.size(), "what is carried has as many coordinates as x");
    bind::expect_step(step);
    expect(stride >= 1, "the stride is at least 1");
    const Work work;
    const auto m = dither::sample(x.data(), x.size(), 1.0f / step, stride, carry.size() ? carry.data() : nullptr);
    return {m.error, m.norm};
}

bind::Registrar registrar([](nb::module_& m) {
    m.def("dither_max_bytes", &max_bytes);
    m.def("dither_encode", &encode);
    m.def("dither_decode", &decode);
    m.def("dither_decode_add", &decode_add);
    m.def("dither_sample", &sample);
    m.def("may_have_classes", &may_have_classes);
});

}  // namespace
