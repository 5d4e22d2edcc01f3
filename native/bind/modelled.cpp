#include "tersegrad/modelled.hpp"

#include <stdexcept>

#include "bind.hpp"

using namespace tersegrad;
using bind::Array;

namespace {

modelled::Table table_of(Array<const std::int32_t> entries, std::size_t rows, int shift, Array<const std::uint8_t> classes) {
    const std::size_t width = rows ? entries.size() / rows : 0;
    if (width % 2 == 0 || width * rows != entries.size() || shift < 0 || shift > 30) throw std::invalid_argument("a malformed table");
    for (std::size_t i = 0; i < entries.size(); ++i)
        if (entries.data()[i] < 1 || entries.data()[i] > 65535) throw std::invalid_argument("chances lie in 1..65535");
    for (std::size_t i = 0; i < classes.size(); ++i)
        if (classes.data()[i] >= rows) throw std::invalid_argument("a class has no row");
    return {entries.data(), width, shift};
}

nb::bytes encode(Array<const std::int32_t> levels, Array<const std::uint8_t> classes, Array<const std::int32_t> entries, std::size_t rows,
                 int shift) {
    if (levels.size() != classes.size()) throw std::invalid_argument("one class a level");
    const auto table = table_of(entries, rows, shift, classes);
    std::vector<std::uint8_t> bytes;
    {
        nb::gil_scoped_release release;
        bytes = modelled::encode(levels.data(), classes.data(), levels.size(), table);
    }
    return nb::bytes(bytes.data(), bytes.size());
}

bool decode(Array<const std::uint8_t> data, Array<const std::uint8_t> classes, Array<const std::int32_t> entries, std::size_t rows, int shift,
            Array<std::int32_t> levels) {
    if (levels.size() != classes.size()) throw std::invalid_argument("one class a level");
    const auto table = table_of(entries, rows, shift, classes);
    nb::gil_scoped_release release;
    return modelled::decode(data.data(), data.size(), classes.data(), levels.size(), table, levels.data());
}

bind::Registrar registrar([](nb::module_& m) {
    m.def("modelled_encode", &encode);
    m.def("modelled_decode", &decode);
});

}  // namespace
