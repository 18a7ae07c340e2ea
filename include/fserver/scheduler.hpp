// Scheduler: the node that introduces workers and servers to each other.
#pragma once

#include <string>
#include <utility>

#include "fserver/node.hpp"

namespace fserver {

// It carries no tensors. Its process waits in stop() until all other nodes stop.
class Scheduler : public Node {
public:
  // Throws ConfigError if a setting is wrong, and TimeoutError as connect().
  explicit Scheduler(const Options &options = {})
      : Scheduler(detail::Settings(options)) {
    if (options.connect)
      connect();
  }

  // The "host:port" for the other nodes, also if the port was 0.
  std::string scheduler() const { return address(); }

private:
  friend class Server;
  explicit Scheduler(detail::Settings settings)
      : Node("scheduler", std::move(settings)) {}
};

} // namespace fserver
