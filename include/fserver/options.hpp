// Options: how a node is opened.
#pragma once

#include <cctype>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fserver/error.hpp"
#include "fserver/process.hpp"

extern "C" char **environ;

namespace fserver {

// What a node is opened with. A field that is not set (an empty string) is taken from the
// environment, then from the default; `fserver env` prints all settings.
struct Options {
  std::string scheduler;         // its address, "host:port", "[::1]:7000"
  std::optional<int> workers;    // worker groups (1)
  std::optional<int> servers;    // server groups (1)
  std::optional<int> group_size; // nodes in a group (1)
  std::optional<int> node_rank;  // this node's group within its role; -1: the
  // scheduler assigns it (`fserver env` says when
  // that is the default; else 0)
  std::optional<int> gpu;         // this node within its group, and its GPU (0)
  std::optional<int> rank_offset; // added to rank and instance (0)
  std::optional<int> instance;    // the rail (gpu + rank_offset)
  std::string host;               // address of this host for the others
  std::string interface;          // network interface, in place of host
  std::optional<int> port;        // to listen on; 0: any free one
  std::string transport;          // how tensors travel ("auto")
  std::string progress;           // who moves data: "caller", "thread", "auto"
  std::string backend;            // where tensors are: "CPU" or "GPU"
  std::optional<bool> host_scheduler; // a server runs the scheduler, too
  std::string cluster;     // id of the cluster; nodes of another are refused
  std::string secret;      // which all nodes of the cluster know
  std::optional<bool> tls; // encrypt what travels over TCP (off)
  std::optional<double> init_timeout; // seconds to complete the cluster (60)
  std::string on_peer_lost; // what calls do: "raise" (default) or "wait"
  std::optional<double> rejoin_timeout; // seconds of "wait" (60)
  // Others, by their names in the environment; the fields above come before them.
  std::map<std::string, std::string> settings;
  // Whether the settings in the environment count.
  bool environment = true;
  // Whether the constructor waits until the cluster is complete. false: call connect().
  bool connect = true;
};

namespace detail {

// Settings by name, and the list of lines that fs_open takes.
class Settings {
public:
  explicit Settings(const Options &o) {
    if (o.environment) {
      inherit();
      give_way(o);
    }
    for (const auto &[name, value] : o.settings)
      all_[name] = value;
    add_members(o);
    add_ways(o);
    if (!o.scheduler.empty())
      add_scheduler(o.scheduler);
  }

  void set(const std::string &name, std::string value) {
    all_[name] = std::move(value);
  }
  // The value, which is then gone.
  std::string take(const std::string &name) {
    const auto it = all_.find(name);
    if (it == all_.end())
      return "";
    std::string value = std::move(it->second);
    all_.erase(it);
    return value;
  }

  int open(fs_node *out) const {
    std::vector<std::string> lines;
    lines.reserve(all_.size());
    for (const auto &[name, value] : all_)
      lines.push_back(name + "=" + value);
    std::vector<const char *> list;
    list.reserve(lines.size());
    for (const std::string &line : lines)
      list.push_back(line.c_str());
    return fs_open(list.data(), list.size(), out);
  }

  // "host:port" of an address.
  void add_scheduler(const std::string &address) {
    const std::size_t colon = address.rfind(':');
    std::string host = address.substr(0, colon);
    std::string port =
        colon == std::string::npos ? "" : address.substr(colon + 1);
    bool good = !host.empty() && !port.empty();
    for (char c : port)
      good = good && std::isdigit(static_cast<unsigned char>(c));
    if (host.size() > 2 && host.front() == '[' && host.back() == ']')
      host = host.substr(1, host.size() - 2);
    else if (host.find(':') != std::string::npos)
      good = false;
    if (!good)
      throw ConfigError("scheduler is \"" + address +
                        "\", want \"host:port\", with an IPv6 address "
                        "\"[::1]:7000\"");
    set("DMLC_PS_ROOT_URI", host);
    set("DMLC_PS_ROOT_PORT", port);
  }

private:
  // The settings in the environment, and the names of all else, without values, so that the engine
  // sees misspelt ones.
  void inherit() {
    static const char *const prefixes[] = {"DMLC_",   "STEPMESH_", "STEPAF_",
                                           "BYTEPS_", "PS_",       "FSERVER_"};
    for (char **e = environ; e && *e; e++) {
      const char *equal = std::strchr(*e, '=');
      if (!equal)
        continue;
      const std::string name(*e, static_cast<std::size_t>(equal - *e));
      bool ours = name == "CUDA_VISIBLE_DEVICES";
      for (const char *prefix : prefixes)
        ours = ours || name.compare(0, std::strlen(prefix), prefix) == 0;
      if (name != "FSERVER_ARCHIVE") // which is for the build
        set(name, ours ? equal + 1 : "");
    }
    if (const auto it = all_.find("CUDA_VISIBLE_DEVICES");
        it != all_.end() && it->second.empty())
      all_.erase(it);
  }
  // Takes out what would leave a given option without effect.
  void give_way(const Options &o) {
    const auto given = [&](const std::string &member, const char *name) {
      const auto it = o.settings.find(name);
      return member.empty() && it != o.settings.end() ? it->second : member;
    };
    const std::string host = given(o.host, "DMLC_NODE_HOST"),
                      interface = given(o.interface, "DMLC_INTERFACE");
    if (!host.empty())
      all_.erase("DMLC_INTERFACE");
    if (!interface.empty())
      all_.erase("DMLC_NODE_HOST");
    for (const std::string &at :
         {host, interface, given(o.scheduler, "DMLC_PS_ROOT_URI")})
      if (!at.empty() && at != "lo" && at.rfind("127.", 0) != 0 &&
          at.rfind("[::1]", 0) != 0 && at.rfind("::1", 0) != 0 &&
          at.rfind("localhost", 0) != 0)
        all_.erase("DMLC_LOCAL");
  }
  void add(const char *name, const std::string &value) {
    if (!value.empty())
      set(name, value);
  }
  template <class T> void add(const char *name, const std::optional<T> &value) {
    if (value)
      set(name, text(*value));
  }
  static std::string text(bool v) { return v ? "1" : "0"; }
  static std::string text(int v) { return std::to_string(v); }
  static std::string text(double v) { return text_of(v); }

  // Who the node and the others are.
  void add_members(const Options &o) {
    add("DMLC_NUM_WORKER", o.workers);
    add("DMLC_NUM_SERVER", o.servers);
    add("DMLC_GROUP_SIZE", o.group_size);
    add("DMLC_NODE_RANK", o.node_rank);
    add("STEPMESH_GPU", o.gpu);
    add("DMLC_RANK_OFFSET", o.rank_offset);
    add("DMLC_INSTANCE_ID", o.instance);
    add("FSERVER_CLUSTER", o.cluster);
    add("FSERVER_SECRET", o.secret);
    add("FSERVER_HOST_SCHEDULER", o.host_scheduler);
    add("FSERVER_INIT_TIMEOUT", o.init_timeout);
    add("FSERVER_ON_PEER_LOST", o.on_peer_lost);
    add("FSERVER_REJOIN_TIMEOUT", o.rejoin_timeout);
  }
  // How bytes travel.
  void add_ways(const Options &o) {
    add("DMLC_NODE_HOST", o.host);
    add("DMLC_INTERFACE", o.interface);
    add("DMLC_PORT", o.port);
    add("FSERVER_TRANSPORT", o.transport);
    add("FSERVER_PROGRESS", o.progress);
    add("STEPMESH_BACKEND", o.backend);
    add("FSERVER_TLS", o.tls);
  }

  std::map<std::string, std::string> all_;
};

} // namespace detail
} // namespace fserver
