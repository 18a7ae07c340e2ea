// Trace: four time stamps of a request, or of an answer.
#pragma once

#include <cstdint>

namespace ps {

// Nanoseconds; those of the receiver are by its own clock.
struct Trace {
  std::uint64_t start = 0;    // the call began
  std::uint64_t postsend = 0; // it was sent
  std::uint64_t postrecv = 0; // the other side received it
  std::uint64_t process = 0;  // the other side's application has it
};

} // namespace ps
