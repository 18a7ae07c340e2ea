#include "process.h"

#include <pthread.h>
#include <time.h>

namespace fserver {

std::atomic<bool> forked{false};
std::atomic<bool> exiting{false};
std::atomic<int> outside{0};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1'000'000'000) + t.tv_nsec;
}

void watch_fork() {
  pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
}

void refuse(const char *call) {
  if (forked.load())
    raise(Kind::kError,
          "%s: the engine was started before this process was forked, and it "
          "does not work in a child process (call init, Worker, Server or "
          "Scheduler after the fork, or use the start method spawn)",
          call);
  raise(Kind::kClosed, "%s: the Python interpreter is shutting down", call);
}

} // namespace fserver
