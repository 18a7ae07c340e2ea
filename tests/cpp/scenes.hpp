// Scenes: cases that several processes play. Each is this program again, with a role.
#pragma once

#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ps/ps.h"
#include "test.hpp"

struct Scene {
  const char *name;
  int workers, servers;
  bool started; // StartPS and Finalize are called for it
  void (*run)();
};

// Where the tensors of nodes are: CPU or GPU.
inline const char *backend = "CPU";

// SCENE_DEVICES="rxe0 rxe1": the RDMA device of workers, and that of servers. Empty: any.
inline std::string device_of(const std::string &role) {
  const char *both = std::getenv("SCENE_DEVICES");
  const std::string names = both && role != "scheduler" ? both : "";
  const std::size_t space = names.find(' ');
  return role == "worker" || space == std::string::npos
             ? names.substr(0, space)
             : names.substr(space + 1);
}

inline std::vector<Scene> &scenes() {
  static std::vector<Scene> all;
  return all;
}

// A free TCP port that no process gets that asks for any, as a server may before the scheduler does.
inline int free_port() {
  std::random_device random;
  bool free = false;
  int port = 0;
  for (int tries = 0; !free && tries < 100; tries++) {
    port = 20000 + static_cast<int>(random() % 12000);
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a.sin_port = htons(static_cast<std::uint16_t>(port));
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    free = bind(fd, reinterpret_cast<sockaddr *>(&a), sizeof a) == 0;
    close(fd);
  }
  EXPECT(free);
  return port;
}

inline pid_t start_process(const Scene &s, const char *role, int rank,
                           const std::string &port) {
  std::vector<std::string> all;
  for (char **e = environ; *e; e++)
    all.push_back(*e);
  all.push_back(std::string("KV_SCENE=") + s.name);
  all.push_back(std::string("DMLC_ROLE=") + role);
  all.push_back("DMLC_NODE_RANK=" + std::to_string(rank));
  all.push_back("DMLC_NUM_WORKER=" + std::to_string(s.workers));
  all.push_back("DMLC_NUM_SERVER=" + std::to_string(s.servers));
  all.push_back("DMLC_PS_ROOT_URI=127.0.0.1");
  all.push_back("DMLC_PS_ROOT_PORT=" + port);
  all.push_back(std::string("STEPMESH_BACKEND=") + backend);
  if (const std::string device = device_of(role); !device.empty())
    all.push_back("FSERVER_RDMA_DEVICE=" + device);
  std::vector<char *> env;
  for (std::string &line : all)
    env.push_back(line.data());
  env.push_back(nullptr);
  char self[] = "/proc/self/exe";
  char *argv[] = {self, nullptr};
  pid_t pid = 0;
  EXPECT(posix_spawn(&pid, self, nullptr, nullptr, argv, env.data()) == 0);
  return pid;
}

// Plays a scene, and waits for its processes. The first that fails ends the others, and the case.
inline void play(const Scene &s) {
  const std::string port = std::to_string(free_port());
  std::vector<pid_t> all{start_process(s, "scheduler", 0, port)};
  for (int i = 0; i < s.servers; i++)
    all.push_back(start_process(s, "server", i, port));
  for (int i = 0; i < s.workers; i++)
    all.push_back(start_process(s, "worker", i, port));
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::seconds(100);
  bool good = true;
  while (!all.empty()) {
    for (std::size_t i = 0; i < all.size();) {
      int status = 0;
      if (waitpid(all[i], &status, WNOHANG) == 0) {
        i++;
        continue;
      }
      all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
      good = good && status == 0;
    }
    if (!good || std::chrono::steady_clock::now() > deadline)
      break;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (pid_t pid : all) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  if (!good)
    failed(s.name, 0, "a process of the scene has failed");
  if (!all.empty())
    failed(s.name, 0, "the scene does not end");
}

#define SCENE_OF(id, workers, servers, started)                                \
  static void scene_##id();                                                    \
  static const bool scene_added_##id =                                         \
      (scenes().push_back({#id, workers, servers, started, scene_##id}),       \
       true);                                                                  \
  CASE(id) {                                                                   \
    for (const Scene &s : scenes()) {                                          \
      if (std::string(s.name) == #id)                                          \
        play(s);                                                               \
    }                                                                          \
  }                                                                            \
  static void scene_##id()

// What each worker and server of a scene does.
#define SCENE(id, workers, servers) SCENE_OF(id, workers, servers, true)
// What each process does, which starts and ends ps itself.
#define BARE_SCENE(id, workers, servers) SCENE_OF(id, workers, servers, false)

// Runs this process's part of a scene.
inline int run_scene(const std::string &name) {
  prctl(PR_SET_PDEATHSIG, SIGKILL); // with the one that waits for it
  for (const Scene &s : scenes()) {
    if (s.name != name)
      continue;
    try {
      const ps::Node::Role role = ps::GetRole(std::getenv("DMLC_ROLE"));
      if (s.started)
        ps::StartPS(0, role, -1, true);
      if (!s.started || role != ps::Node::SCHEDULER)
        s.run();
      if (s.started)
        ps::Finalize(0, role, true);
    } catch (const std::exception &e) {
      failed(s.name, ps::GetNodeRank(),
             std::string(std::getenv("DMLC_ROLE")) + ": " + e.what());
    }
    return 0;
  }
  return 2;
}

inline int run_scenes(int argc, char **argv) {
  if (const char *name = std::getenv("KV_SCENE"))
    return run_scene(name);
  return run_cases(argc, argv);
}

inline ps::Node::Role own_role() {
  return ps::GetRole(std::getenv("DMLC_ROLE"));
}

// A KVServer with a handler, which is there until the process ends.
template <class Val>
ps::KVServer<Val> *serve(typename ps::KVServer<Val>::ReqHandle handle,
                         int app = 0) {
  auto *server = new ps::KVServer<Val>(app);
  server->set_request_handle(std::move(handle));
  return server;
}
