// What concerns the process and its threads. For the other headers alone.
#pragma once

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <locale>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "fserver.h"
#include "fserver/error.hpp"

namespace fserver {

// Limits of time. Any std::chrono duration of whole nanoseconds or more converts to it.
using Timeout = std::chrono::nanoseconds;
constexpr Timeout kNoLimit = Timeout::max();

// What calls take as a limit: any std::chrono duration of integers. One that is longer than
// nanoseconds can count, such as hours::max(), is no limit.
class Limit {
public:
  template <class Rep, class Period,
            class = std::enable_if_t<std::is_integral_v<Rep>>>
  constexpr Limit(std::chrono::duration<Rep, Period> limit)
      : limit_(saturated(limit)) {}
  constexpr operator Timeout() const { return limit_; }
  constexpr Timeout::rep count() const { return limit_.count(); }

private:
  template <class Rep, class Period>
  static constexpr Timeout saturated(std::chrono::duration<Rep, Period> limit) {
    using Seconds = std::chrono::duration<double>;
    if (Seconds(limit) >= Seconds(Timeout::max()))
      return Timeout::max();
    if (Seconds(limit) <= Seconds(Timeout::min()))
      return Timeout::min();
    return std::chrono::duration_cast<Timeout>(limit);
  }

  Timeout limit_;
};

namespace detail {

// A child of fork has no engine: its threads are gone, and a call would never return.
inline std::atomic<bool> forked{false};
inline const bool forks_watched =
    pthread_atfork(nullptr, nullptr, [] { forked.store(true); }) == 0;

inline void refuse_forked(const char *call) {
  if (forked.load(std::memory_order_relaxed))
    throw Error(std::string(call) +
                ": the engine does not work in a child of fork: call exec in "
                "the child, or start it before (posix_spawn)");
}

// CLOCK_MONOTONIC, as fs_now, without the way into the engine.
inline std::int64_t now_ns() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

constexpr std::int64_t kForever = INT64_MAX;

// The moment, by now_ns, at which a limit is over.
inline std::int64_t deadline_of(Limit limit) noexcept {
  const std::int64_t now = now_ns(),
                     ns = std::max<std::int64_t>(0, limit.count());
  return ns >= kForever - now ? kForever : now + ns;
}

// Longest time within one call of the engine.
constexpr std::int64_t kSlice = 150'000'000;

// Calls f(slice_ns, flags) for as long as it returns -EAGAIN and the deadline has not passed. The
// first call is made even if the deadline has passed.
template <class F> int in_slices(std::int64_t deadline, F &&f) {
  for (std::uint32_t flags = 0;; flags = FS_NOSPIN) {
    const std::int64_t left =
        deadline == kForever ? kSlice : deadline - now_ns();
    const std::int64_t slice = std::clamp<std::int64_t>(left, 0, kSlice);
    const int rc = f(slice, flags);
    if (rc != -EAGAIN)
      return rc;
    if (deadline != kForever && now_ns() >= deadline)
      return rc;
  }
}

// As std::to_string, with a decimal point in every locale of the program.
inline std::string text_of(double value) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out << std::fixed << value;
  return out.str();
}

// "10 ms"
inline std::string in_ms(Timeout limit) {
  const double ms = std::chrono::duration<double, std::milli>(limit).count();
  std::string s = text_of(ms);
  s.erase(s.find_last_not_of('0') + 1);
  if (s.back() == '.')
    s.pop_back();
  return s + " ms";
}

// The nodes of the process, which have to forget an allocation that goes.
class Nodes {
public:
  // Never destroyed: a Memory or a node of static storage may go later.
  static Nodes &all() {
    static Nodes *nodes = new Nodes;
    return *nodes;
  }
  void add(fs_node node) {
    std::lock_guard<std::mutex> lock(mutex_);
    nodes_.push_back(node);
  }
  void remove(fs_node node) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    nodes_.erase(std::remove(nodes_.begin(), nodes_.end(), node), nodes_.end());
  }
  void forget(std::uint64_t alloc) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    for (fs_node node : nodes_)
      fs_forget(node, alloc);
  }

private:
  std::mutex mutex_;
  std::vector<fs_node> nodes_;
};

} // namespace detail
} // namespace fserver
