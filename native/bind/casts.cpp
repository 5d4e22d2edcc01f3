#include "tersegrad/casts.hpp"

#include "bind.hpp"

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::Work;
using std::size_t;
using Floats = Array<float>;
using Input = Array<const float>;
using Bytes = Array<std::uint8_t>;
using Data = Array<const std::uint8_t>;

namespace {

void length(size_t got, size_t wanted) { expect(got == wanted, "the message has the wrong length for this many coordinates"); }
void check_block(size_t block) { expect(block >= 16 && block <= 65536 && (block & (block - 1)) == 0, "block must be a power of two in 16..65536"); }
void check_bucket(size_t bucket) { expect(bucket >= 64 && bucket % 64 == 0 && bucket <= size_t{1} << 56, "bucket must be a positive multiple of 64, at most 2^56"); }
void check_levels(int levels, int width) {
    expect(levels >= 1 && levels <= 64, "levels must lie in 1..64");
    expect(width >= 2 && width <= 8 && 2 * levels + 1 < 1 << width, "the width must hold 2 * levels + 2 codes and be at most 8");
}
size_t over(size_t n, size_t unit) { return n / unit + (n % unit != 0); }
casts::Sink sink(const Floats& out, bool add, float weight) { return {out.data(), add, weight}; }
// Purpose 0: rounding.
Stream source(std::uint64_t seed, std::uint32_t step, std::uint32_t origin) { return bind::stream_of(seed, 0, step, origin); }

const bind::Registrar registrar([](nb::module_& m) {
    m.def("bf16_encode", [](Input x, Bytes out) {
        length(out.size(), 2 * x.size());
        apart(out, x);
        const Work work;
        casts::bf16_encode(x.data(), x.size(), out.data());
    });
    m.def("bf16_decode", [](Data data, Floats out, bool add, float weight) {
        length(data.size(), 2 * out.size());
        apart(out, data);
        const Work work;
        casts::bf16_decode(data.data(), out.size(), sink(out, add, weight));
    });
    m.def("fp16_encode", [](Input x, Bytes out) {
        length(out.size(), x.size() ? 4 + 2 * x.size() : 0);
        apart(out, x);
        const Work work;
        casts::fp16_encode(x.data(), x.size(), out.data());
    });
    m.def("fp16_decode", [](Data data, Floats out, bool add, float weight) {
        length(data.size(), out.size() ? 4 + 2 * out.size() : 0);
        apart(out, data);
        const Work work;
        casts::fp16_decode(data.data(), out.size(), sink(out, add, weight));
    });
    m.def("fp8_encode", [](Input x, Bytes out, size_t block) {
        check_block(block);
        length(out.size(), over(x.size(), block) + x.size());
        apart(out, x);
        const Work work;
        casts::fp8_encode(x.data(), x.size(), block, out.data());
    });
    m.def("fp8_decode", [](Data data, Floats out, size_t block, bool add, float weight) {
        check_block(block);
        length(data.size(), over(out.size(), block) + out.size());
        apart(out, data);
        const Work work;
        casts::fp8_decode(data.data(), out.size(), block, sink(out, add, weight));
    });
    m.def("sign_encode", [](Input x, Bytes out, size_t block) {
        check_bucket(block);
        length(out.size(), casts::sign_nbytes(x.size(), block));
        apart(out, x);
        const Work work;
        casts::sign_encode(x.data(), x.size(), block, out.data());
    });
    m.def("sign_decode", [](Data data, Floats out, size_t block, bool add, float weight) {
        check_bucket(block);
        length(data.size(), casts::sign_nbytes(out.size(), block));
        apart(out, data);
        const Work work;
        casts::sign_decode(data.data(), out.size(), block, sink(out, add, weight));
    });
    m.def("sign_split", [](Input x, Input carry, Bytes out, Floats left, size_t block) {
        check_bucket(block);
        expect(block <= 4096, "blocks of up to 4096 coordinates are split in one pass");
        expect(carry.size() == x.size() && left.size() == x.size(), "the vectors have different lengths");
        length(out.size(), casts::sign_nbytes(x.size(), block));
        apart(out, x, carry, left);
        apart(left, x, carry);
        const Work work;
        return casts::sign_split(x.data(), carry.data(), x.size(), block, out.data(), left.data());
    });
    m.def("natural_encode", [](Input x, Bytes out, std::uint64_t seed, std::uint32_t step, std::uint32_t origin) {
        length(out.size(), over(x.size(), 8) + x.size());
        apart(out, x);
        const Work work;
        casts::natural_encode(x.data(), x.size(), source(seed, step, origin), out.data());
    });
    m.def("natural_decode", [](Data data, Floats out, bool add, float weight) {
        length(data.size(), over(out.size(), 8) + out.size());
        apart(out, data);
        const Work work;
        casts::natural_decode(data.data(), out.size(), sink(out, add, weight));
    });
    m.def("ternary_encode", [](Input x, Bytes out, size_t bucket, std::uint64_t seed, std::uint32_t step, std::uint32_t origin) {
        check_bucket(bucket);
        length(out.size(), casts::ternary_nbytes(x.size(), bucket));
        apart(out, x);
        const Work work;
        casts::ternary_encode(x.data(), x.size(), bucket, source(seed, step, origin), out.data());
    });
    m.def("ternary_decode", [](Data data, Floats out, size_t bucket, bool add, float weight) {
        check_bucket(bucket);
        length(data.size(), casts::ternary_nbytes(out.size(), bucket));
        apart(out, data);
        const Work work;
        return casts::ternary_decode(data.data(), out.size(), bucket, sink(out, add, weight));
    });
    m.def("natural_levels_encode", [](Input x, Bytes out, size_t bucket, int levels, int width, std::uint64_t seed, std::uint32_t step,
                                 std::uint32_t origin) {
        check_bucket(bucket);
        check_levels(levels, width);
        length(out.size(), casts::natural_levels_nbytes(x.size(), bucket, width));
        apart(out, x);
        const Work work;
        casts::natural_levels_encode(x.data(), x.size(), bucket, levels, width, source(seed, step, origin), out.data());
    });
    m.def("natural_levels_decode", [](Data data, Floats out, size_t bucket, int levels, int width, bool add, float weight) {
        check_bucket(bucket);
        check_levels(levels, width);
        length(data.size(), casts::natural_levels_nbytes(out.size(), bucket, width));
        apart(out, data);
        const Work work;
        casts::natural_levels_decode(data.data(), out.size(), bucket, levels, width, sink(out, add, weight));
    });
});

}  // namespace
