#include "join.h"

#include <dlfcn.h>

#include <array>

#include "args.h"
#include "driver.h"
#include "error.h"
#include "process.h"

#include "adapter_id.inc" // FS_ADAPTER, made by the build

namespace fserver {

Torch torch;

namespace {

void host_raise(Fault fault, const char *text) {
  const Kind kind = fault == Fault::kConfig  ? Kind::kConfig
                    : fault == Fault::kShape ? Kind::kShape
                                             : Kind::kError;
  try {
    raise(kind, "%s", text);
  } catch (const Raised &) { // the adapter returns the Python error
  }
}

void host_unlocked(void (*f)(void *), void *ctx) {
  unlocked([&] {
    const Relaxed relaxed;
    f(ctx);
    return 0;
  });
}

const Host host{FS_ADAPTER, host_raise, host_unlocked};

// (_cdata, storage's _cdata, data_ptr, storage's data_ptr, its nbytes, offset, itemsize, shape,
// strides, dtype, device), with the last two as text. Raises Raised.
class Given {
public:
  explicit Given(PyObject *tuple) {
    unsigned long long at[5];
    PyObject *shape, *strides;
    if (!PyArg_ParseTuple(tuple, "KKKKKLnO!O!ss", &at[0], &at[1], &at[2],
                          &at[3], &at[4], &facts.offset, &itemsize_,
                          &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                          &facts.dtype, &facts.device))
      throw Raised{};
    facts.tensor = reinterpret_cast<void *>(at[0]);
    facts.storage = reinterpret_cast<void *>(at[1]);
    facts.data = reinterpret_cast<void *>(at[2]);
    facts.base = reinterpret_cast<void *>(at[3]);
    facts.base_bytes = at[4];
    facts.itemsize = static_cast<size_t>(itemsize_);
    facts.ndim = read(shape, sizes_);
    read(strides, strides_);
    facts.sizes = sizes_.data();
    facts.strides = strides_.data();
  }

  Facts facts{};

private:
  using Numbers = std::array<int64_t, 4>;
  static size_t read(PyObject *tuple, Numbers &out) {
    const auto n = static_cast<size_t>(PyTuple_GET_SIZE(tuple));
    if (n > out.size())
      raise(Kind::kError, "join: a probe has at most %zu dimensions",
            out.size());
    for (size_t i = 0; i < n; i++)
      out[i] = PyLong_AsLongLong(
          PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(i)));
    if (PyErr_Occurred())
      throw Raised{};
    return n;
  }

  Py_ssize_t itemsize_ = 0;
  Numbers sizes_{}, strides_{};
};

} // namespace

std::string join(const char *path, PyObject *tensor, PyObject *facts) {
  using Entry = const Torch *(const Host *);
  const Given given(facts);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return dlerror();
  auto *entry = reinterpret_cast<Entry *>(dlsym(library, "fserver_adapter"));
  const Torch *found = entry ? entry(&host) : nullptr;
  if (!found || found->adapter != FS_ADAPTER)
    return "it was built from other sources than fserver._C";
  if (const char *what = found->probe(tensor, &given.facts))
    return std::string("it was compiled for torch ") + found->compiled +
           " and reads " + what + " of a tensor wrongly";
  torch = *found;
  return "";
}

} // namespace fserver
