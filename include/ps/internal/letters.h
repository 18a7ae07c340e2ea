// Requests and responses of SimpleApp as messages of the engine, and the thread that takes them. For the
// other headers alone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "fserver/fserver.hpp"
#include "ps/internal/customer.h"
#include "ps/internal/serving.h"

namespace ps::detail {

// What a message of SimpleApp begins with; the body follows.
struct LetterHead {
  enum Kind : std::int32_t { kRequest, kResponse, kRefusal };
  static constexpr std::uint32_t kMagic = 0x70736c31;
  std::uint32_t magic = kMagic;
  std::int32_t kind = kRequest;
  std::int32_t app = 0, customer = 0; // customer: of who asks
  std::int32_t timestamp = 0;         // of who asks
  std::int32_t head = 0;
};

struct Letter {
  LetterHead head;
  fserver::Role role = fserver::Role::kScheduler; // of the sender
  int rank = 0;
  std::uint64_t run = 0;
  std::string body;
};

// What takes the letters of an app and customer.
class Reader {
public:
  // Takes a letter, and returns false if too many wait already.
  virtual bool take(Letter letter) = 0;
  virtual Customer *customer() = 0;
  // No letters come any more.
  virtual void closed() = 0;

protected:
  ~Reader() = default;
};

// The letters of a node.
class Letters {
public:
  explicit Letters(std::shared_ptr<fserver::Node> node)
      : node_(std::move(node)), thread_([this] { run(); }) {}
  Letters(const Letters &) = delete;
  Letters &operator=(const Letters &) = delete;
  ~Letters() { end(); }

  // Waits until the thread has ended, which it does when the node is closed.
  void end() {
    if (thread_.joinable())
      thread_.join();
  }

  // Throws ConfigError if there is such an app and customer, and ClosedError.
  void add(int app, int customer, Reader *reader) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (over_)
      throw fserver::ClosedError("SimpleApp: the node is closed");
    if (!readers_.emplace(std::make_pair(app, customer), reader).second)
      throw fserver::ConfigError(
          "SimpleApp: app_id " + std::to_string(app) +
          " has a SimpleApp with customer_id " + std::to_string(customer) +
          " already: use another number, or delete that first");
    std::deque<Held> held;
    held.swap(held_);
    held_bytes_ = 0;
    lock.unlock();
    for (Held &h : held)
      deliver(std::move(h.letter), h.until);
  }
  // The reader gets no letter when this has returned.
  void remove(int app, int customer) {
    std::lock_guard<std::mutex> lock(mutex_);
    readers_.erase({app, customer});
  }
  // The customer, or null.
  Customer *customer(int app, int number) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = readers_.find({app, number});
    return it == readers_.end() ? nullptr : it->second->customer();
  }

  // Throws as fserver::Node::send.
  void send(const fserver::Address &to, const LetterHead &head,
            const std::string &body) {
    if (body.size() > fserver::kMaxMessage - sizeof head)
      throw fserver::ConfigError(
          "SimpleApp: the body has " + std::to_string(body.size()) +
          " bytes, want at most " +
          std::to_string(fserver::kMaxMessage - sizeof head));
    std::string text(sizeof head, '\0');
    std::memcpy(text.data(), &head, sizeof head);
    node_->send(to, text += body);
  }
  // Tells who has sent a request that there is no response. Never throws.
  void refuse(const Letter &request, const std::string &why) noexcept {
    try {
      LetterHead head = request.head;
      head.kind = LetterHead::kRefusal;
      send({request.role, request.rank, request.run}, head, why.substr(0, 500));
    } catch (const std::exception &) { // nobody waits for it
    }
  }
  fserver::Node &node() { return *node_; }

private:
  using Clock = std::chrono::steady_clock;
  // A request that waits for its app.
  struct Held {
    Letter letter;
    Clock::time_point until;
  };
  static constexpr std::size_t kMaxHeld = 1024, kMaxHeldBytes = 16 << 20;

  // The reader of a letter: of a request, any customer of the app if there is none of that number.
  Reader *reader_of(const LetterHead &head) {
    auto it = readers_.find({head.app, head.customer});
    if (it == readers_.end() && head.kind == LetterHead::kRequest)
      it = readers_.lower_bound({head.app, INT32_MIN});
    return it == readers_.end() || it->first.first != head.app ? nullptr
                                                               : it->second;
  }
  void deliver(Letter letter, Clock::time_point until) {
    Letter copy; // of the head alone, for a refusal
    copy.head = letter.head;
    copy.role = letter.role;
    copy.rank = letter.rank;
    copy.run = letter.run;
    const char *why = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const bool asks = letter.head.kind == LetterHead::kRequest;
      if (Reader *r = reader_of(letter.head)) {
        if (!r->take(std::move(letter)) && asks)
          why = "too many requests wait for the app's handler";
      } else if (asks && held_.size() < kMaxHeld &&
                 held_bytes_ + letter.body.size() <= kMaxHeldBytes) {
        held_bytes_ += letter.body.size();
        held_.push_back({std::move(letter), until});
      } else if (asks) {
        why = "too many requests wait for apps that are not there";
      }
    }
    if (why)
      refuse(copy, why);
  }
  // Refuses what has waited too long, and returns how long the next may wait.
  fserver::Timeout overdue() {
    for (;;) {
      Letter letter;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (held_.empty())
          return fserver::kNoLimit;
        const auto left = held_.front().until - Clock::now();
        if (left > Clock::duration::zero())
          return left;
        letter = std::move(held_.front().letter);
        held_.pop_front();
        held_bytes_ -= letter.body.size();
      }
      refuse(letter, "there is no SimpleApp with app_id " +
                         std::to_string(letter.head.app));
    }
  }
  void run() {
    fserver::Mail mail;
    try {
      for (;;) {
        if (!node_->receive(mail, overdue()) ||
            mail.data.size() < sizeof(LetterHead))
          continue;
        Letter letter;
        std::memcpy(&letter.head, mail.data.data(), sizeof letter.head);
        if (letter.head.magic != LetterHead::kMagic)
          continue;
        letter.role = mail.role;
        letter.rank = mail.rank;
        letter.run = mail.run;
        letter.body = mail.data.substr(sizeof letter.head);
        deliver(std::move(letter),
                Clock::now() + std::chrono::milliseconds(app_wait_ms.load()));
      }
    } catch (const fserver::Error &) { // the node is closed
    }
    std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
    for (auto &[id, reader] : readers_)
      reader->closed();
  }

  const std::shared_ptr<fserver::Node> node_;
  mutable std::mutex mutex_; // of what follows
  std::map<std::pair<int, int>, Reader *> readers_;
  std::deque<Held> held_; // in the order of their deadlines
  std::size_t held_bytes_ = 0;
  bool over_ = false;
  std::thread thread_; // the last: it uses the others
};

} // namespace ps::detail
