// Torch, as the rest of the extension sees it: what is behind it, the adapter does (adapter.h).
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "args.h"
#include "fserver.h"

namespace fserver {

// What a tensor is read for. kRead and kWrite have torch refuse to resize its storage until the
// Memory lets go, because a resize frees the memory whoever refers to it. kLook does not.
enum class Access { kRead, kWrite, kLook };

class Memory;

// Fills t, but key and alloc, from argument i (i < 0: the argument itself).
// Refuses what the engine cannot read or write as plain memory of the CPU, or of
// GPU device (-1: none). t->dims lives as long as the tensor.
Memory read_tensor(PyObject *o, Arg arg, Py_ssize_t i, Access access,
                   int device, fs_tensor *t);

// Keeps the memory of a tensor (its storage, not the tensor) alive. Letting go
// may run Python code; needs the GIL.
class Memory {
public:
  Memory() = default;
  explicit Memory(void *storage)
      : storage_(storage) {} // takes over a reference
  Memory(Memory &&o) noexcept : storage_(o.storage_), fixed_(o.fixed_) {
    o.storage_ = nullptr;
  }
  Memory &operator=(Memory &&o) noexcept {
    std::swap(storage_, o.storage_);
    std::swap(fixed_, o.fixed_);
    Memory old(std::move(o));
    return *this;
  }
  ~Memory() {
    if (storage_)
      drop();
  }

  // Another reference. It does not keep torch from resizing the storage.
  Memory share() const;
  // Another reference. It keeps torch from resizing the storage if this one does.
  Memory again() const;
  void *get() const { return storage_; }
  void *release() { // the reference is the caller's now
    void *s = storage_;
    storage_ = nullptr;
    return s;
  }
  explicit operator bool() const { return storage_ != nullptr; }

private:
  friend Memory read_tensor(PyObject *, Arg, Py_ssize_t, Access, int,
                            fs_tensor *);
  // Takes over a reference to a storage that torch refuses to resize until this lets go. first:
  // torch allowed it until now.
  Memory(void *storage, bool first);
  void drop();
  void *storage_ = nullptr;
  bool fixed_ = false;
};

// Knows a storage without keeping its memory. While this lives, no other
// storage gets the same address.
class WeakMemory {
public:
  explicit WeakMemory(const Memory &m);
  WeakMemory(WeakMemory &&o) noexcept : storage_(o.storage_) {
    o.storage_ = nullptr;
  }
  ~WeakMemory();
  bool expired() const;

private:
  void *storage_;
};

// Where a storage begins now.
const void *start_of(const Memory &m);

// Memory of tensors whose addresses are in use. A tensor that is made to give it up frees it,
// whoever keeps it.
class InUse {
public:
  void add(Memory m);
  // Raises, naming a call, if a tensor has lost its memory. remedy: what else helps.
  void check(const char *call, const char *remedy) const;

private:
  struct Place {
    Memory memory;
    const void *start; // of it, as it was
  };
  std::vector<Place> places_;
};

bool is_tensor(PyObject *o);

// The items of a list of tensors; refuses a lone tensor, which is a sequence
// too.
Items tensor_items(PyObject *o, Arg arg);

// The same as read_tensor, of one in memory of the CPU that is to be pinned, for reading.
Memory read_pinned(PyObject *o, Arg arg, fs_tensor *t);

// The current stream of a GPU that a tensor is on, as the driver knows it, for calls
// without the GIL. False: it is being captured into a graph.
bool current_stream(int device, uint64_t *stream);

// Raises that, with the GIL.
[[noreturn]] void refuse_captured(const char *call, int device);

// What the tensors of an operation wait for on the current stream. Those of a GPU
// always wait. Those of the CPU wait if the stream has work, because it may be filling
// pinned memory.
class Behind {
public:
  // on_gpu: there is a tensor of the GPU; device: that of the node, or of the tensor.
  Behind(bool need_event, bool on_gpu, int device)
      : on_gpu_(need_event && on_gpu), look_(need_event && device >= 0),
        device_(device) {}
  // Finds the stream. False: it is being captured, and a tensor of the GPU waits. It
  // calls the driver, so without the GIL.
  bool find();
  void refuse(const char *call) const; // if find was false, with the GIL
  const uint64_t *stream() const { return waits_ ? &stream_ : nullptr; }

private:
  bool on_gpu_, look_, waits_ = false, captured_ = false;
  int device_;
  uint64_t stream_ = 0;
};

// Makes a GPU current for torch and the driver, as long as it lives. For calls without
// the GIL: it may make the GPU's context.
class OnDevice {
public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice &) = delete;
  OnDevice &operator=(const OnDevice &) = delete;
  uint64_t stream() const; // the current one of the device

private:
  int device_, before_;
};

// The GPU that is current for torch.
int current_gpu();

// One int64 that a GPU can read and write.
struct Counter {
  uint64_t address;
  int device; // -1: pinned host memory
  Memory memory;
};
Counter read_counter(PyObject *o, Arg arg);

// The ctx that adopt() was given, with this free, for the memory of a tensor; nullptr:
// its memory is another's.
void *adopted(PyObject *tensor, void (*free)(void *));

// One int64 on the CPU, pinned or not.
int64_t *read_word(PyObject *o, Arg arg);

// The native handle of torch's current stream on a CUDA device, captured or not.
void *native_stream(int device);

// The first dimension of a tensor of any kind.
int64_t rows_of(PyObject *o, Arg arg, Py_ssize_t i);

// Bytes of an element; 0 if no tensor of this torch can have the dtype, whose
// number a peer chose.
size_t dtype_bytes(uint64_t dtype);

// "torch.float32". The number may be a peer's.
std::string dtype_name(uint64_t dtype);

// A storage over memory of somebody else, of the CPU (device -1) or a GPU;
// free(ctx) is called once, from any thread, when it is gone. ctx is not null.
Memory adopt(void *data, size_t bytes, int device, void *ctx,
             void (*free)(void *));

// A tensor of uint8 over all of m.
PyObject *make_bytes(const Memory &m);

// A storage of no bytes, on the CPU (device -1) or a GPU.
Memory nothing(int device);

// Makes a storage as large as bytes, if it is smaller.
void extend(const Memory &m, size_t bytes);

// A new tensor, contiguous, from the start of m, and where that is. dtype and dims have been
// checked against the size.
PyObject *make_tensor(const Memory &m, uint64_t dtype, const int64_t *dims,
                      size_t ndim);

} // namespace fserver
