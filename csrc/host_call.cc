#include "host_call.h"

#include <algorithm>

#include "error.h"
#include "flags.h"
#include "lane.h"
#include "process.h"

namespace fserver {
namespace {

// Threads of a kernel. More would copy no faster, and keep others from a multiprocessor
// while it waits.
constexpr unsigned kWarp = 32;

} // namespace

uint64_t HostCall::counter(PyObject *o, const char *name) {
  Counter c = read_counter(o, {call_.c_str(), name});
  if (c.device != device_)
    raise(Kind::kConfig, "%s: %s is on another device than cuda:%d",
          call_.c_str(), name, device_);
  held_.add(std::move(c.memory));
  return c.address;
}

uint64_t HostCall::read(PyObject *o, const char *name, uint64_t *bytes) {
  fs_tensor t;
  Memory m =
      read_tensor(o, {call_.c_str(), name}, -1, Access::kLook, device_, &t);
  held_.add(std::move(m));
  *bytes = t.bytes;
  return reinterpret_cast<uint64_t>(t.data);
}

void HostCall::ring(PyObject *count, PyObject *flag, bool last) {
  (last ? last_ : first_) = true;
  ring_ = {counter(count, "count"), counter(flag, "flag")};
}

void HostCall::wait(PyObject *count, uint64_t add, PyObject *asked,
                    PyObject *done) {
  waits_ = true;
  wait_ = {counter(count, "count"), add, counter(asked, "asked"),
           counter(done, "done")};
  done_ = Ref::borrow(done);
}

void HostCall::copy(PyObject *to, PyObject *from) {
  uint64_t room, bytes;
  const uint64_t at = read(to, "to", &room);
  const uint64_t there = read(from, "from", &bytes);
  if (room != bytes)
    raise(Kind::kShape, "%s: a tensor of %llu bytes is copied to one of %llu",
          call_.c_str(), static_cast<unsigned long long>(bytes),
          static_cast<unsigned long long>(room));
  copies_.push_back({at, there, bytes});
}

HostCall::Enqueued HostCall::run(PyObject *bytes) {
  held_.check(call_.c_str(), kReopen);
  const size_t n = copies_.size();
  Array<uint64_t, 16> count(n);
  for (size_t i = 0; i < n; i++)
    count[i] = copies_[i].bytes;
  if (bytes != Py_None) {
    const Arg arg{call_.c_str(), "bytes"};
    const Items items(bytes, arg, "ints");
    for (size_t i = 0; i < n && i < items.size(); i++)
      count[i] = std::min(
          count[i], read_u64(items.at(i), arg, static_cast<Py_ssize_t>(i)));
  }
  if (waits_) {
    waits_again();
    if (!holds_)
      hold(call_.c_str(), done_.get(), {wait_.done, device_, Memory()},
           device_);
    holds_ = true;
  }
  Tried tried;
  const Enqueued how = unlocked([&] {
    const OnDevice guard(device_);
    const Relaxed relaxed;
    const auto s = reinterpret_cast<cs_stream>(guard.stream());
    const bool captured = mark_.captured(s);
    if (!captured && mark_.elsewhere(s))
      return Enqueued::kElsewhere;
    enqueue(s, captured, count.data(), &tried);
    if (!captured) // also behind a part of it
      tried.ok("record an event", mark_.record(s));
    return captured ? Enqueued::kGraph : Enqueued::kStream;
  });
  if (!tried.good()) {
    char text[160];
    cs_cuda_text(tried.rc(), text, sizeof text);
    raise(Kind::kError, "%s: %s: %s", call_.c_str(), tried.what(), text);
  }
  return how;
}

// Small copies are made by the kernel of a ring behind them, or of the wait before them: to
// change from a kernel to a copy engine, or back, takes longer.
void HostCall::enqueue(cs_stream s, bool captured, uint64_t *bytes,
                       Tried *tried) {
  SmallCopies with{};
  const SmallCopies none{};
  uint64_t sum = 0;
  for (size_t i = 0; i < copies_.size(); i++)
    sum += bytes[i]; // NOLINT(clang-analyzer-core.uninitialized.Assign)
  for (size_t i = 0; i < copies_.size() && (last_ || waits_); i++) {
    const SmallCopy &c = copies_[i];
    const uint64_t most = sum > kSmallest ? kTiny : kSmallest;
    // NOLINTNEXTLINE(clang-analyzer-core.uninitialized.Branch)
    if (bytes[i] && bytes[i] <= most && with.n < kSmallCopies &&
        (c.to | c.from) % 16 == 0) {
      with.copies[with.n++] = {c.to, c.from, bytes[i]};
      bytes[i] = 0; // no copy engine makes it
    }
  }
  if (first_)
    start_ring(s, none, tried);
  if (waits_)
    start_wait(s, captured, last_ ? none : with, tried);
  for (size_t i = 0; i < copies_.size() && tried->good(); i++)
    if (bytes[i]) // NOLINT(clang-analyzer-core.uninitialized.Branch)
      tried->ok("copy a tensor of the channel",
                cs_cu.MemcpyAsync(copies_[i].to, copies_[i].from, bytes[i], s));
  if (last_)
    start_ring(s, with, tried);
}

void HostCall::start_ring(cs_stream s, const SmallCopies &with, Tried *tried) {
  Ring r = ring_;
  SmallCopies w = with;
  void *arguments[] = {&r.count, &r.flag, &w.n, w.copies};
  start(kernel(device_, Kernel::kRing, tried), s, kWarp, arguments, tried);
}

void HostCall::start_wait(cs_stream s, bool captured, const SmallCopies &with,
                          Tried *tried) {
  Page *p = the_page(tried);
  if (!p)
    return;
  Wait wait = wait_;
  SmallCopies w = with;
  uint64_t page = seen(p, tried), from = since(p, captured);
  void *arguments[] = {&wait.count, &wait.add, &wait.asked, &wait.done,
                       &page,       &from,     &w.n,        w.copies};
  start(kernel(device_, Kernel::kAwait, tried), s, kWarp, arguments, tried);
}

} // namespace fserver
