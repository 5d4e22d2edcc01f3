// What all bindings share. Each topic registers its own functions: a file in bind/ defines one `static Registrar` and nothing else
// needs to know it.
//
// The compiled module is safe against every Python caller: arrays come as they are or not at all (`Array`), every size is checked
// before a kernel sees it (`expect`, `apart`, `product`), and what is refused is a TypeError or a ValueError. Kernels run inside of a
// `Work`.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tensors.hpp"
#include "tersegrad/philox.hpp"
#include "tersegrad/threads.hpp"

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

// A contiguous one-dimensional CPU array of exactly this type: a tensor's or numpy's, which Python holds during the call. Never a
// converted copy: a result written into one would be lost.
template <class T>
class Array {
  public:
    using Handle = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

    Array() = default;
    Array(T* data, std::size_t size) : data_(data), size_(size) {}
    explicit Array(Handle handle) : handle_(std::move(handle)), data_(handle_.data()), size_(handle_.size()) {}
    T* data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    Handle handle_;  // empty for a tensor
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

inline void expect(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

inline std::size_t product(std::size_t a, std::size_t b) {
    std::size_t result;
    expect(!__builtin_mul_overflow(a, b, &result), "the sizes are too large");
    return result;
}

template <class A, class B>
bool overlap(const Array<A>& a, const Array<B>& b) {
    const auto from = reinterpret_cast<std::uintptr_t>(a.data()), other = reinterpret_cast<std::uintptr_t>(b.data());
    return a.size() && b.size() && from < other + b.size() * sizeof(B) && other < from + a.size() * sizeof(A);
}

// The output shares no memory with any of the others.
template <class A, class... Others>
void apart(const Array<A>& out, const Others&... others) {
    expect(!(overlap(out, others) || ...), "an output overlaps another array");
}

// Vectors that an index of type I reaches, and that counters of all kernels hold.
template <class I>
void expect_indexable(std::uint64_t n) {
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<I>::max());
    expect(n <= std::uint64_t{1} << 62 && (n == 0 || n - 1 <= most), "the vector is too long for this type of index");
}

// The random bits of coordinates start .. start + count, all of which a counter holds.
inline Stream stream_of(std::uint64_t seed, std::uint32_t purpose, std::uint32_t step, std::uint32_t salt, std::uint64_t start = 0,
                        std::uint64_t count = 0) {
    constexpr std::uint64_t most = std::uint64_t{1} << 59;
    expect(purpose < 256, "a purpose takes 8 bits");
    expect(start <= most && count <= most - start, "random bits are drawn for coordinates below 2^59");
    return {seed, purpose, step, salt};
}

inline void expect_step(float step) { expect(step >= 0x1p-126f && step <= std::numeric_limits<float>::max(), "the step must be a positive normal float32"); }

// torch's number of threads for the Python thread that asks; 0 where nobody said how to find it.
int torch_threads();

// A kernel at work: without the GIL, and with as many threads as torch would use here.
class Work {
  public:
    Work() : limit_(forced_threads() ? 0 : torch_threads()), state_(PyEval_SaveThread()) {}
    // While the interpreter ends, Python unwinds daemon threads that want the GIL back, which no destructor survives. Such a thread
    // waits here for the end of the process instead.
    ~Work() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

  private:
    ThreadLimit limit_;
    PyThreadState* state_;
};

}  // namespace tersegrad::bind

namespace nanobind::detail {

template <class T>
struct type_caster<tersegrad::bind::Array<T>> {
    using Inner = make_caster<typename tersegrad::bind::Array<T>::Handle>;
    NB_TYPE_CASTER(tersegrad::bind::Array<T>, Inner::Name)

    bool from_python(handle source, std::uint32_t flags, cleanup_list* cleanup) noexcept {
        void* data;
        std::size_t size;
        if (tersegrad::bind::tensor_memory(source, dtype<std::remove_const_t<T>>(), data, size)) {
            value = tersegrad::bind::Array<T>(static_cast<T*>(data), size);
            return true;
        }
        const object array = tersegrad::bind::array_of(source);
        Inner inner;
        if (!array || !inner.from_python(array, flags & ~static_cast<std::uint32_t>(cast_flags::convert), cleanup)) return false;
        value = tersegrad::bind::Array<T>(std::move(inner.value));
        return true;
    }
};

}  // namespace nanobind::detail
