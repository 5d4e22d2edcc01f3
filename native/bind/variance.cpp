#include "tersegrad/variance.hpp"

#include <nanobind/stl/tuple.h>

#include <memory>
#include <tuple>

#include "bind.hpp"

using namespace tersegrad;
using namespace tersegrad::bind;

namespace {

// What was found, in an array that owns it.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> own(std::vector<T> found) {
    auto kept = std::make_unique<std::vector<T>>(std::move(found));
    nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    auto* const held = kept.release();
    return {held->data(), {held->size()}, owner};
}

// Indices of 32 bits wherever they reach.
template <class I>
auto select(const variance::Job& job) {
    variance::Found<I> found;
    {
        const Work work;
        found = variance::update<I>(job);
    }
    return nb::make_tuple(own(std::move(found.indices)), own(std::move(found.values)), found.finite);
}

const Registrar registrar([](nb::module_& m) {
    m.def("variance_select", [](Array<const float> r, Array<const float> v, Array<const float> x, Array<const float> s, float alpha,
                                float zeta, float tau, Array<float> next_r, Array<float> next_v) {
        const std::size_t n = x.size();
        expect(r.size() == n && v.size() == n && s.size() == n && next_r.size() == n && next_v.size() == n,
               "r, v, x, s and the next r and v have the same size");
        apart(next_r, r, v, x, s, next_v);
        apart(next_v, r, v, x, s);
        const variance::Job job{r.data(), v.data(), x.data(), s.data(), next_r.data(), next_v.data(), n, alpha, zeta, tau};
        return n <= std::size_t{1} << 31 ? select<std::int32_t>(job) : select<std::int64_t>(job);
    });
});

}  // namespace
