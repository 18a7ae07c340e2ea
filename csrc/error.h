// The exceptions of fserver.errors, raised from C++.
#pragma once

#include <cstdint>

namespace fserver {

// Thrown when a Python error is set; the binding returns it to Python. It
// carries nothing, so that it can cross C++ frames that know no Python.
struct Raised {};

enum class Kind { kError, kTimeout, kPeerLost, kConfig, kShape, kClosed };

// Looks up the classes. Called once, when the module is loaded.
void load_errors();

// Sets the Python error and throws Raised. Needs the GIL.
[[noreturn]] void raise(Kind kind, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// The same with the thread's last error of the engine; rc is what the call
// returned.
[[noreturn]] void raise_engine(const char *call, int rc);

inline void check(const char *call, int rc) {
  if (rc < 0)
    raise_engine(call, rc);
}

} // namespace fserver
