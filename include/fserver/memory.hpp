// Memory: an allocation that the engine knows by number, so that it registers it once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "fserver/process.hpp"
#include "fserver/tensor.hpp"

namespace fserver {

// An allocation that tensors lie in. The engine registers it with the network device at its first
// use, and keeps that until the Memory is destroyed; a tensor in no Memory is registered by each
// call. A Memory must live for as long as a call that is under way names it.
class Memory {
public:
  // Allocates bytes zeros of the CPU, in pages of their own. Throws std::bad_alloc.
  explicit Memory(std::size_t bytes) : Memory(nullptr, bytes, kCpu, kOwn) {
    const std::size_t all = pages(kLead + bytes);
    void *const start = all < bytes ? nullptr : std::aligned_alloc(kPage, all);
    if (!start)
      throw std::bad_alloc();
    std::memset(start, 0, all);
    data_ = static_cast<char *>(start) + kLead;
  }

  // Names memory of the caller's, of the CPU or of a GPU. It must be a whole allocation or lie in
  // one, and stay there until the Memory is destroyed.
  static Memory of(void *data, std::size_t bytes, int device = kCpu) {
    return Memory(data, bytes, device, kForeign);
  }

  // Allocates bytes zeros (at least 1) that processes of this host can map: to push a tensor of it
  // to a server of this host moves no bytes. The server reads the tensor in place until it answers,
  // so do not change it before. Throws ConfigError if bytes is 0, and Error if there is no memory or
  // descriptor left.
  static Memory shared(std::size_t bytes) {
    detail::refuse_forked("Memory::shared");
    if (bytes == 0)
      throw ConfigError("Memory::shared: bytes is 0, want at least 1");
    Memory m(nullptr, bytes, kCpu, kShared);
    std::uint64_t address = 0;
    detail::check("Memory::shared",
                  fs_shared_alloc(bytes, &m.shared_, &address));
    m.data_ = reinterpret_cast<void *>(address);
    return m;
  }

  Memory() = default;
  Memory(Memory &&o) noexcept { swap(o); }
  Memory &operator=(Memory &&o) noexcept {
    Memory(std::move(o)).swap(*this);
    return *this;
  }
  ~Memory() {
    if (detail::forked.load()) { // no engine here, which has the shared memory
      if (kind_ == kOwn)
        std::free(start());
      return;
    }
    if (number_)
      detail::Nodes::all().forget(number_);
    if (kind_ == kOwn)
      std::free(start());
    else if (kind_ == kShared && shared_)
      fs_shared_free(shared_);
  }

  void *data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  int device() const noexcept { return device_; }
  template <class T> T *as() const noexcept { return static_cast<T *>(data_); }

  // A tensor that begins `offset` bytes behind data(). Throws ShapeError if it does not fit.
  Tensor tensor(DType dtype, Shape shape, std::uint64_t key = 0,
                std::size_t offset = 0) const {
    Tensor t(nullptr, dtype, std::move(shape), key, device_);
    if (offset > bytes_ || t.bytes > bytes_ - offset)
      throw ShapeError("Memory::tensor: " + std::to_string(t.bytes) +
                       " bytes from offset " + std::to_string(offset) +
                       " do not fit into " + std::to_string(bytes_) + " bytes");
    t.data = static_cast<char *>(data_) + offset;
    t.base = data_;
    t.base_bytes = bytes_;
    t.alloc = number_;
    return t;
  }

private:
  enum Kind { kForeign, kOwn, kShared };
  static constexpr std::size_t kPage = 4096;
  // Copies between two addresses of the same offset in a page are some percent slower, and the
  // kernel's buffers of a socket begin with a page.
  static constexpr std::size_t kLead = 256;

  Memory(void *data, std::size_t bytes, int device, Kind kind)
      : data_(data), bytes_(bytes), number_(next()), device_(device),
        kind_(kind) {}

  static std::uint64_t next() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
  }
  static std::size_t pages(std::size_t bytes) {
    return (bytes + kPage - 1) / kPage * kPage;
  }
  // What std::aligned_alloc gave.
  void *start() const noexcept {
    return data_ ? static_cast<char *>(data_) - kLead : nullptr;
  }
  void swap(Memory &o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(number_, o.number_);
    std::swap(shared_, o.shared_);
    std::swap(device_, o.device_);
    std::swap(kind_, o.kind_);
  }

  void *data_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint64_t number_ = 0;
  fs_shared shared_ = 0;
  int device_ = kCpu;
  Kind kind_ = kForeign;
};

} // namespace fserver
