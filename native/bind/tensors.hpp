// Tensors at the border to Python. The module is not linked with torch: torch tells where a tensor's memory lies through the table of C
// functions that DLPack defines, in a sixth of the time that making a numpy array of it takes. Arrays of numpy come in as before.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>

namespace tersegrad::bind {

// The memory of a contiguous one-dimensional CPU tensor of this type, where torch tells it. It is valid as long as the tensor.
bool tensor_memory(nanobind::handle source, nanobind::dlpack::dtype dtype, void*& data, std::size_t& size) noexcept;

// A tensor that torch told nothing of, or of another class than torch.Tensor itself, as an array of numpy; nothing where torch refuses
// that. What is no tensor stays as it is.
nanobind::object array_of(nanobind::handle source) noexcept;

}  // namespace tersegrad::bind
