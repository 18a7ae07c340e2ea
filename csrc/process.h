// What concerns the process: threads, signals, fork and exit.
#pragma once

#include <Python.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <utility>

#include "error.h"
#include "fserver.h"

namespace fserver {

// Longest time between two looks at pending signals: bounds how late Ctrl-C is
// (200 ms). Each slice wakes a sleeping Go runtime, whose monitor then looks
// around some 60 times, so a shorter one costs: 100 ms took 1.3 to 2 % of a core.
constexpr int64_t kSlice = 150'000'000;

// From this size on, sending takes longer than another thread should wait for
// the GIL.
constexpr uint64_t kLarge = 256 << 10;

constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

extern std::atomic<bool> forked;  // in a child of fork: the engine hangs there
extern std::atomic<bool> exiting; // the interpreter is ending
extern std::atomic<int> outside;  // threads in unlocked()

// CLOCK_MONOTONIC, as fs_now, without the way into the engine.
int64_t now_ns();

// Installs the fork handler. Called once, when the module is loaded.
void watch_fork();

// Refuses a call that must not enter the engine any more.
void refuse(const char *call);
inline void enter(const char *call) {
  if (forked.load(std::memory_order_relaxed) ||
      exiting.load(std::memory_order_relaxed))
    refuse(call);
}

// Calls f, which knows no Python, without the GIL. Nothing of ours is locked
// meanwhile. RestoreThread does not return once the interpreter is finalizing;
// close_all() sees to it that no thread is here then.
//
// Every call that may reach the driver is made so, whatever its size: while a stream
// waits, any of them may wait for it (a full stream, a kernel that is loaded, memory that
// is freed), and what ends that wait may be a Python thread.
template <class F> auto unlocked(F &&f) {
  std::exception_ptr thrown; // by torch
  std::optional<decltype(f())> r;
  outside.fetch_add(1);
  PyThreadState *state = PyEval_SaveThread();
  try {
    r.emplace(f());
  } catch (...) {
    thrown = std::current_exception();
  }
  PyEval_RestoreThread(state);
  outside.fetch_sub(1);
  if (thrown)
    std::rethrow_exception(thrown);
  return std::move(*r);
}

// Calls f(slice_ns, flags) without the GIL for as long as it returns -EAGAIN
// and the deadline (CLOCK_MONOTONIC) has not passed; runs signal handlers in
// between. The first call is made even if the deadline has passed.
template <class F> int in_slices(int64_t deadline, F &&f) {
  for (uint32_t flags = 0;; flags = FS_NOSPIN) {
    int64_t left = deadline == kForever ? kSlice : deadline - now_ns();
    int64_t slice = left < 0 ? 0 : left < kSlice ? left : kSlice;
    int rc = unlocked([&] { return f(slice, flags); });
    if (rc != -EAGAIN)
      return rc;
    if (PyErr_CheckSignals() < 0)
      throw Raised{};
    if (left <= kSlice && deadline != kForever && now_ns() >= deadline)
      return rc;
  }
}

} // namespace fserver
