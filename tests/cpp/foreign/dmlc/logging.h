// Stands for dmlc-core's file of this name: its guard, and the names that it has in common with ours.
#ifndef DMLC_LOGGING_H_
#define DMLC_LOGGING_H_

#include <iostream>
#include <stdexcept>

namespace dmlc {

inline void InitLogging(const char *) {}
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
class LogMessage {
public:
  std::ostream &stream() { return std::cerr; }
};
using LogMessageFatal = LogMessage;

} // namespace dmlc

#define LOG(severity) ::dmlc::LogMessage().stream()
#define CHECK(condition)                                                       \
  if (!(condition))                                                            \
  LOG(FATAL)
#define CHECK_EQ(a, b) CHECK((a) == (b))

#endif // DMLC_LOGGING_H_
