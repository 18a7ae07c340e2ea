// Numbers for allocations, under which the engine caches registrations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "fserver.h"
#include "tensor.h"

namespace fserver {

// Gives every allocation that is seen a number of its own, and tells the engine
// when the allocation is gone. Guarded by the GIL.
class Allocations {
public:
  // Sets t.alloc to the number of the allocation m that t lies in. True: the call may register it,
  // or wait until another thread has. It is new, or the engine may have given its registration up,
  // which it has done `given_up` times, or another thread is in a call that registers memory.
  bool number(fs_node node, const Memory &m, fs_tensor &t, uint64_t given_up);

  void clear() { known_.clear(); }

  // A call that numbers allocations. Unless the engine has taken it, it may have no registration
  // of any.
  class Call {
  public:
    explicit Call(Allocations &all) : all_(all) {}
    Call(const Call &) = delete;
    Call &operator=(const Call &) = delete;
    ~Call() {
      all_.registering_ -= registers_;
      if (taken)
        return;
      for (auto &k : all_.known_)
        k.second.given_up = UINT64_MAX;
    }
    // To be called once, before the GIL is given up: whether number() has returned true for any
    // of its tensors.
    void registers(bool fresh) {
      registers_ = fresh;
      all_.registering_ += fresh;
    }
    bool taken = false;

  private:
    Allocations &all_;
    bool registers_ = false;
  };

private:
  struct Known {
    WeakMemory memory; // keeps the key of the map from being used again
    const void *base;  // differ when the storage was resized
    uint64_t bytes;
    uint64_t number;
    uint64_t given_up; // at the last call
  };

  void sweep(fs_node node);

  std::unordered_map<const void *, Known> known_;
  uint64_t last_ = 0;
  uint32_t calls_ = 0;
  size_t limit_ = 64;
  int registering_ = 0; // calls that register memory, or wait for that
};

} // namespace fserver
