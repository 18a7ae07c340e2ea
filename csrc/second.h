// Words of a GPU, written whatever keeps the primary context.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "../cshim/cuda/cs_cuda.h"

namespace fserver {

// A second context of a GPU. Its stream is behind none of the primary one's, and what a
// thread has the driver do for that one does not keep it (docs/adr/0020). It takes as much
// memory as the first, 540 MiB of an H200, so it is made when words are written, and ends
// when nobody holds the GPU any more (fs_gpu_hold): to end it waits for all of the GPU.
class SecondContext {
public:
  // The one of the process for a GPU, also before there is a context.
  static SecondContext &of(int device, cs_device handle);
  SecondContext(const SecondContext &) = delete;
  SecondContext &operator=(const SecondContext &) = delete;

  // Makes words of the GPU 1. False: they may not be, most often since there is no memory for the
  // context, for which it tries once a second, or since another thread is at it. For who holds the GPU, without the GIL, in
  // threads in which a capture elsewhere forbids nothing (CS_CAPTURE_MODE_RELAXED).
  bool write(const std::vector<uint64_t> &words);

  // Whether that has failed, or has not come back, for 3 s, for whoever tried.
  bool in_vain();

  // For who has had it write, and still holds the GPU: that it ends is left to the engine.
  void give_back();

private:
  SecondContext(int device, cs_device handle)
      : device_(device), handle_(handle) {}
  cs_result open(); // leaves the context current
  cs_result enqueue(const std::vector<uint64_t> &words);

  std::mutex mutex_; // no call of the driver is made under it
  const int device_;
  const cs_device handle_;
  cs_context context_ = nullptr; // the engine makes it null, when nobody holds
  cs_stream stream_ = nullptr;   // of it
  bool given_ = false;           // to the engine
  int64_t busy_ = 0; // since when a thread writes, in nanoseconds, or 0
  // When it failed, in nanoseconds: last, or 0, and first of those tries in a row.
  int64_t failed_ = 0, failing_ = 0;
};

} // namespace fserver
