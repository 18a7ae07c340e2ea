// What operations that are under way use. For the other headers alone.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fserver/node.hpp"

namespace ps::detail {

// Entries that are kept until their operations have ended, in whatever order that is. An entry stays where it is.
template <class T> class Underway {
public:
  // Returns a new entry. First lets go of those for which ended(entry) is true, of the next few: so one whose
  // operation takes long keeps no other.
  template <class Ended> T &add(Ended &&ended) {
    for (int i = 0; i < kLook && !open_.empty(); i++) {
      if (at_ >= open_.size())
        at_ = 0;
      T *const entry = open_[at_];
      if (!ended(*entry)) {
        at_++;
        continue;
      }
      *entry = T();
      free_.push_back(entry);
      open_[at_] = open_.back();
      open_.pop_back();
    }
    if (free_.empty()) {
      free_.push_back(&all_.emplace_back());
      if (free_.capacity() < all_.size()) // so that the loop needs no memory
        free_.reserve(2 * all_.size());
    }
    open_.push_back(free_.back());
    free_.pop_back();
    return *open_.back();
  }

private:
  static constexpr int kLook = 4;
  std::deque<T> all_;
  std::vector<T *> open_, free_;
  std::size_t at_ = 0; // in open_: the next to look at
};

// Memory that the engine uses. It stays when the object that has given it goes.
class Kept {
public:
  // Keeps memory until an operation of the node has ended.
  void until_ended(const fserver::Node &node, const fserver::Handle &h,
                   std::shared_ptr<void> memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    operations_.add([&](const Entry &e) { return node.ended(e.handle); }) =
        Entry{h, std::move(memory)};
  }
  // Keeps memory until the node is closed.
  void until_closed(std::shared_ptr<void> memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    registered_.push_back(std::move(memory));
  }
  // Lets go of all: the node is closed.
  void closed() {
    std::lock_guard<std::mutex> lock(mutex_);
    operations_ = {};
    registered_.clear();
  }

private:
  struct Entry {
    fserver::Handle handle;
    std::shared_ptr<void> memory;
  };
  std::mutex mutex_;
  Underway<Entry> operations_;
  std::vector<std::shared_ptr<void>> registered_;
};

} // namespace ps::detail
