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

void Claims::check(const fs_tensor *pull, size_t n) const {
  for (size_t i = 0; i < n; i++) {
    if (!pull[i].bytes)
      continue;
    const auto begin = reinterpret_cast<uintptr_t>(pull[i].data);
    const uintptr_t end = begin + pull[i].bytes;
    for (size_t k = find(begin); k < all_.size() && all_[k].begin < end; k++) {
      const Range &r = all_[k];
      if (!open(r))
        continue;
      if (r.ticket == 0)
        raise(Kind::kConfig,
              "push_pull: pull_tensors[%zu] shares memory with a pull tensor "
              "of a push_pull that another thread is calling (pass different "
              "pull tensors to each call)",
              i);
      raise(Kind::kConfig,
            "push_pull: pull_tensors[%zu] shares memory with a pull tensor of "
            "handler %llu, which has not completed (call wait(%llu) first, or "
            "pass different pull tensors to each call)",
            i, static_cast<unsigned long long>(r.handler),
            static_cast<unsigned long long>(r.handler));
    }
  }
}

// Makes room for n more ranges. What has ended makes room first; so there are at
// most about twice as many as were open at once.
void Claims::reserve(size_t n) {
  if (all_.size() + n <= all_.capacity())
    return;
  all_.erase(std::remove_if(all_.begin(), all_.end(),
                            [&](const Range &r) { return !open(r); }),
             all_.end());
  if (2 * (all_.size() + n) > all_.capacity())
    all_.reserve(std::max<size_t>(64, 2 * (all_.size() + n)));
}

void Claims::insert(const fs_tensor &t) {
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  const Range r{begin, begin + t.bytes, 0, 0};
  const auto first = all_.begin() + static_cast<ptrdiff_t>(find(begin));
  auto last = first;
  while (last != all_.end() && last->begin < r.end)
    last++;
  if (first == last) {
    all_.insert(first, r);
    return;
  }
  *first = r;
  all_.erase(first + 1, last);
}

Claims::Claim::Claim(Claims &claims, const fs_tensor *pull, size_t n)
    : claims_(claims), pull_(pull), n_(n) {
  claims.check(pull, n);
  claims.reserve(n);
  for (size_t i = 0; i < n; i++) {
    if (pull[i].bytes)
      claims.insert(pull[i]);
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
