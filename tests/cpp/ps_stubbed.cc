// What the headers of ps-lite share between threads, over the engine of stub.c: a worker and a server of this process.
#include <atomic>
#include <cstdlib>
#include <thread>

#include "ps/ps.h"
#include "test.hpp"

using namespace ps;

namespace {

constexpr int kThreads = 4, kEach = 150;

// Runs f(i) in threads of their own.
template <class F> void in_threads(F &&f) {
  std::vector<std::thread> all;
  for (int i = 0; i < kThreads; i++)
    all.emplace_back([&f, i] { f(i); });
  for (std::thread &t : all)
    t.join();
}

// A worker and a server, while a case runs.
struct Both {
  Both() {
    setenv("DMLC_ROLE", "joint", 1);
    StartPS(0, Node::JOINT, 0, true);
  }
  ~Both() { Finalize(0, Node::JOINT, true); }
};

SArray<Key> key_of(int i) { return {static_cast<Key>(i) * 4}; }

} // namespace

CASE(threads_share_a_worker) {
  const Both both;
  KVServer<float> server(0);
  server.set_request_handle(KVServerDefaultHandle<float>());
  KVWorker<float> kv(0, 0);
  std::atomic<int> called{0};
  in_threads([&](int i) {
    const SArray<float> one(1, 1.f);
    SArray<float> got(1);
    for (int n = 0; n < kEach; n++) {
      const int a = kv.ZPush(key_of(i), one, {}, 0, [&] { called++; });
      const int b = kv.ZPush(key_of(i), one);
      kv.Wait(a);
      kv.Wait(b);
      kv.Wait(kv.ZPull(key_of(i), &got));
      EXPECT_EQ(got[0], static_cast<float>(2 * n + 2));
    }
  });
  EXPECT_EQ(called.load(), kThreads * kEach);
}

CASE(threads_have_a_worker_each) {
  const Both both;
  KVServer<char> text(1);
  KVServer<float> sums(2);
  text.set_request_handle([](const KVMeta &meta, const KVPairs<char> &,
                             KVServer<char> *s) { s->Response(meta); });
  sums.set_request_handle(KVServerDefaultHandle<float>());
  in_threads([](int i) {
    for (int n = 0; n < 20; n++) { // they come and go
      KVWorker<char> c(1, i);
      KVWorker<float> f(2, i);
      c.Push({static_cast<Key>(i)}, {'x'}, {}, 0, [] {});
      f.Wait(f.Push({static_cast<Key>(i)}, {1}));
    }
  });
}

// The memory is registered by whoever uses it for the second time.
CASE(threads_share_an_array) {
  const Both both;
  KVServer<int> server(0);
  SArray<int> values(2000, 7);
  server.set_request_handle(
      [&values](const KVMeta &meta, const KVPairs<int> &, KVServer<int> *s) {
        KVPairs<int> res;
        if (!meta.push)
          res.vals = values;
        s->Response(meta, res);
      });
  KVWorker<int> kv(0, 0);
  for (int n = 0; n < 20; n++) {
    const SArray<int> pushed(2000, 1);
    SArray<int> given(4 * 2000);
    in_threads([&](int i) {
      const auto at = static_cast<std::size_t>(i) * 2000;
      SArray<int> part = given.segment(at, at + 2000), grown;
      kv.Wait(kv.ZPush(key_of(i), pushed));
      kv.Wait(kv.ZPull(key_of(i), &part));
      kv.Wait(kv.ZPull(key_of(i), &grown)); // whose size the server is asked
      EXPECT(part[1999] == 7 && grown.size() == 2000);
    });
  }
}

CASE(answers_of_other_threads) {
  const Both both;
  ThreadsafeQueue<KVMeta> queue;
  KVServer<int> server(0);
  server.set_request_handle([&queue](const KVMeta &meta, const KVPairs<int> &,
                                     KVServer<int> *) { queue.Push(meta); });
  std::vector<std::thread> answering;
  for (int i = 0; i < 3; i++)
    answering.emplace_back([&] {
      for (;;) {
        KVMeta meta;
        KVPairs<int> res;
        queue.WaitAndPop(&meta);
        if (meta.addr == 0)
          return;
        if (!meta.push)
          res.vals = SArray<int>(1500, 3);
        server.Response(meta, res);
      }
    });
  KVWorker<int> kv(0, 0);
  in_threads([&](int i) {
    for (int n = 0; n < kEach; n++) {
      SArray<int> got;
      kv.Wait(kv.ZPush(key_of(i), SArray<int>(1, 1)));
      kv.Wait(kv.ZPull(key_of(i), &got));
      EXPECT(got.size() == 1500 && got[1499] == 3);
    }
  });
  for (std::size_t i = 0; i < answering.size(); i++)
    queue.Push(KVMeta());
  for (std::thread &t : answering)
    t.join();
}

// A push_pull has failed, and the engine still uses its memory: fs_wait returns at once, and Wait waits all the same.
CASE(waits_at_rest_for_memory_in_use) {
  const Both both;
  ThreadsafeQueue<KVMeta> queue;
  KVServer<float> server(0);
  server.set_request_handle([&queue](const KVMeta &meta, const KVPairs<float> &,
                                     KVServer<float> *) { queue.Push(meta); });
  KVWorker<float> kv(0, 0);
  const int pushed = kv.ZPush(key_of(0), SArray<float>(1, 1.f));
  KVMeta meta; // of which addr is the ticket
  queue.WaitAndPop(&meta);
  fs_info info;
  fs_get_info(1, &info);
  __atomic_store_n(
      const_cast<volatile std::uint64_t *>(&info.words[meta.addr & info.mask]),
      meta.addr << 2 | 3, __ATOMIC_RELEASE);
  std::thread answers([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    server.Response(meta);
  });
  const auto spent = [] {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
  };
  const auto before = spent();
  kv.Wait(pushed);
  EXPECT(spent() - before < 50);
  answers.join();
}
