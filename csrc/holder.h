// Memory that is kept until the engine is done with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fserver.h"
#include "tensor.h"

namespace fserver {

// Keeps the memory of tickets until their completion words say that they have
// ended. Nothing has to be called for that: every call into the node looks at a
// few of them, so memory is bounded by what is under way, also for a user who
// never waits. Guarded by the GIL.
class Holder {
public:
  void attach(const volatile uint64_t *words, uint64_t mask) {
    words_ = words;
    mask_ = mask;
  }

  bool done(fs_ticket t) const { return word(t) == (t << 2 | 1); }
  // Under way, and nothing is wrong with it so far.
  bool open(fs_ticket t) const { return word(t) == t << 2; }
  // A word of another ticket: t has ended and its place was given on.
  bool ended(fs_ticket t) const {
    uint64_t w = word(t);
    return w >> 2 != t || (w & 3) == 1 || (w & 3) == 2;
  }

  // An empty list, with capacity from earlier use.
  std::vector<Memory> list();
  void give_back(std::vector<Memory> list);

  // Keeps list until t has ended.
  void hold(fs_ticket t, std::vector<Memory> list);
  // Looks at a few tickets, each time at other ones.
  void reap();
  // Looks at one.
  void reap(fs_ticket t);
  // Lets go of everything: the node is closed.
  void clear();

  size_t size() const { return held_.size(); }

private:
  struct Held {
    fs_ticket ticket;
    std::vector<Memory> list;
  };

  uint64_t word(fs_ticket t) const {
    return __atomic_load_n(&words_[t & mask_], __ATOMIC_ACQUIRE);
  }
  void release(size_t i);

  const volatile uint64_t *words_ = nullptr;
  uint64_t mask_ = 0;
  std::vector<Held> held_;
  size_t next_ = 0; // where reap goes on
  std::vector<std::vector<Memory>> spare_;
};

// A list on its way to hold(); goes back if there is an error before.
class Lease {
public:
  explicit Lease(Holder &h) : holder_(h), list_(h.list()) {}
  ~Lease() {
    if (!kept_)
      holder_.give_back(std::move(list_));
  }
  void add(Memory m) { list_.push_back(std::move(m)); }
  // Keeps the list for t, unless t has ended already, as small answers have.
  void keep(fs_ticket t) {
    if (holder_.ended(t))
      return;
    kept_ = true;
    holder_.hold(t, std::move(list_));
  }

private:
  Holder &holder_;
  std::vector<Memory> list_;
  bool kept_ = false;
};

// The tensors of one call, which stay alive until the engine has taken them.
struct Tensors {
  Tensors(Holder &h, size_t n) : all(n), pins(n), lease(h) {}
  // Reads argument i (see read_tensor) into t, which is one of all.
  Memory read(PyObject *o, Arg arg, size_t i, Access access, int device,
              fs_tensor &t) {
    Memory m = read_tensor(pins.add(o), arg, static_cast<Py_ssize_t>(i), access,
                           device, &t);
    on_gpu |= t.device >= 0;
    return m;
  }

  Array<fs_tensor, 16> all;
  Pins pins;
  Lease lease;
  uint64_t bytes = 0;  // on the CPU, which the calling thread may have to send
  bool on_gpu = false; // a tensor is on a GPU
  bool fresh = false;  // the engine has to register memory first
};

} // namespace fserver
