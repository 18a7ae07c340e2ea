// Van: what programs ask about this node.
#pragma once

#include "ps/internal/message.h"

namespace ps {

class Van {
public:
  const Node &my_node() const { return node_; }
  // Whether the node is connected.
  bool IsReady() const { return ready_; }

private:
  friend class Postoffice;
  Node node_;
  bool ready_ = false;
};

} // namespace ps
