#include "tersegrad/shared.hpp"

#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <tuple>

#include "bind.hpp"

using namespace tersegrad;
using bind::Array;

namespace {

using Draws = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t>;  // seed, purpose, step, buffer << 16 | sender

Stream stream_of(const Draws& d) { return {std::get<0>(d), std::get<1>(d), std::get<2>(d), std::get<3>(d)}; }

void expect(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

std::int64_t quantise(Array<const float> x, float step, Draws draws, std::uint64_t start, Array<std::int32_t> levels) {
    expect(levels.size() == x.size() && step >= 0x1p-126f, "one level a coordinate, and a normal step");
    nb::gil_scoped_release release;
    return shared::quantise(x.data(), x.size(), step, stream_of(draws), start, levels.data());
}

void bins(Draws draws, std::uint64_t start, Array<std::uint8_t> out) {
    nb::gil_scoped_release release;
    shared::bins(stream_of(draws), start, out.size(), out.data());
}

void restore(Array<const std::int32_t> levels, float step, Draws draws, std::uint64_t start, Array<float> out) {
    expect(levels.size() == out.size(), "one level a coordinate");
    nb::gil_scoped_release release;
    shared::restore(levels.data(), out.size(), step, stream_of(draws), start, out.data());
}

void restore_add(Array<const std::int32_t> levels, float step, Draws draws, std::uint64_t start, float weight, Array<float> out) {
    expect(levels.size() == out.size(), "one level a coordinate");
    nb::gil_scoped_release release;
    shared::restore_add(levels.data(), out.size(), step, stream_of(draws), start, weight, out.data());
}

void rows(Draws draws, Array<const std::int64_t> rows, std::size_t width, Array<std::int32_t> out) {
    expect(out.size() == rows.size() * width, "one draw a row and coordinate");
    nb::gil_scoped_release release;
    shared::random_rows(stream_of(draws), rows.data(), rows.size(), width, out.data());
}

void first(Array<const float> book, std::size_t words, Array<const float> units, std::size_t d, Array<const float> least,
           Array<const std::int64_t> start, Array<std::int64_t> out) {
    const std::size_t n = least.size();
    expect(book.size() == words * d && units.size() == n * d && start.size() == n && out.size() == n, "sizes differ");
    nb::gil_scoped_release release;
    shared::sphere_first(book.data(), words, units.data(), n, d, least.data(), start.data(), out.data());
}

bind::Registrar registrar([](nb::module_& m) {
    m.def("subtractive_quantise", &quantise);
    m.def("subtractive_bins", &bins);
    m.def("subtractive_restore", &restore);
    m.def("subtractive_restore_add", &restore_add);
    m.def("random_rows", &rows);
    m.def("sphere_first", &first);
});

}  // namespace
