// kv.cc: workers add to values under keys, which are spread over the servers, and read the sums.
// `fserver run --workers 2 --servers 2 -- build/kv` starts all.
#include <cstdlib>
#include <vector>

#include <ps/ps.h>

static void serve() {
  auto *server = new ps::KVServer<float>(0);
  server->set_request_handle(ps::KVServerDefaultHandle<float>());
  ps::RegisterExitCallback([server] { delete server; });
}

static void work() {
  ps::KVWorker<float> kv(0, 0);
  const std::size_t n = 1000;
  std::vector<ps::Key> keys(n);
  std::vector<float> vals(n, 1), sums;
  for (std::size_t i = 0; i < n; i++)
    keys[i] = ps::kMaxKey / n * i; // sorted, over the whole key space
  for (int step = 0; step < 100; step++)
    kv.Wait(kv.Push(keys, vals)); // each server gets the keys of its range
  ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup);
  kv.Wait(kv.Pull(keys, &sums));
  for (float sum : sums)
    CHECK_EQ(sum, 100.f * static_cast<float>(ps::NumWorkers()));
  LOG(INFO) << "worker " << ps::MyRank() << ": " << n << " sums are right";
}

int main() {
  const char *role = CHECK_NOTNULL(std::getenv("DMLC_ROLE"));
  ps::StartPS(0, ps::GetRole(role), -1, true);
  if (ps::IsServer())
    serve();
  if (ps::IsWorker())
    work();
  ps::Finalize(0, ps::GetRole(role), true);
}
