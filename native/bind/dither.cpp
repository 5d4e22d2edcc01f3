#include "tersegrad/dither.hpp"

#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <tuple>

#include "bind.hpp"
#include "tersegrad/philox.hpp"

using namespace tersegrad;
using bind::Array;

namespace {

// (seed, step, salt) of the rounding draws; empty for nearest rounding.
using Draws = std::tuple<bool, std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t>;

Stream stream_of(const Draws& d) { return {std::get<1>(d), std::get<2>(d), std::get<3>(d), std::get<4>(d)}; }

std::tuple<std::size_t, double, double> encode(Array<const float> x, double nu, float step, int coder, int chunk, Draws draws, Array<std::uint8_t> out,
                                               Array<float> left, Array<const float> carry) {
    if (carry.size() != 0 && (carry.size() != x.size() || left.size() != x.size()))
        throw std::invalid_argument("what is carried and what is left have as many coordinates as x");
    if (left.size() != 0 && (left.size() != x.size() || left.data() == x.data() || left.data() == carry.data()))
        throw std::invalid_argument("what is left needs a place of its own, as long as x");
    if (out.size() < dither::max_bytes(x.size())) throw std::invalid_argument("the output buffer is too small");
    if (nu <= 0 && !(step >= 0x1p-126f)) throw std::invalid_argument("the step must be a positive normal float32");
    if (coder < 0 || coder > 2) throw std::invalid_argument("no such coder");
    if (!rans::is_chunk(chunk)) throw std::invalid_argument("chunks have 2^14 to 2^18 symbols");
    nb::gil_scoped_release release;
    const Stream stream = stream_of(draws);
    const dither::Options options{nu, step, static_cast<dither::Coder>(coder), std::get<0>(draws) ? &stream : nullptr,
                                  carry.size() ? carry.data() : nullptr, left.size() ? left.data() : nullptr, chunk};
    const auto outcome = dither::encode(x.data(), x.size(), options, out.data());
    return {outcome.bytes, outcome.norm, outcome.error};
}

bool decode(Array<const std::uint8_t> data, Array<float> out) {
    nb::gil_scoped_release release;
    return dither::decode(data.data(), data.size(), out.size(), out.data());
}

bool decode_add(Array<const std::uint8_t> data, Array<float> out, float weight) {
    nb::gil_scoped_release release;
    return dither::decode_add(data.data(), data.size(), out.size(), weight, out.data());
}

std::tuple<double, double> sample(Array<const float> x, float step, std::size_t stride, Array<const float> carry) {
    if (carry.size() != 0 && carry.size() != x.size()) throw std::invalid_argument("what is carried has as many coordinates as x");
    if (!(step >= 0x1p-126f) || stride < 1) throw std::invalid_argument("the step must be a positive normal float32");
    nb::gil_scoped_release release;
    const auto m = dither::sample(x.data(), x.size(), 1.0f / step, stride, carry.size() ? carry.data() : nullptr);
    return {m.error, m.norm};
}

bind::Registrar registrar([](nb::module_& m) {
    m.def("dither_max_bytes", &dither::max_bytes);
    m.def("dither_encode", &encode);
    m.def("dither_decode", &decode);
    m.def("dither_decode_add", &decode_add);
    m.def("dither_sample", &sample);
});

}  // namespace
