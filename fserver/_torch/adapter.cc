// The only source that includes torch. See adapter.h.
#include "adapter.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <cstdio>
#include <cstring>
#include <string>

namespace fserver {
namespace {

using Storage = c10::intrusive_ptr<c10::StorageImpl>;
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

const Host *host;

// Thrown when the Python error is set. It does not leave this file.
struct Raised {};

c10::StorageImpl *impl(void *storage) {
  return static_cast<c10::StorageImpl *>(storage);
}

const at::Tensor &unpack(PyObject *o) { return THPVariable_Unpack(o); }

// Calls f, which returns a pointer, with the GIL. nullptr: the Python error is set.
template <class F> auto raising(F &&f) noexcept -> decltype(f()) {
  try {
    return f();
  } catch (const Raised &) {
  } catch (const std::bad_alloc &) {
    PyErr_NoMemory();
  } catch (const c10::Error &e) {
    host->raise(Fault::kError, e.what_without_backtrace());
  } catch (const std::exception &e) {
    host->raise(Fault::kError, e.what());
  }
  return nullptr;
}

thread_local char last[512]; // what error() returns

// Calls f without the GIL. Returns 0, or -1 with the text in `last`.
template <class F> int trying(F &&f) noexcept {
  try {
    f();
    return 0;
  } catch (const c10::Error &e) {
    snprintf(last, sizeof last, "%s", e.what_without_backtrace());
  } catch (const std::exception &e) {
    snprintf(last, sizeof last, "%s", e.what());
  }
  return -1;
}

std::string text_of(c10::IntArrayRef v) {
  std::string s = "[";
  for (size_t i = 0; i < v.size() && i < 16; i++)
    s += (i ? ", " : "") + std::to_string(v[i]);
  return s + (v.size() > 16 ? ", ...]" : "]");
}

// An argument, for errors: "pull_tensors[3]" of push_pull.
struct Arg {
  const char *call;
  const char *name;
  Py_ssize_t item;

  std::string text() const {
    return item < 0 ? name
                    : std::string(name) + "[" + std::to_string(item) + "]";
  }
};

[[noreturn]] void refuse(Arg arg, Fault fault, const std::string &text) {
  host->raise(fault,
              (std::string(arg.call) + ": " + arg.text() + " " + text).c_str());
  throw Raised{};
}

[[noreturn]] void refuse_type(Arg arg, PyObject *o) {
  refuse(arg, Fault::kConfig,
         std::string("is of type ") + Py_TYPE(o)->tp_name +
             ", want a torch.Tensor");
}

c10::Device place(int device) {
  return device < 0
             ? c10::Device(c10::kCPU)
             : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
}

// Whether the memory of a tensor is still all there.
bool inside(const at::Tensor &t) {
  const size_t end = (static_cast<size_t>(t.storage_offset()) +
                      static_cast<size_t>(t.numel())) *
                     t.itemsize();
  return t.numel() == 0 || t.storage().nbytes() >= end;
}

// Says what is wrong with a tensor that is not plain memory.
[[noreturn]] void explain(const at::Tensor &t, Arg arg, int device) {
  const std::string name = arg.text();
  if (!t.defined())
    refuse(arg, Fault::kConfig, "is undefined: pass a tensor");
  if (t.is_meta())
    refuse(arg, Fault::kConfig,
           "is on device meta and has no memory: pass a CPU tensor");
  if (!t.device().is_cpu() && device < 0)
    refuse(arg, Fault::kConfig,
           "is on device " + t.device().str() +
               ", and this node takes CPU tensors only: pass " + name +
               ".cpu(), or set STEPMESH_BACKEND=GPU");
  if (!t.device().is_cpu() && t.device() != place(device))
    refuse(arg, Fault::kConfig,
           "is on device " + t.device().str() + ", but this node uses " +
               place(device).str() + " (STEPMESH_GPU): pass " + name +
               ".to(\"" + place(device).str() + "\")");
  if (t.layout() != c10::kStrided)
    refuse(arg, Fault::kConfig,
           std::string(t.is_sparse() ? "has layout sparse"
                                     : "has a layout that is not strided") +
               ": pass " + name + ".to_dense()");
  if (t.is_quantized())
    refuse(arg, Fault::kConfig,
           "is quantized: pass " + name +
               ".int_repr(), and send the scale and zero point yourself");
  if (!t.is_contiguous())
    refuse(arg, Fault::kShape,
           "of shape " + text_of(t.sizes()) + " and strides " +
               text_of(t.strides()) +
               " is not contiguous: make it "
               "contiguous first (.contiguous())");
  if (t.is_conj())
    refuse(arg, Fault::kConfig,
           "is a conjugate view: pass " + name + ".resolve_conj()");
  if (t.is_neg())
    refuse(arg, Fault::kConfig,
           "is a negated view: pass " + name + ".resolve_neg()");
  if (t.has_storage() && !inside(t))
    refuse(arg, Fault::kConfig,
           "has lost its memory (untyped_storage().resize_): pass a tensor "
           "whose storage holds all its elements");
  refuse(arg, Fault::kConfig,
         "has no memory (it is a fake, functional or wrapped tensor): pass a "
         "plain tensor");
}

bool plain(const at::Tensor &t, int device) {
  return t.defined() && (t.device().is_cpu() || t.device() == place(device)) &&
         t.layout() == c10::kStrided && !t.is_quantized() &&
         t.is_contiguous() && !t.is_conj() && !t.is_neg() && t.has_storage();
}

void *read_plain(const at::Tensor &t, Arg arg, bool write, int device,
                 fs_tensor *out) {
  if (!plain(t, device))
    explain(t, arg, device);
  c10::TensorImpl *ti = t.unsafeGetTensorImpl();
  const c10::Storage &storage = ti->unsafe_storage();
  size_t bytes = static_cast<size_t>(ti->numel()) * ti->itemsize();
  if (write) {
    if (t.requires_grad() && t.is_leaf() && c10::GradMode::is_enabled())
      refuse(arg, Fault::kConfig,
             "is a leaf that requires grad, but the call writes to it: "
             "pass " +
                 arg.text() + ".detach(), or use torch.no_grad()");
    out->data = bytes ? ti->mutable_data() : nullptr;
    out->base = storage.mutable_data();
    if (!ti->is_inference())
      ti->bump_version();
  } else {
    out->data = bytes ? const_cast<void *>(ti->data()) : nullptr;
    out->base = const_cast<void *>(storage.data());
  }
  if (bytes && (!out->data || !inside(t)))
    explain(t, arg, device);
  if (!bytes)
    out->data = out->base;
  out->bytes = bytes;
  out->key = 0;
  out->base_bytes = storage.nbytes();
  out->alloc = 0;
  out->dims = ti->sizes().data();
  out->ndim = static_cast<uint32_t>(ti->dim());
  out->device = t.is_cpu() ? -1 : device;
  out->dtype = static_cast<uint8_t>(t.scalar_type());
  return Storage::reclaim_copy(storage.unsafeGetStorageImpl()).release();
}

void *read_checked(const at::Tensor &t, Arg arg, bool write, int device,
                   fs_tensor *out) {
  try {
    return read_plain(t, arg, write, device, out);
  } catch (const c10::Error &e) {
    refuse(arg, Fault::kConfig,
           std::string("cannot be used: ") + e.what_without_backtrace());
  }
}

void *read(PyObject *o, Ask *ask, fs_tensor *t) {
  return raising([&] {
    const Arg arg{ask->call, ask->name, ask->item};
    if (!THPVariable_Check(o))
      refuse_type(arg, o);
    void *storage = read_checked(unpack(o), arg, ask->write, ask->device, t);
    ask->fixed = ask->fix && impl(storage)->resizable();
    if (ask->fixed)
      impl(storage)->set_resizable(false);
    return storage;
  });
}

void *read_int64(PyObject *o, const char *call, const char *name,
                 fs_tensor *one) {
  return raising([&] {
    const Arg arg{call, name, -1};
    if (!THPVariable_Check(o))
      refuse_type(arg, o);
    const at::Tensor &t = unpack(o);
    if (!t.defined() || t.scalar_type() != c10::ScalarType::Long ||
        t.numel() != 1 || !(t.is_cuda() || t.is_cpu()))
      refuse(arg, Fault::kConfig,
             (t.defined() ? std::string("is ") +
                                c10::toString(t.scalar_type()) + " of shape " +
                                text_of(t.sizes()) + " on " + t.device().str()
                          : std::string("is undefined")) +
                 ": want one int64 (torch.zeros(1, dtype=torch.int64)) on a "
                 "GPU or the CPU");
    return read_checked(t, arg, true, t.is_cpu() ? -1 : t.device().index(),
                        one);
  });
}

int is_tensor(PyObject *o) { return THPVariable_Check(o); }

int gpu_of(PyObject *o) {
  const at::Tensor &t = unpack(o);
  return t.defined() && t.is_cuda() ? t.device().index() : -1;
}

int is_pinned(PyObject *o) {
  struct Call {
    at::Tensor tensor;
    bool pinned;
    int rc;
  } call{unpack(o), false, 0};
  host->unlocked(
      [](void *ctx) {
        Call &c = *static_cast<Call *>(ctx);
        c.rc = trying([&] { c.pinned = c.tensor.is_pinned(); });
      },
      &call);
  if (call.rc < 0)
    host->raise(Fault::kError, last);
  return call.rc < 0 ? -1 : call.pinned;
}

int64_t rows(PyObject *o) {
  const at::Tensor &t = unpack(o);
  return t.dim() ? t.size(0) : -1;
}

void *adopted(PyObject *o, void (*free)(void *)) {
  const at::DataPtr &p = unpack(o).storage().unsafeGetStorageImpl()->data_ptr();
  return p.get_deleter() == free ? p.get_context() : nullptr;
}

void share(void *storage) { Storage::reclaim_copy(impl(storage)).release(); }

void drop(void *storage, int thaw) {
  // share_memory_() has left one that torch cannot resize any more.
  if (thaw && impl(storage)->allocator())
    impl(storage)->set_resizable(true);
  Storage::reclaim(impl(storage));
}

const void *start(void *storage) { return impl(storage)->data(); }

void extend(void *storage, size_t bytes) {
  if (impl(storage)->nbytes() < bytes)
    impl(storage)->set_nbytes(bytes);
}

void weak(void *storage) {
  Weak(Storage::reclaim_copy(impl(storage))).release();
}

void drop_weak(void *storage) { Weak::reclaim(impl(storage)); }

int expired(void *storage) {
  Weak w = Weak::reclaim(impl(storage));
  const bool gone = w.expired();
  w.release();
  return gone;
}

void *adopt(void *data, size_t bytes, int device, void *ctx,
            void (*free)(void *)) {
  try {
    at::DataPtr p = ctx ? at::DataPtr(data, ctx, free, place(device))
                        : at::DataPtr(data, place(device));
    return c10::make_intrusive<c10::StorageImpl>(
               c10::StorageImpl::use_byte_size_t(), bytes, std::move(p),
               nullptr, false)
        .release();
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

PyObject *make_tensor(void *storage, uint64_t dtype, const int64_t *dims,
                      size_t ndim) {
  return raising([&] {
    const bool cpu = impl(storage)->device().is_cpu();
    at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(Storage::reclaim_copy(impl(storage))),
        c10::DispatchKeySet(cpu ? c10::DispatchKey::CPU
                                : c10::DispatchKey::CUDA),
        c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(dtype)));
    t.unsafeGetTensorImpl()->set_sizes_contiguous({dims, ndim});
    return THPVariable_Wrap(std::move(t));
  });
}

PyObject *make_bytes(void *storage) {
  const auto n = static_cast<int64_t>(impl(storage)->nbytes());
  return make_tensor(storage, static_cast<uint64_t>(c10::ScalarType::Byte), &n,
                     1);
}

size_t dtype_bytes(uint64_t dtype) {
#define FS_SIZE(type, name)                                                    \
  case static_cast<uint64_t>(c10::ScalarType::name):                           \
    return c10::isQIntType(c10::ScalarType::name) ? 0 : sizeof(type);
  switch (dtype) {
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(FS_SIZE)
  default:
    return 0;
  }
#undef FS_SIZE
}

void dtype_name(uint64_t dtype, char *text, size_t cap) {
  // Of another type of string in another version of torch.
  const std::string name(
      c10::getDtypeNames(static_cast<c10::ScalarType>(dtype)).first);
  snprintf(text, cap, "torch.%s", name.c_str());
}

c10::impl::VirtualGuardImpl gpus() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
}

int current_gpu(int *device) {
  return trying([&] { *device = gpus().getDevice().index(); });
}

int enter(int device, int *before) {
  return trying(
      [&] { *before = gpus().exchangeDevice(place(device)).index(); });
}

int leave(int before) {
  return trying([&] { gpus().uncheckedSetDevice(place(before)); });
}

int stream(int device, void **handle) {
  return trying(
      [&] { *handle = gpus().getStream(place(device)).native_handle(); });
}

const char *error() { return last; }

// The order matters: see the comment in adapter.h.
const char *probe(PyObject *o, const Facts *want) {
  const at::Tensor &t = unpack(o);
  const c10::TensorImpl *ti = t.unsafeGetTensorImpl();
  if (ti != want->tensor)
    return "the address of the tensor";
  if (static_cast<size_t>(ti->dim()) != want->ndim ||
      memcmp(ti->sizes().data(), want->sizes, want->ndim * sizeof(int64_t)))
    return "the shape";
  if (memcmp(ti->strides().data(), want->strides, want->ndim * sizeof(int64_t)))
    return "the strides";
  if (ti->storage_offset() != want->offset)
    return "the offset in the storage";
  if (ti->unsafe_storage().unsafeGetStorageImpl() != want->storage)
    return "the address of the storage";
  const c10::StorageImpl *s = ti->unsafe_storage().unsafeGetStorageImpl();
  if (s->data() != want->base || s->nbytes() != want->base_bytes)
    return "the memory of the storage";
  if (ti->itemsize() != want->itemsize || ti->data() != want->data)
    return "the address of the data";
  char dtype[32];
  dtype_name(static_cast<uint64_t>(t.scalar_type()), dtype, sizeof dtype);
  if (strcmp(dtype, want->dtype) != 0)
    return "the dtype";
  if (t.device().str() != want->device)
    return "the device";
  if (!plain(t, -1))
    return "the flags of the tensor";
  // The virtual functions of the device guard, of which every torch has the CPU's.
  const c10::impl::VirtualGuardImpl cpu(c10::DeviceType::CPU);
  if (cpu.type() != c10::DeviceType::CPU || !cpu.getDevice().is_cpu() ||
      cpu.deviceCount() != 1)
    return "the device guard";
  return nullptr;
}

const Torch table{
    FS_ADAPTER,  TORCH_VERSION, probe,       is_tensor,   read,
    read_int64,  gpu_of,        is_pinned,   rows,        adopted,
    share,       drop,          start,       extend,      weak,
    drop_weak,   expired,       adopt,       make_tensor, make_bytes,
    dtype_bytes, dtype_name,    current_gpu, enter,       leave,
    stream,      error,
};

} // namespace
} // namespace fserver

extern "C" __attribute__((visibility("default"))) const fserver::Torch *
fserver_adapter(const fserver::Host *given) {
  if (given->adapter != FS_ADAPTER)
    return nullptr;
  fserver::host = given;
  return &fserver::table;
}
