#include "tersegrad/planar.hpp"

#include <stdexcept>

#include "bind.hpp"

namespace {

using namespace tersegrad;
using bind::Array;
using Values = Array<const std::int64_t>;
using Bytes = Array<const std::uint8_t>;

unsigned parameter(int k) {
    if (k < 0 || k > static_cast<int>(planar::rice_max)) throw std::invalid_argument("the Rice parameter lies in 0..56");
    return static_cast<unsigned>(k);
}

std::int64_t checked(std::int64_t bytes, std::size_t room, const char* below) {
    if (bytes < 0) throw std::invalid_argument(below);
    if (static_cast<std::size_t>(bytes) > room) throw std::invalid_argument("out is too small for the codes");
    return bytes;
}

const bind::Registrar registrar([](nb::module_& m) {
    const auto out = nb::arg("out").noconvert();
    m.def(
        "planar_gamma_encode",
        [](Values values, Array<std::uint8_t> out) {
            nb::gil_scoped_release release;
            const auto bytes = checked(planar::gamma_bytes(values.data(), values.size()), out.size(), "Elias codes are for values of at least 1");
            planar::gamma_encode(values.data(), values.size(), out.data());
            return bytes;
        },
        nb::arg("values"), out);
    m.def(
        "planar_gamma_decode",
        [](Bytes data, Array<std::int64_t> out) {
            nb::gil_scoped_release release;
            return planar::gamma_decode(data.data(), data.size(), out.size(), out.data());
        },
        nb::arg("data"), out);
    m.def("rice_bits", [](Values values, int k) {
        const unsigned parameter_k = parameter(k);
        nb::gil_scoped_release release;
        return planar::rice_bits(values.data(), values.size(), parameter_k);
    });
    m.def("rice_best", [](Values values) {
        nb::gil_scoped_release release;
        return planar::rice_best(values.data(), values.size());
    });
    m.def(
        "rice_encode",
        [](Values values, int k, Array<std::uint8_t> out) {
            const unsigned parameter_k = parameter(k);
            nb::gil_scoped_release release;
            const auto bytes = checked(planar::rice_bytes(values.data(), values.size(), parameter_k), out.size(), "Rice codes are for values of at least 0");
            planar::rice_encode(values.data(), values.size(), parameter_k, out.data());
            return bytes;
        },
        nb::arg("values"), nb::arg("k"), out);
    m.def(
        "rice_decode",
        [](Bytes data, int k, Array<std::int64_t> out) {
            const unsigned parameter_k = parameter(k);
            nb::gil_scoped_release release;
            return planar::rice_decode(data.data(), data.size(), out.size(), parameter_k, out.data());
        },
        nb::arg("data"), nb::arg("k"), out);
});

}  // namespace
