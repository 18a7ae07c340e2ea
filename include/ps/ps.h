// The life cycle of programs that were written for ps-lite or StepMesh. ps/af_tensor_app.h has the
// tensor API, which needs torch. What fails throws a fserver::Error.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>

#include "dmlc/logging.h"
#include "ps/base.h"
#include "ps/internal/postoffice.h"
#include "ps/internal/utils.h"
#include "ps/range.h"
#include "ps/sarray.h"

namespace ps {

// Groups of workers, and of servers.
inline int NumWorkers() { return Postoffice::Get()->num_workers(); }
inline int NumServers() { return Postoffice::Get()->num_servers(); }
inline bool IsWorker() { return Postoffice::Get()->is_worker(); }
inline bool IsServer() { return Postoffice::Get()->is_server(); }
inline bool IsScheduler() { return Postoffice::Get()->is_scheduler(); }
// The rank of this process's group within its role.
inline int MyRank() {
  return Postoffice::Get()->my_rank() / Postoffice::Get()->group_size();
}
inline int GetNodeRank() { return GetEnv("DMLC_NODE_RANK", -1); }
inline int GetGroupSize() { return GetEnv("DMLC_GROUP_SIZE", 1); }
inline int GetGpuId() { return GetEnv("STEPMESH_GPU", 0); }

// The role of a name: "worker", "server", "scheduler", "joint". Throws ConfigError.
inline Node::Role GetRole(const std::string &name) {
  if (name == "worker")
    return Node::WORKER;
  if (name == "server")
    return Node::SERVER;
  if (name == "scheduler")
    return Node::SCHEDULER;
  if (name == "joint")
    return Node::JOINT;
  throw fserver::ConfigError("GetRole: the role is \"" + name +
                             "\", want worker, server, scheduler or joint");
}

namespace internal {

// Runs both at the same time, and throws what the first of them threw.
template <class F, class G> void Both(F &&f, G &&g) {
  std::exception_ptr thrown;
  std::thread other([&] {
    try {
      g();
    } catch (...) {
      thrown = std::current_exception();
    }
  });
  try {
    f();
  } catch (...) {
    other.join();
    throw;
  }
  other.join();
  if (thrown)
    std::rethrow_exception(thrown);
}

inline Postoffice *Office(Node::Role role) {
  return role == Node::WORKER   ? Postoffice::GetWorker()
         : role == Node::SERVER ? Postoffice::GetServer()
                                : Postoffice::GetScheduler();
}

} // namespace internal

// Opens the node of this process, and waits until the cluster is complete. JOINT opens a server and a
// worker. rank: of the instance within its role; -1: as the environment says. Each process has one
// instance: start DMLC_GROUP_SIZE processes for a group.
inline void StartPS(int customer_id, Node::Role role, int rank, bool do_barrier,
                    const char *argv0 = nullptr) {
  const auto start = [=](Node::Role one) {
    internal::Office(one)->Start(customer_id, one, rank, do_barrier, argv0);
  };
  if (role == Node::JOINT)
    internal::Both([&] { start(Node::SERVER); }, [&] { start(Node::WORKER); });
  else
    start(role);
}

// Leaves the cluster, with do_barrier together with all others. It may be called again.
inline void Finalize(int customer_id, Node::Role role, bool do_barrier = true) {
  const auto end = [=](Node::Role one) {
    internal::Office(one)->Finalize(customer_id, do_barrier);
  };
  if (role == Node::JOINT)
    internal::Both([&] { end(Node::SERVER); }, [&] { end(Node::WORKER); });
  else
    end(role);
}

// Has Finalize call cb at its end.
inline void RegisterExitCallback(const std::function<void()> &cb) {
  Postoffice::Get()->RegisterExitCallback(cb);
}

} // namespace ps
