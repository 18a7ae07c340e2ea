#include "node.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "args.h"
#include "error.h"
#include "flags.h"
#include "host.h"
#include "keeper.h"
#include "process.h"

namespace fserver {
namespace {

std::vector<fs_node> open_nodes; // guarded by the GIL

} // namespace

Node::Node(const std::vector<std::string> &settings) {
  fserver::enter("open");
  auto list = pointers(settings);
  check("open",
        unlocked([&] { return fs_open(list.data(), list.size(), &id_); }));
  if (int rc = fs_get_info(id_, &info_); rc < 0) {
    EngineError error("open", rc);
    fs_free(id_);
    error.raise();
  }
  open_nodes.push_back(id_);
  waits_again();
  holder_.attach(info_.words, info_.mask);
}

Node::~Node() {
  shut();
  if (!forked.load())
    unlocked([&] { return fs_free(id_); });
}

void Node::enter(const char *call) const {
  fserver::enter(call);
  if (closed_)
    raise(Kind::kClosed, "%s: the node is closed", call);
}

void Node::enter_connected(const char *call) const {
  enter(call);
  if (!connected_)
    raise(Kind::kClosed, "%s: the node is not connected: call connect() first",
          call);
}

void Node::connect() {
  enter("connect");
  check("connect", in_slices(kForever, [&](int64_t slice, uint32_t) {
          return fs_wait_ready(id_, slice);
        }));
  check("connect", fs_get_info(id_, &info_));
  connected_ = true;
}

void Node::barrier(PyObject *include_server, PyObject *include_client,
                   PyObject *instance_barrier, PyObject *timeout_ms) {
  enter_connected("barrier");
  const auto flag = [](PyObject *o, const char *name, uint32_t bit) {
    return read_flag(o, {"barrier", name}) ? bit : 0;
  };
  const uint32_t flags =
      (flag(include_server, "include_server", FS_BARRIER_SERVERS) |
       flag(include_client, "include_client", FS_BARRIER_WORKERS) |
       flag(instance_barrier, "instance_barrier", FS_BARRIER_GROUPS)) ^
      FS_BARRIER_GROUPS; // the flag says the opposite
  int64_t timeout = 0;
  if (timeout_ms != Py_None)
    timeout =
        std::max<int64_t>(1, read_ms(timeout_ms, {"barrier", "timeout_ms"}));
  // A barrier that its caller leaves early, by Ctrl-C, is given up.
  struct Call {
    ~Call() {
      if (token)
        unlocked([&] { return fs_barrier_drop(node, token); });
    }
    fs_node node;
    uint64_t token;
  } call{id_, 0};
  int rc = in_slices(kForever, [&](int64_t slice, uint32_t) {
    return fs_barrier(id_, flags, timeout, &call.token, slice);
  });
  call.token = 0;
  check("barrier", rc);
}

void Node::stop() {
  fserver::enter("stop");
  if (closed_)
    return;
  int rc = in_slices(
      kForever, [&](int64_t slice, uint32_t) { return fs_stop(id_, slice); });
  if (rc >= 0 || rc == -ESHUTDOWN) {
    released();
    return;
  }
  EngineError error("stop", rc);
  released();
  error.raise();
}

void Node::shut() {
  if (closed_ || forked.load()) // a forked child has no engine
    return;
  closed_ = true; // refuses new calls while this one waits
  // A call may be in the driver, behind a stream that waits.
  leave_open();
  unlocked([&] { return fs_close(id_); });
  released();
}

// Ends the waits of streams if nobody is left to set a flag.
void Node::leave_open() {
  if (std::erase(open_nodes, id_) && open_nodes.empty())
    end_waits(false);
}

// The engine touches no memory of ours any more.
void Node::released() {
  closed_ = true;
  leave_open();
  forget(); // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall): see shut()
  holder_.clear();
}

std::string Node::describe() {
  enter("describe");
  return text_from("describe", [&](char *buf, size_t cap, size_t *need) {
    return unlocked([&] { return fs_describe(id_, buf, cap, need); });
  });
}

uint64_t Node::channel_open(const std::string &name) {
  enter_connected("channel");
  uint64_t channel = 0;
  check("channel",
        unlocked([&] { return fs_channel_open(id_, name.c_str(), &channel); }));
  return channel;
}

void Node::channel_watch(uint64_t channel, uint64_t words) {
  enter_connected("channel");
  check("channel",
        fs_channel_watch(id_, channel, reinterpret_cast<uint32_t *>(words)));
}

void Node::channel_tell(uint64_t channel, uint32_t peer,
                        const std::string &text) {
  enter_connected("channel");
  check("channel", unlocked([&] {
          return fs_channel_tell(id_, channel, peer, text.data(), text.size());
        }));
}

std::string Node::channel_text(uint64_t channel, uint32_t peer,
                               PyObject *timeout_ms) {
  enter_connected("channel");
  const int64_t timeout = read_ms(timeout_ms, {"channel", "timeout_ms"});
  size_t need = 0;
  int rc = in_slices(now_ns() + timeout, [&](int64_t slice, uint32_t) {
    return fs_channel_text(id_, channel, peer, nullptr, 0, &need, slice);
  });
  if (rc == -EAGAIN)
    raise(Kind::kTimeout,
          "channel: peer %u has not opened its side within %g ms", peer,
          static_cast<double>(timeout) / 1e6);
  if (rc != -ENOBUFS)
    check("channel", rc);
  return text_from("channel", [&](char *buf, size_t cap, size_t *n) {
    return unlocked(
        [&] { return fs_channel_text(id_, channel, peer, buf, cap, n, 0); });
  });
}

void Node::channel_state(uint64_t channel, uint64_t ticket) {
  enter("channel");
  check("channel",
        unlocked([&] { return fs_channel_state(id_, channel, ticket); }));
}

void Node::channel_carry(uint64_t channel, PyObject *words, PyObject *out,
                         PyObject *out_keys, PyObject *in, PyObject *in_keys,
                         PyObject *rows, PyObject *counts, PyObject *timeout_ms,
                         bool lands) {
  enter_connected("channel");
  std::vector<Memory> kept; // for the call; then the caller does
  // Not taken: the engine only looks up what is numbered here.
  const Allocations::Call call(allocations_);
  auto numbers = [&](PyObject *o) -> int64_t * {
    fs_tensor t{};
    if (o != Py_None)
      kept.push_back(
          read_tensor(o, {"channel", "words"}, -1, Access::kLook, -1, &t));
    return static_cast<int64_t *>(t.data);
  };
  auto list = [&](PyObject *tensors, PyObject *keys, const char *name) {
    const Items items = tensor_items(tensors, {"channel", name});
    const Items all_keys(keys, {"channel", name}, "ints");
    std::vector<fs_tensor> all(items.size());
    for (size_t i = 0; i < all.size(); i++) {
      const auto at = static_cast<Py_ssize_t>(i);
      Memory m = read_tensor(items.at(i), {"channel", name}, at, Access::kLook,
                             info_.device, &all[i]);
      all[i].key = read_u64(all_keys.at(i), {"channel", name}, at);
      if (all[i].bytes)
        allocations_.number(id_, m, all[i], given_up());
      kept.push_back(std::move(m));
    }
    return all;
  };
  const std::vector<fs_tensor> o = list(out, out_keys, "outgoing");
  const std::vector<fs_tensor> i = list(in, in_keys, "incoming");
  fs_carried c{};
  c.words = numbers(words);
  c.rows = numbers(rows);
  c.counts = numbers(counts);
  c.out = o.data();
  c.nout = o.size();
  c.in = i.data();
  c.nin = i.size();
  c.lands = lands;
  c.timeout_ns = read_ms(timeout_ms, {"channel", "timeout_ms"});
  check("channel",
        unlocked([&] { return fs_channel_carry(id_, channel, &c); }));
}

bool Node::gpu_direct() {
  enter_connected("channel");
  int direct = 0;
  check("channel", unlocked([&] { return fs_gpu_direct(id_, &direct); }));
  return direct != 0;
}

void Node::channel_end(uint64_t channel, const std::string &why) {
  enter("channel");
  unlocked([&] {
    return fs_channel_close(id_, channel, why.data(), why.size(), 0);
  });
}

bool Node::channel_close(uint64_t channel, PyObject *timeout_ms,
                         const std::string &why, bool forget) {
  if (forked.load())
    return true;
  const int64_t timeout = read_ms(timeout_ms, {"close", "timeout_ms"});
  // Whatever comes in between, as Ctrl-C may: the engine must let go of the word.
  auto close = [&](int64_t slice) {
    return fs_channel_close(id_, channel, why.data(), why.size(), slice);
  };
  auto now = [&] {
    if (forget)
      unlocked([&] { return close(-1); });
  };
  int rc;
  try {
    rc = in_slices(now_ns() + timeout,
                   [&](int64_t slice, uint32_t) { return close(slice); });
  } catch (...) {
    now();
    throw;
  }
  if (rc == -EAGAIN)
    now();
  return rc != -EAGAIN;
}

uint64_t Node::watch_open(int fd) {
  enter("watch");
  uint64_t watch = 0;
  check("watch", fs_watch_open(id_, fd, &watch));
  return watch;
}

void Node::watch_arm(uint64_t watch) {
  enter("watch");
  check("watch", unlocked([&] { return fs_watch_arm(id_, watch); }));
}

void Node::watch_close(uint64_t watch) {
  if (!forked.load()) // the engine is not in a forked child
    check("watch", unlocked([&] { return fs_watch_close(id_, watch); }));
}

std::vector<size_t> Node::ended(const std::vector<uint64_t> &tickets) const {
  std::vector<size_t> places;
  for (size_t i = 0; i < tickets.size(); i++) {
    if (closed_ || !tickets[i] || !holder_.open(tickets[i]))
      places.push_back(i);
  }
  return places;
}

void close_all() {
  if (forked.load())
    return;
  exiting.store(true);
  std::vector<fs_node> nodes = std::move(open_nodes);
  PyThreadState *state = PyEval_SaveThread();
  end_waits(true);
  for (fs_node n : nodes)
    fs_close(n);
  end_keeper();
  // The threads that this has released need the GIL to get out of our calls;
  // then the next call of each is refused. A thread that is still inside when
  // the interpreter goes would be ended in the middle of C++.
  using std::chrono::milliseconds;
  for (int i = 0; i < 2000 && outside.load() != 0; i++)
    std::this_thread::sleep_for(milliseconds(1));
  PyEval_RestoreThread(state);
}

} // namespace fserver
