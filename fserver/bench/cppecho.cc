// cppecho: what two processes do through the C++ interface. It is driven as raw.h describes:
//
//   cppecho CLIENT_CORE SERVER_CORE
//
// FSERVER_TRANSPORT says how bytes travel. The two processes of a pair do not share a core that they
// spin on, so neither yields.
#include <fcntl.h>
#include <sched.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "fserver/fserver.hpp"

namespace {

constexpr std::uint64_t kMost = UINT64_C(1) << 32; // bytes of a message

struct Round {
  std::uint64_t out, back, warmup, iters;
};

void stamp(const fserver::Tensor &t, std::uint64_t i) {
  if (t.bytes >= sizeof i)
    std::memcpy(t.data, &i, sizeof i);
}

void check(const fserver::Tensor &t, std::uint64_t i) {
  std::uint64_t got = i;
  if (t.bytes >= sizeof got)
    std::memcpy(&got, t.data, sizeof got);
  if (got != i)
    throw std::runtime_error("iteration " + std::to_string(i) +
                             ": got the data of " + std::to_string(got));
}

fserver::Tensor bytes(const fserver::Memory &m, std::uint64_t n) {
  return m.tensor(fserver::DType::kUInt8, {static_cast<std::int64_t>(n)});
}

// Goes on as the same program on a core, with all threads that it starts.
void continue_on(const char *core, std::vector<const char *> arguments) {
  if (const int n = std::atoi(core); n >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<unsigned>(n), &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
      throw std::runtime_error(std::string("pin to core ") + core + ": " +
                               std::strerror(errno));
  }
  arguments.insert(arguments.begin(), "cppecho");
  arguments.push_back(nullptr);
  execv("/proc/self/exe", const_cast<char **>(arguments.data()));
  throw std::runtime_error(std::string("exec: ") + std::strerror(errno));
}

void serve(const char *scheduler) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  fserver::Options options;
  options.scheduler = scheduler;
  fserver::Server server(options);
  fserver::Batch batch;
  fserver::Memory reply;
  std::uint64_t i = 0;
  try {
    while (server.get_batch(batch)) {
      for (fserver::Request &r : batch) {
        const std::uint64_t back = r.answers()[0];
        if (back == r[0].bytes) { // an echo
          server.respond(r[0], r);
          continue;
        }
        if (reply.bytes() < back)
          reply = fserver::Memory(back);
        const fserver::Tensor t = bytes(reply, back);
        if (r[0].bytes >= sizeof i)
          std::memcpy(&i, r[0].data, sizeof i);
        stamp(t, i);
        server.respond(t, r);
      }
    }
  } catch (const fserver::ClosedError &) {
  }
  server.stop();
}

void answer(std::vector<std::int64_t> &ns) {
  std::sort(ns.begin(), ns.end());
  const auto at = [&](std::size_t percent) {
    return static_cast<double>(ns[(ns.size() * percent + 99) / 100 - 1]) / 1e3;
  };
  double sum = 0;
  for (std::int64_t n : ns)
    sum += static_cast<double>(n);
  std::printf("{\"iters\":%zu,\"p50_us\":%.3f,\"p99_us\":%.3f,\"min_us\":%.3f,"
              "\"mean_us\":%.3f}\n",
              ns.size(), at(50), at(99), static_cast<double>(ns[0]) / 1e3,
              sum / static_cast<double>(ns.size()) / 1e3);
  std::fflush(stdout);
}

bool next_round(Round &r) {
  char line[256];
  if (!std::fgets(line, sizeof line, stdin))
    return false;
  if (std::sscanf(line, "%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &r.out,
                  &r.back, &r.warmup, &r.iters) != 4 ||
      r.out < 1 || r.out > kMost || r.back < 1 || r.back > kMost || r.iters < 1)
    throw std::runtime_error(
        std::string("want OUT BACK WARMUP ITERS, sizes from 1 to 2^32: ") +
        line);
  return true;
}

void work(const char *server_core) {
  fserver::Options options;
  options.scheduler = "127.0.0.1:0";
  options.connect = false;
  fserver::Scheduler scheduler(options);
  std::string address = scheduler.scheduler();
  char self[] = "/proc/self/exe", serve[] = "server";
  char *argv[] = {self, serve, const_cast<char *>(server_core), address.data(),
                  nullptr};
  pid_t child;
  if (const int rc = posix_spawn(&child, self, nullptr, nullptr, argv, environ))
    throw std::runtime_error(std::string("spawn: ") + std::strerror(rc));
  options.scheduler = address;
  options.connect = true;
  fserver::Worker worker(options);
  fserver::Memory out, back;
  std::vector<std::int64_t> ns;
  for (Round r; next_round(r);) {
    if (out.bytes() < r.out)
      out = fserver::Memory(r.out);
    if (back.bytes() < r.back)
      back = fserver::Memory(r.back);
    const fserver::Tensor x = bytes(out, r.out), y = bytes(back, r.back);
    ns.clear();
    ns.reserve(r.iters);
    for (std::uint64_t i = 0; i < r.warmup + r.iters; i++) {
      stamp(x, i);
      const std::int64_t begin = fserver::detail::now_ns();
      const fserver::Handle handle = worker.push_pull(x, y);
      worker.wait(handle, std::chrono::seconds(60));
      const std::int64_t end = fserver::detail::now_ns();
      check(y, i);
      if (i >= r.warmup)
        ns.push_back(end - begin);
    }
    answer(ns);
  }
  worker.stop();
}

} // namespace

int main(int argc, char **argv) {
  try {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "serve" && argc == 3)
      serve(argv[2]);
    else if (what == "server" && argc == 4)
      continue_on(argv[2], {"serve", argv[3]});
    else if (what == "client" && argc == 3)
      work(argv[2]);
    else if (argc == 3)
      continue_on(argv[1], {"client", argv[2]});
    else
      throw std::runtime_error("want CLIENT_CORE SERVER_CORE");
  } catch (const std::exception &e) {
    std::fprintf(stderr, "cppecho: %s\n", e.what());
    return 1;
  }
}
