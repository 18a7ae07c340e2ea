#include "error.h"

#include <Python.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

#include "fserver.h"
#include "tensor.h"

namespace fserver {
namespace {

constexpr int kKinds = 8;
const char *const kNames[kKinds] = {
    "Error",      "TimeoutError", "PeerLostError", "ConfigError",
    "ShapeError", "ClosedError",  "LimitError",    "RefusedError"};
PyObject *classes[kKinds]; // never freed: errors are raised until the very end

PyObject *of(Kind kind) { return classes[static_cast<int>(kind)]; }

Kind kind_of(int code) {
  switch (-code) {
  case EINVAL:
    return Kind::kConfig;
  case EMSGSIZE:
    return Kind::kShape;
  case EXFULL:
    return Kind::kLimit;
  case ETIMEDOUT:
    return Kind::kTimeout;
  case ECONNRESET:
    return Kind::kPeerLost;
  case EREMOTEIO:
    return Kind::kRefused;
  case ESHUTDOWN:
  case EBADF:
    return Kind::kClosed;
  default:
    return Kind::kError;
  }
}

const char *role_name(int role) {
  switch (role) {
  case FS_ROLE_SCHEDULER:
    return "scheduler";
  case FS_ROLE_WORKER:
    return "worker";
  case FS_ROLE_SERVER:
    return "server";
  default:
    return "";
  }
}

// Text of an unknown encoding (a peer may have chosen some of it).
PyObject *decode(const char *s) {
  return PyUnicode_DecodeUTF8(s, static_cast<Py_ssize_t>(strlen(s)), "replace");
}

} // namespace

void load_errors() {
  PyObject *module = PyImport_ImportModule("fserver.errors");
  if (!module)
    throw Raised{};
  for (int i = 0; i < kKinds; i++) {
    classes[i] = PyObject_GetAttrString(module, kNames[i]);
    if (!classes[i]) {
      Py_DECREF(module);
      throw Raised{};
    }
  }
  Py_DECREF(module);
}

void raise(Kind kind, const char *format, ...) {
  char text[2048];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (PyObject *message = decode(text)) {
    PyErr_SetObject(of(kind), message);
    Py_DECREF(message);
  }
  throw Raised{};
}

EngineError::EngineError(const char *call, int rc) {
  if (fs_errmsg(&error_) < 0) {
    error_ = {};
    error_.code = rc;
    error_.got = error_.want = FS_ANY;
    snprintf(error_.text, sizeof error_.text, "%s: %s", call, strerror(-rc));
  }
}

void EngineError::raise() const {
  const fs_error &e = error_;
  const Kind kind = kind_of(e.code);
  if (e.want != FS_ANY) {
    const std::string want = dtype_name(e.want);
    fserver::raise(kind, "%s: %s for %s (pass .to(%s))", e.text,
                   dtype_name(e.got).c_str(), want.c_str(), want.c_str());
  }
  if (kind != Kind::kPeerLost && kind != Kind::kRefused)
    fserver::raise(kind, "%s", e.text);
  PyObject *message = decode(e.text), *address = decode(e.address),
           *reason = decode(e.reason);
  if (message && address && reason) {
    PyObject *x =
        kind == Kind::kRefused
            ? PyObject_CallFunction(of(kind), "OiO", message, e.rank, reason)
            : PyObject_CallFunction(of(kind), "OsiOO", message,
                                    role_name(e.role), e.rank, address, reason);
    if (x) {
      PyErr_SetObject(of(kind), x);
      Py_DECREF(x);
    }
  }
  Py_XDECREF(message);
  Py_XDECREF(address);
  Py_XDECREF(reason);
  throw Raised{};
}

} // namespace fserver
