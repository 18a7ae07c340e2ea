// What one call of a channel enqueues whose messages the engine carries (path "host").
#pragma once

#include <Python.h>

#include <string>
#include <utility>
#include <vector>

#include "args.h"
#include "kernels.h"
#include "mark.h"
#include "tensor.h"

namespace fserver {

// One of send() and recv(): it may ring, wait, copy and ring again, in this order. It is made
// once. The tensors have to live as long as what it has enqueued.
class HostCall {
public:
  enum class Enqueued {
    kStream,
    kGraph,    // the current stream is being captured
    kElsewhere // nothing: another stream has not passed what was enqueued there
  };

  // mark: of the side, of which this is one call. call names it in errors.
  HostCall(Mark &mark, int device, std::string call)
      : mark_(mark), device_(device), call_(std::move(call)) {}

  // The stream counts in count, on the GPU, and shows the number in flag, which
  // map_pinned_tensor() gave. last: after the copies, else first of all.
  void ring(PyObject *count, PyObject *flag, bool last);
  // It adds to count, shows the number in asked, and waits until done is that.
  void wait(PyObject *count, uint64_t add, PyObject *asked, PyObject *done);
  // The tensors have the same bytes, on the GPU, or in pinned memory that
  // map_pinned_tensor() has given as its.
  void copy(PyObject *to, PyObject *from);

  // Enqueues it on the current stream of the GPU, for a thread that uses the mark. bytes:
  // how many of each copy; None: all.
  Enqueued run(PyObject *bytes);

private:
  // The last arguments of kRing and kAwait.
  struct SmallCopies {
    uint32_t n = 0;
    SmallCopy copies[kSmallCopies];
  };
  struct Ring {
    uint64_t count = 0, flag = 0;
  };
  struct Wait {
    uint64_t count = 0, add = 0, asked = 0, done = 0;
  };

  uint64_t counter(PyObject *o, const char *name);
  uint64_t read(PyObject *o, const char *name, uint64_t *bytes);
  // Without the GIL, on stream s. Nothing is enqueued after an error. Spoils bytes.
  void enqueue(cs_stream s, bool captured, uint64_t *bytes, Tried *tried);
  void start_ring(cs_stream s, const SmallCopies &with, Tried *tried);
  void start_wait(cs_stream s, bool captured, const SmallCopies &with,
                  Tried *tried);

  Mark &mark_;
  const int device_;
  const std::string call_;
  bool first_ = false, waits_ = false, last_ = false, holds_ = false;
  Ring ring_;
  Wait wait_;
  Ref done_; // its tensor, for hold()
  std::vector<SmallCopy> copies_;
  InUse held_; // of the application's tensors, and ours
};

} // namespace fserver
