#include "tersegrad/align.hpp"

#include "bind.hpp"
#include "layout.hpp"

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::Work;

namespace {

nb::bytes find(Array<const float> x, float least, Array<const std::int64_t> layout) {
    const classes::Rows rows = bind::rows_of(layout, x.size());
    std::vector<std::uint8_t> told;
    {
        const Work work;
        told = align::find(x.data(), least, rows);
    }
    return nb::bytes(told.data(), told.size());
}

bool flip(Array<const float> x, Array<const std::uint8_t> data, Array<const std::int64_t> layout, Array<float> out) {
    expect(out.size() == x.size(), "the vectors have different lengths");
    if (out.data() != x.data()) apart(out, x);
    apart(out, data);
    const classes::Rows rows = bind::rows_of(layout, x.size());
    const Work work;
    return align::flip(x.data(), x.size(), data.data(), data.size(), rows, out.data());
}

const bind::Registrar registrar([](nb::module_& m) {
    m.def("align_find", find);
    m.def("align_flip", flip);
});

}  // namespace
