#include "tersegrad/planar.hpp"

#include "bind.hpp"

namespace {

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::Work;
using Values = Array<const std::int64_t>;
using Bytes = Array<const std::uint8_t>;
using Room = Array<std::uint8_t>;

unsigned parameter(int k) {
    expect(0 <= k && k <= static_cast<int>(planar::rice_max), "the Rice parameter lies in 0..56");
    return static_cast<unsigned>(k);
}

constexpr const char* kNoRoom = "out is too small for the codes";

std::int64_t checked(std::int64_t bytes, std::size_t room, const char* below) {
    expect(bytes >= 0, below);
    expect(static_cast<std::size_t>(bytes) <= room, kNoRoom);
    return bytes;
}

const bind::Registrar registrar([](nb::module_& m) {
    m.def("planar_gamma_encode", [](Values values, Room out) {
        apart(out, values);
        const Work work;
        const auto bytes = checked(planar::gamma_bytes(values.data(), values.size()), out.size(), "Elias codes are for values of at least 1");
        planar::gamma_encode(values.data(), values.size(), out.data());
        return bytes;
    });
    m.def("planar_gamma_decode", [](Bytes data, Array<std::int64_t> out) {
        apart(out, data);
        const Work work;
        return planar::gamma_decode(data.data(), data.size(), out.size(), out.data());
    });
    m.def("rice_bits", [](Values values, int k) {
        const unsigned parameter_k = parameter(k);
        const Work work;
        return planar::rice_bits(values.data(), values.size(), parameter_k);
    });
    m.def("rice_best", [](Values values) {
        const Work work;
        return planar::rice_best(values.data(), values.size());
    });
    m.def("rice_encode", [](Values values, int k, Room out) {
        const unsigned parameter_k = parameter(k);
        apart(out, values);
        const Work work;
        const auto bytes = planar::rice_encode(values.data(), values.size(), parameter_k, out.data(), out.size());
        expect(bytes != planar::outside, "Rice codes are for values of at least 0");
        expect(bytes >= 0, kNoRoom);
        return bytes;
    });
    m.def("rice_decode", [](Bytes data, int k, Array<std::int64_t> out) {
        const unsigned parameter_k = parameter(k);
        apart(out, data);
        const Work work;
        return planar::rice_decode(data.data(), data.size(), out.size(), parameter_k, out.data());
    });
});

}  // namespace
