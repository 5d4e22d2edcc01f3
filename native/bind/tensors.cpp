#include "tensors.hpp"

#include <cstdint>

#include "bind.hpp"

using namespace tersegrad;

namespace {

// As in dlpack.h: the version may only grow in its minor number, or be reached through `older`.
struct Exchange {
    std::uint32_t major, minor;
    const Exchange* older;
    void *allocate, *managed_from_object, *object_from_managed;
    int (*from_object)(void* object, nb::dlpack::dltensor* out);
    void* stream;
};

PyObject* tensor_class = nullptr;  // torch.Tensor
const Exchange* exchange = nullptr;
PyObject *is_neg = nullptr, *numpy = nullptr, *detach = nullptr;  // names of methods
alignas(64) char nothing[64];  // where the memory of empty tensors lies

const Exchange* found(PyObject* type) {
    PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    auto* table = capsule ? static_cast<const Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api")) : nullptr;
    Py_XDECREF(capsule);
    PyErr_Clear();  // a torch without it
    while (table && table->major != 1) table = table->older;
    return table;
}

// What a method without arguments returns; null, and no error, where it raises.
PyObject* ask(PyObject* object, PyObject* method) {
    PyObject* answer = PyObject_CallMethodNoArgs(object, method);
    if (!answer) PyErr_Clear();
    return answer;
}

// Whether the memory holds what the tensor means: torch may put off turning signs.
bool settled(PyObject* tensor) {
    PyObject* answer = ask(tensor, is_neg);
    Py_XDECREF(answer);
    return answer == Py_False;
}

const bind::Registrar registrar([](nb::module_& m) {
    // Says what a tensor is. Returns whether its memory is told without numpy; `through_numpy` forbids it.
    m.def(
        "take_tensors",
        [](nb::type_object type, bool through_numpy) {
            is_neg = PyUnicode_InternFromString("is_neg");
            numpy = PyUnicode_InternFromString("numpy");
            detach = PyUnicode_InternFromString("detach");
            exchange = through_numpy ? nullptr : found(type.ptr());
            Py_XDECREF(std::exchange(tensor_class, type.release().ptr()));
            return exchange != nullptr;
        },
        nb::arg("type"), nb::arg("through_numpy") = false);
});

}  // namespace

bool bind::tensor_memory(nb::handle source, nb::dlpack::dtype dtype, void*& data, std::size_t& size) noexcept {
    // Other classes may hold no memory of their own.
    if (!exchange || reinterpret_cast<PyObject*>(Py_TYPE(source.ptr())) != tensor_class) return false;
    nb::dlpack::dltensor told;
    if (exchange->from_object(source.ptr(), &told) != 0) {
        PyErr_Clear();
        return false;
    }
    if (told.device.device_type != nb::device::cpu::value || told.ndim != 1 || told.dtype != dtype) return false;
    if (told.strides && told.strides[0] != 1) return false;
    size = static_cast<std::size_t>(told.shape[0]);
    data = size ? static_cast<char*>(told.data) + told.byte_offset : nothing;
    if (size && !told.data) return false;
    return dtype.code != static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) || settled(source.ptr());
}

nb::object bind::array_of(nb::handle source) noexcept {
    const int tensor = tensor_class ? PyObject_IsInstance(source.ptr(), tensor_class) : 0;
    PyErr_Clear();
    if (tensor != 1) return nb::borrow(source);
    PyObject* array = ask(source.ptr(), numpy);
    // One that requires gradients refuses.
    PyObject* bare = array ? nullptr : ask(source.ptr(), detach);
    if (bare) array = ask(bare, numpy);
    Py_XDECREF(bare);
    return nb::steal(array);
}
