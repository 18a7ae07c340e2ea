// The server's side: get_batch and respond.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "args.h"
#include "node.h"

namespace fserver {

class Server : public Node {
public:
  // stepmesh: see StepmeshServer.
  explicit Server(const std::vector<std::string> &settings,
                  bool stepmesh = false)
      : Node(settings), stepmesh_(stepmesh) {}
  ~Server() override { shut(); }

  // A list of (handler, [tensor, ...], [key, ...]), one for each worker group, or
  // for each that has asked when at_least have (nullptr or None: all); empty when
  // timeout_ms (nullptr or None: no limit) is over.
  PyObject *get_batch(PyObject *timeout_ms, PyObject *at_least,
                      uint64_t channel = 0);
  int32_t worker_of(PyObject *handler);
  // need_event: as of Worker::push_pull.
  void respond(PyObject *tensors, PyObject *handler, bool need_event);
  void respond_vec(PyObject *ret_buffer, PyObject *tensors_vec,
                   PyObject *handler_vec);
  // Ends a request with an error at its worker.
  void fail(PyObject *handler, PyObject *text);
  void register_recv_buffer(PyObject *tensor, PyObject *worker_ranks,
                            PyObject *push_keys);

private:
  // The receive buffer of one (worker rank, key), as it was last seen. The
  // storage is shared by all tensors that are made over it.
  struct Slot {
    uint64_t buffer = 0;
    uint64_t address = 0;
    uint64_t bytes = 0;        // of memory
    uint64_t *times = nullptr; // releases that memory owes; null: none
    Memory memory;
  };
  // Memory of register_recv_buffer.
  struct Fixed {
    uint64_t begin, end;
    Memory memory;
  };
  class Words;

  void forget() override;
  Ref take_request(Words &words);
  Ref take_tensor(Words &words, Ref *key);
  void skip_tensors(Words &words, uint64_t n);
  const Memory &memory_of(uint64_t slot, uint64_t buffer, uint64_t address,
                          uint64_t bytes, int device);

  const bool stepmesh_;
  std::vector<Slot> slots_;
  std::vector<Fixed> fixed_;
  size_t batch_words_ = 0; // of the largest batch so far
};

// One that keeps to StepMesh where that differs: it answers with tensors of any
// type, and Python's respond does not wait for the stream unless it is told to.
class StepmeshServer : public Server {
public:
  explicit StepmeshServer(const std::vector<std::string> &settings)
      : Server(settings, true) {}
};

} // namespace fserver
