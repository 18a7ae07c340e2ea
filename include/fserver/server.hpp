// Server: the node that takes requests and answers them.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fserver/node.hpp"
#include "fserver/scheduler.hpp"

namespace fserver {

namespace detail {

// A receive buffer of the engine. The last owner releases it as many times as get_batch has named it:
// the engine may then unmap the memory.
class Buffer {
public:
  explicit Buffer(std::uint64_t number) noexcept : number_(number) {}
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() {
    if (times_ && !forked.load())
      fs_buffer_release(number_, times_);
  }
  std::uint64_t number() const noexcept { return number_; }
  void named() noexcept { times_++; }

private:
  const std::uint64_t number_;
  std::uint64_t times_ = 0;
};

} // namespace detail

// One request of a worker. Its tensors are views of the server's receive buffers: valid until the
// request is answered, and for as long as this object exists, also if the worker is lost. Memory that
// a worker shares (Memory::shared) is mapped for reading alone: do not write to what a worker pushed
// unless you know that it does not share it.
class Request {
public:
  Request() = default;
  Request(Request &&o) noexcept
      : handler_(o.handler_), worker_(o.worker_),
        tensors_(std::move(o.tensors_)), answers_(std::move(o.answers_)),
        loans_(std::move(o.loans_)), buffers_(std::move(o.buffers_)) {
    o.loans_.clear();
  }
  Request &operator=(Request &&o) noexcept {
    give_back();
    handler_ = o.handler_;
    worker_ = o.worker_;
    tensors_ = std::move(o.tensors_);
    answers_ = std::move(o.answers_);
    loans_ = std::move(o.loans_);
    o.loans_.clear();
    buffers_ = std::move(o.buffers_);
    return *this;
  }
  ~Request() { give_back(); }

  // What respond and fail take, once.
  std::uint64_t handler() const noexcept { return handler_; }
  // The rank of the worker.
  int worker() const noexcept { return worker_; }
  // What the worker has pushed, each with its key.
  const std::vector<Tensor> &tensors() const noexcept { return tensors_; }
  const Tensor &operator[](std::size_t i) const { return tensors_.at(i); }
  // The bytes of the worker's pull tensors: of each tensor of the answer.
  const std::vector<std::uint64_t> &answers() const noexcept {
    return answers_;
  }
  // Reports whether a tensor lies in memory that the worker shares, and may still change.
  bool lent() const noexcept { return !loans_.empty(); }

private:
  friend class Server;

  void give_back() noexcept {
    for (std::uint64_t buffer : loans_) {
      if (!detail::forked.load())
        fs_buffer_release(buffer, 1);
    }
    loans_.clear();
    buffers_.clear();
  }

  std::uint64_t handler_ = 0;
  int worker_ = -1;
  std::vector<Tensor> tensors_;
  std::vector<std::uint64_t> answers_;
  std::vector<std::uint64_t> loans_; // each owes a release
  std::vector<std::shared_ptr<detail::Buffer>> buffers_;
};

// The requests that get_batch has taken, in the order of the worker groups. Use one again for the
// next batch: its lists keep their memory. To answer a request later than that, move it out.
class Batch {
public:
  Batch() = default;
  Batch(Batch &&o) noexcept
      : requests_(std::move(o.requests_)), n_(std::exchange(o.n_, 0)),
        words_(std::move(o.words_)) {}
  Batch &operator=(Batch &&o) noexcept {
    requests_ = std::move(o.requests_);
    n_ = std::exchange(o.n_, 0);
    words_ = std::move(o.words_);
    return *this;
  }
  Request *begin() noexcept { return requests_.data(); }
  Request *end() noexcept { return requests_.data() + n_; }
  const Request *begin() const noexcept { return requests_.data(); }
  const Request *end() const noexcept { return requests_.data() + n_; }
  std::size_t size() const noexcept { return n_; }
  bool empty() const noexcept { return n_ == 0; }
  Request &operator[](std::size_t i) noexcept { return requests_[i]; }

private:
  friend class Server;
  std::vector<Request> requests_;
  std::size_t n_ = 0;
  std::vector<std::uint64_t> words_;
};

class Server : public Node {
public:
  // With Options::host_scheduler the process runs the scheduler, too; its port may be 0 then.
  // Throws ConfigError if a setting is wrong, and TimeoutError as connect().
  explicit Server(const Options &options = {})
      : Server(hosted(detail::Settings(options))) {
    if (options.connect)
      connect();
  }
  Server(Server &&) noexcept = default;
  Server &operator=(Server &&) noexcept = default;
  ~Server() { close(); } // before the scheduler that it hosts

  // Takes one request of each worker group into batch, and waits until there is one of each.
  // Returns false, with an empty batch, if the limit is over.
  //
  // at_least: 1 to workers(): return as soon as so many groups have a request, with one request of
  // each group that has one, and do not wait for groups that are idle or gone. 0: of all groups.
  //
  // Throws ClosedError if a worker has left, so that there will be no further batch: call stop().
  // PeerLostError if a worker is gone, and no other process has taken its rank; the requests of the
  // others can be taken with at_least. ShapeError if at_least is more than there are groups.
  bool get_batch(Batch &batch, Limit limit = kNoLimit, int at_least = 0) {
    State &s = enter_connected("get_batch");
    if (at_least < 0)
      throw ConfigError("get_batch: at_least is " + std::to_string(at_least) +
                        ", want 0 (all) to the number of worker groups");
    return fill("get_batch", s, batch, limit,
                static_cast<std::uint32_t>(at_least), 0);
  }

  // Takes the requests of Worker::push_pull_to: one of each worker that has one, as soon as any has.
  // Returns false, with an empty batch, if the limit is over.
  //
  // Throws ClosedError if all workers have left, and PeerLostError if all are gone.
  bool get_unicasts(Batch &batch, Limit limit = kNoLimit) {
    return fill("get_unicasts", enter_connected("get_unicasts"), batch, limit,
                0, FS_UNICASTS);
  }

  // Answers a request, once. Returns at once, but waits for room, at most a second, while 4,096
  // answers have not left. Do not change the tensors before the returned handle
  // is done, or the worker's next request has come.
  //
  // tensors: in the order of the worker's pull tensors, each with as many bytes and of the same
  //     dtype. Empty for a request that pulls nothing.
  // after: with tensors on the GPU, sends when what is queued on that stream has run.
  //
  // Throws ShapeError: count, sizes or dtypes do not fit, or the handler does not wait for an
  // answer. LimitError: 4,096 answers have not left this server. PeerLostError: the worker is gone.
  Handle respond(Tensors tensors, std::uint64_t handler,
                 std::optional<Stream> after = std::nullopt) {
    State &s = enter_connected("respond");
    const std::size_t n = tensors.size();
    fs_tensor *t = detail::scratch<fs_tensor>(n);
    for (std::size_t i = 0; i < n; i++)
      detail::describe("respond", "tensors", i, tensors[i], s.info.device,
                       &t[i]);
    fs_ticket ticket = 0;
    std::size_t answered = 0;
    detail::check("respond",
                  fs_respond(s.id, after ? &after->handle : nullptr, &handler,
                             &n, 1, t, &ticket, &answered));
    return handle(s.id, ticket);
  }
  Handle respond(Tensors tensors, const Request &request,
                 std::optional<Stream> after = std::nullopt) {
    return respond(tensors, request.handler(), after);
  }

  // Refuses a request, in place of respond. At its worker wait throws RefusedError with the first
  // 500 bytes of text (UTF-8); a run of white space is one space.
  //
  // Throws ShapeError: the handler does not wait for an answer. PeerLostError: the worker is gone.
  void fail(std::uint64_t handler, std::string_view text) {
    State &s = enter_connected("fail");
    detail::check("fail", fs_fail(s.id, handler, text.data(), text.size()));
  }
  void fail(const Request &request, std::string_view text) {
    fail(request.handler(), text);
  }

  // Receives pushed tensors in memory of the caller's, which stays valid until the node is closed.
  // Its bytes are cut into ranks.size() equal slices; slice i receives keys[i] of worker ranks[i].
  // Call it before the first push of these keys: before connect() (Options::connect = false), or
  // before a barrier of all nodes.
  //
  // Throws ShapeError: the bytes do not divide, counts differ, there is no such worker, or a key
  // has been pushed or has memory already. ConfigError: the memory is null or on another device.
  void register_recv(const Tensor &memory, const std::vector<int> &ranks,
                     const std::vector<std::uint64_t> &keys) {
    State &s = enter("register_recv");
    const std::size_t n = ranks.size();
    if (n == 0 || keys.size() != n)
      throw ShapeError("register_recv: " + std::to_string(keys.size()) +
                       " keys for " + std::to_string(n) +
                       " ranks: give at least one rank, and a key for each");
    if (memory.bytes == 0 || memory.bytes % n)
      throw ShapeError("register_recv: memory has " +
                       std::to_string(memory.bytes) +
                       " bytes, want a multiple of the number of ranks (" +
                       std::to_string(n) + "): all slices are equal");
    fs_tensor t;
    detail::describe("register_recv", "memory", 0, memory, s.info.device, &t);
    const std::vector<std::int32_t> r(ranks.begin(), ranks.end());
    detail::check("register_recv",
                  fs_register_recv(s.id, &t, r.data(), keys.data(), n));
  }

  // The keys of the pull tensors of a request that is not answered yet, in the order of answers(). Throws ShapeError if
  // it has been answered.
  std::vector<std::uint64_t> pull_keys(const Request &request) const {
    const State &s = enter_connected("pull_keys");
    std::vector<std::uint64_t> keys(request.answers().size());
    std::size_t need = 0;
    detail::check("pull_keys", fs_pull_keys(s.id, request.handler(),
                                            keys.data(), keys.size(), &need));
    return keys;
  }

  // How often the worker with a rank was lost. If that has grown, what is kept for it is of no use any more: another
  // process may have its rank. Throws ShapeError if no worker of this rail has the rank.
  std::uint32_t losses(int worker) const {
    const State &s = enter_connected("losses");
    std::uint32_t n = 0;
    detail::check("losses", fs_losses(s.id, worker, &n));
    return n;
  }

  // Leaves the cluster, and so does the scheduler that this server hosts; as Node::stop.
  void stop() {
    try {
      Node::stop();
    } catch (...) {
      if (scheduler_)
        scheduler_->close();
      throw;
    }
    if (scheduler_)
      scheduler_->stop();
  }

  // Closes this node, and the scheduler that it hosts; as Node::close.
  void close() noexcept {
    Node::close();
    if (scheduler_)
      scheduler_->close();
  }

  // The "host:port" of the scheduler that this server hosts, for the other nodes. Throws
  // ClosedError if it hosts none.
  std::string scheduler() const {
    if (!scheduler_)
      throw ClosedError("this server hosts no scheduler (open it with "
                        "host_scheduler = true)");
    return scheduler_->scheduler();
  }

private:
  bool fill(const char *call, State &s, Batch &batch, Limit limit,
            std::uint32_t least, std::uint32_t how) {
    batch.n_ = 0;
    for (Request &r : batch.requests_)
      r.give_back();
    if (batch.words_.empty())
      batch.words_.resize(512);
    const std::int64_t deadline = detail::deadline_of(limit);
    for (;;) {
      std::size_t need = 0;
      const int rc = detail::in_slices(
          deadline, [&](std::int64_t slice, std::uint32_t flags) {
            return fs_get_batch(s.id, 0, least, batch.words_.data(),
                                batch.words_.size(), &need, slice, flags | how);
          });
      if (rc == -EAGAIN)
        return false;
      if (rc != -ENOBUFS) {
        detail::check(call, rc);
        take(batch);
        return true;
      }
      batch.words_.resize(need); // the batch waits for us
    }
  }

  struct Hosted {
    detail::Settings settings;
    std::unique_ptr<Scheduler> scheduler;
  };

  // Opens the scheduler of this process, if it is wanted, and points the settings to it.
  static Hosted hosted(detail::Settings settings) {
    std::string wants = settings.take("FSERVER_HOST_SCHEDULER");
    const char *const blanks = " \t\n\v\f\r";
    wants.erase(0, wants.find_first_not_of(blanks));
    wants.erase(wants.find_last_not_of(blanks) + 1);
    Hosted h{std::move(settings), nullptr};
    if (wants.empty() || wants == "0" || wants == "off")
      return h;
    if (wants != "1" && wants != "on")
      throw ConfigError("FSERVER_HOST_SCHEDULER=" + wants +
                        ": want 0, 1, off or on");
    h.scheduler.reset(new Scheduler(h.settings));
    h.settings.add_scheduler(h.scheduler->scheduler());
    return h;
  }

  explicit Server(Hosted h)
      : Node("server", (tell_dtypes(), std::move(h.settings))),
        scheduler_(std::move(h.scheduler)), slots_(std::make_unique<Slots>()) {}

  // Has the engine refuse pushes whose bytes are not those of their shape and dtype, so that an
  // application may count elements by the shape.
  static void tell_dtypes() {
    detail::refuse_forked("open");
    static const int told = [] {
      std::uint8_t bytes[256];
      for (int i = 0; i < 256; i++)
        bytes[i] = static_cast<std::uint8_t>(size_of(static_cast<DType>(i)));
      return fs_dtypes(bytes, 256);
    }();
    detail::check("open", told);
  }

  // The receive buffers of each (worker rank, key).
  struct Slots {
    std::mutex mutex;
    std::vector<std::shared_ptr<detail::Buffer>> buffers; // by slot
  };

  // Reads what fs_get_batch has written.
  void take(Batch &batch) {
    const std::uint64_t *w = batch.words_.data();
    const std::size_t n = *w++;
    if (batch.requests_.size() < n)
      batch.requests_.resize(n);
    std::lock_guard<std::mutex> lock(slots_->mutex);
    for (std::size_t i = 0; i < n; i++) {
      Request &r = batch.requests_[i];
      r.handler_ = w[0];
      r.worker_ = static_cast<int>(w[1]);
      r.tensors_.resize(w[2]);
      const std::size_t nq = w[3];
      w += 4;
      for (Tensor &t : r.tensors_)
        w = take(w, t, r);
      r.answers_.assign(w, w + nq);
      w += nq;
    }
    batch.n_ = n;
  }

  const std::uint64_t *take(const std::uint64_t *w, Tensor &t, Request &r) {
    const std::uint64_t slot = w[1], buffer = w[2];
    t.key = w[0];
    t.data = t.base = reinterpret_cast<void *>(w[3]);
    t.bytes = t.base_bytes = w[4];
    t.dtype = static_cast<DType>(w[5]);
    t.device = static_cast<int>(static_cast<std::int64_t>(w[6]));
    t.shape.assign(reinterpret_cast<const std::int64_t *>(w + 8), w[7]);
    if (slot == FS_LENT)
      r.loans_.push_back(buffer);
    else if (t.bytes && buffer)
      r.buffers_.push_back(buffer_of(slot, buffer));
    return w + 8 + w[7];
  }

  // A new buffer in a slot replaces the old one, which requests may still have.
  const std::shared_ptr<detail::Buffer> &buffer_of(std::uint64_t slot,
                                                   std::uint64_t buffer) {
    std::vector<std::shared_ptr<detail::Buffer>> &all = slots_->buffers;
    if (slot >= all.size())
      all.resize(slot + 1);
    if (!all[slot] || all[slot]->number() != buffer)
      all[slot] = std::make_shared<detail::Buffer>(buffer);
    all[slot]->named();
    return all[slot];
  }

  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Slots> slots_;
};

} // namespace fserver
