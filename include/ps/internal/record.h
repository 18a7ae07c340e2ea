// Records of requests of a worker, and the memory of their heads. For the other headers alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ps/internal/wire.h"
#include "ps/range.h"
#include "ps/sarray.h"

namespace ps::detail {

// What one server gets of a request. The record keeps the memory that it points to.
struct Piece {
  int server = 0;
  const Key *keys = nullptr;
  std::size_t nkeys = 0;
  const int *lens = nullptr; // pushed
  std::size_t nlens = 0;
  char *vals = nullptr; // pushed, or where they are pulled to
  std::size_t nvals = 0;
  int *lens_to = nullptr; // pulled
};

// A Piece and the push_pull that carries it.
struct Part : Piece {
  fserver::Handle handle;
  bool open = false; // the push_pull has not ended, as far as we have looked
  const fserver::Memory *slab = nullptr; // the count, then a small head
  std::size_t at = 0;                    // within slab
  fserver::Memory large;                 // a head that does not fit there

  std::uint64_t count() const {
    std::uint64_t n;
    std::memcpy(&n, slab->as<char>() + at, sizeof n);
    return n;
  }
};

// What a request is to do.
struct Ask {
  Op op = Op::kPush; // kPush or kPull
  int cmd = 0;
  std::uint32_t width = 1; // bytes of a value
  SArray<Key> keys;
  SArray<char> vals; // pushed, or where they are pulled to, if that is known
  SArray<int> lens;  // pushed, or where they are pulled to
  bool wants_lens = false;
  // A pull of unknown size: returns memory for so many values. Throws if they do not fit.
  SArray<char> (*room)(void *target, std::size_t count) = nullptr;
  void *target = nullptr;
  std::function<void()> done;
  // How a slicer has cut the request, and what keeps that; null: by the servers' ranges.
  const std::vector<Piece> *pieces = nullptr;
  std::shared_ptr<void> kept;
};

// A request under way.
struct Record {
  enum State { kFree, kSending, kOpen };
  State state = kFree;
  std::int64_t number = 0;
  Ask ask;
  Op op = Op::kPush; // the step: of a pull of unknown size kSize, then kFetch
  std::vector<Part> parts; // one for each server
  std::size_t used = 0;    // parts of this request
  std::exception_ptr error;
  // While it is being sent: no push_pull of it under way has this number or a smaller one.
  std::atomic<std::uint64_t> floor{0};

  bool open() const {
    for (std::size_t i = 0; i < used; i++) {
      if (parts[i].open)
        return true;
    }
    return false;
  }
};

// Records that are used again and again, with memory for their heads.
class Records {
public:
  explicit Records(std::size_t servers) : servers_(servers) {}

  Record *get() {
    if (free_.empty())
      return make();
    Record *r = free_.back();
    free_.pop_back();
    return r;
  }
  // Lets go of what the record has kept.
  void put(Record *r) {
    r->ask = Ask();
    r->error = nullptr;
    r->used = 0;
    r->state = Record::kFree;
    free_.push_back(r);
  }

private:
  static constexpr std::size_t kSlot = 512, kSlots = 128;

  Record *make() {
    all_.push_back(std::make_unique<Record>());
    free_.reserve(all_.size());
    Record *r = all_.back().get();
    r->parts.resize(servers_);
    for (Part &p : r->parts) {
      if (slots_++ % kSlots == 0)
        slabs_.push_back(std::make_unique<fserver::Memory>(kSlot * kSlots));
      p.slab = slabs_.back().get();
      p.at = (slots_ - 1) % kSlots * kSlot;
    }
    return r;
  }

  std::size_t servers_, slots_ = 0;
  std::vector<std::unique_ptr<Record>> all_;
  std::vector<Record *> free_;
  std::vector<std::unique_ptr<fserver::Memory>> slabs_;
  friend fserver::Tensor head_of(Part &, std::size_t, std::uint64_t);
};

// The tensor of a head of some bytes, which are to be written to its data.
inline fserver::Tensor head_of(Part &p, std::size_t bytes, std::uint64_t key) {
  constexpr std::size_t kOffset = 64; // the count is before it
  const auto n = static_cast<std::int64_t>(bytes);
  if (bytes <= Records::kSlot - kOffset)
    return p.slab->tensor(fserver::DType::kUInt8, {n}, key, p.at + kOffset);
  if (p.large.bytes() < bytes)
    p.large = fserver::Memory(bytes + bytes / 2);
  return p.large.tensor(fserver::DType::kUInt8, {n}, key);
}

[[noreturn]] inline void refuse(const std::string &text) {
  throw fserver::ShapeError(text);
}

// Checks the lists of a request.
inline void check(const Ask &a) {
  const std::size_t keys = a.keys.size(), vals = a.vals.size() / a.width;
  const auto n = [](std::size_t v) { return std::to_string(v); };
  for (std::size_t i = 1; i < keys; i++) {
    if (a.keys[i] <= a.keys[i - 1])
      throw fserver::ConfigError("keys[" + n(i) + "] is " + n(a.keys[i]) +
                                 " after " + n(a.keys[i - 1]) +
                                 ": keys must be sorted, each once");
  }
  if (!a.lens.empty() && a.lens.size() != keys)
    refuse("lens has " + n(a.lens.size()) + " lengths for " + n(keys) +
           " keys: give none, or one for each");
  if (keys == 0 && vals)
    refuse("vals has " + n(vals) + " values, but there is no key");
  if (a.op == Op::kPull)
    return;
  if (a.lens.empty()) {
    if (keys && vals % keys)
      refuse("vals has " + n(vals) + " values for " + n(keys) +
             " keys: give a multiple of the keys, or lens");
    return;
  }
  std::size_t sum = 0;
  for (std::size_t i = 0; i < keys; i++) {
    if (a.lens[i] < 0)
      refuse("lens[" + n(i) + "] is " + std::to_string(a.lens[i]) +
             ", want 0 or more");
    sum += static_cast<std::size_t>(a.lens[i]);
  }
  if (sum != vals)
    refuse("vals has " + n(vals) + " values, but lens sum up to " + n(sum));
}

// Cuts a request by the servers' ranges of keys. The last range has all keys that follow, too.
inline void cut(Record &r, const std::vector<Range> &ranges) {
  const Ask &a = r.ask;
  const Key *key = a.keys.begin(), *end = a.keys.end();
  const std::size_t total = a.vals.size() / a.width;
  const std::size_t each = a.keys.empty() ? 0 : total / a.keys.size();
  const bool pushed = a.op == Op::kPush && !a.lens.empty();
  std::size_t val = 0;
  for (std::size_t s = 0; s < ranges.size() && key != end; s++) {
    const Key *next = s + 1 == ranges.size()
                          ? end
                          : std::lower_bound(key, end, ranges[s].end());
    if (next == key)
      continue;
    Piece &p = r.parts[r.used++];
    const auto first = static_cast<std::size_t>(key - a.keys.begin());
    p = Piece{static_cast<int>(s), key, static_cast<std::size_t>(next - key)};
    p.nvals = each * p.nkeys;
    if (pushed) {
      p.lens = a.lens.data() + first;
      p.nlens = p.nkeys;
      p.nvals = 0;
      for (std::size_t i = 0; i < p.nlens; i++)
        p.nvals += static_cast<std::size_t>(p.lens[i]);
    }
    if (a.wants_lens)
      p.lens_to = a.lens.data() + first;
    p.vals = a.vals.data() + val * a.width;
    val += p.nvals;
    key = next;
  }
  if (r.used == 1) // which has all, with lens too
    r.parts[0].nvals = total;
}

} // namespace ps::detail
