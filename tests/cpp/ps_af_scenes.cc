// Programs of StepMesh's kind, each case with processes of its own: instances of a group, and answers by key.
#include "ps/af_tensor_app.h"

#include <memory>
#include <thread>
#include <vector>

#include "scenes.hpp"

using namespace ps;

int main(int argc, char **argv) { return run_scenes(argc, argv); }

namespace {

Node::Role own_role() { return GetRole(std::getenv("DMLC_ROLE")); }

at::Tensor full(std::int64_t n, double value) {
  return at::full({n}, value, at::TensorOptions(at::kFloat));
}
at::Tensor room(std::int64_t n) {
  return at::empty({n}, at::TensorOptions(at::kFloat));
}

// A server that adds a number to what is pushed.
std::unique_ptr<AFTensorServer> adding(int gpu, double number) {
  auto server = std::make_unique<AFTensorServer>(gpu);
  server->SetRequestHandle([number](const AFTensorMeta &meta,
                                    AFTensorServer *s) {
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
