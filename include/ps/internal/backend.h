// Backend: the device of a program of StepMesh. It needs torch.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "fserver/error.hpp"
#include "ps/internal/env.h"
#include "ps/internal/nodes.h"

namespace ps {

enum { BACKEND_OK = 0, BACKEND_FAILED = -1 };

// Memory and events of a device. What returns an int returns BACKEND_OK or BACKEND_FAILED; pointers are null if the call has
// failed. "CPU" and "GPU" are there; a program may register others. The tensors that the engine sends are on the CPU or on
// a GPU: a node whose backend is another takes CPU tensors.
class Backend {
public:
  virtual ~Backend() = default;
  Backend(const Backend &) = delete;
  Backend &operator=(const Backend &) = delete;

  // The device of the calling thread; a NUMA node, which has no effect, for the CPU.
  virtual int SetDevice(int dev) = 0;
  virtual int GetDeviceId() = 0;
  virtual at::Device GetDevice() = 0;
  // Memory on that device. Free takes what Alloc has returned, and null.
  virtual void *Alloc(std::uint64_t size) = 0;
  virtual void Free(void *m) = 0;
  // Events of a stream; null: the current stream of the device.
  virtual void *CreateEvent() = 0;
  virtual int FreeEvent(void *event) = 0;
  virtual int RecordEvent(void *event, void *stream) = 0;
  // Waits until what was queued before RecordEvent has run. Returns at once for an event that was not recorded.
  virtual int SyncEvent(void *event) = 0;

  // The one that STEPMESH_BACKEND names; without a name, that of the GPU if there is one, else that of the CPU.
  // Throws ConfigError if none of that name is registered.
  static Backend *Get();
  // Adds a backend, before Get and StartPS. It is not deleted.
  static void Register(const std::string &name, Backend *backend);

protected:
  Backend() = default;
};

namespace detail {

class CpuBackend : public Backend {
public:
  int SetDevice(int dev) override {
    device() = dev;
    return BACKEND_OK;
  }
  int GetDeviceId() override { return device(); }
  at::Device GetDevice() override { return at::Device(at::kCPU); }
  void *Alloc(std::uint64_t size) override {
    if (size > UINT64_MAX - 64)
      return nullptr;
    return std::aligned_alloc(64, size ? (size + 63) / 64 * 64 : 64);
  }
  void Free(void *m) override { std::free(m); }
  // Nothing is queued: all that was called has been done.
  void *CreateEvent() override { return new char; }
  int FreeEvent(void *event) override {
    delete static_cast<char *>(event);
    return event ? BACKEND_OK : BACKEND_FAILED;
  }
  int RecordEvent(void *event, void *) override {
    return event ? BACKEND_OK : BACKEND_FAILED;
  }
  int SyncEvent(void *event) override {
    return event ? BACKEND_OK : BACKEND_FAILED;
  }

private:
  static int &device() {
    static thread_local int node = -1;
    return node;
  }
};

// GPUs by way of torch, without a header of CUDA.
class GpuBackend : public Backend {
public:
  static bool there() {
    try {
      return gpu().deviceCount() > 0;
    } catch (const std::exception &) { // torch has no CUDA
      return false;
    }
  }
  int SetDevice(int dev) override {
    return attempt([&] {
      if (dev < 0 || dev >= gpu().deviceCount())
        return BACKEND_FAILED;
      gpu().setDevice(of(dev));
      return BACKEND_OK;
    });
  }
  int GetDeviceId() override {
    return attempt([] { return static_cast<int>(gpu().getDevice().index()); });
  }
  at::Device GetDevice() override { return gpu().getDevice(); }
  void *Alloc(std::uint64_t size) override {
    try {
      at::Tensor t = at::empty({static_cast<std::int64_t>(size ? size : 1)},
                               at::device(gpu().getDevice()).dtype(at::kByte));
      void *m = t.data_ptr();
      std::lock_guard<std::mutex> lock(mutex_);
      memory_[m] = std::move(t);
      return m;
    } catch (const std::exception &) {
      return nullptr;
    }
  }
  void Free(void *m) override {
    at::Tensor last; // goes without the lock
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = memory_.find(m);
    if (it == memory_.end())
      return;
    last = std::move(it->second);
    memory_.erase(it);
  }
  void *CreateEvent() override { return new Event; }
  int FreeEvent(void *event) override {
    const std::unique_ptr<Event> e(static_cast<Event *>(event));
    if (!e)
      return BACKEND_FAILED;
    return attempt([&] {
      if (e->event)
        gpu().destroyEvent(e->event, e->device);
      return BACKEND_OK;
    });
  }
  int RecordEvent(void *event, void *stream) override {
    auto *e = static_cast<Event *>(event);
    if (!e)
      return BACKEND_FAILED;
    return attempt([&] {
      const at::Device device = gpu().getDevice();
      // torch's id of a stream that it has not made is the stream's address.
      const c10::Stream on =
          stream ? c10::Stream(c10::Stream::UNSAFE, device,
                               static_cast<c10::StreamId>(
                                   reinterpret_cast<std::intptr_t>(stream)))
                 : gpu().getStream(device);
      if (e->event && e->device != device.index()) {
        gpu().destroyEvent(e->event, e->device);
        e->event = nullptr;
      }
      e->device = device.index();
      gpu().record(&e->event, on, device.index(),
                   c10::EventFlag::PYTORCH_DEFAULT);
      return BACKEND_OK;
    });
  }
  int SyncEvent(void *event) override {
    auto *e = static_cast<Event *>(event);
    if (!e)
      return BACKEND_FAILED;
    return attempt([&] {
      if (e->event)
        gpu().synchronizeEvent(e->event);
      return BACKEND_OK;
    });
  }

private:
  struct Event {
    void *event = nullptr; // torch makes it when it is recorded
    c10::DeviceIndex device = 0;
  };
  static const c10::impl::VirtualGuardImpl gpu() {
    return c10::impl::VirtualGuardImpl(at::kCUDA);
  }
  static at::Device of(int dev) {
    return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(dev));
  }
  template <class F> static int attempt(F &&f) {
    try {
      return f();
    } catch (const std::exception &) {
      return BACKEND_FAILED;
    }
  }

  std::mutex mutex_;
  std::map<void *, at::Tensor> memory_;
};

// The backends by name. Never destroyed: programs free memory at their end.
struct Backends {
  static Backends &all() {
    static Backends *all = new Backends;
    return *all;
  }
  std::mutex mutex;
  std::map<std::string, Backend *> by{{"CPU", new CpuBackend},
                                      {"GPU", new GpuBackend}};
};

} // namespace detail

inline Backend *Backend::Get() {
  std::string name = detail::backend_name();
  if (name.empty())
    name = detail::GpuBackend::there() ? "GPU" : "CPU";
  detail::Backends &all = detail::Backends::all();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto it = all.by.find(name);
  if (it != all.by.end())
    return it->second;
  std::string known;
  for (const auto &[n, backend] : all.by)
    known += (known.empty() ? "" : ", ") + n;
  throw fserver::ConfigError("STEPMESH_BACKEND=" + name + ": want one of " +
                             known + ", or Register it");
}

inline void Backend::Register(const std::string &name, Backend *backend) {
  if (name.empty() || !backend)
    throw fserver::ConfigError("Backend::Register: name is \"" + name +
                               "\" and backend " + (backend ? "is not" : "is") +
                               " null, want a name and a backend");
  detail::Backends &all = detail::Backends::all();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.by[name] = backend;
  detail::register_backend(name);
}

// An event of the backend, which the device has passed when Sync returns. One that Occupy has taken is not taken again
// before Release.
class TensorEvent {
public:
  TensorEvent() : backend_(Backend::Get()), event_(backend_->CreateEvent()) {}
  TensorEvent(const TensorEvent &) = delete;
  TensorEvent &operator=(const TensorEvent &) = delete;
  ~TensorEvent() { backend_->FreeEvent(event_); }

  // Notes what is queued on a stream; null: the current one. Throws fserver::Error if the backend fails, as Sync does.
  void Record(void *stream = nullptr) {
    check("Record", backend_->RecordEvent(event_, stream));
    recorded_ = true;
  }
  // Waits for what the last Record has noted. Returns at once if there was none since the last Sync.
  void Sync() {
    if (std::exchange(recorded_, false))
      check("Sync", backend_->SyncEvent(event_));
  }
  bool Occupy() { return !taken_.exchange(true); }
  void Release() { taken_.store(false); }

private:
  static void check(const char *call, int result) {
    if (result != BACKEND_OK)
      throw fserver::Error(std::string("TensorEvent::") + call +
                           ": the backend has failed");
  }

  Backend *const backend_;
  void *const event_;
  bool recorded_ = false;
  std::atomic<bool> taken_{false};
};

} // namespace ps
