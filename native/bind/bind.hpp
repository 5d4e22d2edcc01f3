// Each topic registers its own functions: a file in bind/ defines one `static Registrar` and nothing else needs to know it.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

namespace nb = nanobind;

namespace tersegrad::bind {

using Registration = void (*)(nb::module_&);

inline std::vector<Registration>& registrations() {
    static std::vector<Registration> all;
    return all;
}

struct Registrar {
    explicit Registrar(Registration r) { registrations().push_back(r); }
};

// A contiguous one-dimensional CPU array; torch tensors convert through DLPack without a copy.
template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace tersegrad::bind
