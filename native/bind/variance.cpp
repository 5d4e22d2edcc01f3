#include "tersegrad/variance.hpp"

#include <nanobind/stl/pair.h>

#include <stdexcept>
#include <utility>

#include "bind.hpp"

using namespace tersegrad;
using namespace tersegrad::bind;

namespace {

template <class I>
void functions(nb::module_& m) {
    m.def("variance_select", [](Array<float> r, Array<float> v, Array<float> x, Array<float> s, float alpha, float zeta, float tau,
                                Array<float> next_r, Array<float> next_v, Array<I> indices, Array<float> values) {
        const std::size_t n = x.size();
        if (r.size() != n || v.size() != n || s.size() != n || next_r.size() != n || next_v.size() != n)
            throw std::invalid_argument("r, v, x, s and the next r and v have the same size");
        if (indices.size() != values.size()) throw std::invalid_argument("as many indices as values");
        if (n != 0 && static_cast<std::size_t>(static_cast<I>(n - 1)) != n - 1) throw std::invalid_argument("the index type is too small");
        nb::gil_scoped_release free;
        const variance::Job job{r.data(), v.data(), x.data(), s.data(), next_r.data(), next_v.data(), n, alpha, zeta, tau};
        const variance::Outcome found = variance::update(job, indices.data(), values.data(), indices.size());
        return std::pair<std::size_t, bool>(found.count, found.finite);
    });
}

const Registrar registrar([](nb::module_& m) {
    functions<std::int32_t>(m);
    functions<std::int64_t>(m);
});

}  // namespace
