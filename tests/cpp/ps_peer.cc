// A worker or a server of StepMesh's interface, as DMLC_ROLE says; peer.py has the other one. The server has keys and
// values, too: a worker may use these instead, beside a worker of Python's.
#include "ps/af_tensor_app.h"

#include "scenes.hpp"

using namespace ps;

namespace {

constexpr int kAll = kWorkerGroup + kServerGroup;

void work_with_tensors() {
  AFTensorWorker w;
  const at::Tensor x =
      at::arange(1, 13, at::kFloat).view({3, 4}).to(at::kBFloat16);
  for (std::int64_t step = 0; step < 20; step++) {
    KeyTensorBatch push{{1, x}, {2, at::full({1}, step, at::kLong)}},
        pull{{1, at::empty_like(x)}, {2, at::empty({2}, at::kLong)}};
    w.Wait(w.ZBatchPushPull(push, pull), 30'000);
    EXPECT(at::equal(pull[0].val, x));
    EXPECT_EQ(pull[1].val[0].item<std::int64_t>(), 3 + step);
    EXPECT_EQ(pull[1].val[1].item<std::int64_t>(), 4);
  }
  KeyTensorBatch push{{1, x}}, pull{{1, at::empty_like(x)}};
  const auto refused =
      EXPECT_THROW(fserver::RefusedError, "no more",
                   w.Wait(w.ZBatchPushPull(push, pull), 30'000));
  EXPECT_EQ(refused.rank(), 0);
  Postoffice::Get()->Barrier(0, kAll);
}

void work_with_values() {
  KVWorker<float> kv(0, 0);
  std::vector<float> got;
  for (int step = 1; step <= 100; step++)
    kv.Wait(kv.Push({1, kMaxKey}, {1, 2}));
  kv.Wait(kv.Pull({1, kMaxKey}, &got));
  EXPECT(got == std::vector<float>({100, 200}));
  Postoffice::Get()->Barrier(0, kAll);
}

void answer(const AFTensorMeta &meta, AFTensorServer *server) {
  const at::Tensor &x = meta.push_tensors[0].val;
  EXPECT(x.scalar_type() == at::kBFloat16 && x.size(0) == 3);
  if (meta.push_tensors.size() == 1)
    throw std::runtime_error("no more");
  const std::int64_t step = meta.push_tensors[1].val[0].item<std::int64_t>();
  const at::Tensor shape = at::empty({2}, at::kLong);
  shape[0] = x.size(0) + step;
  shape[1] = x.size(1);
  server->Response(meta, {{1, x}, {2, shape}});
}

void serve() {
  AFTensorServer tensors(0);
  KVServer<float> values(0);
  values.set_request_handle(KVServerDefaultHandle<float>());
  tensors.SetRequestHandle(answer);
  Postoffice::Get()->Barrier(0, kAll);
  Finalize(0, Node::SERVER);
}

} // namespace

int play_peer(bool with_values);

int play_peer(bool with_values) {
  try {
    const Node::Role role = own_role();
    Environment::Init({{"STEPMESH_BACKEND", "CPU"}}); // where the tensors are
    StartPS(0, role, -1, false);
    if (role == Node::SERVER)
      serve();
    else
      with_values ? work_with_values() : work_with_tensors();
    Finalize(0, role);
  } catch (const std::exception &e) {
    failed("ps_peer", 0, e.what());
  }
  return 0;
}
