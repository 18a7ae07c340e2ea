#include "tensor.h"

#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "driver.h"
#include "join.h"
#include "process.h"

namespace fserver {
namespace {

// The Python error that the adapter has set.
template <class T> T *raised(T *p) {
  if (!p)
    throw Raised{};
  return p;
}

// For calls without the GIL, in which no Python error can be set.
void check_torch(int rc) {
  if (rc < 0)
    throw std::runtime_error(torch.error());
}

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

Memory::Memory(void *storage, bool first) : Memory(storage) {
  if (first)
    fixed.first(storage);
  fixed_ = first || fixed.more(storage);
}

void Memory::drop() { torch.drop(storage_, fixed_ && fixed.less(storage_)); }

Memory Memory::share() const {
  if (storage_)
    torch.share(storage_);
  return Memory(storage_);
}

Memory Memory::again() const {
  Memory m = share();
  m.fixed_ = fixed_ && fixed.more(storage_);
  return m;
}

WeakMemory::WeakMemory(const Memory &m) : storage_(m.get()) {
  torch.weak(storage_);
}

WeakMemory::~WeakMemory() {
  if (storage_)
    torch.drop_weak(storage_);
}

bool WeakMemory::expired() const { return torch.expired(storage_) != 0; }

const void *start_of(const Memory &m) { return torch.start(m.get()); }

bool is_tensor(PyObject *o) { return torch.is_tensor(o) != 0; }

Items tensor_items(PyObject *o, Arg arg) {
  if (!PyList_CheckExact(o) && is_tensor(o))
    raise(Kind::kConfig,
          "%s: %s is a tensor, want a list of tensors: pass [%s]", arg.call,
          arg.name, arg.name);
  return Items(o, arg, "tensors");
}

Memory read_tensor(PyObject *o, Arg arg, Py_ssize_t i, Access access,
                   int device, fs_tensor *t) {
  Ask ask{arg.call,
          arg.name,
          i,
          device,
          access == Access::kWrite,
          access != Access::kLook,
          false};
  void *storage = raised(torch.read(o, &ask, t));
  return ask.fix ? Memory(storage, ask.fixed) : Memory(storage);
}

void InUse::add(Memory m) {
  const void *start = start_of(m);
  places_.push_back({std::move(m), start});
}

void InUse::check(const char *call, const char *remedy) const {
  for (const Place &p : places_)
    if (start_of(p.memory) != p.start)
      raise(Kind::kConfig,
            "%s: a tensor of the channel has lost its memory (by "
            "untyped_storage().resize_ or set_): keep the memory while the "
            "channel is open, or %s",
            call, remedy);
}

Memory read_pinned(PyObject *o, Arg arg, fs_tensor *t) {
  const int gpu = is_tensor(o) ? torch.gpu_of(o) : -1;
  if (gpu >= 0)
    raise(Kind::kConfig,
          "%s: %s is on cuda:%d, want a CPU tensor in pinned memory "
          "(pin_memory())",
          arg.call, arg.name, gpu);
  return read_tensor(o, arg, -1, Access::kLook, -1, t);
}

void *native_stream(int device) {
  void *handle = nullptr;
  check_torch(torch.stream(device, &handle));
  return handle;
}

bool current_stream(int device, uint64_t *stream) {
  const auto s = static_cast<cs_stream>(native_stream(device));
  *stream = reinterpret_cast<uint64_t>(s);
  return !capturing(s);
}

void refuse_captured(const char *call, int device) {
  raise(
      Kind::kConfig,
      "%s: the current stream of cuda:%d is being captured into a CUDA graph, "
      "but this call cannot be captured: make it outside of the capture",
      call, device);
}

bool Behind::find() {
  if (!look_)
    return true;
  // A query would spoil a capture.
  if (!current_stream(device_, &stream_)) {
    captured_ = on_gpu_;
    return !captured_;
  }
  waits_ = on_gpu_;
  if (!waits_) {
    const OnDevice guard(device_);
    const Relaxed relaxed;
    waits_ = cs_cu.StreamQuery(reinterpret_cast<cs_stream>(stream_)) ==
             CS_CU_NOT_READY;
  }
  return true;
}

void Behind::refuse(const char *call) const {
  if (captured_)
    refuse_captured(call, device_);
}

OnDevice::OnDevice(int device) : device_(device) {
  check_torch(torch.enter(device, &before_));
  enter_gpu(
      device); // torch does nothing where the device is the thread's already
}

OnDevice::~OnDevice() {
  if (before_ != device_)
    torch.leave(before_);
}

uint64_t OnDevice::stream() const {
  return reinterpret_cast<uint64_t>(native_stream(device_));
}

int current_gpu() {
  int device = 0;
  check_torch(torch.current_gpu(&device));
  return device;
}

int64_t *read_word(PyObject *o, Arg arg) {
  fs_tensor t;
  const Memory memory(raised(torch.read_int64(o, arg.call, arg.name, &t)));
  if (t.device >= 0)
    raise(Kind::kConfig,
          "%s: %s is on a GPU, want a CPU tensor: pass the tensor that "
          "pin_memory() returned",
          arg.call, arg.name);
  return static_cast<int64_t *>(t.data);
}

Counter read_counter(PyObject *o, Arg arg) {
  fs_tensor t;
  Memory memory(raised(torch.read_int64(o, arg.call, arg.name, &t)));
  if (t.device < 0) {
    const int pinned = torch.is_pinned(o);
    if (pinned < 0)
      throw Raised{};
    if (!pinned)
      raise(Kind::kConfig,
            "%s: %s is on the CPU but not pinned: pass %s.pin_memory()",
            arg.call, arg.name, arg.name);
  }
  return {reinterpret_cast<uint64_t>(t.data), t.device, std::move(memory)};
}

void *adopted(PyObject *tensor, void (*free)(void *)) {
  return torch.adopted(tensor, free);
}

int64_t rows_of(PyObject *o, Arg arg, Py_ssize_t i) {
  if (!is_tensor(o))
    raise(Kind::kConfig,
          "%s: %s[%zd] is of type %s, want a torch.Tensor, or a list that "
          "begins with one",
          arg.call, arg.name, i, Py_TYPE(o)->tp_name);
  const int64_t rows = torch.rows(o);
  if (rows < 0)
    raise(Kind::kShape,
          "%s: %s[%zd] has no dimensions, want a tensor with one row for each "
          "row of the answer",
          arg.call, arg.name, i);
  return rows;
}

size_t dtype_bytes(uint64_t dtype) { return torch.dtype_bytes(dtype); }

std::string dtype_name(uint64_t dtype) {
  if (!dtype_bytes(dtype))
    return "type " + std::to_string(dtype);
  char text[64];
  torch.dtype_name(dtype, text, sizeof text);
  return text;
}

Memory adopt(void *data, size_t bytes, int device, void *ctx,
             void (*free)(void *)) {
  void *storage = torch.adopt(data, bytes, device, ctx, free);
  if (!storage)
    throw std::bad_alloc();
  return Memory(storage);
}

Memory nothing(int device) {
  return adopt(nullptr, 0, device, nullptr, nullptr);
}

void extend(const Memory &m, size_t bytes) { torch.extend(m.get(), bytes); }

PyObject *make_tensor(const Memory &m, uint64_t dtype, const int64_t *dims,
                      size_t ndim) {
  return raised(torch.make_tensor(m.get(), dtype, dims, ndim));
}

PyObject *make_bytes(const Memory &m) {
  return raised(torch.make_bytes(m.get()));
}

} // namespace fserver
