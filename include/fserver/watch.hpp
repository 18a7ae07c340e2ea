// Watch: wakes an event loop, or a thread that waits for several operations.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

#include "fserver/node.hpp"

namespace fserver {

// Wakes a thread when an operation of a node may have ended, or a request may have come. Arm it first, then
// look (Node::ended, get_batch with limit 0), then sleep: so nothing is missed. The node must live longer.
class Watch {
public:
  // Throws ClosedError if the node is closed, and Error if no descriptor is left.
  explicit Watch(const Node &node)
      : node_(node.id()), fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0)
      throw Error(std::string("Watch: eventfd: ") + std::strerror(errno),
                  errno);
    if (const int rc = fs_watch_open(node_, fd_, &watch_); rc < 0) {
      const fs_error e = detail::last_error("Watch", rc);
      ::close(fd_);
      detail::raise(e);
    }
  }
  Watch(const Watch &) = delete;
  Watch &operator=(const Watch &) = delete;
  ~Watch() {
    if (!detail::forked.load())
      fs_watch_close(node_, watch_);
    ::close(fd_);
  }

  // Has the next end or arrival wake the watch. Returns false if the node is closed: nothing comes any more.
  bool arm() noexcept {
    return !detail::forked.load() && fs_watch_arm(node_, watch_) == 0;
  }
  // Wakes the watch from any thread, armed or not.
  void wake() noexcept { (void)eventfd_write(fd_, 1); }
  // Sleeps until the watch is woken, or has been since the last sleep.
  void sleep() noexcept {
    pollfd p{fd_, POLLIN, 0};
    while (poll(&p, 1, -1) < 0 && errno == EINTR) {
    }
    eventfd_t n;
    (void)eventfd_read(fd_, &n);
  }
  // Readable when the watch has been woken, for an event loop. The loop reads it.
  int fd() const noexcept { return fd_; }

private:
  fs_node node_;
  int fd_;
  fs_watch watch_ = 0;
};

} // namespace fserver
