#include "tersegrad/drawn.hpp"

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind.hpp"

using namespace tersegrad;
using bind::apart;
using bind::Array;
using bind::expect;
using bind::Work;

namespace {

using Draws = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t>;  // seed, purpose, step, buffer << 16 | sender

Stream stream_of(const Draws& d, std::uint64_t start, std::uint64_t count) {
    return bind::stream_of(std::get<0>(d), std::get<1>(d), std::get<2>(d), std::get<3>(d), start, count);
}

std::int64_t quantise(Array<const float> x, float step, Draws draws, std::uint64_t start, Array<std::int32_t> levels) {
    expect(levels.size() == x.size(), "one level per coordinate");
    bind::expect_step(step);
    apart(levels, x);
    const Stream stream = stream_of(draws, start, x.size());
    const Work work;
    return drawn::quantise(x.data(), x.size(), step, stream, start, levels.data());
}

void bins(Draws draws, std::uint64_t start, Array<std::uint8_t> out) {
    const Stream stream = stream_of(draws, start, out.size());
    const Work work;
    drawn::bins(stream, start, out.size(), out.data());
}

void octaves(Draws draws, std::uint64_t start, Array<std::uint8_t> out) {
    const Stream stream = stream_of(draws, start, out.size());
    const Work work;
    drawn::octaves(stream, start, out.size(), out.data());
}

void restore(Array<const std::int32_t> levels, float step, Draws draws, std::uint64_t start, Array<float> out) {
    expect(levels.size() == out.size(), "one level per coordinate");
    apart(out, levels);
    const Stream stream = stream_of(draws, start, out.size());
    const Work work;
    drawn::restore(levels.data(), out.size(), step, stream, start, out.data());
}

void restore_add(Array<const std::int32_t> levels, float step, Draws draws, std::uint64_t start, float weight, Array<float> out) {
    expect(levels.size() == out.size(), "one level per coordinate");
    apart(out, levels);
    const Stream stream = stream_of(draws, start, out.size());
    const Work work;
    drawn::restore_add(levels.data(), out.size(), step, stream, start, weight, out.data());
}

void rows(Draws draws, Array<const std::int64_t> rows, std::size_t width, Array<std::int32_t> out) {
    expect(out.size() == bind::product(rows.size(), width), "one draw per row and coordinate");
    apart(out, rows);
    const Stream stream = stream_of(draws, 0, width);
    const std::size_t padded = (width + 7) / 8 * 8;  // a row starts with a new block of draws
    for (std::size_t r = 0; r < rows.size(); ++r) {
        expect(rows.data()[r] >= 0, "rows are counted from 0");
        stream_of(draws, bind::product(static_cast<std::size_t>(rows.data()[r]), padded), padded);
    }
    const Work work;
    drawn::random_rows(stream, rows.data(), rows.size(), width, out.data());
}

void first(Array<const float> book, std::size_t words, Array<const float> units, std::size_t d, Array<const float> least,
           Array<const std::int64_t> start, Array<std::int64_t> out) {
    const std::size_t n = least.size();
    expect(d >= 1, "words have at least one coordinate");
    expect(book.size() == bind::product(words, d) && units.size() == bind::product(n, d) && start.size() == n && out.size() == n,
           "the sizes of the book, the units and the results differ");
    apart(out, book, units, least, start);
    const Work work;
    drawn::sphere_first(book.data(), words, units.data(), n, d, least.data(), start.data(), out.data());
}

bind::Registrar registrar([](nb::module_& m) {
    m.def("subtractive_quantise", &quantise);
    m.def("subtractive_bins", &bins);
    m.def("subtractive_octaves", &octaves);
    m.def("subtractive_restore", &restore);
    m.def("subtractive_restore_add", &restore_add);
    m.def("random_rows", &rows);
    m.def("sphere_first", &first);
});

}  // namespace
