#include "holder.h"

#include "process.h"

namespace fserver {
namespace {

// More than one ticket comes per call, so what has ended cannot pile up.
constexpr size_t kLooks = 4;

// Looks at a word, some ns each, between two at the clock.
constexpr int kLooksPerClock = 32;

} // namespace

bool Holder::watch(fs_ticket t, int64_t ns) const {
  if (ns <= 0)
    return false;
  const int64_t end = now_ns() + ns;
  do {
    for (int i = 0; i < kLooksPerClock; i++)
      if (ended(t))
        return done(t);
  } while (now_ns() < end);
  return false;
}

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
