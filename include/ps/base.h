// Keys, and the groups that a barrier names.
#pragma once

#include <cstdint>
#include <limits>

namespace ps {

using Key = std::uint64_t;
constexpr Key kMaxKey = std::numeric_limits<Key>::max();

// Groups of nodes; add them for unions.
constexpr int kScheduler = 1;
constexpr int kServerGroup = 2;
constexpr int kWorkerGroup = 4;

} // namespace ps
