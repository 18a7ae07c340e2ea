// How nodes end: stop, close, moves, destruction, fork, and peers that are killed.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cluster.hpp"

using namespace fserver;

namespace {

// This program again, with the case a_server_that_does_not_answer alone.
pid_t spawn_server(const std::string &scheduler) {
  setenv("TEST_SCHEDULER", scheduler.c_str(), 1);
  char self[] = "/proc/self/exe", name[] = "a_server_that_does_not_answer";
  char *argv[] = {self, name, nullptr};
  pid_t pid = 0;
  EXPECT_EQ(posix_spawn(&pid, self, nullptr, nullptr, argv, environ), 0);
  unsetenv("TEST_SCHEDULER");
  return pid;
}

} // namespace

// Of the process that is killed.
CASE(a_server_that_does_not_answer) {
  if (!std::getenv("TEST_SCHEDULER"))
    return;
  Options o;
  o.scheduler = std::getenv("TEST_SCHEDULER");
  Server s(o);
  Batch b;
  s.get_batch(b);
  std::printf("it has the request\n");
  std::fflush(stdout);
  pause();
}

CASE(a_server_is_killed) {
  Options o;
  o.scheduler = "127.0.0.1:0";
  o.connect = false;
  Scheduler scheduler(o);
  o.scheduler = scheduler.scheduler();
  int out[2];
  EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
  const int old = dup(1);
  dup2(out[1], 1);
  const pid_t pid = spawn_server(o.scheduler);
  dup2(old, 1);
  o.connect = true;
  Worker w(o);
  float x = 1, y = 0;
  const Handle h = w.push_pull(Tensor::of(&x, 1, 3), Tensor::of(&y, 1));
  std::string said;
  char c;
  while (said.find("it has the request") == std::string::npos) {
    EXPECT_EQ(read(out[0], &c, 1), 1);
    said += c;
  }
  std::thread killer([pid] { kill(pid, SIGKILL); });
  const auto e = EXPECT_THROW(PeerLostError, "server 0", h.wait(seconds(30)));
  killer.join();
  waitpid(pid, nullptr, 0);
  EXPECT_EQ(e.role(), FS_ROLE_SERVER);
  EXPECT_EQ(e.rank(), 0);
  EXPECT(!e.address().empty() && !e.reason().empty());
  EXPECT_EQ(e.code(), ECONNRESET);
  EXPECT_THROW(PeerLostError, "", w.wait(h)); // again
  try {
    w.stop();
  } catch (const PeerLostError &) { // the scheduler has not seen it yet
  }
  EXPECT(w.closed());
  w.stop();
}

CASE(what_is_closed_refuses_calls) {
  Cluster c;
  Batch b;
  float x = 0;
  Worker &w = c.worker[0];
  Server &s = c.server[0];
  EXPECT_THROW(ClosedError,
               "push_pull: the node is not connected: call connect",
               w.push_pull(Tensor::of(&x, 1), {}));
  EXPECT_THROW(ClosedError, "get_batch: the node is not connected",
               s.get_batch(b));
  c.connect();
  w.connect(); // does nothing
  EXPECT(w.connected() && !w.closed());
  EXPECT_THROW(ClosedError, "hosts no scheduler", [] {
    Options o;
    o.connect = false;
    o.scheduler = "127.0.0.1:7000";
    Server(o).scheduler();
  }());
  const Handle h = w.push_pull(Tensor::of(&x, 1), {});
  w.close();
  w.close();
  EXPECT(w.closed());
  EXPECT(h.done());
  EXPECT_THROW(ClosedError, "", h.wait());
  EXPECT_THROW(ClosedError, "wait: the node is closed", w.wait(h));
  EXPECT_THROW(ClosedError, "the node is closed",
               w.push_pull(Tensor::of(&x, 1), {}));
  EXPECT_THROW(ClosedError, "the node is closed", w.barrier());
  EXPECT_THROW(ClosedError, "the node is closed", w.describe());
  EXPECT_THROW(ClosedError, "the node is closed", w.connect());
  w.stop(); // does nothing
}

CASE(moves) {
  Pair p;
  p.echo();
  Worker other = std::move(p.w());
  EXPECT(p.w().closed());
  EXPECT(p.w().ended(Handle()));
  EXPECT(other.ended(Handle()));
  float x = 3, y = 0;
  EXPECT_THROW(ClosedError, "the node is closed",
               p.w().push_pull(Tensor::of(&x, 1), {}));
  const Handle h = other.push_pull(Tensor::of(&x, 1), Tensor::of(&y, 1));
  p.w() = std::move(other);
  p.w().wait(h);
  EXPECT_EQ(y, 3.0f);
  p.leave();
}

CASE(close_ends_a_wait) {
  Pair p;
  float x = 0, y = 0;
  const Handle h = p.w().push_pull(Tensor::of(&x, 1), Tensor::of(&y, 1));
  std::thread closer([&] { p.w().close(); });
  EXPECT_THROW(ClosedError, "", h.wait(seconds(30)));
  closer.join();
  Batch b;
  std::thread other([&] { p.s().close(); });
  try {
    while (p.s().get_batch(b)) {
    }
    EXPECT(false);
  } catch (const ClosedError &) {
  } catch (const PeerLostError &) { // that of the worker came first
  }
  other.join();
}

CASE(destruction_with_a_request_under_way) {
  Handle h;
  float x = 0, y = 0;
  {
    Pair p;
    h = p.w().push_pull(Tensor::of(&x, 1), Tensor::of(&y, 1));
    Request r = p.request();
  }
  EXPECT(h.done());
  EXPECT_THROW(ClosedError, "", h.wait());
  // A request that outlives its server.
  Request kept;
  {
    Pair p;
    Memory m = Memory::shared(4096);
    p.w().push_pull(m.tensor(DType::kUInt8, {4096}), {});
    kept = p.request();
  }
}

CASE(everything_ends) {
  std::int64_t nodes = -1, buffers = -1, goroutines = -1;
  EXPECT_EQ(fs_live(&nodes, &buffers, &goroutines), 0);
  EXPECT_EQ(nodes, 0);
  EXPECT_EQ(buffers, 0);
}

CASE(a_child_of_fork) {
  Pair p;
  p.echo();
  float x = 0, y = 0;
  const Handle h = p.w().push_pull(Tensor::of(&x, 1), Tensor::of(&y, 1));
  h.wait();
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(20); // a hang ends in a signal
    EXPECT(h.done());
    EXPECT_THROW(Error, "child of fork", p.w().wait(h));
    EXPECT_THROW(Error, "child of fork", h.wait());
    EXPECT_THROW(Error, "child of fork", p.w().stop());
    EXPECT_THROW(Error, "child of fork", Memory::shared(10));
    EXPECT_THROW(Error, "child of fork", [] { Worker w; }());
    p.w().close();
    {
      Worker gone = std::move(p.w());
    }
    _exit(0);
  }
  int status = -1;
  waitpid(pid, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  p.leave();
}

CASE(a_cluster_that_does_not_come) {
  Options o;
  o.scheduler = "127.0.0.1:9"; // nobody listens
  o.init_timeout = 0.2;
  const auto e = EXPECT_THROW(TimeoutError, "127.0.0.1:9", Worker w(o));
  EXPECT_EQ(e.code(), ETIMEDOUT);
  o.connect = false;
  Worker w(o);
  EXPECT_THROW(TimeoutError, "", w.connect());
  EXPECT(w.closed());
}
