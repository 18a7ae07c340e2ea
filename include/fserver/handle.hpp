// Handle: an operation that is under way.
#pragma once

#include <cerrno>
#include <cstdint>
#include <string>

#include "fserver/process.hpp"

namespace fserver {

namespace detail {

// What a push_pull waits for, for the text of a TimeoutError; empty: it has ended by now.
inline std::string why_open(fs_node node, fs_ticket ticket) {
  fs_pending p;
  if (fs_waits_for(node, ticket, &p) < 0)
    return "";
  const std::string server = "server " + std::to_string(p.server);
  const std::string key = " (key " + std::to_string(p.key) + ")";
  if (p.sent)
    return server + " has not answered it" + key + "; ";
  const std::string unsent = "it is not sent to " + server + " yet" + key;
  if (p.behind)
    return unsent + ": it waits for handle " + std::to_string(p.behind) + "; ";
  return unsent + ": that is lost, has no receive buffer for it yet, or takes "
                  "no more for now, or a stream has not come to it; ";
}

inline void wait(fs_node node, fs_ticket ticket, Limit limit) {
  refuse_forked("wait");
  const int rc = in_slices(deadline_of(limit),
                           [&](std::int64_t slice, std::uint32_t flags) {
                             return fs_wait(node, ticket, slice, flags);
                           });
  if (rc == -EAGAIN)
    throw TimeoutError("wait: handle " + std::to_string(ticket) +
                       " has not completed within " + in_ms(limit) + ": " +
                       why_open(node, ticket) +
                       "wait again, the handle stays valid");
  check("wait", rc);
}

} // namespace detail

// A push_pull, or an answer, that has been started. It is a number: copy it freely. It does
// not keep its node open.
class Handle {
public:
  Handle() = default;

  // Returns when the push_pull has completed: all answers have been written. For an answer: it has
  // been sent, so that its memory may change. limit counts from this call; 0: only look.
  //
  // Throws TimeoutError when the limit is over; the operation goes on, and the handle stays valid.
  // PeerLostError if a server (for an answer, the worker) is gone; RefusedError if a server's
  // application has refused the request; ShapeError if a server cannot take a pushed tensor;
  // ClosedError if the node is closed, or 4,096 later operations have been started and this one has ended.
  // After an error the memory of the operation may still be in use: of two servers one is lost, and the
  // other still writes its answer. It is free when Node::ended is true, or the node is closed.
  void wait(Limit limit = std::chrono::seconds(10)) const {
    detail::wait(node_, ticket_, limit);
  }

  // Reports whether wait would return or throw at once. Looks once for what has arrived; never
  // blocks.
  bool done() const noexcept {
    return detail::forked.load() ||
           fs_wait(node_, ticket_, 0, FS_NOSPIN) != -EAGAIN;
  }

  // A number that grows with each operation of its node; texts of errors have it. 0: none.
  std::uint64_t id() const noexcept { return ticket_; }

  bool operator==(const Handle &o) const noexcept {
    return node_ == o.node_ && ticket_ == o.ticket_;
  }
  bool operator!=(const Handle &o) const noexcept { return !(*this == o); }

private:
  friend class Node;
  Handle(fs_node node, fs_ticket ticket) : node_(node), ticket_(ticket) {}

  fs_node node_ = 0;
  fs_ticket ticket_ = 0;
};

} // namespace fserver
