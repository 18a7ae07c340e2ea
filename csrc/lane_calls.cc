// What send and recv of a Lane enqueue.
#include "lane.h"

#include <algorithm>
#include <cstring>

#include "args.h"
#include "error.h"
#include "lane_inside.h"
#include "mark.h"

namespace fserver {
namespace {

// Threads that wait for what comes by way of landing buffers: each for some of its blocks.
constexpr unsigned kWaiting = 128;

// From here on the copy engine is faster than the stores of kernels (16 MiB: 46
// and 49 us, 64 MiB: 173 and 200), and a kernel only raises the flags after it.
constexpr uint64_t kEngine = 16 << 20;

uint32_t waits_for(unsigned peer) { return peer << 2 | kWaits; }

// Waits and writes of a stream, in their order, in one go.
class Words {
public:
  explicit Words(std::vector<cs_memory_op> *room) : ops_(*room) {
    ops_.clear(); // a call that failed may have left some
  }
  // Whoever sees the value sees what the stream did before. (The driver has no
  // weaker write in this form.)
  void write(uint64_t address, uint32_t value) {
    add(CS_OP_WRITE_32, address, value, CS_WRITE_DEFAULT);
  }
  // Waits until a peer has set a flag, and sets it back; until then, the word at
  // told says so.
  void take(uint64_t told, unsigned peer, uint64_t flag) {
    write(told, waits_for(peer));
    add(CS_OP_WAIT_32, flag, 1, CS_WAIT_GEQ);
    write(flag, 0);
  }
  // begun, if some of them are.
  cs_result enqueue(cs_stream s, bool *begun) {
    cs_result rc = CS_CU_SUCCESS;
    for (size_t i = 0; i < ops_.size() && rc == CS_CU_SUCCESS; i += kMost) {
      rc = cs_cu.StreamBatchMemOp(
          s, static_cast<unsigned>(std::min(kMost, ops_.size() - i)), &ops_[i],
          0);
      *begun = *begun || rc == CS_CU_SUCCESS;
    }
    ops_.clear();
    return rc;
  }
  // Room for what a message through this many segments takes.
  static void reserve(std::vector<cs_memory_op> *room, size_t segments) {
    room->reserve(std::max(room->capacity(), 4 * segments + 1));
  }

private:
  static constexpr size_t kMost = 256; // of the driver
  void add(int op, uint64_t address, uint32_t value, unsigned flags) {
    cs_memory_op o;
    memset(&o, 0, sizeof o);
    o.is.op = op;
    o.is.address = address;
    o.is.value = value;
    o.is.flags = flags;
    ops_.push_back(o);
  }
  std::vector<cs_memory_op> &ops_;
};

} // namespace

void Lane::plan(bool sends, std::vector<Step> steps, uint64_t counts,
                uint64_t dead) {
  need("channel");
  Direction &way = sends ? out_ : in_;
  for (Step &step : steps) {
    const size_t n = step.segments.size();
    if (n == 0 || n > CS_MANY)
      raise(Kind::kError, "channel: a launch has %zu segments, want 1 to %d", n,
            CS_MANY);
    Launch l;
    memset(&l.args, 0, sizeof l.args);
    l.threads = static_cast<unsigned>(step.threads);
    l.args.head.counts = counts;
    l.args.head.dead = dead;
    l.args.head.status = seen_;
    l.args.head.patience = patience_;
    l.args.head.count = static_cast<unsigned>(n);
    for (size_t i = 0; i < n; i++) {
      cs_segment s = step.segments[i].s;
      s.first = l.first[i] = static_cast<unsigned short>(l.grid);
      l.grid += s.blocks;
      l.lands = l.lands || (!sends && s.kind == CS_BY_LANDING);
      l.args.segment[i] = s;
    }
    counts += 4ull * l.grid;
    l.segments = std::move(step.segments);
    way.launches.push_back(std::move(l));
  }
}

void Lane::plan_copies(bool sends, std::vector<Segment> segments) {
  need("channel");
  (sends ? out_ : in_).copies = std::move(segments);
}

void Lane::begin(bool in_turn, bool send_first, uint64_t flags,
                 uint64_t bytes) {
  need("channel");
  flags_ = flags;
  flags_bytes_ = bytes;
  in_turn_ = in_turn;
  send_next_ = send_first;
  for (const Direction *way : {&out_, &in_})
    Words::reserve(&ops_, way->copies.size());
  auto add = [&](const Segment &g) {
    const auto t = static_cast<size_t>(g.tensor);
    most_.resize(std::max(most_.size(), t + 1));
    most_[t] = g.s.rows;
  };
  for (const Segment &g : out_.copies)
    add(g);
  for (Launch &l : out_.launches)
    for (const Segment &g : l.segments) {
      add(g);
      l.large = l.large || by_engine(g);
    }
  if ((!out_.copies.empty() || !in_.copies.empty()) && !watcher_.joinable())
    start_watcher();
}

// Without turns the kernel has to see the receiver's credit first.
bool Lane::by_engine(const Segment &g) const {
  return in_turn_ && g.s.kind == CS_IN_PLACE && g.s.bytes >= kEngine;
}

// A peer that has closed its side takes nothing any more, but what it sent before
// is still there to be received.
void Lane::stand(const char *call, bool sends) const {
  const uint32_t end = words_[kEnd], why = words_[kWhy];
  if (end == 0 && why == 0)
    return;
  if (broken_)
    raise(Kind::kError,
          "%s: an earlier %s failed after a part of its message was enqueued, "
          "so the channel has ended (%s)",
          call, broken_, kReopen);
  if ((why & 255) == CS_LATE)
    raise(Kind::kTimeout,
          "%s: peer %u has not responded within timeout_ms of the channel, so "
          "the channel has ended (%s)",
          call, why >> 8, kReopen);
  const bool parted = end == kParted && (sends || why);
  if ((end == kEnded || parted) && explain_) {
    PyObject *told = PyObject_CallNoArgs(explain_);
    if (!told)
      throw Raised{};
    Py_DECREF(told);
  }
  if (parted)
    raise(Kind::kClosed,
          "%s: a peer has closed its side, so the channel has ended (%s)", call,
          kReopen);
  if (end == kEnded || why)
    raise(Kind::kError,
          "%s: the channel has ended: check() raises the reason (%s)", call,
          kReopen);
}

cs_stream Lane::stream(const char *call, bool sends) {
  need(call);
  if (busy_)
    raise(Kind::kConfig, kOneThread, call);
  stand(call, sends);
  auto s = reinterpret_cast<cs_stream>(native_stream(device_));
  if (used_ && s != last_) {
    Apart in(context_); // that a default stream is of
    busy_ = true;
    // Asking a stream that is captured would end its capture.
    const bool in_use = unlocked([&] {
      return !capturing(s) && !capturing(last_) &&
             cs_cu.StreamQuery(last_) == CS_CU_NOT_READY;
    });
    busy_ = false;
    need(call); // another thread may have closed it meanwhile
    if (in_use)
      raise(Kind::kConfig,
            "%s: the channel is still in use on another stream (synchronize "
            "that stream first, or open a channel for each stream)",
            call);
  }
  return s;
}

void Lane::turn(const char *call, bool sends) {
  if (in_turn_ && sends != send_next_ && !captured_) // replays are not seen
    raise(Kind::kConfig,
          "%s: call %s() first: the channel has tensors in both directions, so "
          "send() and recv() alternate",
          call, sends ? "recv" : "send");
}

void Lane::hold(PyObject *tensors) {
  const Arg arg = {"channel", "tensors"};
  const Items items = tensor_items(tensors, arg);
  for (size_t i = 0; i < items.size(); i++) {
    fs_tensor t;
    held_.add(read_tensor(items.at(i), arg, static_cast<Py_ssize_t>(i),
                          Access::kLook, device_, &t));
  }
}

void Lane::explain(PyObject *why) {
  Py_INCREF(why);
  Py_XDECREF(explain_);
  explain_ = why;
}

// Enqueues a message, without the GIL: where the stream is full, the driver waits for
// the GPU, which may wait for a Python thread. If it fails when a part of it counts
// already, the two sides count differently from then on, so the channel ends; but not
// if it was for a graph, which never comes to be.
template <class F>
void Lane::message(const char *call, cs_stream s, F enqueue) {
  begun_ = false;
  busy_ = true;
  bool captured = false;
  const cs_result rc = unlocked([&] {
    captured = graphs_.note(s);
    return enqueue();
  });
  busy_ = false;
  if (rc == CS_CU_SUCCESS) {
    used(s, captured);
    return;
  }
  try {
    fail(call, rc);
  } catch (const Raised &) {
    if (begun_ && !captured) {
      broken_ = call;
      used(s, false);
      abort();
      if (explain_) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        Py_XDECREF(PyObject_CallOneArg(explain_, value)); // tells the peers
        PyErr_Restore(type, value, trace);
      }
    }
    throw;
  }
}

// This and what follows, up to recv, without the GIL: no Python, and no exception.
cs_result Lane::launch(Direction &way, cs_stream s) {
  cs_launch_attribute attribute;
  memset(&attribute, 0, sizeof attribute);
  attribute.id = CS_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.flag = 1;
  cs_result rc = CS_CU_SUCCESS;
  for (Launch &l : way.launches) {
    cs_launch_config c;
    memset(&c, 0, sizeof c);
    c.grid_x = l.grid;
    c.grid_y = c.grid_z = c.block_y = c.block_z = 1;
    c.block_x = l.threads;
    c.stream = s;
    c.attributes = &attribute;
    c.count = programmatic_ ? 1 : 0;
    void *args[] = {&l.args}; // cs_launch_few is its beginning
    if (l.lands) {
      cs_launch_config one = c;
      one.grid_x = 1;
      one.block_x = kWaiting;
      rc = cs_cu.LaunchKernelEx(&one, way.wait, args, nullptr);
    }
    if (rc == CS_CU_SUCCESS)
      rc = cs_cu.LaunchKernelEx(
          &c, l.segments.size() <= CS_FEW ? way.few : way.many, args, nullptr);
    if (rc != CS_CU_SUCCESS)
      break;
    begun_ = true;
  }
  return rc;
}

// Waits and flags have constants only, so that a graph can be replayed: the
// sender sets a flag to 1, the receiver waits for it and sets it back, and the
// flag's next 1 comes after the answer, or after the receiver's credit.
cs_result Lane::copy_out(cs_stream s) {
  Words words(&ops_);
  cs_result rc = CS_CU_SUCCESS;
  if (!in_turn_) {
    for (const Segment &g : out_.copies) {
      if (g.s.credits)
        words.take(word(kSendWaits), g.s.peer, g.s.credits);
    }
    words.write(word(kSendWaits), kGoesOn);
    rc = words.enqueue(s, &begun_);
  }
  // Which message a graph is replayed behind is not known, so from the first
  // message of fewer rows on, all tell theirs.
  short_ = short_ || !rows_.empty();
  untold_ = untold_ || (!short_ && capturing(s));
  for (const Segment &g : out_.copies) {
    const uint64_t rows =
        rows_.empty() ? g.s.rows : rows_[static_cast<size_t>(g.tensor)];
    const uint64_t bytes = rows_.empty() ? g.s.bytes : rows * g.row_bytes;
    if (rc == CS_CU_SUCCESS && bytes)
      rc = cs_cu.MemcpyAsync(g.s.to, g.s.from, bytes, s);
    if (rc != CS_CU_SUCCESS)
      return rc;
    if (short_)
      words.write(g.s.counted, static_cast<uint32_t>(rows));
    if (g.s.flags)
      words.write(g.s.flags, 1);
    bool told = false;
    rc = words.enqueue(s, &told);
    begun_ = begun_ || (told && g.s.flags);
  }
  return rc;
}

cs_result Lane::copy_in(cs_stream s) {
  Words words(&ops_);
  for (const Segment &g : in_.copies)
    if (g.s.credits)
      words.write(g.s.credits, 1);
  for (const Segment &g : in_.copies) {
    if (g.s.flags)
      words.take(word(kRecvWaits), g.s.peer, g.s.flags);
  }
  words.write(word(kRecvWaits), kGoesOn);
  cs_result rc = words.enqueue(s, &begun_);
  for (const Segment &g : in_.copies)
    if (rc == CS_CU_SUCCESS && g.s.from && g.s.bytes)
      rc = cs_cu.MemcpyAsync(g.s.to, g.s.from, g.s.bytes, s);
  return rc;
}

// Has the launches be of the rows that are to be sent, and copies what the copy engine
// moves.
cs_result Lane::prepare(cs_stream s) {
  for (Launch &l : out_.launches) {
    if (rows_.empty() && !l.large && !l.changed)
      continue;
    l.changed = !rows_.empty();
    for (size_t i = 0; i < l.segments.size(); i++) {
      const Segment &g = l.segments[i];
      cs_segment &now = l.args.segment[i];
      now = g.s;
      now.first = l.first[i];
      if (!rows_.empty()) {
        now.rows = rows_[static_cast<size_t>(g.tensor)];
        if (g.s.kind != CS_BY_PACKETS) // of those the receiver waits for all
          now.bytes = now.rows * g.row_bytes;
      }
      if (!by_engine(g))
        continue;
      const cs_result rc =
          now.bytes ? cs_cu.MemcpyAsync(now.to, now.from, now.bytes, s)
                    : CS_CU_SUCCESS;
      now.bytes = 0;
      if (rc != CS_CU_SUCCESS)
        return rc;
    }
  }
  return CS_CU_SUCCESS;
}

void Lane::send(PyObject *rows) {
  // Other Python code may run here, and close the lane.
  std::vector<uint32_t> some;
  if (rows && rows != Py_None) {
    const Items items(rows, {"send", "rows"}, "ints");
    if (items.size() != most_.size())
      raise(Kind::kShape,
            "send: rows has %zu numbers for %zu tensors: give one number for "
            "each tensor",
            items.size(), most_.size());
    for (size_t i = 0; i < most_.size(); i++) {
      const uint64_t n =
          read_u64(items.at(i), {"send", "rows"}, static_cast<Py_ssize_t>(i));
      if (n > most_[i])
        raise(Kind::kShape,
              "send: rows[%zu] is %llu, but the tensor has %u: give a number "
              "from 0 to %u",
              i, static_cast<unsigned long long>(n), most_[i], most_[i]);
      some.push_back(static_cast<uint32_t>(n));
    }
  }
  if (!some.empty() && untold_)
    raise(Kind::kConfig,
          "send: rows is not possible, because a send() of all rows was "
          "captured, whose copies do not tell their rows: call "
          "send(rows=...) once before the first capture");
  cs_stream s = stream("send", true);
  turn("send", true);
  held_.check("send", kReopen);
  Entered in(context_);
  rows_ = std::move(some);
  message("send", s, [&] {
    cs_result rc = prepare(s);
    if (rc == CS_CU_SUCCESS && !out_.copies.empty())
      rc = copy_out(s);
    return rc == CS_CU_SUCCESS ? launch(out_, s) : rc;
  });
  send_next_ = false;
}

void Lane::recv() {
  cs_stream s = stream("recv", false);
  turn("recv", false);
  held_.check("recv", kReopen);
  Entered in(context_);
  message("recv", s, [&] {
    const cs_result rc = in_.copies.empty() ? CS_CU_SUCCESS : copy_in(s);
    return rc == CS_CU_SUCCESS ? launch(in_, s) : rc;
  });
  send_next_ = true;
}

} // namespace fserver
