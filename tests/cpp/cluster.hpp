// A cluster within one process, for the tests. FSERVER_TRANSPORT says how tensors travel.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "fserver/fserver.hpp"
#include "test.hpp"

using fserver::Batch;
using fserver::DType;
using fserver::Memory;
using fserver::Options;
using fserver::Request;
using fserver::Server;
using fserver::Tensor;
using fserver::Worker;
using std::chrono::milliseconds;
using std::chrono::seconds;

class Cluster {
public:
  explicit Cluster(int workers = 1, int servers = 1,
                   const Options &all = Options()) {
    Options o = all;
    o.workers = workers;
    o.servers = servers;
    o.connect = false;
    Options first = o;
    first.host_scheduler = true;
    first.scheduler = "127.0.0.1:0";
    server.emplace_back(first);
    o.scheduler = scheduler = server[0].scheduler();
    for (int i = 1; i < servers; i++) {
      o.node_rank = i;
      server.emplace_back(o);
    }
    for (int i = 0; i < workers; i++) {
      o.node_rank = i;
      worker.emplace_back(o);
    }
  }

  // After a failure nothing waits for anything.
  ~Cluster() {
    for (Worker &w : worker)
      w.close();
    for (Server &s : server)
      s.close();
    join();
  }

  // Waits until the cluster is complete.
  Cluster &connect() {
    each([](fserver::Node &n) { n.connect(); });
    return *this;
  }
  void stop() {
    join();
    std::vector<std::thread> all;
    for (Worker &w : worker)
      all.emplace_back([&w] { w.stop(); });
    for (Server &s : server)
      all.emplace_back([&s] { s.stop(); });
    for (std::thread &t : all)
      t.join();
  }

  // Has each server answer in a thread, until the workers leave.
  Cluster &serve(std::function<void(Server &, Request &)> answer) {
    for (Server &s : server)
      threads_.emplace_back([&s, answer] {
        Batch batch;
        try {
          while (s.get_batch(batch)) {
            for (Request &r : batch)
              answer(s, r);
          }
        } catch (const fserver::ClosedError &) {
        }
        s.stop();
      });
    return *this;
  }
  Cluster &echo() {
    return serve([](Server &s, Request &r) { s.respond(r.tensors(), r); });
  }
  // Ends what serve has begun.
  void leave() {
    for (Worker &w : worker)
      threads_.emplace_back([&w] { w.stop(); });
    join();
  }
  void join() {
    for (std::thread &t : threads_)
      t.join();
    threads_.clear();
  }

  std::string scheduler;
  std::vector<Server> server;
  std::vector<Worker> worker;

private:
  void each(const std::function<void(fserver::Node &)> &f) {
    std::vector<std::thread> all;
    for (Worker &w : worker)
      all.emplace_back([&] { f(w); });
    for (Server &s : server)
      all.emplace_back([&] { f(s); });
    for (std::thread &t : all)
      t.join();
  }

  std::vector<std::thread> threads_;
};

// A worker and a server, which take each other's calls in the test's own thread.
struct Pair : Cluster {
  explicit Pair(const Options &all = Options()) : Cluster(1, 1, all) {
    connect();
  }
  Worker &w() { return worker[0]; }
  Server &s() { return server[0]; }
  // Takes the next request.
  Request request() {
    Batch batch;
    EXPECT(s().get_batch(batch, seconds(10)));
    EXPECT_EQ(batch.size(), 1u);
    return std::move(batch[0]);
  }
};

inline Tensor floats(Memory &m, std::size_t at, std::int64_t n,
                     std::uint64_t key) {
  return m.tensor(DType::kFloat32, {n}, key, at * sizeof(float));
}
