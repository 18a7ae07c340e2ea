// Node: who takes part. DeviceType: where memory is.
#pragma once

#include <string>

namespace ps {

enum DeviceType { UNK = 0, CPU = 1, GPU = 2 };

static const char *const DeviceTypeName[] = {"UNK", "CPU", "GPU"};

// A member of the cluster.
struct Node {
  enum Role { SERVER, WORKER, SCHEDULER, JOINT };
  static const int kEmpty = -1;

  Role role = SCHEDULER;
  int id = kEmpty; // see Postoffice::WorkerRankToID
  int customer_id = 0;
  std::string hostname; // where the others reach it
  int port = kEmpty;
  bool is_recovery = false; // it has the place of one that was lost
  int aux_id = kEmpty;      // the rank that StartPS was given
};

} // namespace ps
