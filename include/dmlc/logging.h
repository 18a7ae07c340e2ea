// CHECK and LOG, for programs that were written for ps-lite. What another header has defined stays.
//
// LOG(INFO) << "text" writes a line to the standard error. A CHECK that fails, and LOG(FATAL), write one and
// end the process: they are the program's own. fserver throws instead, see fserver/error.hpp.
#ifndef DMLC_LOGGING_H_ // as in dmlc-core's, so that a program has one of them
#define DMLC_LOGGING_H_

#include <iostream> // programs count on it
#include <stdexcept>
#include <string>

#include "ps/internal/log.h"

namespace dmlc {

// Programs may call it first. Nothing needs it.
inline void InitLogging(const char *) {}

// What headers of dmlc-core throw.
struct Error : std::runtime_error {
  explicit Error(const std::string &text) : std::runtime_error(text) {}
};

} // namespace dmlc

#ifndef LOG
#define LOG(severity) FSERVER_LOG_##severity.stream()
#endif
#ifndef LOG_IF
#define LOG_IF(severity, condition) FSERVER_LOG_IF(condition, severity)
#endif
#ifndef CHECK
#define CHECK(condition) FSERVER_CHECK(condition)
#endif
#ifndef CHECK_EQ
#define CHECK_EQ(a, b) FSERVER_CHECK_OP(Eq, a, ==, b)
#endif
#ifndef CHECK_NE
#define CHECK_NE(a, b) FSERVER_CHECK_OP(Ne, a, !=, b)
#endif
#ifndef CHECK_LT
#define CHECK_LT(a, b) FSERVER_CHECK_OP(Lt, a, <, b)
#endif
#ifndef CHECK_LE
#define CHECK_LE(a, b) FSERVER_CHECK_OP(Le, a, <=, b)
#endif
#ifndef CHECK_GT
#define CHECK_GT(a, b) FSERVER_CHECK_OP(Gt, a, >, b)
#endif
#ifndef CHECK_GE
#define CHECK_GE(a, b) FSERVER_CHECK_OP(Ge, a, >=, b)
#endif
#ifndef CHECK_NOTNULL
#define CHECK_NOTNULL(p) FSERVER_CHECK_NOTNULL(p)
#endif
#ifndef DCHECK
#ifdef NDEBUG
// Compiled, and never evaluated.
#define DCHECK(condition) FSERVER_CHECK(true || (condition))
#else
#define DCHECK(condition) FSERVER_CHECK(condition)
#endif
#endif
#ifndef DCHECK_EQ
#define DCHECK_EQ(a, b) DCHECK((a) == (b))
#endif
#ifndef DCHECK_NE
#define DCHECK_NE(a, b) DCHECK((a) != (b))
#endif
#ifndef DCHECK_LT
#define DCHECK_LT(a, b) DCHECK((a) < (b))
#endif
#ifndef DCHECK_LE
#define DCHECK_LE(a, b) DCHECK((a) <= (b))
#endif
#ifndef DCHECK_GT
#define DCHECK_GT(a, b) DCHECK((a) > (b))
#endif
#ifndef DCHECK_GE
#define DCHECK_GE(a, b) DCHECK((a) >= (b))
#endif

#endif // DMLC_LOGGING_H_
