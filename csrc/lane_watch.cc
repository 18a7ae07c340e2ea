// What ends a Lane, and the streams that wait in it.
#include "lane.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <iterator>
#include <system_error>

#include "error.h"
#include "lane_inside.h"

namespace fserver {
namespace {

constexpr int kWatchMs = 10;

// Looks of the watcher in a row at which its streams had not done what they were given:
// after so many another context does it.
constexpr int kKept = 10;

// What is copied to the GPU in pieces of this size goes by queues of the copy engines,
// in which nothing waits; 4 KiB go by those of kernels and waits.
constexpr uint64_t kFill = 64 << 10;

} // namespace

// What it needs it has when this returns: a lane that cannot be watched is no lane.
void Lane::start_watcher() {
  Apart in(context_);
  Tried tried;
  unlocked([&] {
    for (cs_stream &s : watcher_streams_)
      tried.good() && tried.ok("create a stream",
                               cs_cu.StreamCreate(&s, CS_STREAM_NON_BLOCKING));
    return 0;
  });
  must(tried);
  for (const Segment &g : in_.copies)
    if (g.s.flags)
      ends_.push_back(g.s.flags);
  for (const Segment &g : out_.copies)
    if (g.s.credits)
      ends_.push_back(g.s.credits);
  second_ = &SecondContext::of(device_, handle_);
  ones_ = pinned(kFill, 0);
  owned_.push_back({FS_GPU_PINNED, reinterpret_cast<uint64_t>(ones_), kFill});
  std::fill_n(static_cast<uint32_t *>(ones_), kFill / sizeof(uint32_t), 1);
  std::promise<cs_result> entering;
  std::future<cs_result> entered = entering.get_future();
  try {
    watcher_ = std::thread([this, entering = std::move(entering)]() mutable {
      const Relaxed relaxed;
      const cs_result rc = cs_cu.CtxSetCurrent(context_);
      entering.set_value(rc);
      if (rc == CS_CU_SUCCESS)
        watch();
    });
  } catch (const std::system_error &e) {
    raise(Kind::kError,
          "channel: start a thread: %s (raise ulimit -u, or open fewer "
          "channels)",
          e.what());
  }
  must("make the context of the GPU current",
       unlocked([&] { return entered.get(); }));
}

std::pair<int, int> Lane::status() const {
  if (broken_)
    return {CS_BROKEN, -1};
  if (!words_)
    return {0, 0};
  const uint32_t w = words_[kWhy];
  if (w == 0 && words_[kEnd] == kEnded)
    return {CS_LOST, -1};
  return {static_cast<int>(w & 255), static_cast<int>(w >> 8)};
}

void Lane::abort() {
  if (words_)
    words_[kEnd] = kEnded;
}

// Ends the lane if the wait that a word tells of has lasted for too long: since it was
// seen first, or since it was seen that the peer has closed its side.
void Lane::time_out(int which, Seen *seen) {
  const auto now = static_cast<uint64_t>(now_ns());
  auto *at = const_cast<uint32_t *>(words_) + which;
  uint32_t v = words_[which];
  if ((v & kState) == kWaits) {
    if (__atomic_compare_exchange_n(at, &v, v ^ kState, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED))
      *seen = {now, 0};
  } else if ((v & kState) == kSeen) {
    const uint32_t peer = v >> 2;
    if (seen->parted == 0 && words_[kParts + peer / 32] >> peer % 32 & 1)
      seen->parted = now;
    if (seen->parted && now - seen->parted > CS_AFTERWARDS)
      words_[kWhy] = CS_LOST | peer << 8;
    else if (now - seen->since > patience_)
      words_[kWhy] = CS_LATE | peer << 8;
  }
}

// Whether a stream waits for a peer.
bool Lane::waits() const {
  return (words_[kRecvWaits] & kState) != kGoesOn ||
         (words_[kSendWaits] & kState) != kGoesOn;
}

// Fills every flag, so that streams that wait for one go on. CUDA puts the streams of a
// process in few queues, where what waits keeps what is behind it, also of other
// streams. So there are two streams, made one after the other, that it puts in different
// queues. A wait in each of them keeps both, and so does a thread that loads a kernel, which
// waits for those streams; another context is kept by neither. Without memory for one,
// copies pass the queues. They come last, since a thread that loads or frees keeps who makes them.
void Lane::fill() {
  const size_t writers = std::size(watcher_streams_) - 1;
  bool free = false;
  for (size_t i = 0; i < writers; i++) {
    cs_stream s = watcher_streams_[i];
    if (cs_cu.StreamQuery(s) == CS_CU_NOT_READY)
      continue;
    free = true;
    for (const uint64_t word : ends_)
      cs_cu.StreamWriteValue32(s, word, 1, CS_WRITE_DEFAULT);
  }
  kept_ = free || !waits() ? 0 : kept_ + 1;
  if (kept_ < kKept || second_->write(ends_) || !second_->in_vain())
    return;
  cs_stream s = watcher_streams_[writers];
  if (cs_cu.StreamQuery(s) != CS_CU_SUCCESS)
    return;
  for (uint64_t at = 0; at < flags_bytes_; at += kFill)
    cs_cu.MemcpyAsync(flags_ + at, reinterpret_cast<uint64_t>(ones_),
                      std::min(kFill, flags_bytes_ - at), s);
}

// Ends the lane when a wait has lasted for too long. Once it has ended, fills
// every flag until it is closed: a stream that waits goes on, and so does the
// next wait on it.
void Lane::watch() {
  Seen receives, sends;
  while (!stop_.load()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(kWatchMs));
    if (words_[kEnd] != kEnded && words_[kWhy] == 0) {
      time_out(kRecvWaits, &receives);
      time_out(kSendWaits, &sends);
      if (words_[kWhy] == 0)
        continue;
    }
    fill();
  }
}

void Lane::end_watcher() {
  stop_.store(true);
  if (watcher_.joinable())
    unlocked([&] {
      watcher_.join();
      return 0;
    });
}

} // namespace fserver
