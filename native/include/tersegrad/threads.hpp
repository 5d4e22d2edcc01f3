// Threads for one call of a kernel, taken from a few that the process keeps. How many there are is never visible in the bytes.
//
// A kernel uses at most threads() of them: what set_threads forces, else the limit that its caller set for itself (the Python side
// passes torch's), else the cores that the process may use. Kept threads sleep between calls. Callers that come at the same time
// share them: who finds none free works alone. A child process after fork() starts its own.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace tersegrad {

int threads();          // upper limit for a kernel that this thread calls
int set_threads(int);   // forces the limit, 1..1024, for all callers; 0: no more. Returns what was forced before
int forced_threads();   // 0: nothing is forced
int usable_cores();     // that the process may run on
int kept_threads();     // that the process has started for its kernels and keeps

// The limit of the calling thread while this object lives; 0: none.
class ThreadLimit {
  public:
    explicit ThreadLimit(int most);
    ~ThreadLimit();
    ThreadLimit(const ThreadLimit&) = delete;
    ThreadLimit& operator=(const ThreadLimit&) = delete;

  private:
    int before_;
};

// How many threads are worth using for `items` pieces of work, each thread getting at least `grain`.
inline int plan_threads(std::size_t items, std::size_t grain) {
    const std::size_t most = grain ? items / grain : items;
    return static_cast<int>(std::max<std::size_t>(1, std::min<std::size_t>(most, static_cast<std::size_t>(threads()))));
}

struct KeptThread;

// The calling thread and at most `wanted` - 1 kept ones, for as long as this object lives.
class Crew {
  public:
    explicit Crew(int wanted);
    ~Crew();
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    int size() const { return 1 + static_cast<int>(others_.size()); }

    // body(0) .. body(size() - 1) at the same time; body(0) here, and after it those that no other thread has begun. Throws what a body
    // threw first.
    template <class Body>
    void run(Body&& body) {
        using B = std::remove_reference_t<Body>;
        start([](void* b, int k) { (*static_cast<B*>(b))(k); }, const_cast<void*>(static_cast<const void*>(std::addressof(body))));
    }

  private:
    void start(void (*function)(void*, int), void* context);
    std::vector<KeptThread*> others_;
};

// Runs body(begin, end) over [0, items) in contiguous parts whose borders are multiples of `unit`. `grain` items are the least that
// pay for a thread.
template <class Body>
void parallel_for(std::size_t items, std::size_t unit, std::size_t grain, Body&& body) {
    if (items == 0) return;
    const int wanted = plan_threads(items, grain);
    if (wanted <= 1) return body(std::size_t{0}, items);
    Crew crew(wanted);
    const auto n = static_cast<std::size_t>(crew.size()), units = (items + unit - 1) / unit;
    const auto border = [&](std::size_t k) { return std::min(items, units * k / n * unit); };
    crew.run([&](int k) {
        const std::size_t begin = border(static_cast<std::size_t>(k)), end = border(static_cast<std::size_t>(k) + 1);
        if (begin < end) body(begin, end);
    });
}

// Threads that go through the phases of one call together: inside of `run`, `meet` waits until all of them are there.
class Team {
  public:
    explicit Team(int wanted) : crew_(wanted), missing_(crew_.size()) {}

    int size() const { return crew_.size(); }

    // As Crew::run. Where one body throws, the others leave at their next meeting.
    template <class Body>
    void run(Body&& body) {
        crew_.run([&](int k) {
            try {
                body(k);
            } catch (const Abandoned&) {
            } catch (...) {
                abandon();
                throw;
            }
        });
    }

    // Spins before it sleeps: to wake a thread takes longer than most phases.
    void meet();

  private:
    struct Abandoned {};
    void abandon();

    Crew crew_;
    std::atomic<int> missing_, round_{0};
    std::atomic<bool> broken_{false};
};

}  // namespace tersegrad
