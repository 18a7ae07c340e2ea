// Flags and counters that a stream writes and waits for.
#pragma once

#include <Python.h>

#include "tensor.h"

namespace fserver {

// Has nothing given back that would keep others from the GPU until a wait for a flag is
// over. Of memory that nobody has mapped, it is not known for how long.
void hold(const char *call, PyObject *flag, const Counter &c, int device);

// Each enqueues one small kernel on the current stream of its device, and can be
// captured into a CUDA graph. The tensors are one int64 each, on a GPU or in
// pinned host memory, at least one of them on a GPU. Their memory is kept until the stream
// has passed, or, of a captured stream, as long as the graph.
void write_flag(PyObject *flag, PyObject *seq);
void seq_add_one(PyObject *seq);

// Until *flag >= *seq, or end_waits(), or for timeout_ms, which may be None or nullptr; the
// call after a wait that has lasted for so long raises that.
void wait_flag(PyObject *flag, PyObject *seq, PyObject *timeout_ms);

// Has all waits of streams for flags end: those that are enqueued now, and those of graphs
// until waits_again(), or for good. It calls no driver.
void end_waits(bool for_good);

// A wait that a graph starts from here on waits. Needs the GIL.
void waits_again();

// The current stream of the current GPU waits until *flag >= value, without a
// kernel; not while it is captured.
void wait_value(PyObject *flag, PyObject *value);

// For the other side of such a flag, on the CPU: the store to word, one int64 there, that
// makes what was written before it visible, also when the interpreter is ending: a stream
// may wait for it.
void set_word(PyObject *word, PyObject *value);

// A tensor of GPU index over the memory of a pinned one.
PyObject *map_pinned(PyObject *tensor, PyObject *index);

} // namespace fserver
