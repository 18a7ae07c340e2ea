// Flags and counters that a stream writes and waits for.
#pragma once

#include <Python.h>

namespace fserver {

// Each enqueues one small kernel on the current stream of its device, and can be
// captured into a CUDA graph. The tensors are one int64 each, on a GPU or in
// pinned host memory, at least one of them on a GPU.
void write_flag(PyObject *flag, PyObject *seq);
void wait_flag(PyObject *flag, PyObject *seq); // until *flag >= *seq
void seq_add_one(PyObject *seq);

// The current stream of the current GPU waits until *flag >= value, without a
// kernel; not while it is captured.
void wait_value(PyObject *flag, PyObject *value);

// For the other side of such a flag, on the CPU: whether word, one int64 there, is
// at least value within the time; without the GIL, and with less and less use of
// the processor. And the store that makes what was written before it visible, also
// when the interpreter is ending: a stream may wait for it.
bool wait_word(PyObject *word, PyObject *value, PyObject *timeout_ms);
void set_word(PyObject *word, PyObject *value);

// A tensor of GPU index over the memory of a pinned one.
PyObject *map_pinned(PyObject *tensor, PyObject *index);

} // namespace fserver
