#include "tersegrad/hadamard.hpp"

#include <stdexcept>

#include "bind.hpp"

using namespace tersegrad;
using bind::Array;

static void check(std::size_t flat, std::size_t rotated, std::size_t block) {
    if (rotated_size(flat, block) != rotated) throw std::invalid_argument("the rotated buffer does not have the padded size");
}

static bind::Registrar registrar([](nb::module_& m) {
    m.def("rotate", [](Array<const float> x, Array<float> y, std::size_t block, std::uint64_t key, std::uint32_t purpose,
                       std::uint32_t step, std::uint32_t stream) {
        check(x.size(), y.size(), block);
        nb::gil_scoped_release release;
        return rotate(x.data(), y.data(), x.size(), block, {key, purpose, step, stream});
    });
    m.def("unrotate", [](Array<const float> y, Array<float> x, std::size_t block, std::uint64_t key, std::uint32_t purpose,
                         std::uint32_t step, std::uint32_t stream) {
        check(x.size(), y.size(), block);
        nb::gil_scoped_release release;
        unrotate(y.data(), x.data(), x.size(), block, {key, purpose, step, stream});
    });
});
