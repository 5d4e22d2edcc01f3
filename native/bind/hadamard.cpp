#include "tersegrad/hadamard.hpp"

#include "bind.hpp"

using namespace tersegrad;
using namespace tersegrad::bind;

// In place or apart, nothing between.
static void check(const Array<const float>& from, const Array<float>& to, std::size_t flat, std::size_t rotated, std::size_t block) {
    expect(rotated_size(flat, block) == rotated, "the rotated buffer does not have the padded size");
    if (from.data() != to.data()) apart(to, from);
}

static bind::Registrar registrar([](nb::module_& m) {
    m.def("rotate", [](Array<const float> x, Array<float> y, std::size_t block, std::uint64_t key, std::uint32_t purpose,
                       std::uint32_t step, std::uint32_t salt) {
        check(x, y, x.size(), y.size(), block);
        const Stream signs = stream_of(key, purpose, step, salt);
        const Work work;
        return rotate(x.data(), y.data(), x.size(), block, signs);
    });
    m.def("unrotate", [](Array<const float> y, Array<float> x, std::size_t block, std::uint64_t key, std::uint32_t purpose,
                         std::uint32_t step, std::uint32_t salt) {
        check(y, x, x.size(), y.size(), block);
        const Stream signs = stream_of(key, purpose, step, salt);
        const Work work;
        unrotate(y.data(), x.data(), x.size(), block, signs);
    });
});
