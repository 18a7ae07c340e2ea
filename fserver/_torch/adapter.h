// The table of functions between the extension and its adapter to torch.
//
// The extension (_C) holds the engine and the binding, and no symbol of torch. An adapter is a
// small shared object that is compiled for one minor version of torch and for one Python.
// `_C.join` loads the adapter of the torch that is imported, hands it a Host and gets a Torch.
// Only plain C values cross: no exception, and no type of the C++ library.
//
// Both sides are compiled with FS_ADAPTER, the digest of the adapter's sources (see build.py), and
// refuse each other if it differs.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

#include "fserver.h"

namespace fserver {

// The kind of a Python error that an adapter raises.
enum class Fault : int { kError, kConfig, kShape };

// What an adapter calls. `adapter` is the first field in every version.
struct Host {
  uint64_t adapter; // FS_ADAPTER
  // Sets the Python error. Needs the GIL.
  void (*raise)(Fault fault, const char *text);
  // Calls f(ctx) without the GIL, in a thread in which the capture of a CUDA graph elsewhere
  // forbids nothing. f must not throw.
  void (*unlocked)(void (*f)(void *), void *ctx);
};

// What Python says of a tensor; see Torch::probe.
struct Facts {
  const void *tensor;   // tensor._cdata
  const void *storage;  // tensor.untyped_storage()._cdata
  const void *data;     // tensor.data_ptr()
  const void *base;     // tensor.untyped_storage().data_ptr()
  uint64_t base_bytes;  // tensor.untyped_storage().nbytes()
  int64_t offset;       // tensor.storage_offset()
  const int64_t *sizes; // tensor.shape
  const int64_t *strides;
  size_t ndim;
  size_t itemsize;
  const char *dtype;  // str(tensor.dtype)
  const char *device; // str(tensor.device)
};

// A tensor that the caller of read() wants, as its errors name it: the argument `name` of `call`,
// or (item >= 0) an item of it.
struct Ask {
  const char *call;
  const char *name;
  Py_ssize_t item;
  int device; // a GPU that it may be on, or -1
  bool write; // it is about to be written
  bool fix;   // torch is to refuse to resize its storage from now on
  bool fixed; // out: torch allowed that until now
};

// What an adapter does. `adapter` is the first field in every version. A storage is a
// c10::StorageImpl; "a reference" is one strong reference to it. All functions need the GIL
// unless they say otherwise.
struct Torch {
  uint64_t adapter; // FS_ADAPTER
  const char
      *compiled; // the version of torch whose headers it was compiled with

  // Compares what the headers of the adapter find in a tensor with what Python says. Returns
  // nullptr, or the name of the first thing that differs. Follows no pointer that has not been
  // compared.
  const char *(*probe)(PyObject *tensor, const Facts *want);

  int (*is_tensor)(PyObject *o);

  // Fills t, except key and alloc, and returns a reference. nullptr: the Python error is set. See
  // read_tensor in tensor.h.
  void *(*read)(PyObject *o, Ask *ask, fs_tensor *t);
  // The same, for one int64 on a GPU or on the CPU, for writing.
  void *(*read_int64)(PyObject *o, const char *call, const char *name,
                      fs_tensor *t);
  // The index of the GPU that a tensor is on, or -1: it is on no GPU.
  int (*gpu_of)(PyObject *tensor);
  // Reports whether the memory of a CPU tensor is pinned; -1: the Python error is set.
  int (*is_pinned)(PyObject *tensor);
  // The size of the first dimension of a tensor, or -1: it has none.
  int64_t (*rows)(PyObject *tensor);
  // The ctx that adopt() was given together with this free, for the memory of a tensor; nullptr:
  // the memory is not from adopt().
  void *(*adopted)(PyObject *tensor, void (*free)(void *));

  // Storages. share() returns a new reference. drop() takes one; thaw: torch may resize it again.
  void (*share)(void *storage);
  void (*drop)(void *storage, int thaw);
  const void *(*start)(void *storage);
  void (*extend)(void *storage, size_t bytes); // up to these bytes
  // A weak reference keeps the address of a storage from being used again, not its memory.
  void (*weak)(void *storage);
  void (*drop_weak)(void *storage);
  int (*expired)(void *storage);

  // A reference to a new storage over memory of the CPU (device -1) or a GPU. free(ctx) is called
  // once, from any thread, when the storage is gone; ctx nullptr: nothing is called. nullptr:
  // there is no memory for it.
  void *(*adopt)(void *data, size_t bytes, int device, void *ctx,
                 void (*free)(void *));
  // A new contiguous tensor from the start of a storage; nullptr: the Python error is set.
  PyObject *(*make_tensor)(void *storage, uint64_t dtype, const int64_t *dims,
                           size_t ndim);
  PyObject *(*make_bytes)(void *storage); // of uint8, over all of it

  // Bytes of an element; 0: no tensor can have this dtype.
  size_t (*dtype_bytes)(uint64_t dtype);
  // "torch.float32", cut to cap bytes with the final zero.
  void (*dtype_name)(uint64_t dtype, char *text, size_t cap);

  // GPUs. These do not need the GIL. They return 0, or -1: error() says why, in this thread.
  int (*current_gpu)(int *device);
  int (*enter)(int device, int *before); // makes it torch's current GPU
  int (*leave)(int before);
  int (*stream)(int device,
                void **handle); // the native handle of the current stream
  const char *(*error)();
};

} // namespace fserver

// The only symbol of an adapter. nullptr: the host belongs to another adapter.
extern "C" const fserver::Torch *fserver_adapter(const fserver::Host *host);
