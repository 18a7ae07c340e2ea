#include "lane.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <iterator>
#include <system_error>
#include <tuple>

#include "args.h"
#include "driver.h"
#include "error.h"
#include "process.h"
#include "tensor.h"

namespace fserver {
namespace {

const char kSource[] =
#include "channel_source.inc"
    ;

const char kFull[] =
    "(call torch.cuda.empty_cache() to release memory that torch caches)";

// How to go on when a channel has ended.
const char kReopen[] =
    "call close() on this channel, then open a new one on both sides";

[[noreturn]] void fail(const char *what, cs_result rc) {
  char text[256];
  cs_cuda_text(rc, text, sizeof text);
  const bool full = rc == CS_CU_OUT_OF_MEMORY;
  raise(Kind::kError, "channel: %s: %s%s%s", what, text, full ? " " : "",
        full ? kFull : "");
}

void must(const char *what, cs_result rc) {
  if (rc != CS_CU_SUCCESS)
    fail(what, rc);
}

void must(const Tried &tried) { must(tried.what(), tried.rc()); }

// Small allocations share a block of 2 MiB, which is what an IPC handle names:
// whole blocks show a peer nothing else.
constexpr uint64_t kPiece = 2 << 20;

constexpr int kWatchMs = 10;

// Looks of the watcher in a row at which its streams had not done what they were given:
// after so many another context does it.
constexpr int kKept = 10;

// What is copied to the GPU in pieces of this size goes by queues of the copy engines,
// in which nothing waits; 4 KiB go by those of kernels and waits.
constexpr uint64_t kFill = 64 << 10;

// Threads that wait for what comes by way of landing buffers: each for some of its blocks.
constexpr unsigned kWaiting = 128;

// How long is waited for memory to be free again: nanoseconds.
constexpr int64_t kFreeing = 5000000000;

// From here on the copy engine is faster than the stores of kernels (16 MiB: 46
// and 49 us, 64 MiB: 173 and 200), and a kernel only raises the flags after it.
constexpr uint64_t kEngine = 16 << 20;

// The values of the first word, as fs_channel_watch has them: the channel has ended, or
// a peer has closed its side and sends no more.
constexpr uint32_t kEnded = 1, kParted = 2;

// Words of the page in host memory: what ends the channel and why it ended, as
// fs_channel_watch and cs_launch_head have them, and what a stream waits for in recv
// and in send.
enum { kEnd, kWhy, kRecvWaits, kSendWaits, kParts };
constexpr size_t kPage = 4 * FS_WATCH_WORDS;
static_assert(int{kParts} == int{CS_BIT});

// A stream writes kWaits, and the peer above it, before it waits, and kGoesOn
// after it. The watcher makes the first kSeen: a word that still says so belongs to
// the wait that it saw.
enum : uint32_t { kGoesOn = 0, kWaits = 1, kSeen = 2, kState = 3 };

uint32_t waits_for(unsigned peer) { return peer << 2 | kWaits; }

// Waits and writes of a stream, in their order, in one go.
class Words {
public:
  explicit Words(std::vector<cs_memory_op> *room) : ops_(*room) {
    ops_.clear(); // a call that failed may have left some
  }
  // Whoever sees the value sees what the stream did before. (The driver has no
  // weaker write in this form.)
  void write(uint64_t address, uint32_t value) {
    add(CS_OP_WRITE_32, address, value, CS_WRITE_DEFAULT);
  }
  // Waits until a peer has set a flag, and sets it back; until then, the word at
  // told says so.
  void take(uint64_t told, unsigned peer, uint64_t flag) {
    write(told, waits_for(peer));
    add(CS_OP_WAIT_32, flag, 1, CS_WAIT_GEQ);
    write(flag, 0);
  }
  // begun, if some of them are.
  cs_result enqueue(cs_stream s, bool *begun) {
    cs_result rc = CS_CU_SUCCESS;
    for (size_t i = 0; i < ops_.size() && rc == CS_CU_SUCCESS; i += kMost) {
      rc = cs_cu.StreamBatchMemOp(
          s, static_cast<unsigned>(std::min(kMost, ops_.size() - i)), &ops_[i],
          0);
      *begun = *begun || rc == CS_CU_SUCCESS;
    }
    ops_.clear();
    return rc;
  }
  // Room for what a message through this many segments takes.
  static void reserve(std::vector<cs_memory_op> *room, size_t segments) {
    room->reserve(std::max(room->capacity(), 4 * segments + 1));
  }

private:
  static constexpr size_t kMost = 256; // of the driver
  void add(int op, uint64_t address, uint32_t value, unsigned flags) {
    cs_memory_op o;
    memset(&o, 0, sizeof o);
    o.is.op = op;
    o.is.address = address;
    o.is.value = value;
    o.is.flags = flags;
    ops_.push_back(o);
  }
  std::vector<cs_memory_op> &ops_;
};

} // namespace

std::string lane_source() { return kSource; }

int lane_arch(int device) {
  open_driver("channel");
  int major = 0, minor = 0;
  Tried tried;
  unlocked([&] {
    cs_device d = 0;
    const char *ask = "read the compute capability of the GPU";
    return tried.ok("find the GPU", cs_cu.DeviceGet(&d, device)) &&
           tried.ok(ask, cs_cu.DeviceGetAttribute(
                             &major, CS_DEV_COMPUTE_CAPABILITY_MAJOR, d)) &&
           tried.ok(ask, cs_cu.DeviceGetAttribute(
                             &minor, CS_DEV_COMPUTE_CAPABILITY_MINOR, d));
  });
  must(tried);
  return major * 10 + minor;
}

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

Lane::Lane(int device, const std::string &image, int64_t timeout_ns,
           bool programmatic)
    : device_(device), programmatic_(programmatic),
      patience_(static_cast<uint64_t>(timeout_ns)) {
  open_driver("channel");
  const Relaxed relaxed;
  Tried tried;
  unlocked([&] {
    return tried.ok("find the GPU", cs_cu.DeviceGet(&handle_, device)) &&
           tried.ok("retain the context of the GPU",
                    cs_cu.DevicePrimaryCtxRetain(&context_, handle_));
  });
  must(tried);
  check("channel", unlocked([&] { return fs_gpu_hold(device_); }));
  try {
    Entered in(context_);
    void *words = pinned(kPage, CS_HOST_PORTABLE | CS_HOST_DEVICEMAP);
    memset(words, 0, kPage);
    words_ = static_cast<volatile uint32_t *>(words);
    must("map pinned memory", unlocked([&] {
           return cs_cu.MemHostGetDevicePointer(&seen_, words, 0);
         }));
    out_.name = "send";
    in_.name = "recv";
    if (!image.empty()) {
      unlocked([&] { return load(image.data(), &tried); });
      must(tried);
    }
  } catch (...) {
    close();
    throw;
  }
}

// Asking for an attribute loads a kernel. At its first launch it would be too
// late: another one of ours may be waiting then, and the driver waits for it.
bool Lane::load(const void *image, Tried *tried) {
  const std::pair<cs_function *, const char *> kernels[] = {
      {&out_.few, "send_few"},
      {&out_.many, "send_many"},
      {&in_.few, "recv_few"},
      {&in_.many, "recv_many"},
      {&in_.wait, "recv_wait"}};
  bool ok =
      tried->ok("load the kernels", cs_cu.ModuleLoadData(&module_, image));
  for (const auto &[f, name] : kernels) {
    int registers;
    ok =
        ok &&
        tried->ok("find a kernel", cs_cu.ModuleGetFunction(f, module_, name)) &&
        tried->ok("load a kernel",
                  cs_cu.FuncGetAttribute(&registers, CS_FUNC_NUM_REGS, *f));
  }
  return ok;
}

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

void *Lane::pinned(uint64_t bytes, unsigned flags) const {
  void *p = nullptr;
  const cs_result rc = with_room(CS_CU_OUT_OF_MEMORY, FS_GPU_PINNED, [&] {
    return cs_cu.MemHostAlloc(&p, bytes, flags);
  });
  if (rc == CS_CU_OUT_OF_MEMORY)
    raise(
        Kind::kError,
        "channel: allocate pinned memory: out of memory (open fewer "
        "channels, or raise ulimit -l and the memory limit of the container)");
  must("allocate pinned memory", rc);
  return p;
}

void Lane::need(const char *call) const {
  enter(call);
  if (closed_)
    raise(Kind::kClosed, "%s: the channel is closed", call);
}

uint64_t Lane::allocate(uint64_t bytes) {
  need("channel");
  Apart in(context_);
  bytes = (bytes + kPiece - 1) / kPiece * kPiece;
  cs_ptr p;
  cs_result rc = with_room(CS_CU_OUT_OF_MEMORY, FS_GPU_MEMORY,
                           [&] { return cs_cu.MemAlloc(&p, bytes); });
  if (rc == CS_CU_OUT_OF_MEMORY)
    raise(Kind::kError,
          "channel: allocate %llu bytes on gpu %d: out of memory %s",
          static_cast<unsigned long long>(bytes), device_, kFull);
  must("allocate", rc);
  owned_.push_back({FS_GPU_MEMORY, p, bytes});
  Tried tried;
  unlocked([&] {
    cs_stream s;
    if (!tried.ok("create a stream",
                  cs_cu.StreamCreate(&s, CS_STREAM_NON_BLOCKING)))
      return false;
    if (tried.ok("clear memory", cs_cu.MemsetD8Async(p, 0, bytes, s)))
      tried.ok("clear memory", cs_cu.StreamSynchronize(s));
    cs_cu.StreamDestroy(s);
    return tried.good();
  });
  must(tried);
  return p;
}

std::tuple<std::string, uint64_t, uint64_t> Lane::share(uint64_t address) {
  need("channel");
  Apart in(context_);
  cs_ptr base = 0;
  size_t bytes = 0;
  cs_ipc_handle h;
  Tried tried;
  const bool shared = unlocked([&] {
    int legacy = 0;
    void *pool = nullptr;
    if (!tried.ok("find the allocation of a tensor",
                  cs_cu.MemGetAddressRange(&base, &bytes, address)))
      return false;
    cs_cu.PointerGetAttribute(&legacy, CS_PTR_LEGACY_IPC_CAPABLE, address);
    cs_cu.PointerGetAttribute(&pool, CS_PTR_MEMPOOL, address);
    return legacy && !pool && cs_cu.IpcGetMemHandle(&h, base) == CS_CU_SUCCESS;
  });
  must(tried);
  if (!shared)
    return {std::string(), 0, 0};
  return {std::string(h.bytes, sizeof h.bytes), bytes, address - base};
}

std::pair<uint64_t, uint64_t> Lane::map(const std::string &handle,
                                        const std::string &owner) {
  need("channel");
  Apart in(context_);
  cs_ipc_handle h;
  if (handle.size() != sizeof h.bytes)
    raise(Kind::kError,
          "channel: a peer's memory handle has %zu bytes, want %zu",
          handle.size(), sizeof h.bytes);
  memcpy(h.bytes, handle.data(), sizeof h.bytes);
  cs_ptr p = 0, base = 0;
  size_t bytes = 0;
  // What was at its address in the peer before may still be mapped.
  cs_result rc = with_room(CS_CU_ALREADY_MAPPED, FS_GPU_MAPPING, [&] {
    return cs_cu.IpcOpenMemHandle(&p, h, CS_IPC_LAZY_PEER_ACCESS);
  });
  if (rc == CS_CU_PEER_ACCESS_UNSUPPORTED)
    raise(Kind::kConfig,
          "channel: gpu %d cannot use the memory of %s: no peer access between "
          "them (nvidia-smi topo -p2p rw shows it; use mode=\"host\")",
          device_, owner.c_str());
  must("map a peer's memory", rc);
  owned_.push_back({FS_GPU_MAPPING, p, 0});
  must("find the size of a peer's memory",
       unlocked([&] { return cs_cu.MemGetAddressRange(&base, &bytes, p); }));
  owned_.back().bytes = bytes;
  return {p, bytes - (p - base)};
}

void Lane::reach(int device) {
  need("channel");
  if (device == device_)
    return;
  Apart in(context_);
  Tried tried;
  const cs_result rc = unlocked([&]() -> cs_result {
    cs_device other = 0;
    cs_context context;
    if (!tried.ok("find the peer's GPU", cs_cu.DeviceGet(&other, device)) ||
        !tried.ok("retain the context of the peer's GPU",
                  cs_cu.DevicePrimaryCtxRetain(&context, other)))
      return CS_CU_SUCCESS;
    const cs_result enabled = cs_cu.CtxEnablePeerAccess(context, 0);
    cs_cu.DevicePrimaryCtxRelease(other); // its channel holds it
    return enabled;
  });
  must(tried);
  if (rc == CS_CU_PEER_ACCESS_UNSUPPORTED)
    raise(Kind::kConfig,
          "channel: gpu %d cannot use the memory of gpu %d: no peer access "
          "between them (nvidia-smi topo -p2p rw shows it; use "
          "mode=\"host\")",
          device_, device);
  if (rc != CS_CU_PEER_ACCESS_ALREADY_ENABLED)
    must("use the memory of the peer's GPU", rc);
}

void Lane::plan(bool sends, std::vector<Step> steps, uint64_t counts,
                uint64_t dead) {
  need("channel");
  Way &way = sends ? out_ : in_;
  for (Step &step : steps) {
    const size_t n = step.segments.size();
    if (n == 0 || n > CS_MANY)
      raise(Kind::kError, "channel: a launch has %zu segments, want 1 to %d", n,
            CS_MANY);
    Launch l;
    memset(&l.args, 0, sizeof l.args);
    l.threads = static_cast<unsigned>(step.threads);
    l.args.head.counts = counts;
    l.args.head.dead = dead;
    l.args.head.status = seen_;
    l.args.head.patience = patience_;
    l.args.head.count = static_cast<unsigned>(n);
    for (size_t i = 0; i < n; i++) {
      cs_segment s = step.segments[i].s;
      s.first = l.first[i] = static_cast<unsigned short>(l.grid);
      l.grid += s.blocks;
      l.lands = l.lands || (!sends && s.kind == CS_BY_LANDING);
      l.args.segment[i] = s;
    }
    counts += 4 * l.grid;
    l.segments = std::move(step.segments);
    way.launches.push_back(std::move(l));
  }
}

void Lane::plan_copies(bool sends, std::vector<Segment> segments) {
  need("channel");
  (sends ? out_ : in_).copies = std::move(segments);
}

void Lane::begin(bool in_turn, bool send_first, uint64_t flags,
                 uint64_t bytes) {
  need("channel");
  flags_ = flags;
  flags_bytes_ = bytes;
  in_turn_ = in_turn;
  send_next_ = send_first;
  for (const Way *way : {&out_, &in_})
    Words::reserve(&ops_, way->copies.size());
  auto add = [&](const Segment &g) {
    const auto t = static_cast<size_t>(g.tensor);
    most_.resize(std::max(most_.size(), t + 1));
    most_[t] = g.s.rows;
  };
  for (const Segment &g : out_.copies)
    add(g);
  for (Launch &l : out_.launches)
    for (const Segment &g : l.segments) {
      add(g);
      l.large = l.large || by_engine(g);
    }
  if ((!out_.copies.empty() || !in_.copies.empty()) && !watcher_.joinable())
    start_watcher();
}

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

// Without turns the kernel has to see the receiver's credit first.
bool Lane::by_engine(const Segment &g) const {
  return in_turn_ && g.s.kind == CS_IN_PLACE && g.s.bytes >= kEngine;
}

// A peer that has closed its side takes nothing any more, but what it sent before
// is still there to be received.
void Lane::stand(const char *call, bool sends) const {
  const uint32_t end = words_[kEnd], why = words_[kWhy];
  if (end == 0 && why == 0)
    return;
  if (broken_)
    raise(Kind::kError,
          "%s: an earlier %s failed after a part of its message was enqueued, "
          "so the channel has ended (%s)",
          call, broken_, kReopen);
  if ((why & 255) == CS_LATE)
    raise(Kind::kTimeout,
          "%s: peer %u has not responded within timeout_ms of the channel, so "
          "the channel has ended (%s)",
          call, why >> 8, kReopen);
  const bool parted = end == kParted && (sends || why);
  if ((end == kEnded || parted) && explain_) {
    PyObject *told = PyObject_CallNoArgs(explain_);
    if (!told)
      throw Raised{};
    Py_DECREF(told);
  }
  if (parted)
    raise(Kind::kClosed,
          "%s: a peer has closed its side, so the channel has ended (%s)", call,
          kReopen);
  if (end == kEnded || why)
    raise(Kind::kError,
          "%s: the channel has ended: check() raises the reason (%s)", call,
          kReopen);
}

cs_stream Lane::stream(const char *call, bool sends) {
  need(call);
  if (busy_)
    raise(Kind::kConfig,
          "%s: another thread is in a call of this channel (open a channel for "
          "each thread, or make one call at a time)",
          call);
  stand(call, sends);
  auto s = reinterpret_cast<cs_stream>(native_stream(device_));
  if (used_ && s != last_) {
    Apart in(context_); // that a default stream is of
    busy_ = true;
    // Asking a stream that is captured would end its capture.
    const bool in_use = unlocked([&] {
      return !capturing(s) && !capturing(last_) &&
             cs_cu.StreamQuery(last_) == CS_CU_NOT_READY;
    });
    busy_ = false;
    need(call); // another thread may have closed it meanwhile
    if (in_use)
      raise(Kind::kConfig,
            "%s: the channel is still in use on another stream (synchronize "
            "that stream first, or open a channel for each stream)",
            call);
  }
  return s;
}

void Lane::turn(const char *call, bool sends) {
  if (in_turn_ && sends != send_next_)
    raise(Kind::kConfig,
          "%s: call %s() first: the channel has tensors in both directions, so "
          "send() and recv() alternate",
          call, sends ? "recv" : "send");
}

void Lane::hold(PyObject *tensors) {
  const Arg arg = {"channel", "tensors"};
  const Items items = tensor_items(tensors, arg);
  for (size_t i = 0; i < items.size(); i++) {
    fs_tensor t;
    Memory m = read_tensor(items.at(i), arg, static_cast<Py_ssize_t>(i),
                           Access::kLook, device_, &t);
    const void *start = start_of(m);
    held_.push_back({std::move(m), start});
  }
}

void Lane::explain(PyObject *why) {
  Py_INCREF(why);
  Py_XDECREF(explain_);
  explain_ = why;
}

void Lane::have(const char *call) const {
  for (const Held &h : held_)
    if (start_of(h.memory) != h.start)
      raise(Kind::kConfig,
            "%s: a tensor of the channel has lost its memory (by "
            "untyped_storage().resize_ or set_): keep the memory while the "
            "channel is open, or %s",
            call, kReopen);
}

// Enqueues a message, without the GIL: where the stream is full, the driver waits for
// the GPU, which may wait for a Python thread. If it fails when a part of it counts
// already, the two sides count differently from then on, so the channel ends; but not
// if it was for a graph, which never comes to be.
template <class F>
void Lane::message(const char *call, cs_stream s, F enqueue) {
  begun_ = false;
  busy_ = true;
  bool captured = false;
  const cs_result rc = unlocked([&] {
    const cs_result enqueued = enqueue();
    captured = capturing(s);
    return enqueued;
  });
  busy_ = false;
  if (rc == CS_CU_SUCCESS) {
    used(s, captured);
    return;
  }
  try {
    fail(call, rc);
  } catch (const Raised &) {
    if (begun_ && !captured) {
      broken_ = call;
      used(s, false);
      abort();
      if (explain_) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        Py_XDECREF(PyObject_CallOneArg(explain_, value)); // tells the peers
        PyErr_Restore(type, value, trace);
      }
    }
    throw;
  }
}

// This and what follows, up to recv, without the GIL: no Python, and no exception.
cs_result Lane::launch(Way &way, cs_stream s) {
  cs_launch_attribute attribute;
  memset(&attribute, 0, sizeof attribute);
  attribute.id = CS_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.flag = 1;
  cs_result rc = CS_CU_SUCCESS;
  for (Launch &l : way.launches) {
    cs_launch_config c;
    memset(&c, 0, sizeof c);
    c.grid_x = l.grid;
    c.grid_y = c.grid_z = c.block_y = c.block_z = 1;
    c.block_x = l.threads;
    c.stream = s;
    c.attributes = &attribute;
    c.count = programmatic_ ? 1 : 0;
    void *args[] = {&l.args}; // cs_launch_few is its beginning
    if (l.lands) {
      cs_launch_config one = c;
      one.grid_x = 1;
      one.block_x = kWaiting;
      rc = cs_cu.LaunchKernelEx(&one, way.wait, args, nullptr);
    }
    if (rc == CS_CU_SUCCESS)
      rc = cs_cu.LaunchKernelEx(
          &c, l.segments.size() <= CS_FEW ? way.few : way.many, args, nullptr);
    if (rc != CS_CU_SUCCESS)
      break;
    begun_ = true;
  }
  return rc;
}

// Waits and flags have constants only, so that a graph can be replayed: the
// sender sets a flag to 1, the receiver waits for it and sets it back, and the
// flag's next 1 comes after the answer, or after the receiver's credit.
cs_result Lane::copy_out(cs_stream s) {
  Words words(&ops_);
  cs_result rc = CS_CU_SUCCESS;
  if (!in_turn_) {
    for (const Segment &g : out_.copies) {
      if (g.s.credits)
        words.take(word(kSendWaits), g.s.peer, g.s.credits);
    }
    words.write(word(kSendWaits), kGoesOn);
    rc = words.enqueue(s, &begun_);
  }
  short_ = short_ || !rows_.empty(); // also if it fails half-way
  for (const Segment &g : out_.copies) {
    const uint64_t rows =
        rows_.empty() ? g.s.rows : rows_[static_cast<size_t>(g.tensor)];
    const uint64_t bytes = rows_.empty() ? g.s.bytes : rows * g.row_bytes;
    if (rc == CS_CU_SUCCESS && bytes)
      rc = cs_cu.MemcpyAsync(g.s.to, g.s.from, bytes, s);
    if (rc != CS_CU_SUCCESS)
      return rc;
    if (short_)
      words.write(g.s.counted, static_cast<uint32_t>(rows));
    if (g.s.flags)
      words.write(g.s.flags, 1);
    bool told = false;
    rc = words.enqueue(s, &told);
    begun_ = begun_ || (told && g.s.flags);
  }
  if (rc == CS_CU_SUCCESS)
    short_ = !rows_.empty();
  return rc;
}

cs_result Lane::copy_in(cs_stream s) {
  Words words(&ops_);
  for (const Segment &g : in_.copies)
    if (g.s.credits)
      words.write(g.s.credits, 1);
  for (const Segment &g : in_.copies) {
    if (g.s.flags)
      words.take(word(kRecvWaits), g.s.peer, g.s.flags);
  }
  words.write(word(kRecvWaits), kGoesOn);
  cs_result rc = words.enqueue(s, &begun_);
  for (const Segment &g : in_.copies)
    if (rc == CS_CU_SUCCESS && g.s.from && g.s.bytes)
      rc = cs_cu.MemcpyAsync(g.s.to, g.s.from, g.s.bytes, s);
  return rc;
}

// Has the launches be of the rows that are to be sent, and copies what the copy engine
// moves.
cs_result Lane::prepare(cs_stream s) {
  for (Launch &l : out_.launches) {
    if (rows_.empty() && !l.large && !l.changed)
      continue;
    l.changed = !rows_.empty();
    for (size_t i = 0; i < l.segments.size(); i++) {
      const Segment &g = l.segments[i];
      cs_segment &now = l.args.segment[i];
      now = g.s;
      now.first = l.first[i];
      if (!rows_.empty()) {
        now.rows = rows_[static_cast<size_t>(g.tensor)];
        if (g.s.kind != CS_BY_PACKETS) // of those the receiver waits for all
          now.bytes = now.rows * g.row_bytes;
      }
      if (!by_engine(g))
        continue;
      const cs_result rc =
          now.bytes ? cs_cu.MemcpyAsync(now.to, now.from, now.bytes, s)
                    : CS_CU_SUCCESS;
      now.bytes = 0;
      if (rc != CS_CU_SUCCESS)
        return rc;
    }
  }
  return CS_CU_SUCCESS;
}

void Lane::send(PyObject *rows) {
  // Other Python code may run here, and close the lane.
  std::vector<uint32_t> some;
  if (rows && rows != Py_None) {
    const Items items(rows, {"send", "rows"}, "ints");
    if (items.size() != most_.size())
      raise(Kind::kShape,
            "send: rows has %zu numbers for %zu tensors: give one number for "
            "each tensor",
            items.size(), most_.size());
    for (size_t i = 0; i < most_.size(); i++) {
      const uint64_t n =
          read_u64(items.at(i), {"send", "rows"}, static_cast<Py_ssize_t>(i));
      if (n > most_[i])
        raise(Kind::kShape,
              "send: rows[%zu] is %llu, but the tensor has %u: give a number "
              "from 0 to %u",
              i, static_cast<unsigned long long>(n), most_[i], most_[i]);
      some.push_back(static_cast<uint32_t>(n));
    }
  }
  cs_stream s = stream("send", true);
  turn("send", true);
  have("send");
  Entered in(context_);
  rows_ = std::move(some);
  message("send", s, [&] {
    cs_result rc = prepare(s);
    if (rc == CS_CU_SUCCESS && !out_.copies.empty())
      rc = copy_out(s);
    return rc == CS_CU_SUCCESS ? launch(out_, s) : rc;
  });
  send_next_ = false;
}

void Lane::recv() {
  cs_stream s = stream("recv", false);
  turn("recv", false);
  have("recv");
  Entered in(context_);
  message("recv", s, [&] {
    const cs_result rc = in_.copies.empty() ? CS_CU_SUCCESS : copy_in(s);
    return rc == CS_CU_SUCCESS ? launch(in_, s) : rc;
  });
  send_next_ = true;
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

std::string Lane::peek(uint64_t address, uint64_t bytes) {
  need("channel");
  Apart in(context_);
  std::string data(bytes, 0);
  void *host = pinned(bytes, 0);
  const cs_result rc = unlocked([&] {
    cs_stream s;
    cs_result done = cs_cu.StreamCreate(&s, CS_STREAM_NON_BLOCKING);
    if (done == CS_CU_SUCCESS) {
      done =
          cs_cu.MemcpyAsync(reinterpret_cast<cs_ptr>(host), address, bytes, s);
      if (done == CS_CU_SUCCESS)
        done = cs_cu.StreamSynchronize(s);
      cs_cu.StreamDestroy(s);
    }
    memcpy(data.data(), host, bytes);
    cs_cu.MemFreeHost(host);
    return done;
  });
  must("read memory of the GPU", rc);
  return data;
}

void Lane::used(cs_stream s, bool captured) {
  last_ = s;
  used_ = true;
  captured_ = captured_ || captured;
}

void Lane::settle() {
  if (used_)
    unlocked([&] {
      return captured_ ? cs_cu.CtxSynchronize()
                       : cs_cu.StreamSynchronize(last_);
    });
}

void Lane::finish() {
  if (!used_ || closed_ || forked.load())
    return;
  Apart in(context_);
  settle();
}

int Lane::pending() const {
  if (!used_ || closed_)
    return CS_CU_SUCCESS;
  Apart in(context_);
  return unlocked([&] { return cs_cu.StreamQuery(last_); });
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

void Lane::close() {
  if (closed_)
    return;
  closed_ = true;
  std::vector<Held> held;
  held.swap(held_); // goes last
  if (!context_)
    return;
  if (forked.load()) { // a child has neither the driver nor the watcher
    words_ = nullptr;
    if (watcher_.joinable())
      watcher_.detach();
    return;
  }
  abort(); // what still waits on a stream ends, and what another thread waits for
  while (busy_ && !exiting.load())
    unlocked([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return 0;
    });
  if (busy_) { // a thread that comes back after close_all() ends: all stays
    end_watcher();
    return;
  }
  const Relaxed relaxed;
  cs_context old = nullptr;
  cs_cu.CtxGetCurrent(&old);
  const bool entered = cs_cu.CtxSetCurrent(context_) == CS_CU_SUCCESS;
  if (entered)
    settle();
  end_watcher();
  auto number = [](const volatile void *p) {
    return reinterpret_cast<uint64_t>(p);
  };
  if (module_)
    owned_.push_back({FS_GPU_MODULE, number(module_), 0});
  if (words_)
    owned_.push_back({FS_GPU_PINNED, number(words_), kPage});
  words_ = nullptr;
  unlocked(
      [&] { // the engine may wait for all of the GPU, and that for any Python thread
        for (cs_stream s : watcher_streams_)
          if (entered && s)
            cs_cu.StreamDestroy(s);
        cs_cu.CtxSetCurrent(old);
        if (second_)
          second_->give_back();
        for (const Owned &o : owned_)
          fs_gpu_free(device_, o.what, o.address, o.bytes);
        cs_cu.DevicePrimaryCtxRelease(handle_);
        return fs_gpu_release(device_, kFreeing);
      });
}

} // namespace fserver
