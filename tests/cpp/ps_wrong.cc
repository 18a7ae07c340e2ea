// Wrong arguments of ps-lite's interface, beside those of requests: kv_faults.cc has these.
#include "scenes.hpp"

using namespace ps;

// The next call reads a setting again.
CASE(settings_that_make_no_sense) {
  for (const auto &[name, value, text] :
       {std::tuple{"DMLC_NUM_WORKER", "0",
                   "DMLC_NUM_WORKER=0: want at least 1"},
        std::tuple{"DMLC_NUM_SERVER", "-3",
                   "DMLC_NUM_SERVER=-3: want at least"},
        std::tuple{"DMLC_GROUP_SIZE", "two", "DMLC_GROUP_SIZE=two: want"}}) {
    Environment::Init({{name, value}});
    EXPECT_THROW(fserver::ConfigError, text, Postoffice::GetWorker());
    EXPECT_THROW(fserver::ConfigError, text,
                 StartPS(0, Node::WORKER, 0, false));
  }
  Environment::Init({{"DMLC_NODE_RANK", "-2"}, {"STEPMESH_GPU", "x"}});
  EXPECT_THROW(fserver::ConfigError, "DMLC_NODE_RANK=-2: want at least -1",
               GetNodeRank());
  EXPECT_THROW(fserver::ConfigError, "STEPMESH_GPU=x: want", GetGpuId());
  Environment::Init({});
}

CASE(roles_and_ranks) {
  EXPECT_THROW(fserver::ConfigError, "GetRole: role is \"\"", GetRole(""));
  EXPECT_THROW(fserver::ConfigError,
               "Start: role is 0, want 1: this is the worker",
               Postoffice::GetWorker()->Start(0, Node::SERVER, 0, false));
  Environment::Init({{"DMLC_PS_ROOT_URI", "127.0.0.1"},
                     {"DMLC_PS_ROOT_PORT", "9"},
                     {"FSERVER_INIT_TIMEOUT", "5"}});
  EXPECT_THROW(fserver::ConfigError, "DMLC_NODE_RANK",
               StartPS(0, Node::WORKER, 3, false));
  Environment::Init({{"DMLC_ROLE", "king"}});
  EXPECT_THROW(fserver::ConfigError, "role is \"king\"", Start(0));
  EXPECT_THROW(fserver::ConfigError, "role is \"king\"", StartAsync(0));
  EXPECT_THROW(fserver::ConfigError, "role is \"king\"", Finalize(0));
  Environment::Init({});
}

// Calls of a process that has not been started: they throw, or there is nothing to do.
CASE(before_the_start) {
  Postoffice *p = Postoffice::GetWorker();
  EXPECT_THROW(fserver::ClosedError, "call StartPS first",
               p->Barrier(0, kWorkerGroup));
  EXPECT_THROW(fserver::ClosedError, "call StartPS first", p->GetDeadNodes());
  EXPECT_THROW(fserver::ClosedError, "call StartPS first",
               p->GetCustomer(0, 0));
  EXPECT_THROW(fserver::ClosedError, "call StartPS first", SimpleApp(0, 0, p));
  EXPECT_THROW(fserver::ClosedError, "call StartPS first",
               KVWorker<float>(0, 0));
  EXPECT_THROW(fserver::ClosedError, "call StartPS first", KVServer<float>(0));
  EXPECT(!p->is_recovery() && p->my_rank() == 0 && !p->van()->IsReady());
  Finalize(0, Node::WORKER);
  Finalize(7, Node::JOINT, false);
}

SCENE(groups_of_a_barrier, 1, 1) {
  Postoffice *p = Postoffice::Get();
  for (const int group : {0, -1, 8, 1000}) {
    const std::string text = "Barrier: node_group is " + std::to_string(group) +
                             ", want a sum of kScheduler";
    EXPECT_THROW(fserver::ConfigError, text, p->Barrier(0, group));
    EXPECT_THROW(fserver::ConfigError, text, p->DoBarrier(0, group, false));
  }
  EXPECT_THROW(fserver::ConfigError, "include its role",
               p->Barrier(0, p->is_worker() ? kServerGroup : kWorkerGroup));
  p->Barrier(0, kServerGroup + kWorkerGroup); // all is well
}

SCENE(handles_and_timestamps, 1, 1) {
  SimpleApp app(3, 0);
  EXPECT_THROW(fserver::ConfigError, "set_request_handle: the handle is empty",
               app.set_request_handle(nullptr));
  EXPECT_THROW(fserver::ConfigError, "set_response_handle: the handle is empty",
               app.set_response_handle(nullptr));
  for (const int timestamp : {-1, 0, 1000})
    EXPECT_THROW(fserver::ConfigError,
                 "timestamp is " + std::to_string(timestamp) + ", want one",
                 app.Wait(timestamp));
  EXPECT_THROW(fserver::ConfigError, "app_id 3", SimpleApp(3, 0));
}

SCENE(memory_for_pushes, 1, 1) {
  if (IsWorker()) {
    KVWorker<float> kv(0, 0);
    kv.Wait(kv.Push({5}, {1}));
    // The handler adds up one value for each key.
    EXPECT_THROW(fserver::RefusedError,
                 "2 values for 1 keys, want one for each",
                 kv.Wait(kv.Push({5}, {1, 1})));
    Postoffice::Get()->Barrier(0, kServerGroup + kWorkerGroup);
    return;
  }
  auto *server = serve<float>(KVServerDefaultHandle<float>());
  static SArray<float> memory(8);
  SArray<Key> none, five{5}, six{6};
  EXPECT_THROW(fserver::ShapeError, "keys or vals is empty",
               server->RegisterRecvBufferWithRank(0, none, memory));
  EXPECT_THROW(fserver::ShapeError, "keys or vals is empty",
               server->RegisterRecvBuffer(9, six, SArray<float>()));
  EXPECT_THROW(fserver::ShapeError, "worker 7: this server has no such worker",
               server->RegisterRecvBufferWithRank(7, six, memory));
  EXPECT_THROW(fserver::ShapeError, "worker -1: this server has no such worker",
               server->RegisterRecvBufferWithRank(-1, six, memory));
  Postoffice::Get()->Barrier(0, kServerGroup + kWorkerGroup);
  EXPECT_THROW(fserver::ShapeError, "", // its key has been pushed
               server->RegisterRecvBufferWithRank(0, five, memory));
}

SCENE(lists_of_a_request, 1, 2) {
  if (IsServer()) {
    serve<float>(KVServerDefaultHandle<float>());
    return;
  }
  KVWorker<float> kv(0, 0);
  std::vector<float> three(3);
  EXPECT_THROW(fserver::ConfigError, "keys[1] is 1 after 2",
               kv.Pull({2, 1}, &three));
  EXPECT_THROW(fserver::ShapeError, "vals has 3 values for 2 keys",
               kv.Push({1, 2}, three));
  EXPECT_THROW(fserver::RefusedError, "has 2 values, want 3",
               kv.Wait(kv.Pull({1, 2}, &three)));
  EXPECT_THROW(fserver::ShapeError, "there is no key", kv.Pull({}, &three));
  std::vector<int> lens(3);
  std::vector<float> two(2);
  EXPECT_THROW(fserver::ShapeError, "lens has 3", kv.Pull({1, 2}, &two, &lens));
  EXPECT_THROW(fserver::ConfigError, "vals is null",
               kv.ZPull(SArray<Key>{1}, nullptr));
  SArray<float> nowhere(static_cast<float *>(nullptr), 1);
  EXPECT_THROW(fserver::ConfigError, "data is null, want 4 bytes",
               kv.ZPush(SArray<Key>{1}, nowhere));
  EXPECT_THROW(fserver::ConfigError, "data is null, want 4 bytes",
               kv.ZPull(SArray<Key>{1}, &nowhere));
  kv.set_slicer([](const KVPairs<float> &, const std::vector<Range> &,
                   KVWorker<float>::SlicedKVs *sliced) { sliced->resize(5); });
  EXPECT_THROW(fserver::ShapeError, "slicer: made 5 parts for 2 servers",
               kv.Push({1}, {1}));
}
