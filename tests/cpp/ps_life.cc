// How programs start and end.
#include <atomic>
#include <thread>

#include "scenes.hpp"

using namespace ps;

namespace {

void push_and_pull(int instance) {
  KVWorker<float> kv(0, 0, instance);
  std::vector<float> got;
  kv.Wait(kv.Push({1, kMaxKey}, {1, 2}));
  kv.Wait(kv.Pull({1, kMaxKey}, &got));
  EXPECT(got[0] >= 1 && got[1] >= 2); // others push at the same time
}

} // namespace

BARE_SCENE(the_shortest_program, 2, 1) {
  static int ended = 0;
  Start(0);
  EXPECT(Postoffice::Get()->van()->IsReady());
  if (IsServer())
    serve<float>(KVServerDefaultHandle<float>());
  if (IsWorker())
    push_and_pull(0);
  RegisterExitCallback([] { ended++; });
  const Node &mine = Postoffice::Get()->van()->my_node();
  if (!IsWorker()) { // whom others reach
    EXPECT_EQ(mine.hostname, "127.0.0.1");
    EXPECT(mine.port > 0);
  }
  EXPECT_EQ(IsScheduler(), Postoffice::Get() == Postoffice::GetScheduler());
  if (IsScheduler()) {
    EXPECT_EQ(Postoffice::Get()->van()->my_node().id, kScheduler);
    EXPECT(Postoffice::Get()->role_str() == "scheduler");
  } else
    EXPECT_EQ(Postoffice::Get()->van()->my_node().id,
              IsWorker() ? 9 + 2 * MyRank() : 8);
  Finalize(0, true);
  EXPECT_EQ(ended, 1);
  Finalize(0, true); // nothing
  EXPECT_EQ(ended, 1);
  EXPECT(!Postoffice::Get()->van()->IsReady());
}

// StartAsync waits for no other: a worker pushes while another has not called a barrier.
BARE_SCENE(start_without_a_barrier, 2, 1) {
  const bool second = own_role() == Node::WORKER && GetNodeRank() == 1;
  if (second)
    StartPS(0, Node::WORKER, -1, false);
  else
    StartAsync(0);
  EXPECT(Postoffice::Get()->started());
  if (IsServer())
    serve<float>(KVServerDefaultHandle<float>());
  if (IsWorker()) {
    KVWorker<float> kv(0, 0);
    std::vector<float> got(1);
    if (!second)
      kv.Wait(kv.Push({1}, {1}));
    while (got[0] != 1)
      kv.Wait(kv.Pull({1}, &got));
  }
  Finalize(0);
}

CASE(what_the_settings_say) {
  Environment::Init({{"DMLC_GROUP_SIZE", "8"},
                     {"STEPMESH_GPU", "3"},
                     {"DMLC_NODE_RANK", "5"},
                     {"PS_VERBOSE", "2"}});
  EXPECT_EQ(GetGroupSize(), 8);
  EXPECT_EQ(GetGpuId(), 3);
  EXPECT_EQ(GetNodeRank(), 5);
  EXPECT_EQ(Postoffice::GetScheduler()->verbose(), 2);
  Environment::Init({});
  EXPECT_EQ(GetGroupSize(), 1);
  EXPECT_EQ(GetGpuId(), 0);
  EXPECT_EQ(Postoffice::GetScheduler()->verbose(), 2); // as it was first
}

// An empty value is as none.
CASE(empty_settings) {
  std::unordered_map<std::string, std::string> all;
  for (const char *name :
       {"DMLC_NODE_RANK", "DMLC_GROUP_SIZE", "STEPMESH_GPU", "DMLC_INSTANCE_ID",
        "DMLC_RANK_OFFSET", "DMLC_ROLE", "STEPMESH_BACKEND"})
    all[name] = all.size() % 2 ? "" : " ";
  Environment::Init(all);
  EXPECT(GetGroupSize() == 1 && GetGpuId() == 0 && GetNodeRank() == 0);
  EXPECT_EQ(Postoffice::Get(), Postoffice::GetServer());
  EXPECT_EQ(detail::own_role(), Node::SERVER);
  EXPECT(detail::backend_name().empty());
  all["DMLC_GROUP_SIZE"] = "2";
  Environment::Init(all);
  EXPECT_EQ(detail::instances_here(), 2);
  Environment::Init({});
}

// One process is worker and server.
BARE_SCENE(joint, 2, 0) {
  const Node::Role role =
      own_role() == Node::SCHEDULER ? Node::SCHEDULER : Node::JOINT;
  Environment::Init({{"DMLC_NUM_SERVER", "2"}});
  StartPS(0, role, GetNodeRank(), true);
  if (role == Node::JOINT) {
    EXPECT(IsWorker());
    EXPECT_EQ(Postoffice::GetServer()->my_rank(), GetNodeRank());
    KVServer<float> server(0);
    server.set_request_handle(KVServerDefaultHandle<float>());
    push_and_pull(0);
    Postoffice::Get()->Barrier(0, kWorkerGroup);
    Finalize(0, role);
    return;
  }
  Finalize(0, role);
}

// One process runs the whole group: two rails.
BARE_SCENE(all_instances_of_a_group, 2, 1) {
  Environment::Init({{"DMLC_GROUP_SIZE", "2"}});
  StartPS(0, own_role(), -1, true);
  if (IsScheduler())
    return Finalize(0, own_role());
  for (int i = 0; i < 2; i++) {
    if (IsServer()) {
      auto *server = new KVServer<float>(0, false, i);
      EXPECT_EQ(server->instance_idx_, i);
      server->set_request_handle(KVServerDefaultHandle<float>());
      continue;
    }
    Postoffice *p = Postoffice::GetWorker(i);
    EXPECT(p->my_rank() == GetNodeRank() && p->instance_idx() == i);
    EXPECT_EQ(p->van()->my_node().id,
              p->GroupWorkerRankToInstanceID(p->my_rank(), i));
  }
  if (IsWorker()) {
    std::thread other([] { push_and_pull(1); });
    push_and_pull(0);
    other.join();
  }
  Finalize(0, own_role());
}

// One process for each instance, which the program calls by its place in the group.
BARE_SCENE(one_instance_of_a_group, 2, 2) {
  const int place = GetNodeRank();
  const bool server = own_role() == Node::SERVER;
  std::unordered_map<std::string, std::string> all{{"DMLC_GROUP_SIZE", "2"},
                                                   {"DMLC_NUM_WORKER", "1"},
                                                   {"DMLC_NUM_SERVER", "1"},
                                                   {"DMLC_NODE_RANK", "0"}};
  all[server ? "DMLC_RANK_OFFSET" : "STEPMESH_GPU"] =
      server ? "0" : std::to_string(place);
  Environment::Init(all);
  // The rank says which instance a server is.
  StartPS(0, own_role(), server ? place : -1, true);
  if (IsScheduler())
    return Finalize(0, own_role());
  const auto of = [](int i) {
    return IsWorker() ? Postoffice::GetWorker(i) : Postoffice::GetServer(i);
  };
  EXPECT(of(place) == of(0) && of(0)->instance_idx() == place);
  EXPECT(MyRank() == 0 && (IsServer() || GetGpuId() == place));
  if (place == 0)
    EXPECT_THROW(fserver::ConfigError, "instance is 1, want 0, or the place",
                 of(1));
  EXPECT_THROW(fserver::ConfigError, "instance is 2", of(2));
  if (IsServer()) {
    auto *kv = new KVServer<float>(0, false, place);
    EXPECT_EQ(kv->instance_idx_, place);
    kv->set_request_handle(KVServerDefaultHandle<float>());
  }
  of(place)->Barrier(0, kWorkerGroup + kServerGroup);
  if (IsWorker())
    push_and_pull(place);
  Finalize(0, own_role());
}

// The place as several settings give it.
CASE(names_of_the_only_instance) {
  Environment::Init({{"DMLC_GROUP_SIZE", "8"},
                     {"STEPMESH_GPU", "1"},
                     {"DMLC_RANK_OFFSET", "4"}});
  Postoffice *p = Postoffice::GetWorker();
  for (int place : {1, 5})
    EXPECT(Postoffice::GetWorker(place) == p);
  EXPECT_THROW(fserver::ConfigError, "instance is 6", Postoffice::GetWorker(6));
  EXPECT_THROW(fserver::ConfigError, "instance is -1",
               Postoffice::GetWorker(-1));
  Environment::Init({{"DMLC_GROUP_SIZE", "8"}, {"DMLC_INSTANCE_ID", "6"}});
  EXPECT(Postoffice::GetWorker(6) == p);
  Environment::Init({});
}

// A process that runs the whole group calls a barrier once.
BARE_SCENE(a_barrier_of_whole_groups, 2, 1) {
  Environment::Init(
      {{"DMLC_GROUP_SIZE", "2"}, {"FSERVER_BARRIER_TIMEOUT", "20"}});
  StartPS(0, own_role(), -1, true);
  if (own_role() == Node::WORKER) {
    for (int i = 0; i < 3; i++)
      Postoffice::GetWorker(i % 2)->Barrier(0, kWorkerGroup);
  }
  for (int i = 0; i < 3; i++)
    Postoffice::Get()->Barrier(0, kWorkerGroup + kServerGroup + kScheduler);
  // Each instance calls these.
  for (int i = 0; own_role() != Node::SCHEDULER && i < 2; i++) {
    Postoffice *p =
        IsWorker() ? Postoffice::GetWorker(1) : Postoffice::GetServer(1);
    std::thread other(
        [p] { p->DoBarrier(0, kWorkerGroup + kServerGroup, true); });
    Postoffice::Get()->DoBarrier(0, kWorkerGroup + kServerGroup, true);
    other.join();
  }
  Finalize(0, own_role());
}

// A process with the whole group, and one for each instance of another: both call once.
BARE_SCENE(a_barrier_of_unlike_groups, 2, 1) {
  std::unordered_map<std::string, std::string> all{
      {"DMLC_GROUP_SIZE", "2"},
      {"DMLC_NUM_WORKER", "1"},
      {"FSERVER_BARRIER_TIMEOUT", "20"}};
  if (own_role() == Node::WORKER)
    all.insert({{"STEPMESH_GPU", std::to_string(GetNodeRank())},
                {"DMLC_NODE_RANK", "0"}});
  Environment::Init(all);
  StartPS(0, own_role(), -1, true);
  for (int i = 0; i < 3; i++)
    Postoffice::Get()->Barrier(0, kWorkerGroup + kServerGroup);
  Finalize(0, own_role());
}

// Ranks that the program gives, and several customers: the last Finalize ends the node.
BARE_SCENE(ranks_and_customers, 2, 1) {
  const Node::Role role = own_role();
  const int rank = role == Node::WORKER ? 1 - GetNodeRank() : -1;
  StartPS(0, role, rank, true);
  StartPS(1, role, rank, false);
  if (role == Node::WORKER)
    EXPECT(MyRank() == rank && Postoffice::Get()->preferred_rank() == rank);
  if (role == Node::SERVER)
    serve<float>(KVServerDefaultHandle<float>());
  Finalize(0, role);
  if (role == Node::WORKER)
    push_and_pull(0);
  Finalize(1, role);
  EXPECT(!Postoffice::Get()->started());
}

// Customers that are started at the same time: each may use the node when its StartPS has returned.
BARE_SCENE(customers_of_two_threads, 1, 1) {
  const Node::Role role = own_role();
  if (role == Node::SERVER)
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::vector<std::thread> all;
  for (int customer = 0; customer < 2; customer++)
    all.emplace_back([role, customer] {
      StartPS(customer, role, -1, true);
      if (role == Node::SERVER)
        serve<float>(KVServerDefaultHandle<float>(), customer);
      if (role == Node::WORKER) {
        KVWorker<float> kv(customer, customer);
        kv.Wait(kv.Push({1}, {1}));
      }
    });
  for (std::thread &t : all)
    t.join();
  Finalize(0, role);
  Finalize(1, role);
}

// If the cluster does not come, no customer has started.
CASE(customers_without_a_cluster) {
  Environment::Init({{"DMLC_PS_ROOT_URI", "127.0.0.1"},
                     {"DMLC_PS_ROOT_PORT", "9"}, // nobody listens
                     {"FSERVER_INIT_TIMEOUT", "0.5"}});
  std::atomic<int> failures{0};
  std::vector<std::thread> all;
  for (int customer = 0; customer < 3; customer++)
    all.emplace_back([&failures, customer] {
      EXPECT_THROW(fserver::TimeoutError, "127.0.0.1:9",
                   StartPS(customer, Node::WORKER, 0, true));
      failures++;
    });
  for (std::thread &t : all)
    t.join();
  EXPECT_EQ(failures.load(), 3);
  EXPECT(!Postoffice::GetWorker()->started());
  EXPECT_THROW(fserver::TimeoutError, "127.0.0.1:9",
               StartPS(0, Node::WORKER, 0, true));
  Environment::Init({});
}

// A scheduler that a server hosts is closed with it, so that the next one gets its port. The other instances and the
// worker of the process host none.
BARE_SCENE(a_scheduler_of_the_server, 0, 1) {
  if (own_role() == Node::SCHEDULER)
    return;
  std::unordered_map<std::string, std::string> all{
      {"DMLC_NUM_WORKER", "1"},
      {"DMLC_GROUP_SIZE", "2"},
      {"FSERVER_HOST_SCHEDULER", "1"},
      {"FSERVER_INIT_TIMEOUT", "0.5"}};
  Environment::Init(all);
  for (int i = 0; i < 2; i++)
    EXPECT_THROW(fserver::TimeoutError, "",
                 Postoffice::GetServer()->Start(0, Node::SERVER, -1, false));
  all["FSERVER_INIT_TIMEOUT"] = "20";
  Environment::Init(all);
  for (int i = 0; i < 2; i++) {
    StartPS(0, Node::JOINT, -1, true);
    const auto begin = std::chrono::steady_clock::now();
    Finalize(0, Node::SERVER, false);
    EXPECT(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
    Finalize(0, Node::WORKER, false);
  }
}

// All processes of a role have the same environment: the scheduler numbers them. One that is lost has its rank
// again when it comes back.
BARE_SCENE(ranks_of_the_scheduler, 3, 2) {
  Environment::Init({{"DMLC_NODE_RANK", "-1"}});
  const Node::Role role = own_role();
  if (role == Node::WORKER)
    EXPECT_THROW(fserver::ConfigError, "JOINT without a rank",
                 StartPS(0, Node::JOINT, -1, true));
  StartPS(0, role, -1, true);
  Postoffice *p = Postoffice::Get();
  EXPECT(!p->is_recovery() && p->preferred_rank() == -1);
  if (role == Node::SERVER) {
    const Range mine =
        p->GetServerKeyRanges()[static_cast<std::size_t>(MyRank())];
    static std::map<Key, float> sums;
    serve<float>([mine](const KVMeta &meta, const KVPairs<float> &data,
                        KVServer<float> *server) {
      KVPairs<float> res;
      for (std::size_t i = 0; i < data.keys.size(); i++) {
        const Key k = data.keys[i];
        EXPECT(k >= mine.begin() && (k < mine.end() || mine.end() == kMaxKey));
        if (meta.push)
          sums[k] += data.vals[i];
        else
          res.vals.push_back(sums[k]);
      }
      server->Response(meta, res);
    });
  }
  if (role == Node::WORKER) {
    const int rank = MyRank();
    EXPECT(GetNodeRank() == rank && p->van()->my_node().id == 9 + 2 * rank);
    if (rank == 1) {
      Finalize(0, role, false);
      StartPS(0, role, -1, false);
      EXPECT(MyRank() == 1 && p->is_recovery());
      EXPECT(p->van()->my_node().is_recovery);
    } else { // which are not disturbed: barriers fail while one is lost
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
    }
    KVWorker<float> kv(0, 0);
    std::vector<Key> keys{0, 1, 2};
    kv.Wait(kv.Push({static_cast<Key>(rank)}, {1}));
    kv.Wait(kv.Push({kMaxKey}, {1}));
    std::vector<float> got(3), last(1);
    while (got[0] * got[1] * got[2] != 1 || last[0] != 3) {
      kv.Wait(kv.Pull(keys, &got));
      kv.Wait(kv.Pull({kMaxKey}, &last));
    }
  }
  try {
    Finalize(0, role);
  } catch (const fserver::PeerLostError
               &) { // of the one that was lost, if it is not back
  }
}

// A server whose workers have all left serves those that come after them, until it calls Finalize itself.
BARE_SCENE(a_worker_that_comes_after_all_have_left, 1, 1) {
  const Node::Role role = own_role();
  if (role == Node::WORKER) // whose first Finalize meets nobody
    Environment::Init({{"FSERVER_STOP_TIMEOUT", "0.5"}});
  StartPS(0, role, -1, true);
  static std::atomic<int> pushes{0};
  if (role == Node::SERVER)
    serve<float>([](const KVMeta &meta, const KVPairs<float> &,
                    KVServer<float> *server) {
      server->Response(meta);
      pushes++;
    });
  if (role == Node::WORKER) {
    {
      KVWorker<float> kv(0, 0);
      kv.Wait(kv.Push({1}, {1}));
    }
    EXPECT_THROW(fserver::TimeoutError, "", Finalize(0, role));
    Environment::Init({{"FSERVER_STOP_TIMEOUT", "30"}});
    StartPS(0, role, -1, false);
    KVWorker<float> kv(0, 0);
    kv.Wait(kv.Push({1}, {1}));
    SimpleApp app(5, 0);
    app.Wait(app.Request(0, "", kScheduler));
  } else if (role == Node::SCHEDULER) {
    SimpleApp app(5, 0);
    app.set_request_handle([](const SimpleData &r, SimpleApp *self) {
      self->Response(r);
      pushes = 2;
    });
    while (pushes < 2)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  while (role == Node::SERVER && pushes < 2)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Finalize(0, role);
}

// Barriers of some roles, and of one process of each group.
SCENE(barriers, 2, 2) {
  Postoffice *p = Postoffice::Get();
  for (int i = 0; i < 3; i++) {
    p->Barrier(0, p->is_worker() ? kWorkerGroup : kServerGroup);
    p->Barrier(0, kWorkerGroup + kServerGroup + kScheduler);
    p->DoBarrier(0, kWorkerGroup + kServerGroup, false);
    p->Barrier(0, kScheduler); // which nobody waits for
  }
}

// Requests that have not ended when the node is closed: Wait throws, callbacks are called, and kv ends.
BARE_SCENE(closed_with_requests_under_way, 1, 1) {
  StartPS(0, own_role(), -1, true);
  if (IsWorker()) {
    std::atomic<int> called{0};
    KVWorker<float> kv(0, 0);
    const int a = kv.Push({1}, {1}),
              b = kv.Push({1}, {1}, {}, 0, [&] { called++; });
    std::thread waits(
        [&] { EXPECT_THROW(fserver::ClosedError, "", kv.Wait(a)); });
    Finalize(0, own_role(), false);
    waits.join();
    EXPECT_THROW(fserver::ClosedError, "", kv.Wait(b));
    EXPECT_EQ(called.load(), 1);
    return;
  }
  if (IsServer()) // which answers nothing
    serve<float>(
        [](const KVMeta &, const KVPairs<float> &, KVServer<float> *) {});
  try {
    Finalize(0, own_role());
  } catch (const fserver::PeerLostError &) { // the worker has just gone
  }
}

// What a server has answered with is let go of when it has ended.
BARE_SCENE(memory_of_answers, 1, 1) {
  static std::atomic<int> deleted{0};
  static float memory[3] = {1, 1, 1};
  StartPS(0, own_role(), -1, true);
  if (IsServer())
    serve<float>([](const KVMeta &meta, const KVPairs<float> &,
                    KVServer<float> *server) {
      KVPairs<float> res;
      res.vals = SArray<float>(memory, 3, [](float *) { deleted++; });
      server->Response(meta, res);
    });
  if (IsWorker()) {
    KVWorker<float> kv(0, 0);
    std::vector<float> got(3);
    kv.Wait(kv.Pull({1}, &got));
    kv.Wait(kv.Pull({2}, &got));
  }
  const bool serves = IsServer();
  Finalize(0, own_role());
  EXPECT_EQ(deleted.load(), serves ? 2 : 0);
}

// Those that end first wait for the others, however long these work: FSERVER_STOP_TIMEOUT is for leaving alone.
BARE_SCENE(a_worker_that_takes_longer, 2, 1) {
  Environment::Init({{"FSERVER_STOP_TIMEOUT", "0.2"}});
  StartPS(0, own_role(), -1, true);
  if (IsServer())
    serve<float>(KVServerDefaultHandle<float>());
  if (IsWorker() && MyRank() == 1) {
    KVWorker<float> kv(0, 0);
    for (int i = 0; i < 10; i++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      kv.Wait(kv.Push({1}, {1}));
    }
  }
  Finalize(0, own_role());
}
