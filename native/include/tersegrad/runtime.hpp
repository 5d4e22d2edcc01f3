// Instruction set and threads: chosen at run time, never visible in the bytes.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace tersegrad {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// The best instruction set of this machine; avx512 means F, BW, DQ, VL, VBMI and VBMI2 together.
Isa best_isa();
Isa isa();                  // in use
void set_isa(Isa);          // at most best_isa()
int threads();              // upper limit, by default the number of cores this process may use
void set_threads(int);

// How many threads are worth starting for `items` pieces of work, each thread getting at least `grain`.
inline int plan_threads(std::size_t items, std::size_t grain) {
    const std::size_t most = grain ? items / grain : items;
    return static_cast<int>(std::max<std::size_t>(1, std::min<std::size_t>(most, static_cast<std::size_t>(threads()))));
}

// Runs body(begin, end) over [0, items) in contiguous parts whose borders are multiples of `unit`.
// Threads live for one call: nothing idles, and fork() is safe. `grain` items are the least that pay for a thread.
template <class Body>
void parallel_for(std::size_t items, std::size_t unit, std::size_t grain, Body&& body) {
    const int n = plan_threads(items, grain);
    if (n <= 1) {
        if (items) body(std::size_t{0}, items);
        return;
    }
    const std::size_t units = (items + unit - 1) / unit;
    std::vector<std::thread> pool;
    pool.reserve(static_cast<std::size_t>(n) - 1);
    auto border = [&](int k) { return std::min(items, units * static_cast<std::size_t>(k) / static_cast<std::size_t>(n) * unit); };
    for (int k = 1; k < n; ++k)
        if (border(k) < border(k + 1)) pool.emplace_back([&body, b = border(k), e = border(k + 1)] { body(b, e); });
    if (border(1) > 0) body(std::size_t{0}, border(1));
    for (auto& t : pool) t.join();
}

// Threads that go through the phases of one call together: `run` starts body(0) .. body(threads - 1), and inside of it `meet` waits
// until all of them are there. Like those of parallel_for they live for one call.
class Team {
  public:
    explicit Team(int threads) : threads_(threads), missing_(threads) {}

    int size() const { return threads_; }

    template <class Body>
    void run(Body&& body) {
        std::vector<std::thread> pool;
        pool.reserve(static_cast<std::size_t>(threads_) - 1);
        for (int k = 1; k < threads_; ++k) pool.emplace_back([&body, k] { body(k); });
        body(0);
        for (auto& t : pool) t.join();
    }

    // Spins before it sleeps: to wake a thread takes longer than most phases.
    void meet() {
        if (threads_ == 1) return;
        const unsigned now = round_.load(std::memory_order_relaxed);
        if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            missing_.store(threads_, std::memory_order_relaxed);
            round_.store(now + 1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        for (int spin = 0; spin < 2000; ++spin) {
            if (round_.load(std::memory_order_acquire) != now) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        while (round_.load(std::memory_order_acquire) == now) round_.wait(now, std::memory_order_acquire);
    }

  private:
    const int threads_;
    std::atomic<int> missing_;
    std::atomic<unsigned> round_{0};
};

}  // namespace tersegrad
