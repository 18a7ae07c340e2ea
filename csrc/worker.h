// The worker's side: push_pull and wait.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "args.h"
#include "claims.h"
#include "node.h"

namespace fserver {

class Worker : public Node {
public:
  // Handlers are numbered from next_handler on. stepmesh: see StepmeshWorker.
  explicit Worker(const std::vector<std::string> &settings,
                  uint64_t next_handler = 0, bool stepmesh = false);
  ~Worker() override { shut(); }

  // Gives the first of np + nq new handlers. need_event: tensors of the GPU are
  // sent behind what is queued on the current stream. Refuses pull tensors that
  // share memory with those of an open one.
  uint64_t push_pull(PyObject *push_tensors, PyObject *push_keys,
                     PyObject *pull_tensors, PyObject *pull_keys,
                     bool need_event, uint64_t channel = 0);
  // timeout_ms: counted from the call; nullptr is 10 s.
  void wait(PyObject *handler, PyObject *timeout_ms);
  // The number by which the engine knows the push_pull that handler belongs to; 0: it
  // has ended, or the node is closed.
  uint64_t ticket(PyObject *handler);
  // Reports whether wait would return or raise at once. Makes one pass if not.
  bool done(PyObject *handler);
  // The subclass of int that push_pull gives; none: int.
  void give_handles(PyObject *type) { handle_type_ = Ref::borrow(type); }
  PyObject *handle_type() const { return handle_type_.get(); }
  // The handlers from first on of the push_pull that handler belongs to.
  std::pair<uint64_t, uint64_t> handlers(PyObject *handler);
  void trace(PyObject *handler, int64_t (&stamps)[8]);

  uint64_t next_handler() const { return next_; }

private:
  // One push_pull. It is forgotten when a later ticket gets its place, which
  // the engine does only when it has ended and 4,096 others have come.
  struct Request {
    fs_ticket ticket = 0;
    uint64_t first = 0;
    uint32_t count = 0; // of handlers; 0: none here
    int64_t started = 0;
  };

  void forget() override {
    Node::forget();
    claims_.clear();
  }
  const Request &find(PyObject *handler, const char *call) const;
  // The same, or nullptr.
  const Request *look_up(uint64_t handler) const;
  // What a request waits for, with a semicolon behind it, or nothing. The GIL is
  // released meanwhile.
  std::string why_open(fs_ticket ticket) const;

  const bool stepmesh_;
  Ref handle_type_;
  Claims claims_{holder_};
  std::vector<Request> requests_; // by ticket & mask
  fs_ticket newest_ = 0;
  uint64_t next_;
};

// One that keeps to StepMesh where that differs: it takes a pull tensor again that
// belongs to an open push_pull, takes answers of any type, and the limit of wait
// counts from the push_pull.
class StepmeshWorker : public Worker {
public:
  StepmeshWorker(const std::vector<std::string> &settings,
                 uint64_t next_handler)
      : Worker(settings, next_handler, true) {}
};

} // namespace fserver
