// Memory that the answers of open push_pulls are written to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fserver.h"
#include "holder.h"

namespace fserver {

// Which memory belongs to which open push_pull. A push_pull is open until its
// word says otherwise: nobody has to wait for it. Guarded by the GIL.
class Claims {
public:
  explicit Claims(const Holder &holder) : holder_(holder) {}

  // What one call claims. It lets go again unless it is kept.
  class Claim {
  public:
    // Claims the memory of n pull tensors, which share none with each other.
    // Refuses all, with a Python error, if an open push_pull has some of it.
    Claim(Claims &claims, const fs_tensor *pull, size_t n);
    ~Claim();
    Claim(const Claim &) = delete;
    Claim &operator=(const Claim &) = delete;
    // The push_pull of a handler has the memory now.
    void keep(fs_ticket ticket, uint64_t handler);

  private:
    Claims &claims_;
    const fs_tensor *pull_;
    size_t n_; // 0: kept
  };

  // Lets go of everything: the node is closed.
  void clear() { all_.clear(); }

private:
  struct Range {
    uintptr_t begin, end;
    fs_ticket ticket; // 0: of a call that has no ticket yet
    uint64_t handler;
  };

  bool open(const Range &r) const {
    return r.ticket == 0 || holder_.open(r.ticket);
  }
  size_t find(uintptr_t address) const;
  Range *pending(const fs_tensor &t);
  void check(const fs_tensor *pull, size_t n) const;
  void insert(const fs_tensor &t);
  void reserve(size_t n);

  const Holder &holder_;
  // In order, and none shares memory with another: those that do with a new
  // one have ended, and go. Others that have ended stay until there is no room.
  std::vector<Range> all_;
};

} // namespace fserver
