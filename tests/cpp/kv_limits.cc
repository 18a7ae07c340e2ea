// KVWorker and KVServer at their limits: many keys, many requests under way, many threads; and no allocation.
#include <atomic>
#include <cstddef>
#include <new>
#include <thread>

#include "scenes.hpp"

using namespace ps;

// Everything that allocates comes through these.
extern "C" {
void *__libc_malloc(std::size_t);
void *__libc_calloc(std::size_t, std::size_t);
void *__libc_realloc(void *, std::size_t);
}

static thread_local long allocated;

extern "C" {
void *malloc(std::size_t n) {
  allocated++;
  return __libc_malloc(n);
}
void *calloc(std::size_t n, std::size_t size) {
  allocated++;
  return __libc_calloc(n, size);
}
void *realloc(void *p, std::size_t n) {
  allocated++;
  return __libc_realloc(p, n);
}
}

SCENE(steady_requests_allocate_nothing, 1, 3) {
  if (IsServer()) {
    serve<float>([](const KVMeta &meta, const KVPairs<float> &data,
                    KVServer<float> *server) {
      static SArray<float> kept(3000, 1.f);
      KVPairs<float> res;
      if (!meta.push)
        res.vals = kept.segment(0, data.keys.size() * 10);
      server->Response(meta, res);
    });
    return;
  }
  KVWorker<float> kv(0, 0);
  SArray<Key> keys;
  for (Key k = 0; k < 300; k++)
    keys.push_back(kMaxKey / 300 * k);
  SArray<float> vals(3000, 2.f), got(3000);
  SArray<int> lens(300, 10), got_lens(300), one(1, 10);
  const SArray<Key> key = keys.segment(7, 8);
  SArray<float> part = got.segment(0, 10);
  std::atomic<int> called{0};
  const auto all = [&] {
    int open[8], n = 0;
    open[n++] = kv.ZPush(keys, vals);
    open[n++] = kv.ZPush(keys, vals, lens);
    open[n++] = kv.ZPull(keys, &got);
    open[n++] = kv.ZPull(key, &part, nullptr, 0, [&called] { called++; });
    open[n++] = kv.ZPush(key, part, one, 3);
    for (int i = 0; i < n; i++)
      kv.Wait(open[i]);
  };
  const long before = allocated;
  ::operator delete(::operator new(4)); // the counter counts
  EXPECT_EQ(allocated - before, 1);
  // A record gets memory for large heads when a large request has it for the first time. When that is depends
  // on when callbacks return, so the steady state may begin late.
  int rounds = 0;
  for (int quiet = 0; quiet < 500 && rounds < 5000; rounds++) {
    const long last = allocated;
    all();
    quiet = allocated == last ? quiet + 1 : 0;
  }
  EXPECT(rounds < 5000);
  EXPECT_EQ(called.load(), rounds);
  EXPECT_EQ(got[2999], 1.f);
}

// 8 threads, whose requests have distinct first keys, so that sums show each of them.
SCENE(requests_of_eight_threads, 2, 2) {
  if (IsServer()) {
    serve<std::int64_t>(KVServerDefaultHandle<std::int64_t>());
    return;
  }
  constexpr int kThreads = 8, kEach = 1250, kOpen = 50;
  KVWorker<std::int64_t> kv(0, 0);
  std::vector<std::thread> threads;
  std::atomic<int> called{0};
  for (int id = 0; id < kThreads; id++) {
    threads.emplace_back([&, id] {
      const SArray<Key> keys{static_cast<Key>(id),
                             kMaxKey - 100 + static_cast<Key>(id)};
      const SArray<std::int64_t> vals{1, 2};
      std::vector<int> open;
      for (int i = 0; i < kEach; i++) {
        if (i % 3 == 0)
          open.push_back(kv.ZPush(keys, vals, {}, 0, [&] { called++; }));
        else
          open.push_back(kv.ZPush(keys, vals));
        if (open.size() == kOpen) {
          for (int t : open)
            kv.Wait(t);
          open.clear();
        }
      }
    });
  }
  for (std::thread &t : threads)
    t.join();
  EXPECT_EQ(called.load(), kThreads * ((kEach + 2) / 3));
  Postoffice::Get()->Barrier(0, kWorkerGroup);
  std::vector<std::int64_t> got;
  std::vector<Key> keys;
  for (Key id = 0; id < kThreads; id++)
    keys.push_back(id);
  for (Key id = 0; id < kThreads; id++)
    keys.push_back(kMaxKey - 100 + id);
  kv.Wait(kv.Pull(keys, &got));
  for (std::size_t i = 0; i < keys.size(); i++)
    EXPECT_EQ(got[i], 2 * kEach * (i < kThreads ? 1 : 2));
}

// More requests than the engine has tickets, which the server answers when it has them all.
SCENE(more_requests_than_tickets, 1, 1) {
  constexpr int kAll = 20000;
  if (IsServer()) {
    serve<int>([](const KVMeta &meta, const KVPairs<int> &data,
                  KVServer<int> *server) {
      EXPECT_EQ(data.vals[0], meta.timestamp);
      server->Response(meta);
    });
    return;
  }
  KVWorker<int> kv(0, 0);
  std::atomic<int> called{0};
  int last = 0;
  for (int i = 0; i < kAll; i++)
    last =
        kv.Push({static_cast<Key>(i % 1000)}, {i}, {}, 0,
                i % 2 ? nullptr : KVWorker<int>::Callback([&] { called++; }));
  EXPECT_EQ(last, kAll - 1);
  for (int i = 0; i < kAll; i++)
    kv.Wait(i);
  EXPECT_EQ(called.load(), kAll / 2);
}

SCENE(more_first_keys_than_the_engine_takes, 1, 1) {
  static std::vector<int> memory(8);
  constexpr Key kKeys = 40000, kLast = kKeys - 1;
  if (IsServer()) {
    auto *server = new KVServer<int>(0);
    SArray<Key> key{kLast};
    server->RegisterRecvBufferWithRank(0, key, SArray<int>(memory.data(), 8));
    server->set_request_handle(
        [](const KVMeta &meta, const KVPairs<int> &data, KVServer<int> *s) {
          EXPECT_EQ(data.vals[0], static_cast<int>(data.keys[0]));
          if (meta.key == kLast)
            EXPECT(data.vals.data() == memory.data());
          s->Response(meta);
        });
    Postoffice::Get()->Barrier(0, kServerGroup + kWorkerGroup);
    return;
  }
  Postoffice::Get()->Barrier(0, kServerGroup + kWorkerGroup);
  KVWorker<int> kv(0, 0);
  std::vector<int> open;
  for (Key k = 0; k < kKeys; k++)
    open.push_back(kv.Push({k}, {static_cast<int>(k)}));
  for (std::size_t i = open.size(); i-- > 0;)
    kv.Wait(open[i]);
}
