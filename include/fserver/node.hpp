// Node: what workers, servers and schedulers have in common.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fserver/handle.hpp"
#include "fserver/message.hpp"
#include "fserver/options.hpp"
#include "fserver/process.hpp"
#include "fserver/tensor.hpp"

namespace fserver {

// A CUDA stream of the node's GPU: a CUstream or cudaStream_t as a number, 0: the default one.
struct Stream {
  std::uint64_t handle = 0;
};

// Who takes part in a barrier.
enum Members : std::uint32_t {
  kServers = FS_BARRIER_SERVERS,
  kWorkers = FS_BARRIER_WORKERS,
  kAllMembers = kServers | kWorkers
};
// How often: each instance calls it, or one instance of each group does.
enum class Each : std::uint32_t { kInstance = 0, kGroup = FS_BARRIER_GROUPS };

// One member of a cluster. Its methods may be called from several threads, with these exceptions:
// other threads use the node after connect() has returned, but for close(), which may end it; and
// nothing may use an object that is being moved or destroyed. A node that was moved from is closed.
//
// The destructor closes the node at once and never throws. Call stop() first for a node that
// leaves in order: for the other nodes, one that only closes is lost.
class Node {
public:
  Node(Node &&) noexcept = default;
  Node &operator=(Node &&) noexcept = default;

  // Waits until all nodes of the cluster are connected. Does nothing if they are.
  //
  // Throws TimeoutError if the cluster is not complete in time (Options::init_timeout), and
  // PeerLostError if a node left again; the node is then closed.
  void connect() {
    State &s = enter("connect");
    if (s.connected.load())
      return;
    const int rc = detail::in_slices(detail::kForever,
                                     [&](std::int64_t slice, std::uint32_t) {
                                       return fs_wait_ready(s.id, slice);
                                     });
    if (rc < 0) {
      const fs_error e = detail::last_error("connect", rc);
      close();
      detail::raise(e);
    }
    detail::check("connect", fs_get_info(s.id, &s.info));
    s.connected.store(true);
  }

  // Leaves the cluster together with all other nodes, and closes this one. Waits until the others
  // stop, too, at most FSERVER_STOP_TIMEOUT seconds. Does nothing if the node is closed.
  //
  // Throws PeerLostError if another node was lost instead, and TimeoutError if the others did not
  // stop in time. This node is closed then, too.
  void stop() {
    detail::refuse_forked("stop");
    if (!state_ || state_->closed.load()) {
      close(); // another thread may be at it
      return;
    }
    const int rc = detail::in_slices(detail::kForever,
                                     [&](std::int64_t slice, std::uint32_t) {
                                       return fs_stop(state_->id, slice);
                                     });
    state_->closed.store(true);
    if (rc != -ESHUTDOWN)
      detail::check("stop", rc);
  }

  // Closes this node at once; a scheduler whose members are leaving waits for them, at most a second.
  // Calls that wait in other threads throw ClosedError. When it returns, the engine touches no memory
  // of the caller's any more, also if another thread has closed the node.
  void close() noexcept {
    if (!state_ || detail::forked.load())
      return;
    state_->closed.store(true);
    fs_close(state_->id); // waits for the first that calls it
  }

  // Waits until every node of the named roles has called barrier. limit 0: the setting
  // FSERVER_BARRIER_TIMEOUT.
  //
  // Throws TimeoutError, PeerLostError if any node of the cluster or the scheduler is gone, and
  // ClosedError.
  void barrier(Members who = kAllMembers, Each each = Each::kInstance,
               Limit limit = Timeout(0)) {
    State &s = enter_connected("barrier");
    std::uint64_t token = 0;
    const auto flags =
        static_cast<std::uint32_t>(who) | static_cast<std::uint32_t>(each);
    const int rc = detail::in_slices(
        detail::kForever, [&](std::int64_t slice, std::uint32_t) {
          return fs_barrier(s.id, flags, limit.count(), &token, slice);
        });
    detail::check("barrier", rc);
  }

  // Sends a message to another node, or to all nodes of some roles, and waits until all of them have it in
  // their queues. For up to kMaxMessage bytes; tensors are faster. Throws PeerLostError if a receiver is gone
  // or leaves, LimitError if one does not receive its messages, ConfigError, TimeoutError (the
  // message may yet arrive), and ClosedError. In each case the other receivers have got it.
  void send(const Address &to, std::string_view data,
            Limit limit = std::chrono::seconds(10)) {
    State &s = enter_connected("send");
    std::uint64_t token = 0;
    const int rc = detail::in_slices(
        detail::deadline_of(limit), [&](std::int64_t slice, std::uint32_t) {
          return fs_send(s.id, to.roles, to.rank, to.run, data.data(),
                         data.size(), &token, slice);
        });
    if (rc == -EAGAIN) {
      fs_send_drop(s.id, token);
      throw TimeoutError("send: not all have taken the message within " +
                         detail::in_ms(limit));
    }
    detail::check("send", rc);
  }

  // Takes the oldest message that has come to this node. Waits for one; returns false if none has come
  // within the limit. Throws ClosedError. Waiting here costs other calls nothing.
  bool receive(Mail &out, Limit limit = kNoLimit) {
    State &s = enter_connected("receive");
    const std::int64_t deadline = detail::deadline_of(limit);
    fs_mail from{};
    if (out.data.size() < 256)
      out.data.resize(256);
    for (;;) {
      std::size_t need = 0;
      const std::int64_t left = deadline == detail::kForever
                                    ? detail::kForever
                                    : deadline - detail::now_ns();
      const int rc =
          fs_receive(s.id, &from, out.data.data(), out.data.size(), &need,
                     std::clamp<std::int64_t>(left, 0, 100 * detail::kSlice));
      if (rc == -ENOBUFS) {
        out.data.resize(need);
        continue;
      }
      if (rc == -EAGAIN && left > 0)
        continue;
      if (rc == -EAGAIN)
        return false;
      detail::check("receive", rc);
      out.data.resize(need);
      out.role = static_cast<Role>(from.role);
      out.rank = from.rank;
      out.run = from.run;
      return true;
    }
  }

  // What this node knows of the scheduler and of all workers and servers.
  std::vector<Member> members() const {
    State &s = enter_connected("members");
    std::vector<fs_member> all(64);
    for (;;) {
      std::size_t need = 0;
      const int rc = fs_members(s.id, all.data(), all.size(), &need);
      all.resize(need);
      if (rc == -ENOBUFS)
        continue;
      detail::check("members", rc);
      std::vector<Member> out;
      out.reserve(all.size());
      for (const fs_member &m : all)
        out.push_back({static_cast<Role>(m.role), m.rank,
                       static_cast<Member::State>(m.state), m.run,
                       std::chrono::nanoseconds(m.silent_ns)});
      return out;
    }
  }

  // JSON about the node: who it is, its links and how tensors travel on each, counters.
  std::string describe() const {
    State &s = enter("describe");
    std::string text(4096, '\0');
    for (;;) {
      std::size_t need = 0;
      const int rc = fs_describe(s.id, text.data(), text.size(), &need);
      if (rc != -ENOBUFS)
        detail::check("describe", rc);
      text.resize(need);
      if (rc != -ENOBUFS)
        return text;
    }
  }

  // The eight time stamps of a completed push_pull, in nanoseconds: started, posted, received by
  // the server, handed to its application; answer started, posted, received by the worker,
  // completed. Stamps 2 to 5 are by the server's clock. Throws ShapeError if it has not completed.
  std::array<std::int64_t, 8> trace(const Handle &h) const {
    std::array<std::int64_t, 8> stamps{};
    detail::check("trace",
                  fs_trace(own("trace", h).id, h.ticket_, stamps.data()));
    return stamps;
  }

  // As Handle::wait, without a call of the engine if the operation has completed. Throws
  // ConfigError for a handle of another node.
  void wait(const Handle &h, Limit limit = std::chrono::seconds(10)) const {
    State &s = own("wait", h);
    const std::uint64_t word = __atomic_load_n(
        &s.info.words[h.ticket_ & s.info.mask], __ATOMIC_ACQUIRE);
    if (word != (h.ticket_ << 2 | 1))
      detail::wait(s.id, h.ticket_, limit);
  }

  // Reports whether an operation of this node has ended, so that the engine does not use its memory any more.
  // wait may have thrown before. It is by the completion word alone: makes no call of the engine, and so does
  // not look for what has arrived. True for Handle(), and on a node that was moved from.
  bool ended(const Handle &h) const noexcept {
    if (!state_ || !h.ticket_)
      return true;
    const std::uint64_t word = __atomic_load_n(
        &state_->info.words[h.ticket_ & state_->info.mask], __ATOMIC_ACQUIRE);
    return word >> 2 != h.ticket_ || (word & 3) == 1 || (word & 3) == 2;
  }
  // The node's handle for calls of fserver.h.
  fs_node id() const { return enter("id").id; }

  // The number of the node within its role. If the scheduler assigns it: -1 until connect() has returned.
  int rank() const { return enter("rank").info.rank; }
  // Whether the node has the place of one that was lost.
  bool recovery() const { return enter("recovery").info.recovery != 0; }
  // The node's group within its role; as rank().
  int group() const { return enter("group").info.group; }
  // The rail: the node talks to the nodes of the other role that have the same.
  int instance() const { return enter("instance").info.instance; }
  // Worker groups: a full batch has as many requests.
  int workers() const { return enter("workers").info.workers; }
  // Server groups: a push_pull gets answers from as many servers.
  int servers() const { return enter("servers").info.servers; }
  // The node's GPU as CUDA counts; kCpu if its backend is CPU.
  int device() const { return enter("device").info.device; }
  // Where other nodes reach this one, "10.0.0.1:7000"; empty if nowhere.
  std::string address() const { return enter("address").info.address; }
  // Whether the node is closed, or is being closed: the engine may use memory until close() returns.
  bool closed() const noexcept { return !state_ || state_->closed.load(); }
  bool connected() const noexcept { return state_ && state_->connected.load(); }

protected:
  ~Node() = default;

  struct State {
    State() = default;
    State(const State &) = delete;
    State &operator=(const State &) = delete;
    ~State() {
      if (!id || detail::forked.load())
        return;
      detail::Nodes::all().remove(id);
      fs_free(id);
    }
    fs_node id = 0;
    fs_info info{};
    std::atomic<bool> connected{false}, closed{false};
  };

  Node(const char *role, detail::Settings settings)
      : state_(std::make_unique<State>()) {
    detail::refuse_forked("open");
    if (const int abi = fs_abi(); abi != FS_ABI)
      throw Error("open: the library has ABI " + std::to_string(abi) +
                  ", the headers have " + std::to_string(FS_ABI) +
                  ": compile and link with the files of one version");
    settings.set("DMLC_ROLE", role);
    detail::check("open", settings.open(&state_->id));
    detail::Nodes::all().add(state_->id);
    detail::check("open", fs_get_info(state_->id, &state_->info));
  }

  State &enter(const char *call) const {
    detail::refuse_forked(call);
    if (!state_ || state_->closed.load(std::memory_order_relaxed))
      throw ClosedError(std::string(call) + ": the node is closed");
    return *state_;
  }
  State &enter_connected(const char *call) const {
    State &s = enter(call);
    if (!s.connected.load(std::memory_order_relaxed))
      throw ClosedError(std::string(call) +
                        ": the node is not connected: call connect() first");
    return s;
  }
  State &own(const char *call, const Handle &h) const {
    State &s = enter_connected(call);
    if (h.node_ != s.id)
      throw ConfigError(std::string(call) + ": handle " +
                        std::to_string(h.ticket_) +
                        " is not of this node: call wait() of the handle");
    return s;
  }
  static Handle handle(fs_node node, fs_ticket ticket) {
    return Handle(node, ticket);
  }

  std::unique_ptr<State> state_;
};

namespace detail {

// A list that keeps its memory from call to call, one for each thread and use.
template <class T, int use = 0> T *scratch(std::size_t n) {
  thread_local std::vector<T> all;
  if (all.size() < n)
    all.resize(std::max<std::size_t>(n, 16));
  return all.data();
}

[[noreturn]] inline void refuse_tensor(const char *call, const char *list,
                                       std::size_t i, const Tensor &t,
                                       int device) {
  const std::string who =
      std::string(call) + ": " + list + "[" + std::to_string(i) + "]";
  if (t.device != kCpu && t.device != device)
    throw ConfigError(who + " is on GPU " + std::to_string(t.device) +
                      ", want the CPU" +
                      (device < 0 ? " (open the node with backend GPU)"
                                  : " or GPU " + std::to_string(device)));
  if (!t.data)
    throw ConfigError(who + ".data is null, want " + std::to_string(t.bytes) +
                      " bytes");
  throw ShapeError(who + " has " + std::to_string(t.bytes) +
                   " bytes, which are not those of shape " + t.shape.text() +
                   " of " + name_of(t.dtype));
}

// Whether the bytes are those of dtype and shape. Those of kAny are for the engine to compare.
inline bool bytes_fit(const Tensor &t) {
  std::uint64_t bytes;
  return t.dtype == DType::kAny ||
         (count_bytes(t.dtype, t.shape, &bytes) && bytes == t.bytes);
}

// Checks a tensor and describes it for the engine. `device` is the node's.
inline void describe(const char *call, const char *list, std::size_t i,
                     const Tensor &t, int device, fs_tensor *out) {
  if ((t.device != kCpu && t.device != device) || (!t.data && t.bytes) ||
      !bytes_fit(t))
    refuse_tensor(call, list, i, t, device);
  out->data = t.data;
  out->bytes = t.bytes;
  out->key = t.key;
  out->base = t.base;
  out->base_bytes = t.base_bytes;
  out->alloc = t.alloc;
  out->dims = t.shape.data();
  out->ndim = static_cast<std::uint32_t>(t.shape.size());
  out->device = t.device;
  out->dtype = static_cast<std::uint8_t>(t.dtype);
}

} // namespace detail
} // namespace fserver
