// Python arguments into C values, with errors that name them.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

#include "error.h"

namespace fserver {

// An array whose first N elements need no heap. For plain values.
template <class T, size_t N> class Array {
  static_assert(std::is_trivially_copyable_v<T>);

public:
  explicit Array(size_t n) : data_(n <= N ? inline_ : new T[n]) {}
  ~Array() {
    if (data_ != inline_)
      delete[] data_;
  }
  Array(const Array &) = delete;
  Array &operator=(const Array &) = delete;

  T &operator[](size_t i) { return data_[i]; }
  T *data() { return data_; }

private:
  T inline_[N];
  T *data_;
};

// A reference to a Python object.
class Ref {
public:
  Ref() = default;
  static Ref steal(PyObject *o) { // takes over a new reference, or the error
    if (!o)
      throw Raised{};
    return Ref(o);
  }
  static Ref borrow(PyObject *o) { return Ref(Py_NewRef(o)); }
  Ref(Ref &&o) noexcept : o_(o.o_) { o.o_ = nullptr; }
  Ref &operator=(Ref &&o) noexcept {
    PyObject *old = o_;
    o_ = o.o_;
    o.o_ = nullptr;
    Py_XDECREF(old);
    return *this;
  }
  ~Ref() { Py_XDECREF(o_); }

  PyObject *get() const { return o_; }
  PyObject *release() {
    PyObject *o = o_;
    o_ = nullptr;
    return o;
  }

private:
  explicit Ref(PyObject *o) : o_(o) {}
  PyObject *o_ = nullptr;
};

// Python objects that are kept for the time of a call.
class Pins {
public:
  explicit Pins(size_t most) : objects_(most) {}
  ~Pins() {
    while (n_ > 0)
      Py_DECREF(objects_[--n_]);
  }
  PyObject *add(PyObject *o) { return objects_[n_++] = Py_NewRef(o); }

private:
  Array<PyObject *, 16> objects_;
  size_t n_ = 0;
};

// Names an argument in errors: "push_pull: push_keys[2]".
struct Arg {
  const char *call;
  const char *name;
};

// The items of a Python sequence. They are borrowed, and other Python code may
// run while they are in use and change the list: at() looks at the size each
// time, and an item that is used beyond the next call belongs into Pins.
class Items {
public:
  // what: "tensors" or "ints", for the error.
  Items(PyObject *o, Arg arg, const char *what);

  size_t size() const {
    return static_cast<size_t>(PySequence_Fast_GET_SIZE(fast_.get()));
  }
  PyObject *at(size_t i) const;

private:
  Ref fast_;
  Arg arg_;
};

// An int of 0 to 2^64-1, or what has __index__, but no bool. i < 0: the argument is no
// sequence.
uint64_t read_u64(PyObject *o, Arg arg, Py_ssize_t i = -1);

int32_t read_rank(PyObject *o, Arg arg, Py_ssize_t i);

// True, False, 1 or 0.
bool read_flag(PyObject *o, Arg arg);

// Milliseconds, an int or a float, 0 or more, as nanoseconds.
int64_t read_ms(PyObject *o, Arg arg);

// Puts the arguments of a METH_FASTCALL | METH_KEYWORDS call into out, in the
// order of names; what is not given is nullptr. The first `required` names must
// be given.
void bind_args(const char *call, const char *const *names, size_t n,
               size_t required, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames, PyObject **out);

} // namespace fserver
