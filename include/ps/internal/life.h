// StartPS and Finalize: how a program starts and ends, and what it asks about itself. Include ps/ps.h.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ps/base.h"
#include "ps/internal/postoffice.h"

namespace ps {

// The role of a name: worker, server, scheduler or joint. Throws fserver::ConfigError for others.
inline Node::Role GetRole(const std::string &name) {
  if (name == "worker")
    return Node::WORKER;
  if (name == "server")
    return Node::SERVER;
  if (name == "scheduler")
    return Node::SCHEDULER;
  if (name == "joint")
    return Node::JOINT;
  throw fserver::ConfigError("GetRole: role is \"" + name +
                             "\", want worker, server, scheduler or joint");
}

inline int NumWorkers() { return Postoffice::Get()->num_workers(); }
inline int NumServers() { return Postoffice::Get()->num_servers(); }
inline bool IsWorker() { return Postoffice::Get()->is_worker(); }
inline bool IsServer() { return Postoffice::Get()->is_server(); }
inline bool IsScheduler() { return Postoffice::Get()->is_scheduler(); }
// The number of this process's group within its role.
inline int MyRank() { return Postoffice::Get()->my_rank(); }
// That number as DMLC_NODE_RANK gives it, or as the scheduler has assigned it.
inline int GetNodeRank() {
  const int given = detail::number("DMLC_NODE_RANK", -1, -1);
  return given < 0 ? MyRank() : given;
}
inline int GetGroupSize() { return detail::number("DMLC_GROUP_SIZE", 1, 1); }
inline int GetGpuId() { return detail::number("STEPMESH_GPU", 0, 0); }

namespace detail {

// The nodes of a role in this process.
inline std::vector<Postoffice *> offices_of(Node::Role role) {
  if (role == Node::SCHEDULER)
    return {Postoffice::GetScheduler()};
  std::vector<Postoffice *> offices;
  for (int i = 0; i < instances_here(); i++) {
    if (role != Node::SERVER)
      offices.push_back(Postoffice::GetWorker(i));
    if (role != Node::WORKER)
      offices.push_back(Postoffice::GetServer(i));
  }
  return offices;
}

// The worker and the server of a process have one rank, so the scheduler does not assign it.
inline void check_joint() {
  const bool several = number("DMLC_NUM_WORKER", 1, 1) > 1 ||
                       number("DMLC_NUM_SERVER", 1, 1) > 1;
  bool given = number("DMLC_GROUP_SIZE", 1, 1) > 1 ||
               number("DMLC_NODE_RANK", -1, -1) >= 0;
  for (const char *name : {"STEPMESH_GPU", "DMLC_RANK_OFFSET"})
    given = given || detail::setting(name);
  if (several && !given)
    throw fserver::ConfigError(
        "StartPS: JOINT without a rank: worker and server of a process have "
        "the same one: pass rank, or set DMLC_NODE_RANK");
}

inline Node::Role own_role() {
  const char *name = setting("DMLC_ROLE");
  return GetRole(name ? name : "server");
}

inline Node::Role role_of(const Postoffice &p) {
  return p.is_worker()   ? Node::WORKER
         : p.is_server() ? Node::SERVER
                         : Node::SCHEDULER;
}

} // namespace detail

// Opens the nodes of a role in this process, and waits until the cluster is complete, at most
// FSERVER_INIT_TIMEOUT. Settings come from the environment.
//
// customer_id: a number of the caller's. A process may start several; the first opens the nodes.
// rank: of the group, if the process runs all instances of it; else of the process. -1: as DMLC_NODE_RANK,
//     DMLC_GROUP_SIZE and STEPMESH_GPU say, and if these are not set, as the scheduler assigns it.
// do_barrier: waits until all workers and servers have been started, too.
//
// Throws fserver::ConfigError, TimeoutError, and PeerLostError.
inline void StartPS(int customer_id, Node::Role role, int rank, bool do_barrier,
                    const char *argv0 = nullptr) {
  if (role == Node::JOINT && rank < 0)
    detail::check_joint();
  std::vector<std::function<void()>> starts;
  for (Postoffice *p : detail::offices_of(role))
    starts.push_back([=] {
      p->Start(customer_id, detail::role_of(*p), rank, do_barrier, argv0);
    });
  detail::at_once(starts);
}

// StartPS with the role of DMLC_ROLE (server).
inline void Start(int customer_id, const char *argv0 = nullptr) {
  StartPS(customer_id, detail::own_role(), -1, true, argv0);
}
// As Start, without the barrier.
inline void StartAsync(int customer_id, const char *argv0 = nullptr) {
  StartPS(customer_id, detail::own_role(), -1, false, argv0);
}

// Leaves the cluster, when it has been called for each customer that was started. Does nothing without StartPS.
//
// A worker waits until all workers have called it, at most FSERVER_BARRIER_TIMEOUT. A server serves until all
// workers have left or are gone. Then all nodes leave together, within FSERVER_STOP_TIMEOUT. Without
// do_barrier the nodes are closed at once; for the others they are lost.
//
// Throws what has gone wrong, fserver::PeerLostError or TimeoutError; the nodes are closed then, too. Throws ConfigError,
// and does nothing, if a handler of a KVServer calls it for the last customer, with do_barrier: it would wait for itself.
inline void Finalize(int customer_id, Node::Role role, bool do_barrier = true) {
  std::vector<std::function<void()>> ends;
  for (Postoffice *p : detail::offices_of(role)) {
    p->CheckFinalize(customer_id, do_barrier); // in this thread
    ends.push_back([=] { p->Finalize(customer_id, do_barrier); });
  }
  detail::at_once(ends);
}
// Finalize for the role of DMLC_ROLE (server).
inline void Finalize(int customer_id, bool do_barrier = true) {
  Finalize(customer_id, detail::own_role(), do_barrier);
}

// Has f called by Finalize, when the first node of this process has ended.
inline void RegisterExitCallback(const std::function<void()> &f) {
  Postoffice::Get()->RegisterExitCallback(f);
}

} // namespace ps
