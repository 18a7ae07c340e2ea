#include "holder.h"

namespace fserver {
namespace {

// More than one ticket comes per call, so what has ended cannot pile up.
constexpr size_t kLooks = 4;

} // namespace

std::vector<Memory> Holder::list() {
  if (spare_.empty())
    return {};
  std::vector<Memory> list = std::move(spare_.back());
  spare_.pop_back();
  return list;
}

void Holder::give_back(std::vector<Memory> list) {
  list.clear(); // may run Python code, which may call us: list is ours alone
  if (list.capacity())
    spare_.push_back(std::move(list));
}

void Holder::hold(fs_ticket t, std::vector<Memory> list) {
  held_.push_back({t, std::move(list)});
}

void Holder::release(size_t i) {
  std::vector<Memory> list = std::move(held_[i].list);
  if (i + 1 != held_.size())
    held_[i] = std::move(held_.back());
  held_.pop_back();
  give_back(std::move(list));
}

void Holder::reap() {
  for (size_t n = 0; n < kLooks && !held_.empty(); n++) {
    if (next_ >= held_.size())
      next_ = 0;
    if (ended(held_[next_].ticket))
      release(next_);
    else
      next_++;
  }
}

void Holder::reap(fs_ticket t) {
  if (!ended(t))
    return;
  for (size_t i = held_.size(); i-- > 0;) {
    if (held_[i].ticket == t) {
      release(i);
      return;
    }
  }
}

void Holder::clear() {
  std::vector<Held> held = std::move(held_);
  held_.clear();
}

} // namespace fserver
