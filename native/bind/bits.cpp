#include "tersegrad/bits.hpp"

#include "bind.hpp"

namespace {

using namespace tersegrad;
using bind::Array;
using bind::apart;
using bind::expect;
using bind::Work;

template <class Code>
unsigned check_width(int width) {
    constexpr int first = sizeof(Code) == 1 ? 1 : 9, last = sizeof(Code) == 1 ? 8 : 16;
    expect(first <= width && width <= last, "codes of 1..8 bits are uint8, of 9..16 bits int32");
    return static_cast<unsigned>(width);
}

template <class Code>
void pack(Array<const Code> codes, int width, Array<std::uint8_t> out) {
    const unsigned w = check_width<Code>(width);
    expect(out.size() == bits::packed_bytes(codes.size(), w), "out must have exactly the packed size");
    apart(out, codes);
    const Work work;
    bits::pack(codes.data(), codes.size(), w, out.data());
}

template <class Code>
void unpack(Array<const std::uint8_t> data, int width, Array<Code> out) {
    const unsigned w = check_width<Code>(width);
    expect(data.size() == bits::packed_bytes(out.size(), w), "data must have exactly the packed size");
    apart(out, data);
    const Work work;
    bits::unpack(data.data(), out.size(), w, out.data());
}

bits::Elias elias(int code) {
    expect(0 <= code && code <= 2, "Elias codes are 0 gamma, 1 delta and 2 omega");
    return static_cast<bits::Elias>(code);
}

constexpr const char* kRefused = "a value is out of range, or out does not have exactly the length of the code";

const bind::Registrar registrar([](nb::module_& m) {
    m.def("pack_bits", &pack<std::uint8_t>);
    m.def("pack_bits", &pack<std::int32_t>);
    m.def("unpack_bits", &unpack<std::uint8_t>);
    m.def("unpack_bits", &unpack<std::int32_t>);
    m.def("pack_trits", [](Array<const std::uint8_t> trits, Array<std::uint8_t> out) {
        expect(out.size() == bits::trit_bytes(trits.size()), "out must have exactly the packed size");
        apart(out, trits);
        const Work work;
        return bits::pack_trits(trits.data(), trits.size(), out.data());
    });
    m.def("unpack_trits", [](Array<const std::uint8_t> data, Array<std::uint8_t> out) {
        expect(data.size() == bits::trit_bytes(out.size()), "data must have exactly the packed size");
        apart(out, data);
        const Work work;
        return bits::unpack_trits(data.data(), out.size(), out.data());
    });
    m.def("elias_bits", [](Array<const std::int64_t> values, int code) {
        const auto which = elias(code);
        const Work work;
        return bits::elias_bits(values.data(), values.size(), which);
    });
    m.def("elias_encode", [](Array<const std::int64_t> values, int code, Array<std::uint8_t> out) {
        const auto which = elias(code);
        apart(out, values);
        const Work work;
        expect(bits::elias_encode(values.data(), values.size(), which, out.data(), out.size()), kRefused);
    });
    m.def("elias_decode", [](Array<const std::uint8_t> data, int code, Array<std::int64_t> out) {
        const auto which = elias(code);
        apart(out, data);
        const Work work;
        return bits::elias_decode(data.data(), data.size(), out.size(), which, out.data());
    });
});

}  // namespace
