// CUDA kernels on a CPU, for tests: blocks run one after the other, the threads of a block as fibres that take turns at barriers.
//
// What is faithful: the arithmetic, who sees which value of a shuffle, a ballot or a barrier, and atomic operations. A barrier that not
// all threads reach is an error (`stuck`), and so is one that is reached with other threads at another. What is not: timing, and races
// between barriers, since a thread runs undisturbed from one barrier to the next; the order of threads is reversed on every second
// run of a block so that code that leans on an order shows it. Warps are always whole and converged at warp-wide operations.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __restrict__
#define SHARED_BY_LAUNCH(type, name) static type name[(227 << 10) / sizeof(type)]
#define __launch_bounds__(...)
#define CUDA_ON_CPU 1

struct Dim { unsigned x; };
inline Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

struct Fibre {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    bool done = false;
    int kind = 0;  // what it waits for: 0 nothing, 1 its block, 2 its warp
};

inline std::vector<Fibre> fibres;
inline ucontext_t scheduler;
inline unsigned current;
inline std::uint64_t slot[1024];
inline void (*body)(void**);
inline void** parameters;

inline void wait(int kind) {
    fibres[current].kind = kind;
    swapcontext(&fibres[current].context, &scheduler);
    threadIdx.x = current;
}

inline void entry() {
    threadIdx.x = current;
    body(parameters);
    fibres[current].done = true;
    swapcontext(&fibres[current].context, &scheduler);
}

[[noreturn]] inline void stuck(const char* why) {
    std::fprintf(stderr, "emulated kernel: %s\n", why);
    std::abort();
}

// Lets go those that have all arrived: the threads of a warp, or of the whole block.
inline void release() {
    const unsigned n = blockDim.x;
    unsigned at_block = 0, done = 0;
    bool moved = false;
    for (unsigned w = 0; w < n; w += 32) {
        unsigned at_warp = 0;
        for (unsigned t = w; t < w + 32 && t < n; ++t) {
            at_block += !fibres[t].done && fibres[t].kind == 1;
            at_warp += !fibres[t].done && fibres[t].kind == 2;
            done += fibres[t].done;
        }
        if (at_warp == 32 || (at_warp && at_warp == n - w)) {
            for (unsigned t = w; t < w + 32 && t < n; ++t) fibres[t].kind = 0;
            moved = true;
        } else if (at_warp) {
            bool mixed = true;
            for (unsigned t = w; t < w + 32 && t < n; ++t) mixed &= fibres[t].done || fibres[t].kind != 0;
            if (mixed) stuck("a warp-wide operation that not all threads of the warp reach");
        }
    }
    if (at_block && at_block + done == n) {
        if (done) stuck("a barrier after some threads have returned");
        for (auto& f : fibres) f.kind = 0;
        moved = true;
    }
    if (!moved && done < n) stuck("threads wait for each other");
}

inline void run(void (*kernel)(void**), unsigned grid, unsigned threads, void** p) {
    static unsigned turn = 0;
    body = kernel;
    parameters = p;
    gridDim.x = grid;
    blockDim.x = threads;
    if (fibres.size() < threads) fibres.resize(threads);
    for (unsigned b = 0; b < grid; ++b, ++turn) {
        blockIdx.x = b;
        fibres.resize(threads);
        for (unsigned t = 0; t < threads; ++t) {
            auto& f = fibres[t];
            f.done = false;
            f.kind = 0;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.data();
            f.context.uc_stack.ss_size = f.stack.size();
            f.context.uc_link = &scheduler;
            makecontext(&f.context, entry, 0);
        }
        for (;;) {
            bool left = false;
            for (unsigned k = 0; k < threads; ++k) {
                const unsigned t = turn & 1 ? threads - 1 - k : k;
                if (fibres[t].done || fibres[t].kind) continue;
                current = t;
                swapcontext(&scheduler, &fibres[t].context);
            }
            for (unsigned t = 0; t < threads; ++t) left |= !fibres[t].done;
            if (!left) break;
            release();
        }
    }
}

// A typed kernel called with the pointers that the driver would get.
template <class... A, std::size_t... I>
void call(void (*f)(A...), void** p, std::index_sequence<I...>) {
    f(*static_cast<A*>(p[I])...);
}
template <class... A>
void call(void (*f)(A...), void** p) {
    call(f, p, std::index_sequence_for<A...>{});
}

template <class T, class F>
T exchange(T value, F read) {
    const unsigned me = threadIdx.x;
    std::memset(&slot[me], 0, 8);
    std::memcpy(&slot[me], &value, sizeof(T));
    wait(2);
    T result = read(me & ~31u);
    wait(2);
    return result;
}

template <class T>
T held(unsigned t) {
    T value;
    std::memcpy(&value, &slot[t], sizeof(T));
    return value;
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait(1); }
inline int __syncthreads_count(bool predicate) {
    emulator::slot[threadIdx.x] = predicate;
    emulator::wait(1);
    int count = 0;
    for (unsigned t = 0; t < blockDim.x; ++t) count += static_cast<int>(emulator::slot[t]);
    emulator::wait(1);
    return count;
}
inline void __syncwarp(unsigned = ~0u) { emulator::wait(2); }
inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned, bool predicate) {
    return emulator::exchange<unsigned>(predicate, [](unsigned warp) {
        unsigned votes = 0;
        for (unsigned k = 0; k < 32; ++k) votes |= (emulator::held<unsigned>(warp + k) ? 1u : 0u) << k;
        return votes;
    });
}
template <class T>
T __shfl_sync(unsigned, T value, int from) {
    return emulator::exchange<T>(value, [from](unsigned warp) { return emulator::held<T>(warp + (static_cast<unsigned>(from) & 31)); });
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by) {
    const unsigned lane = threadIdx.x & 31;
    return emulator::exchange<T>(value, [=](unsigned warp) { return emulator::held<T>(warp + (lane >= by ? lane - by : lane)); });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned by) {
    const unsigned lane = threadIdx.x & 31;
    return emulator::exchange<T>(value, [=](unsigned warp) { return emulator::held<T>(warp + (lane ^ by)); });
}

template <class T, class U> T atomicAdd(T* p, U v) { T old = *p; *p = static_cast<T>(old + static_cast<T>(v)); return old; }
template <class T, class U> T atomicOr(T* p, U v) { T old = *p; *p = old | static_cast<T>(v); return old; }
template <class T, class U> T atomicMax(T* p, U v) { T old = *p; if (static_cast<T>(v) > old) *p = static_cast<T>(v); return old; }
template <class T, class U> T atomicMin(T* p, U v) { T old = *p; if (static_cast<T>(v) < old) *p = static_cast<T>(v); return old; }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int k = 0; k < 32; k += 8) c += (a >> k & 255) * (b >> k & 255);
    return c;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned digits) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
    unsigned made = 0;
    for (int k = 0; k < 4; ++k) made |= static_cast<unsigned>(bytes >> 8 * (digits >> 4 * k & 7) & 255) << 8 * k;
    return made;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (by & 31));
}
inline unsigned __float_as_uint(float v) { unsigned b; std::memcpy(&b, &v, 4); return b; }
inline float __uint_as_float(unsigned b) { float v; std::memcpy(&v, &b, 4); return v; }
template <class T> T __ldcs(const T* p) { return *p; }
inline int __float2int_rn(float a) { return a == a ? (int)std::fmin(std::fmax(std::rint((double)a), -2147483648.0), 2147483647.0) : 0; }
inline float __fmul_rn(float a, float b) { volatile float c = a * b; return c; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { volatile float c = a + b; return c; }
inline float __fadd_rd(float a, float b) {
    const double sum = static_cast<double>(a) + b;
    const float near = static_cast<float>(sum);
    return near > sum ? std::nextafter(near, -INFINITY) : near;
}
inline float __fsub_rn(float a, float b) { volatile float c = a - b; return c; }
inline long long __double_as_longlong(double v) { long long b; std::memcpy(&b, &v, 8); return b; }
inline double __longlong_as_double(long long b) { double v; std::memcpy(&v, &b, 8); return v; }
inline float __double2float_rz(double v) {
    const float near = static_cast<float>(v);
    return std::fabs(static_cast<double>(near)) > std::fabs(v) ? std::nextafter(near, 0.0f) : near;
}
