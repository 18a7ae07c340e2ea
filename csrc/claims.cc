#include "claims.h"

#include <algorithm>

#include "error.h"

namespace fserver {

// The first range that ends behind an address.
size_t Claims::find(uintptr_t address) const {
  auto r = std::partition_point(all_.begin(), all_.end(), [&](const Range &x) {
    return x.end <= address;
  });
  return static_cast<size_t>(r - all_.begin());
}

void Claims::check(const fs_tensor *all, size_t np, size_t nq) {
  const fs_tensor *pull = all + np;
  const auto in_order = [&](const Range &r) {
    return r.pushes && r.ticket != 0 && !holder_.open(r.ticket) &&
           std::any_of(all, pull,
                       [&](const fs_tensor &p) { return p.key == r.key; });
  };
  replaced_.erase(std::remove_if(replaced_.begin(), replaced_.end(),
                                 [&](const Range &r) { return ended(r); }),
                  replaced_.end());
  for (size_t i = 0; i < nq; i++) {
    if (!pull[i].bytes)
      continue;
    const auto begin = reinterpret_cast<uintptr_t>(pull[i].data);
    const uintptr_t end = begin + pull[i].bytes;
    for (size_t k = find(begin); k < all_.size() && all_[k].begin < end; k++)
      if (!ended(all_[k]) && !in_order(all_[k]))
        refuse(all_[k], i);
    for (const Range &r : replaced_)
      if (r.begin < end && begin < r.end && !in_order(r))
        refuse(r, i);
  }
}

void Claims::refuse(const Range &r, size_t i) const {
  const auto handler = static_cast<unsigned long long>(r.handler);
  if (r.ticket == 0)
    raise(Kind::kConfig,
          "push_pull: pull_tensors[%zu] shares memory with a pull tensor of a "
          "push_pull that another thread is calling (pass different pull "
          "tensors to each call)",
          i);
  if (holder_.open(r.ticket))
    raise(Kind::kConfig,
          "push_pull: pull_tensors[%zu] shares memory with a pull tensor of "
          "handler %llu, which has not completed (call wait(%llu) first, or "
          "pass different pull tensors to each call)",
          i, handler, handler);
  raise(
      Kind::kConfig,
      "push_pull: pull_tensors[%zu] shares memory with a pull tensor of "
      "handler %llu, which has failed at one server and which another one may "
      "still answer (pass different pull tensors, or the same push keys)",
      i, handler);
}

// Makes room for n more ranges. What has ended makes room first; so there are at
// most about twice as many as were open at once.
void Claims::reserve(size_t n) {
  if (all_.size() + n <= all_.capacity())
    return;
  all_.erase(std::remove_if(all_.begin(), all_.end(),
                            [&](const Range &r) { return ended(r); }),
             all_.end());
  if (2 * (all_.size() + n) > all_.capacity())
    all_.reserve(std::max<size_t>(64, 2 * (all_.size() + n)));
}

void Claims::insert(const fs_tensor &t, const fs_tensor *first_push) {
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  const Range r{begin,
                begin + t.bytes,
                0,
                0,
                first_push ? first_push->key : 0,
                first_push != nullptr};
  const auto first = all_.begin() + static_cast<ptrdiff_t>(find(begin));
  auto last = first;
  for (; last != all_.end() && last->begin < r.end; last++)
    if (!ended(*last))
      replaced_.push_back(*last);
  if (first == last) {
    all_.insert(first, r);
    return;
  }
  *first = r;
  all_.erase(first + 1, last);
}

Claims::Claim::Claim(Claims &claims, const fs_tensor *all, size_t np, size_t nq)
    : claims_(claims), pull_(all + np), n_(nq) {
  claims.check(all, np, nq);
  claims.reserve(nq);
  for (size_t i = 0; i < nq; i++) {
    if (pull_[i].bytes)
      claims.insert(pull_[i], np ? all : nullptr);
  }
}

// What a call without a ticket has claimed for a tensor; nullptr: nothing, or the
// node has been closed meanwhile.
Claims::Range *Claims::pending(const fs_tensor &t) {
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  const size_t k = find(begin);
  const bool there = t.bytes && k < all_.size() && all_[k].begin == begin &&
                     all_[k].ticket == 0;
  return there ? &all_[k] : nullptr;
}

void Claims::Claim::keep(fs_ticket ticket, uint64_t handler) {
  for (size_t i = 0; i < n_; i++) {
    if (Range *r = claims_.pending(pull_[i])) {
      r->ticket = ticket;
      r->handler = handler;
    }
  }
  n_ = 0;
}

Claims::Claim::~Claim() {
  for (size_t i = 0; i < n_; i++) {
    if (const Range *r = claims_.pending(pull_[i]))
      claims_.all_.erase(claims_.all_.begin() + (r - claims_.all_.data()));
  }
}

} // namespace fserver
