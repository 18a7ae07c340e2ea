#include "second.h"

#include <map>

#include "process.h"

namespace fserver {
namespace {

// Nobody has it made again before: nanoseconds.
constexpr int64_t kAgain = 1'000'000'000;

// About what it takes, for the limits of what is put off.
constexpr uint64_t kSize = 512 << 20;

} // namespace

std::shared_ptr<SecondContext> SecondContext::of(int device, cs_device handle) {
  static std::mutex lock;
  static auto &all = *new std::map<int, std::weak_ptr<SecondContext>>;
  const std::lock_guard<std::mutex> locked(lock);
  std::shared_ptr<SecondContext> one = all[device].lock();
  if (!one)
    all[device] = one = std::make_shared<SecondContext>(device, handle);
  return one;
}

SecondContext::~SecondContext() {
  // To end a context takes its streams along, and waits for all of the GPU.
  if (context_ && !forked.load())
    fs_gpu_free(device_, FS_GPU_CONTEXT, reinterpret_cast<uint64_t>(context_),
                kSize);
}

cs_result SecondContext::open() {
  cs_context made = context_;
  cs_result rc = made ? cs_cu.CtxSetCurrent(made)
                      : cs_cu.CtxCreate(&made, CS_CTX_BLOCKING_SYNC, handle_);
  if (rc != CS_CU_SUCCESS)
    return rc;
  context_ = made;
  return stream_ ? rc : cs_cu.StreamCreate(&stream_, CS_STREAM_NON_BLOCKING);
}

bool SecondContext::write(const std::vector<uint64_t> &words) {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (failed_ && now_ns() - failed_ < kAgain)
    return false;
  cs_context old = nullptr;
  cs_result rc = cs_cu.CtxGetCurrent(&old);
  if (rc == CS_CU_SUCCESS) {
    rc = open();
    for (const uint64_t word : words)
      if (rc == CS_CU_SUCCESS)
        rc = cs_cu.StreamWriteValue32(stream_, word, 1, CS_WRITE_DEFAULT);
    if (rc == CS_CU_SUCCESS)
      rc = cs_cu.StreamSynchronize(stream_);
    cs_cu.CtxSetCurrent(old);
  }
  failed_ = rc == CS_CU_SUCCESS ? 0 : now_ns();
  return failed_ == 0;
}

} // namespace fserver
