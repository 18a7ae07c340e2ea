// Roles of nodes, and kinds of devices.
#pragma once

namespace ps {

enum DeviceType { UNK, CPU, GPU };

struct Node {
  // JOINT: a worker and a server in one process.
  enum Role { SERVER, WORKER, SCHEDULER, JOINT };
};

} // namespace ps
