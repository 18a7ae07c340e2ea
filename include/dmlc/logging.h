// CHECK and LOG, for programs that were written for ps-lite. What another header has defined stays.
//
// LOG(INFO) << "text" writes a line to the standard error. A CHECK that fails, and LOG(FATAL), write one and
// end the process: they are the program's own. fserver throws instead, see fserver/error.hpp.
#pragma once

#include <ctime>

#include <cstdio>
#include <cstdlib>
#include <iostream> // programs count on it
#include <sstream>
#include <string>

namespace dmlc {

// Programs may call it first. Nothing needs it.
inline void InitLogging(const char *) {}

// One line of the log, which is written, in one piece, by the destructor.
class LogMessage {
public:
  LogMessage(const char *level, const char *file, int line) {
    const std::time_t now = std::time(nullptr);
    std::tm local{};
    localtime_r(&now, &local);
    char at[16];
    std::strftime(at, sizeof at, "%H:%M:%S", &local);
    stream_ << "[" << at << "] " << level << " " << file << ":" << line << ": ";
  }
  LogMessage(const LogMessage &) = delete;
  LogMessage &operator=(const LogMessage &) = delete;
  ~LogMessage() {
    stream_ << "\n";
    const std::string text = stream_.str();
    std::fwrite(text.data(), 1, text.size(), stderr);
  }
  std::ostream &stream() { return stream_; }

private:
  std::ostringstream stream_;
};

// The last line of a process.
class LogMessageFatal {
public:
  LogMessageFatal(const char *file, int line) {
    message_ = new LogMessage("FATAL", file, line);
  }
  LogMessageFatal(const LogMessageFatal &) = delete;
  LogMessageFatal &operator=(const LogMessageFatal &) = delete;
  [[noreturn]] ~LogMessageFatal() {
    delete message_;
    std::abort();
  }
  std::ostream &stream() { return message_->stream(); }

private:
  LogMessage *message_;
};

namespace detail {

// Makes an expression with << one of type void, for the conditional operator.
struct Nothing {
  void operator&(std::ostream &) {}
};

template <class A, class B> std::string both(const A &a, const B &b) {
  std::ostringstream s;
  s << " (" << a << " and " << b << ") ";
  return s.str();
}

template <class T>
T not_null(const char *file, int line, const char *what, T &&p) {
  if (p == nullptr)
    LogMessageFatal(file, line).stream()
        << "check failed: " << what << " is null";
  return static_cast<T &&>(p);
}

} // namespace detail
} // namespace dmlc

#define FSERVER_LOG_INFO ::dmlc::LogMessage("INFO", __FILE__, __LINE__)
#define FSERVER_LOG_WARNING ::dmlc::LogMessage("WARNING", __FILE__, __LINE__)
#define FSERVER_LOG_ERROR ::dmlc::LogMessage("ERROR", __FILE__, __LINE__)
#define FSERVER_LOG_FATAL ::dmlc::LogMessageFatal(__FILE__, __LINE__)
#define FSERVER_LOG_DEBUG FSERVER_LOG_INFO
#define FSERVER_LOG_IF(condition, severity)                                    \
  !(condition) ? (void)0                                                       \
               : ::dmlc::detail::Nothing() & FSERVER_LOG_##severity.stream()
#define FSERVER_CHECK(condition)                                               \
  FSERVER_LOG_IF(!(condition), FATAL) << "check failed: " #condition " "
// Compares values, and says which they were.
#define FSERVER_CHECK_OP(a, op, b)                                             \
  FSERVER_LOG_IF(!((a)op(b)), FATAL)                                           \
      << "check failed: " #a " " #op " " #b << ::dmlc::detail::both((a), (b))
#define FSERVER_CHECK_NOTNULL(p)                                               \
  ::dmlc::detail::not_null(__FILE__, __LINE__, #p, p)

#ifndef LOG
#define LOG(severity) FSERVER_LOG_##severity.stream()
#define LOG_IF(severity, condition) FSERVER_LOG_IF(condition, severity)
#endif
#ifndef CHECK
#define CHECK(condition) FSERVER_CHECK(condition)
#define CHECK_EQ(a, b) FSERVER_CHECK_OP(a, ==, b)
#define CHECK_NE(a, b) FSERVER_CHECK_OP(a, !=, b)
#define CHECK_LT(a, b) FSERVER_CHECK_OP(a, <, b)
#define CHECK_LE(a, b) FSERVER_CHECK_OP(a, <=, b)
#define CHECK_GT(a, b) FSERVER_CHECK_OP(a, >, b)
#define CHECK_GE(a, b) FSERVER_CHECK_OP(a, >=, b)
#define CHECK_NOTNULL(p) FSERVER_CHECK_NOTNULL(p)
#endif
#ifndef DCHECK
#ifdef NDEBUG
// Compiled, and never evaluated.
#define DCHECK(condition) FSERVER_CHECK(true || (condition))
#else
#define DCHECK(condition) FSERVER_CHECK(condition)
#endif
#define DCHECK_EQ(a, b) DCHECK((a) == (b))
#define DCHECK_NE(a, b) DCHECK((a) != (b))
#define DCHECK_LT(a, b) DCHECK((a) < (b))
#define DCHECK_LE(a, b) DCHECK((a) <= (b))
#define DCHECK_GT(a, b) DCHECK((a) > (b))
#define DCHECK_GE(a, b) DCHECK((a) >= (b))
#endif
