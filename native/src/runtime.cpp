#include "tersegrad/runtime.hpp"

#include <sched.h>

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

int usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::atomic<int> current_isa{-1}, current_threads{0};

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

int threads() {
    const int chosen = current_threads.load(std::memory_order_relaxed);
    if (chosen > 0) return chosen;
    static const int cores = usable_cores();
    return cores;
}

void set_threads(int wanted) {
    if (wanted < 1 || wanted > 1024) throw std::invalid_argument("threads must lie in 1..1024");
    current_threads.store(wanted);
}

}  // namespace tersegrad
