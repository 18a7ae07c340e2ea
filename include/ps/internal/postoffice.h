// Postoffice: a node of this process, and its cluster.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fserver/fserver.hpp"
#include "ps/base.h"
#include "ps/internal/env.h"
#include "ps/internal/message.h"
#include "ps/internal/utils.h"
#include "ps/range.h"

namespace ps {

// A worker, server or scheduler of this process. Start opens its node. All of its calls throw what
// fserver throws; a call that needs the node throws ClosedError before Start and after Finalize.
class Postoffice {
public:
  // The node of this process: its worker, else its server, else its scheduler.
  static Postoffice *Get() {
    for (Node::Role role : {Node::WORKER, Node::SERVER, Node::SCHEDULER}) {
      Postoffice *one = At(role, 0);
      if (one->node())
        return one;
    }
    return At(Node::WORKER, 0);
  }
  // The i-th worker or server that this process has started.
  static Postoffice *GetWorker(int index = 0) {
    return At(Node::WORKER, index);
  }
  static Postoffice *GetServer(int index = 0) {
    return At(Node::SERVER, index);
  }
  static Postoffice *GetScheduler() { return At(Node::SCHEDULER, 0); }

  // Opens the node and waits until the cluster is complete. rank: of the instance; below 0: as the
  // environment says. With do_barrier it also waits until all others have started.
  void Start(int customer_id, Node::Role role, int rank, bool do_barrier,
             const char *argv0 = nullptr) {
    (void)argv0;
    preferred_rank_ = rank;
    const fserver::Options options = Settings(rank);
    if (role == Node::WORKER)
      worker_ = std::make_unique<fserver::Worker>(options);
    else if (role == Node::SERVER)
      server_ = std::make_unique<fserver::Server>(options);
    else
      scheduler_ = std::make_unique<fserver::Scheduler>(options);
    if (do_barrier)
      DoBarrier(customer_id, kScheduler + kServerGroup + kWorkerGroup, true);
  }

  // Leaves the cluster, together with all others if do_barrier, and calls what RegisterExitCallback
  // was given. Does nothing if the node is not open. Bounded as fserver::Node::stop.
  void Finalize(int customer_id, bool do_barrier = true) {
    (void)customer_id;
    fserver::Node *n = node();
    if (!n || n->closed())
      return;
    if (worker_)
      End(*worker_, do_barrier);
    else if (server_)
      End(*server_, do_barrier);
    else
      End(*scheduler_, do_barrier);
    if (exit_callback_)
      std::exchange(exit_callback_, nullptr)();
  }

  void RegisterExitCallback(const std::function<void()> &cb) {
    exit_callback_ = cb;
  }

  // Waits until one instance of each group of the named roles has called it. A scheduler takes part
  // in none.
  void Barrier(int customer_id, int node_group) {
    DoBarrier(customer_id, node_group, false);
  }
  // The same; instance_barrier: every instance has to call it.
  void DoBarrier(int customer_id, int node_group, bool instance_barrier) {
    (void)customer_id;
    std::uint32_t who = 0;
    if (node_group & kServerGroup)
      who |= fserver::kServers;
    if (node_group & kWorkerGroup)
      who |= fserver::kWorkers;
    if (scheduler_ || !who)
      return;
    Open().barrier(static_cast<fserver::Members>(who),
                   instance_barrier ? fserver::Each::kInstance
                                    : fserver::Each::kGroup);
  }

  // Groups of the roles, and their instances.
  int num_workers() const { return GetEnv("DMLC_NUM_WORKER", 1); }
  int num_servers() const { return GetEnv("DMLC_NUM_SERVER", 1); }
  int group_size() const { return GetEnv("DMLC_GROUP_SIZE", 1); }
  int num_worker_instances() const { return num_workers() * group_size(); }
  int num_server_instances() const { return num_servers() * group_size(); }

  // The rank of the instance within its role.
  int my_rank() const { return Open().rank(); }
  int preferred_rank() const { return preferred_rank_; }
  bool is_worker() const { return worker_ != nullptr; }
  bool is_server() const { return server_ != nullptr; }
  bool is_scheduler() const { return scheduler_ != nullptr; }
  std::string role_str() const {
    return is_worker()      ? "worker"
           : is_server()    ? "server"
           : is_scheduler() ? "scheduler"
                            : "";
  }
  int verbose() const { return GetEnv("PS_VERBOSE", 0); }

  // The keys, cut evenly over the server groups.
  const std::vector<Range> &GetServerKeyRanges() {
    std::call_once(ranges_made_, [this] {
      const auto n = static_cast<std::uint64_t>(num_servers());
      for (std::uint64_t i = 0; i < n; i++)
        ranges_.emplace_back(kMaxKey / n * i, kMaxKey / n * (i + 1));
    });
    return ranges_;
  }

  // Numbers of nodes: even ones from 8 on are servers, odd ones from 9 on workers.
  static int WorkerRankToID(int rank) { return 2 * rank + 9; }
  static int ServerRankToID(int rank) { return 2 * rank + 8; }
  static int IDtoRank(int id) { return id < 8 ? 0 : (id - 8) / 2; }
  int GroupWorkerRankToInstanceID(int rank, int instance) const {
    return WorkerRankToID(rank * group_size() + instance);
  }
  int GroupServerRankToInstanceID(int rank, int instance) const {
    return ServerRankToID(rank * group_size() + instance);
  }
  int InstanceIDtoGroupRank(int id) const {
    return IDtoRank(id) / group_size();
  }

  // The node. Throws ClosedError if this is not a started worker, or server.
  fserver::Worker &worker() const {
    if (!worker_)
      throw fserver::ClosedError("Postoffice: no worker has been started here");
    return *worker_;
  }
  fserver::Server &server() const {
    if (!server_)
      throw fserver::ClosedError("Postoffice: no server has been started here");
    return *server_;
  }

private:
  Postoffice() = default;

  // Made when they are first asked for, and never destroyed.
  static Postoffice *At(Node::Role role, int index) {
    static std::mutex *mutex = new std::mutex;
    static auto *all = new std::map<std::pair<int, int>, Postoffice *>;
    std::lock_guard<std::mutex> lock(*mutex);
    Postoffice *&one = (*all)[{static_cast<int>(role), index}];
    if (!one)
      one = new Postoffice;
    return one;
  }

  static fserver::Options Settings(int rank) {
    fserver::Options o;
    o.settings = Environment::Get()->own();
    if (rank >= 0) { // rank = group_size * node_rank + gpu + rank_offset
      const int size = GetEnv("DMLC_GROUP_SIZE", 1);
      o.node_rank = rank / size;
      o.rank_offset = rank % size - GetEnv("STEPMESH_GPU", 0);
    }
    return o;
  }

  template <class N> static void End(N &node, bool together) {
    if (together)
      node.stop();
    else
      node.close();
  }

  fserver::Node *node() const {
    if (worker_)
      return worker_.get();
    return server_ ? static_cast<fserver::Node *>(server_.get())
                   : scheduler_.get();
  }
  fserver::Node &Open() const {
    if (!node())
      throw fserver::ClosedError("Postoffice: StartPS has not been called");
    return *node();
  }

  std::unique_ptr<fserver::Worker> worker_;
  std::unique_ptr<fserver::Server> server_;
  std::unique_ptr<fserver::Scheduler> scheduler_;
  int preferred_rank_ = -1;
  std::function<void()> exit_callback_;
  std::once_flag ranges_made_;
  std::vector<Range> ranges_;
};

} // namespace ps
