// What a request consists of: a head with the keys, and the values. For the other headers alone.
//
// A request is a push_pull with one server. It pushes the head, as a tensor of uint8, and, if it is a push, the values
// in a second one. A pull takes the values, then their lengths if they were asked for; a request for
// the size takes one number of 64 bits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "fserver/fserver.hpp"
#include "ps/base.h"

namespace ps::detail {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "a head is little-endian");

enum class Op : std::uint8_t {
  kPush = 1,
  kPull = 2,
  kSize =
      3, // a pull that the server keeps; it answers how many values there are
  kFetch = 4, // the values that the server has kept
};
constexpr std::uint8_t kWantsLens = 1; // the only flag

// The keys follow, then the lengths.
struct Head {
  std::uint32_t magic = kMagic;
  std::uint16_t version = kVersion;
  Op op = Op::kPush;
  std::uint8_t flags = 0;
  std::int32_t app = 0, customer = 0, timestamp = 0, cmd = 0;
  std::int32_t option = 0;
  std::uint32_t width = 0; // bytes of a value
  std::uint64_t keys = 0;  // at least 1
  std::uint64_t lens = 0;  // 0, or as many as keys
  std::uint64_t vals = 0;  // values that are pushed, or asked for

  static constexpr std::uint32_t kMagic = 0x764b7366;
  static constexpr std::uint16_t kVersion = 1;
};
static_assert(sizeof(Head) == 56 && sizeof(Head) % alignof(Key) == 0, "");

// A request has a number of 64 bits, from 0. The program is given the lower 30 bits of it, its timestamp.
constexpr int kTimestamps = 1 << 30;
inline int timestamp_of(std::int64_t number) {
  return static_cast<int>(number & (kTimestamps - 1));
}
// The last number before `next` with a timestamp; below 0: there is none.
inline std::int64_t number_of(std::int64_t next, int timestamp) {
  if (timestamp < 0 || timestamp >= kTimestamps)
    return -1;
  const std::int64_t number = next - timestamp_of(next) + timestamp;
  return number < next ? number : number - kTimestamps;
}

// A count as an int, or the largest one.
inline int clamped(std::uint64_t n) {
  return static_cast<int>(std::min<std::uint64_t>(n, INT32_MAX));
}

inline std::size_t bytes_of_head(std::size_t keys, std::size_t lens) {
  return sizeof(Head) + keys * sizeof(Key) + lens * sizeof(int);
}

// A number that looks random, different for each x: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast
// Splittable Pseudorandom Number Generators, 2014).
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr std::size_t kOwnKeys = 8192;      // first keys with keys of their own
constexpr std::uint64_t kSharedKeys = 4096; // keys that the others share

// The engine's key of the head of requests with a first key. That of the values is one more.
inline std::uint64_t engine_key(int app, Key first) {
  return mix(first ^ mix(static_cast<std::uint32_t>(app) + UINT64_C(1))) &
         ~UINT64_C(3);
}
inline std::uint64_t shared_key(std::uint64_t own) {
  return UINT64_C(0x6b76000000000000) | (own >> 2) % kSharedKeys << 2 | 2;
}

// Reads the head that a peer has sent, and the tensors around it. Returns what is wrong with it; empty: nothing.
inline std::string read_head(const fserver::Request &r, Head *out) {
  const auto &t = r.tensors();
  const auto n = [](std::uint64_t v) { return std::to_string(v); };
  if (t.empty() || t[0].device != fserver::kCpu || t[0].bytes < sizeof(Head))
    return "the request has no head: want a tensor of the CPU, of at least " +
           n(sizeof(Head)) + " bytes";
  std::memcpy(out, t[0].data, sizeof *out);
  const Head &h = *out;
  if (h.magic != Head::kMagic)
    return "the head begins with " + n(h.magic) + ", want " + n(Head::kMagic);
  if (h.version != Head::kVersion)
    return "the head has version " + n(h.version) + ", want " +
           n(Head::kVersion) + ": use one version of fserver everywhere";
  if (h.op < Op::kPush || h.op > Op::kFetch || h.flags > kWantsLens)
    return "the head has operation " + n(static_cast<std::uint8_t>(h.op)) +
           " and flags " + n(h.flags) + ", want 1 to 4 and 0 or 1";
  if (h.timestamp < 0)
    return "timestamp is negative";
  // The bounds come first, so that the sum does not overflow.
  const std::uint64_t rest = t[0].bytes - sizeof(Head);
  if (h.keys == 0 || h.keys > rest / sizeof(Key) ||
      (h.lens != 0 && h.lens != h.keys) ||
      bytes_of_head(h.keys, h.lens) != t[0].bytes)
    return "a head of " + n(t[0].bytes) + " bytes cannot have " + n(h.keys) +
           " keys and " + n(h.lens) + " lens";
  const bool push = h.op == Op::kPush;
  if (push && h.flags)
    return "a push asks for lens";
  if (t.size() != (push ? 2u : 1u))
    return n(t.size()) + " tensors came, want " +
           (push ? "head and values" : "the head alone");
  if (h.width == 0 || h.vals > UINT64_MAX / h.width ||
      (push && h.vals * h.width != t[1].bytes))
    return n(h.vals) + " values of " + n(h.width) +
           " bytes are not those that came";
  return "";
}

// Checks what a request wants to be answered. Returns what is wrong; empty: nothing.
inline std::string check_answers(const fserver::Request &r, const Head &h) {
  const auto &a = r.answers();
  const bool lens = h.flags & kWantsLens;
  bool fits = false;
  switch (h.op) {
  case Op::kPush:
    fits = a.empty();
    break;
  case Op::kSize:
    fits = a.size() == 1 && a[0] == sizeof(std::uint64_t);
    break;
  case Op::kPull:
  case Op::kFetch:
    fits = a.size() == (lens ? 2u : 1u) && a[0] == h.vals * h.width &&
           (!lens || a[1] == h.keys * sizeof(int));
  }
  return fits ? "" : "the pull tensors are not those of the head";
}

// Checks keys and lens that a peer has sent. Returns what is wrong; empty: nothing.
inline std::string check_keys(const Head &h, const Key *keys, const int *lens) {
  for (std::uint64_t i = 1; i < h.keys; i++) {
    if (keys[i] <= keys[i - 1])
      return "keys[" + std::to_string(i) + "] is " + std::to_string(keys[i]) +
             ", want more than the key before it";
  }
  if (h.lens == 0) {
    const bool fits = h.op != Op::kPush || h.vals % h.keys == 0;
    return fits ? ""
                : std::to_string(h.vals) +
                      " values without lens are not equally many for each of " +
                      std::to_string(h.keys) + " keys";
  }
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < h.keys; i++) {
    if (lens[i] < 0)
      return "lens[" + std::to_string(i) + "] is negative";
    sum += static_cast<std::uint64_t>(lens[i]);
  }
  if (h.op == Op::kPush && sum != h.vals)
    return "the lens sum up to " + std::to_string(sum) + ", want " +
           std::to_string(h.vals) + ", the number of values";
  return "";
}

} // namespace ps::detail
