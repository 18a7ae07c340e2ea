// How the extension gets its adapter to torch: see adapter.h.
#pragma once

#include <Python.h>

#include <string>

#include "adapter.h"

namespace fserver {

extern Torch torch; // of the adapter that join() has loaded

// Loads an adapter and has it read a tensor, about which Python says the facts: see Given in
// join.cc. Returns "" or what is wrong; then `torch` is as it was.
std::string join(const char *path, PyObject *tensor, PyObject *facts);

} // namespace fserver
