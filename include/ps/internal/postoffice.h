// Postoffice: a node of this process.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fserver/fserver.hpp"
#include "ps/base.h"
#include "ps/internal/customer.h"
#include "ps/internal/env.h"
#include "ps/internal/letters.h"
#include "ps/internal/logging.h"
#include "ps/internal/nodes.h"
#include "ps/internal/serving.h"
#include "ps/internal/van.h"
#include "ps/range.h"

namespace ps {

// A worker, a server or the scheduler. There is one for each that this process may run; StartPS opens them.
// None is ever destroyed: objects of static storage may use them.
//
// A group of workers or servers has DMLC_GROUP_SIZE nodes, its instances. If STEPMESH_GPU, DMLC_INSTANCE_ID
// or DMLC_RANK_OFFSET is set, a process runs that one of them; else it runs all.
class Postoffice {
public:
  // The node of instance `index` of this process. If it runs one alone, that is 0, or the instance's place in its group.
  // Throws fserver::ConfigError for others.
  static Postoffice *GetWorker(int index = 0) {
    return get(Node::WORKER, index);
  }
  static Postoffice *GetServer(int index = 0) {
    return get(Node::SERVER, index);
  }
  static Postoffice *GetScheduler() { return get(Node::SCHEDULER, 0); }
  // The first node of the process, by what StartPS was called with, or else by DMLC_ROLE (a server). With
  // JOINT: the worker.
  static Postoffice *Get() {
    const char *name = detail::setting("DMLC_ROLE");
    const std::string role = name ? name : "server";
    for (Node::Role r : {Node::WORKER, Node::SERVER, Node::SCHEDULER}) {
      if (Postoffice *p = known(r); p && p->started())
        return p;
    }
    return role == "worker" || role == "joint" ? GetWorker()
           : role == "scheduler"               ? GetScheduler()
                                               : GetServer();
  }

  // Groups, which are counted by num_workers and num_servers; nodes by the others.
  int num_workers() const { return workers_; }
  int num_servers() const { return servers_; }
  int group_size() const { return size_; }
  int num_worker_instances() const { return workers_ * size_; }
  int num_server_instances() const { return servers_ * size_; }
  // The number of this node's group within its role; of the node within its group.
  int my_rank() const { return std::max(0, rank_.load()) / size_; }
  int instance_idx() const {
    const int rank = rank_;
    return rank < 0 ? index_ : rank % size_;
  }
  // The rank that StartPS was given; -1: none.
  int preferred_rank() const { return preferred_; }
  bool is_worker() const { return role_ == Node::WORKER; }
  bool is_server() const { return role_ == Node::SERVER; }
  bool is_scheduler() const { return role_ == Node::SCHEDULER; }
  std::string role_str() const {
    return is_worker() ? "worker" : is_server() ? "server" : "scheduler";
  }
  int verbose() const { return detail::verbose(); }
  // Whether the node has the place of one that was lost. The scheduler never has.
  bool is_recovery() const { return van_.node_.is_recovery; }
  Van *van() { return &van_; }

  // The key space, cut evenly over the server groups. Key kMaxKey belongs to the last one.
  const std::vector<Range> &GetServerKeyRanges() const { return ranges_; }

  static int WorkerRankToID(int rank) { return rank * 2 + 9; }
  static int ServerRankToID(int rank) { return rank * 2 + 8; }
  static int IDtoRank(int id) { return std::max((id - 8) / 2, 0); }
  int GroupWorkerRankToInstanceID(int rank, int instance) const {
    return WorkerRankToID(rank * size_ + instance);
  }
  int GroupServerRankToInstanceID(int rank, int instance) const {
    return ServerRankToID(rank * size_ + instance);
  }
  int InstanceIDtoGroupRank(int id) const { return IDtoRank(id) / size_; }
  // The IDs of the nodes of groups. One that is no group is itself an ID.
  std::vector<int> GetNodeIDs(int groups) const {
    if (groups >= 8)
      return {groups};
    std::vector<int> ids;
    if (groups & kScheduler)
      ids.push_back(kScheduler);
    for (int i = 0; groups & kServerGroup && i < num_server_instances(); i++)
      ids.push_back(ServerRankToID(i));
    for (int i = 0; groups & kWorkerGroup && i < num_worker_instances(); i++)
      ids.push_back(WorkerRankToID(i));
    return ids;
  }

  // Waits until each process of the groups has called it, once: the call counts for all instances that this process
  // runs, whichever of them it is made of. The scheduler takes part in none: its call returns at once, and the others do
  // not wait for it. Throws as fserver::Node::barrier.
  void Barrier(int customer_id, int node_group) {
    std::vector<std::function<void()>> calls;
    for (int i = 0; i < (is_scheduler() ? 1 : detail::instances_here()); i++) {
      Postoffice *p = get(role_, i);
      calls.push_back([=] { p->DoBarrier(customer_id, node_group); });
    }
    detail::at_once(calls);
  }
  // As Barrier, but waits until each instance has called it, or one of each group.
  void DoBarrier(int customer_id, int node_group,
                 bool instance_barrier = true) {
    (void)customer_id;
    constexpr int kAll = kScheduler + kServerGroup + kWorkerGroup;
    if (node_group < 1 || node_group > kAll)
      throw fserver::ConfigError(
          "Barrier: node_group is " + std::to_string(node_group) +
          ", want a sum of kScheduler, kServerGroup and kWorkerGroup");
    std::uint32_t who = 0;
    if (node_group & kServerGroup)
      who |= fserver::kServers;
    if (node_group & kWorkerGroup)
      who |= fserver::kWorkers;
    if (who && !is_scheduler())
      node("Barrier").barrier(static_cast<fserver::Members>(who),
                              instance_barrier ? fserver::Each::kInstance
                                               : fserver::Each::kGroup);
  }

  // The IDs of the nodes that are gone and whose place is free, and of those that were not heard for so
  // many seconds. A worker or server knows the latter of the scheduler alone.
  std::vector<int> GetDeadNodes(int seconds = 60) const {
    std::vector<int> ids;
    for (const fserver::Member &m : node("GetDeadNodes").members()) {
      if (m.state != fserver::Member::kLost &&
          m.silent < std::chrono::seconds(std::max(seconds, 0)))
        continue;
      if (m.state == fserver::Member::kLeft ||
          (is_scheduler() && m.role == fserver::Role::kScheduler))
        continue;
      ids.push_back(m.role == fserver::Role::kWorker   ? WorkerRankToID(m.rank)
                    : m.role == fserver::Role::kServer ? ServerRankToID(m.rank)
                                                       : kScheduler);
    }
    return ids;
  }
  // The customer of a SimpleApp of this node; null if there is none within so many seconds.
  Customer *GetCustomer(int app_id, int customer_id, int timeout = 0) const {
    const auto until =
        std::chrono::steady_clock::now() + std::chrono::seconds(timeout);
    for (;;) {
      Customer *c = letters("GetCustomer")->customer(app_id, customer_id);
      if (c || std::chrono::steady_clock::now() >= until)
        return c;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  // Has f called by Finalize, when the node has ended.
  void RegisterExitCallback(const std::function<void()> &f) { at_exit_ = f; }

  // Opens the node, and waits until the cluster is complete. Once for each customer: the first opens it, and the
  // others wait for that. If it fails, all throw its error, and none has started.
  void Start(int customer_id, Node::Role role, int rank, bool do_barrier,
             const char *argv0 = nullptr) {
    (void)argv0;
    if (role != role_)
      throw fserver::ConfigError(
          "Postoffice::Start: role is " + std::to_string(role) + ", want " +
          std::to_string(role_) + ": this is the " + role_str());
    std::promise<void> done;
    if (const std::shared_future<void> first = open(customer_id, rank, done);
        first.valid())
      return first.get();
    try {
      connect();
    } catch (...) {
      give_up();
      done.set_exception(std::current_exception());
      throw;
    }
    done.set_value();
    if (do_barrier)
      DoBarrier(0, kServerGroup + kWorkerGroup);
  }
  // Throws ConfigError if Finalize would wait for the handler of a KVServer that calls it.
  void CheckFinalize(int customer_id, bool do_barrier) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool last = customers_.count(customer_id) && customers_.size() == 1;
    if (last && do_barrier && is_server() && server_->is_serving())
      throw fserver::ConfigError(
          "Finalize: a handler of a KVServer has called it, which it waits "
          "for: call it in another thread");
  }
  // Ends what Start has begun: the last customer's call leaves the cluster; see Finalize of ps.h.
  void Finalize(int customer_id, bool do_barrier = true) {
    CheckFinalize(customer_id, do_barrier);
    if (!close(customer_id))
      return;
    try {
      leave(do_barrier);
    } catch (...) {
      ended();
      throw;
    }
    ended();
  }

  bool started() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return !customers_.empty();
  }
  // The node, for KVWorker and KVServer. Throws fserver::ClosedError if StartPS has not opened it.
  std::shared_ptr<detail::WorkerNode> worker(const char *call) const {
    return opened(call, worker_);
  }
  std::shared_ptr<detail::ServerNode> server(const char *call) const {
    return opened(call, server_);
  }

  // The messages of the node, for SimpleApp. Throws as worker().
  std::shared_ptr<detail::Letters> letters(const char *call) const {
    return opened(call, letters_);
  }

private:
  struct All {
    std::mutex mutex;
    std::map<std::pair<int, int>, Postoffice *> by; // by role and index
  };
  static All &all() {
    static All *all = new All;
    return *all;
  }
  static Postoffice *known(Node::Role role) {
    std::lock_guard<std::mutex> lock(all().mutex);
    const auto it = all().by.find({role, 0});
    return it == all().by.end() ? nullptr : it->second;
  }
  static Postoffice *get(Node::Role role, int index) {
    const int most = role == Node::SCHEDULER ? 1 : detail::instances_here();
    if (index && most == 1 && role != Node::SCHEDULER) {
      const Postoffice *alone = known(role);
      if (detail::is_own_place(index) ||
          (alone && alone->instance_idx() == index))
        index = 0;
    }
    if (index < 0 || index >= most)
      throw fserver::ConfigError(
          "Postoffice: instance is " + std::to_string(index) + ", want 0" +
          (most == 1 ? ", or the place in the group"
                     : " to " + std::to_string(most - 1)) +
          ": this process runs " + std::to_string(most));
    std::lock_guard<std::mutex> lock(all().mutex);
    Postoffice *&p = all().by[{role, index}];
    if (!p)
      p = new Postoffice(role, index);
    return p;
  }

  Postoffice(Node::Role role, int index)
      : role_(role), index_(index),
        workers_(detail::number("DMLC_NUM_WORKER", 1, 1)),
        servers_(detail::number("DMLC_NUM_SERVER", 1, 1)),
        size_(detail::number("DMLC_GROUP_SIZE", 1, 1)) {
    const std::uint64_t each = kMaxKey / static_cast<std::uint64_t>(servers_);
    for (int i = 0; i < servers_; i++) {
      const auto n = static_cast<std::uint64_t>(i);
      ranges_.emplace_back(each * n,
                           i + 1 == servers_ ? kMaxKey : each * (n + 1));
    }
  }

  template <class T>
  std::shared_ptr<T> opened(const char *call,
                            const std::shared_ptr<T> &node) const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!node)
      throw fserver::ClosedError(std::string(call) + ": there is no " +
                                 role_str() + " " + std::to_string(index_) +
                                 " in this process: call StartPS first");
    return node;
  }
  fserver::Node &node(const char *call) const {
    if (is_worker())
      return worker(call)->worker;
    if (is_server())
      return server(call)->server;
    return *opened(call, scheduler_);
  }

  // Makes the node if this customer is the first. For the others, returns what the first one promises.
  std::shared_future<void> open(int customer_id, int rank,
                                std::promise<void> &done) {
    std::shared_ptr<void> before; // what it kept is let go of without the lock
    std::lock_guard<std::mutex> lock(mutex_);
    if (!customers_.empty()) {
      customers_.insert(customer_id);
      return opening_;
    }
    if (is_worker())
      before = std::exchange(
          worker_, std::make_shared<detail::WorkerNode>(index_, rank));
    else if (is_server())
      before = std::exchange(
          server_, std::make_shared<detail::ServerNode>(index_, rank));
    else
      scheduler_ =
          std::make_shared<fserver::Scheduler>(detail::options_of(0, -1, true));
    preferred_ = rank;
    opening_ = done.get_future().share();
    customers_.insert(customer_id);
    return {};
  }
  // Ends what open has begun, for all customers that have come since.
  void give_up() {
    close_node();
    std::lock_guard<std::mutex> lock(mutex_);
    customers_.clear();
  }
  void connect() {
    fserver::Node &n = node("StartPS");
    n.connect();
    rank_ = n.rank();
    van_.node_.role = role_;
    van_.node_.id = is_worker()   ? WorkerRankToID(rank_)
                    : is_server() ? ServerRankToID(rank_)
                                  : kScheduler;
    van_.node_.aux_id = preferred_;
    van_.node_.is_recovery = n.recovery();
    const std::string address = n.address(); // "10.0.0.1:7000", "[::1]:7000"
    if (const std::size_t colon = address.rfind(':');
        colon != std::string::npos) {
      const std::size_t brackets = address[0] == '[' ? 1 : 0;
      van_.node_.hostname = address.substr(brackets, colon - 2 * brackets);
      van_.node_.port = std::atoi(address.c_str() + colon + 1);
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::shared_ptr<void> owner = scheduler_;
      if (is_worker())
        owner = worker_;
      else if (is_server())
        owner = server_;
      letters_ = std::make_shared<detail::Letters>(
          std::shared_ptr<fserver::Node>(owner, &n));
    }
    van_.ready_ = true;
  }

  // Reports whether this customer is the last.
  bool close(int customer_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return customers_.erase(customer_id) && customers_.empty();
  }
  // A server closes the scheduler that it hosts, too, which Node::close does not.
  void close_node() {
    if (is_server())
      server("close")->server.close();
    else
      node("close").close();
  }
  void leave(bool do_barrier) {
    if (!do_barrier)
      return close_node();
    if (is_server()) {
      server("Finalize")->finish();
      server("Finalize")->server.stop();
      return;
    }
    fserver::Node &n = node("Finalize");
    if (is_worker() && num_worker_instances() > 1)
      n.barrier(fserver::kWorkers);
    n.stop();
  }
  void ended() {
    van_.ready_ = false;
    close_node();
    if (is_worker())
      worker("Finalize")->kept.closed();
    else if (is_server())
      server("Finalize")->closed();
    letters("Finalize")->end();
    const std::function<void()> f = std::move(at_exit_);
    at_exit_ = nullptr;
    if (f)
      f();
  }

  const Node::Role role_;
  const int index_, workers_, servers_, size_;
  std::vector<Range> ranges_;
  std::atomic<int> rank_{-1};
  int preferred_ = -1;
  Van van_;
  std::function<void()> at_exit_;
  mutable std::mutex mutex_; // of what follows
  std::set<int> customers_;
  std::shared_future<void> opening_; // when the first customer has connected
  std::shared_ptr<detail::WorkerNode> worker_;
  std::shared_ptr<detail::ServerNode> server_;
  std::shared_ptr<fserver::Scheduler> scheduler_;
  std::shared_ptr<detail::Letters> letters_;
};

} // namespace ps
