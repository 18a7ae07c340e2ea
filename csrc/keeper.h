// Memory that streams still use, beside any ticket of the engine's.
#pragma once

#include <array>

#include "driver.h"
#include "tensor.h"

namespace fserver {

// Keeps memory until a stream has passed what is enqueued on it now. Of a stream that is
// being captured: as long as the graph, and all that has been made of it. For calls without
// the GIL, in the context of the stream, after the call that uses the memory. What cannot be
// watched is kept for good. A thread lets go, so nothing of it may be fixed.
using Kept = std::array<Memory, 2>;
void keep(cs_stream s, Kept memory);

// Has the thread end, when the interpreter does. Without the GIL.
void end_keeper();

} // namespace fserver
