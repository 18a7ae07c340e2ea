// Every call of workers and servers, and their wrong arguments.
#include <atomic>

#include "cluster.hpp"

using namespace fserver;

CASE(echo) {
  Pair p;
  p.echo();
  Memory m(8192);
  const Tensor x = floats(m, 0, 1000, 3), y = floats(m, 1000, 1000, 3);
  for (int step = 1; step < 50; step++) {
    x.as<float>()[999] = static_cast<float>(step);
    const Handle h = p.w().push_pull(x, y);
    EXPECT(h.id() != 0);
    p.w().wait(h, seconds(5));
    EXPECT(h.done());
    EXPECT_EQ(y.as<float>()[999], static_cast<float>(step));
  }
  const Handle h = p.w().push_pull({x}, {y});
  h.wait();
  const auto stamps = p.w().trace(h);
  for (std::size_t i = 1; i < stamps.size(); i++)
    EXPECT(stamps[i - 1] > 0 && stamps[i - 1] <= stamps[i]); // one clock
  p.leave();
}

CASE(sizes_and_shapes_change) {
  Pair p;
  p.echo();
  Memory m(1 << 22);
  std::uint8_t *out = m.as<std::uint8_t>(), *in = out + (1 << 21);
  for (const std::int64_t n : {1, 0, 7, 1 << 20, 3, 1 << 21, 100}) {
    std::memset(out, static_cast<int>(n % 251) + 1, 1 << 21);
    const auto offset = static_cast<std::size_t>(in - out);
    const Tensor x = m.tensor(DType::kUInt8, {n, 1, 1, 1, 1, 1, 1, 1, 1}, 1);
    const Tensor y = m.tensor(DType::kUInt8, {n}, 1, offset);
    p.w().push_pull(x, y).wait();
    EXPECT(std::memcmp(in, out, static_cast<std::size_t>(n)) == 0);
  }
  // Memory that the engine does not know by number.
  double a[3] = {1, 2, 3}, b[3] = {};
  p.w().push_pull(Tensor::of(a, 3, 9), Tensor::of(b, 3, 9)).wait();
  EXPECT_EQ(b[2], 3.0);
  p.leave();
}

CASE(a_request_says_what_was_pushed) {
  Pair p;
  Memory m(4096);
  const Tensor x[] = {m.tensor(DType::kInt16, {2, 3, 1}, 1),
                      m.tensor(DType::kBFloat16, {}, UINT64_MAX, 64)};
  x[0].as<std::int16_t>()[5] = -3;
  const Handle h = p.w().push_pull(x, m.tensor(DType::kInt64, {4}, 5, 128));
  Request r = p.request();
  EXPECT_EQ(r.worker(), 0);
  EXPECT_EQ(r.tensors().size(), 2u);
  EXPECT(r[0].shape == Shape({2, 3, 1}) && r[0].dtype == DType::kInt16);
  EXPECT_EQ(r[0].bytes, 12u);
  EXPECT_EQ(r[0].key, 1u);
  EXPECT_EQ(r[0].as<std::int16_t>()[5], -3);
  EXPECT_EQ(r[1].key, UINT64_MAX);
  EXPECT_EQ(r[1].shape.size(), 0u);
  EXPECT_EQ(r.answers().size(), 1u);
  EXPECT_EQ(r.answers()[0], 32u);
  EXPECT(!h.done());
  std::int64_t answer[4] = {1, 2, 3, 4};
  const Handle sent = p.s().respond(Tensor::of(answer, 4), r);
  p.w().wait(h);
  sent.wait();
  p.s().wait(sent);
  EXPECT_EQ(m.as<std::int64_t>()[16 + 3], 4);
  p.stop();
}

CASE(push_without_an_answer_and_pull_without_a_push) {
  Pair p;
  std::int32_t a[2] = {1, 2}, b[2] = {};
  Handle h = p.w().push_pull(Tensor::of(a, 2, 1), {});
  p.s().respond({}, p.request());
  h.wait();
  h = p.w().push_pull({}, Tensor::of(b, 2, 1));
  Request r = p.request();
  EXPECT_EQ(r.tensors().size(), 0u);
  p.s().respond(Tensor::of(a, 2), r);
  h.wait();
  EXPECT_EQ(b[1], 2);
  p.stop();
}

CASE(several_servers_and_workers) {
  Cluster c(2, 2);
  c.connect();
  EXPECT_EQ(c.worker[1].rank(), 1);
  EXPECT_EQ(c.worker[0].servers(), 2);
  EXPECT_EQ(c.server[0].workers(), 2);
  c.serve([](Server &s, Request &r) {
    float back = r[0].as<float>()[0] * 10 + static_cast<float>(s.rank());
    s.respond(Tensor::of(&back, 1), r).wait();
  });
  for (int step = 0; step < 20; step++) {
    float x[2] = {1, 2}, y[2][2] = {};
    Handle h[2];
    for (std::size_t w = 0; w < 2; w++)
      h[w] = c.worker[w].push_pull(
          Tensor::of(&x[w], 1, 4),
          {Tensor::of(&y[w][0], 1), Tensor::of(&y[w][1], 1)});
    for (const Handle &one : h)
      one.wait();
    EXPECT(y[0][0] == 10 && y[0][1] == 11 && y[1][0] == 20 && y[1][1] == 21);
  }
  float x = 0, y[3] = {};
  Worker &w = c.worker[0];
  EXPECT_THROW(
      ShapeError,
      "pull has 3 tensors, want a multiple of the number "
      "of servers (2)",
      w.push_pull(Tensor::of(&x, 1), {Tensor::of(y, 1), Tensor::of(y + 1, 1),
                                      Tensor::of(y + 2, 1)}));
  EXPECT_THROW(
      ConfigError, "pull[1] and pull[0] share memory",
      w.push_pull(Tensor::of(&x, 1), {Tensor::of(y, 2), Tensor::of(y + 1, 1)}));
  EXPECT_THROW(
      ConfigError, "pull[0] and push[0] share memory",
      w.push_pull(Tensor::of(&x, 1), {Tensor::of(&x, 1), Tensor::of(y, 1)}));
  EXPECT_THROW(ConfigError, "is not of this node",
               c.worker[1].wait(w.push_pull(Tensor::of(&x, 1), {})));
  c.leave();
}

CASE(wrong_arguments_of_push_pull) {
  Pair p;
  float x[4] = {}, y[4] = {};
  Worker &w = p.w();
  EXPECT_THROW(ShapeError, "push and pull are both empty", w.push_pull({}, {}));
  EXPECT_THROW(ConfigError, "push[0].data is null, want 4 bytes",
               w.push_pull(Tensor(nullptr, DType::kFloat32, {1}), {}));
  Tensor bad = Tensor::of(x, 4);
  bad.bytes = 12;
  EXPECT_THROW(ShapeError,
               "pull[1] has 12 bytes, which are not those of shape [4] of "
               "float32",
               w.push_pull({}, {Tensor::of(y, 4), bad}));
  bad.shape = {-1, -3};
  EXPECT_THROW(ShapeError, "shape [-1, -3]", w.push_pull(bad, {}));
  bad = Tensor::of(x, 4);
  bad.dtype = DType::kAny;
  EXPECT_THROW(ShapeError, "", w.push_pull(bad, {}).wait());
  bad = Tensor::of(x, 4);
  bad.device = 0;
  EXPECT_THROW(ConfigError, "push[0] is on GPU 0, want the CPU",
               w.push_pull(bad, {}));
  EXPECT_THROW(
      ConfigError, "push has key 8 twice",
      w.push_pull(
          {Tensor::of(x, 1, 8), Tensor::of(x, 1, 1), Tensor::of(x, 1, 8)}, {}));
  EXPECT_THROW(
      ConfigError, "pull[1] and pull[0] share memory",
      w.push_pull(Tensor::of(x, 4), {Tensor::of(y, 4), Tensor::of(y + 2, 1)}));
  EXPECT_THROW(ConfigError, "handle 0 is not of this node", w.wait(Handle()));
  EXPECT_THROW(ClosedError, "", Handle().wait());
  // With one server, what is pushed may be what is pulled.
  const Handle h = w.push_pull(Tensor::of(x, 4, 1), Tensor::of(x, 4, 1));
  Request r = p.request();
  p.s().respond(r.tensors(), r);
  h.wait();
  p.stop();
}

CASE(wait_has_a_limit_and_says_what_is_missing) {
  Pair p;
  float x = 1, y = 0, z = 0;
  const Handle h = p.w().push_pull(Tensor::of(&x, 1, 6), Tensor::of(&y, 1));
  Request r = p.request();
  EXPECT_THROW(TimeoutError, "server 0 has not answered it (key 6)",
               h.wait(milliseconds(1)));
  const Handle behind =
      p.w().push_pull(Tensor::of(&x, 1, 6), Tensor::of(&z, 1));
  EXPECT_THROW(TimeoutError, "it waits for handle " + std::to_string(h.id()),
               p.w().wait(behind, milliseconds(0)));
  EXPECT(!behind.done());
  Batch none;
  EXPECT(!p.s().get_batch(none, milliseconds(1)));
  EXPECT(none.empty());
  p.s().respond(r.tensors(), r);
  h.wait();
  EXPECT_EQ(y, 1.0f);
  r = p.request();
  p.s().respond(r.tensors(), r);
  behind.wait();
  p.stop();
}

CASE(wrong_answers_and_refusals) {
  Pair p;
  float x[2] = {1, 2}, y[2] = {};
  double wide = 0;
  const auto ask = [&] {
    return p.w().push_pull(Tensor::of(x, 2, 1), Tensor::of(y, 2));
  };
  Handle h = ask();
  Request r = p.request();
  Server &s = p.s();
  EXPECT_THROW(ShapeError, "", s.respond({}, r));
  EXPECT_THROW(ShapeError, "", s.respond(Tensor::of(x, 1), r));
  EXPECT_THROW(ShapeError, "float64 for float32",
               s.respond(Tensor::of(&wide, 1), r));
  EXPECT_THROW(ConfigError, "tensors[0].data is null",
               s.respond(Tensor(nullptr, DType::kFloat32, {2}), r));
  EXPECT_THROW(ShapeError, "", s.respond(Tensor::of(x, 2), 99));
  s.respond(r.tensors(), r);
  EXPECT_THROW(ShapeError, "", s.respond(r.tensors(), r));
  EXPECT_THROW(ShapeError, "", s.fail(r, "late"));
  h.wait();

  h = ask();
  s.fail(p.request(), "not today");
  const auto e = EXPECT_THROW(RefusedError, "not today", h.wait());
  EXPECT_EQ(e.rank(), 0);
  EXPECT(e.reason() == "not today");
  EXPECT_THROW(RefusedError, "not today", p.w().wait(h)); // again
  p.stop();
}

CASE(at_least) {
  Cluster c(2, 1);
  c.connect();
  Server &s = c.server[0];
  Batch b;
  EXPECT_THROW(ShapeError, "", s.get_batch(b, seconds(1), 3));
  EXPECT_THROW(ConfigError, "at_least is -1", s.get_batch(b, seconds(1), -1));
  float x = 5, y = 0;
  const Handle h = c.worker[1].push_pull(Tensor::of(&x, 1), Tensor::of(&y, 1));
  EXPECT(!s.get_batch(b, milliseconds(50)));
  EXPECT(s.get_batch(b, seconds(5), 1));
  EXPECT_EQ(b.size(), 1u);
  EXPECT_EQ(b[0].worker(), 1);
  s.respond(b[0].tensors(), b[0]);
  h.wait();
  c.stop();
}

CASE(registered_receive_memory) {
  Cluster c(2, 1);
  Server &s = c.server[0];
  Memory m(64);
  const Tensor all = m.tensor(DType::kFloat32, {2, 8});
  EXPECT_THROW(ShapeError, "1 keys for 2 ranks",
               s.register_recv(all, {0, 1}, {5}));
  EXPECT_THROW(ShapeError, "0 keys for 0 ranks", s.register_recv(all, {}, {}));
  EXPECT_THROW(ShapeError, "want a multiple of the number of ranks (3)",
               s.register_recv(all, {0, 1, 0}, {5, 5, 6}));
  EXPECT_THROW(
      ConfigError, "data is null",
      s.register_recv(Tensor(nullptr, DType::kFloat32, {2}), {0, 1}, {5, 5}));
  s.register_recv(all, {0, 1}, {5, 5});
  c.connect();
  EXPECT_THROW(ShapeError, "", s.register_recv(all, {0, 7}, {6, 6}));
  EXPECT_THROW(ShapeError, "", s.register_recv(all, {0, 1}, {5, 6})); // again
  float x[2][8] = {{1}, {2}};
  const Handle h0 = c.worker[0].push_pull(Tensor::of(x[0], 8, 5), {});
  const Handle h1 = c.worker[1].push_pull(Tensor::of(x[1], 8, 5), {});
  Batch b;
  EXPECT(s.get_batch(b, seconds(5)));
  EXPECT_EQ(b[0][0].data, m.data());
  EXPECT_EQ(m.as<float>()[0], 1.0f);
  EXPECT_EQ(m.as<float>()[8], 2.0f);
  for (Request &r : b)
    s.respond({}, r);
  h0.wait();
  h1.wait();
  c.stop();
}

CASE(shared_memory_is_lent) {
  Pair p;
  Memory out = Memory::shared(1 << 20);
  Memory in(1 << 20);
  const Tensor x = out.tensor(DType::kUInt8, {1 << 20}, 1);
  const Tensor y = in.tensor(DType::kUInt8, {1 << 20}, 1);
  Batch b;
  for (int i = 1; i < 20; i++) {
    out.as<char>()[(1 << 20) - 1] = static_cast<char>(i);
    const Handle h = p.w().push_pull(x, y);
    EXPECT(p.s().get_batch(b, seconds(5)));
    p.s().respond(b[0].tensors(), b[0]);
    h.wait();
    EXPECT_EQ(in.as<char>()[(1 << 20) - 1], static_cast<char>(i));
  }
  const char *way = std::getenv("FSERVER_TRANSPORT");
  const bool lends = !way || std::string(way) != "tcp";
  EXPECT_EQ(p.w().describe().find("\"loans\":0") == std::string::npos, lends);
  // The next call gives back what was lent.
  EXPECT(!p.s().get_batch(b, milliseconds(0)));
  std::int64_t nodes, buffers, goroutines;
  EXPECT_EQ(fs_live(&nodes, &buffers, &goroutines), 0);
  if (lends)
    EXPECT_EQ(buffers, 0);
  p.stop();
}

CASE(barriers) {
  Cluster c(2, 1);
  c.connect();
  EXPECT_THROW(
      TimeoutError, "",
      c.worker[0].barrier(kWorkers, Each::kInstance, milliseconds(20)));
  std::thread other([&] { c.worker[1].barrier(kWorkers); });
  c.worker[0].barrier(kWorkers);
  other.join();
  std::thread more([&] { c.server[0].barrier(); });
  other = std::thread([&] { c.worker[1].barrier(); });
  c.worker[0].barrier(kAllMembers);
  more.join();
  other.join();
  c.stop();
}

CASE(many_threads) {
  Pair p;
  p.echo();
  std::vector<std::thread> all;
  for (std::uint64_t k = 0; k < 8; k++)
    all.emplace_back([&p, k] {
      Memory m(4096);
      const Tensor x = floats(m, 0, 100, k), y = floats(m, 512, 100, k);
      for (int i = 1; i <= 300; i++) {
        x.as<float>()[99] = static_cast<float>(i);
        p.w().push_pull(x, y).wait();
        EXPECT_EQ(y.as<float>()[99], static_cast<float>(i));
      }
    });
  for (std::thread &t : all)
    t.join();
  p.leave();
}

CASE(push_pull_with_one_server) {
  Cluster c(2, 2);
  c.connect();
  Memory m(4096);
  const Tensor x = floats(m, 0, 4, 1), y = floats(m, 4, 4, 1);
  x.as<float>()[3] = 5;
  // To one server each: no batch comes of it, and the other server and worker have no part in it.
  const Handle h = c.worker[1].push_pull_to(1, x, y);
  Batch batch;
  EXPECT(c.server[1].get_unicasts(batch, seconds(10)));
  EXPECT_EQ(batch.size(), 1u);
  EXPECT_EQ(batch[0].worker(), 1);
  EXPECT(!batch[0].lent());
  EXPECT_EQ(batch[0][0].as<float>()[3], 5.f);
  EXPECT(!c.worker[1].ended(h));
  EXPECT(!c.server[0].get_unicasts(batch, milliseconds(0)));
  EXPECT(batch.empty());
  EXPECT(!c.server[1].get_batch(batch, milliseconds(0), 1));
  const Handle again = c.worker[1].push_pull_to(1, x, y); // waits for its key
  const Handle other =
      c.worker[1].push_pull_to(1, floats(m, 8, 4, 2), {}); // passes it
  EXPECT(c.server[1].get_unicasts(batch, seconds(10)));
  EXPECT_EQ(batch[0][0].key, 2u);
  c.server[1].respond({}, batch[0]);
  other.wait();
  EXPECT(c.worker[1].ended(other) && !c.worker[1].ended(again));
  EXPECT_THROW(ConfigError, "server is 2, want 0 to 1",
               c.worker[0].push_pull_to(2, x, y));
  EXPECT_THROW(ConfigError, "server is -1", c.worker[0].push_pull_to(-1, x, y));
  EXPECT_THROW(ShapeError, "push_pull: push and pull are both empty",
               c.worker[0].push_pull_to(0, {}, {}));
}

CASE(a_watch_wakes_a_thread) {
  Pair p;
  Memory m(4096);
  const Tensor x = floats(m, 0, 4, 1), y = floats(m, 4, 4, 1);
  Watch at_worker(p.w()), at_server(p.s());
  Batch batch;
  for (int i = 0; i < 20; i++) {
    EXPECT(at_server.arm());
    const Handle h = p.w().push_pull_to(0, x, y);
    while (!p.s().get_unicasts(batch, milliseconds(0))) {
      at_server.sleep();
      EXPECT(at_server.arm());
    }
    EXPECT(at_worker.arm() && !p.w().ended(h));
    p.s().respond(batch[0].tensors(), batch[0]);
    while (!p.w().ended(h)) { // in no call of the worker's
      at_worker.sleep();
      EXPECT(at_worker.arm());
    }
  }
  at_worker.wake();
  at_worker.sleep(); // returns at once
  p.w().close();
  EXPECT(!at_worker.arm());
}

CASE(messages_between_nodes) {
  Cluster c(2, 2);
  EXPECT_THROW(fserver::ClosedError, "not connected",
               c.worker[0].send({fserver::Role::kWorker, 1}, "early"));
  c.connect();
  using fserver::Address;
  using fserver::Mail;
  using fserver::Role;
  Mail m;
  EXPECT(!c.worker[1].receive(m, milliseconds(0)));
  c.worker[0].send({Role::kWorker, 1}, "to a worker");
  EXPECT(c.worker[1].receive(m));
  EXPECT(m.role == Role::kWorker && m.rank == 0 && m.data == "to a worker");
  c.server[1].send({m.role, m.rank, m.run}, std::string(100000, 'x'));
  EXPECT(c.worker[0].receive(m));
  EXPECT(m.role == Role::kServer && m.rank == 1 &&
         m.data == std::string(100000, 'x'));
  c.worker[1].send(Address::all(FS_TO_WORKERS | FS_TO_SERVERS), "");
  for (fserver::Node *n : std::initializer_list<fserver::Node *>{
           &c.worker[0], &c.worker[1], &c.server[0], &c.server[1]})
    EXPECT(n->receive(m, seconds(10)) && m.data.empty() && m.rank == 1);
  EXPECT_THROW(ConfigError, "want at most 1000000",
               c.worker[0].send({Role::kServer, 0},
                                std::string(fserver::kMaxMessage + 1, ' ')));
  EXPECT_THROW(ConfigError, "rank 2 of the servers",
               c.worker[0].send({Role::kServer, 2}, ""));

  std::thread waits([&] {
    Mail none;
    EXPECT_THROW(fserver::ClosedError, "", c.worker[1].receive(none));
  });
  EXPECT_EQ(c.server[0].members().size(), 5u);
  const std::uint64_t run = c.server[0].members()[2].run;
  c.worker[1].close();
  waits.join();
  while (c.server[0].members()[2].state != fserver::Member::kLost)
    std::this_thread::yield();
  const auto e =
      EXPECT_THROW(fserver::PeerLostError, "worker 1",
                   c.server[0].send({Role::kWorker, 1, run}, "too late"));
  EXPECT(e.rank() == 1 && e.role() == FS_ROLE_WORKER);
  for (int i = 0; i < 1024; i++)
    c.worker[0].send({Role::kServer, 0}, "not received");
  EXPECT_THROW(fserver::LimitError, "server 0 does not receive its messages",
               c.worker[0].send({Role::kServer, 0}, "one too many"));
}
