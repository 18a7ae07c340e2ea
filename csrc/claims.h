// Memory that the answers of open push_pulls are written to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fserver.h"
#include "holder.h"

namespace fserver {

// Which memory belongs to which push_pull. A push_pull has it until its word says
// that it has ended: nobody has to wait for it. One that has failed at one server
// may still be answered by another; a push_pull with the same push key may have the
// memory then, because a server answers those in order. Guarded by the GIL.
class Claims {
public:
  explicit Claims(const Holder &holder) : holder_(holder) {}

  // What one call claims. It lets go again unless it is kept.
  class Claim {
  public:
    // Claims the memory of the nq pull tensors behind np pushed ones; they share
    // none with each other. Refuses all, with a Python error, if another push_pull
    // has some of it.
    Claim(Claims &claims, const fs_tensor *all, size_t np, size_t nq);
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
  void clear() {
    all_.clear();
    replaced_.clear();
  }

private:
  struct Range {
    uintptr_t begin, end;
    fs_ticket ticket; // 0: of a call that has no ticket yet
    uint64_t handler;
    uint64_t key; // its first push key
    bool pushes;  // it has one
  };

  bool ended(const Range &r) const {
    return r.ticket != 0 && holder_.ended(r.ticket);
  }
  size_t find(uintptr_t address) const;
  Range *pending(const fs_tensor &t);
  void check(const fs_tensor *all, size_t np, size_t nq);
  void refuse(const Range &r, size_t i) const;
  void insert(const fs_tensor &t, const fs_tensor *first_push);
  void reserve(size_t n);

  const Holder &holder_;
  // In order, and none shares memory with another: those that do with a new
  // one have ended, and go. Others that have ended stay until there is no room.
  std::vector<Range> all_;
  // Those that had failed, and not ended, when another one took their memory.
  std::vector<Range> replaced_;
};

} // namespace fserver
