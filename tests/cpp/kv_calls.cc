// KVWorker and KVServer, each case with processes of its own.
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "scenes.hpp"

using namespace ps;

namespace {

// Keys that are spread over all servers.
std::vector<Key> spread(std::size_t n, Key first = 0) {
  std::vector<Key> keys;
  for (std::size_t i = 0; i < n; i++)
    keys.push_back(kMaxKey / n * i + first);
  return keys;
}

// A store of lists of any lengths, by key.
template <class Val> struct Lists {
  void operator()(const KVMeta &meta, const KVPairs<Val> &data,
                  KVServer<Val> *server) {
    const std::size_t n = data.keys.size();
    KVPairs<Val> res;
    std::size_t at = 0;
    for (std::size_t i = 0; i < n; i++) {
      std::vector<Val> &list = store[data.keys[i]];
      if (meta.push) {
        const std::size_t len = data.lens.empty()
                                    ? data.vals.size() / n
                                    : static_cast<std::size_t>(data.lens[i]);
        list.assign(data.vals.data() + at, data.vals.data() + at + len);
        at += len;
        continue;
      }
      for (const Val &v : list)
        res.vals.push_back(v);
      res.lens.push_back(static_cast<int>(list.size()));
    }
    server->Response(meta, res);
  }
  std::map<Key, std::vector<Val>> store;
};

// All workers add to the same keys.
void sums() {
  if (IsServer()) {
    serve<float>(KVServerDefaultHandle<float>());
    return;
  }
  KVWorker<float> kv(0, 0);
  const std::vector<Key> keys = spread(100);
  std::vector<float> vals(100), got(100), grown;
  std::iota(vals.begin(), vals.end(), 1.f);
  std::vector<int> open;
  for (int i = 0; i < 50; i++)
    open.push_back(kv.Push(keys, vals));
  for (int i = 0; i < 50; i++)
    EXPECT_EQ(open[static_cast<std::size_t>(i)], i);
  for (int t : open)
    kv.Wait(t);
  Postoffice::Get()->Barrier(0, kWorkerGroup);
  kv.Wait(kv.Pull(keys, &got));
  kv.Wait(kv.Pull(keys, &grown));
  for (std::size_t i = 0; i < 100; i++)
    EXPECT_EQ(got[i], 50.f * static_cast<float>(NumWorkers()) * vals[i]);
  EXPECT(grown == got);
  EXPECT_EQ(MyRank(), GetNodeRank());
  kv.Wait(open[0]); // ended long ago
}

} // namespace

SCENE(sums_of_one_worker, 1, 1) { sums(); }
SCENE(sums_of_three_workers, 3, 4) { sums(); }
SCENE(sums_of_eight_workers, 8, 2) { sums(); }

SCENE(each_server_gets_its_range_only, 1, 3) {
  if (IsServer()) {
    serve<int>([](const KVMeta &meta, const KVPairs<int> &data,
                  KVServer<int> *server) {
      const Range mine =
          Postoffice::Get()
              ->GetServerKeyRanges()[static_cast<std::size_t>(MyRank())];
      for (Key k : data.keys)
        EXPECT(k >= mine.begin() && (k < mine.end() || mine.end() == kMaxKey));
      EXPECT(MyRank() != 1); // none is pushed there
      KVPairs<int> res;
      if (!meta.push)
        res.vals = SArray<int>(data.keys.size(), MyRank() + 1);
      server->Response(meta, res);
    });
    return;
  }
  KVWorker<int> kv(0, 0);
  const std::vector<Key> keys{0, 1, kMaxKey / 3 - 1, kMaxKey - 1, kMaxKey};
  std::vector<int> got(5);
  kv.Wait(kv.Push(keys, {1, 2, 3, 4, 5}));
  kv.Wait(kv.Pull(keys, &got));
  EXPECT(got == (std::vector<int>{1, 1, 1, 3, 3}));
  kv.Wait(kv.Push({}, {})); // no server gets anything
}

SCENE(lens_of_any_size, 1, 3) {
  if (IsServer()) {
    serve<double>(Lists<double>());
    return;
  }
  KVWorker<double> kv(0, 0);
  const std::vector<Key> keys = spread(7, 3);
  const std::vector<int> lens{1, 0, 5, 2, 1000, 3, 1};
  std::vector<double> vals(1012);
  std::iota(vals.begin(), vals.end(), 0.5);
  kv.Wait(kv.Push(keys, vals, lens));
  std::vector<double> got, sized(1012);
  std::vector<int> got_lens;
  kv.Wait(kv.Pull(keys, &got, &got_lens));
  EXPECT(got == vals && got_lens == lens);
  got_lens.assign(7, -1);
  kv.Wait(kv.Pull(keys, &sized, &got_lens)); // a known sum over several servers
  EXPECT(sized == vals && got_lens == lens);
  SArray<double> z;
  SArray<int> zlens;
  kv.Wait(kv.ZPull(SArray<Key>(keys), &z, &zlens));
  EXPECT_EQ(z.size(), 1012u);
  EXPECT_EQ(z[1011], vals[1011]);
  EXPECT_EQ(zlens[4], 1000);
  // One server, whose sizes are known or not, and other sizes under the same key.
  for (std::size_t n : {3u, 1u, 70000u, 0u, 5u}) {
    const std::vector<double> list(n, static_cast<double>(n));
    kv.Wait(kv.Push({1, 2}, list, {static_cast<int>(n), 0}));
    std::vector<double> same(n), any;
    std::vector<int> two;
    kv.Wait(kv.Pull({1, 2}, &same, &two));
    EXPECT(same == list);
    EXPECT_EQ(two[0], static_cast<int>(n));
    kv.Wait(kv.Pull({1, 2}, &any));
    EXPECT(any == list);
  }
  // A wrong size is told, and the next call works.
  std::vector<double> three(3);
  EXPECT_THROW(fserver::RefusedError, "has 5 values, want 3",
               kv.Wait(kv.Pull({1}, &three)));
  EXPECT_THROW(fserver::ShapeError, "vals has 3 values, the servers have 1012",
               std::vector<int> l;
               std::vector<double> v(3); kv.Wait(kv.Pull(keys, &v, &l)));
  got.clear();
  kv.Wait(kv.Pull({1}, &got));
  EXPECT_EQ(got.size(), 5u);
}

// Without lens, a pull of a known size says how many values there are, and not how many each key has.
SCENE(values_that_keys_do_not_divide, 1, 2) {
  if (IsServer()) {
    serve<int>(Lists<int>());
    return;
  }
  KVWorker<int> kv(0, 0);
  std::vector<int> got(3);
  kv.Wait(kv.Push({1, 2}, {7, 8, 9}, {1, 2})); // of one server
  kv.Wait(kv.Pull({1, 2}, &got));
  EXPECT(got == (std::vector<int>{7, 8, 9}));
  kv.Wait(kv.Push({1, kMaxKey}, {1, 2, 3}, {2, 1})); // of two
  kv.Wait(kv.Pull({1, kMaxKey}, &got));
  EXPECT(got == (std::vector<int>{1, 2, 3}));
  got.resize(5);
  EXPECT_THROW(fserver::ShapeError, "vals has 5 values, the servers have 3",
               kv.Wait(kv.Pull({1, kMaxKey}, &got)));
}

// The values of a pull of unknown size are those of its answer, whatever the server does with its memory before the
// worker fetches them.
SCENE(values_that_the_server_changes, 1, 1) {
  if (IsServer()) {
    serve<int>([](const KVMeta &meta, const KVPairs<int> &data,
                  KVServer<int> *server) {
      static std::vector<int> memory(3), lens(1);
      const int value = meta.push ? 7 : static_cast<int>(data.keys[0]);
      std::fill(memory.begin(), memory.end(), value);
      lens[0] = value == 5 ? 3 : 2;
      KVPairs<int> res;
      if (!meta.push) {
        res.vals = SArray<int>(memory.data(), memory.size());
        res.lens = SArray<int>(lens.data(), lens.size());
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
      }
      server->Response(meta, res);
    });
    return;
  }
  KVWorker<int> kv(0, 0);
  std::vector<int> a, b, lens;
  const int first = kv.Pull({5}, &a, &lens), second = kv.Pull({6}, &b);
  kv.Wait(kv.Push({8}, {1}));
  kv.Wait(first);
  kv.Wait(second);
  EXPECT(a == std::vector<int>(3, 5) && lens == std::vector<int>{3});
  EXPECT(b == std::vector<int>(3, 6));
}

// With lens, the memory may be larger than what the servers have.
SCENE(more_memory_than_values, 1, 3) {
  if (IsServer()) {
    serve<double>(Lists<double>());
    return;
  }
  KVWorker<double> kv(0, 0);
  // One server.
  kv.Wait(kv.Push({1, 2}, {1, 2, 3}, {2, 1}));
  std::vector<double> got(9, 7);
  std::vector<int> lens;
  for (int i = 0; i < 3; i++) {
    kv.Wait(kv.Pull({1, 2}, &got, &lens));
    EXPECT(lens == (std::vector<int>{2, 1}));
    EXPECT(got.size() == 9 && got[0] == 1 && got[1] == 2 && got[2] == 3);
  }
  SArray<double> large(100'000);
  SArray<int> two(2);
  std::atomic<int> called{0};
  kv.Wait(kv.ZPull(SArray<Key>{1, 7}, &large, &two, 0, [&] { called++; }));
  EXPECT(two[0] == 2 && two[1] == 0); // key 7 has none
  EXPECT(large.size() == 100'000 && large[1] == 2 && called == 1);
  lens.clear();
  kv.Wait(kv.Pull({7}, &got, &lens));
  EXPECT(got.size() == 9 && lens[0] == 0);
  // Several servers: the values are behind each other.
  const std::vector<Key> keys = spread(7, 3);
  std::vector<double> vals(12);
  std::iota(vals.begin(), vals.end(), 0.5);
  const std::vector<int> seven{1, 0, 5, 2, 0, 3, 1};
  kv.Wait(kv.Push(keys, vals, seven));
  got.assign(20, 7);
  lens.clear();
  kv.Wait(kv.Pull(keys, &got, &lens));
  EXPECT(lens == seven && got.size() == 20);
  EXPECT(std::equal(vals.begin(), vals.end(), got.begin()));
  // Not without lens, which alone say how many there are; and not less memory.
  EXPECT_THROW(fserver::RefusedError, "has 3 values, want 20",
               kv.Wait(kv.Pull({1, 2}, &got)));
  got.resize(2);
  lens.clear();
  EXPECT_THROW(fserver::RefusedError, "has 3 values, want 2",
               kv.Wait(kv.Pull({1, 2}, &got, &lens)));
}

SCENE(what_a_handler_is_told, 2, 1) {
  if (IsServer()) {
    serve<char>([](const KVMeta &meta, const KVPairs<char> &data,
                   KVServer<char> *server) {
      const int rank = Postoffice::IDtoRank(meta.sender);
      EXPECT_EQ(Postoffice::WorkerRankToID(rank), meta.sender);
      EXPECT_EQ(meta.cmd, 70 + rank);
      EXPECT_EQ(meta.customer_id, 5 + rank);
      EXPECT_EQ(meta.key, static_cast<Key>(rank));
      EXPECT_EQ(data.keys.size(), 2u);
      EXPECT_EQ(data.keys[0], meta.key);
      EXPECT_EQ(meta.timestamp, meta.push ? 0 : 1);
      EXPECT_EQ(data.vals.size(), meta.push ? 4u : 0u);
      EXPECT_EQ(meta.val_len, 4);
      KVPairs<char> res;
      if (!meta.push)
        res.vals = SArray<char>(4, 'x');
      server->Response(meta, res);
    });
    return;
  }
  const auto rank = static_cast<Key>(MyRank());
  KVWorker<char> kv(0, 5 + MyRank());
  std::vector<char> got(4);
  kv.Wait(kv.Push({rank, 10}, {'a', 'b', 'c', 'd'}, {}, 70 + MyRank()));
  kv.Wait(kv.Pull({rank, 10}, &got, nullptr, 70 + MyRank()));
  EXPECT_EQ(got[3], 'x');
}

SCENE(callbacks_run_once, 2, 2) {
  if (IsServer()) {
    serve<int>(KVServerDefaultHandle<int>());
    return;
  }
  std::atomic<int> pushed{0}, pulled{0}, nested{0};
  KVWorker<int> kv(0, 0); // whose end waits for callbacks
  const SArray<Key> keys(spread(10, static_cast<Key>(MyRank())));
  const SArray<int> vals(10, 1);
  std::vector<int> open;
  for (int i = 0; i < 500; i++)
    open.push_back(kv.ZPush(keys, vals, {}, 0, [&] { pushed++; }));
  for (int t : open)
    kv.Wait(t);
  EXPECT_EQ(pushed.load(), 500);
  // Requests from within a callback, which waits for them; one of unknown size.
  SArray<int> got, inner(10);
  const int t = kv.ZPull(keys, &got, nullptr, 0, [&] {
    EXPECT_EQ(got.size(), 10u); // it is there
    kv.Wait(kv.ZPull(keys, &inner));
    kv.Wait(kv.ZPull(keys, &inner, nullptr, 0, [&] { nested++; }));
    pulled++;
  });
  kv.Wait(t);
  EXPECT_EQ(pulled.load(), 1);
  EXPECT_EQ(nested.load(), 1);
  EXPECT_EQ(got[9], 500);
  EXPECT_EQ(inner[0], 500);
  // Nobody waits for this one but the end of kv.
  kv.ZPush(keys, vals, {}, 0, [&] { pushed++; });
}

// Callbacks of requests that have ended before the callback thread looks at them. Nothing else wakes it: no
// heartbeats come.
BARE_SCENE(callbacks_of_requests_that_have_ended, 1, 2) {
  const Node::Role role = GetRole(std::getenv("DMLC_ROLE"));
  Environment::Init(
      {{"PS_HEARTBEAT_INTERVAL", "0"}, {"PS_HEARTBEAT_TIMEOUT", "0"}});
  StartPS(0, role, -1, true);
  if (role == Node::SERVER)
    serve<int>(
        [](const KVMeta &meta, const KVPairs<int> &, KVServer<int> *server) {
          static KVMeta first;
          KVPairs<int> res;
          if (!meta.push)
            res.vals = SArray<int>(4, 1);
          if (meta.cmd == 1) {
            first = meta;
            return;
          }
          if (meta.cmd == 2)
            server->Response(first);
          server->Response(meta, res);
        });
  if (role == Node::WORKER) {
    KVWorker<int> kv(0, 0);
    std::atomic<int> called{0};
    const auto done = [&] { called++; };
    const auto expect_called = [&](int n) {
      for (int i = 0; i < 2000 && called < n; i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_EQ(called.load(), n);
    };
    // One that sends nothing, while another one is open.
    const int open = kv.Push({1}, {1}, {}, 1, done);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    kv.Push({}, {}, {}, 0, done);
    expect_called(1);
    kv.Wait(kv.Push({2}, {1}, {}, 2));
    kv.Wait(open);
    EXPECT_EQ(called.load(), 2);
    // One whose second step fails.
    std::vector<int> three(3), lens;
    const int wrong = kv.Pull(spread(2), &three, &lens, 0, done);
    expect_called(3);
    EXPECT_THROW(fserver::ShapeError, "vals has 3 values, the servers have 8",
                 kv.Wait(wrong));
  }
  Finalize(0, role, true);
}

// Memory that is let go of, and a callback that is, may make requests.
SCENE(requests_of_a_deleter, 1, 1) {
  if (IsServer()) {
    serve<float>(KVServerDefaultHandle<float>());
    return;
  }
  KVWorker<float> kv(0, 0);
  std::atomic<int> deleted{0};
  float one = 1;
  const auto array = [&] {
    return SArray<float>(&one, 1, [&](float *) {
      kv.Wait(kv.Push({2}, {1}));
      deleted++;
    });
  };
  kv.Wait(kv.ZPush(SArray<Key>{1}, array()));
  EXPECT_EQ(deleted.load(), 1);
  kv.Wait(kv.ZPush(SArray<Key>{1}, array(), {}, 0, [] {}));
  EXPECT_EQ(deleted.load(), 2);
  const int last = kv.Push({1}, {1}, {}, 0, [captured = array()] {});
  kv.Wait(last);
  EXPECT_EQ(deleted.load(), 3);
  EXPECT_THROW(fserver::ConfigError, "keys[1] is 1 after 2",
               kv.ZPush(SArray<Key>{2, 1}, array()));
  EXPECT_EQ(deleted.load(), 4);
  std::vector<float> got;
  kv.Wait(kv.Pull({1, 2}, &got));
  EXPECT(got[0] == 3 && got[1] == 4);
}

SCENE(several_apps_and_customers, 2, 2) {
  const std::vector<Key> keys = spread(4);
  if (IsServer()) {
    serve<float>(KVServerDefaultHandle<float>(), 1);
    serve<std::uint64_t>(KVServerDefaultHandle<std::uint64_t>(), 2);
    EXPECT_THROW(fserver::ConfigError,
                 "app_id 2 has a SimpleApp with customer_id 2 already",
                 KVServer<int>(2));
    return;
  }
  KVWorker<float> a(1, 0), b(1, 1);
  KVWorker<std::uint64_t> c(2, 0);
  EXPECT_THROW(fserver::ConfigError, "already", KVWorker<float>(1, 1));
  std::vector<std::thread> threads;
  threads.emplace_back([&] { a.Wait(a.Push(keys, {1, 1, 1, 1})); });
  threads.emplace_back([&] { b.Wait(b.Push(keys, {10, 10, 10, 10})); });
  threads.emplace_back([&] { c.Wait(c.Push(keys, {7, 8, 9, 1ull << 60})); });
  for (std::thread &t : threads)
    t.join();
  Postoffice::Get()->Barrier(0, kWorkerGroup);
  std::vector<float> got;
  std::vector<std::uint64_t> wide;
  b.Wait(b.Pull(keys, &got));
  c.Wait(c.Pull(keys, &wide));
  EXPECT(got == std::vector<float>(4, 22));
  EXPECT_EQ(wide[3], 2ull << 60);
  // A type of another size at the other end.
  KVWorker<char> narrow(2, 9);
  EXPECT_THROW(fserver::RefusedError,
               "values have 1 bytes at the worker, and 8",
               narrow.Wait(narrow.Push({1}, {'a'})));
}

SCENE(registered_memory, 2, 1) {
  static std::vector<int> memory(2 * 1000);
  if (IsServer()) {
    auto *server = new KVServer<int>(0);
    for (int rank = 0; rank < 2; rank++) {
      SArray<Key> keys{Key(5)};
      int *at = memory.data() + rank * 1000;
      if (rank == 0)
        server->RegisterRecvBufferWithRank(rank, keys, SArray<int>(at, 1000));
      else
        server->RegisterRecvBuffer(Postoffice::WorkerRankToID(rank), keys,
                                   SArray<int>(at, 1000));
    }
    server->set_request_handle(
        [](const KVMeta &meta, const KVPairs<int> &data, KVServer<int> *s) {
          const int rank = Postoffice::IDtoRank(meta.sender);
          if (meta.key == 5)
            EXPECT(data.vals.data() == memory.data() + rank * 1000);
          EXPECT_EQ(data.vals[data.vals.size() - 1], rank + 1);
          s->Response(meta);
        });
    Postoffice::Get()->Barrier(0, kServerGroup + kWorkerGroup);
    return;
  }
  Postoffice::Get()->Barrier(0, kServerGroup + kWorkerGroup);
  KVWorker<int> kv(0, 0);
  for (std::size_t n : {1000u, 10u, 1000u}) {
    const std::vector<int> vals(n, MyRank() + 1);
    kv.Wait(kv.Push({5}, vals));
    kv.Wait(kv.Push({6}, vals));
  }
}

// Groups have two instances: workers are known by their groups, and by the IDs of instances.
BARE_SCENE(registered_memory_of_groups, 2, 1) {
  Environment::Init({{"DMLC_GROUP_SIZE", "2"}});
  const Node::Role role = GetRole(std::getenv("DMLC_ROLE"));
  StartPS(0, role, -1, true);
  static std::vector<int> memory(4 * 10); // of each instance and group
  for (int i = 0; i < 2 && role == Node::SERVER; i++) {
    auto *server = new KVServer<int>(0, false, i);
    SArray<Key> keys{Key(5)};
    server->RegisterRecvBufferWithRank(0, keys,
                                       SArray<int>(memory.data() + i * 20, 10));
    server->RegisterRecvBuffer(
        Postoffice::GetServer(i)->GroupWorkerRankToInstanceID(1, i), keys,
        SArray<int>(memory.data() + i * 20 + 10, 10));
    server->set_request_handle(
        [i](const KVMeta &meta, const KVPairs<int> &data, KVServer<int> *s) {
          const int rank = Postoffice::IDtoRank(meta.sender);
          EXPECT_EQ(data.vals[9], rank + 1);
          EXPECT(data.vals.data() == memory.data() + i * 20 + rank * 10);
          s->Response(meta);
        });
  }
  if (role != Node::SCHEDULER)
    Postoffice::Get()->Barrier(0, kServerGroup + kWorkerGroup);
  for (int i = 0; i < 2 && role == Node::WORKER; i++) {
    KVWorker<int> kv(0, 0, i);
    kv.Wait(kv.Push({5}, std::vector<int>(10, MyRank() + 1)));
  }
  Finalize(0, role);
}

// Registered memory stays when the KVServer has gone, until the node is closed.
BARE_SCENE(registered_memory_of_a_server_that_has_gone, 1, 1) {
  StartPS(0, GetRole(std::getenv("DMLC_ROLE")), -1, true);
  static std::atomic<bool> gone{false};
  if (IsServer()) {
    KVServer<int> server(0);
    SArray<Key> keys{Key(5)};
    server.RegisterRecvBufferWithRank(
        0, keys, SArray<int>(new int[4], 4, [](int *memory) {
          delete[] memory;
          gone = true;
        }));
  }
  EXPECT(!gone);
  Finalize(0, GetRole(std::getenv("DMLC_ROLE")));
  EXPECT_EQ(gone.load(), IsServer());
}

SCENE(answers_later_from_another_thread, 2, 2) {
  if (IsServer()) {
    // Which the thread uses until the process has ended.
    static auto &queue =
        *new ThreadsafeQueue<std::pair<KVMeta, KVPairs<float>>>;
    auto *server =
        serve<float>([](const KVMeta &meta, const KVPairs<float> &data,
                        KVServer<float> *) { queue.Push({meta, data}); });
    std::thread([server] {
      KVServerDefaultHandle<float> handle;
      for (;;) { // the last first
        std::vector<std::pair<KVMeta, KVPairs<float>>> all(1);
        queue.WaitAndPop(&all[0]);
        for (std::pair<KVMeta, KVPairs<float>> next; queue.TryPop(&next);)
          all.push_back(next);
        for (; !all.empty(); all.pop_back())
          handle(all.back().first, all.back().second, server);
      }
    }).detach();
    return;
  }
  KVWorker<float> kv(0, 0);
  std::vector<int> open;
  for (Key k = 0; k < 200; k++)
    open.push_back(kv.Push({k, kMaxKey - 200 + k}, {1, 2}));
  for (int t : open)
    kv.Wait(t);
  Postoffice::Get()->Barrier(0, kWorkerGroup);
  for (Key k = 0; k < 200; k++) {
    std::vector<float> got;
    kv.Wait(kv.Pull({k, kMaxKey - 200 + k}, &got));
    EXPECT(got == (std::vector<float>{2, 4}));
  }
}

SCENE(a_slicer_of_the_program, 1, 2) {
  if (IsServer()) {
    serve<int>([](const KVMeta &meta, const KVPairs<int> &data,
                  KVServer<int> *server) {
      for (Key k : data.keys)
        EXPECT_EQ(static_cast<int>(k % 2), MyRank());
      static Lists<int> lists;
      lists(meta, data, server);
    });
    return;
  }
  KVWorker<int> kv(0, 0);
  const KVWorker<int>::Slicer by_parity = [](const KVPairs<int> &send,
                                             const std::vector<Range> &ranges,
                                             KVWorker<int>::SlicedKVs *sliced) {
    sliced->resize(ranges.size());
    for (std::size_t i = 0; i < send.keys.size(); i++) {
      auto &part = (*sliced)[send.keys[i] % 2];
      part.first = true;
      part.second.keys.push_back(send.keys[i]);
      if (!send.vals.empty())
        part.second.vals.push_back(send.vals[i]);
    }
  };
  kv.set_slicer(by_parity);
  kv.Wait(kv.Push({1, 2, 3, 5}, {10, 20, 30, 50}));
  std::vector<int> got, known(4), lens;
  kv.Wait(kv.Pull({1, 2, 3, 5}, &got, &lens));
  EXPECT(got == (std::vector<int>{20, 10, 30, 50})); // server by server
  EXPECT(lens == (std::vector<int>{1, 1, 1, 1}));
  kv.Wait(kv.Pull({1, 2, 3, 5}, &known));
  EXPECT(known == got);
}

// As parameter servers send commands: by the apps that have the values, before and between pushes.
SCENE(commands_beside_values, 2, 2) {
  static std::atomic<int> factor{1};
  const std::vector<Key> keys = spread(4);
  if (IsServer()) {
    auto *server = new KVServer<float>(0);
    RegisterExitCallback([server] { delete server; });
    static_cast<SimpleApp *>(server)->set_request_handle(
        [](const SimpleData &r, SimpleApp *app) {
          EXPECT_EQ(r.body, "scale");
          factor = r.head;
          app->Response(r, "scaled");
        });
    server->set_request_handle(
        [](const KVMeta &meta, const KVPairs<float> &, KVServer<float> *s) {
          KVPairs<float> res;
          res.vals = SArray<float>(2, static_cast<float>(factor.load()));
          s->Response(meta, meta.push ? KVPairs<float>() : res);
        });
    return;
  }
  KVWorker<float> kv(0, 3);
  EXPECT_EQ(kv.get_customer()->customer_id(), 3);
  EXPECT(Postoffice::Get()->GetCustomer(0, 3) == kv.get_customer());
  std::atomic<int> scaled{0};
  kv.set_response_handle([&](const SimpleData &r, SimpleApp *app) {
    EXPECT(app == &kv && r.customer_id == 3);
    scaled += r.body == "scaled";
  });
  kv.Wait(kv.Push(keys, {1, 1, 1, 1}));
  if (MyRank() == 0) {
    const int command = kv.Request(6, "scale", kServerGroup);
    const int push = kv.Push(keys, {1, 1, 1, 1});
    EXPECT(command != push);
    kv.Wait(command);
    EXPECT_EQ(scaled.load(), 2);
    kv.Wait(push);
    kv.Wait(command);
    EXPECT_THROW(fserver::ConfigError, "timestamp is", kv.Wait(command + 1));
  }
  Postoffice::Get()->Barrier(0, kWorkerGroup);
  std::vector<float> got;
  kv.Wait(kv.Pull(keys, &got));
  EXPECT(got == std::vector<float>(4, 6));
}
