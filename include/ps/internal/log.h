// The log, and checks. For the other headers alone: a program may have another dmlc/logging.h than ours.
#pragma once

#include <ctime>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

namespace ps::detail {

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

// Makes an expression with << one of type void, for the conditional operator.
struct Nothing {
  void operator&(std::ostream &) {}
};

// Literals are signed, which a program does not choose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-compare"
#define FSERVER_COMPARES(Name, op)                                             \
  struct Name {                                                                \
    template <class A, class B> static bool holds(const A &a, const B &b) {    \
      if constexpr (std::is_pointer_v<A> && std::is_integral_v<B>)             \
        return reinterpret_cast<std::uintptr_t>(a)                             \
            op static_cast<std::uintptr_t>(b); /* NULL */                      \
      else                                                                     \
        return static_cast<bool>(a op b);                                      \
    }                                                                          \
  }
FSERVER_COMPARES(Eq, ==);
FSERVER_COMPARES(Ne, !=);
FSERVER_COMPARES(Lt, <);
FSERVER_COMPARES(Le, <=);
FSERVER_COMPARES(Gt, >);
FSERVER_COMPARES(Ge, >=);
#undef FSERVER_COMPARES
#pragma GCC diagnostic pop

// Whether a stream takes a T.
template <class T, class = void> struct Shown : std::false_type {};
template <class T>
struct Shown<T, std::void_t<decltype(std::declval<std::ostream &>()
                                     << std::declval<const T &>())>>
    : std::true_type {};
template <class T> void show(std::ostream &s, const T &value) {
  if constexpr (Shown<T>::value)
    s << value;
  else
    s << "a value that has no <<";
}

// Returns a text with two values if they do not compare so, else null.
template <class Compares, class A, class B>
std::unique_ptr<std::string> unlike(const A &a, const B &b) {
  if (Compares::holds(a, b))
    return nullptr;
  std::ostringstream s;
  s << " (";
  show(s, a);
  s << " and ";
  show(s, b);
  s << ") ";
  return std::make_unique<std::string>(s.str());
}

template <class T>
T not_null(const char *file, int line, const char *what, T &&p) {
  if (p == nullptr)
    LogMessageFatal(file, line).stream()
        << "check failed: " << what << " is null";
  return static_cast<T &&>(p);
}

} // namespace ps::detail

#define FSERVER_LOG_INFO ::ps::detail::LogMessage("INFO", __FILE__, __LINE__)
#define FSERVER_LOG_WARNING                                                    \
  ::ps::detail::LogMessage("WARNING", __FILE__, __LINE__)
#define FSERVER_LOG_ERROR ::ps::detail::LogMessage("ERROR", __FILE__, __LINE__)
#define FSERVER_LOG_FATAL ::ps::detail::LogMessageFatal(__FILE__, __LINE__)
#define FSERVER_LOG_DEBUG FSERVER_LOG_INFO
#define FSERVER_LOG_TRACE FSERVER_LOG_INFO
#define FSERVER_LOG_ALL FSERVER_LOG_INFO
#define FSERVER_LOG_IF(condition, severity)                                    \
  !(condition) ? (void)0                                                       \
               : ::ps::detail::Nothing() & FSERVER_LOG_##severity.stream()
#define FSERVER_CHECK(condition)                                               \
  FSERVER_LOG_IF(!(condition), FATAL) << "check failed: " #condition " "
// Compares two values, which it evaluates once, and prints them. It is a loop, whose first round ends the process: an "else"
// of the program cannot belong to it.
#define FSERVER_CHECK_OP(Name, a, op, b)                                       \
  while (const auto fserver_unlike =                                           \
             ::ps::detail::unlike<::ps::detail::Name>((a), (b)))               \
  FSERVER_LOG_FATAL.stream()                                                   \
      << "check failed: " #a " " #op " " #b << *fserver_unlike
#define FSERVER_CHECK_NOTNULL(p)                                               \
  ::ps::detail::not_null(__FILE__, __LINE__, #p, p)
