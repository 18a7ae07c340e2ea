// How a server takes requests and hands them to its apps. For the other headers alone.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fserver/fserver.hpp"
#include "ps/internal/logging.h"
#include "ps/internal/nodes.h"
#include "ps/internal/underway.h"
#include "ps/internal/wire.h"
#include "ps/sarray.h"

namespace ps::detail {

// How long a request waits for a KVServer of its app that has a handler, in milliseconds.
inline std::atomic<int> app_wait_ms{10000};

// A request that has been checked, and its keys and lens.
struct Taken {
  const fserver::Request &request;
  const Head &head;
  const Key *keys;
  const int *lens; // head.lens of them
};

// Whether a server has an error because all its workers have left or are lost. Others may follow them: look again
// after kNoWorker.
inline bool no_worker(const fserver::Server &server, const fserver::Error &e) {
  return !server.closed() && (e.code() == ESHUTDOWN || e.code() == ECONNRESET);
}
constexpr std::chrono::milliseconds kNoWorker{100};

// What takes the requests of an app.
class App {
public:
  virtual bool ready() const = 0;
  virtual void take(const Taken &taken) = 0;
  // Lets go of what is kept for workers that are lost. Called now and then.
  // Returns what it lets go of.
  virtual std::shared_ptr<void> tend() = 0;

protected:
  ~App() = default;
};

// A server, and the thread that takes its requests, which add() starts.
class ServerNode {
public:
  ServerNode(int index, int rank)
      : server(options_of(index, rank, index == 0)) {}
  ServerNode(const ServerNode &) = delete;
  ServerNode &operator=(const ServerNode &) = delete;
  ~ServerNode() {
    server.close();
    end();
  }

  // Throws ConfigError if there is such an app.
  void add(int id, App *app) {
    std::lock_guard<std::recursive_mutex> lock(calling_);
    if (!apps_.emplace(id, app).second)
      throw fserver::ConfigError(
          "KVServer: app_id " + std::to_string(id) +
          " has a KVServer already: use another number, or delete that first");
    serve();
  }
  // No handler of the app runs when this has returned.
  void remove(int id) {
    std::lock_guard<std::recursive_mutex> lock(calling_);
    apps_.erase(id);
  }
  // Runs f while no handler runs.
  template <class F> void apart(F &&f) {
    std::lock_guard<std::recursive_mutex> lock(calling_);
    f();
  }
  void serve() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable())
      thread_ = std::thread([this] { run(); });
  }
  // Whether this is the thread that calls the handlers.
  bool is_serving() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return thread_.get_id() == std::this_thread::get_id();
  }
  // Serves until all workers have left or are gone. Not to be called by a handler.
  void finish() {
    serve();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      leaving_ = true;
    }
    changed_.notify_all();
    end();
  }

  // Answers a request. Returns false if the worker is gone. The answer is let go of by later calls, when it has been
  // sent: they move it to *gone.
  struct Answer {
    fserver::Handle handle;
    bool tried = false; // respond has returned
    SArray<char> vals;
    SArray<int> lens;
    std::uint64_t count = 0;
  };
  using Gone = Underway<Answer>::Gone;
  template <class Fill>
  bool answer(std::uint64_t handler, Gone *gone, Fill &&fill) {
    Answer &a = answer(gone);
    bool there = true;
    fserver::Tensor tensors[2];
    const std::size_t n = fill(a, tensors);
    try {
      a.handle = respond(handler, {tensors, n});
    } catch (const fserver::PeerLostError &) { // nobody waits for it
      there = false;
    } catch (...) { // nothing is sent
      const SArray<char> vals = std::move(a.vals);
      const SArray<int> lens = std::move(a.lens);
      tried(a);
      throw;
    }
    tried(a);
    release(handler);
    return there;
  }

  void fail(std::uint64_t handler, const std::string &text) noexcept {
    try {
      server.fail(handler, text);
    } catch (
        const fserver::Error &) { // answered already, or nobody waits for it
    }
    release(handler);
  }

  // Lets go of all that is kept: the server is closed.
  void closed() {
    kept.closed();
    std::vector<Answer> gone;
    std::lock_guard<std::mutex> lock(mutex_);
    gone = answers_.take([](const Answer &a) { return a.tried; });
  }

  Kept kept; // goes after the server
  fserver::Server server;

private:
  // A request that keeps its memory until it is answered, and its head if that was copied.
  struct Held {
    fserver::Request request;
    std::vector<std::uint64_t> head;
  };
  struct Parked {
    fserver::Request request;
    std::int64_t deadline;
  };
  static constexpr std::size_t kMostParked = 1024;
  static constexpr std::int64_t kTend = INT64_C(1000000000);

  void end() {
    std::thread thread;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      thread.swap(thread_);
    }
    if (thread.joinable())
      thread.join();
  }

  void run() {
    fserver::Batch batch;
    for (;;) {
      try {
        tend();
        const bool got = server.get_unicasts(batch, patience());
        retry();
        for (std::size_t i = 0; got && i < batch.size(); i++)
          take(batch[i]);
      } catch (const fserver::Error &e) {
        if (!goes_on(e))
          return;
      }
    }
  }

  // Waits a moment if all workers have left or are lost, and others may follow them. Returns false if no more requests
  // are to be taken.
  bool goes_on(const fserver::Error &e) {
    if (!no_worker(server, e)) {
      if (!server.closed())
        PS_LOG(ERROR) << "the server takes no more requests: " << e.what();
      return false;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    if (leaving_)
      return false;
    changed_.wait_for(lock, kNoWorker);
    return true;
  }

  // How long to wait for requests before there is something else to do.
  fserver::Timeout patience() const {
    if (!parked_.empty())
      return std::chrono::milliseconds(20);
    return sized_ ? fserver::Timeout(kTend) : fserver::kNoLimit;
  }

  // Has the apps let go of what they keep for workers that are lost, once a second.
  void tend() {
    const std::int64_t now = fserver::detail::now_ns();
    if (!sized_ || now < tended_ + kTend)
      return;
    tended_ = now;
    std::vector<std::shared_ptr<void>> gone; // is let go of without the lock
    std::lock_guard<std::recursive_mutex> lock(calling_);
    gone.reserve(apps_.size());
    for (const auto &[id, app] : apps_)
      gone.push_back(app->tend());
  }

  // Hands a request to its app, or keeps it until there is one.
  void take(fserver::Request &r) {
    Head h;
    std::string wrong = read_head(r, &h);
    if (wrong.empty())
      wrong = check_answers(r, h);
    if (!wrong.empty())
      return fail(r.handler(), wrong);
    sized_ = sized_ || h.op == Op::kSize;
    std::lock_guard<std::recursive_mutex> lock(calling_);
    if (App *app = ready(h.app))
      return hand(*app, r, h);
    if (parked_.size() == kMostParked)
      return fail(r.handler(), missing(h.app) + ", and " +
                                   std::to_string(kMostParked) +
                                   " requests wait for one");
    const std::int64_t limit = app_wait_ms.load() * INT64_C(1000000);
    parked_.push_back({std::move(r), fserver::detail::now_ns() + limit});
  }

  static std::string missing(int app) {
    return "this server has no KVServer with a handler for app_id " +
           std::to_string(app);
  }
  App *ready(int id) {
    const auto it = apps_.find(id);
    return it != apps_.end() && it->second->ready() ? it->second : nullptr;
  }

  // Hands on the requests whose app has come, in their order, and refuses those that have waited too long.
  void retry() {
    std::lock_guard<std::recursive_mutex> lock(calling_);
    for (std::size_t i = 0; i < parked_.size();) {
      Head h;
      std::memcpy(&h, parked_[i].request[0].data, sizeof h);
      App *app = ready(h.app);
      if (!app && fserver::detail::now_ns() < parked_[i].deadline) {
        i++;
        continue;
      }
      fserver::Request r = std::move(parked_[i].request);
      parked_.erase(parked_.begin() + static_cast<std::ptrdiff_t>(i));
      if (app)
        take(r);
      else
        fail(r.handler(), missing(h.app));
    }
  }

  void hand(App &app, fserver::Request &request, const Head &h) {
    const std::uint64_t handler = request.handler();
    try {
      begin(handler);
      give(app, request, h);
      keep(handler, request);
    } catch (const std::exception &e) {
      fail(handler, e.what());
    } catch (...) {
      fail(handler, "the handler has thrown what is no std::exception");
    }
  }

  void give(App &app, fserver::Request &request, const Head &h) {
    const std::uint64_t handler = request.handler();
    const fserver::Request *r = &request;
    const char *body = r->tensors()[0].as<char>() + sizeof(Head);
    // Keys in memory that the worker can still change would be other ones than those checked.
    if (r->lent() || reinterpret_cast<std::uintptr_t>(body) % alignof(Key)) {
      Held &held = hold(handler, request);
      r = &held.request;
      body = reinterpret_cast<const char *>(held.head.data());
    }
    const auto *keys = reinterpret_cast<const Key *>(body);
    const auto *lens = reinterpret_cast<const int *>(keys + h.keys);
    if (const std::string wrong = check_keys(h, keys, lens); !wrong.empty())
      return fail(handler, wrong);
    app.take({*r, h, keys, lens});
  }

  void begin(std::uint64_t handler) {
    std::lock_guard<std::mutex> lock(mutex_);
    current_ = handler;
  }
  // Keeps a request that the handler has not answered.
  void keep(std::uint64_t handler, fserver::Request &request) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (current_ == handler && !held_.count(handler))
      held_[handler].request = std::move(request);
  }
  Held &hold(std::uint64_t handler, fserver::Request &request) {
    const fserver::Tensor &t = request.tensors()[0];
    const std::size_t bytes = t.bytes - sizeof(Head);
    Held held;
    held.head.resize((bytes + 7) / 8);
    std::memcpy(held.head.data(), t.as<char>() + sizeof(Head), bytes);
    held.request = std::move(request);
    std::lock_guard<std::mutex> lock(mutex_);
    return held_[handler] = std::move(held);
  }
  void release(std::uint64_t handler) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    held_.erase(handler);
    if (current_ == handler)
      current_.reset();
  }

  // A new answer, which stays where it is until it has been sent.
  Answer &answer(Gone *gone) {
    std::lock_guard<std::mutex> lock(mutex_);
    return answers_.add(
        [this](const Answer &a) { return a.tried && server.ended(a.handle); },
        gone);
  }
  void tried(Answer &a) {
    std::lock_guard<std::mutex> lock(mutex_);
    a.tried = true;
  }

  // Server::respond; waits while 4,096 answers have not left.
  fserver::Handle respond(std::uint64_t handler, fserver::Tensors tensors) {
    for (;;) {
      try {
        return server.respond(tensors, handler);
      } catch (const fserver::LimitError &) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    }
  }

  std::recursive_mutex calling_; // of apps_, and while a handler runs
  std::map<int, App *> apps_;
  // Of the thread: requests in the order of their arrival; whether a worker has asked for a size, since when apps may
  // keep something; when they were tended.
  std::vector<Parked> parked_;
  bool sized_ = false;
  std::int64_t tended_ = 0;
  mutable std::mutex mutex_; // of what follows
  std::condition_variable changed_;
  bool leaving_ = false;
  std::thread thread_;
  std::unordered_map<std::uint64_t, Held> held_; // by handler
  // The handler of the request that was taken last, unless it has been answered.
  std::optional<std::uint64_t> current_;
  Underway<Answer> answers_;
};

} // namespace ps::detail
