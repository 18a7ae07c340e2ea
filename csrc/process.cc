#include "process.h"

#include <pthread.h>

namespace fserver {

std::atomic<bool> forked{false};
std::atomic<bool> exiting{false};
std::atomic<int> outside{0};

void watch_fork() {
  pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
}

void refuse(const char *call) {
  if (forked.load())
    raise(Kind::kError,
          "%s: the engine was started before this process was forked, and does "
          "not live on in a child: start it (init, Worker, Server, Scheduler) "
          "after the fork, or use the start method spawn",
          call);
  raise(Kind::kClosed, "%s: the interpreter is ending", call);
}

} // namespace fserver
