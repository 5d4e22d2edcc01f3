#include "tersegrad/levels.hpp"

#include "bind.hpp"

using namespace tersegrad;
using bind::Array;
using bind::expect;
using bind::Work;

namespace {

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

Bytes own(std::vector<std::uint8_t> bytes) {
    auto* kept = new std::vector<std::uint8_t>(std::move(bytes));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<std::uint8_t>*>(p); });
    return Bytes(kept->data(), {kept->size()}, owner);
}

Bytes encode(Array<const std::int32_t> levels, bool adaptive) {
    expect(levels.size() < kMostLevels, "there are less than 2^30 levels");
    std::vector<std::uint8_t> bytes;
    {
        const Work work;
        expect(adaptive || unary_bits(levels.data(), levels.size()) <= std::uint64_t{1} << 30,
               "levels this large take more than 2^30 bits in unary: use the adaptive form");
        bytes = levels_encode(levels.data(), levels.size(), adaptive ? LevelForm::adaptive : LevelForm::paper);
    }
    return own(std::move(bytes));
}

bool decode(Array<const std::uint8_t> data, Array<std::int32_t> levels) {
    expect(levels.size() < kMostLevels, "there are less than 2^30 levels");
    bind::apart(levels, data);
    const Work work;
    return levels_decode(data.data(), data.size(), levels.data(), levels.size());
}

bind::Registrar registrar([](nb::module_& m) {
    m.def("levels_encode", &encode);
    m.def("levels_decode", &decode);
});

}  // namespace
