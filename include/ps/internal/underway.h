// What operations that are under way use. For the other headers alone.
#pragma once

#include <array>
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
  static constexpr std::size_t kLook = 4;

public:
  // Entries to destroy without a lock, because that may run code of the program.
  using Gone = std::array<T, kLook>;

  // Returns a new entry. First moves those for which ended(entry) is true, of the next few, to *gone: so one whose
  // operation takes long keeps no other.
  template <class Ended> T &add(Ended &&ended, Gone *gone) {
    for (std::size_t i = 0; i < kLook && !open_.empty(); i++) {
      if (at_ >= open_.size())
        at_ = 0;
      T *const entry = open_[at_];
      if (!ended(*entry)) {
        at_++;
        continue;
      }
      (*gone)[i] = std::exchange(*entry, T());
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
  // Moves out what the entries keep for which ended(entry) is true.
  template <class Ended> std::vector<T> take(Ended &&ended) {
    std::vector<T> taken;
    taken.reserve(open_.size());
    for (T *entry : open_) {
      if (ended(*entry))
        taken.push_back(std::move(*entry));
    }
    return taken;
  }

private:
  std::deque<T> all_;
  std::vector<T *> open_, free_;
  std::size_t at_ = 0; // in open_: the next to look at
};

// Memory that the engine uses. It stays when the object that has given it goes.
class Kept {
  struct Entry {
    fserver::Handle handle;
    std::shared_ptr<void> memory;
  };

public:
  using Gone = Underway<Entry>::Gone;

  // Keeps memory until an operation of the node has ended. Moves that of others to *gone.
  void until_ended(const fserver::Node &node, const fserver::Handle &h,
                   std::shared_ptr<void> memory, Gone *gone) {
    std::lock_guard<std::mutex> lock(mutex_);
    operations_.add([&](const Entry &e) { return node.ended(e.handle); },
                    gone) = Entry{h, std::move(memory)};
  }
  // Keeps memory until the node is closed.
  void until_closed(std::shared_ptr<void> memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    registered_.push_back(std::move(memory));
  }
  // Lets go of all: the node is closed.
  void closed() {
    Underway<Entry> operations;
    std::vector<std::shared_ptr<void>> registered;
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(operations, operations_);
    registered.swap(registered_);
  }

private:
  std::mutex mutex_;
  Underway<Entry> operations_;
  std::vector<std::shared_ptr<void>> registered_;
};

} // namespace ps::detail
