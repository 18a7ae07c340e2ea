#include "flags.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "args.h"
#include "cs_cuda.h"
#include "error.h"
#include "process.h"
#include "tensor.h"

namespace fserver {
namespace {

// Release and acquire at system scope: what was written before the flag, by this
// GPU, is seen by whoever has seen the flag, also the CPU or another GPU.
constexpr char kCode[] = R"(
.version 6.4
.target sm_70
.address_size 64

.visible .entry fs_write_flag(.param .u64 flag, .param .u64 seq)
{
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [flag];
  ld.param.u64 %rd2, [seq];
  ld.relaxed.sys.u64 %rd3, [%rd2];
  st.release.sys.u64 [%rd1], %rd3;
  ret;
}

.visible .entry fs_wait_flag(.param .u64 flag, .param .u64 seq)
{
  .reg .b64 %rd<5>;
  .reg .pred %p;
  ld.param.u64 %rd1, [flag];
  ld.param.u64 %rd2, [seq];
  ld.relaxed.sys.s64 %rd3, [%rd2];
again:
  ld.acquire.sys.s64 %rd4, [%rd1];
  setp.ge.s64 %p, %rd4, %rd3;
  @%p bra over;
  nanosleep.u32 64;
  bra again;
over:
  ret;
}

.visible .entry fs_seq_add_one(.param .u64 seq)
{
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [seq];
  ld.relaxed.sys.u64 %rd2, [%rd1];
  add.s64 %rd3, %rd2, 1;
  st.relaxed.sys.u64 [%rd1], %rd3;
  ret;
}
)";

constexpr const char *kNames[] = {"fs_write_flag", "fs_wait_flag",
                                  "fs_seq_add_one"};
enum { kWrite, kWait, kAdd };

struct Kernels {
  cs_function function[3];
};

std::unordered_map<int, Kernels> loaded; // by device; guarded by the GIL

void must(int rc, const char *call, const char *what) {
  if (rc == CS_CU_SUCCESS)
    return;
  char text[160];
  cs_cuda_text(rc, text, sizeof text);
  raise(Kind::kError, "%s: %s: %s", call, what, text);
}

void open_driver(const char *call) {
  char why[256];
  if (cs_cuda_open(why, sizeof why) != 0)
    raise(Kind::kConfig,
          "%s: no GPU can be used: %s (install the NVIDIA driver, of CUDA 11.7 "
          "or later)",
          call, why);
}

// The kernels of a device, which is current. Loading is allowed while a stream
// is being captured: it is no work of the stream's. Asking for an attribute loads a
// kernel. At its first launch it would be too late: fs_wait_flag may be running then,
// for which the driver waits.
const Kernels &kernels(const char *call, int device) {
  auto it = loaded.find(device);
  if (it != loaded.end())
    return it->second;
  int mode = CS_CAPTURE_MODE_RELAXED;
  must(cs_cu.ThreadExchangeStreamCaptureMode(&mode), call, "allow loading");
  Kernels k{};
  const int rc = unlocked([&] {
    cs_module module = nullptr;
    int done = cs_cu.ModuleLoadData(&module, kCode), registers;
    for (int i = 0; i < 3 && done == CS_CU_SUCCESS; i++) {
      done = cs_cu.ModuleGetFunction(&k.function[i], module, kNames[i]);
      if (done == CS_CU_SUCCESS)
        done =
            cs_cu.FuncGetAttribute(&registers, CS_FUNC_NUM_REGS, k.function[i]);
    }
    return done;
  });
  cs_cu.ThreadExchangeStreamCaptureMode(&mode);
  must(rc, call, "load the kernels for flags");
  return loaded.emplace(device, k).first->second;
}

// Where the GPU that is current finds a counter.
uint64_t seen(const char *call, const Counter &c) {
  if (c.device >= 0)
    return c.address;
  cs_ptr address = 0;
  must(cs_cu.MemHostGetDevicePointer(&address,
                                     reinterpret_cast<void *>(c.address), 0),
       call, "find a tensor in pinned memory");
  return address;
}

// Pinned memory that a GPU sees. From the first wait of a stream for a flag in it until
// it is dropped, others may: of graphs.
struct Seen {
  Memory memory;
  int device;
  bool holds; // guarded by the GIL
};

void release_seen(void *p) {
  const std::unique_ptr<Seen> seen(static_cast<Seen *>(p));
  if (seen->holds && !forked.load() &&
      !exiting.load()) // the driver is ending too
    fs_gpu_release(seen->device, 0);
}

// Has nothing given back that would keep others from the GPU until a wait for a flag is
// over. Of memory that nobody has mapped, it is not known for how long.
void hold(const char *call, PyObject *flag, const Counter &c, int device) {
  static std::unordered_set<int> for_good; // guarded by the GIL
  auto *seen = static_cast<Seen *>(adopted(flag, release_seen));
  if (seen ? seen->holds : c.device >= 0 || !for_good.insert(device).second)
    return;
  if (seen)
    seen->holds = true;
  const int gpu = seen ? seen->device : device;
  check(call, unlocked([&] { return fs_gpu_hold(gpu); }));
}

// Launches kernel which of one thread. The driver waits while the stream has no
// room, for a flag that another Python thread may be about to set. waits: a tensor, the
// first counter, that it waits for.
void launch(const char *call, int which, const Counter *counters, size_t n,
            PyObject *waits = nullptr) {
  int device = -1;
  for (size_t i = 0; i < n; i++) {
    if (counters[i].device < 0)
      continue;
    if (device >= 0 && counters[i].device != device)
      raise(Kind::kConfig, "%s: the tensors are on cuda:%d and cuda:%d", call,
            device, counters[i].device);
    device = counters[i].device;
  }
  if (device < 0)
    raise(Kind::kConfig,
          "%s: no tensor is on a GPU: map_pinned_tensor gives one over pinned "
          "memory",
          call);
  open_driver(call);
  const OnDevice guard(device);
  uint64_t address[2];
  void *arguments[2];
  for (size_t i = 0; i < n; i++) {
    address[i] = seen(call, counters[i]);
    arguments[i] = &address[i];
  }
  const cs_function f = kernels(call, device).function[which];
  const auto stream = reinterpret_cast<cs_stream>(guard.stream());
  if (waits)
    hold(call, waits, counters[0], device);
  must(unlocked([&] {
         return cs_cu.LaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, arguments,
                                   nullptr);
       }),
       call, "launch");
}

// How long a wait for a word looks at it all the time, and how long it sleeps at
// most in between after that: a sixteenth of what it has waited.
constexpr int64_t kLook = 100000, kLongest = 1000000;

bool reached(const int64_t *word, int64_t value, int64_t limit_ns) {
  const int64_t start = now_ns();
  for (;;) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) >= value)
      return true;
    const int64_t waited = now_ns() - start;
    if (waited >= limit_ns)
      return false;
    if (waited < kLook) {
      sched_yield();
      continue;
    }
    const timespec nap{0, std::min(waited / 16, kLongest)};
    nanosleep(&nap, nullptr);
  }
}

} // namespace

void write_flag(PyObject *flag, PyObject *seq) {
  enter("write_flag");
  const Counter c[] = {read_counter(flag, {"write_flag", "flag"}),
                       read_counter(seq, {"write_flag", "seq"})};
  launch("write_flag", kWrite, c, 2);
}

void wait_flag(PyObject *flag, PyObject *seq) {
  enter("wait_flag");
  const Counter c[] = {read_counter(flag, {"wait_flag", "flag"}),
                       read_counter(seq, {"wait_flag", "seq"})};
  launch("wait_flag", kWait, c, 2, flag);
}

void seq_add_one(PyObject *seq) {
  enter("seq_add_one");
  const Counter c = read_counter(seq, {"seq_add_one", "seq"});
  launch("seq_add_one", kAdd, &c, 1);
}

void wait_value(PyObject *flag, PyObject *value) {
  enter("wait_value");
  const Counter c = read_counter(flag, {"wait_value", "flag"});
  const uint64_t v = read_u64(value, {"wait_value", "value"});
  open_driver("wait_value");
  const int device = c.device < 0 ? current_gpu() : c.device;
  const OnDevice guard(device);
  const uint64_t stream = current_stream("wait_value", device);
  const cs_ptr address = seen("wait_value", c);
  if (!cs_cu.StreamWaitValue64) {
    char why[128];
    cs_cuda_too_old(11070, why, sizeof why);
    raise(Kind::kConfig, "wait_value: %s (install a newer one)", why);
  }
  hold("wait_value", flag, c, device);
  must(unlocked([&] {
         return cs_cu.StreamWaitValue64(reinterpret_cast<cs_stream>(stream),
                                        address, v, CS_WAIT_GEQ);
       }),
       "wait_value", "have the stream wait");
}

bool wait_word(PyObject *word, PyObject *value, PyObject *timeout_ms) {
  enter("wait_word");
  const int64_t *w = read_word(word, {"wait_word", "word"});
  const auto v = static_cast<int64_t>(read_u64(value, {"wait_word", "value"}));
  const int64_t limit = read_ms(timeout_ms, {"wait_word", "timeout_ms"});
  return unlocked([&] { return reached(w, v, limit); });
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
  must(cs_cu.DeviceGetCount(&gpus), "map_pinned_tensor", "count the GPUs");
  if (i >= static_cast<uint64_t>(gpus))
    raise(Kind::kConfig,
          "map_pinned_tensor: device_index is %llu, want 0 to %d, a GPU that "
          "CUDA shows",
          static_cast<unsigned long long>(i), gpus - 1);
  const int device = static_cast<int>(i);
  const OnDevice guard(device);
  cs_ptr seen = 0;
  if (t.bytes)
    must(cs_cu.MemHostGetDevicePointer(&seen, t.data, 0), "map_pinned_tensor",
         "find the memory of tensor, which must be pinned (pass "
         "tensor.pin_memory())");
  if (!t.bytes)
    return make_tensor(nothing(device), t.dtype, t.dims, t.ndim);
  Memory view = adopt(reinterpret_cast<void *>(seen), t.bytes, device,
                      new Seen{std::move(memory), device, false}, release_seen);
  return make_tensor(view, t.dtype, t.dims, t.ndim);
}

} // namespace fserver
