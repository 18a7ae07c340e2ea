#include "allocations.h"

#include <algorithm>

namespace fserver {
namespace {

// A sweep looks at every allocation, so it is made every so many calls, and
// before the map grows.
constexpr uint32_t kCallsPerSweep = 1024;

} // namespace

bool Allocations::number(fs_node node, const Memory &m, fs_tensor &t,
                         uint64_t given_up) {
  if (++calls_ >= kCallsPerSweep)
    sweep(node);
  auto it = known_.find(m.get());
  if (it == known_.end()) {
    if (known_.size() >= limit_)
      sweep(node);
    it = known_.emplace(m.get(), Known{WeakMemory(m), nullptr, 0, 0, 0}).first;
  }
  Known &k = it->second;
  const bool fresh = k.base != t.base || k.bytes != t.base_bytes;
  if (fresh) {
    if (k.number)
      fs_forget(node, k.number);
    k.base = t.base;
    k.bytes = t.base_bytes;
    k.number = ++last_;
  }
  t.alloc = k.number;
  const bool again = k.given_up != given_up;
  k.given_up = given_up;
  return fresh || again || registering_;
}

void Allocations::sweep(fs_node node) {
  calls_ = 0;
  for (auto it = known_.begin(); it != known_.end();) {
    if (it->second.memory.expired()) {
      fs_forget(node, it->second.number);
      it = known_.erase(it);
    } else {
      ++it;
    }
  }
  limit_ = std::max<size_t>(64, 2 * known_.size());
}

} // namespace fserver
