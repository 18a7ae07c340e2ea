#include "worker.h"

#include <algorithm>
#include <optional>
#include <string>

#include "args.h"
#include "error.h"
#include "process.h"

namespace fserver {
namespace {

constexpr int64_t kDefaultTimeout = 10'000'000'000;

constexpr Arg kPush{"push_pull", "push_tensors"};
constexpr Arg kPushKeys{"push_pull", "push_keys"};
constexpr Arg kPull{"push_pull", "pull_tensors"};
constexpr Arg kPullKeys{"push_pull", "pull_keys"};

// Refuses keys that are pushed twice: both would go to one receive buffer.
void check_distinct(fs_tensor *t, size_t n) {
  Array<uint64_t, 32> keys(n);
  for (size_t i = 0; i < n; i++)
    keys[i] = t[i].key;
  std::sort(keys.data(), keys.data() + n);
  for (size_t i = 1; i < n; i++) {
    if (keys[i] == keys[i - 1])
      raise(Kind::kConfig,
            "push_pull: push_keys contains %llu twice: give each tensor of a "
            "call a different key",
            static_cast<unsigned long long>(keys[i]));
  }
}

// Refuses memory that is written twice, and, if strict, memory that is written
// while it is sent.
void check_overlap(const fs_tensor *t, size_t np, size_t nq, bool strict) {
  struct Span {
    uintptr_t begin, end;
    size_t i;
  };
  Array<Span, 16> spans(np + nq);
  size_t n = 0;
  for (size_t i = strict ? 0 : np; i < np + nq; i++) {
    auto begin = reinterpret_cast<uintptr_t>(t[i].data);
    if (t[i].bytes)
      spans[n++] = {begin, begin + t[i].bytes, i};
  }
  std::sort(spans.data(), spans.data() + n,
            [](const Span &a, const Span &b) { return a.begin < b.begin; });
  // The furthest end so far of any tensor, and of a pull tensor.
  size_t any = 0, pull = n;
  for (size_t k = 0; k < n; k++) {
    const Span &s = spans[k];
    const bool writes = s.i >= np;
    size_t other = n;
    if (k > 0 && writes && spans[any].end > s.begin)
      other = any;
    else if (pull < n && spans[pull].end > s.begin)
      other = pull;
    if (other < n) {
      size_t a = spans[other].i, b = s.i;
      if (a < np) // name the pull tensor first
        std::swap(a, b);
      raise(Kind::kConfig,
            "push_pull: pull_tensors[%zu] and %s[%zu] share memory: pass "
            "tensors that do not overlap",
            a - np, b < np ? "push_tensors" : "pull_tensors",
            b < np ? b : b - np);
    }
    if (k == 0 || s.end > spans[any].end)
      any = k;
    if (writes && (pull == n || s.end > spans[pull].end))
      pull = k;
  }
}

// Refuses a push_pull of np and nq tensors with npk and nqk keys unless the numbers
// fit.
void check_counts(size_t np, size_t nq, size_t npk, size_t nqk,
                  size_t servers) {
  if (np + nq == 0)
    raise(Kind::kShape, "push_pull: push_tensors and pull_tensors are both "
                        "empty: give at least one tensor");
  if (npk != np)
    raise(
        Kind::kShape,
        "push_pull: push_keys has %zu keys for %zu push_tensors: give one for "
        "each",
        npk, np);
  if (nq % servers)
    raise(Kind::kShape,
          "push_pull: pull_tensors has %zu tensors, want a multiple of the "
          "number of servers (%zu): pull_tensors[i*Q + j] is tensor j of Q "
          "from server i",
          nq, servers);
  if (nqk != nq && nqk != nq / servers)
    raise(Kind::kShape,
          "push_pull: pull_keys has %zu keys for %zu pull_tensors of %zu "
          "servers: give one for each tensor (%zu), or one for each tensor of "
          "a server (%zu)",
          nqk, nq, servers, nq, nq / servers);
}

} // namespace

Worker::Worker(const std::vector<std::string> &settings, uint64_t next_handler,
               bool stepmesh)
    : Node(settings), stepmesh_(stepmesh), requests_(info().mask + 1),
      next_(next_handler) {}

uint64_t Worker::push_pull(PyObject *push_tensors, PyObject *push_keys,
                           PyObject *pull_tensors, PyObject *pull_keys,
                           bool need_event, uint64_t channel) {
  enter_connected("push_pull");
  const int64_t started = now_ns();
  holder_.reap();

  const Items push = tensor_items(push_tensors, kPush);
  const Items pull = tensor_items(pull_tensors, kPull);
  const Items pkeys(push_keys, kPushKeys, "ints");
  const Items qkeys(pull_keys, kPullKeys, "ints");
  const size_t np = push.size(), nq = pull.size();
  const size_t nqk = qkeys.size();
  const size_t servers = static_cast<size_t>(info().servers);
  check_counts(np, nq, pkeys.size(), nqk, servers);

  const uint64_t given_up = this->given_up();
  Allocations::Call call(allocations_);
  Tensors t(holder_, np + nq);
  for (size_t i = 0; i < np; i++) {
    fs_tensor &p = read_source(t, push.at(i), kPush, i);
    p.key = read_u64(pkeys.at(i), kPushKeys, i);
  }
  for (size_t j = 0; j < nq; j++) {
    const uint64_t key = read_u64(qkeys.at(j % nqk), kPullKeys, j % nqk);
    fs_tensor &q = t.all[np + j];
    Memory m = t.read(pull.at(j), kPull, j, Access::kWrite, info().device, q);
    q.key = key;
    if (stepmesh_)
      q.dtype = FS_ANY;
    if (q.bytes)
      t.fresh |= allocations_.number(id_, m, q, given_up) &&
                 (info().registers || given_up);
    t.lease.add(std::move(m));
  }
  if (np > 1)
    check_distinct(t.all.data(), np);
  if (nq > 1 || (np && servers > 1))
    check_overlap(t.all.data(), np, nq, servers > 1);

  std::optional<Claims::Claim> claim;
  if (!stepmesh_ && !channel)
    claim.emplace(claims_, t.all.data(), np, nq);
  fs_ticket ticket = 0;
  Behind behind(need_event, t.on_gpu, np || t.on_gpu ? info().device : -1);
  auto send = [&] {
    if (!behind.find())
      return 0;
    return fs_push_pull(id_, channel, channel ? nullptr : behind.stream(),
                        t.all.data(), np, t.all.data() + np, nq, &ticket);
  };
  call.registers(t.fresh);
  const int rc = may_block(t.bytes, t.fresh) ? unlocked(send) : send();
  check("push_pull", rc);
  behind.refuse("push_pull");
  call.taken = true;
  t.lease.keep(ticket);
  const uint64_t first = next_;
  if (claim)
    claim->keep(ticket, first);
  // StepMesh has one for the answers of all servers.
  const size_t count = np + (stepmesh_ ? nq / servers : nq);
  next_ += count;
  requests_[ticket & (requests_.size() - 1)] = {
      ticket, first, static_cast<uint32_t>(count), started};
  newest_ = std::max(newest_, ticket);
  return first;
}

const Worker::Request *Worker::look_up(uint64_t handler) const {
  const size_t n = requests_.size();
  for (size_t i = 0; i < n; i++) { // from the newest: most waits are for it
    const Request &r = requests_[(newest_ - i) & (n - 1)];
    if (handler - r.first < r.count)
      return &r;
  }
  return nullptr;
}

const Worker::Request &Worker::find(PyObject *handler, const char *call) const {
  const uint64_t h = read_u64(handler, {call, "handler"});
  const size_t n = requests_.size();
  if (const Request *r = look_up(h))
    return *r;
  if (next_ == 0)
    raise(Kind::kConfig,
          "%s: handler %llu is not known: there has been no "
          "push_pull yet",
          call, static_cast<unsigned long long>(h));
  raise(Kind::kConfig,
        "%s: handler %llu is not known: push_pull has returned 0 to %llu, and "
        "only the last %zu requests are kept",
        call, static_cast<unsigned long long>(h),
        static_cast<unsigned long long>(next_ - 1), n);
}

void Worker::wait(PyObject *handler, PyObject *timeout_ms) {
  enter_connected("wait");
  const int64_t timeout = timeout_ms
                              ? read_ms(timeout_ms, {"wait", "timeout_ms"})
                              : kDefaultTimeout;
  const Request r = find(handler, "wait");
  if (!holder_.done(r.ticket)) {
    const int64_t from = stepmesh_ ? r.started : now_ns();
    int rc = in_slices(from + timeout, [&](int64_t slice, uint32_t flags) {
      return fs_wait(id_, r.ticket, slice, flags);
    });
    if (rc == -EAGAIN)
      raise(Kind::kTimeout,
            "wait: handler %llu has not completed within %g ms%s: %swait "
            "again%s, "
            "the handler stays valid",
            static_cast<unsigned long long>(r.first),
            static_cast<double>(timeout) / 1e6,
            stepmesh_ ? " of its push_pull" : "", why_open(r.ticket).c_str(),
            stepmesh_ ? " with a larger timeout_ms" : "");
    check("wait", rc);
  }
  holder_.reap(r.ticket);
}

uint64_t Worker::ticket(PyObject *handler) {
  const Request *r = look_up(read_u64(handler, {"done", "handler"}));
  return r && !closed() && holder_.open(r->ticket) ? r->ticket : 0;
}

bool Worker::done(PyObject *handler) {
  const Request *r = look_up(read_u64(handler, {"done", "handler"}));
  if (!r || closed() || forked.load())
    return true;
  const fs_ticket t = r->ticket;
  if (holder_.open(t) && !exiting.load()) // an error is for wait
    unlocked([&] { return fs_wait(id_, t, 0, FS_NOSPIN); });
  if (!forked.load() && holder_.open(t))
    return false;
  holder_.reap(t);
  return true;
}

std::string Worker::why_open(fs_ticket ticket) const {
  fs_pending p;
  if (unlocked([&] { return fs_waits_for(id_, ticket, &p); }) < 0)
    return ""; // it has ended by now
  const std::string at = "server " + std::to_string(p.server);
  const std::string key = " (key " + std::to_string(p.key) + ")";
  if (p.sent)
    return at + " has not answered it" + key + "; ";
  const std::string unsent = "it is not sent to " + at + " yet" + key + ": ";
  if (!p.behind)
    return unsent + "that is lost, has no receive buffer for it yet, or takes "
                    "no more for now, or a stream has not come to it; ";
  const Request &r = requests_[p.behind & (requests_.size() - 1)];
  return unsent + "it waits for " +
         (r.ticket == p.behind ? "handler " + std::to_string(r.first)
                               : "an earlier request") +
         "; ";
}

std::pair<uint64_t, uint64_t> Worker::handlers(PyObject *handler) {
  enter("get_all_handlers");
  const Request &r = find(handler, "get_all_handlers");
  return {r.first, r.count};
}

void Worker::trace(PyObject *handler, int64_t (&stamps)[8]) {
  enter("fetch_trace");
  check("fetch_trace",
        fs_trace(id_, find(handler, "fetch_trace").ticket, stamps));
}

} // namespace fserver
