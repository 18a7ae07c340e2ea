// Requests: what a KVWorker has under way. For the other headers alone.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fserver/fserver.hpp"
#include "ps/internal/nodes.h"
#include "ps/internal/record.h"

namespace ps::detail {

// The requests of one KVWorker. Timestamps from kTimestamps on are those of the SimpleApp that the KVWorker is.
class Requests final : public Looks {
public:
  Requests(std::shared_ptr<WorkerNode> node, int app, int customer,
           std::vector<Range> ranges)
      : node_(std::move(node)), app_(app), customer_(customer),
        ranges_(std::move(ranges)), records_(ranges_.size()),
        ring_(kWindow, nullptr) {
    node_->add(app_, customer_, this);
  }
  // Nobody waits for these requests any more, so nobody needs to know how they end.
  void leave() { node_->remove(app_, customer_); }
  ~Requests() {
    leave();
    if (!thread_.joinable())
      return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    watch_->wake();
    thread_.join();
  }

  // Starts a request, and returns its timestamp. Throws if an argument is wrong.
  int start(Ask ask) {
    check(ask);
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for_room(lock);
    if (ask.done && !thread_.joinable())
      start_thread();
    Record &r = *records_.get();
    r.number = next_++;
    at(r.number) = &r;
    begin_to_send(r);
    r.ask = std::move(ask);
    const int timestamp = timestamp_of(r.number);
    lock.unlock();
    try {
      first_step(r);
      send(r, true);
    } catch (...) { // nothing has been sent
      lock.lock();
      const Ask gone = drop(r);
      lock.unlock();
      throw;
    }
    lock.lock();
    sent(r);
    if (r.ask.done) {
      callbacks_.push_back(&r);
      settle(r);
      if (idle_ || !r.open()) // it may have ended before it was in the list
        watch_->wake();
    }
    return timestamp;
  }

  // Waits until a request has ended, and its callback has returned. Throws what it has ended with.
  void wait(int timestamp) {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::int64_t number = number_of(next_, timestamp);
    if (number < 0)
      throw fserver::ConfigError("Wait: timestamp is " +
                                 std::to_string(timestamp) +
                                 ", want what a call has returned");
    while (Record *r = find(number)) {
      if (r->state == Record::kSending) {
        changed_.wait(lock);
      } else if (Part *p = first_open(*r)) {
        wait_for(p->handle, lock);
        if (find(number) == r && r->state == Record::kOpen)
          settle(*r);
      } else if (r->ask.done && !on_thread()) {
        changed_.wait(lock);
      } else {
        complete(*r, lock);
      }
    }
    while (!on_thread() && std::count(running_.begin(), running_.end(), number))
      changed_.wait(lock);
    if (const auto it = failures_.find(number); it != failures_.end())
      std::rethrow_exception(it->second);
    if (number <= forgotten_)
      throw fserver::ClosedError("Wait: request " + std::to_string(timestamp) +
                                 " is no longer known: wait for it before " +
                                 std::to_string(kFailures) +
                                 " later ones have failed");
  }

  // Waits until all requests have ended and their callbacks have returned. Returns false if that
  // takes longer than the limit.
  bool drain(fserver::Timeout limit) noexcept {
    const std::int64_t deadline = fserver::detail::deadline_of(limit);
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        trim(lock);
        if (low_ == next_ && running_.empty())
          return true;
      }
      if (fserver::detail::now_ns() >= deadline)
        return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  Oldest look() override {
    std::lock_guard<std::mutex> lock(mutex_);
    Oldest oldest;
    for (std::int64_t n = low_; n < next_; n++) {
      Record *r = at(n);
      if (!r)
        continue;
      if (r->state == Record::kSending) {
        if (const std::uint64_t id = r->floor.load(); id < oldest.id)
          oldest = {id, {}};
        continue;
      }
      settle(*r);
      for (std::size_t i = 0; i < r->used; i++) {
        const Part &p = r->parts[i];
        if (p.open && p.handle.id() < oldest.id)
          oldest = {p.handle.id(), p.handle};
      }
    }
    return oldest;
  }

private:
  static constexpr std::int64_t kWindow =
      8192; // from the oldest under way to the newest
  static constexpr std::size_t kFailures = 4096;
  using Lock = std::unique_lock<std::mutex>;

  Record *&at(std::int64_t number) {
    return ring_[static_cast<std::size_t>(number % kWindow)];
  }
  // The request if it is under way; null: it has ended.
  Record *find(std::int64_t number) {
    return number >= low_ && number < next_ ? at(number) : nullptr;
  }
  bool on_thread() const { return std::this_thread::get_id() == id_; }
  bool ended(const fserver::Handle &h) const {
    return node_->worker.ended(h) ||
           fserver::detail::forked.load(std::memory_order_relaxed);
  }
  static Part *first_open(Record &r) {
    for (std::size_t i = 0; i < r.used; i++) {
      if (r.parts[i].open)
        return &r.parts[i];
    }
    return nullptr;
  }

  // Waits for a push_pull, without the lock.
  void wait_for(fserver::Handle h, Lock &lock) {
    if (ended(h))
      return;
    lock.unlock();
    node_->rest(h, fserver::kNoLimit);
    lock.lock();
  }

  // Notes which push_pulls of a request have ended, and how.
  void settle(Record &r) {
    for (std::size_t i = 0; i < r.used; i++) {
      Part &p = r.parts[i];
      if (!p.open || !ended(p.handle))
        continue;
      p.open = false;
      try {
        node_->worker.wait(p.handle, fserver::Timeout(0));
      } catch (...) {
        if (!r.error)
          r.error = std::current_exception();
      }
    }
  }

  // Moves low_ past what has ended.
  void trim(Lock &lock) {
    while (low_ < next_) {
      const std::int64_t number = low_;
      // From within a callback or a deleter, others run only if there is no room without.
      const bool full = next_ - low_ == kWindow;
      if (Record *r = at(number);
          r && !full && (completing() || (r->ask.done && !running_.empty())))
        return;
      if (!advance(number, lock))
        return;
      if (low_ == number) // which another thread may have moved meanwhile
        low_++;
    }
  }

  // Waits while the ring is full.
  void wait_for_room(Lock &lock) {
    for (;;) {
      trim(lock);
      const std::int64_t other =
          low_ < next_ ? low_ + next_ % (next_ - low_) : 0;
      if (Record *r = find(other); r && !r->ask.done)
        advance(other, lock); // so that its memory is let go of
      if (next_ - low_ < kWindow)
        return;
      if (Record *r = at(low_); r && r->state == Record::kOpen && r->open())
        wait_for(first_open(*r)->handle, lock);
      else if (r)
        changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
  }

  // Completes a request if that needs no waiting. Returns whether it is complete.
  bool advance(std::int64_t number, Lock &lock) {
    Record *r = find(number);
    if (!r)
      return true;
    if (r->state != Record::kOpen)
      return false;
    settle(*r);
    if (r->open() || (r->ask.done && !on_thread()))
      return false;
    return complete(*r, lock);
  }

  // Goes on with a request whose push_pulls have ended. Returns whether that was all. Lets go of the
  // lock while it sends, and while it runs what is the program's: a callback, and deleters of memory.
  bool complete(Record &r, Lock &lock) {
    if (r.op == Op::kSize && !r.error) {
      begin_to_send(r);
      lock.unlock();
      try {
        second_step(r);
        send(r, false);
      } catch (...) {
        r.error = std::current_exception();
      }
      lock.lock();
      sent(r);
      if (!r.error || r.open())
        return false;
    }
    const std::int64_t number = r.number;
    if (r.error)
      note(number, r.error);
    std::function<void()> done = std::move(r.ask.done);
    const bool calls = done != nullptr;
    if (calls) {
      callbacks_.erase(std::find(callbacks_.begin(), callbacks_.end(), &r));
      running_.push_back(number);
    }
    Ask gone = drop(r);
    lock.unlock();
    completing()++;
    gone = Ask();
    if (calls) {
      done();
      done = nullptr;
    }
    completing()--;
    lock.lock();
    if (calls) {
      running_.erase(std::find(running_.begin(), running_.end(), number));
      changed_.notify_all();
    }
    return true;
  }

  // How deep this thread is in complete().
  static int &completing() {
    thread_local int count = 0;
    return count;
  }

  void begin_to_send(Record &r) {
    r.floor = node_->newest.load();
    r.state = Record::kSending;
  }
  void sent(Record &r) {
    r.state = Record::kOpen;
    changed_.notify_all();
  }
  // Ends a request. Returns what it has kept, which is to be let go of without the lock.
  Ask drop(Record &r) {
    Ask gone = std::move(r.ask);
    at(r.number) = nullptr;
    records_.put(&r);
    changed_.notify_all();
    return gone;
  }
  void note(std::int64_t number, std::exception_ptr error) {
    failures_.emplace(number, std::move(error));
    if (failures_.size() > kFailures) {
      forgotten_ = std::max(forgotten_, failures_.begin()->first);
      failures_.erase(failures_.begin());
    }
  }

  void first_step(Record &r) {
    const Ask &a = r.ask;
    r.op = a.op;
    if (!a.pieces) {
      cut(r, ranges_);
    } else {
      for (const Piece &p : *a.pieces)
        static_cast<Piece &>(r.parts.at(r.used++)) = p;
    }
    // Keys with different numbers of values: what each of several servers has is not known.
    const bool unlike =
        a.wants_lens ||
        (!a.keys.empty() && a.vals.size() / a.width % a.keys.size());
    if (a.op == Op::kPull && (a.vals.empty() || (unlike && r.used > 1)) &&
        r.used)
      r.op = Op::kSize;
  }

  // Takes memory for what the servers have said that they have.
  void second_step(Record &r) {
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < r.used; i++) {
      const std::uint64_t n = r.parts[i].count();
      if (n > static_cast<std::uint64_t>(INT64_MAX) / r.ask.width - total)
        refuse("server " + std::to_string(r.parts[i].server) + " has " +
               std::to_string(n) + " values, which no memory can hold");
      total += n;
    }
    r.ask.vals = r.ask.room(r.ask.target, total);
    char *at = r.ask.vals.data();
    for (std::size_t i = 0; i < r.used; i++) {
      Part &p = r.parts[i];
      p.nvals = p.count();
      p.vals = at;
      at += p.nvals * r.ask.width;
    }
    r.op = Op::kFetch;
  }

  // Sends a step to each server. Once one has it, what goes wrong is the request's error; before, it
  // is thrown if `first`.
  void send(Record &r, bool first) {
    for (std::size_t i = 0; i < r.used; i++) {
      try {
        send(r, r.parts[i]);
      } catch (...) {
        if (first && i == 0)
          throw;
        r.error = std::current_exception();
        return;
      }
    }
  }

  void send(Record &r, Part &p) {
    const Ask &a = r.ask;
    const std::uint64_t key = node_->key_for(p.server, app_, p.keys[0]);
    fserver::Tensor push[2], pull[2];
    push[0] = head_of(p, bytes_of_head(p.nkeys, p.nlens), key);
    write_head(r, p, push[0].as<char>());
    const fserver::Tensor vals = values(a, p, key + 1);
    std::size_t np = 1, nq = 0;
    if (r.op == Op::kPush)
      push[np++] = vals;
    else if (r.op == Op::kSize)
      pull[nq++] = p.slab->tensor(fserver::DType::kUInt8,
                                  {sizeof(std::uint64_t)}, key, p.at);
    else
      pull[nq++] = vals;
    if (a.wants_lens && r.op != Op::kSize && r.op != Op::kPush)
      pull[nq++] = tensor_of(a.lens.ptr(), p.lens_to, p.nkeys * sizeof(int),
                             key, fserver::kCpu);
    wait_for_ticket(r);
    p.handle = issue(p.server, {push, np}, {pull, nq});
    p.open = true;
    node_->issued(p.handle);
  }

  fserver::Handle issue(int server, fserver::Tensors push,
                        fserver::Tensors pull) {
    for (;;) {
      try {
        return node_->worker.push_pull_to(server, push, pull);
      } catch (
          const fserver::LimitError &) { // the node is used for more than ps
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }

  static fserver::Tensor values(const Ask &a, const Part &p,
                                std::uint64_t key) {
    const int device =
        a.vals.src_device_type_ == GPU ? a.vals.src_device_id_ : fserver::kCpu;
    return tensor_of(a.vals.ptr(), p.vals, p.nvals * a.width, key, device);
  }

  void write_head(const Record &r, const Part &p, char *to) const {
    Head h;
    h.op = r.op;
    h.flags = r.ask.wants_lens ? kWantsLens : 0;
    h.app = app_;
    h.customer = customer_;
    h.timestamp = timestamp_of(r.number);
    h.cmd = r.ask.cmd;
    h.width = r.ask.width;
    h.keys = p.nkeys;
    h.lens = p.nlens;
    h.vals = r.op == Op::kSize ? 0 : p.nvals;
    std::memcpy(to, &h, sizeof h);
    std::memcpy(to + sizeof h, p.keys, p.nkeys * sizeof(Key));
    if (p.nlens)
      std::memcpy(to + sizeof h + p.nkeys * sizeof(Key), p.lens,
                  p.nlens * sizeof(int));
  }

  // Waits until a request that is being sent may start another push_pull.
  void wait_for_ticket(Record &r) {
    for (;;) {
      const std::uint64_t newest = node_->newest.load();
      settle(r);
      const Part *p = first_open(r);
      r.floor = p ? p->handle.id() - 1 : newest;
      if (node_->has_room())
        return;
    }
  }

  void start_thread() {
    watch_.emplace(node_->worker);
    thread_ = std::thread([this] { run(); });
    id_ = thread_.get_id();
  }

  // Calls the callbacks of requests that have ended.
  void run() {
    Lock lock(mutex_);
    while (!stop_) {
      idle_ = callbacks_.empty();
      const bool armed = !idle_ && watch_->arm();
      bool ran = false;
      for (std::size_t i = 0; i < callbacks_.size() && !ran; i++)
        ran = advance(callbacks_[i]->number, lock) || ran;
      if (ran)
        continue;
      lock.unlock();
      if (idle_ || armed)
        watch_->sleep();
      else // the node is closed
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.lock();
    }
  }

  const std::shared_ptr<WorkerNode> node_;
  const int app_, customer_;
  const std::vector<Range> ranges_;

  std::mutex mutex_; // of what follows
  std::condition_variable changed_;
  Records records_;
  std::vector<Record *> ring_; // by number
  std::int64_t low_ = 0, next_ = 0;
  std::map<std::int64_t, std::exception_ptr> failures_;
  std::int64_t forgotten_ = -1;
  std::vector<Record *>
      callbacks_; // requests with one, in the order of their start
  std::vector<std::int64_t> running_; // whose callback runs
  bool stop_ = false, idle_ = false;
  std::optional<fserver::Watch> watch_;
  std::thread thread_;
  std::thread::id id_;
};

} // namespace ps::detail
