// The exceptions of fserver.errors, raised from C++.
#pragma once

#include "fserver.h"

namespace fserver {

// Thrown when a Python error is set; the binding returns it to Python. It
// carries nothing, so that it can cross C++ frames that know no Python.
struct Raised {};

enum class Kind {
  kError,
  kTimeout,
  kPeerLost,
  kConfig,
  kShape,
  kClosed,
  kLimit,
  kRefused
};

// Looks up the classes. Called once, when the module is loaded.
void load_errors();

// Sets the Python error and throws Raised. Needs the GIL.
[[noreturn]] void raise(Kind kind, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// What a call of the engine that returned rc < 0 has left as the thread's last
// error: taken at once, raised when what must come first is done.
class EngineError {
public:
  EngineError(const char *call, int rc);
  [[noreturn]] void raise() const;

private:
  fs_error error_;
};

inline void check(const char *call, int rc) {
  if (rc < 0)
    EngineError(call, rc).raise();
}

} // namespace fserver
