// How far the streams of a GPU are, for who enqueues on them from Python.
#pragma once

#include <Python.h>

#include "driver.h"

namespace fserver {

// What is enqueued on a stream. All methods are called with the GIL, and call the driver
// without: torch's own events keep all other threads from running where the driver waits
// for the GPU.
class Mark {
public:
  explicit Mark(int device) : device_(device) { open_driver("channel"); }
  ~Mark();
  Mark(const Mark &) = delete;
  Mark &operator=(const Mark &) = delete;

  // Whether the current stream of the GPU is being captured into a graph.
  bool capturing();
  // Whether the mark is on another stream than that, which has not passed it.
  bool elsewhere();
  // Puts the mark behind all that is on the current stream now.
  void record();
  // Whether the stream has passed the mark; true if there has been none.
  bool passed();

private:
  cs_result query() const; // without the GIL

  const int device_;
  cs_event event_ = nullptr;
  cs_stream stream_ = nullptr;
  bool used_ = false;
};

// Waits for all that a GPU has to do. A capture in another thread becomes invalid: the
// driver allows that in no mode.
void synchronize(int device);

// Waits for what is on the current and on the default stream of a GPU, of which the
// current one is not captured. A capture in another thread stays valid.
void settle(int device);

} // namespace fserver
