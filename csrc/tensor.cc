#include "tensor.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <vector>

#include "driver.h"
#include "process.h"

namespace fserver {
namespace {

using Storage = c10::intrusive_ptr<c10::StorageImpl>;
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

c10::StorageImpl *impl(void *storage) {
  return static_cast<c10::StorageImpl *>(storage);
}

std::string text_of(c10::IntArrayRef v) {
  std::string s = "[";
  for (size_t i = 0; i < v.size() && i < 16; i++)
    s += (i ? ", " : "") + std::to_string(v[i]);
  return s + (v.size() > 16 ? ", ...]" : "]");
}

// "pull_tensors[3]".
std::string name_of(Arg arg, Py_ssize_t i) {
  return i < 0 ? arg.name
               : std::string(arg.name) + "[" + std::to_string(i) + "]";
}

[[noreturn]] void refuse(Arg arg, Py_ssize_t i, Kind kind,
                         const std::string &text) {
  raise(kind, "%s: %s %s", arg.call, name_of(arg, i).c_str(), text.c_str());
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
[[noreturn]] void explain(const at::Tensor &t, Arg arg, Py_ssize_t i,
                          int device) {
  std::string name = name_of(arg, i);
  if (!t.defined())
    refuse(arg, i, Kind::kConfig, "is undefined: pass a tensor");
  if (t.is_meta())
    refuse(arg, i, Kind::kConfig,
           "is on device meta and has no memory: pass a CPU tensor");
  if (!t.device().is_cpu() && device < 0)
    refuse(arg, i, Kind::kConfig,
           "is on device " + t.device().str() +
               ", and this node takes CPU tensors only: pass " + name +
               ".cpu(), or set STEPMESH_BACKEND=GPU");
  if (!t.device().is_cpu() && t.device() != place(device))
    refuse(arg, i, Kind::kConfig,
           "is on device " + t.device().str() + ", and this node's is " +
               place(device).str() + " (STEPMESH_GPU): pass " + name +
               ".to(\"" + place(device).str() + "\")");
  if (t.layout() != c10::kStrided)
    refuse(arg, i, Kind::kConfig,
           std::string("has layout ") +
               (t.is_sparse() ? "sparse" : "other than strided") + ": pass " +
               name + ".to_dense()");
  if (t.is_quantized())
    refuse(arg, i, Kind::kConfig,
           "is quantized: pass " + name +
               ".int_repr() and the scale beside it");
  if (!t.is_contiguous())
    refuse(arg, i, Kind::kShape,
           "of shape " + text_of(t.sizes()) + " and strides " +
               text_of(t.strides()) + " is not contiguous: use .contiguous()");
  if (t.is_conj())
    refuse(arg, i, Kind::kConfig,
           "is a conjugate view: pass " + name + ".resolve_conj()");
  if (t.is_neg())
    refuse(arg, i, Kind::kConfig,
           "is a negated view: pass " + name + ".resolve_neg()");
  if (t.has_storage() && !inside(t))
    refuse(
        arg, i, Kind::kConfig,
        "has lost its memory (untyped_storage().resize_): pass a tensor that "
        "keeps it");
  refuse(arg, i, Kind::kConfig,
         "has no memory of its own (fake, functional or wrapped): pass a plain "
         "tensor");
}

bool plain(const at::Tensor &t, int device) {
  return t.defined() && (t.device().is_cpu() || t.device() == place(device)) &&
         t.layout() == c10::kStrided && !t.is_quantized() &&
         t.is_contiguous() && !t.is_conj() && !t.is_neg() && t.has_storage();
}

Memory read(const at::Tensor &t, Arg arg, Py_ssize_t i, Access access,
            int device, fs_tensor *out) {
  if (!plain(t, device))
    explain(t, arg, i, device);
  c10::TensorImpl *ti = t.unsafeGetTensorImpl();
  const c10::Storage &storage = ti->unsafe_storage();
  size_t bytes = static_cast<size_t>(ti->numel()) * ti->itemsize();
  if (access == Access::kWrite) {
    if (t.requires_grad() && t.is_leaf() && c10::GradMode::is_enabled())
      refuse(arg, i, Kind::kConfig,
             "is a leaf that requires grad, and would be written in place: "
             "pass " +
                 name_of(arg, i) + ".detach(), or use torch.no_grad()");
    out->data = bytes ? ti->mutable_data() : nullptr;
    out->base = storage.mutable_data();
    if (!ti->is_inference())
      ti->bump_version();
  } else {
    out->data = bytes ? const_cast<void *>(ti->data()) : nullptr;
    out->base = const_cast<void *>(storage.data());
  }
  if (bytes && (!out->data || !inside(t)))
    explain(t, arg, i, device);
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
  return Memory(
      Storage::reclaim_copy(storage.unsafeGetStorageImpl()).release());
}

} // namespace

namespace {

// How many keep a storage from being resized, of those that could be. A flat
// table, as two entries come and go with every request. Guarded by the GIL.
class Fixed {
public:
  // One more; false: nobody has kept it yet.
  bool more(void *storage) {
    Entry *e = find(storage);
    return e->storage && ++e->count;
  }
  void first(void *storage) {
    if (2 * ++used_ > table_.size())
      grow();
    *find(storage) = {storage, 1};
  }
  // One less; true: that was the last.
  bool less(void *storage) {
    Entry *e = find(storage);
    if (--e->count)
      return false;
    used_--;
    // What would be found no more moves up.
    const size_t mask = table_.size() - 1;
    size_t hole = static_cast<size_t>(e - table_.data());
    for (size_t i = (hole + 1) & mask; table_[i].storage; i = (i + 1) & mask) {
      if (((i - home(table_[i].storage)) & mask) >= ((i - hole) & mask)) {
        table_[hole] = table_[i];
        hole = i;
      }
    }
    table_[hole] = {};
    return true;
  }

private:
  struct Entry {
    void *storage = nullptr;
    uint32_t count = 0;
  };

  size_t home(void *storage) const {
    return reinterpret_cast<uintptr_t>(storage) * 0x9E3779B97F4A7C15u >> 32 &
           (table_.size() - 1);
  }
  // Where it is, or would be.
  Entry *find(void *storage) {
    size_t i = home(storage);
    while (table_[i].storage && table_[i].storage != storage)
      i = (i + 1) & (table_.size() - 1);
    return &table_[i];
  }
  void grow() {
    std::vector<Entry> old(2 * table_.size());
    old.swap(table_);
    for (const Entry &e : old)
      if (e.storage)
        *find(e.storage) = e;
  }

  std::vector<Entry> table_ = std::vector<Entry>(64);
  size_t used_ = 0;
};

Fixed &fixed = *new Fixed; // memory may go after what is static

} // namespace

void Memory::fix() {
  if (!fixed.more(storage_)) {
    if (!impl(storage_)->resizable())
      return;
    impl(storage_)->set_resizable(false);
    fixed.first(storage_);
  }
  fixed_ = true;
}

void Memory::drop() {
  if (fixed_ && fixed.less(storage_))
    impl(storage_)->set_resizable(true);
  Storage::reclaim(impl(storage_));
}

Memory Memory::share() const {
  return Memory(storage_ ? Storage::reclaim_copy(impl(storage_)).release()
                         : nullptr);
}

WeakMemory::WeakMemory(const Memory &m)
    : storage_(Weak(Storage::reclaim_copy(impl(m.get()))).release()) {}

WeakMemory::~WeakMemory() {
  if (storage_)
    Weak::reclaim(impl(storage_));
}

bool WeakMemory::expired() const {
  Weak w = Weak::reclaim(impl(storage_));
  bool gone = w.expired();
  w.release();
  return gone;
}

const void *start_of(const Memory &m) { return impl(m.get())->data(); }

bool is_tensor(PyObject *o) { return THPVariable_Check(o); }

Items tensor_items(PyObject *o, Arg arg) {
  if (!PyList_CheckExact(o) && is_tensor(o))
    raise(Kind::kConfig,
          "%s: %s is a tensor, want a list of tensors: pass [%s]", arg.call,
          arg.name, arg.name);
  return Items(o, arg, "tensors");
}

Memory read_tensor(PyObject *o, Arg arg, Py_ssize_t i, Access access,
                   int device, fs_tensor *t) {
  if (!is_tensor(o))
    refuse(arg, i, Kind::kConfig,
           std::string("is of type ") + Py_TYPE(o)->tp_name +
               ", want a torch.Tensor");
  try {
    return read(THPVariable_Unpack(o), arg, i, access, device, t);
  } catch (const c10::Error &e) {
    refuse(arg, i, Kind::kConfig,
           std::string("cannot be used: ") + e.what_without_backtrace());
  }
}

Memory read_pinned(PyObject *o, Arg arg, fs_tensor *t) {
  if (is_tensor(o) && THPVariable_Unpack(o).is_cuda())
    refuse(arg, -1, Kind::kConfig,
           "is on " + THPVariable_Unpack(o).device().str() +
               ": want one in pinned memory of the host (pin_memory())");
  return read_tensor(o, arg, -1, Access::kRead, -1, t);
}

void *native_stream(int device) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard
      .getStream(c10::Device(c10::DeviceType::CUDA,
                             static_cast<c10::DeviceIndex>(device)))
      .native_handle();
}

bool current_stream(int device, uint64_t *stream) {
  const auto s = static_cast<cs_stream>(native_stream(device));
  *stream = reinterpret_cast<uint64_t>(s);
  return !capturing(s);
}

void refuse_captured(const char *call, int device) {
  raise(Kind::kConfig,
        "%s: the current stream of cuda:%d is being captured into a CUDA "
        "graph, which this call cannot be part of: call it outside",
        call, device);
}

namespace {
c10::impl::VirtualGuardImpl gpus() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
}
} // namespace

OnDevice::OnDevice(int device)
    : device_(device), before_(gpus().exchangeDevice(place(device)).index()) {
  enter_gpu(
      device); // torch does nothing where the device is the thread's already
}

OnDevice::~OnDevice() {
  if (before_ != device_)
    gpus().uncheckedSetDevice(place(before_));
}

uint64_t OnDevice::stream() const {
  return reinterpret_cast<uint64_t>(
      gpus().getStream(place(device_)).native_handle());
}

int current_gpu() { return gpus().getDevice().index(); }

namespace {

Memory one_int64(PyObject *o, Arg arg, fs_tensor *one) {
  if (!is_tensor(o))
    refuse(arg, -1, Kind::kConfig,
           std::string("is of type ") + Py_TYPE(o)->tp_name +
               ", want a torch.Tensor");
  const at::Tensor &t = THPVariable_Unpack(o);
  if (!t.defined() || t.scalar_type() != c10::ScalarType::Long ||
      t.numel() != 1 || !(t.is_cuda() || t.is_cpu()))
    refuse(arg, -1, Kind::kConfig,
           (t.defined() ? std::string("is ") + c10::toString(t.scalar_type()) +
                              " of shape " + text_of(t.sizes()) + " on " +
                              t.device().str()
                        : std::string("is undefined")) +
               ": want one int64 (torch.zeros(1, dtype=torch.int64)) on a GPU "
               "or the CPU");
  return read_tensor(o, arg, -1, Access::kWrite,
                     t.is_cpu() ? -1 : t.device().index(), one);
}

} // namespace

int64_t *read_word(PyObject *o, Arg arg) {
  fs_tensor t;
  one_int64(o, arg, &t);
  if (t.device >= 0)
    refuse(arg, -1, Kind::kConfig,
           "is on a GPU: pass what pin_memory() gave, on the CPU");
  return static_cast<int64_t *>(t.data);
}

Counter read_counter(PyObject *o, Arg arg) {
  fs_tensor t;
  Memory memory = one_int64(o, arg, &t);
  const at::Tensor tensor = THPVariable_Unpack(o);
  if (t.device < 0 && !unlocked([&] {
        const Relaxed relaxed;
        return tensor.is_pinned();
      }))
    refuse(arg, -1, Kind::kConfig,
           "is on the CPU and not pinned: pass " + std::string(arg.name) +
               ".pin_memory()");
  return {reinterpret_cast<uint64_t>(t.data), t.device, std::move(memory)};
}

void *adopted(PyObject *tensor, void (*free)(void *)) {
  const at::DataPtr &p =
      THPVariable_Unpack(tensor).storage().unsafeGetStorageImpl()->data_ptr();
  return p.get_deleter() == free ? p.get_context() : nullptr;
}

int64_t rows_of(PyObject *o, Arg arg, Py_ssize_t i) {
  if (!is_tensor(o))
    refuse(arg, i, Kind::kConfig,
           std::string("is of type ") + Py_TYPE(o)->tp_name +
               ", want a torch.Tensor, or a list that begins with one");
  const at::Tensor &t = THPVariable_Unpack(o);
  if (t.dim() == 0)
    refuse(arg, i, Kind::kShape,
           "has no dimension: want a tensor with as many rows as its handler "
           "gets");
  return t.size(0);
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

std::string dtype_name(uint64_t dtype) {
  if (!dtype_bytes(dtype))
    return "type " + std::to_string(dtype);
  return "torch." +
         std::string(
             c10::getDtypeNames(static_cast<c10::ScalarType>(dtype)).first);
}

Memory adopt(void *data, size_t bytes, int device, void *ctx,
             void (*free)(void *)) {
  return Memory(c10::make_intrusive<c10::StorageImpl>(
                    c10::StorageImpl::use_byte_size_t(), bytes,
                    at::DataPtr(data, ctx, free, place(device)), nullptr, false)
                    .release());
}

Memory nothing(int device) {
  return Memory(c10::make_intrusive<c10::StorageImpl>(
                    c10::StorageImpl::use_byte_size_t(), 0,
                    at::DataPtr(nullptr, place(device)), nullptr, false)
                    .release());
}

void extend(const Memory &m, size_t bytes) {
  c10::StorageImpl *s = impl(m.get());
  if (s->nbytes() < bytes)
    s->set_nbytes(bytes);
}

PyObject *make_tensor(const Memory &m, uint64_t dtype, const int64_t *dims,
                      size_t ndim) {
  const bool cpu = impl(m.get())->device().is_cpu();
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(Storage::reclaim_copy(impl(m.get()))),
      c10::DispatchKeySet(cpu ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA),
      c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(dtype)));
  t.unsafeGetTensorImpl()->set_sizes_contiguous({dims, ndim});
  return Ref::steal(THPVariable_Wrap(std::move(t))).release();
}

PyObject *make_bytes(const Memory &m) {
  const auto n = static_cast<int64_t>(impl(m.get())->nbytes());
  return make_tensor(m, static_cast<uint64_t>(c10::ScalarType::Byte), &n, 1);
}

} // namespace fserver
