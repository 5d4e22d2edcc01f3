#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bind.hpp"
#include "tersegrad/runtime.hpp"

using namespace tersegrad;

static const char* const isa_names[] = {"portable", "avx2", "avx512"};

// torch.get_num_threads. Asked at every call, because it may change at any time and differs between threads: some fifty nanoseconds.
static PyObject* how_many = nullptr;

int bind::torch_threads() {
    if (!how_many) return 0;
    PyObject* answer = PyObject_CallNoArgs(how_many);
    const long threads = answer ? PyLong_AsLong(answer) : -1;
    Py_XDECREF(answer);
    if (PyErr_Occurred()) throw nb::python_error();
    return static_cast<int>(std::clamp(threads, 1L, 1024L));
}

NB_MODULE(_native, m) {
    m.doc() = "The compiled kernels of tersegrad.";
    m.def("isa", [] { return std::string(isa_names[static_cast<int>(isa())]); });
    m.def("supported_isas", [] { return std::vector<std::string>(isa_names, isa_names + static_cast<int>(best_isa()) + 1); });
    m.def("set_isa", [](const std::string& name) {
        for (int k = 0; k < 3; ++k)
            if (name == isa_names[k]) return set_isa(static_cast<Isa>(k));
        throw std::invalid_argument("instruction sets are portable, avx2 and avx512, got " + name);
    });
    // The limit for kernels that this thread calls, and the number of threads that the process keeps for them.
    m.def("threads", [] {
        const bind::Work work;
        return threads();
    });
    m.def("kept_threads", &kept_threads);
    // Forces the limit for all callers, 0: no more. Returns what was forced before.
    m.def("set_threads", &set_threads);
    m.def("follow_threads", [](nb::callable number) { how_many = number.release().ptr(); });
    for (auto registration : bind::registrations()) registration(m);
}
