// A child of fork() has none of its parent's threads and starts its own, whatever the parent was doing.
//
// CMakeLists.txt builds this program without the address sanitizer: its allocator does not let go of its locks in a child, which then may wait for
// ever. glibc's does.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tersegrad/threads.hpp"

using namespace tersegrad;

static void check(bool good, const char* what) {
    if (good) return;
    std::printf("test_forks: %s\n", what);
    std::exit(1);
}

static void each_item_once(std::size_t items) {
    std::vector<int> seen(items);
    parallel_for(items, 1, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) ++seen[i];
    });
    for (const int s : seen) check(s == 1, "every item is done once");
}

// Threads that must all be there: each waits for the others.
static void together(int wanted) {
    Team team(wanted);
    team.run([&](int) {
        for (int round = 0; round < 20; ++round) team.meet();
    });
}

int main() {
    set_threads(4);
    // Others are at work in the parent while it forks.
    std::atomic<bool> stop{false};
    std::thread busy([&] {
        while (!stop) each_item_once(100);
    });
    for (int round = 0; round < 40; ++round) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);
            check(kept_threads() == 0, "a child has no threads of its parent");
            each_item_once(1000);
            together(3);
            check(kept_threads() > 0, "a child starts its own");
            _exit(0);
        }
        int status = 1;
        check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child works");
    }
    stop = true;
    busy.join();
    std::printf("test_forks: ok\n");
}
