#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "bind.hpp"
#include "tersegrad/runtime.hpp"

using namespace tersegrad;

static const char* const isa_names[] = {"portable", "avx2", "avx512"};

NB_MODULE(_native, m) {
    m.doc() = "The compiled kernels of tersegrad.";
    m.def("isa", [] { return std::string(isa_names[static_cast<int>(isa())]); });
    m.def("supported_isas", [] { return std::vector<std::string>(isa_names, isa_names + static_cast<int>(best_isa()) + 1); });
    m.def("set_isa", [](const std::string& name) {
        for (int k = 0; k < 3; ++k)
            if (name == isa_names[k]) return set_isa(static_cast<Isa>(k));
        throw std::invalid_argument("instruction sets are portable, avx2 and avx512, got " + name);
    });
    m.def("threads", &threads);
    m.def("set_threads", &set_threads);
    for (auto registration : bind::registrations()) registration(m);
}
