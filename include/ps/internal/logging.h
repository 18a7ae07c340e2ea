// PS_LOG, LL, PS_CHECK and PS_VLOG.
#pragma once

#include "ps/internal/log.h"
#include "ps/internal/utils.h"

// Writes a line if the setting PS_VERBOSE is at least `level`.
#define PS_VLOG(level) FSERVER_LOG_IF(::ps::detail::verbose() >= (level), INFO)
#define PS_LOG(severity) FSERVER_LOG_##severity.stream()
#ifndef LL
#define LL PS_LOG(ERROR)
#endif
#define PS_CHECK(condition) FSERVER_CHECK(condition)
#define PS_CHECK_EQ(a, b) FSERVER_CHECK_OP(Eq, a, ==, b)
#define PS_CHECK_NE(a, b) FSERVER_CHECK_OP(Ne, a, !=, b)
#define PS_CHECK_LT(a, b) FSERVER_CHECK_OP(Lt, a, <, b)
#define PS_CHECK_LE(a, b) FSERVER_CHECK_OP(Le, a, <=, b)
#define PS_CHECK_GT(a, b) FSERVER_CHECK_OP(Gt, a, >, b)
#define PS_CHECK_GE(a, b) FSERVER_CHECK_OP(Ge, a, >=, b)
#define PS_CHECK_NOTNULL(p) FSERVER_CHECK_NOTNULL(p)

namespace ps::detail {

// PS_VERBOSE as it was at the first call.
inline int verbose() {
  static const int level = GetEnv("PS_VERBOSE", 0);
  return level;
}

} // namespace ps::detail
