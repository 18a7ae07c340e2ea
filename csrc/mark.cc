#include "mark.h"

#include <chrono>
#include <thread>

#include "error.h"
#include "process.h"
#include "tensor.h"

namespace fserver {
namespace {

// How long finish_gpu waits for the capture of another thread to end, in nanoseconds.
constexpr int64_t kCapture = 30'000'000'000;

[[noreturn]] void fail(const char *what, cs_result rc) {
  char text[160];
  cs_cuda_text(rc, text, sizeof text);
  raise(Kind::kError, "channel: %s: %s", what, text);
}

} // namespace

Mark::~Mark() {
  if (event_ && !forked.load() && !exiting.load())
    unlocked([&] {
      const Relaxed relaxed;
      return cs_cu.EventDestroy(event_);
    });
}

bool Mark::elsewhere(cs_stream s) const {
  return used_ && s != stream_ && cs_cu.EventQuery(event_) == CS_CU_NOT_READY;
}

cs_result Mark::record(cs_stream s) {
  cs_result rc = event_ ? CS_CU_SUCCESS
                        : cs_cu.EventCreate(&event_, CS_EVENT_DISABLE_TIMING);
  if (rc == CS_CU_SUCCESS)
    rc = cs_cu.EventRecord(event_, s);
  if (rc == CS_CU_SUCCESS) {
    stream_ = s;
    used_ = true;
  }
  return rc;
}

Mark::Use::Use(Mark &mark, const char *call) : mark_(mark) {
  if (mark.busy_)
    raise(Kind::kConfig, kOneThread, call);
  mark.busy_ = true;
  mark.uses_++;
}

bool Mark::passed() {
  if (busy_ || !used_)
    return !busy_;
  const uint64_t uses = uses_;
  const cs_result rc = unlocked([&] {
    const OnDevice guard(device_);
    const Relaxed relaxed;
    return cs_cu.EventQuery(event_);
  });
  return uses == uses_ && rc != CS_CU_NOT_READY;
}

cs_result finish_gpu(int device) {
  if (capturing(static_cast<cs_stream>(native_stream(device))))
    return CS_CU_STREAM_CAPTURE_UNSUPPORTED;
  for (const int64_t end = now_ns() + kCapture;;) {
    const cs_result rc = cs_cu.CtxSynchronize();
    if (!for_a_capture(rc) || exiting.load() || now_ns() > end)
      return rc;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void synchronize(int device) {
  const cs_result rc = unlocked([&] {
    const OnDevice guard(device);
    const Relaxed relaxed;
    return finish_gpu(device);
  });
  if (rc != CS_CU_SUCCESS)
    fail("wait for the GPU", rc);
}

void settle(int device) {
  const cs_result rc = unlocked([&] {
    const OnDevice guard(device);
    const Relaxed relaxed;
    const cs_result rc =
        cs_cu.StreamSynchronize(static_cast<cs_stream>(native_stream(device)));
    return rc == CS_CU_SUCCESS ? cs_cu.StreamSynchronize(nullptr) : rc;
  });
  if (rc != CS_CU_SUCCESS)
    fail("wait for the current and the default stream", rc);
}

} // namespace fserver
