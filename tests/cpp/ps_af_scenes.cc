// Programs of StepMesh's kind, each case with processes of its own: instances of a group, and answers by key.
#include "ps/af_tensor_app.h"

#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "scenes.hpp"

using namespace ps;

int play_peer(bool with_values); // of ps_peer.cc

int main(int argc, char **argv) {
  if (std::getenv("DMLC_ROLE") && !std::getenv("KV_SCENE"))
    return play_peer(argc > 1);
  return run_scenes(argc, argv);
}

namespace {

at::Tensor full(std::int64_t n, double value) {
  return at::full({n}, value, at::TensorOptions(at::kFloat));
}
at::Tensor room(std::int64_t n) {
  return at::empty({n}, at::TensorOptions(at::kFloat));
}

// A server that adds a number to what is pushed, and receives key 1 of the workers of the first group in memory of its
// own.
std::unique_ptr<AFTensorServer> adding(int gpu, double number) {
  auto server = std::make_unique<AFTensorServer>(gpu);
  const at::Tensor memory = room(8);
  std::vector<int> ranks{0};
  std::vector<Key> keys{1};
  server->RegisterRecvTensor(memory, ranks, keys);
  server->SetRequestHandle([number, memory](const AFTensorMeta &meta,
                                            AFTensorServer *s) {
    EXPECT_EQ(meta.sender_rank, 0); // also of instance 1
    EXPECT_EQ(meta.sender, Postoffice::WorkerRankToID(0));
    EXPECT_EQ(meta.push_metas[0].sender, meta.sender);
    EXPECT(meta.push_tensors[0].val.data_ptr() == memory.data_ptr());
    s->Response(
        meta, {{meta.pull_tensors[0].key, meta.push_tensors[0].val + number}});
  });
  return server;
}

void expect_added(AFTensorWorker &w, double number) {
  for (int i = 0; i < 5; i++) {
    KeyTensorBatch push{{1, full(8, i)}}, pull{{2, room(8)}};
    w.Wait(w.ZBatchPushPull(push, pull), 20'000);
    EXPECT(at::equal(pull[0].val, full(8, i + number)));
  }
}

} // namespace

// One process runs all instances: each has a server and a worker of its own.
BARE_SCENE(all_instances_of_a_group, 1, 1) {
  Environment::Init({{"DMLC_GROUP_SIZE", "2"}});
  StartPS(0, own_role(), -1, true);
  std::unique_ptr<AFTensorServer> servers[2];
  for (int i = 0; i < 2 && own_role() == Node::SERVER; i++)
    servers[i] = adding(i, 10 + i);
  Postoffice::Get()->Barrier(0, kWorkerGroup + kServerGroup);
  for (int i = 0; i < 2 && own_role() == Node::WORKER; i++) {
    AFTensorWorker w(i);
    expect_added(w, 10 + i);
  }
  Finalize(0, own_role());
}

// Each process runs one instance, and calls it by STEPMESH_GPU.
BARE_SCENE(one_instance_of_a_group, 2, 2) {
  Environment::Init({{"DMLC_GROUP_SIZE", "2"},
                     {"DMLC_NUM_WORKER", "1"},
                     {"DMLC_NUM_SERVER", "1"},
                     {"DMLC_NODE_RANK", "0"},
                     {"STEPMESH_GPU", std::getenv("DMLC_NODE_RANK")}});
  StartPS(0, own_role(), -1, true);
  std::unique_ptr<AFTensorServer> server;
  if (own_role() == Node::SERVER)
    server = adding(GetGpuId(), 10 + GetGpuId());
  Postoffice::Get()->Barrier(0, kWorkerGroup + kServerGroup);
  if (own_role() == Node::WORKER) {
    AFTensorWorker w(GetGpuId());
    expect_added(w, 10 + GetGpuId());
  }
  Finalize(0, own_role());
}

namespace {

// Answers in another order than that of the pull tensors, by keys that the pushed tensor's key says.
void answer_by_key(const AFTensorMeta &meta, AFTensorServer *server) {
  KeyTensorBatch answer;
  for (const KeyTensor &kt : meta.pull_tensors) {
    const auto n = static_cast<std::int64_t>(kt.key % 100);
    answer.push_back({kt.key, full(n, static_cast<double>(kt.key))});
  }
  switch (meta.push_tensors[0].key) {
  case 1: // the keys of the pull tensors
    std::reverse(answer.begin(), answer.end());
    break;
  case 2: // another key
    answer[0].key = 777;
    break;
  case 3: // one of them twice
    answer[0].key = answer[1].key;
    break;
  case 4: // none
    for (KeyTensor &kt : answer)
      kt.key = 0;
    break;
  }
  server->Response(meta, answer);
}

} // namespace

SCENE(answers_by_key, 1, 1) {
  if (IsServer()) {
    static AFTensorServer *const server = new AFTensorServer(0);
    server->SetRequestHandle(answer_by_key);
    return;
  }
  AFTensorWorker w;
  for (const Key how : {1u, 2u, 3u, 4u}) {
    KeyTensorBatch push{{how, full(1, 0)}}, pull;
    for (const Key key : {503u, 205u, 909u})
      pull.push_back({key, room(static_cast<std::int64_t>(key % 100))});
    w.Wait(w.ZBatchPushPull(push, pull), 20'000);
    for (const KeyTensor &kt : pull)
      EXPECT(at::equal(kt.val, full(static_cast<std::int64_t>(kt.key % 100),
                                    static_cast<double>(kt.key))));
  }
  // Pull tensors with a key in common are answered in their order.
  KeyTensorBatch push{{5, full(1, 0)}},
      pull{{303, room(3)}, {303, room(3)}, {404, room(4)}};
  w.Wait(w.ZBatchPushPull(push, pull), 20'000);
  EXPECT(at::equal(pull[1].val, full(3, 303)));
  EXPECT(at::equal(pull[2].val, full(4, 404)));
}

namespace {

// A tensor that says when its memory has gone.
at::Tensor watched(std::int64_t n, std::atomic<bool> *gone) {
  auto *memory = new float[static_cast<std::size_t>(n)]();
  return at::from_blob(
      memory, {n},
      [=](void *) {
        delete[] memory;
        *gone = true;
      },
      at::TensorOptions(at::kFloat));
}

} // namespace

// What the engine reads and writes stays when AFTensorWorker and AFTensorServer have gone, until the node is closed.
BARE_SCENE(memory_of_objects_that_have_gone, 1, 1) {
  StartPS(0, own_role(), -1, true);
  std::atomic<bool> gone[2]{};
  const bool worker = IsWorker(), server = IsServer();
  if (server) {
    AFTensorServer s(0);
    std::vector<int> ranks{0};
    std::vector<Key> keys{1};
    s.RegisterRecvTensor(watched(4, &gone[0]), ranks, keys);
  }
  if (worker || server)
    Postoffice::Get()->Barrier(0, kWorkerGroup + kServerGroup);
  if (worker) {
    AFTensorWorker w;
    KeyTensorBatch push{{1, watched(4, &gone[0])}},
        pull{{2, watched(4, &gone[1])}};
    const int timestamp = w.ZBatchPushPull(push, pull);
    EXPECT_THROW(fserver::TimeoutError, "", w.Wait(timestamp, 50));
  }
  EXPECT(!gone[0] && !gone[1]);
  if (worker || server)
    Postoffice::Get()->Barrier(0, kWorkerGroup + kServerGroup);
  if (server) { // so that all can leave
    std::promise<void> answered;
    AFTensorServer s(0);
    s.SetRequestHandle([&](const AFTensorMeta &meta, AFTensorServer *own) {
      own->Response(meta, {{2, full(4, 1)}});
      answered.set_value();
    });
    answered.get_future().wait();
  }
  Finalize(0, own_role(), true);
  EXPECT(gone[0] == (worker || server) && gone[1] == worker);
}

// What programs of StepMesh keep in queues of their own.
CASE(requests_and_responses) {
  Environment::Init({{"STEPMESH_BACKEND", "CPU"}});
  TensorEvent event;
  AFTensorRequest request;
  request.push = {{1, full(2, 1)}};
  request.pull = {{2, room(2)}};
  request.push_timestamps = {0};
  request.pull_timestamps = {1};
  request.event = &event;
  ThreadsafeQueue<AFTensorRequest> queue;
  queue.Push(std::move(request));
  AFTensorRequest got;
  queue.WaitAndPop(&got);
  EXPECT(got.push[0].key == 1 && got.pull_timestamps[0] == 1);
  got.event->Sync();
  AFTensorResponse response = {};
  EXPECT(!response.event && response.rsp_start == 0);
  response.kv_meta.key = 3;
  response.kv_pair.keys = SArray<Key>{3};
  EXPECT_EQ(response.kv_pair.keys[0], response.kv_meta.key);
}

CASE(flags_and_batches) {
  EXPECT(AF_FLAG_BATCH_START == 1 && AF_FLAG_BATCH_MIDDLE == 2 &&
         AF_FLAG_BATCH_END == 3);
  const KeyTensor empty;
  EXPECT(empty.key == 0 && !empty.val.defined());
  const AFTensorServer::AFServerRequestHandle handle = nullptr;
  EXPECT(!handle && Trace().start == 0);
  const KeyTensorBatch batch{{7, full(2, 1)}};
  EXPECT(batch[0].key == 7 && batch[0].val.numel() == 2);
}

CASE(before_the_start) {
  EXPECT_THROW(fserver::ClosedError, "AFTensorWorker", AFTensorWorker());
  EXPECT_THROW(fserver::ClosedError, "AFTensorServer", AFTensorServer(0));
  EXPECT_THROW(fserver::ConfigError, "instance is 1, want 0",
               AFTensorWorker(1));
}

namespace {

// What a server makes of its arguments; the pushed tensor's key says which it gets wrong.
void answer_wrongly(const AFTensorMeta &meta, AFTensorServer *server) {
  switch (meta.push_tensors[0].key) {
  case 1: // one too many
    server->Response(meta, {{0, full(4, 0)}, {0, full(4, 0)}});
    break;
  case 2: // of another size
    server->Response(meta, {{0, full(3, 0)}});
    break;
  case 3:
    server->Response(meta, {{0, at::Tensor()}});
    break;
  case 4: // twice
    server->Response(meta, {{0, full(4, 4)}});
    EXPECT_THROW(fserver::ShapeError, "",
                 server->Response(meta, {{0, full(4, 4)}}));
    break;
  default: // later than the worker waits
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    server->Response(meta, {{0, full(4, 5)}});
  }
}

void serve_wrongly() {
  static AFTensorServer *const server = new AFTensorServer(0);
  const at::Tensor memory = room(8);
  std::vector<int> ranks{0}, unknown{0, 9};
  std::vector<Key> key{50}, keys{50, 51};
  EXPECT_THROW(fserver::ShapeError, "",
               server->RegisterRecvTensor(memory, ranks, keys));
  EXPECT_THROW(fserver::ShapeError, "worker 9: this server has no such worker",
               server->RegisterRecvTensor(memory, unknown, keys));
  EXPECT_THROW(fserver::ShapeError, "not contiguous or not defined",
               server->RegisterRecvTensor(at::Tensor(), ranks, key));
  server->SetRequestHandle(answer_wrongly);
  EXPECT_THROW(fserver::ConfigError, "there is one already",
               server->SetRequestHandle(answer_wrongly));
}

} // namespace

// An answer needs the bytes of its pull tensor, and not the dtype. Tensors whose memory is not what they say are
// refused.
SCENE(bytes_of_tensors, 1, 1) {
  if (IsServer()) {
    static AFTensorServer *const server = new AFTensorServer(0);
    server->SetRequestHandle([](const AFTensorMeta &meta, AFTensorServer *s) {
      s->Response(meta, {{2, meta.push_tensors[0].val}});
    });
    return;
  }
  AFTensorWorker w;
  KeyTensorBatch push{{1, full(4, 1.5)}}, none,
      pull{{2, at::empty({16}, at::TensorOptions(at::kByte))}};
  w.Wait(w.ZBatchPushPull(push, pull));
  EXPECT(at::equal(pull[0].val.view(at::kFloat), push[0].val));
  const at::Tensor complex =
      at::full({4}, c10::complex<float>(1, 2), at::kComplexFloat);
  KeyTensorBatch conj{{7, complex.conj()}}, neg{{8, complex._neg_view()}};
  EXPECT_THROW(fserver::ShapeError, "key 7 is a conjugate",
               w.ZBatchPushPull(conj, none));
  EXPECT_THROW(fserver::ShapeError, "pass .resolve_neg()",
               w.ZBatchPushPull(push, neg));
  conj[0].val = conj[0].val.resolve_conj();
  pull[0].val = at::empty({32}, at::TensorOptions(at::kByte));
  w.Wait(w.ZBatchPushPull(conj, pull));
  EXPECT(at::equal(pull[0].val.view(at::kComplexFloat), conj[0].val));
}

SCENE(wrong_arguments, 1, 1) {
  if (IsServer())
    return serve_wrongly();
  AFTensorWorker w;
  const auto ask = [&w](Key how, KeyTensorBatch &pull) {
    KeyTensorBatch push{{how, full(1, 0)}};
    return w.ZBatchPushPull(push, pull);
  };
  KeyTensorBatch pull{{2, room(4)}}, undefined{{9, at::Tensor()}}, none;
  EXPECT_THROW(fserver::ShapeError, "key 9 is not contiguous or not defined",
               w.ZBatchPushPull(undefined, none));
  EXPECT_THROW(fserver::ShapeError, "key 9 is not contiguous or not defined",
               ask(4, undefined));
  for (const int timestamp : {-1, 12345}) {
    const std::string text =
        "timestamp " + std::to_string(timestamp) + " is not known: pass one";
    EXPECT_THROW(fserver::ConfigError, "Wait: " + text, w.Wait(timestamp));
    EXPECT_THROW(fserver::ConfigError, "GetAllHandlers: " + text,
                 w.GetAllHandlers(timestamp));
    EXPECT_THROW(fserver::ConfigError, "FetchTrace: " + text,
                 w.FetchTrace(timestamp));
  }
  for (const Key how : {1u, 2u, 3u})
    EXPECT_THROW(fserver::RefusedError, "", w.Wait(ask(how, pull)));
  w.Wait(ask(4, pull));
  EXPECT(at::equal(pull[0].val, full(4, 4)));
  // The number stays valid when the time is up.
  const int late = ask(5, pull);
  EXPECT_THROW(fserver::TimeoutError, "", w.Wait(late, 0));
  EXPECT_THROW(fserver::TimeoutError, "", w.Wait(late, 50));
  w.Wait(late);
  EXPECT(at::equal(pull[0].val, full(4, 5)));
}

// The pull tensors are as many for each server.
SCENE(pull_tensors_of_two_servers, 1, 2) {
  if (IsServer()) {
    static AFTensorServer *const server = adding(0, 1).release();
    (void)server;
  }
  Postoffice::Get()->Barrier(0, kWorkerGroup + kServerGroup);
  if (IsServer())
    return;
  AFTensorWorker w;
  KeyTensorBatch push{{1, full(4, 1)}},
      three{{2, room(4)}, {2, room(4)}, {2, room(4)}};
  EXPECT_THROW(fserver::ShapeError, "3", w.ZBatchPushPull(push, three));
  three.pop_back();
  w.Wait(w.ZBatchPushPull(push, three));
  EXPECT(at::equal(three[1].val, full(4, 2)));
}

// A request of a KVWorker that has ended is known after more push_pulls of tensors than the engine remembers.
SCENE(tensors_beside_values, 1, 1) {
  if (IsServer()) {
    static AFTensorServer *const server = new AFTensorServer(0);
    server->SetRequestHandle(
        [](const AFTensorMeta &meta, AFTensorServer *s) { s->Response(meta); });
    serve<float>(KVServerDefaultHandle<float>());
    return;
  }
  KVWorker<float> kv(0, 0);
  AFTensorWorker w;
  const int pushed = kv.Push({1}, {1});
  KeyTensorBatch push{{1, full(4, 1)}}, none;
  for (int i = 0; i < 100; i++) {
    int open[50];
    for (int &t : open)
      t = w.ZBatchPushPull(push, none, false);
    for (int t : open)
      w.Wait(t, 60'000);
  }
  kv.Wait(pushed);
}

// A server dies with a request: Wait and later requests throw, and all ends in time.
BARE_SCENE(a_lost_server, 1, 2) {
  StartPS(0, own_role(), -1, true);
  {
    std::unique_ptr<AFTensorServer> server;
    if (IsServer()) {
      server = std::make_unique<AFTensorServer>(0);
      server->SetRequestHandle([](const AFTensorMeta &, AFTensorServer *) {
        if (MyRank() == 1)
          std::_Exit(0);
      });
    }
    if (IsWorker()) {
      AFTensorWorker w;
      KeyTensorBatch push{{1, full(4, 1)}}, pull{{2, room(4)}, {2, room(4)}};
      const int first = w.ZBatchPushPull(push, pull);
      const auto lost = EXPECT_THROW(fserver::PeerLostError, "server 1",
                                     w.Wait(first, 60'000));
      EXPECT_EQ(lost.rank(), 1);
      EXPECT_THROW(fserver::PeerLostError, "server 1",
                   w.Wait(w.ZBatchPushPull(push, pull), 60'000));
    } else if (IsServer()) {
      while (Postoffice::Get()->GetDeadNodes().empty())
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  try { // bounded, and the node is closed
    Finalize(0, own_role());
  } catch (const fserver::PeerLostError &) {
  }
  Finalize(0, own_role()); // nothing
  if (own_role() == Node::WORKER) {
    KeyTensorBatch push{{1, full(4, 1)}}, none;
    EXPECT_THROW(fserver::ClosedError, "",
                 AFTensorWorker().ZBatchPushPull(push, none));
  }
}
