#include "tersegrad/modelled.hpp"

#include "bind.hpp"

using namespace tersegrad;
using bind::Array;
using bind::expect;
using bind::Work;

namespace {

modelled::Table table_of(Array<const std::int32_t> entries, std::size_t rows, int shift, Array<const std::uint8_t> classes) {
    const std::size_t width = rows ? entries.size() / rows : 0;
    expect(width % 2 == 1 && width * rows == entries.size() && shift >= 0 && shift <= 30, "a malformed table");
    for (std::size_t i = 0; i < entries.size(); ++i)
        expect(entries.data()[i] >= 1 && entries.data()[i] <= 65535, "chances lie in 1..65535");
    for (std::size_t i = 0; i < classes.size(); ++i) expect(classes.data()[i] < rows, "a class has no row");
    return {entries.data(), width, shift};
}

nb::bytes encode(Array<const std::int32_t> levels, Array<const std::uint8_t> classes, Array<const std::int32_t> entries, std::size_t rows,
                 int shift) {
    expect(levels.size() == classes.size(), "one class per level");
    for (std::size_t i = 0; i < levels.size(); ++i)
        expect(-modelled::kLargest <= levels.data()[i] && levels.data()[i] <= modelled::kLargest, "levels lie within +-2^30");
    const auto table = table_of(entries, rows, shift, classes);
    std::vector<std::uint8_t> bytes;
    {
        const Work work;
        bytes = modelled::encode(levels.data(), classes.data(), levels.size(), table);
    }
    return nb::bytes(bytes.data(), bytes.size());
}

bool decode(Array<const std::uint8_t> data, Array<const std::uint8_t> classes, Array<const std::int32_t> entries, std::size_t rows, int shift,
            Array<std::int32_t> levels) {
    expect(levels.size() == classes.size(), "one class per level");
    bind::apart(levels, data, classes, entries);
    const auto table = table_of(entries, rows, shift, classes);
    const Work work;
    return modelled::decode(data.data(), data.size(), classes.data(), levels.size(), table, levels.data());
}

bind::Registrar registrar([](nb::module_& m) {
    m.def("modelled_encode", &encode);
    m.def("modelled_decode", &decode);
});

}  // namespace
