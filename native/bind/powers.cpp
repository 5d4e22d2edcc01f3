#include "tersegrad/powers.hpp"

#include "bind.hpp"

namespace {

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::Registrar;
using bind::Work;

void fits(std::size_t n, std::size_t block, std::size_t scales, std::size_t codes) {
    expect(block >= 8 && block % 8 == 0, "blocks are multiples of 8");
    expect(scales == 4 * ((n + block - 1) / block), "one float32 scale per block");
    expect(codes == (n + 1) / 2, "four bits per coordinate");
}

const Registrar registrar([](nb::module_& m) {
    m.def("powers_encode", [](Array<const float> x, std::size_t block, Array<std::uint8_t> scales, Array<std::uint8_t> codes) {
        fits(x.size(), block, scales.size(), codes.size());
        apart(scales, x, codes);
        apart(codes, x);
        const Work work;
        powers::encode(x.data(), x.size(), block, scales.data(), codes.data());
    });
    m.def("powers_decode", [](Array<const std::uint8_t> scales, Array<const std::uint8_t> codes, std::size_t block, Array<float> out) {
        fits(out.size(), block, scales.size(), codes.size());
        apart(out, scales, codes);
        const Work work;
        powers::decode(scales.data(), codes.data(), out.size(), block, out.data());
    });
    m.def("powers_decode_add",
          [](Array<const std::uint8_t> scales, Array<const std::uint8_t> codes, std::size_t block, float weight, Array<float> out) {
              fits(out.size(), block, scales.size(), codes.size());
              apart(out, scales, codes);
              const Work work;
              powers::decode_add(scales.data(), codes.data(), out.size(), block, weight, out.data());
          });
});

}  // namespace
