#include "tersegrad/trellis.hpp"

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "layout.hpp"
#include "tersegrad/rans.hpp"

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::Work;

namespace {

// (whether there is dither, seed, purposes of dither and signs, step, salt).
using Draws = std::tuple<bool, std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;

trellis::Dither dither_of(const Draws& d, std::size_t n) {
    return {bind::stream_of(std::get<1>(d), std::get<2>(d), std::get<4>(d), std::get<5>(d), 0, n),
            bind::stream_of(std::get<1>(d), std::get<3>(d), std::get<4>(d), std::get<5>(d), 0, n)};
}

void expect_states(int states) { expect(trellis::code_of(states) >= 0, "there are codes of 4, 8, 16 and 32 states"); }

std::size_t max_bytes(std::size_t n) {
    expect(n <= std::size_t{1} << 56, "vectors have at most 2^56 coordinates");
    return trellis::max_bytes(n);
}

std::tuple<std::size_t, double, double> encode(Array<const float> x, float step, int states, int chunk, Draws draws, Array<std::uint8_t> out,
                                               Array<const std::int64_t> layout, bool rdo) {
    apart(out, x);
    expect(out.size() >= trellis::max_bytes(x.size()), "the output buffer is too small");
    bind::expect_step(step);
    expect_states(states);
    expect(chunk == trellis::kAutoChunk || rans::is_chunk(chunk), "chunks have 2^14 to 2^18 symbols");
    expect(!rdo || !std::get<0>(draws), "dithered coordinates are rounded to nearest");
    const classes::Rows rows = bind::rows_of(layout, x.size());
    const trellis::Dither dither = dither_of(draws, x.size());
    const Work work;
    const auto outcome = trellis::encode(x.data(), x.size(), {step, states, chunk, std::get<0>(draws) ? &dither : nullptr, rows, rdo}, out.data());
    return {outcome.bytes, outcome.norm, outcome.error};
}

// `values`: as many numbers as there are coordinates, to work in when adding, or none.
bool decode(Array<const std::uint8_t> data, int states, Draws draws, Array<float> out, bool add, float weight, Array<const std::int64_t> layout,
            Array<float> values) {
    apart(out, data, values);
    apart(values, data);
    expect(values.size() == 0 || values.size() == out.size(), "give one number per coordinate to work in, or none");
    expect_states(states);
    const trellis::Dither all = dither_of(draws, out.size());
    const trellis::Source source{states, std::get<0>(draws) ? &all : nullptr, bind::rows_of(layout, out.size())};
    const Work work;
    return add ? trellis::decode_add(data.data(), data.size(), out.size(), source, weight, values.size() ? values.data() : nullptr, out.data())
               : trellis::decode(data.data(), data.size(), out.size(), source, out.data());
}

std::tuple<double, double> error(Array<const float> x, float step, int states, Array<const std::int64_t> layout) {
    bind::expect_step(step);
    expect_states(states);
    const classes::Rows rows = bind::rows_of(layout, x.size());
    const Work work;
    const auto outcome = trellis::measure(x.data(), x.size(), step, states, rows);
    return {outcome.error, outcome.norm};
}

bind::Registrar registrar([](nb::module_& m) {
    m.def("trellis_max_bytes", &max_bytes);
    m.def("trellis_encode", &encode);
    m.def("trellis_decode", &decode);
    m.def("trellis_error", &error);
});

}  // namespace
