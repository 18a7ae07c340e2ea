#include "flags.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <unordered_set>

#include "args.h"
#include "driver.h"
#include "error.h"
#include "keeper.h"
#include "kernels.h"
#include "process.h"
#include "tensor.h"

namespace fserver {
namespace {

std::atomic<int64_t> ended_at{0}; // nanoseconds

// A wait asks within so long whether it is to end: nanoseconds.
constexpr int64_t kAsks = 20'000'000;

// The interpreter is ending, and nothing waits any more.
constexpr uint64_t kForGood = ~uint64_t{0} - 1;

[[noreturn]] void fail(const char *call, const Tried &tried) {
  char text[160];
  cs_cuda_text(tried.rc(), text, sizeof text);
  raise(Kind::kError, "%s: %s: %s", call, tried.what(), text);
}

// What follows, up to enqueue, is called without the GIL.

uint64_t seen(const Counter &c, Tried *tried) {
  return c.device >= 0 ? c.address
                       : seen(reinterpret_cast<void *>(c.address), tried);
}

// What the kernel of a wait is given beside the flag and the number.
struct Wait {
  int64_t limit; // nanoseconds; 0: none
};

bool enqueue(int device, Kernel which, const Counter *counters, size_t n,
             const Wait *wait, Kept kept, Tried *tried) {
  const OnDevice guard(device);
  const Relaxed relaxed;
  const auto stream = reinterpret_cast<cs_stream>(guard.stream());
  const cs_function f = kernel(device, which, tried);
  uint64_t values[5];
  void *arguments[5];
  for (size_t i = 0; i < n; i++)
    values[i] = seen(counters[i], tried);
  if (wait && tried->good()) {
    if (Page *p = the_page(tried)) {
      values[2] = seen(p, tried);
      values[3] = since(p, capturing(stream));
      values[4] = static_cast<uint64_t>(wait->limit);
    }
  }
  for (size_t i = 0; i < 5; i++)
    arguments[i] = &values[i];
  if (!start(f, stream, 1, arguments, tried))
    return false;
  keep(stream, std::move(kept));
  return true;
}

// Pinned memory that a GPU sees. From the first wait of a stream for a flag in it until
// it is dropped, others may: of graphs.
struct Seen {
  Memory memory;
  int device;
  std::atomic<bool> holds;
};

void release_seen(void *p) {
  const std::unique_ptr<Seen> seen(static_cast<Seen *>(p));
  if (seen->holds && !forked.load() &&
      !exiting.load()) // the driver is ending too
    fs_gpu_release(seen->device, 0);
}

Kept both(Counter *counters, size_t n) {
  Kept kept;
  for (size_t i = 0; i < n; i++)
    kept[i] = std::move(counters[i].memory);
  return kept;
}

// Launches kernel which of one thread. The driver waits while the stream has no
// room, for a flag that another Python thread may be about to set. wait: for the first
// counter, which is in a tensor.
void launch(const char *call, Kernel which, Counter *counters, size_t n,
            const Wait *wait = nullptr, PyObject *flag = nullptr) {
  int device = -1;
  for (size_t i = 0; i < n; i++) {
    if (counters[i].device < 0)
      continue;
    if (device >= 0 && counters[i].device != device)
      raise(Kind::kConfig,
            "%s: the tensors are on cuda:%d and cuda:%d (pass tensors of one "
            "GPU)",
            call, device, counters[i].device);
    device = counters[i].device;
  }
  if (device < 0)
    raise(Kind::kConfig,
          "%s: no tensor is on a GPU (pass a GPU tensor; map_pinned_tensor() "
          "returns one for a pinned CPU tensor)",
          call);
  open_driver(call);
  if (wait)
    hold(call, flag, counters[0], device);
  Kept memory = both(counters, n);
  Tried tried;
  if (!unlocked([&] {
        return enqueue(device, which, counters, n, wait, std::move(memory),
                       &tried);
      }))
    fail(call, tried);
}

} // namespace

void hold(const char *call, PyObject *flag, const Counter &c, int device) {
  static std::unordered_set<int> for_good; // guarded by the GIL
  auto *seen = static_cast<Seen *>(adopted(flag, release_seen));
  if (seen ? seen->holds.load()
           : c.device >= 0 || !for_good.insert(device).second)
    return;
  if (seen)
    seen->holds = true;
  const int gpu = seen ? seen->device : device;
  check(call, unlocked([&] { return fs_gpu_hold(gpu); }));
}

void write_flag(PyObject *flag, PyObject *seq) {
  enter("write_flag");
  Counter c[] = {read_counter(flag, {"write_flag", "flag"}),
                 read_counter(seq, {"write_flag", "seq"})};
  launch("write_flag", Kernel::kWriteFlag, c, 2);
}

void wait_flag(PyObject *flag, PyObject *seq, PyObject *timeout_ms) {
  enter("wait_flag");
  Counter c[] = {read_counter(flag, {"wait_flag", "flag"}),
                 read_counter(seq, {"wait_flag", "seq"})};
  Wait wait{0};
  if (timeout_ms && timeout_ms != Py_None)
    wait.limit =
        std::max<int64_t>(1, read_ms(timeout_ms, {"wait_flag", "timeout_ms"}));
  if (Page *p = page_there(); p && p->late) {
    p->late = 0;
    raise(Kind::kTimeout,
          "wait_flag: an earlier wait_flag lasted longer than its timeout_ms, "
          "and its stream went on without the flag. This call has enqueued "
          "nothing (call it again to wait)");
  }
  waits_again();
  launch("wait_flag", Kernel::kWaitFlag, c, 2, &wait, flag);
}

void seq_add_one(PyObject *seq) {
  enter("seq_add_one");
  Counter c = read_counter(seq, {"seq_add_one", "seq"});
  launch("seq_add_one", Kernel::kSeqAddOne, &c, 1);
}

void end_waits(bool for_good) {
  ended_at = now_ns();
  if (Page *p = page_there(); p && p->ended != kForGood)
    p->ended = for_good ? kForGood : p->ended + 1;
}

void waits_again() {
  Page *p = page_there();
  if (!p || p->before == p->ended || p->ended == kForGood)
    return;
  const int64_t left = ended_at + kAsks - now_ns();
  if (left > 0)
    unlocked([&] {
      std::this_thread::sleep_for(std::chrono::nanoseconds(left));
      return 0;
    });
  p->before = p->ended;
}

void wait_value(PyObject *flag, PyObject *value) {
  enter("wait_value");
  Counter c = read_counter(flag, {"wait_value", "flag"});
  const uint64_t v = read_u64(value, {"wait_value", "value"});
  open_driver("wait_value");
  const int device =
      c.device < 0 ? unlocked([] { return current_gpu(); }) : c.device;
  hold("wait_value", flag, c, device);
  Kept kept = both(&c, 1);
  Tried tried;
  bool captured = false;
  unlocked([&] {
    const OnDevice guard(device);
    const Relaxed relaxed;
    uint64_t stream = 0;
    captured = !current_stream(device, &stream);
    const uint64_t address = seen(c, &tried);
    const auto s = reinterpret_cast<cs_stream>(stream);
    if (!captured && tried.good() &&
        tried.ok("enqueue a wait on the stream",
                 cs_cu.StreamWaitValue64(s, address, v, CS_WAIT_GEQ)))
      keep(s, std::move(kept));
    return 0;
  });
  if (captured)
    refuse_captured("wait_value", device);
  if (!tried.good())
    fail("wait_value", tried);
}

void set_word(PyObject *word, PyObject *value) {
  int64_t *w = read_word(word, {"set_word", "word"});
  __atomic_store_n(w,
                   static_cast<int64_t>(read_u64(value, {"set_word", "value"})),
                   __ATOMIC_RELEASE);
}

PyObject *map_pinned(PyObject *tensor, PyObject *index) {
  enter("map_pinned_tensor");
  const Arg arg{"map_pinned_tensor", "tensor"};
  const uint64_t i = read_u64(index, {"map_pinned_tensor", "device_index"});
  fs_tensor t;
  Memory memory = read_pinned(tensor, arg, &t);
  open_driver("map_pinned_tensor");
  int gpus = 0;
  cs_ptr address = 0;
  Tried tried;
  unlocked([&] {
    const Relaxed relaxed;
    if (!tried.ok("count the GPUs", cs_cu.DeviceGetCount(&gpus)) ||
        i >= static_cast<uint64_t>(gpus) || !t.bytes)
      return 0;
    const OnDevice guard(static_cast<int>(i));
    tried.ok("get the GPU address of tensor, which must be pinned (pass "
             "tensor.pin_memory())",
             cs_cu.MemHostGetDevicePointer(&address, t.data, 0));
    return 0;
  });
  if (!tried.good())
    fail("map_pinned_tensor", tried);
  if (gpus == 0)
    raise(Kind::kConfig,
          "map_pinned_tensor: CUDA shows no GPU (see `nvidia-smi` and "
          "CUDA_VISIBLE_DEVICES)");
  if (i >= static_cast<uint64_t>(gpus))
    raise(Kind::kConfig,
          "map_pinned_tensor: device_index is %llu, want 0 to %d (CUDA shows "
          "%d GPUs)",
          static_cast<unsigned long long>(i), gpus - 1, gpus);
  const int device = static_cast<int>(i);
  if (!t.bytes)
    return make_tensor(nothing(device), t.dtype, t.dims, t.ndim);
  Memory view =
      adopt(reinterpret_cast<void *>(address), t.bytes, device,
            new Seen{std::move(memory), device, {false}}, release_seen);
  return make_tensor(view, t.dtype, t.dims, t.ndim);
}

} // namespace fserver
