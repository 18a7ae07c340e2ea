// Memory of an SArray that is registered once. For the other headers alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "fserver/memory.hpp"

namespace ps::detail {

// Memory that stays for as long as the Block, which the last SArray that has the memory destroys. If it is used in
// requests again and again, the engine registers it once, and lets go of it before the memory goes.
class Block {
public:
  // device: fserver::kCpu, or a GPU. first: the use from which on it is registered. `free` is given the memory at the
  // end, and `kept` is let go of.
  Block(void *data, std::size_t bytes, int device, int first,
        void (*free)(void *), std::shared_ptr<void> kept = nullptr)
      : data_(static_cast<char *>(data)), bytes_(bytes), device_(device),
        first_(first), free_(free), kept_(std::move(kept)) {}
  Block(const Block &) = delete;
  Block &operator=(const Block &) = delete;
  ~Block() {
    if (memory_.bytes())
      count().fetch_sub(1);
    memory_ = fserver::Memory();
    if (free_)
      free_(data_);
  }

  // A tensor of bytes that a request uses. Allocates nothing.
  fserver::Tensor tensor(void *at, std::size_t bytes, std::uint64_t key,
                         int device) {
    const auto n = static_cast<std::int64_t>(bytes);
    const char *begin = static_cast<char *>(at);
    const bool within =
        begin >= data_ && bytes <= bytes_ &&
        static_cast<std::size_t>(begin - data_) <= bytes_ - bytes;
    if (!within || bytes == 0 || device != device_ || !registered())
      return fserver::Tensor(at, fserver::DType::kUInt8, {n}, key, device);
    return memory_.tensor(fserver::DType::kUInt8, {n}, key,
                          static_cast<std::size_t>(begin - data_));
  }

  static constexpr std::size_t kLeast = 4096; // bytes of what is registered
  static constexpr int kMost = 4096;          // Blocks that are

private:
  static std::atomic<int> &count() {
    static std::atomic<int> n{0};
    return n;
  }

  // Whether the memory has a number in the engine. Counts a use.
  bool registered() {
    if (bytes_ < kLeast)
      return false;
    if (decided_.load(std::memory_order_acquire))
      return memory_.bytes() != 0;
    std::lock_guard<std::mutex> lock(mutex_);
    if (decided_.load(std::memory_order_relaxed))
      return memory_.bytes() != 0;
    if (++uses_ < first_)
      return false;
    if (count().fetch_add(1) < kMost)
      memory_ = fserver::Memory::of(data_, bytes_, device_);
    else
      count().fetch_sub(1);
    decided_.store(true, std::memory_order_release);
    return memory_.bytes() != 0;
  }

  char *const data_;
  const std::size_t bytes_;
  const int device_, first_;
  void (*const free_)(void *);
  const std::shared_ptr<void> kept_;
  std::mutex mutex_;
  int uses_ = 0;
  fserver::Memory memory_;           // empty: it is registered by each call
  std::atomic<bool> decided_{false}; // memory_ does not change any more
};

// The deleter by which an SArray's shared_ptr is known to have a Block.
struct Owner {
  Block *block;
  void operator()(const void *) const { delete block; }
};

// A tensor of bytes in the memory of an SArray.
template <class V>
fserver::Tensor tensor_of(const std::shared_ptr<V> &memory, void *at,
                          std::size_t bytes, std::uint64_t key, int device) {
  if (const Owner *o = std::get_deleter<Owner>(memory))
    return o->block->tensor(at, bytes, key, device);
  return fserver::Tensor(at, fserver::DType::kUInt8,
                         {static_cast<std::int64_t>(bytes)}, key, device);
}

} // namespace ps::detail
