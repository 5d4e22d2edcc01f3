#include "tersegrad/select.hpp"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "bind.hpp"

using namespace tersegrad;
using namespace tersegrad::bind;

namespace {

using Floats = Array<const float>;
using Bytes = Array<const std::uint8_t>;

select::Permutation permutation(const std::vector<std::uint32_t>& keys, std::uint64_t rotation, std::uint64_t n, std::size_t k) {
    expect(keys.size() == select::rounds, "a permutation has six keys");
    expect(n <= std::uint64_t{1} << 62 && k <= n && rotation < std::max<std::uint64_t>(n, 1),
           "a permutation of n numbers has at most n images and is turned by less than n");
    select::Permutation p{{}, rotation, n};
    std::copy(keys.begin(), keys.end(), p.keys);
    return p;
}

// Everything that takes indices, for one index type; nanobind chooses by the array's dtype.
template <class I>
void index_functions(nb::module_& m) {
    using Indices = Array<const I>;
    m.def("select_top_k", [](Floats x, std::size_t k, Array<I> indices, Array<float> values) {
        const std::size_t n = x.size(), room = std::min(k, n);
        expect(indices.size() >= room && values.size() >= room, "the outputs need room for min(k, numel) coordinates");
        expect_indexable<I>(n);
        apart(indices, x, values);
        apart(values, x);
        const Work work;
        return select::top_k(x.data(), n, room, indices.data(), values.data());
    });
    m.def("select_compact", [](Floats x, std::uint32_t key, std::size_t limit, Array<I> indices, Array<float> values) {
        expect(key < 0x80000000u, "the key of a magnitude is below 2^31");
        const std::size_t n = x.size(), room = std::min(limit, n);
        expect(indices.size() >= room && values.size() >= room, "the outputs need room for min(limit, numel) coordinates");
        expect_indexable<I>(n);
        apart(indices, x, values);
        apart(values, x);
        const Work work;
        return select::compact(x.data(), n, key, room, indices.data(), values.data());
    });
    m.def("sparse_scatter", [](Indices indices, Floats values, Array<float> out) {
        expect(indices.size() == values.size(), "as many indices as values");
        expect_indexable<I>(out.size());
        apart(out, indices, values);
        const Work work;
        select::scatter(indices.data(), values.data(), indices.size(), out.data(), out.size());
    });
    m.def("sparse_scatter_add", [](Indices indices, Floats values, float weight, Array<float> out) {
        expect(indices.size() == values.size(), "as many indices as values");
        expect_indexable<I>(out.size());
        apart(out, indices, values);
        const Work work;
        select::scatter_add(indices.data(), values.data(), indices.size(), weight, out.data(), out.size());
    });
    m.def("index_complement", [](Indices indices, std::uint64_t n, Array<I> out) {
        expect_indexable<I>(n);
        expect(indices.size() <= n && out.size() == n - indices.size(), "the output has numel - count places");
        apart(out, indices);
        const Work work;
        select::complement(indices.data(), indices.size(), n, out.data());
    });
    m.def("golomb_encode", [](Indices indices, std::uint64_t divisor, Array<std::uint8_t> out) {
        apart(out, indices);
        const Work work;
        return select::golomb_encode(indices.data(), indices.size(), divisor, out.data(), out.size());
    });
    m.def("golomb_size", [](Indices indices, std::uint64_t divisor) {
        const Work work;
        return select::golomb_size(indices.data(), indices.size(), divisor);
    });
    m.def("golomb_decode", [](Bytes data, std::uint64_t n, std::uint64_t divisor, Array<I> indices) {
        expect_indexable<I>(n);
        apart(indices, data);
        const Work work;
        return select::golomb_decode(data.data(), data.size(), indices.size(), n, divisor, indices.data());
    });
    m.def("digits_encode", [](Indices indices, std::uint64_t n, Array<std::uint8_t> out) {
        expect_indexable<I>(n);
        apart(out, indices);
        const Work work;
        return select::digits_encode(indices.data(), indices.size(), n, out.data(), out.size());
    });
    m.def("digits_decode", [](Bytes data, std::uint64_t n, Array<I> indices) {
        expect_indexable<I>(n);
        apart(indices, data);
        const Work work;
        return select::digits_decode(data.data(), data.size(), indices.size(), n, indices.data());
    });
    m.def("bitmap_encode", [](Indices indices, std::uint64_t n, Array<std::uint8_t> out) {
        expect_indexable<I>(n);
        expect(out.size() >= (n + 7) / 8, "a bitmap takes numel / 8 bytes");
        apart(out, indices);
        const Work work;
        select::bitmap_encode(indices.data(), indices.size(), n, out.data());
    });
    m.def("bitmap_decode", [](Bytes data, std::uint64_t n, Array<I> indices) {
        expect_indexable<I>(n);
        apart(indices, data);
        const Work work;
        select::bitmap_decode(data.data(), data.size(), indices.size(), n, indices.data());
    });
    m.def("gap_classes", [](Indices indices, Array<std::uint8_t> classes) {
        expect(indices.size() == classes.size(), "one class per index");
        apart(classes, indices);
        const Work work;
        select::gap_classes(indices.data(), indices.size(), classes.data());
    });
    m.def("gap_histogram", [](Indices indices, std::uint64_t n, Array<std::int64_t> counts) {
        expect_indexable<I>(n);
        expect(counts.size() == 128, "there are 128 classes of gaps");
        apart(counts, indices);
        const Work work;
        select::gap_histogram(indices.data(), indices.size(), n, reinterpret_cast<std::uint64_t*>(counts.data()));
    });
    m.def("gap_rests_encode", [](Indices indices, Array<std::uint8_t> out) {
        apart(out, indices);
        const Work work;
        return select::gap_rests_encode(indices.data(), indices.size(), out.data(), out.size());
    });
    m.def("gap_rests_decode", [](Bytes data, Bytes classes, std::uint64_t n, Array<I> indices) {
        expect(indices.size() == classes.size(), "one class per index");
        expect_indexable<I>(n);
        apart(indices, data, classes);
        const Work work;
        return select::gap_rests_decode(data.data(), data.size(), classes.data(), indices.size(), n, indices.data());
    });
    m.def("permuted_indices", [](const std::vector<std::uint32_t>& keys, std::uint64_t rotation, std::uint64_t n, Array<I> indices) {
        expect_indexable<I>(n);
        const auto p = permutation(keys, rotation, n, indices.size());
        const Work work;
        select::permuted_indices(p, indices.size(), indices.data());
    });
}

Registrar registrar([](nb::module_& m) {
    m.def("all_finite", [](Floats x) {
        const Work work;
        return select::all_finite(x.data(), x.size());
    });
    m.def("select_sample_key", [](Floats x, std::size_t k) {
        const Work work;
        return select::sample_key(x.data(), x.size(), std::min(k, x.size()));
    });
    index_functions<std::int32_t>(m);
    index_functions<std::int64_t>(m);
    m.def("permuted_gather", [](Floats x, const std::vector<std::uint32_t>& keys, std::uint64_t rotation, Array<float> values) {
        const auto p = permutation(keys, rotation, x.size(), values.size());
        apart(values, x);
        const Work work;
        select::permuted_gather(p, x.data(), values.size(), values.data());
    });
    m.def("permuted_scatter", [](Floats values, const std::vector<std::uint32_t>& keys, std::uint64_t rotation, Array<float> out) {
        const auto p = permutation(keys, rotation, out.size(), values.size());
        apart(out, values);
        const Work work;
        select::permuted_scatter(p, values.data(), values.size(), out.data());
    });
    m.def("permuted_scatter_add",
          [](Floats values, const std::vector<std::uint32_t>& keys, std::uint64_t rotation, float weight, Array<float> out) {
              const auto p = permutation(keys, rotation, out.size(), values.size());
              apart(out, values);
              const Work work;
              select::permuted_scatter_add(p, values.data(), values.size(), weight, out.data());
          });
});

}  // namespace
