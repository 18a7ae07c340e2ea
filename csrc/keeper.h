// Memory that streams still use, beside any ticket of the engine's.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "driver.h"
#include "tensor.h"

namespace fserver {

// Keeps memory until a stream has passed what is enqueued on it now. Of a stream that is
// being captured: as long as the graph, and all that has been made of it. For calls without
// the GIL, in the context of the stream, after the call that uses the memory. What cannot be
// watched is kept for good. A thread lets go, so nothing of it may be fixed.
using Kept = std::array<Memory, 2>;
void keep(cs_stream s, Kept memory);

// The graphs that use something: what streams were captured into, and all that has been made of that.
class Graphs {
public:
  // Whether s is being captured. Then its graph uses it from now on. Without the GIL.
  bool note(cs_stream s);
  // Whether there are any.
  bool any() const { return one_.use_count() > 1; }

private:
  using One = std::shared_ptr<char>; // each graph has a copy
  const One one_ = std::make_shared<char>();
  uint64_t newest_ = 0; // number of the newest capture
};

// Has the thread end, when the interpreter does. Without the GIL.
void end_keeper();

} // namespace fserver
