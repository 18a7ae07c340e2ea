// What the files of a Lane share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver.h"
#include "lane.h"
#include "process.h"

namespace fserver {

// Raises that a call of the driver has failed.
[[noreturn]] void fail(const char *what, cs_result rc);

inline void must(const char *what, cs_result rc) {
  if (rc != CS_CU_SUCCESS)
    fail(what, rc);
}

inline void must(const Tried &tried) { must(tried.what(), tried.rc()); }

// The values of the first word, as fs_channel_watch has them: the channel has ended, or
// a peer has closed its side and sends no more.
constexpr uint32_t kEnded = 1, kParted = 2;

// Words of the page in host memory: what ends the channel and why it ended, as
// fs_channel_watch and cs_launch_head have them, and what a stream waits for in recv
// and in send.
enum { kEnd, kWhy, kRecvWaits, kSendWaits, kParts };
constexpr size_t kPage = size_t{4} * FS_WATCH_WORDS;
static_assert(int{kParts} == int{CS_BIT});

// A stream writes kWaits, and the peer above it, before it waits, and kGoesOn
// after it. The watcher makes the first kSeen: a word that still says so belongs to
// the wait that it saw.
enum : uint32_t { kGoesOn = 0, kWaits = 1, kSeen = 2, kState = 3 };

// How long is waited for memory to be free again: nanoseconds.
constexpr int64_t kFreeing = 5000000000;

// Makes the lane's context the thread's, and puts the old one back.
struct Lane::Entered {
  explicit Entered(cs_context context) {
    if (cs_cu.CtxGetCurrent(&old) != CS_CU_SUCCESS || old != context) {
      must("make the context of the GPU current", cs_cu.CtxSetCurrent(context));
      changed = true;
    }
  }
  ~Entered() {
    if (changed)
      cs_cu.CtxSetCurrent(old);
  }
  cs_context old = nullptr;
  bool changed = false;
};

// For all but what is enqueued on the current stream.
struct Lane::Apart {
  explicit Apart(cs_context context) : entered(context) {}
  Relaxed relaxed;
  Entered entered;
};

// Makes a call of the driver, and once more if it has given full and there was something
// of that sort that closed lanes and lost peers have left: it is given back then, also where
// other lanes wait. All without the GIL, as the driver may wait for the GPU.
template <class F>
cs_result Lane::with_room(cs_result full, int what, F call) const {
  return unlocked([&] {
    const cs_result rc = call();
    return rc == full && fs_gpu_reclaim(device_, what, kFreeing) == 1 ? call()
                                                                      : rc;
  });
}

} // namespace fserver
