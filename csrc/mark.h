// How far the streams of a GPU are, for who enqueues on them from Python.
#pragma once

#include <Python.h>

#include "driver.h"
#include "keeper.h"

namespace fserver {

// For a second thread, with the name of its call.
constexpr char kOneThread[] = "%s: another thread is in a call of this channel "
                              "(open a channel for each thread, or make one "
                              "call at a time)";

// What is enqueued on a stream.
class Mark {
public:
  explicit Mark(int device) : device_(device) { open_driver("channel"); }
  ~Mark();
  Mark(const Mark &) = delete;
  Mark &operator=(const Mark &) = delete;

  // A thread enqueues what the mark will be behind, as long as this lives. With the GIL.
  // Refuses a second thread: call names what it calls.
  class Use {
  public:
    Use(Mark &mark, const char *call);
    ~Use() { mark_.busy_ = false; }
    Use(const Use &) = delete;
    Use &operator=(const Use &) = delete;

  private:
    Mark &mark_;
  };

  // Whether the stream has passed the mark, and no thread uses it; true if there has been none.
  // It is called with the GIL, and calls the driver without: torch's own events keep all other
  // threads from running where the driver waits for the GPU.
  bool passed();

  // Whether there are graphs that what uses the mark was captured into.
  bool in_graphs() const { return graphs_.any(); }

  // Without the GIL, on its GPU:
  // Whether a stream is being captured, into a graph that counts from now on.
  bool captured(cs_stream s) { return graphs_.note(s); }
  // Whether the mark is on another stream, which has not passed it.
  bool elsewhere(cs_stream s) const;
  // Puts the mark behind all that is on a stream now.
  cs_result record(cs_stream s);

private:
  const int device_;
  cs_event event_ = nullptr;
  cs_stream stream_ = nullptr;
  bool used_ = false;
  Graphs graphs_;
  // Guarded by the GIL:
  bool busy_ = false;
  uint64_t uses_ = 0;
};

// Whether the driver refuses a call because a stream is being captured.
inline bool for_a_capture(cs_result rc) {
  return rc >= CS_CU_STREAM_CAPTURE_UNSUPPORTED &&
         rc <= CS_CU_STREAM_CAPTURE_WRONG_THREAD;
}

// Waits for all that a GPU has to do. A capture in another thread becomes invalid, as the
// driver allows that in no mode, and is waited for, up to 30 s. If this thread's current
// stream is captured, that is an error at once. Without the GIL, in the GPU's context, with
// Relaxed.
cs_result finish_gpu(int device);

// The same with the GIL, in any context. It raises.
void synchronize(int device);

// Waits for what is on the current and on the default stream of a GPU, of which the
// current one is not captured. A capture in another thread stays valid.
void settle(int device);

} // namespace fserver
