// How the nodes of a process are opened and ended. For the other headers alone.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fserver/fserver.hpp"
#include "ps/internal/env.h"
#include "ps/internal/message.h"
#include "ps/internal/underway.h"
#include "ps/internal/wire.h"

namespace ps::detail {

// Runs all of some things at once, and throws what the first of them that failed has thrown.
inline void at_once(const std::vector<std::function<void()>> &all) {
  std::vector<std::exception_ptr> thrown(all.size());
  std::vector<std::thread> threads;
  const auto run = [&](std::size_t i) {
    try {
      all[i]();
    } catch (...) {
      thrown[i] = std::current_exception();
    }
  };
  for (std::size_t i = 1; i < all.size(); i++)
    threads.emplace_back(run, i);
  if (!all.empty())
    run(0);
  for (std::thread &t : threads)
    t.join();
  for (const std::exception_ptr &e : thrown) {
    if (e)
      std::rethrow_exception(e);
  }
}

// A number of the environment, from `least` on.
inline int number(const char *name, int otherwise, int least) {
  int value = otherwise;
  Environment::Get()->find(name, &value, otherwise);
  if (value < least)
    throw fserver::ConfigError(std::string(name) + "=" + std::to_string(value) +
                               ": want at least " + std::to_string(least));
  return value;
}

// Nodes of a group in this process: one, if a setting says which of the group it is; else the whole group.
inline int instances_here() {
  for (const char *name :
       {"DMLC_INSTANCE_ID", "STEPMESH_GPU", "DMLC_RANK_OFFSET"}) {
    if (setting(name))
      return 1;
  }
  return number("DMLC_GROUP_SIZE", 1, 1);
}

// Reports whether the settings give an instance this place in its group, by any of their names for it. For processes
// that run one instance.
inline bool is_own_place(int place) {
  const int gpu = number("STEPMESH_GPU", 0, 0);
  int offset = 0;
  Environment::Get()->find("DMLC_RANK_OFFSET", &offset, 0);
  return place == gpu || place == gpu + offset ||
         place == number("DMLC_INSTANCE_ID", gpu, 0);
}

// The name that STEPMESH_BACKEND has, or its older spelling; empty: none.
inline std::string backend_name() {
  for (const char *name : {"STEPMESH_BACKEND", "STEPMESH_BAKCEND"}) {
    if (const char *value = setting(name))
      return value;
  }
  return "";
}

// The names of backends that the program has registered.
struct OtherBackends {
  static OtherBackends &all() {
    static OtherBackends *all = new OtherBackends;
    return *all;
  }
  std::mutex mutex;
  std::set<std::string> names;
};
inline void register_backend(const std::string &name) {
  std::lock_guard<std::mutex> lock(OtherBackends::all().mutex);
  if (name != "CPU" && name != "GPU")
    OtherBackends::all().names.insert(name);
}
inline bool is_other_backend(const std::string &name) {
  std::lock_guard<std::mutex> lock(OtherBackends::all().mutex);
  return OtherBackends::all().names.count(name) != 0;
}

// What an instance of this process is opened with. rank: of StartPS; -1: as the environment says. may_host: whether
// FSERVER_HOST_SCHEDULER is for it.
inline fserver::Options options_of(int index, int rank, bool may_host) {
  fserver::Options o;
  for (const auto &[name, value] : Environment::Get()->set())
    o.settings[name] = value;
  o.connect = false;
  if (!may_host)
    o.host_scheduler = false;
  if (is_other_backend(backend_name())) { // which the engine does not know
    o.backend = "CPU";
    o.settings["STEPMESH_BAKCEND"] = "";
  }
  const int size = number("DMLC_GROUP_SIZE", 1, 1);
  if (instances_here() > 1) {
    if (rank >= 0)
      o.node_rank = rank;
    o.gpu = index;
  } else if (rank >= 0) {
    o.node_rank = rank / size;
    o.rank_offset = rank % size - number("STEPMESH_GPU", 0, 0);
  }
  return o;
}

// The oldest push_pull under way. handle has no id if it is being started.
struct Oldest {
  std::uint64_t id = UINT64_MAX; // or one before it
  fserver::Handle handle;
};

// Something that has push_pulls under way.
class Looks {
public:
  // Notes which have ended, and gives the oldest that has not.
  virtual Oldest look() = 0;

protected:
  ~Looks() = default;
};

// A worker, and the engine's keys that its requests have.
struct WorkerNode {
  WorkerNode(int index, int rank) : worker(options_of(index, rank, false)) {}

  void issued(const fserver::Handle &h) {
    std::uint64_t last = newest.load();
    while (last < h.id() && !newest.compare_exchange_weak(last, h.id())) {
    }
  }
  // Reports whether another push_pull may be started. An engine forgets how one has ended when 4,096 later
  // ones have been started. So all look after each 256, and the oldest under way is at most 3,000 behind.
  // If it is more, this waits a moment for it and returns false: call again.
  bool has_room() {
    if (newest.load() - looked.load() < kLook)
      return true;
    std::unique_lock<std::mutex> lock(looking);
    const std::uint64_t now = newest.load();
    if (now - looked.load() < kLook)
      return true;
    Oldest oldest;
    for (const auto &[id, l] : all) {
      if (const Oldest o = l->look(); o.id < oldest.id)
        oldest = o;
    }
    if (oldest.id > now || now - oldest.id < kBehind) {
      looked.store(now);
      return true;
    }
    lock.unlock();
    if (!oldest.handle.id()) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      return false;
    }
    rest(oldest.handle, std::chrono::milliseconds(10));
    return false;
  }
  // Waits until another push_pull may be started, for at most 10 s. Then throws fserver::LimitError.
  void wait_for_room(const char *call) {
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!has_room()) {
      if (std::chrono::steady_clock::now() > end)
        throw fserver::LimitError(
            std::string(call) +
            ": a request of a KVWorker of this node has not ended, and 3,000 "
            "push_pulls have been started since (Wait for it first)");
    }
  }
  // Waits for a push_pull, at most for so long; or a moment, if it has failed and its memory is still in use: no call waits
  // for that end.
  void rest(const fserver::Handle &h, fserver::Timeout limit) const {
    try {
      worker.wait(h, limit);
    } catch (const fserver::Error &) { // it is thrown again when it has ended
    }
    if (!worker.ended(h))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // One for each app and customer. Throws ConfigError if there is one.
  void add(int app, int customer, Looks *l) {
    std::lock_guard<std::mutex> lock(looking);
    if (!all.emplace(std::make_pair(app, customer), l).second)
      throw fserver::ConfigError(
          "KVWorker: app_id " + std::to_string(app) +
          " has a KVWorker with customer_id " + std::to_string(customer) +
          " already: use another number, or delete that first");
  }
  void remove(int app, int customer) {
    std::lock_guard<std::mutex> lock(looking);
    all.erase({app, customer});
  }

  // The engine's key of a request for a server: of the head, and that plus 1 of the values. An engine
  // takes 32,768 keys of one worker. So requests with new first keys have keys in common from some number
  // of them on, which only orders these requests.
  std::uint64_t key_for(int server, int app, Key first) {
    const std::uint64_t key = engine_key(app, first);
    std::lock_guard<std::mutex> lock(mutex);
    const auto s = static_cast<std::size_t>(server);
    if (known.size() <= s)
      known.resize(s + 1);
    std::unordered_set<std::uint64_t> &own = known[s];
    if (own.count(key))
      return key;
    if (own.size() < kOwnKeys) {
      own.insert(key);
      return key;
    }
    return shared_key(key);
  }

  static constexpr std::uint64_t kLook = 256, kBehind = 3000;

  Kept kept; // goes after the worker
  fserver::Worker worker;
  std::mutex looking;
  std::map<std::pair<int, int>, Looks *> all;
  std::atomic<std::uint64_t> newest{0}, looked{0};
  std::mutex mutex;
  std::vector<std::unordered_set<std::uint64_t>> known; // by server
};

} // namespace ps::detail
