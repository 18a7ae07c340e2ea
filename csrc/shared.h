// Shared memory of this process.
#pragma once

#include <Python.h>

#include <cstdint>

namespace fserver {

// A tensor of uint8 with a storage of its own in shared memory, zeros. bytes is
// not 0.
PyObject *shared_bytes(uint64_t bytes);

} // namespace fserver
