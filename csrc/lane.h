// The device's part of a stream channel: memory that peers write, kernels, and
// what is enqueued for one send or recv. What goes where is planned in Python
// (fserver/channel/plan.py); nothing here knows a peer but by its addresses.
#pragma once

#include <Python.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../cshim/cuda/cs_channel.h"
#include "driver.h"
#include "keeper.h"
#include "second.h"
#include "tensor.h"

namespace fserver {

// How to go on when a channel has ended.
constexpr char kReopen[] =
    "call close() on this channel, then open a new one on both sides";

// The source of the kernels, for NVRTC.
std::string lane_source();

// Compute capability of a GPU: 90 for 9.0. Raises if there is no driver.
int lane_arch(int device);

// One launch, or, in mode "copy", one row of copies and stream memory operations.
// For one tensor and one peer:
struct Segment {
  int tensor; // whose row count it has
  uint64_t row_bytes;
  cs_segment s;
};

// All methods but the watcher are called with the GIL, and call the driver without.
// After end() there are only status() and close().
class Lane {
public:
  // image: cubin or PTX of lane_source(); empty for a lane that only copies.
  Lane(int device, const std::string &image, int64_t timeout_ns,
       bool programmatic);
  ~Lane() { Py_XDECREF(explain_); }
  Lane(const Lane &) = delete;
  Lane &operator=(const Lane &) = delete;

  // Deletes a lane after its end: at once, or when another is made and it can be closed.
  struct Leave {
    void operator()(Lane *lane) const;
  };

  // Zeroed memory of the GPU, in pieces that can be shared; freed by close().
  uint64_t allocate(uint64_t bytes);
  // The handle of the allocation that address is in, its size, and where in it
  // address is; an empty handle if this memory cannot be shared.
  std::tuple<std::string, uint64_t, uint64_t> share(uint64_t address);
  // Maps what share gave in another process: address and bytes. owner: the GPU
  // there, for an error.
  std::pair<uint64_t, uint64_t> map(const std::string &handle,
                                    const std::string &owner);
  // Makes memory of another GPU of this process usable.
  void reach(int device);

  struct Step {
    std::vector<Segment> segments;
    int threads = 0; // of a block
  };
  void plan(bool sends, std::vector<Step> steps, uint64_t counts,
            uint64_t dead);
  void plan_copies(bool sends, std::vector<Segment> segments);
  // All is planned. in_turn: send and recv alternate, and send_first says which is
  // first. flags, bytes: the memory with all flags and credits of this side and nothing
  // else; for copies a multiple of kFill.
  void begin(bool in_turn, bool send_first, uint64_t flags, uint64_t bytes);

  // Keeps the memory of these tensors until close(). What plan() was told of it is
  // wrong once a tensor is made to give it up: send and recv look.
  void hold(PyObject *tensors);

  // Has a callable raise, at the next call, why the engine or a peer has ended the
  // channel. If the lane itself has (CS_BROKEN), it is called at once, with the error,
  // and tells the peers.
  void explain(PyObject *why);

  // rows: None, or a list of one int for each tensor.
  void send(PyObject *rows);
  void recv();

  // Why the channel ended by itself (CS_LOST, CS_LATE, CS_BROKEN; 0: it has not), and
  // the peer that was waited for.
  std::pair<int, int> status() const;
  // The word that ends the channel when it is not zero: for the engine.
  uint64_t abort_word() const { return reinterpret_cast<uint64_t>(words_); }
  void abort();
  void finish(); // waits for what was enqueued
  // Ends the lane, and waits for what was enqueued. What a graph replays later waits for nobody.
  void end();
  // The same, and gives back all. False: not yet, because a graph uses it, or a capture forbids to wait.
  bool close();

  // For tests and errors: memory of the GPU, read past what is enqueued, and what
  // the driver says of the stream that was used last.
  std::string peek(uint64_t address, uint64_t bytes);
  int pending() const;

private:
  struct Launch {
    cs_launch_many args;
    std::vector<Segment> segments;
    unsigned grid = 0, threads = 0;
    unsigned short first[CS_MANY] = {};
    bool large = false;   // the copy engine moves some of it
    bool lands = false;   // some of it comes by way of landing buffers
    bool changed = false; // args are of fewer rows than all
  };
  struct Direction { // sending, or receiving
    std::vector<Launch> launches;
    std::vector<Segment> copies;
    cs_function few = nullptr, many = nullptr;
    cs_function wait = nullptr; // of one block, before a launch that lands
    const char *name = nullptr;
  };
  struct Entered;
  struct Apart;

  void stand(const char *call, bool sends) const; // raises what has ended it
  cs_stream stream(const char *call, bool sends);
  void used(cs_stream s, bool captured);
  bool load(const void *image, Tried *tried);
  static bool set(cs_ptr at, unsigned char value, uint64_t bytes, Tried *tried);
  void refuse_replays();
  void give_back(bool entered);
  // Waits for what is enqueued. False: a capture forbids that.
  bool settle();
  void turn(const char *call, bool sends);
  template <class F> void message(const char *call, cs_stream s, F enqueue);
  cs_result prepare(cs_stream s);
  cs_result launch(Direction &way, cs_stream s);
  cs_result copy_out(cs_stream s);
  cs_result copy_in(cs_stream s);
  void start_watcher();
  bool waits() const;
  void fill();
  void watch();
  void end_watcher();
  struct Seen { // of a wait: when, in nanoseconds; 0: not yet
    uint64_t since = 0, parted = 0;
  };
  void time_out(int which, Seen *seen);
  cs_ptr word(int which) const { return seen_ + 4ull * which; }
  void need(const char *call) const;
  bool by_engine(const Segment &g) const;
  template <class F>
  cs_result with_room(cs_result full, int what, F call) const;
  void *pinned(uint64_t bytes, unsigned flags) const;

  int device_;
  cs_device handle_ = 0;
  cs_context context_ = nullptr;
  cs_module module_ = nullptr;
  bool programmatic_;
  uint64_t patience_;
  volatile uint32_t *words_ = nullptr; // host memory; the GPU sees it at seen_
  cs_ptr seen_ = 0;
  Direction out_, in_;
  struct Owned {
    int what; // FS_GPU_*
    uint64_t address, bytes;
  };
  std::vector<Owned> owned_;
  InUse held_;
  PyObject *explain_ = nullptr;
  std::vector<uint32_t> most_, rows_; // of each tensor: there, and to be sent
  std::vector<cs_memory_op> ops_;
  bool in_turn_ = false, send_next_ = false, closed_ = false;
  cs_stream last_ = nullptr;
  bool used_ = false;
  bool begun_ =
      false; // a part of the message that is enqueued counts for the peer
  bool busy_ = false;            // a thread enqueues a message, without the GIL
  const char *broken_ = nullptr; // the call that failed after that
  bool captured_ = false; // in graphs, which may be replayed on any stream
  Graphs graphs_;
  bool ended_ = false; // end() has returned
  bool over_ = false;  // what was enqueued, at the end
  bool stays_ =
      false; // a thread that the interpreter has left behind is in a call
  bool gone_ = false;   // all is given back
  bool short_ = false;  // copies tell their rows: some were of fewer
  bool untold_ = false; // there may be a graph whose copies do not
  std::thread watcher_; // of copies: nothing else ends their waits
  cs_stream watcher_streams_[3] = {}; // the last for copies
  std::vector<uint64_t> ends_; // the flags and credits that a stream waits for
  SecondContext *second_ = nullptr;      // which ends what the streams do not
  int kept_ = 0;                         // looks in a row at which they had not
  uint64_t flags_ = 0, flags_bytes_ = 0; // where all flags and credits are
  void *ones_ = nullptr;                 // pinned memory to fill them from
  std::atomic<bool> stop_{false};
};

} // namespace fserver
