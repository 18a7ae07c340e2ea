// Helpers of the files that register the module's classes and functions. Each of these files
// includes <pybind11/stl.h> itself: tools/builder.py looks for a line that includes pybind11,
// and compiles such a file again when the version of pybind11 changes.
#pragma once

// pybind11 keeps its types and exceptions for each compiler's name. With a name of its own the
// extension shares none with torch, which may have another libstdc++ and another pybind11.
#define PYBIND11_COMPILER_TYPE "_fserver"
#include <pybind11/pybind11.h>

#include <exception>
#include <new>

#include "error.h"

namespace py = pybind11;

namespace fserver {

// A method on the hot path. Costs 45 ns a call where pybind11's own dispatch
// costs 170, or 390 with a keyword argument; a round trip makes four.
using FastCall = PyObject *(*)(PyObject *, PyObject *const *, Py_ssize_t,
                               PyObject *);

// What f gives, or nullptr with the Python error set.
template <class F> PyObject *guarded(F &&f) {
  try {
    return f();
  } catch (const Raised &) {
  } catch (const std::bad_alloc &) {
    PyErr_NoMemory();
  } catch (const std::exception &e) {
    try {
      raise(Kind::kError, "%s", e.what());
    } catch (const Raised &) {
    }
  }
  return nullptr;
}

// Checked by the method descriptor: self is an instance of the class.
template <class T> T &self_as(PyObject *self) {
  return py::handle(self).cast<T &>();
}

inline bool truth(PyObject *o) {
  const int yes = PyObject_IsTrue(o);
  if (yes < 0)
    throw Raised{};
  return yes == 1;
}

inline void add_fast(py::handle cls, const char *name, FastCall f,
                     const char *doc) {
  // The type keeps a pointer to the definition: it lives as long as the module.
  auto *def = new PyMethodDef{
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f)),
      METH_FASTCALL | METH_KEYWORDS, doc};
  cls.attr(name) = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject *>(cls.ptr()), def));
}

// Registers the classes and functions that stream channels use (lane_bind.cc).
void define_lanes(py::module_ &m);

} // namespace fserver
