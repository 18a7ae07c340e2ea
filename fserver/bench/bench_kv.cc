// bench_kv: how fast workers push values to servers and pull them, through ps/ps.h. It is used as ps-lite's benchmark:
//
//   bench_kv [BYTES [ROUNDS [MODE]]]
//
// BYTES     of the value of a key (1024000)
// ROUNDS    of all keys (100)
// MODE      push_then_pull, push_pull (the default), push or pull; or its number there: 0 to 3
//
// The settings are DMLC_* and these:
//
// NUM_KEY_PER_SERVER   keys at each server, each with a request of its own (40)
// LOG_DURATION         rounds of a line of the log (10)
// BENCHMARK_SIZE       bytes, in place of BYTES
// BENCHMARK_ITER, TOTAL_DURATION   rounds, in place of ROUNDS; the latter counts if both are set
// BENCHMARK_WARMUP     rounds before those that are timed (0)
// BENCHMARK_NTHREAD    threads of a worker, each with a KVWorker and keys of its own (1)
// ENABLE_RECV_BUFFER   1: pushes are received in registered memory
// TEST_NUM_GPU_WORKER, TEST_NUM_GPU_SERVER   1: values of workers, of servers are on the node's GPU
// DEBUG_MODE           1: servers write a line for each request
//
// A round sends a request for each key, and waits for all of them. Goodput counts the bytes of one direction. Before
// and after the rounds that are timed, all bytes of all keys are pushed, pulled and compared.
#include <algorithm>
#include <chrono>
#include <future>
#include <iomanip>
#include <map>

#include "gpumem.h"
#include "ps/ps.h"

namespace {

constexpr int kCheck = 1, kTimed = 2; // cmd of requests
constexpr std::size_t kMostBytes = std::size_t{1} << 32;
constexpr int kMostRounds = 1000000000;

enum Mode { kPushThenPull, kPushPull, kPush, kPull };
const char *const kModes[] = {"push_then_pull", "push_pull", "push", "pull"};

struct Settings {
  std::size_t bytes = 1024000;
  int rounds = 100, warmup = 0, keys = 40, log = 10, threads = 1;
  Mode mode = kPushPull;
  bool registered = false, worker_gpu = false, server_gpu = false,
       debug = false;
};

[[noreturn]] void refuse(const std::string &what, const std::string &value,
                         const std::string &want) {
  throw std::invalid_argument(what + " is \"" + value + "\", want " + want);
}

std::size_t number(const char *name, const std::string &text, std::size_t most,
                   std::size_t least = 1) {
  std::size_t n = 0;
  for (char c : text) {
    if (c < '0' || c > '9' || n > most)
      n = most + 1;
    else
      n = n * 10 + static_cast<std::size_t>(c - '0');
  }
  if (text.empty() || n < least || n > most)
    refuse(name, text,
           "a whole number from " + std::to_string(least) + " to " +
               std::to_string(most));
  return n;
}

template <class T>
void from_environment(const char *name, T *value, T most, T least = 1) {
  if (const char *text = ps::detail::setting(name))
    *value = static_cast<T>(number(name, text, static_cast<std::size_t>(most),
                                   static_cast<std::size_t>(least)));
}

bool is_set(const char *name) {
  const char *text = ps::detail::setting(name);
  return text && std::string(text) != "0";
}

Settings settings_of(int argc, char **argv) {
  Settings s;
  if (argc > 4)
    refuse("the fifth argument", argv[4], "at most BYTES ROUNDS MODE");
  if (argc > 1)
    s.bytes = number("BYTES", argv[1], kMostBytes);
  if (argc > 2)
    s.rounds = static_cast<int>(number("ROUNDS", argv[2], kMostRounds));
  if (argc > 3) {
    int mode = 0;
    while (mode < 4 && argv[3] != std::to_string(mode) &&
           std::string(argv[3]) != kModes[mode])
      mode++;
    if (mode == 4)
      refuse("MODE", argv[3], "push_then_pull, push_pull, push or pull");
    s.mode = static_cast<Mode>(mode);
  }
  from_environment("NUM_KEY_PER_SERVER", &s.keys, 1000000);
  from_environment("LOG_DURATION", &s.log, kMostRounds);
  from_environment("BENCHMARK_SIZE", &s.bytes, kMostBytes);
  from_environment("BENCHMARK_ITER", &s.rounds, kMostRounds);
  from_environment("TOTAL_DURATION", &s.rounds, kMostRounds);
  from_environment("BENCHMARK_WARMUP", &s.warmup, kMostRounds, 0);
  from_environment("BENCHMARK_NTHREAD", &s.threads, 1024);
  s.registered = is_set("ENABLE_RECV_BUFFER");
  s.worker_gpu = is_set("TEST_NUM_GPU_WORKER");
  s.server_gpu = is_set("TEST_NUM_GPU_SERVER");
  s.debug = is_set("DEBUG_MODE");
  return s;
}

// Memory of the CPU or of the node's GPU, which an SArray shares.
class Buffer {
public:
  Buffer(std::size_t bytes, bool on_gpu) {
    if (!on_gpu) {
      array = ps::SArray<char>(bytes);
      return;
    }
    const int id = ps::GetGpuId();
    gpumem::Gpu &gpu = gpumem::Gpu::get(id);
    array.reset(
        static_cast<char *>(gpu.alloc(bytes)), bytes,
        [&gpu](char *at) { gpu.free(at); }, ps::GPU, id, ps::GPU, id);
    array.register_once();
  }
  void put(const ps::SArray<char> &from) { move(array, from); }
  void get(ps::SArray<char> &to) const { move(to, array); }

  ps::SArray<char> array;

private:
  static void move(const ps::SArray<char> &to, const ps::SArray<char> &from) {
    for (const ps::SArray<char> *a : {&to, &from}) {
      if (a->src_device_type_ == ps::GPU)
        return gpumem::Gpu::get(a->src_device_id_)
            .copy(to.data(), from.data(), from.size());
    }
    std::memcpy(to.data(), from.data(), from.size());
  }
};

// Key i of a thread of a worker. Key i is at server i % servers.
ps::Key key_of(const Settings &s, int thread, int i) {
  const auto &ranges = ps::Postoffice::GetWorker()->GetServerKeyRanges();
  const auto all = static_cast<std::uint64_t>(s.keys) * ranges.size();
  const auto n = static_cast<std::uint64_t>(i);
  return ranges[n % ranges.size()].begin() +
         static_cast<std::uint64_t>(thread) * all + n;
}

// The server's values: those of each key of each worker.
class Store {
public:
  explicit Store(const Settings &s) : settings_(s), server_(0) {
    if (s.registered)
      register_all();
    server_.set_request_handle(
        [this](const ps::KVMeta &meta, const ps::KVPairs<char> &data,
               ps::KVServer<char> *) { take(meta, data); });
  }

private:
  void register_all() {
    const ps::Postoffice &office = *ps::Postoffice::GetServer();
    const int servers = office.num_servers();
    for (int rank = 0; rank < office.num_workers(); rank++) {
      for (int thread = 0; thread < settings_.threads; thread++) {
        for (int i = office.my_rank(); i < settings_.keys * servers;
             i += servers) {
          ps::SArray<ps::Key> keys{key_of(settings_, thread, i)};
          Buffer &b = values(ps::Postoffice::WorkerRankToID(rank), keys[0]);
          server_.RegisterRecvBufferWithRank(rank, keys, b.array);
        }
      }
    }
  }

  Buffer &values(int sender, ps::Key key) {
    std::unique_ptr<Buffer> &b = values_[{sender, key}];
    if (!b)
      b = std::make_unique<Buffer>(settings_.bytes, settings_.server_gpu);
    return *b;
  }

  void take(const ps::KVMeta &meta, const ps::KVPairs<char> &data) {
    if (settings_.debug)
      LOG(INFO) << "server " << ps::Postoffice::GetServer()->my_rank() << ": "
                << (meta.push ? "push" : "pull") << " of " << meta.val_len
                << " bytes of key " << meta.key << " by "
                << ps::Postoffice::IDtoRank(meta.sender);
    ps::KVPairs<char> res;
    Buffer &b = values(meta.sender, meta.key);
    if (!meta.push)
      res.vals = b.array;
    else if (data.vals.size() != settings_.bytes)
      throw std::runtime_error("BYTES of worker and server differ");
    else if (meta.cmd == kCheck && data.vals.data() != b.array.data())
      b.put(data.vals);
    server_.Response(meta, res);
  }

  const Settings settings_;
  ps::KVServer<char> server_;
  std::map<std::pair<int, ps::Key>, std::unique_ptr<Buffer>> values_;
};

// A thread of a worker.
class Pusher {
public:
  Pusher(const Settings &s, int thread)
      : settings_(s), kv_(0, thread), check_(s.bytes) {
    name_ = "worker " + std::to_string(ps::MyRank()) +
            (s.threads > 1 ? ", thread " + std::to_string(thread) : "");
    const int all = s.keys * ps::NumServers();
    for (int i = 0; i < all; i++) {
      keys_.emplace_back(1, key_of(s, thread, i));
      out_.emplace_back(s.bytes, s.worker_gpu);
      in_.emplace_back(s.bytes, s.worker_gpu);
    }
  }

  // Pushes and pulls new bytes of each key, and compares all of them.
  void check(std::uint64_t seed) {
    for (std::size_t i = 0; i < keys_.size(); i++) {
      fill(i, seed);
      out_[i].put(check_);
    }
    spoil();
    round(true, false, kCheck);
    round(false, true, kCheck);
    compare(seed);
  }

  // Rounds of pushes, of pulls or of both, with a line of the log each LOG_DURATION. Then compares what was pulled last
  // to what check(seed) has pushed.
  void run(const char *op, bool push, bool pull, std::uint64_t seed) {
    using Clock = std::chrono::steady_clock;
    spoil();
    for (int i = 0; i < settings_.warmup; i++)
      round(push, pull, kTimed);
    for (int done = 0; done < settings_.rounds;) {
      const int count = std::min(settings_.log, settings_.rounds - done);
      const auto begin = Clock::now();
      for (int i = 0; i < count; i++)
        round(push, pull, kTimed);
      const std::chrono::duration<double> took = Clock::now() - begin;
      done += count;
      const double requests =
          static_cast<double>(count) * static_cast<double>(keys_.size());
      const double bits = 8 * requests * static_cast<double>(settings_.bytes);
      LOG(INFO) << name_ << ": " << op
                << ": Application goodput: " << std::fixed
                << std::setprecision(4) << bits / took.count() / 1e9
                << " Gbps, " << std::setprecision(1)
                << (push && pull ? 2 : 1) * requests / took.count()
                << " messages/s. count = " << count;
    }
    if (pull)
      compare(seed);
  }

private:
  void round(bool push, bool pull, int cmd) {
    open_.clear();
    for (std::size_t i = 0; i < keys_.size(); i++) {
      if (push)
        open_.push_back(kv_.ZPush(keys_[i], out_[i].array, {}, cmd));
      if (pull)
        open_.push_back(kv_.ZPull(keys_[i], &in_[i].array, nullptr, cmd));
    }
    for (int timestamp : open_)
      kv_.Wait(timestamp);
  }

  // The bytes of key i: those of a generator of pseudo-random numbers.
  void fill(std::size_t i, std::uint64_t seed) {
    std::uint64_t x = keys_[i][0] ^ seed << 32 ^
                      static_cast<std::uint64_t>(ps::MyRank()) << 48;
    for (char &c : check_) {
      x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
      c = static_cast<char>(x >> 56);
    }
  }
  // Puts bytes that no check has pushed where the values are pulled to.
  void spoil() {
    for (std::size_t i = 0; i < keys_.size(); i++) {
      fill(i, UINT64_MAX);
      in_[i].put(check_);
    }
  }
  void compare(std::uint64_t seed) {
    ps::SArray<char> got(settings_.bytes);
    for (std::size_t i = 0; i < keys_.size(); i++) {
      fill(i, seed);
      in_[i].get(got);
      const auto at =
          std::mismatch(got.begin(), got.end(), check_.begin()).first;
      if (at != got.end())
        throw std::runtime_error("wrong data: byte " +
                                 std::to_string(at - got.begin()) + " of key " +
                                 std::to_string(keys_[i][0]));
    }
  }

  const Settings settings_;
  std::string name_;
  ps::KVWorker<char> kv_;
  std::vector<ps::SArray<ps::Key>> keys_;
  std::vector<Buffer> out_, in_;
  ps::SArray<char> check_;
  std::vector<int> open_;
};

void work(const Settings &s) {
  std::vector<std::unique_ptr<Pusher>> all;
  for (int i = 0; i < s.threads; i++)
    all.push_back(std::make_unique<Pusher>(s, i));
  // A step in all threads of all workers.
  const auto together = [&](auto &&step) {
    std::vector<std::future<void>> threads;
    for (auto &p : all)
      threads.push_back(std::async(std::launch::async, [&] { step(*p); }));
    for (std::future<void> &t : threads)
      t.get();
    ps::Postoffice::GetWorker()->Barrier(0, ps::kWorkerGroup);
  };
  together([](Pusher &p) { p.check(1); });
  if (s.mode == kPushThenPull || s.mode == kPush)
    together([](Pusher &p) { p.run("push", true, false, 1); });
  if (s.mode == kPushThenPull || s.mode == kPull)
    together([](Pusher &p) { p.run("pull", false, true, 1); });
  if (s.mode == kPushPull)
    together([](Pusher &p) { p.run("push_pull", true, true, 1); });
  together([](Pusher &p) { p.check(2); });
}

// Tells why there is none before the others wait for this process.
void need_gpu() {
  try {
    gpumem::Gpu::get(ps::GetGpuId());
  } catch (const std::exception &e) {
    throw std::runtime_error("TEST_NUM_GPU_WORKER, TEST_NUM_GPU_SERVER: " +
                             std::string(e.what()));
  }
}

void play(const Settings &s, ps::Node::Role role) {
  using ps::Postoffice;
  const bool works = role == ps::Node::WORKER || role == ps::Node::JOINT;
  const bool serves = role == ps::Node::SERVER || role == ps::Node::JOINT;
  const bool on_gpu = (works && s.worker_gpu) || (serves && s.server_gpu);
  if (on_gpu && !ps::detail::setting("STEPMESH_BACKEND"))
    ps::Environment::Init({{"STEPMESH_BACKEND", "GPU"}});
  if (on_gpu)
    need_gpu();
  ps::StartPS(0, role, -1, true);
  if (serves) { // until Finalize has ended the server
    auto *store = new Store(s);
    Postoffice::GetServer()->RegisterExitCallback([store] { delete store; });
  }
  // Memory is registered before the first push.
  const int everybody = ps::kServerGroup + ps::kWorkerGroup;
  std::future<void> barrier;
  if (serves)
    barrier = std::async(std::launch::async, [&] {
      Postoffice::GetServer()->Barrier(0, everybody);
    });
  if (works) {
    Postoffice::GetWorker()->Barrier(0, everybody);
    work(s);
  }
  if (serves)
    barrier.get();
  ps::Finalize(0, role, true);
}

} // namespace

int main(int argc, char **argv) {
  try {
    const Settings settings = settings_of(argc, argv);
    const char *role = ps::detail::setting("DMLC_ROLE");
    if (!role)
      throw std::invalid_argument(
          "DMLC_ROLE is not set, want scheduler, server, worker or joint "
          "(`fserver bench kv` starts all of them)");
    play(settings, ps::GetRole(role));
  } catch (const std::exception &e) {
    std::fprintf(stderr, "bench_kv: %s\n", e.what());
    return 1;
  }
}
