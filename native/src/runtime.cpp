#include "tersegrad/runtime.hpp"

#include <atomic>
#include <stdexcept>

namespace tersegrad {
namespace {

Isa detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        return Isa::avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c")) return Isa::avx2;
#endif
    return Isa::portable;
}

std::atomic<int> current_isa{-1};

}  // namespace

Isa best_isa() {
    static const Isa best = detect();
    return best;
}

Isa isa() {
    const int chosen = current_isa.load(std::memory_order_relaxed);
    return chosen < 0 ? best_isa() : static_cast<Isa>(chosen);
}

void set_isa(Isa wanted) {
    if (wanted > best_isa()) throw std::invalid_argument("this machine cannot run that instruction set");
    current_isa.store(static_cast<int>(wanted));
}

}  // namespace tersegrad
