// KVWorker and KVServer when something is wrong: arguments, answers, peers.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "scenes.hpp"

using namespace ps;
using fserver::DType;
using fserver::Tensor;

SCENE(wrong_arguments, 1, 2) {
  if (IsServer()) {
    serve<float>(KVServerDefaultHandle<float>());
    return;
  }
  KVWorker<float> kv(0, 0);
  EXPECT_THROW(fserver::ConfigError,
               "keys[1] is 1 after 2: keys must be sorted",
               kv.Push({2, 1}, {1, 1}));
  EXPECT_THROW(fserver::ConfigError, "keys[1] is 2 after 2",
               kv.Push({2, 2}, {1, 1}));
  EXPECT_THROW(fserver::ShapeError, "vals has 3 values for 2 keys",
               kv.Push({1, 2}, {1, 1, 1}));
  EXPECT_THROW(fserver::ShapeError, "lens has 1 lengths for 2 keys",
               kv.Push({1, 2}, {1, 1}, {2}));
  EXPECT_THROW(fserver::ShapeError, "vals has 2 values, but lens sum up to 3",
               kv.Push({1, 2}, {1, 1}, {1, 2}));
  EXPECT_THROW(fserver::ShapeError, "lens[1] is -1",
               kv.Push({1, 2}, {1, 1}, {3, -1}));
  EXPECT_THROW(fserver::ShapeError, "but there is no key", kv.Push({}, {1}));
  EXPECT_THROW(fserver::ConfigError, "vals is null",
               kv.Pull({1}, static_cast<std::vector<float> *>(nullptr)));
  SArray<float> on_gpu(1);
  on_gpu.src_device_type_ = GPU;
  on_gpu.src_device_id_ = 3;
  EXPECT_THROW(fserver::ConfigError, "is on GPU 3",
               kv.ZPush(SArray<Key>{1}, on_gpu));
  EXPECT_THROW(fserver::ConfigError, "timestamp is 1000", kv.Wait(1000));
  EXPECT_THROW(fserver::ConfigError, "timestamp is -1", kv.Wait(-1));
  EXPECT_THROW(fserver::ConfigError,
               "instance is 1, want 0, or the place in the group",
               KVWorker<float>(0, 1, 1));
  EXPECT_THROW(fserver::ClosedError, "call StartPS first", KVServer<float>(0));
  kv.set_slicer([](const KVPairs<float> &, const std::vector<Range> &,
                   KVWorker<float>::SlicedKVs *sliced) { sliced->resize(2); });
  EXPECT_THROW(fserver::ShapeError, "parts with 0 keys of 1",
               kv.Push({1}, {1}));
  kv.set_slicer(nullptr);
  kv.Wait(kv.Push({1}, {1})); // nothing of it has been sent
  std::vector<float> got;
  kv.Wait(kv.Pull({1}, &got));
  EXPECT_EQ(got[0], 1.f);
}

SCENE(refused_by_the_server, 1, 2) {
  if (IsServer()) {
    detail::app_wait_ms = 200;
    serve<float>([](const KVMeta &meta, const KVPairs<float> &data,
                    KVServer<float> *server) {
      KVPairs<float> res;
      if (meta.cmd == 1)
        throw std::runtime_error("no such table");
      if (meta.cmd == 2)
        res.vals = SArray<float>(data.keys.size() + 1, 0);
      server->Response(meta, res);
      if (meta.cmd == 3)
        EXPECT_THROW(fserver::ShapeError, "", server->Response(meta, res));
    });
    return;
  }
  KVWorker<float> kv(0, 0), nowhere(77, 0);
  const std::vector<Key> both{1, kMaxKey};
  std::vector<float> two(2), grown;
  std::vector<int> lens;
  EXPECT_THROW(fserver::RefusedError, "no such table",
               kv.Wait(kv.Push(both, {1, 1}, {}, 1)));
  EXPECT_THROW(fserver::RefusedError, "the server has 2 values, want 1",
               kv.Wait(kv.Pull(both, &two, nullptr, 2)));
  std::vector<float> three(3);
  EXPECT_THROW(fserver::RefusedError, "0 lens for 2 keys",
               kv.Wait(kv.Pull({1, 2}, &three, &lens, 2)));
  EXPECT_THROW(fserver::RefusedError,
               "no KVServer with a handler for app_id 77",
               nowhere.Wait(nowhere.Push(both, {1, 1})));
  kv.Wait(kv.Push(both, {1, 1}, {}, 3));
  // With a callback, too; and each time that it is asked.
  std::atomic<int> called{0};
  const int t = kv.Push(both, {1, 1}, {}, 1, [&] { called++; });
  for (int i = 0; i < 2; i++)
    EXPECT_THROW(fserver::RefusedError, "no such table", kv.Wait(t));
  EXPECT_EQ(called.load(), 1);
  const int s = kv.Pull(both, &grown, nullptr, 1, [&] { called++; });
  EXPECT_THROW(fserver::RefusedError, "no such table", kv.Wait(s));
  EXPECT_EQ(called.load(), 2);
  EXPECT(grown.empty());
  kv.Wait(kv.Push(both, {1, 1})); // all is well
}

namespace {

constexpr std::int64_t kHead = sizeof(detail::Head), kAll = kHead + 16;

// A head with two keys and room for two lens.
struct Body {
  detail::Head head;
  Key keys[2] = {666, 667};
  int lens[2] = {1, 1};
};

void keep(Body &) {}

// Sends a push of two floats that `change` makes a wrong one, with so many bytes of head. It has to be
// refused. With nvals below 0 it has no values. nanswer: bytes of a pull tensor; 0: none.
void send(const std::string &why, std::int64_t bytes, int nvals,
          std::int64_t nanswer, void (*change)(Body &)) {
  Body body;
  body.head.width = 4;
  body.head.keys = body.head.vals = 2;
  change(body);
  float vals[2] = {};
  std::uint64_t answer[2] = {};
  const Tensor push[2] = {
      Tensor(&body, DType::kUInt8, {bytes}, 1),
      Tensor(vals, DType::kUInt8, {std::abs(nvals) * 4}, 2)};
  const Tensor pull(answer, DType::kUInt8, {nanswer}, 1);
  const auto h = Postoffice::Get()->worker("test")->worker.push_pull_to(
      0, {push, nvals < 0 ? 1u : 2u}, {&pull, nanswer ? 1u : 0u});
  EXPECT_THROW(fserver::RefusedError, why, h.wait());
}

void wrong_fields() {
  send("no head", 0, 2, 0, keep);
  send("no head", kHead - 1, 2, 0, keep);
  send("begins with 7", kAll, 2, 0, [](Body &b) { b.head.magic = 7; });
  send("has version 2, want 1", kAll, 2, 0,
       [](Body &b) { b.head.version = 2; });
  send("operation 0", kAll, 2, 0,
       [](Body &b) { b.head.op = static_cast<detail::Op>(0); });
  send("operation 5", kAll, 2, 0,
       [](Body &b) { b.head.op = static_cast<detail::Op>(5); });
  send("flags 2", kAll, 2, 0, [](Body &b) { b.head.flags = 2; });
  send("asks for lens", kAll, 2, 0, [](Body &b) { b.head.flags = 1; });
  send("timestamp is negative", kAll, 2, 0,
       [](Body &b) { b.head.timestamp = -1; });
}

void wrong_counts() {
  send("0 keys", kHead, 2, 0, [](Body &b) { b.head.keys = 0; });
  send("cannot have 3 keys", kAll, 2, 0, [](Body &b) { b.head.keys = 3; });
  send("cannot have 1 keys", kAll, 2, 0, [](Body &b) { b.head.keys = 1; });
  send("cannot have 9223372036854775810 keys", kAll, 2, 0,
       [](Body &b) { b.head.keys = (UINT64_C(1) << 63) + 2; });
  send("1 lens", kAll, 2, 0, [](Body &b) { b.head.lens = 1; });
  send("2 lens", kAll, 2, 0, [](Body &b) { b.head.lens = 2; });
  send("1 tensors came", kAll, -1, 0, keep);
  send("2 tensors came", kAll, 2, 8,
       [](Body &b) { b.head.op = detail::Op::kPull; });
  send("3 values", kAll, 2, 0, [](Body &b) { b.head.vals = 3; });
  send("values of 0 bytes", kAll, 2, 0, [](Body &b) { b.head.width = 0; });
  send("4611686018427387906 values", kAll, 2, 0,
       [](Body &b) { b.head.vals = (UINT64_C(1) << 62) + 2; });
  send("values have 2 bytes at the worker, and 4", kAll, 2, 0, [](Body &b) {
    b.head.width = 2;
    b.head.vals = 4;
  });
}

void wrong_lists_and_answers() {
  send("pull tensors", kAll, 2, 8, keep);
  send("pull tensors", kAll, -1, 0,
       [](Body &b) { b.head.op = detail::Op::kPull; });
  send("pull tensors", kAll, -1, 4,
       [](Body &b) { b.head.op = detail::Op::kSize; });
  send("pull tensors", kAll, -1, 8, [](Body &b) {
    b.head.op = detail::Op::kPull;
    b.head.flags = 1;
  });
  send("keys[1] is 666, want more", kAll, 2, 0,
       [](Body &b) { b.keys[1] = 666; });
  send("lens[1] is negative", kHead + 24, 2, 0, [](Body &b) {
    b.head.lens = 2;
    b.lens[0] = 3;
    b.lens[1] = -1;
  });
  send("lens sum up to 3, want 2", kHead + 24, 2, 0, [](Body &b) {
    b.head.lens = 2;
    b.lens[0] = 2;
  });
  send("not equally many", kAll, 1, 0, [](Body &b) { b.head.vals = 1; });
  send("does not keep these values", kAll, -1, 8,
       [](Body &b) { b.head.op = detail::Op::kFetch; });
}

// A good head in memory that the server reads in place.
void shared_head() {
  fserver::Memory m = fserver::Memory::shared(4096);
  auto *body = new (m.data()) Body;
  body->head.op = detail::Op::kPull;
  body->head.width = 4;
  body->head.keys = body->head.vals = 2;
  body->keys[0] = 1;
  float got[2] = {};
  Postoffice::Get()
      ->worker("test")
      ->worker
      .push_pull_to(0, m.tensor(DType::kUInt8, {kAll}, 1),
                    Tensor(got, DType::kUInt8, {8}, 1))
      .wait();
  EXPECT_EQ(got[1], 1.f);
}

} // namespace

// Heads that no KVWorker makes.
SCENE(heads_of_a_hostile_peer, 2, 1) {
  if (IsServer()) {
    serve<float>([](const KVMeta &meta, const KVPairs<float> &data,
                    KVServer<float> *server) {
      EXPECT(meta.key != 666); // of a wrong head
      KVPairs<float> res;
      if (!meta.push)
        res.vals = SArray<float>(data.keys.size(), 1);
      server->Response(meta, res);
    });
    return;
  }
  KVWorker<float> kv(0, 0);
  if (MyRank() == 1) { // whose requests are answered meanwhile
    for (int i = 0; i < 1000; i++)
      kv.Wait(kv.Push({1, 2}, {1, 1}));
    return;
  }
  wrong_fields();
  wrong_counts();
  wrong_lists_and_answers();
  shared_head();
  std::vector<float> got(2); // the server goes on
  kv.Wait(kv.Pull({1, 2}, &got));
  EXPECT_EQ(got[1], 1.f);
}

// Its memory is lent, and the server looks at a copy of the keys.
SCENE(memory_that_is_shared, 1, 1) {
  if (IsServer()) {
    serve<float>([](const KVMeta &meta, const KVPairs<float> &data,
                    KVServer<float> *server) {
      EXPECT_EQ(data.vals.size(), 100000u);
      EXPECT_EQ(data.vals[99999], static_cast<float>(meta.cmd));
      server->Response(meta);
    });
    return;
  }
  KVWorker<float> kv(0, 0);
  fserver::Memory m = fserver::Memory::shared(400000);
  const SArray<float> vals(m.as<float>(), 100000);
  for (int i = 0; i < 20; i++) {
    vals[99999] = static_cast<float>(i);
    kv.Wait(kv.ZPush(SArray<Key>{3}, vals, {}, i));
  }
}

BARE_SCENE(a_lost_server, 1, 2) {
  const Node::Role role = GetRole(std::getenv("DMLC_ROLE"));
  StartPS(0, role, -1, true);
  if (role == Node::SERVER) {
    auto *server = serve<float>(
        [](const KVMeta &meta, const KVPairs<float> &, KVServer<float> *s) {
          if (meta.cmd == 1 && MyRank() == 1)
            std::_Exit(0);
          s->Response(meta);
        });
    (void)server;
  }
  if (role == Node::WORKER) {
    KVWorker<float> kv(0, 0);
    kv.Wait(kv.Push({1, kMaxKey}, {1, 1}));
    std::atomic<int> called{0};
    std::vector<float> got;
    const int a = kv.Push({1, kMaxKey}, {1, 1}, {}, 1);
    const int b =
        kv.Pull({2, kMaxKey - 1}, &got, nullptr, 1, [&] { called++; });
    const auto lost =
        EXPECT_THROW(fserver::PeerLostError, "server 1", kv.Wait(a));
    EXPECT_EQ(lost.rank(), 1);
    EXPECT_THROW(fserver::PeerLostError, "server 1", kv.Wait(b));
    EXPECT_EQ(called.load(), 1);
    kv.Wait(kv.Push({1}, {1})); // the other server is there
  }
  try { // bounded, and the node is closed
    Finalize(0, role, true);
  } catch (const fserver::PeerLostError &) {
  }
  Finalize(0, role, true); // nothing
  if (role == Node::WORKER)
    EXPECT_THROW(fserver::ClosedError, "",
                 KVWorker<float>(0, 0).Push({1}, {1}));
}

// The server answers it late, and goes on with the other.
BARE_SCENE(a_lost_worker, 2, 1) {
  const Node::Role role = GetRole(std::getenv("DMLC_ROLE"));
  StartPS(0, role, -1, true);
  if (role == Node::SERVER)
    serve<float>([](const KVMeta &meta, const KVPairs<float> &data,
                    KVServer<float> *server) {
      static std::vector<KVMeta> of_the_lost;
      if (Postoffice::IDtoRank(meta.sender) == 1) {
        of_the_lost.push_back(meta);
        return;
      }
      KVPairs<float> res;
      res.vals = SArray<float>(2, static_cast<float>(of_the_lost.size()));
      if (meta.cmd == 1) {
        for (const KVMeta &m : of_the_lost)
          server->Response(m, res);
      }
      server->Response(meta, res);
      EXPECT_EQ(data.keys.size(), 2u);
    });
  if (role == Node::WORKER) {
    KVWorker<float> kv(0, 0);
    std::vector<float> got(2), size;
    if (MyRank() == 1) {
      kv.Push({1, 2}, {1, 1});
      kv.Pull({3, 4}, &got);
      kv.Pull({5, 6}, &size);
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      std::_Exit(0);
    }
    while (got[0] != 3)
      kv.Wait(kv.Pull({1, 2}, &got));
    try {
      Postoffice::Get()->Barrier(0, kWorkerGroup); // until the other has gone
    } catch (const fserver::PeerLostError &e) {
      EXPECT_EQ(e.rank(), 1);
    }
    kv.Wait(kv.Pull({1, 2}, &got, nullptr, 1));
    EXPECT_EQ(got[1], 3.f);
  }
  try {
    Finalize(0, role, true);
  } catch (const fserver::PeerLostError &) {
  }
}

// What a worker has asked the size of goes when the worker is lost, and what another one keeps asking for does not.
BARE_SCENE(sizes_of_a_lost_worker, 2, 1) {
  const Node::Role role = GetRole(std::getenv("DMLC_ROLE"));
  StartPS(0, role, -1, true);
  if (role == Node::SERVER) {
    static std::atomic<int> kept{0};
    serve<float>([](const KVMeta &meta, const KVPairs<float> &,
                    KVServer<float> *server) {
      KVPairs<float> res;
      if (meta.cmd == 1) { // how many there are
        res.vals = SArray<float>(1, static_cast<float>(kept.load()));
      } else {
        kept++;
        const auto free = [](float *p) {
          kept--;
          delete[] p;
        };
        // Values of the CPU would be copied. Nobody fetches these.
        res.vals.reset(new float[3], 3, free, GPU, 0);
      }
      server->Response(meta, res);
    });
  }
  if (role == Node::WORKER) {
    KVWorker<float> kv(0, 0);
    // Asks for a size, and not for the values.
    const auto ask = [](int timestamp) {
      Body body;
      body.head.op = detail::Op::kSize;
      body.head.width = 4;
      body.head.keys = 2;
      body.head.customer = 9;
      body.head.timestamp = timestamp;
      body.keys[0] = 1, body.keys[1] = 2;
      std::uint64_t count = 0;
      Postoffice::Get()
          ->worker("test")
          ->worker
          .push_pull_to(0, Tensor(&body, DType::kUInt8, {kAll}, 1),
                        Tensor(&count, DType::kUInt8, {8}, 1))
          .wait();
      EXPECT_EQ(count, 3u);
    };
    for (int i = 0; i < (MyRank() == 1 ? 100 : 1); i++)
      ask(i);
    Postoffice::Get()->Barrier(0, kWorkerGroup);
    if (MyRank() == 1)
      std::_Exit(0);
    std::vector<float> left(1);
    do {
      kv.Wait(kv.Pull({1}, &left, nullptr, 1));
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    } while (left[0] > 1);
    EXPECT_EQ(left[0], 1.f); // that of this worker
    ask(1);
    kv.Wait(kv.Pull({1}, &left, nullptr, 1));
    EXPECT_EQ(left[0], 2.f);
  }
  try {
    Finalize(0, role, true);
  } catch (const fserver::PeerLostError &) {
  }
}

// What a handler does that others rarely do.
SCENE(handlers_that_surprise, 1, 1) {
  static std::atomic<bool> over{false};
  if (IsServer()) {
    const std::string large(1000,
                            'x'); // so that the function has memory of its own
    serve<float>([large](const KVMeta &meta, const KVPairs<float> &,
                         KVServer<float> *server) {
      if (meta.cmd == 1)
        throw 7;
      EXPECT_THROW(fserver::ConfigError,
                   "a handler of a KVServer has called it",
                   Finalize(0, Node::SERVER, true));
      EXPECT_THROW(fserver::ConfigError,
                   "a handler of a KVServer has called it",
                   Finalize(0, Node::JOINT, true));
      EXPECT(Postoffice::Get()->started());
      server->set_request_handle(
          [](const KVMeta &m, const KVPairs<float> &, KVServer<float> *s) {
            KVPairs<float> res;
            res.vals = SArray<float>(1, 5.f);
            s->Response(m, m.push ? KVPairs<float>() : res);
          });
      EXPECT_EQ(large, std::string(1000, 'x')); // it is still there
      server->Response(meta);
      over = true;
    });
    while (!over)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return;
  }
  KVWorker<float> kv(0, 0);
  EXPECT_THROW(fserver::RefusedError, "what is no std::exception",
               kv.Wait(kv.Push({1}, {1}, {}, 1)));
  kv.Wait(kv.Push({1}, {1}));
  std::vector<float> got(1);
  kv.Wait(kv.Pull({1}, &got, nullptr, 1));
  EXPECT_EQ(got[0], 5.f);
}

// A late Response to a worker that was lost does not touch what the next process has asked for by the same numbers.
BARE_SCENE(a_late_response_to_a_lost_worker, 1, 1) {
  const Node::Role role = GetRole(std::getenv("DMLC_ROLE"));
  StartPS(0, role, -1, true);
  static std::atomic<bool> over{false};
  if (role == Node::SERVER) {
    serve<float>([](const KVMeta &meta, const KVPairs<float> &,
                    KVServer<float> *server) {
      static KVMeta late;
      KVPairs<float> res;
      if (meta.push) {
        over = true;
      } else if (meta.cmd == 1) {
        late = meta;
        return;
      } else {
        res.vals = SArray<float>(3, 2.f);
      }
      server->Response(meta, res);
      if (meta.push)
        return;
      res.vals = SArray<float>(5, 1.f);
      EXPECT(late.timestamp == meta.timestamp &&
             late.customer_id == meta.customer_id);
      server->Response(late, res);
    });
    while (!over)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (role == Node::WORKER) {
    std::vector<float> got;
    {
      KVWorker<float> kv(0, 0);
      kv.Pull({3}, &got, nullptr, 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      Finalize(0, role, false);
    }
    StartPS(0, role, -1, false);
    KVWorker<float> kv(0, 0);
    kv.Wait(kv.Pull({3}, &got, nullptr, 2));
    EXPECT(got == std::vector<float>(3, 2.f));
    kv.Wait(kv.Push({3}, {1}));
  }
  try {
    Finalize(0, role, true);
  } catch (const fserver::PeerLostError &) {
  }
}

// The answer to a worker that takes none keeps no memory of the answers to others.
SCENE(an_answer_that_stays, 2, 1) {
  static std::atomic<int> alive{0};
  constexpr std::size_t kLarge = 64 << 20;
  if (IsServer()) {
    serve<char>([](const KVMeta &meta, const KVPairs<char> &data,
                   KVServer<char> *server) {
      static pid_t stopped = 0;
      static char is_stopped = 0;
      KVPairs<char> res;
      if (meta.cmd == 1) { // the process of the other worker
        std::memcpy(&stopped, data.vals.data(), sizeof stopped);
      } else if (meta.cmd == 2) {
        kill(stopped, SIGSTOP);
        is_stopped = 1;
        res.vals = SArray<char>(kLarge, 'a');
      } else if (meta.cmd == 3) {
        kill(stopped, SIGCONT);
      } else if (meta.cmd == 4) {
        res.vals = SArray<char>(1, static_cast<char>(alive.load()));
      } else if (meta.cmd == 5) {
        res.vals = SArray<char>(1, is_stopped);
      } else {
        alive++;
        res.vals.reset(new char[1], 1, [](char *p) {
          alive--;
          delete[] p;
        });
      }
      server->Response(meta, res);
    });
    return;
  }
  KVWorker<char> kv(0, 0);
  if (MyRank() == 1) {
    std::vector<char> pid(sizeof(pid_t)), large(kLarge);
    const pid_t own = getpid();
    std::memcpy(pid.data(), &own, sizeof own);
    kv.Wait(kv.Push({1}, pid, {}, 1));
    const int t = kv.Pull({1}, &large, nullptr, 2);
    Postoffice::Get()->Barrier(0, kWorkerGroup);
    kv.Wait(t);
    EXPECT_EQ(large.back(), 'a');
    return;
  }
  std::vector<char> one(1);
  while (!one[0])
    kv.Wait(kv.Pull({2}, &one, nullptr, 5));
  for (int i = 0; i < 100; i++)
    kv.Wait(kv.Pull({2}, &one));
  kv.Wait(kv.Pull({2}, &one, nullptr, 4));
  EXPECT(one[0] <= 4);
  kv.Wait(kv.Push({2}, {0}, {}, 3));
  Postoffice::Get()->Barrier(0, kWorkerGroup);
}

// A request that is not answered keeps its memory, also when its worker is lost and pushes the key again.
BARE_SCENE(a_push_that_outlives_its_worker, 1, 1) {
  const Node::Role role = GetRole(std::getenv("DMLC_ROLE"));
  StartPS(0, role, -1, true);
  if (role == Node::SERVER) {
    static std::atomic<bool> over{false};
    serve<float>([](const KVMeta &meta, const KVPairs<float> &data,
                    KVServer<float> *server) {
      static SArray<float> first;
      EXPECT_EQ(data.vals.size(), 25000u);
      EXPECT_EQ(data.vals[24999], static_cast<float>(meta.cmd));
      if (meta.cmd == 1) { // which is not answered
        first = data.vals;
        return;
      }
      for (float v : first)
        EXPECT_EQ(v, 1.f);
      server->Response(meta);
      over = true;
    });
    while (!over)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (role == Node::WORKER) {
    const auto push = [](int cmd) {
      KVWorker<float> kv(0, cmd);
      const int t = kv.Push(
          {3}, std::vector<float>(25000, static_cast<float>(cmd)), {}, cmd);
      if (cmd == 2)
        return kv.Wait(t);
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      Finalize(0, Node::WORKER, false);
    };
    push(1);
    StartPS(0, role, -1, false);
    push(2);
  }
  try {
    Finalize(0, role, true);
  } catch (const fserver::PeerLostError &) {
  }
}
