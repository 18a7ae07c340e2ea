// Calls of the CUDA driver, which are made without the GIL: see unlocked() in process.h.
#pragma once

#include "../cshim/cuda/cs_cuda.h"

namespace fserver {

// Opens the driver, or raises, naming a call, that there is none.
void open_driver(const char *call);

// Makes the primary context of a GPU current in a thread that has none yet, if the driver
// is open. torch holds that context wherever there are tensors or streams of the GPU.
void enter_gpu(int device);

// While any thread captures a graph in the mode that is torch's own, others must
// not make calls that might disturb that (allocations, queries and waits), unless they say
// that they know what they do: none of ours touches a stream that is captured.
// It does nothing while the driver is not open.
struct Relaxed {
  Relaxed() { exchange(); }
  ~Relaxed() { exchange(); }
  Relaxed(const Relaxed &) = delete;
  Relaxed &operator=(const Relaxed &) = delete;

private:
  void exchange() {
    if (cs_cu.ThreadExchangeStreamCaptureMode)
      cs_cu.ThreadExchangeStreamCaptureMode(&mode_);
  }
  int mode_ = CS_CAPTURE_MODE_RELAXED;
};

// Several calls, one after the other: the first that failed is raised when the GIL is
// held again.
class Tried {
public:
  // Whether all so far have succeeded.
  bool ok(const char *what, cs_result rc) {
    if (rc_ == CS_CU_SUCCESS) {
      what_ = what;
      rc_ = rc;
    }
    return rc_ == CS_CU_SUCCESS;
  }
  bool good() const { return rc_ == CS_CU_SUCCESS; }
  const char *what() const { return what_; } // it was to do
  cs_result rc() const { return rc_; }

private:
  const char *what_ = "";
  cs_result rc_ = CS_CU_SUCCESS;
};

inline bool capturing(cs_stream s) {
  int state = CS_CAPTURE_NONE;
  cs_cu.StreamIsCapturing(s, &state);
  return state != CS_CAPTURE_NONE;
}

} // namespace fserver
