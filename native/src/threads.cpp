#include "tersegrad/threads.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <stdexcept>
#include <system_error>
#include <thread>

namespace tersegrad {

// A thread that waits for work in memory that is never freed, so that it may outlive everything else until the process ends.
struct KeptThread {
    enum State : int { waiting, posted, working, done };
    std::atomic<int> state{waiting};
    void (*function)(void*, int) = nullptr;
    void* context = nullptr;
    int number = 0;
    std::exception_ptr thrown;
};

namespace {

constexpr int kSpins = 2000;  // some ten microseconds: what waking a sleeping thread takes

std::atomic<int> forced{0};
thread_local int own_limit = 0;
thread_local bool kept_thread = false;

// Waits until `value` is no longer `old`. Whoever changes it stores with sequential consistency: the library's notify looks for
// waiters afterwards, and a weaker store could still be on its way then.
void wait_while(std::atomic<int>& value, int old) {
    for (int spin = 0; spin < kSpins; ++spin) {
        if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void serve(KeptThread* self) {
    kept_thread = true;
    for (;;) {
        for (int now = KeptThread::posted; !self->state.compare_exchange_strong(now, KeptThread::working); now = KeptThread::posted)
            wait_while(self->state, now);
        try {
            self->function(self->context, self->number);
        } catch (...) {
            self->thrown = std::current_exception();
        }
        self->state.store(KeptThread::done);
        self->state.notify_all();
    }
}

class Kept {
  public:
    // Never destroyed: its threads may still wait when static objects go.
    static Kept& all() {
        static Kept& kept = *new Kept;
        return kept;
    }

    void take(std::size_t wanted, std::vector<KeptThread*>& to) {
        to.reserve(wanted);
        const std::lock_guard lock(mutex_);
        while (to.size() < wanted) {
            if (free_.empty()) {
                if (count_ >= wanted || !start()) return;
            }
            to.push_back(free_.back());
            free_.pop_back();
        }
    }

    std::size_t count() {
        const std::lock_guard lock(mutex_);
        return count_;
    }

    void give(const std::vector<KeptThread*>& back) {
        const std::lock_guard lock(mutex_);
        free_.insert(free_.end(), back.rbegin(), back.rend());
    }

  private:
    Kept() {
        // A child process has none of these threads, and must not find the lock held.
        pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); },
                       [] {
                           all().free_.clear();
                           all().count_ = 0;
                           all().mutex_.unlock();
                       });
    }

    // Signals are for the threads that the program started itself.
    bool start() {
        free_.reserve(count_ + 1);
        auto made = std::make_unique<KeptThread>();
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        bool good = true;
        try {
            std::thread(serve, made.get()).detach();
        } catch (const std::system_error&) {
            good = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (!good) return false;
        free_.push_back(made.release());
        ++count_;
        return true;
    }

    std::mutex mutex_;
    std::vector<KeptThread*> free_;
    std::size_t count_ = 0;
};

// Made when the library is loaded, so that no fork() can fall into the middle of it.
[[maybe_unused]] const Kept& at_load = Kept::all();

}  // namespace

int usable_cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int threads() {
    // A kernel inside of a kernel works alone.
    if (kept_thread) return 1;
    if (const int chosen = forced.load(std::memory_order_relaxed); chosen > 0) return chosen;
    static const int cores = usable_cores();
    return own_limit > 0 ? std::min(own_limit, cores) : cores;
}

int kept_threads() { return static_cast<int>(Kept::all().count()); }

int forced_threads() { return forced.load(std::memory_order_relaxed); }

int set_threads(int wanted) {
    if (wanted < 0 || wanted > 1024) throw std::invalid_argument("threads must lie in 1..1024, or be 0 for torch's number");
    return forced.exchange(wanted);
}

ThreadLimit::ThreadLimit(int most) : before_(own_limit) { own_limit = most; }
ThreadLimit::~ThreadLimit() { own_limit = before_; }

Crew::Crew(int wanted) {
    if (wanted > 1) Kept::all().take(static_cast<std::size_t>(wanted) - 1, others_);
}

Crew::~Crew() {
    if (!others_.empty()) Kept::all().give(others_);
}

void Crew::start(void (*function)(void*, int), void* context) {
    for (std::size_t k = 0; k < others_.size(); ++k) {
        KeptThread& other = *others_[k];
        other.function = function;
        other.context = context;
        other.number = static_cast<int>(k) + 1;
        other.state.store(KeptThread::posted);
        other.state.notify_all();
    }
    std::exception_ptr first;
    const auto here = [&](int number) {
        try {
            function(context, number);
        } catch (...) {
            if (!first) first = std::current_exception();
        }
    };
    here(0);
    for (KeptThread* other : others_) {
        // On a busy machine it may be long before a thread wakes up: what it has not begun is done here.
        if (int now = KeptThread::posted; other->state.compare_exchange_strong(now, KeptThread::waiting)) {
            here(other->number);
            continue;
        }
        wait_while(other->state, KeptThread::working);
        if (other->thrown && !first) first = other->thrown;
        other->thrown = nullptr;
    }
    if (first) std::rethrow_exception(first);
}

void Team::meet() {
    if (size() == 1) return;
    const int now = round_.load(std::memory_order_acquire);
    if (broken_.load(std::memory_order_acquire)) throw Abandoned{};
    if (missing_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        missing_.store(size(), std::memory_order_relaxed);
        round_.store(now + 1);
        round_.notify_all();
        return;
    }
    wait_while(round_, now);
    if (broken_.load(std::memory_order_acquire)) throw Abandoned{};
}

void Team::abandon() {
    broken_.store(true, std::memory_order_release);
    round_.fetch_add(1);
    round_.notify_all();
}

}  // namespace tersegrad
