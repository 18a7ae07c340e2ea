// Messages between nodes, and who the nodes are.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "fserver.h"

namespace fserver {

enum class Role : std::int32_t {
  kScheduler = FS_ROLE_SCHEDULER,
  kWorker = FS_ROLE_WORKER,
  kServer = FS_ROLE_SERVER
};

inline const char *name_of(Role r) {
  return r == Role::kWorker   ? "worker"
         : r == Role::kServer ? "server"
                              : "scheduler";
}

constexpr std::size_t kMaxMessage = FS_MAX_MESSAGE; // bytes

// Whom a message is for.
struct Address {
  // One node. With a run (Mail::run, Member::run), no process that has taken its place.
  Address(Role role, int node_rank, std::uint64_t of_run = 0)
      : roles(role == Role::kWorker   ? FS_TO_WORKERS
              : role == Role::kServer ? FS_TO_SERVERS
                                      : FS_TO_SCHEDULER),
        rank(node_rank), run(of_run) {}
  // All nodes of the roles FS_TO_SCHEDULER, FS_TO_SERVERS and FS_TO_WORKERS, of which this is a sum.
  static Address all(std::uint32_t roles) {
    Address a(Role::kScheduler, -1);
    a.roles = roles;
    return a;
  }

  std::uint32_t roles;
  int rank;
  std::uint64_t run;
};

// A message that has come. If it is used again, its memory is too.
struct Mail {
  Role role = Role::kScheduler; // of the sender
  int rank = 0;
  std::uint64_t run = 0;
  std::string data;
};

// What is known of a node.
struct Member {
  enum State { kPresent = FS_PRESENT, kLost = FS_LOST, kLeft = FS_LEFT };
  Role role;
  int rank;
  State state;
  std::uint64_t run; // of the last process that had this place; 0: not known
  std::chrono::nanoseconds silent; // since it was heard; below 0: not heard by
                                   // this node directly
};

} // namespace fserver
