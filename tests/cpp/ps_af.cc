// A program of StepMesh's kind: workers push and pull tensors of torch, servers answer. With STEPMESH_BACKEND=GPU they
// are on the GPU; without one it says why and ends with status 77, or, with NEED_GPU set, 1.
#include <dlfcn.h>

#include "ps/ps.h"

using namespace ps;

namespace {

constexpr Key kRegistered = 50, kPulled = 700;

bool OnGpu() {
  const char *backend = Environment::Get()->find("STEPMESH_BACKEND");
  return backend && std::string(backend) == "GPU";
}
// A type of tensors where the node has them.
at::TensorOptions Of(at::ScalarType type) {
  const auto gpu = static_cast<c10::DeviceIndex>(GetGpuId());
  return at::TensorOptions(type).device(OnGpu() ? at::Device(at::kCUDA, gpu)
                                                : at::Device(at::kCPU));
}

// Throws, which CHECK does not, so that the other processes end, too.
void Expect(bool good, const char *what) {
  if (!good)
    throw std::runtime_error(what);
}

template <class E, class F> void ExpectThrow(const char *part, F &&f) {
  try {
    f();
  } catch (const E &e) {
    Expect(std::string(e.what()).find(part) != std::string::npos, e.what());
    return;
  }
  Expect(false, part);
}

void Answer(const AFTensorMeta &meta, AFTensorServer *server) {
  if (meta.push_tensors.empty()) // a pull alone
    return server->Response(meta, {{0, at::full({4}, 5, Of(at::kFloat))}});
  const at::Tensor &x = meta.push_tensors[0].val;
  if (meta.push_tensors[0].key == 99)
    throw std::runtime_error("key 99 is not served");
  if (meta.pull_tensors.empty())
    return server->Response(meta);
  const std::size_t q = meta.pull_tensors.size();
  for (std::size_t j = 0; j < q; j++)
    Expect(meta.pull_tensors[j].key ==
                   kPulled + q * static_cast<Key>(MyRank()) + j &&
               meta.pull_metas[j].key == meta.pull_tensors[j].key,
           "the keys of the pull tensors");
  KeyTensorBatch answer;
  for (std::size_t j = 0; j < meta.pull_tensors.size(); j++)
    answer.push_back({meta.pull_tensors[j].key,
                      x * static_cast<double>(j + 2) + meta.sender_rank});
  server->Response(meta, answer);
}

void Serve(Node::Role role) {
  AFTensorServer server(GetGpuId());
  const at::Tensor mine = at::zeros({2, 8}, Of(at::kFloat));
  std::vector<int> ranks{0, 1};
  std::vector<Key> keys{kRegistered, kRegistered};
  server.RegisterRecvTensor(mine, ranks, keys);
  ExpectThrow<fserver::ShapeError>(
      "", [&] { server.RegisterRecvTensor(mine, ranks, keys); });
  ExpectThrow<fserver::ConfigError>("SetRequestHandle: the handle is empty",
                                    [&] { server.SetRequestHandle(nullptr); });
  server.SetRequestHandle(Answer);
  Postoffice::GetServer()->Barrier(0, kWorkerGroup + kServerGroup);
  Postoffice::GetServer()->Barrier(0, kWorkerGroup + kServerGroup);
  Expect(mine[0][7].item<float>() == 1 && mine[1][7].item<float>() == 2,
         "the registered memory has what both workers pushed");
  Finalize(0, role, true);
}

void Echo(AFTensorWorker &w, int servers) {
  for (int step = 0; step < 50; step++) {
    KeyTensorBatch push{{1, at::full({3, 4}, step, Of(at::kBFloat16))}}, pull;
    for (int i = 0; i < servers * 2; i++)
      pull.push_back({kPulled + static_cast<Key>(i),
                      at::empty({3, 4}, Of(at::kBFloat16))});
    const int ts = w.ZBatchPushPull(push, pull);
    const std::vector<int> all = w.GetAllHandlers(ts);
    Expect(all.size() == 3 && all[0] == ts && all[2] == ts + 2,
           "P + Q numbers");
    w.Wait(ts + 2);
    w.Wait(ts);
    for (int i = 0; i < servers * 2; i++)
      Expect(at::equal(pull[static_cast<std::size_t>(i)].val,
                       push[0].val * (i % 2 + 2) + MyRank()),
             "the answer");
    const auto [request, response] = w.FetchTrace(ts);
    Expect(request.start && request.start <= response.process, "the trace");
  }
}

void Work(Node::Role role) {
  AFTensorWorker w;
  Postoffice::GetWorker()->Barrier(0, kWorkerGroup + kServerGroup);
  const int servers = NumServers();
  Echo(w, servers);

  KeyTensorBatch none;
  KeyTensorBatch push{
      {kRegistered, at::full({8}, MyRank() + 1, Of(at::kFloat))}};
  w.Wait(w.ZBatchPushPull(push, none)); // a push alone
  KeyTensorBatch pull;
  for (int i = 0; i < servers; i++)
    pull.push_back({7, at::empty({4}, Of(at::kFloat))});
  w.Wait(w.ZBatchPushPull(none, pull)); // a pull alone
  Expect(pull.back().val[3].item<float>() == 5, "the pull");

  ExpectThrow<fserver::ConfigError>("timestamp 1000000 is not known",
                                    [&] { w.Wait(1000000); });
  ExpectThrow<fserver::ShapeError>("both empty",
                                   [&] { w.ZBatchPushPull(none, none); });
  KeyTensorBatch bad{{3, at::zeros({4, 4}, Of(at::kFloat)).t()}};
  ExpectThrow<fserver::ShapeError>("key 3 is not contiguous",
                                   [&] { w.ZBatchPushPull(bad, none); });
  KeyTensorBatch refused{{99, at::zeros({4}, Of(at::kFloat))}};
  const int ts = w.ZBatchPushPull(refused, pull);
  ExpectThrow<fserver::RefusedError>("key 99 is not served",
                                     [&] { w.Wait(ts); });
  Postoffice::GetWorker()->Barrier(0, kWorkerGroup + kServerGroup);
  Finalize(0, role, true);
  std::cout << "worker is done" << std::endl;
}

} // namespace

int main(int, char **argv) {
  try {
    // Its kernels are registered when it is loaded.
    if (OnGpu())
      dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
    if (OnGpu() && !at::hasCUDA()) {
      std::cout << "skipped: torch has no CUDA here, or sees no GPU"
                << std::endl;
      return Environment::Get()->find("NEED_GPU") ? 1 : 77;
    }
    const Node::Role role = GetRole(Environment::Get()->find("DMLC_ROLE"));
    StartPS(0, role, -1, true, argv[0]);
    if (role == Node::WORKER)
      Work(role);
    else
      Serve(role);
  } catch (const std::exception &e) {
    std::cerr << "ps_af: " << e.what() << std::endl;
    return 1;
  }
}
