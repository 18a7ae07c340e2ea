// SimpleApp: requests with a number and a text, between any two nodes.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ps/internal/letters.h"
#include "ps/internal/postoffice.h"

namespace ps {

// A request or a response that has come.
struct SimpleData {
  int head = 0;
  std::string body;
  int sender = 0;        // the ID of the node that has sent it
  int timestamp = 0;     // of the request
  int customer_id = 0;   // of who has made the request
  std::uint64_t run = 0; // of the sender: a response is for this run of it
};

// Each node that makes requests or answers them has a SimpleApp of the same app_id. Requests go to one node,
// or to groups; every receiver answers once. A request that comes before its app waits for it, up to 10
// seconds. Requests and responses are small (at most 999,976 bytes); they go by way of the scheduler.
//
// Handlers are called in a thread of the app, one at a time, in the order in which the messages have come. They may make
// requests, but not wait for them: responses are handled in the same thread.
class SimpleApp : private detail::Reader {
public:
  using Handle = std::function<void(const SimpleData &recved, SimpleApp *app)>;

  // office: the node, if the process has several; else Postoffice::Get(). Throws ConfigError if there is an app with
  // these numbers, and ClosedError before StartPS.
  SimpleApp(int app_id, int customer_id, Postoffice *office = nullptr)
      : SimpleApp(app_id, customer_id, office ? office : Postoffice::Get(), 0) {
  }
  SimpleApp(const SimpleApp &) = delete;
  SimpleApp &operator=(const SimpleApp &) = delete;
  // No handler runs when it has returned. Not to be called by a handler.
  virtual ~SimpleApp() {
    letters_->remove(customer_.app_id(), customer_.customer_id());
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // Sends a request to a node (its ID), or to groups (kScheduler, kServerGroup, kWorkerGroup and sums of them,
  // this node included). Returns its timestamp, for Wait, which throws what has gone wrong. Throws ConfigError for
  // wrong arguments.
  virtual int Request(int req_head, const std::string &req_body, int recv_id) {
    const fserver::Address to = address_of(recv_id);
    Asked asked;
    asked.error = capture([&] {
      for (const fserver::Member &m : letters_->node().members()) {
        if (m.role == fserver::Role::kScheduler)
          asked.scheduler = m.run;
        if ((fserver::Address(m.role, 0).roles & to.roles) &&
            (to.rank < 0 || to.rank == m.rank))
          asked.open.push_back({m.role, m.rank, m.run, false});
      }
    });
    int timestamp;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      timestamp = next_++;
      asked_[timestamp] = asked;
    }
    detail::LetterHead head;
    head.app = customer_.app_id();
    head.customer = customer_.customer_id();
    head.timestamp = timestamp;
    head.head = req_head;
    try {
      if (!asked.error)
        letters_->send(to, head, req_body);
    } catch (const fserver::ConfigError &) {
      std::lock_guard<std::mutex> lock(mutex_);
      asked_.erase(timestamp);
      throw;
    } catch (...) {
      fail(timestamp, std::current_exception());
    }
    return timestamp;
  }

  // Waits until all who got the request have answered, and their responses have been handled. Throws
  // PeerLostError if one of them, or the scheduler, is lost; RefusedError if its app is not there, or its handler
  // has thrown; LimitError if it does not receive messages; and ClosedError. Returns at once for
  // one that has ended.
  virtual void Wait(int timestamp) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (timestamp < first_ || timestamp >= next_)
      throw fserver::ConfigError("SimpleApp: Wait: timestamp is " +
                                 std::to_string(timestamp) +
                                 ", want one that Request has returned");
    auto look_at = std::chrono::steady_clock::now() + kLook;
    for (;;) {
      const auto it = asked_.find(timestamp);
      if (it == asked_.end())
        return;
      std::exception_ptr error = it->second.error;
      if (!error && closed_)
        error = std::make_exception_ptr(
            fserver::ClosedError("SimpleApp: Wait: the node is closed"));
      if (error) {
        asked_.erase(it);
        std::rethrow_exception(error);
      }
      changed_.wait_until(lock, look_at);
      if (std::chrono::steady_clock::now() < look_at)
        continue;
      look(lock, timestamp);
      look_at = std::chrono::steady_clock::now() + kLook;
    }
  }

  // Answers a request, which is to be done once; later, too, and from other threads. Does nothing if who
  // has sent it is gone.
  virtual void Response(const SimpleData &recv_req,
                        const std::string &res_body = "") {
    detail::LetterHead head;
    head.kind = detail::LetterHead::kResponse;
    head.app = customer_.app_id();
    head.customer = recv_req.customer_id;
    head.timestamp = recv_req.timestamp;
    head.head = recv_req.head;
    fserver::Address to = address_of(recv_req.sender);
    to.rank = std::max(to.rank, 0);
    to.run = recv_req.run;
    try {
      letters_->send(to, head, res_body);
    } catch (const fserver::PeerLostError &) { // nobody waits for it
    }
  }

  // What is done with requests. If it throws, the request is refused with the exception's text. Requests wait
  // for this call, up to 10 seconds from when the app was made; then they are answered with an empty body.
  virtual void set_request_handle(const Handle &request_handle) {
    set(on_request_, request_handle, "set_request_handle");
    std::lock_guard<std::mutex> lock(mutex_);
    handles_ = true;
    changed_.notify_all();
  }
  // What is done with responses; by default nothing.
  virtual void set_response_handle(const Handle &response_handle) {
    set(on_response_, response_handle, "set_response_handle");
  }
  virtual Customer *get_customer() { return &customer_; }

protected:
  // first: the timestamp of the first request.
  SimpleApp(int app_id, int customer_id, Postoffice *office, int first)
      : customer_(app_id, customer_id), letters_(office->letters("SimpleApp")),
        on_request_(std::make_shared<const Handle>(
            [](const SimpleData &r, SimpleApp *app) { app->Response(r); })),
        on_response_(std::make_shared<const Handle>(
            [](const SimpleData &, SimpleApp *) {})),
        first_(first), next_(first) {
    letters_->add(app_id, customer_id, this);
    thread_ = std::thread([this] { run(); });
  }

private:
  struct Peer {
    fserver::Role role;
    int rank;
    std::uint64_t run;
    bool answered = false; // its answer waits for its handler
    bool is(fserver::Role other, int other_rank) const {
      return role == other && rank == other_rank;
    }
  };
  // A request that has not ended.
  struct Asked {
    std::vector<Peer> open; // who have not answered
    bool missed = false;    // the last look found one of them gone
    std::uint64_t scheduler = 0;
    std::exception_ptr error;
  };
  static constexpr std::chrono::milliseconds kLook{100};
  static constexpr std::size_t kMaxWaiting = 1024, kMaxBytes = 16 << 20;

  template <class F> static std::exception_ptr capture(F &&f) {
    try {
      f();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  static fserver::Address address_of(int id) {
    if (id > 0 && id < 8)
      return fserver::Address::all(static_cast<std::uint32_t>(id));
    if (id < 8)
      throw fserver::ConfigError(
          "SimpleApp: recv_id is " + std::to_string(id) +
          ", want the ID of a node, or a sum of kScheduler, kServerGroup and "
          "kWorkerGroup");
    return {id % 2 ? fserver::Role::kWorker : fserver::Role::kServer,
            Postoffice::IDtoRank(id)};
  }
  static int id_of(fserver::Role role, int rank) {
    return role == fserver::Role::kWorker   ? Postoffice::WorkerRankToID(rank)
           : role == fserver::Role::kServer ? Postoffice::ServerRankToID(rank)
                                            : kScheduler;
  }

  // A handle is destroyed without the lock, because that may run code of the program.
  using Shared = std::shared_ptr<const Handle>;
  void set(Shared &handle, const Handle &to, const char *call) {
    if (!to)
      throw fserver::ConfigError(std::string("SimpleApp: ") + call +
                                 ": the handle is empty");
    Shared next = std::make_shared<const Handle>(to);
    std::lock_guard<std::mutex> lock(mutex_);
    handle.swap(next);
  }
  void fail(int timestamp, std::exception_ptr error) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = asked_.find(timestamp);
    if (it != asked_.end() && !it->second.error)
      it->second.error = std::move(error);
    changed_.notify_all();
  }
  // Ends a request if a node that it needs is gone, or leaves. That is at the second look that finds it so: its answer
  // may have come before, and be on its way through this process.
  void look(std::unique_lock<std::mutex> &lock, int timestamp) {
    lock.unlock();
    std::vector<fserver::Member> all;
    const std::exception_ptr broken =
        capture([&] { all = letters_->node().members(); });
    lock.lock();
    const auto it = asked_.find(timestamp);
    if (it == asked_.end() || it->second.error)
      return;
    it->second.error = broken;
    std::exception_ptr error;
    for (const fserver::Member &m : all) {
      std::uint64_t run =
          m.role == fserver::Role::kScheduler ? it->second.scheduler : m.run;
      bool needed = m.role == fserver::Role::kScheduler;
      for (const Peer &p : it->second.open) {
        if (p.is(m.role, m.rank) && !p.answered) {
          needed = true;
          run = p.run;
        }
      }
      if (needed && (m.state != fserver::Member::kPresent ||
                     (m.run && run && m.run != run)))
        error = gone(m);
    }
    if (error && it->second.missed)
      it->second.error = error;
    it->second.missed = error != nullptr;
  }
  // Who sent a response, of those who have not answered that request. Null: it has answered, Wait has thrown, or it was
  // not asked.
  Peer *asked(const detail::Letter &l) {
    const auto it = asked_.find(l.head.timestamp);
    if (it == asked_.end())
      return nullptr;
    for (Peer &p : it->second.open) {
      if (p.is(l.role, l.rank) && (!p.run || !l.run || p.run == l.run))
        return &p;
    }
    return nullptr;
  }
  static std::exception_ptr gone(const fserver::Member &m) {
    fs_error e{};
    e.code = -ECONNRESET;
    e.role = static_cast<std::int32_t>(m.role);
    e.rank = m.rank;
    const std::string text =
        std::string("SimpleApp: Wait: ") + fserver::name_of(m.role) + " " +
        std::to_string(m.rank) + " is gone, and has not answered";
    std::snprintf(e.reason, sizeof e.reason, "it has not answered");
    std::snprintf(e.text, sizeof e.text, "%s", text.c_str());
    return std::make_exception_ptr(fserver::PeerLostError(e));
  }
  static std::exception_ptr refused(const detail::Letter &l) {
    fs_error e{};
    e.code = -EREMOTEIO;
    e.role = static_cast<std::int32_t>(l.role);
    e.rank = l.rank;
    std::snprintf(e.reason, sizeof e.reason, "%s", l.body.c_str());
    std::snprintf(e.text, sizeof e.text,
                  "SimpleApp: Wait: %s %d has refused the request: %s",
                  fserver::name_of(l.role), l.rank, e.reason);
    return std::make_exception_ptr(fserver::RefusedError(e));
  }

  Customer *customer() override { return &customer_; }
  bool take(detail::Letter letter) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (letter.head.kind != detail::LetterHead::kRequest) {
      Peer *from = asked(letter); // so responses are no more than the requests
      if (!from || from->answered)
        return true;
      from->answered = true;
    } else if (letters_in_.size() >= kMaxWaiting ||
               bytes_in_ + letter.body.size() > kMaxBytes) {
      return false;
    }
    bytes_in_ += letter.body.size();
    letters_in_.push_back(std::move(letter));
    changed_.notify_all();
    return true;
  }
  void closed() override {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  // The next letter that can be handled.
  std::deque<detail::Letter>::iterator next() {
    const bool ready =
        handles_ || std::chrono::steady_clock::now() >= default_from_;
    return std::find_if(
        letters_in_.begin(), letters_in_.end(), [&](const detail::Letter &l) {
          return ready || l.head.kind != detail::LetterHead::kRequest;
        });
  }
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const auto it = next();
      if (ends_)
        return;
      if (it == letters_in_.end()) {
        if (letters_in_.empty())
          changed_.wait(lock);
        else
          changed_.wait_until(lock, default_from_);
        continue;
      }
      const detail::Letter l = std::move(*it);
      letters_in_.erase(it);
      bytes_in_ -= l.body.size();
      if (l.head.kind == detail::LetterHead::kRequest)
        handle_request(lock, l);
      else
        handle_response(lock, l);
    }
  }
  static SimpleData data_of(const detail::Letter &l) {
    return {l.head.head,      l.body,          id_of(l.role, l.rank),
            l.head.timestamp, l.head.customer, l.run};
  }
  void handle_request(std::unique_lock<std::mutex> &lock,
                      const detail::Letter &l) {
    Shared handle = on_request_;
    lock.unlock();
    try {
      (*handle)(data_of(l), this);
    } catch (const std::exception &e) {
      letters_->refuse(l, e.what());
    } catch (...) {
      letters_->refuse(l, "the handler has thrown what is no std::exception");
    }
    handle.reset();
    lock.lock();
  }
  void handle_response(std::unique_lock<std::mutex> &lock,
                       const detail::Letter &l) {
    const Peer *from = asked(l);
    if (!from)
      return; // Wait has thrown
    std::vector<Peer> &open = asked_[l.head.timestamp].open;
    open.erase(open.begin() + (from - open.data()));
    std::exception_ptr error;
    if (l.head.kind == detail::LetterHead::kRefusal) {
      error = refused(l);
    } else {
      Shared handle = on_response_;
      lock.unlock();
      error = capture([&] { (*handle)(data_of(l), this); });
      handle.reset();
      lock.lock();
    }
    const auto it = asked_.find(l.head.timestamp);
    if (it == asked_.end())
      return;
    if (error && !it->second.error)
      it->second.error = error;
    if (it->second.open.empty() && !it->second.error)
      asked_.erase(it);
    changed_.notify_all();
  }

  Customer customer_;
  const std::shared_ptr<detail::Letters> letters_;
  std::mutex mutex_; // of what follows
  std::condition_variable changed_;
  Shared on_request_, on_response_;
  std::deque<detail::Letter> letters_in_;
  std::size_t bytes_in_ = 0;
  std::map<int, Asked> asked_; // by timestamp
  const int first_;
  int next_; // timestamp
  bool closed_ = false, ends_ = false;
  bool handles_ = false; // set_request_handle has been called
  const std::chrono::steady_clock::time_point default_from_ =
      std::chrono::steady_clock::now() +
      std::chrono::milliseconds(detail::app_wait_ms.load());
  std::thread thread_;
};

} // namespace ps
