// A rate limit for the TCP of one process, where the kernel has none: preloaded, it lets what the process sends pass a token bucket.
// A call moves at most half a burst, then sleeps until a link of the given rate would have carried it.
//
// The file named by TERSEGRAD_THROTTLE holds 64-bit integers: the rate in bytes per second (0: no limit), and for every process the
// payload bytes that it has sent. TERSEGRAD_THROTTLE_RANK is the number of this process.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { LEAST = 1448, MOST = 1 << 16, PIECES = 64, FILE_BYTES = 4096 };

static const int64_t burst_ns = 2000000;
static _Atomic int64_t* shared;
static _Atomic int64_t* sent;
static _Atomic int64_t free_at;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("TERSEGRAD_THROTTLE"), *rank = getenv("TERSEGRAD_THROTTLE_RANK");
  if (!path || !rank) return;
  int file = open(path, O_RDWR);
  if (file < 0) return;
  void* memory = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return;
  shared = memory;
  sent = shared + 1 + atoi(rank);
}

static int limited(int fd) {
  if (!shared) return 0;
  int domain = 0, before = errno;
  socklen_t size = sizeof domain;
  int found = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && (domain == AF_INET || domain == AF_INET6);
  errno = before;
  return found;
}

static ssize_t passed(ssize_t bytes) {
  if (bytes <= 0) return bytes;
  int before = errno;
  atomic_fetch_add(sent, bytes);
  int64_t rate = atomic_load(shared);
  if (rate > 0) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    // Packets of 1448 bytes of payload take 1514 bytes of a link.
    int64_t now = t.tv_sec * 1000000000LL + t.tv_nsec, cost = (int64_t)(bytes * 1e9 * 1514 / 1448 / rate);
    int64_t old = atomic_load(&free_at), next;
    do next = (old > now - burst_ns ? old : now - burst_ns) + cost;
    while (!atomic_compare_exchange_weak(&free_at, &old, next));
    if (next > now) {
      struct timespec rest = {(next - now) / 1000000000LL, (next - now) % 1000000000LL};
      while (nanosleep(&rest, &rest) && errno == EINTR) {
      }
    }
  }
  errno = before;
  return bytes;
}

// How many bytes a call may move.
static size_t room(void) {
  int64_t rate = atomic_load(shared), half = (int64_t)(rate * (burst_ns / 2e9));
  return rate <= 0 ? SIZE_MAX : half < LEAST ? LEAST : half > MOST ? MOST : (size_t)half;
}

static size_t least(size_t bytes) {
  size_t most = room();
  return bytes < most ? bytes : most;
}

// As much of several pieces as a call may move; returns how many pieces that are.
static int cut(const struct iovec* from, size_t count, struct iovec* to) {
  size_t left = room();
  int used = 0;
  for (; used < PIECES && (size_t)used < count && left > 0; ++used) {
    to[used] = from[used];
    if (to[used].iov_len > left) to[used].iov_len = left;
    left -= to[used].iov_len;
  }
  return used;
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name);

ssize_t send(int fd, const void* data, size_t bytes, int flags) {
  REAL(send)
  return limited(fd) ? passed(real(fd, data, least(bytes), flags)) : real(fd, data, bytes, flags);
}

ssize_t write(int fd, const void* data, size_t bytes) {
  REAL(write)
  return limited(fd) ? passed(real(fd, data, least(bytes))) : real(fd, data, bytes);
}

ssize_t writev(int fd, const struct iovec* pieces, int count) {
  REAL(writev)
  if (!limited(fd)) return real(fd, pieces, count);
  struct iovec part[PIECES];
  return passed(real(fd, part, cut(pieces, count, part)));
}

ssize_t sendmsg(int fd, const struct msghdr* message, int flags) {
  REAL(sendmsg)
  if (!limited(fd)) return real(fd, message, flags);
  struct iovec part[PIECES];
  struct msghdr cropped = *message;
  cropped.msg_iovlen = cut(message->msg_iov, message->msg_iovlen, part);
  cropped.msg_iov = part;
  return passed(real(fd, &cropped, flags));
}
