#include "server.h"

#include <algorithm>
#include <cerrno>
#include <memory>

#include "error.h"
#include "process.h"

namespace fserver {
namespace {

constexpr Arg kTensors{"respond", "tensors"};
constexpr Arg kBuffer{"respond_vec", "ret_buffer"};
constexpr Arg kTensorsVec{"respond_vec", "tensors_vec"};
constexpr Arg kHandlerVec{"respond_vec", "handler_vec"};
constexpr Arg kTensor{"register_recv_buffer", "tensor"};
constexpr Arg kRanks{"register_recv_buffer", "worker_ranks"};
constexpr Arg kKeys{"register_recv_buffer", "push_keys"};

void *pointer(uint64_t v) { return reinterpret_cast<void *>(v); }

// What Memory owes the engine: as many releases as get_batch has named the buffer.
struct Owed {
  uint64_t buffer, times;
};

void release(uint64_t buffer, uint64_t times) {
  if (!forked.load()) // the engine is not in a forked child
    fs_buffer_release(buffer, times);
}

// Runs when the last tensor over a receive buffer is gone, in any thread.
void release_owed(void *p) {
  const std::unique_ptr<Owed> owed(static_cast<Owed *>(p));
  release(owed->buffer, owed->times);
}

void release_loan(void *buffer) {
  release(reinterpret_cast<uint64_t>(buffer), 1);
}

void release_memory(void *storage) { Memory{storage}; }

// Refuses a ret_buffer without rows, and handlers that do not fit the n answers.
void check_vec(size_t ndim, size_t handlers, size_t n) {
  if (ndim == 0)
    raise(Kind::kShape, "respond_vec: ret_buffer has no dimensions, want a "
                        "tensor with one row for each row of the answers");
  if (handlers != n)
    raise(Kind::kShape,
          "respond_vec: handler_vec has %zu handlers for %zu items of "
          "tensors_vec: give one for each",
          handlers, n);
}

// Rows of answer k of respond_vec, whose ret_buffer has so many: of the tensor, or of the
// first of a list.
int64_t rows_of_answer(PyObject *answer, size_t k, int64_t rows) {
  Ref item = Ref::borrow(answer);
  if (!is_tensor(item.get())) {
    const Items list(item.get(), kTensorsVec, "tensors");
    if (list.size() == 0)
      raise(Kind::kShape,
            "respond_vec: tensors_vec[%zu] is empty, want the tensors that "
            "answer its request",
            k);
    item = Ref::borrow(list.at(0));
  }
  const int64_t r =
      rows_of(item.get(), kTensorsVec, static_cast<Py_ssize_t>(k));
  if (r > rows)
    raise(Kind::kShape,
          "respond_vec: tensors_vec[%zu] has %lld rows, but ret_buffer has "
          "%lld: make ret_buffer as large as all answers together",
          k, static_cast<long long>(r), static_cast<long long>(rows));
  return r;
}

} // namespace

// Reads what fs_get_batch has written.
class Server::Words {
public:
  Words(const uint64_t *p, size_t n) : p_(p), end_(p + n) {}
  uint64_t next() { return *take(1); }
  const uint64_t *take(size_t n) {
    if (static_cast<size_t>(end_ - p_) < n)
      raise(Kind::kError,
            "get_batch: the engine returned an incomplete description of the "
            "batch (a fault of fserver: report it)");
    const uint64_t *p = p_;
    p_ += n;
    return p;
  }

private:
  const uint64_t *p_, *end_;
};

void Server::forget() {
  Node::forget();
  slots_.clear();
  fixed_.clear();
}

PyObject *Server::get_batch(PyObject *timeout_ms, PyObject *at_least,
                            uint64_t channel) {
  enter_connected("get_batch");
  int64_t deadline = kForever;
  if (timeout_ms && timeout_ms != Py_None)
    deadline = now_ns() + read_ms(timeout_ms, {"get_batch", "timeout_ms"});
  uint32_t least = 0;
  if (at_least && at_least != Py_None) {
    constexpr Arg kAtLeast{"get_batch", "at_least"};
    const uint64_t n = read_u64(at_least, kAtLeast);
    if (n == 0 || n > INT32_MAX)
      raise(
          Kind::kConfig,
          "get_batch: at_least is %llu, want 1 to the number of worker groups",
          static_cast<unsigned long long>(n));
    least = static_cast<uint32_t>(n);
  }
  holder_.reap();
  for (;;) {
    const size_t room = std::max<size_t>(batch_words_, 512);
    Array<uint64_t, 512> buf(room);
    size_t need = 0;
    int rc = in_slices(deadline, [&](int64_t slice, uint32_t flags) {
      return fs_get_batch(id_, channel, least, buf.data(), room, &need, slice,
                          flags);
    });
    if (rc == -EAGAIN)
      return PyList_New(0);
    if (rc == -ENOBUFS) { // the batch waits for us
      batch_words_ = std::max(batch_words_, need);
      continue;
    }
    check("get_batch", rc);
    Words words(buf.data(), std::min(need, room));
    const size_t n = words.next();
    Ref batch = Ref::steal(PyList_New(static_cast<Py_ssize_t>(n)));
    size_t i = 0;
    try {
      while (i < n) {
        enter("get_batch"); // another thread may have closed the node meanwhile
        const auto at = static_cast<Py_ssize_t>(i++);
        PyList_SET_ITEM(batch.get(), at, take_request(words).release());
      }
    } catch (...) {
      for (; i < n; i++) {
        words.take(2);
        const uint64_t np = words.next(), nq = words.next();
        skip_tensors(words, np);
        words.take(nq);
      }
      throw;
    }
    return batch.release();
  }
}

int32_t Server::worker_of(PyObject *handler) {
  enter_connected("worker_of");
  int32_t rank = 0;
  check("worker_of",
        fs_worker_of(id_, read_u64(handler, {"worker_of", "handler"}), &rank));
  return rank;
}

Ref Server::take_request(Words &words) {
  const uint64_t handler = words.next();
  words.next(); // the worker's rank: worker_of tells it
  const uint64_t np = words.next(), nq = words.next();
  Ref tensors = Ref::steal(PyList_New(static_cast<Py_ssize_t>(np)));
  Ref keys = Ref::steal(PyList_New(static_cast<Py_ssize_t>(np)));
  uint64_t i = 0;
  try {
    while (i < np) {
      const auto at = static_cast<Py_ssize_t>(i++);
      Ref key;
      Ref tensor = take_tensor(words, &key);
      PyList_SET_ITEM(tensors.get(), at, tensor.release());
      PyList_SET_ITEM(keys.get(), at, key.release());
    }
  } catch (...) {
    skip_tensors(words, np - i);
    words.take(nq);
    throw;
  }
  words.take(nq); // the engine checks the sizes of the answers itself
  Ref number = Ref::steal(PyLong_FromUnsignedLongLong(handler));
  return Ref::steal(PyTuple_Pack(3, number.get(), tensors.get(), keys.get()));
}

// Releases the buffers of tensors that nobody will see.
void Server::skip_tensors(Words &words, uint64_t n) {
  for (; n > 0; n--) {
    const uint64_t *w = words.take(8);
    words.take(w[7]);
    if (w[2])
      release(w[2], 1);
  }
}

// A tensor over the receive buffer. The worker chose dtype and dims; the engine
// has refused what fs_dtypes and torch's limit of dimensions do not allow.
Ref Server::take_tensor(Words &words, Ref *key) {
  const uint64_t *w = words.take(8);
  const uint64_t k = w[0], slot = w[1], buffer = w[2], address = w[3];
  const uint64_t bytes = w[4], dtype = w[5], device = w[6], ndim = w[7];
  const auto *dims = reinterpret_cast<const int64_t *>(words.take(ndim));
  Memory lent; // the worker's own, for this request alone: nothing is kept
  if (slot == FS_LENT)
    lent = adopt(pointer(address), bytes, -1, pointer(buffer), release_loan);
  const int on = static_cast<int>(static_cast<int64_t>(device));
  *key = Ref::steal(PyLong_FromUnsignedLongLong(k));
  if (lent)
    return Ref::steal(make_tensor(lent, dtype, dims, ndim));
  // Without bytes there is no receive buffer.
  return Ref::steal(
      bytes ? make_tensor(memory_of(slot, buffer, address, bytes, on), dtype,
                          dims, ndim)
            : make_tensor(nothing(info().device), dtype, dims, ndim));
}

// A new buffer in a slot replaces the old one, which lives on as long as the
// tensors over it.
const Memory &Server::memory_of(uint64_t slot, uint64_t buffer,
                                uint64_t address, uint64_t bytes, int device) {
  if (slot >= slots_.size())
    slots_.resize(slot + 1);
  Slot &s = slots_[slot];
  if (s.memory && s.buffer == buffer && s.address == address) {
    if (s.times)
      ++*s.times;
    if (bytes > s.bytes) {
      extend(s.memory, bytes);
      s.bytes = bytes;
    }
    return s.memory;
  }
  Memory m;
  uint64_t *times = nullptr;
  if (buffer) {
    auto owed = std::make_unique<Owed>(Owed{buffer, 1});
    m = adopt(pointer(address), bytes, device, owed.get(), release_owed);
    times = &owed.release()->times;
  } else {
    auto f = std::find_if(fixed_.begin(), fixed_.end(), [&](const Fixed &x) {
      return address >= x.begin && address + bytes <= x.end;
    });
    if (f == fixed_.end())
      raise(Kind::kError,
            "get_batch: the engine returned a tensor that is in no registered "
            "receive buffer (a fault of fserver: report it)");
    m = adopt(pointer(address), bytes, device, f->memory.share().release(),
              release_memory);
  }
  Slot old = std::move(s);
  s = Slot{buffer, address, bytes, times, std::move(m)};
  return s.memory;
}

void Server::respond(PyObject *tensors, PyObject *handler, bool need_event) {
  enter_connected("respond");
  holder_.reap();
  const Items items = tensor_items(tensors, kTensors);
  const size_t n = items.size();
  const uint64_t h = read_u64(handler, {"respond", "handler"});
  Allocations::Call call(allocations_);
  Tensors t(holder_, n);
  for (size_t i = 0; i < n; i++) {
    fs_tensor &a = read_source(t, items.at(i), kTensors, i);
    if (stepmesh_)
      a.dtype = FS_ANY;
  }
  fs_ticket ticket = 0;
  size_t answered = 0;
  Behind behind(need_event, t.on_gpu, n ? info().device : -1);
  auto send = [&] {
    return behind.find() ? fs_respond(id_, behind.stream(), &h, &n, 1,
                                      t.all.data(), &ticket, &answered)
                         : 0;
  };
  call.registers(t.fresh);
  const int rc = may_block(t.bytes, t.fresh) ? unlocked(send) : send();
  check("respond", rc);
  behind.refuse("respond");
  call.taken = true;
  t.lease.keep(ticket);
}

void Server::respond_vec(PyObject *ret_buffer, PyObject *tensors_vec,
                         PyObject *handler_vec) {
  enter_connected("respond_vec");
  holder_.reap();
  fs_tensor whole;
  Pins pins(1);
  Memory memory = read_tensor(pins.add(ret_buffer), kBuffer, -1, Access::kRead,
                              info().device, &whole);
  Allocations::Call call(allocations_);
  const bool fresh = number_source(memory, whole);
  if (stepmesh_)
    whole.dtype = FS_ANY;
  const Items vec(tensors_vec, kTensorsVec, "lists of tensors");
  const Items handlers(handler_vec, kHandlerVec, "ints");
  const size_t n = vec.size(), ndim = whole.ndim;
  check_vec(ndim, handlers.size(), n);
  const int64_t rows = whole.dims[0];
  const uint64_t row = rows ? whole.bytes / static_cast<uint64_t>(rows) : 0;

  Array<fs_tensor, 16> t(n);
  Array<int64_t, 64> dims(n * ndim);
  Array<uint64_t, 16> h(n);
  Array<size_t, 16> counts(n);
  int64_t total = 0;
  for (size_t k = 0; k < n; k++) {
    const int64_t r = rows_of_answer(vec.at(k), k, rows);
    h[k] = read_u64(handlers.at(k), kHandlerVec, static_cast<Py_ssize_t>(k));
    int64_t *d = dims.data() + k * ndim;
    std::copy(whole.dims, whole.dims + ndim, d);
    d[0] = r;
    t[k] = whole;
    t[k].dims = d;
    t[k].bytes = static_cast<uint64_t>(r) * row;
    t[k].data =
        static_cast<char *>(whole.data) + static_cast<uint64_t>(total) * row;
    counts[k] = 1;
    total += r;
  }
  if (total > rows) { // what StepMesh's callers with one small buffer rely on
    for (size_t k = 0; k < n; k++)
      t[k].data = whole.data;
  }

  Array<fs_ticket, 16> tickets(n);
  size_t answered = n;
  Behind behind(true, whole.device >= 0, info().device);
  auto send = [&] {
    return behind.find()
               ? fs_respond(id_, behind.stream(), h.data(), counts.data(), n,
                            t.data(), tickets.data(), &answered)
               : 0;
  };
  call.registers(fresh);
  int rc = may_block(whole.bytes, fresh) ? unlocked(send) : send();
  behind.refuse("respond_vec");
  call.taken = rc >= 0;
  for (size_t k = 0; k < (rc < 0 ? answered : n); k++) {
    Lease lease(holder_);
    lease.add(memory.again());
    lease.keep(tickets[k]);
  }
  check("respond_vec", rc);
}

void Server::fail(PyObject *handler, PyObject *text) {
  enter_connected("fail");
  const uint64_t h = read_u64(handler, {"fail", "handler"});
  if (!PyUnicode_Check(text))
    raise(Kind::kConfig, "fail: text is of type %s, want a str",
          Py_TYPE(text)->tp_name);
  const Ref bytes =
      Ref::steal(PyUnicode_AsEncodedString(text, "utf-8", "backslashreplace"));
  const char *p = PyBytes_AS_STRING(bytes.get());
  const auto n = static_cast<size_t>(PyBytes_GET_SIZE(bytes.get()));
  check("fail", unlocked([&] { return fs_fail(id_, h, p, n); }));
}

void Server::register_recv_buffer(PyObject *tensor, PyObject *worker_ranks,
                                  PyObject *push_keys) {
  enter("register_recv_buffer");
  fs_tensor t;
  Memory memory =
      read_tensor(tensor, kTensor, -1, Access::kWrite, info().device, &t);
  const Items ranks(worker_ranks, kRanks, "ints");
  const Items keys(push_keys, kKeys, "ints");
  const size_t n = ranks.size();
  if (n == 0)
    raise(Kind::kShape, "register_recv_buffer: worker_ranks is empty: give the "
                        "rank of the worker for each slice of tensor");
  if (keys.size() != n)
    raise(Kind::kShape,
          "register_recv_buffer: push_keys has %zu keys for %zu worker_ranks: "
          "give one for each",
          keys.size(), n);
  if (t.bytes == 0 || t.bytes % n)
    raise(Kind::kShape,
          "register_recv_buffer: tensor has %llu bytes, want a multiple of the "
          "number of worker_ranks (%zu): all slices are equal and not empty",
          static_cast<unsigned long long>(t.bytes), n);
  Array<int32_t, 64> r(n);
  Array<uint64_t, 64> k(n);
  for (size_t i = 0; i < n; i++) {
    r[i] = read_rank(ranks.at(i), kRanks, static_cast<Py_ssize_t>(i));
    k[i] = read_u64(keys.at(i), kKeys, static_cast<Py_ssize_t>(i));
  }
  const auto begin = reinterpret_cast<uint64_t>(t.data);
  const uint64_t end = begin + t.bytes;
  for (const Fixed &f : fixed_) {
    if (begin < f.end && f.begin < end)
      raise(Kind::kConfig,
            "register_recv_buffer: tensor shares memory with a tensor that is "
            "already registered: pass a tensor that does not overlap it");
  }
  check("register_recv_buffer",
        fs_register_recv(id_, &t, r.data(), k.data(), n));
  fixed_.push_back({begin, end, std::move(memory)});
}

} // namespace fserver
