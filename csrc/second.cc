#include "second.h"

#include <map>

#include "process.h"

namespace fserver {
namespace {

// Nobody has it made again before, and it is not to be had after so long: nanoseconds.
constexpr int64_t kAgain = 1'000'000'000, kInVain = 3'000'000'000;

} // namespace

SecondContext &SecondContext::of(int device, cs_device handle) {
  static std::mutex lock;
  static auto &all = *new std::map<int, SecondContext *>; // also at exit
  const std::lock_guard<std::mutex> locked(lock);
  SecondContext *&one = all[device];
  if (!one)
    one = new SecondContext(device, handle);
  return *one;
}

cs_result SecondContext::open() {
  cs_context made = __atomic_load_n(&context_, __ATOMIC_ACQUIRE);
  if (!made) {
    const cs_result rc = cs_cu.CtxCreate(&made, CS_CTX_BLOCKING_SYNC, handle_);
    if (rc != CS_CU_SUCCESS)
      return rc;
    stream_ = nullptr;
    {
      const std::lock_guard<std::mutex> locked(mutex_);
      given_ = false;
    }
    __atomic_store_n(&context_, made, __ATOMIC_RELEASE);
  }
  const cs_result rc = cs_cu.CtxSetCurrent(made);
  return rc != CS_CU_SUCCESS || stream_
             ? rc
             : cs_cu.StreamCreate(&stream_, CS_STREAM_NON_BLOCKING);
}

bool SecondContext::write(const std::vector<uint64_t> &words) {
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (busy_ || (failed_ && now_ns() - failed_ < kAgain))
      return false;
    busy_ = now_ns();
  }
  const cs_result rc = enqueue(words);
  const std::lock_guard<std::mutex> locked(mutex_);
  busy_ = 0;
  if (rc == CS_CU_SUCCESS) {
    failed_ = 0;
    return true;
  }
  const int64_t now = now_ns();
  if (!failed_ || now - failed_ > kInVain) // nobody has tried meanwhile
    failing_ = now;
  failed_ = now;
  return false;
}

cs_result SecondContext::enqueue(const std::vector<uint64_t> &words) {
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
  return rc;
}

bool SecondContext::in_vain() {
  const std::lock_guard<std::mutex> locked(mutex_);
  const int64_t now = now_ns();
  return (failed_ && now - failing_ > kInVain) ||
         (busy_ && now - busy_ > kInVain);
}

void SecondContext::give_back() {
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (given_ || !__atomic_load_n(&context_, __ATOMIC_ACQUIRE))
      return;
    given_ = true;
  }
  // Not locked: this may wait for a thread that only another write lets go on.
  fs_gpu_free(device_, FS_GPU_CONTEXT, reinterpret_cast<uint64_t>(&context_),
              0);
}

} // namespace fserver
