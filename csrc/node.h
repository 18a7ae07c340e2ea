// A node: life cycle, and what workers and servers have in common.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "allocations.h"
#include "fserver.h"
#include "holder.h"
#include "process.h"

namespace fserver {

// One worker, server or scheduler. All methods may be called from several
// Python threads; what they share is guarded by the GIL, and no method counts
// on it across a call that waits.
class Node {
public:
  explicit Node(const std::vector<std::string> &settings);
  virtual ~Node();
  Node(const Node &) = delete;
  Node &operator=(const Node &) = delete;

  void connect(); // waits until the cluster is complete
  void barrier(PyObject *include_server, PyObject *include_client,
               PyObject *instance_barrier, PyObject *timeout_ms);
  void stop();
  void close() { shut(); }
  std::string describe();

  // Stream channels, by the handles of fs_channel_open.
  uint64_t channel_open(const std::string &name);
  void channel_watch(uint64_t channel, uint64_t words);
  void channel_tell(uint64_t channel, uint32_t peer, const std::string &text);
  std::string channel_text(uint64_t channel, uint32_t peer,
                           PyObject *timeout_ms);
  void channel_state(uint64_t channel, uint64_t ticket = 0);
  // Has the engine exchange the messages of a channel, see fs_channel_carry. The caller keeps
  // the tensors. words, rows and counts are int64 of the CPU; rows and counts may be None.
  void channel_carry(uint64_t channel, PyObject *words, PyObject *out,
                     PyObject *out_keys, PyObject *in, PyObject *in_keys,
                     PyObject *rows, PyObject *counts, PyObject *timeout_ms,
                     bool lands);
  // Whether every peer's path reads and writes memory of the node's GPU by itself.
  bool gpu_direct();
  // False: peers have not closed their sides. Then this one is forgotten, or can be asked for again.
  bool channel_close(uint64_t channel, PyObject *timeout_ms,
                     const std::string &why, bool forget);
  // Tells the peers that this side is closed, and why, and waits for nobody; the handle
  // stays.
  void channel_end(uint64_t channel, const std::string &why);

  // Watches, by the numbers of fs_watch_open.
  uint64_t watch_open(int fd);
  void watch_arm(uint64_t watch);
  void watch_close(uint64_t watch);
  // Which of these tickets have ended, by their places; 0 always has. All have
  // when the node is closed.
  std::vector<size_t> ended(const std::vector<uint64_t> &tickets) const;

  const fs_info &info() const { return info_; }
  bool closed() const { return closed_; }
  bool connected() const { return connected_; }
  size_t held() const { return holder_.size(); }

protected:
  // Refuses a call on a node that cannot take it.
  void enter(const char *call) const;
  void enter_connected(const char *call) const;

  // Whether to send so many bytes of the CPU, beside what is on a GPU, without the GIL: it
  // takes long, as registering memory does (fresh), or the engine may call the driver meanwhile,
  // for this message or another.
  bool may_block(uint64_t bytes, bool fresh) const {
    return info_.device >= 0 || bytes >= kLarge || fresh ||
           holder_.size() > info_.mask / 2; // it may have to wait for room
  }

  // How often the engine has given up registrations.
  uint64_t given_up() const {
    return info_.words ? info_.words[info_.mask + 1] : 0;
  }

  // Closes the node and lets go of all memory. Every class that adds memory
  // calls it in its destructor, while that memory is still there.
  void shut();
  virtual void forget() { allocations_.clear(); }

  // Numbers the memory m of a tensor that is sent, where the engine registers that.
  // Returns whether it is to be registered first.
  bool number_source(const Memory &m, fs_tensor &t) {
    return info_.registers && t.bytes &&
           allocations_.number(id_, m, t, given_up());
  }

  // Reads tensor i of an argument of a call, which is sent.
  fs_tensor &read_source(Tensors &t, PyObject *o, Arg arg, size_t i) {
    fs_tensor &s = t.all[i];
    Memory m = t.read(o, arg, i, Access::kRead, info_.device, s);
    t.fresh |= number_source(m, s);
    t.lease.add(std::move(m));
    t.bytes += s.device < 0 ? s.bytes : 0;
    return s;
  }

  fs_node id_ = 0;
  Holder holder_;
  Allocations allocations_;

private:
  void released();
  void leave_open();

  fs_info info_{};
  bool connected_ = false;
  bool closed_ = false;
};

class Scheduler : public Node {
public:
  explicit Scheduler(const std::vector<std::string> &settings)
      : Node(settings) {}
  ~Scheduler() override { shut(); }
};

// Closes every node that is open, so that no thread stays in the engine when
// the interpreter ends. For atexit.
void close_all();

} // namespace fserver
