// Keys, and the groups of nodes.
#pragma once

#include <cstdint>
#include <limits>

#include "ps/internal/utils.h"

namespace ps {

using Key = std::uint64_t;
static const Key kMaxKey = std::numeric_limits<Key>::max();

// Groups of nodes. Add them for several: kServerGroup + kWorkerGroup.
static const int kScheduler = 1;
static const int kServerGroup = 2;
static const int kWorkerGroup = 4;

} // namespace ps
