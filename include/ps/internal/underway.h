// What operations that are under way use. For the other headers alone.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

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

} // namespace ps::detail
