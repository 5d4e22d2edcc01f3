// Kept threads: every part is done once, phases hold, callers do not wait for each other, errors come back.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tersegrad/threads.hpp"

using namespace tersegrad;

static void check(bool good, const char* what) {
    if (good) return;
    std::printf("test_threads: %s\n", what);
    std::exit(1);
}

static void each_item_once(std::size_t items, std::size_t unit) {
    std::vector<int> seen(items);
    parallel_for(items, unit, 1, [&](std::size_t begin, std::size_t end) {
        check(begin % unit == 0 && (end % unit == 0 || end == items), "borders are multiples of the unit");
        for (std::size_t i = begin; i < end; ++i) ++seen[i];
    });
    for (const int s : seen) check(s == 1, "every item is done once");
}

// Every thread adds to a cell, all meet, every thread reads all cells.
static void phases(int wanted) {
    Team team(wanted);
    std::vector<long> cells(static_cast<std::size_t>(team.size()));
    team.run([&](int k) {
        for (long round = 1; round <= 20; ++round) {
            cells[static_cast<std::size_t>(k)] = round;
            team.meet();
            check(std::accumulate(cells.begin(), cells.end(), 0L) == round * team.size(), "all are in the same phase");
            team.meet();
        }
    });
}

static void errors() {
    for (int who = 0; who < 3; ++who) {
        bool caught = false;
        try {
            Team team(3);
            team.run([&](int k) {
                team.meet();
                if (k == who % team.size()) throw std::runtime_error("one of them");
                team.meet();
                check(false, "nobody passes a meeting that one has left");
            });
        } catch (const std::runtime_error&) {
            caught = true;
        }
        check(caught, "the caller gets what a thread threw");
        caught = false;
        try {
            parallel_for(64, 1, 1, [&](std::size_t, std::size_t end) {
                if (end == 64) throw std::bad_alloc();
            });
        } catch (const std::bad_alloc&) {
            caught = true;
        }
        check(caught, "so does the caller of parallel_for");
    }
}

static void together() {
    std::vector<std::thread> callers;
    for (int c = 0; c < 6; ++c)
        callers.emplace_back([] {
            for (int round = 0; round < 10; ++round) {
                each_item_once(1000, 8);
                phases(3);
            }
        });
    for (auto& c : callers) c.join();
}

int main() {
    set_threads(4);
    for (std::size_t items : {0, 1, 2, 3, 4, 5, 63, 64, 1000})
        for (std::size_t unit : {1, 4, 64}) each_item_once(items, unit);
    phases(1), phases(2), phases(4);
    check(kept_threads() == 3, "no more threads than were asked for");
    parallel_for(4, 1, 1, [caller = std::this_thread::get_id()](std::size_t, std::size_t) {
        if (std::this_thread::get_id() != caller) check(plan_threads(1000, 1) == 1, "a kernel inside of a kernel works alone");
        each_item_once(100, 1);
    });
    errors();
    together();
    check(kept_threads() == 3, "callers at the same time share the threads");
    check(set_threads(0) == 4 && forced_threads() == 0 && threads() == usable_cores(), "nothing is forced any more");
    {
        const ThreadLimit one(1);
        check(threads() == 1 && plan_threads(1000, 1) == 1, "a caller's own limit holds");
    }
    check(threads() == usable_cores(), "and ends");
    std::printf("test_threads: ok\n");
}
