// KVWorker and KVServer under load: up to 40 workers and 4 servers, and 100,000 requests of 8 threads.
#include <atomic>
#include <thread>

#include "scenes.hpp"

using namespace ps;

int main(int argc, char **argv) { return run_scenes(argc, argv); }

namespace {

// Each worker adds 1 to keys at all servers, and again, and reads the sums of all.
void sums() {
  if (IsServer()) {
    serve<std::int64_t>(KVServerDefaultHandle<std::int64_t>());
    return;
  }
  constexpr std::size_t kKeys = 40;
  constexpr int kRounds = 50;
  SArray<Key> keys;
  for (Key k = 0; k < kKeys; k++)
    keys.push_back(kMaxKey / kKeys * k);
  KVWorker<std::int64_t> kv(0, 0);
  const SArray<std::int64_t> ones(kKeys, 1);
  SArray<std::int64_t> got(kKeys);
  std::vector<int> open;
  for (int i = 0; i < kRounds; i++)
    open.push_back(kv.ZPush(keys, ones));
  for (int t : open)
    kv.Wait(t);
  Postoffice::Get()->Barrier(0, kWorkerGroup);
  kv.Wait(kv.ZPull(keys, &got));
  for (std::int64_t sum : got)
    EXPECT_EQ(sum, kRounds * NumWorkers());
}

} // namespace

SCENE(one_worker_and_four_servers, 1, 4) { sums(); }
SCENE(ten_workers_and_three_servers, 10, 3) { sums(); }
SCENE(forty_workers_and_one_server, 40, 1) { sums(); }
SCENE(forty_workers_and_four_servers, 40, 4) { sums(); }

SCENE(a_hundred_thousand_requests, 1, 4) {
  if (IsServer()) {
    serve<std::int64_t>(KVServerDefaultHandle<std::int64_t>());
    return;
  }
  constexpr int kThreads = 8, kEach = 12500, kOpen = 64;
  KVWorker<std::int64_t> kv(0, 0);
  std::atomic<int> called{0};
  const auto key_of = [](int id) {
    return kMaxKey / kThreads * static_cast<Key>(id);
  };
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; id++)
    threads.emplace_back([&, id] {
      const SArray<Key> key{key_of(id)};
      const SArray<std::int64_t> one(1, 1);
      SArray<std::int64_t> sum(1);
      int open[kOpen];
      for (int i = 0; i < kEach; i++) {
        if (i >= kOpen)
          kv.Wait(open[i % kOpen]);
        open[i % kOpen] =
            i % 4 ? kv.ZPush(key, one)
                  : kv.ZPush(key, one, {}, 0, [&called] { called++; });
      }
      for (int t : open)
        kv.Wait(t);
      kv.Wait(kv.ZPull(key, &sum));
      EXPECT_EQ(sum[0], kEach);
    });
  for (std::thread &t : threads)
    t.join();
  EXPECT_EQ(called.load(), kThreads * kEach / 4);
}
