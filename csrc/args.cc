#include "args.h"

#include <cmath>
#include <cstdio>

namespace fserver {
namespace {

// "push_keys" or "push_keys[2]".
struct Name {
  Name(Arg arg, Py_ssize_t i) {
    if (i < 0)
      snprintf(text, sizeof text, "%s", arg.name);
    else
      snprintf(text, sizeof text, "%s[%zd]", arg.name, i);
  }
  char text[64];
};

// repr(o) for an error, cut short.
struct Repr {
  explicit Repr(PyObject *o) {
    snprintf(text, sizeof text, "%s", Py_TYPE(o)->tp_name);
    Ref r = Ref::steal(PyObject_Repr(o));
    if (const char *s = PyUnicode_AsUTF8(r.get()))
      snprintf(text, sizeof text, "%.80s", s);
    else
      PyErr_Clear();
  }
  char text[128];
};

} // namespace

Items::Items(PyObject *o, Arg arg, const char *what) : arg_(arg) {
  if (PyList_CheckExact(o) || PyTuple_CheckExact(o)) {
    fast_ = Ref::borrow(o);
    return;
  }
  // A torch.Tensor has the methods, but is no sequence to PySequence_Check.
  const bool sequence = PySequence_Check(o)
                            ? !PyUnicode_Check(o) && !PyBytes_Check(o)
                            : !PyDict_Check(o) &&
                                  PyObject_HasAttrString(o, "__len__") &&
                                  PyObject_HasAttrString(o, "__getitem__");
  if (!sequence)
    raise(Kind::kConfig, "%s: %s is %s, want a sequence of %s: pass [x]",
          arg.call, arg.name, Repr(o).text, what);
  fast_ = Ref::steal(PySequence_Fast(o, "not a sequence"));
}

PyObject *Items::at(size_t i) const {
  if (i >= size())
    raise(Kind::kConfig,
          "%s: %s became shorter during the call (do not change it before the "
          "call returns)",
          arg_.call, arg_.name);
  return PySequence_Fast_GET_ITEM(fast_.get(), static_cast<Py_ssize_t>(i));
}

uint64_t read_u64(PyObject *o, Arg arg, Py_ssize_t i) {
  Ref index;
  if (!PyLong_Check(o) || PyBool_Check(o)) {
    if (!PyIndex_Check(o) || PyBool_Check(o))
      raise(Kind::kConfig, "%s: %s is %s, want an int", arg.call,
            Name(arg, i).text, Repr(o).text);
    index = Ref::steal(PyNumber_Index(o));
    o = index.get();
  }
  uint64_t v = PyLong_AsUnsignedLongLong(o);
  if (v == UINT64_MAX && PyErr_Occurred()) {
    PyErr_Clear();
    raise(Kind::kConfig, "%s: %s is %s, want an int from 0 to 2**64-1",
          arg.call, Name(arg, i).text, Repr(o).text);
  }
  return v;
}

int32_t read_rank(PyObject *o, Arg arg, Py_ssize_t i) {
  uint64_t v = read_u64(o, arg, i);
  if (v > INT32_MAX)
    raise(Kind::kConfig, "%s: %s is %llu, want a rank from 0 to 2**31-1",
          arg.call, Name(arg, i).text, static_cast<unsigned long long>(v));
  return static_cast<int32_t>(v);
}

bool read_flag(PyObject *o, Arg arg) {
  if (PyBool_Check(o))
    return o == Py_True;
  if (PyIndex_Check(o)) { // those of numpy and torch, too
    const uint64_t v = read_u64(o, arg);
    if (v <= 1)
      return v != 0;
  }
  raise(Kind::kConfig, "%s: %s is %s, want True or False", arg.call, arg.name,
        Repr(o).text);
}

int64_t read_ms(PyObject *o, Arg arg) {
  double ms = PyFloat_AsDouble(o);
  if (PyErr_Occurred()) {
    PyErr_Clear();
    ms = NAN;
  }
  if (!(ms >= 0))
    raise(Kind::kConfig,
          "%s: %s is %s, want a number of milliseconds, 0 or more", arg.call,
          arg.name, Repr(o).text);
  constexpr double kMost = 1e12; // 31 years; what is more is the same
  return static_cast<int64_t>((ms < kMost ? ms : kMost) * 1e6);
}

void bind_args(const char *call, const char *const *names, size_t n,
               size_t required, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames, PyObject **out) {
  size_t given = static_cast<size_t>(nargs);
  if (given > n) {
    PyErr_Format(PyExc_TypeError,
                 "%s() takes at most %zu arguments (%zu given)", call, n,
                 given);
    throw Raised{};
  }
  for (size_t i = 0; i < n; i++)
    out[i] = i < given ? args[i] : nullptr;
  Py_ssize_t nkw = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t k = 0; k < nkw; k++) {
    PyObject *name = PyTuple_GET_ITEM(kwnames, k);
    size_t i = 0;
    while (i < n && PyUnicode_CompareWithASCIIString(name, names[i]) != 0)
      i++;
    if (i == n || out[i]) {
      PyErr_Format(PyExc_TypeError, "%s() got %s argument '%U'", call,
                   i == n ? "an unexpected" : "multiple values for", name);
      throw Raised{};
    }
    out[i] = args[nargs + k];
  }
  for (size_t i = 0; i < required; i++) {
    if (!out[i]) {
      PyErr_Format(PyExc_TypeError, "%s() is missing the argument '%s'", call,
                   names[i]);
      throw Raised{};
    }
  }
}

} // namespace fserver
