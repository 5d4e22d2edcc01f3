#include "tersegrad/cosine.hpp"

#include "bind.hpp"

using namespace tersegrad;
using namespace tersegrad::bind;

static bind::Registrar registrar([](nb::module_& m) {
    // One region: rows x cols in tiles of height x width. `along` holds the basis of the width as the second pass reads it, row by row.
    m.def("cosine_transform", [](Array<const float> x, Array<float> out, std::size_t rows, std::size_t cols, std::size_t height, std::size_t width,
                                 Array<const double> down, Array<const double> along, bool forward) {
        expect(height && width && rows % height == 0 && cols % width == 0, "tiles must fill their region");
        expect(x.size() == product(rows, cols) && out.size() == x.size(), "the region has rows times columns");
        expect(down.size() == product(height, height) && along.size() == product(width, width), "a basis is a square");
        apart(out, x, down, along);
        const Work work;
        cosine::transform({x.data(), out.data(), down.data(), along.data(), forward}, {0, rows, cols, height, width, 1});
    });
});
