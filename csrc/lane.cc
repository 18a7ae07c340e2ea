#include "lane.h"

#include <chrono>
#include <cstring>
#include <tuple>
#include <utility>

#include "error.h"
#include "lane_inside.h"
#include "mark.h"

namespace fserver {
namespace {

const char kSource[] =
#include "channel_source.inc"
    ;

// Small allocations share a block of 2 MiB, which is what an IPC handle names:
// whole blocks show a peer nothing else.
constexpr uint64_t kPiece = 2 << 20;

const char kFull[] =
    "(call torch.cuda.empty_cache() to release memory that torch caches)";

// Lanes that nobody has any more, but of which something is in use. Guarded by the GIL; memory may go
// after what is static.
std::vector<Lane *> &left = *new std::vector<Lane *>;

} // namespace

[[noreturn]] void fail(const char *what, cs_result rc) {
  char text[256];
  cs_cuda_text(rc, text, sizeof text);
  const bool full = rc == CS_CU_OUT_OF_MEMORY;
  raise(Kind::kError, "channel: %s: %s%s%s", what, text, full ? " " : "",
        full ? kFull : "");
}

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

Lane::Lane(int device, const std::string &image, int64_t timeout_ns,
           bool programmatic)
    : device_(device), programmatic_(programmatic),
      patience_(static_cast<uint64_t>(timeout_ns)) {
  open_driver("channel");
  for (Lane *lane : std::exchange(left, {}))
    Leave()(lane);
  const Relaxed relaxed;
  Tried tried;
  unlocked([&] {
    return tried.ok("find the GPU", cs_cu.DeviceGet(&handle_, device)) &&
           tried.ok("retain the context of the GPU",
                    cs_cu.DevicePrimaryCtxRetain(&context_, handle_));
  });
  must(tried);
  const int holds = unlocked([&] { return fs_gpu_hold(device_); });
  if (holds != 0)
    unlocked([&] { return cs_cu.DevicePrimaryCtxRelease(handle_); });
  check("channel", holds);
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
  unlocked([&] { return set(p, 0, bytes, &tried); });
  must(tried);
  return p;
}

// On a stream of its own, for which it waits.
bool Lane::set(cs_ptr at, unsigned char value, uint64_t bytes, Tried *tried) {
  cs_stream s;
  if (!tried->ok("create a stream",
                 cs_cu.StreamCreate(&s, CS_STREAM_NON_BLOCKING)))
    return false;
  if (tried->ok("fill memory", cs_cu.MemsetD8Async(at, value, bytes, s)))
    tried->ok("fill memory", cs_cu.StreamSynchronize(s));
  cs_cu.StreamDestroy(s);
  return tried->good();
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

bool Lane::settle() {
  return !used_ || unlocked([&] {
    if (captured_)
      return !for_a_capture(finish_gpu(device_));
    // To wait for a stream that is captured would end its capture.
    return !capturing(last_) && !for_a_capture(cs_cu.StreamSynchronize(last_));
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

void Lane::end() {
  if (closed_)
    return;
  closed_ = true;
  if (!context_ || forked.load()) {
    ended_ = true;
    return;
  }
  abort(); // what still waits on a stream ends, and what another thread waits for
  while (busy_ && !exiting.load())
    unlocked([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return 0;
    });
  if (busy_) { // a thread that comes back after close_all() ends: all stays
    stays_ = true;
    end_watcher();
    return;
  }
  const Relaxed relaxed;
  cs_context old = nullptr;
  cs_cu.CtxGetCurrent(&old);
  over_ = cs_cu.CtxSetCurrent(context_) != CS_CU_SUCCESS || settle();
  if (graphs_.any())
    refuse_replays();
  cs_cu.CtxSetCurrent(old);
  ended_ = true;
}

// Has kernels of graphs send nothing more, nor wait for anything. Waits of copies are ended by the
// watcher, which goes on.
void Lane::refuse_replays() {
  for (const Direction *way : {&out_, &in_})
    if (!way->launches.empty()) {
      const cs_ptr dead = way->launches[0].args.head.dead;
      Tried tried; // in a context that has failed nothing is replayed
      unlocked([&] { return set(dead, 1, sizeof(uint32_t), &tried); });
      return;
    }
}

bool Lane::close() {
  end();
  if (gone_ || stays_ || !ended_) // another thread is in end()
    return gone_;
  if (!context_ ||
      forked.load()) { // a child has neither the driver nor the watcher
    words_ = nullptr;
    if (watcher_.joinable())
      watcher_.detach();
    held_ = InUse();
    return gone_ = true;
  }
  if (graphs_.any())
    return false;
  const Relaxed relaxed;
  cs_context old = nullptr;
  cs_cu.CtxGetCurrent(&old);
  const bool entered = cs_cu.CtxSetCurrent(context_) == CS_CU_SUCCESS;
  over_ = over_ || !entered || settle();
  if (over_ && !gone_) { // by another thread, meanwhile
    gone_ = true;
    give_back(entered);
  }
  cs_cu.CtxSetCurrent(old);
  return gone_;
}

// In the context of the lane, if that could be entered.
void Lane::give_back(bool entered) {
  const InUse held = std::move(held_); // goes last
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
        if (second_)
          second_->give_back();
        for (const Owned &o : owned_)
          fs_gpu_free(device_, o.what, o.address, o.bytes);
        cs_cu.DevicePrimaryCtxRelease(handle_);
        return fs_gpu_release(device_, kFreeing);
      });
}

void Lane::Leave::operator()(Lane *lane) const {
  if (lane->close())
    delete lane;
  else
    left.push_back(lane);
}

} // namespace fserver
