#include "tersegrad/select.hpp"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bind.hpp"

using namespace tersegrad;
using namespace tersegrad::bind;

namespace {

void need(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// Everything that takes indices, for one index type; nanobind chooses by the array's dtype.
template <class I>
void index_functions(nb::module_& m) {
    m.def("select_top_k", [](Array<float> x, std::size_t k, Array<I> indices, Array<float> values) {
        const std::size_t n = x.size(), room = std::min(k, n);
        need(indices.size() >= room && values.size() >= room, "the outputs need room for min(k, numel) coordinates");
        need(n == 0 || static_cast<std::size_t>(static_cast<I>(n - 1)) == n - 1, "the index type is too small");
        nb::gil_scoped_release free;
        return select::top_k(x.data(), n, k, indices.data(), values.data());
    });
    m.def("select_compact", [](Array<float> x, std::uint32_t key, std::size_t limit, Array<I> indices, Array<float> values) {
        const std::size_t n = x.size(), room = std::min(limit, n);
        need(indices.size() >= room && values.size() >= room, "the outputs need room for min(limit, numel) coordinates");
        need(n == 0 || static_cast<std::size_t>(static_cast<I>(n - 1)) == n - 1, "the index type is too small");
        nb::gil_scoped_release free;
        return select::compact(x.data(), n, key, room, indices.data(), values.data());
    });
    m.def("sparse_scatter", [](Array<I> indices, Array<float> values, Array<float> out) {
        need(indices.size() == values.size(), "as many indices as values");
        nb::gil_scoped_release free;
        select::scatter(indices.data(), values.data(), indices.size(), out.data(), out.size());
    });
    m.def("sparse_scatter_add", [](Array<I> indices, Array<float> values, float weight, Array<float> out) {
        need(indices.size() == values.size(), "as many indices as values");
        nb::gil_scoped_release free;
        select::scatter_add(indices.data(), values.data(), indices.size(), weight, out.data(), out.size());
    });
    m.def("index_complement", [](Array<I> indices, std::uint64_t n, Array<I> out) {
        need(indices.size() <= n && out.size() == n - indices.size(), "the output has numel - count places");
        nb::gil_scoped_release free;
        select::complement(indices.data(), indices.size(), n, out.data());
    });
    m.def("golomb_encode", [](Array<I> indices, std::uint64_t divisor, Array<std::uint8_t> out) {
        nb::gil_scoped_release free;
        return select::golomb_encode(indices.data(), indices.size(), divisor, out.data(), out.size());
    }, nb::arg("indices"), nb::arg("divisor"), nb::arg("out").noconvert());
    m.def("golomb_size", [](Array<I> indices, std::uint64_t divisor) {
        nb::gil_scoped_release free;
        return select::golomb_size(indices.data(), indices.size(), divisor);
    });
    m.def("golomb_decode", [](Array<std::uint8_t> data, std::uint64_t n, std::uint64_t divisor, Array<I> indices) {
        nb::gil_scoped_release free;
        return select::golomb_decode(data.data(), data.size(), indices.size(), n, divisor, indices.data());
    }, nb::arg("data"), nb::arg("numel"), nb::arg("divisor"), nb::arg("out").noconvert());
    m.def("digits_encode", [](Array<I> indices, std::uint64_t n, Array<std::uint8_t> out) {
        nb::gil_scoped_release free;
        return select::digits_encode(indices.data(), indices.size(), n, out.data(), out.size());
    });
    m.def("digits_decode", [](Array<std::uint8_t> data, std::uint64_t n, Array<I> indices) {
        nb::gil_scoped_release free;
        return select::digits_decode(data.data(), data.size(), indices.size(), n, indices.data());
    });
    m.def("bitmap_encode", [](Array<I> indices, std::uint64_t n, Array<std::uint8_t> out) {
        need(out.size() >= (n + 7) / 8, "a bitmap takes numel / 8 bytes");
        nb::gil_scoped_release free;
        select::bitmap_encode(indices.data(), indices.size(), n, out.data());
    });
    m.def("bitmap_decode", [](Array<std::uint8_t> data, std::uint64_t n, Array<I> indices) {
        nb::gil_scoped_release free;
        select::bitmap_decode(data.data(), data.size(), indices.size(), n, indices.data());
    });
    m.def("gap_classes", [](Array<I> indices, Array<std::uint8_t> classes) {
        need(indices.size() == classes.size(), "one class an index");
        nb::gil_scoped_release free;
        select::gap_classes(indices.data(), indices.size(), classes.data());
    });
    m.def("gap_histogram", [](Array<I> indices, std::uint64_t n) {
        std::vector<std::uint64_t> histogram(128);
        nb::gil_scoped_release free;
        select::gap_histogram(indices.data(), indices.size(), n, histogram.data());
        return histogram;
    });
    m.def("gap_rests_encode", [](Array<I> indices, Array<std::uint8_t> out) {
        nb::gil_scoped_release free;
        return select::gap_rests_encode(indices.data(), indices.size(), out.data(), out.size());
    });
    m.def("gap_rests_decode", [](Array<std::uint8_t> data, Array<std::uint8_t> classes, std::uint64_t n, Array<I> indices) {
        need(indices.size() == classes.size(), "one class an index");
        nb::gil_scoped_release free;
        return select::gap_rests_decode(data.data(), data.size(), classes.data(), indices.size(), n, indices.data());
    });
    m.def("permuted_indices", [](const std::vector<std::uint32_t>& keys, std::uint64_t rotation, std::uint64_t n, Array<I> indices) {
        need(keys.size() == select::rounds && rotation < std::max<std::uint64_t>(n, 1) && indices.size() <= n, "bad permutation");
        select::Permutation p{{}, rotation, n};
        std::copy(keys.begin(), keys.end(), p.keys);
        nb::gil_scoped_release free;
        select::permuted_indices(p, indices.size(), indices.data());
    });
}

select::Permutation permutation(const std::vector<std::uint32_t>& keys, std::uint64_t rotation, std::size_t n, std::size_t k) {
    need(keys.size() == select::rounds && rotation < std::max<std::uint64_t>(n, 1) && k <= n, "bad permutation");
    select::Permutation p{{}, rotation, n};
    std::copy(keys.begin(), keys.end(), p.keys);
    return p;
}

Registrar registrar([](nb::module_& m) {
    m.def("all_finite", [](Array<float> x) {
        nb::gil_scoped_release free;
        return select::all_finite(x.data(), x.size());
    });
    m.def("select_sample_key", [](Array<float> x, std::size_t k) {
        nb::gil_scoped_release free;
        return select::sample_key(x.data(), x.size(), k);
    });
    index_functions<std::int32_t>(m);
    index_functions<std::int64_t>(m);
    m.def("permuted_gather", [](Array<float> x, const std::vector<std::uint32_t>& keys, std::uint64_t rotation, Array<float> values) {
        const auto p = permutation(keys, rotation, x.size(), values.size());
        nb::gil_scoped_release free;
        select::permuted_gather(p, x.data(), values.size(), values.data());
    });
    m.def("permuted_scatter", [](Array<float> values, const std::vector<std::uint32_t>& keys, std::uint64_t rotation, Array<float> out) {
        const auto p = permutation(keys, rotation, out.size(), values.size());
        nb::gil_scoped_release free;
        select::permuted_scatter(p, values.data(), values.size(), out.data());
    });
    m.def("permuted_scatter_add",
          [](Array<float> values, const std::vector<std::uint32_t>& keys, std::uint64_t rotation, float weight, Array<float> out) {
              const auto p = permutation(keys, rotation, out.size(), values.size());
              nb::gil_scoped_release free;
              select::permuted_scatter_add(p, values.data(), values.size(), weight, out.data());
          });
});

}  // namespace
