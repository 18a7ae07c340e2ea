// CHECK and LOG, as programs of ps-lite use them. They are the program's: a CHECK that fails, and
// LOG(FATAL), end the process with SIGABRT after a line on standard error. Nothing in include/ uses
// them: what fails there throws.
#pragma once

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

namespace dmlc {

// A line that is written when it ends.
class LogLine {
public:
  LogLine(const char *level, const char *file, int line, bool fatal = false)
      : fatal_(fatal) {
    const std::string path = file;
    text_ << level << ' ' << path.substr(path.rfind('/') + 1) << ':' << line
          << ": ";
  }
  LogLine(const LogLine &) = delete;
  LogLine &operator=(const LogLine &) = delete;
  ~LogLine() {
    text_ << '\n';
    std::cerr << text_.str() << std::flush;
    if (fatal_)
      std::abort();
  }
  std::ostream &stream() { return text_; }

private:
  std::ostringstream text_;
  bool fatal_;
};

// What `<<` gives, as void, so that both sides of ?: have one type.
struct Voidify {
  void operator&(std::ostream &) {}
};

// "(1 vs. 2) " of two values that a CHECK has compared.
template <class A, class B> std::string both(const A &a, const B &b) {
  std::ostringstream text;
  text << '(' << a << " vs. " << b << ") ";
  return text.str();
}

template <class T>
T *check_not_null(T *p, const char *what, const char *file, int line) {
  if (!p)
    LogLine("FATAL", file, line, true).stream() << what << " is null";
  return p;
}

// Whether messages of a level are wanted: PS_VERBOSE is that or more.
inline bool verbose(int level) {
  static const int wanted = [] {
    const char *text = std::getenv("PS_VERBOSE");
    return text ? std::atoi(text) : 0;
  }();
  return level <= wanted;
}

} // namespace dmlc

#define DMLC_LOG_INFO ::dmlc::LogLine("INFO", __FILE__, __LINE__)
#define DMLC_LOG_WARNING ::dmlc::LogLine("WARNING", __FILE__, __LINE__)
#define DMLC_LOG_ERROR ::dmlc::LogLine("ERROR", __FILE__, __LINE__)
#define DMLC_LOG_FATAL ::dmlc::LogLine("FATAL", __FILE__, __LINE__, true)
#define DMLC_WHEN(condition, line)                                             \
  !(condition) ? (void)0 : ::dmlc::Voidify() & line.stream()

#define LOG(level) DMLC_LOG_##level.stream()
#define LOG_IF(level, condition) DMLC_WHEN(condition, DMLC_LOG_##level)
#define CHECK(x) DMLC_WHEN(!(x), DMLC_LOG_FATAL) << "Check failed: " #x " "
#define DMLC_CHECK_OP(op, x, y)                                                \
  DMLC_WHEN(!((x)op(y)), DMLC_LOG_FATAL)                                       \
      << "Check failed: " #x " " #op " " #y " " << ::dmlc::both(x, y)
#define CHECK_EQ(x, y) DMLC_CHECK_OP(==, x, y)
#define CHECK_NE(x, y) DMLC_CHECK_OP(!=, x, y)
#define CHECK_LT(x, y) DMLC_CHECK_OP(<, x, y)
#define CHECK_LE(x, y) DMLC_CHECK_OP(<=, x, y)
#define CHECK_GT(x, y) DMLC_CHECK_OP(>, x, y)
#define CHECK_GE(x, y) DMLC_CHECK_OP(>=, x, y)
#define CHECK_NOTNULL(x) ::dmlc::check_not_null((x), #x, __FILE__, __LINE__)

// The names of StepMesh.
#define PS_LOG(level) LOG(level)
#define PS_VLOG(level) DMLC_WHEN(::dmlc::verbose(level), DMLC_LOG_INFO)
#define PS_CHECK(x) CHECK(x)
#define PS_CHECK_EQ(x, y) CHECK_EQ(x, y)
#define PS_CHECK_NE(x, y) CHECK_NE(x, y)
#define PS_CHECK_LT(x, y) CHECK_LT(x, y)
#define PS_CHECK_LE(x, y) CHECK_LE(x, y)
#define PS_CHECK_GT(x, y) CHECK_GT(x, y)
#define PS_CHECK_GE(x, y) CHECK_GE(x, y)
#define PS_CHECK_NOTNULL(x) CHECK_NOTNULL(x)
