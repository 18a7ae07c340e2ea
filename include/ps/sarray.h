// SArray: an array that copies share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fserver/error.hpp"
#include "ps/internal/block.h"
#include "ps/internal/message.h"
#include "ps/range.h"

namespace ps {

// An array of plain values. A copy and a segment share its memory, which goes with the last of them;
// none of it is copied. To grow beyond the capacity moves this SArray alone to new memory.
//
// Memory that an SArray has allocated, or deletes, is registered with the network when it is pushed or pulled for the
// second time, and stays so until it goes. Other memory is the program's, which may free it before the SArray goes: it
// is registered by each request, unless register_once says that it stays.
template <class V> class SArray {
  static_assert(std::is_trivially_copyable<V>::value,
                "SArray: want a type that memcpy may copy");

public:
  SArray() = default;
  explicit SArray(std::size_t size, V value = V()) { resize(size, value); }
  // Copies a list.
  SArray(const std::initializer_list<V> &list) {
    CopyFrom(list.begin(), list.size());
  }
  explicit SArray(const std::vector<V> &list) {
    CopyFrom(list.data(), list.size());
  }
  // Shares a vector, which must not grow.
  explicit SArray(const std::shared_ptr<std::vector<V>> &list)
      : ptr_(list, list->data()), size_(list->size()), capacity_(size_) {}
  // Shares memory of the caller's. `deletable`: of new V[], which the last SArray deletes.
  SArray(V *data, std::size_t size, bool deletable = false) {
    if (deletable)
      own(std::unique_ptr<V[]>(data), size), size_ = size;
    else
      *this = view(data, size);
  }
  template <class Deleter,
            class = std::enable_if_t<std::is_invocable_v<Deleter, V *>>>
  SArray(V *data, std::size_t size, Deleter deleter) {
    reset(data, size, deleter);
  }
  // The same, and where the memory is and goes to. Throws fserver::ConfigError if memory that is not of the CPU is
  // `deletable`.
  SArray(V *data, std::size_t size, DeviceType src_device_type,
         int src_device_id, DeviceType dst_device_type, int dst_device_id,
         bool deletable = false) {
    if (deletable && src_device_type == GPU)
      throw fserver::ConfigError("SArray: the memory of GPU " +
                                 std::to_string(src_device_id) +
                                 " is deletable: give a deleter for it");
    *this = SArray(data, size, deletable);
    src_device_type_ = src_device_type;
    src_device_id_ = src_device_id;
    dst_device_type_ = dst_device_type;
    dst_device_id_ = dst_device_id;
  }

  // Shares memory as that of another type. Throws fserver::ShapeError if the bytes are not those of
  // whole elements.
  template <class W> explicit SArray(const SArray<W> &other) { *this = other; }
  template <class W> SArray &operator=(const SArray<W> &other) {
    const std::size_t bytes = other.size() * sizeof(W);
    if (bytes % sizeof(V))
      throw fserver::ShapeError(
          "SArray: " + std::to_string(bytes) + " bytes are no multiple of " +
          std::to_string(sizeof(V)) + ", the size of the other type");
    ptr_ = std::shared_ptr<V>(other.ptr(), reinterpret_cast<V *>(other.data()));
    size_ = bytes / sizeof(V);
    capacity_ = other.capacity() * sizeof(W) / sizeof(V);
    src_device_type_ = other.src_device_type_;
    dst_device_type_ = other.dst_device_type_;
    src_device_id_ = other.src_device_id_;
    dst_device_id_ = other.dst_device_id_;
    return *this;
  }

  // Memory of the caller's, which stays for as long as it is used. Allocates nothing.
  static SArray view(V *data, std::size_t size) {
    SArray a;
    a.ptr_ = std::shared_ptr<V>(std::shared_ptr<void>(), data);
    a.size_ = a.capacity_ = size;
    return a;
  }

  // Takes other memory. The last SArray that has it calls deleter(data).
  template <class Deleter>
  void reset(V *data, std::size_t size, Deleter deleter,
             DeviceType src_device_type = UNK, int src_device_id = -1,
             DeviceType dst_device_type = UNK, int dst_device_id = -1) {
    ptr_.reset(data, deleter);
    size_ = capacity_ = size;
    src_device_type_ = src_device_type;
    src_device_id_ = src_device_id;
    dst_device_type_ = dst_device_type;
    dst_device_id_ = dst_device_id;
  }
  // Says that the memory stays where it is until the last SArray that shares it from now on has gone: this one, and its
  // later copies and segments. So it is registered with the network once, at its next use, and not by each request.
  // The memory is that of the CPU, or with src_device_type_ GPU that of GPU src_device_id_.
  void register_once() {
    const int device = src_device_type_ == GPU ? src_device_id_ : fserver::kCpu;
    auto block = std::make_unique<detail::Block>(data(), capacity_ * sizeof(V),
                                                 device, 1, nullptr, ptr_);
    V *const at = data();
    ptr_ = std::shared_ptr<V>(at, detail::Owner{block.release()});
  }
  // Takes memory of the CPU for at least so many elements, and keeps the elements.
  void reserve(std::size_t capacity) {
    if (capacity <= capacity_)
      return;
    std::unique_ptr<V[]> data(new V[capacity]);
    std::copy_n(begin(), std::min(size_, capacity), data.get());
    own(std::move(data), capacity);
    src_device_type_ = dst_device_type_ = UNK;
    src_device_id_ = dst_device_id_ = -1;
  }
  // Changes the number of elements. New ones have the value.
  void resize(std::size_t size, V value = V()) {
    reserve(size);
    if (size > size_)
      std::fill(data() + size_, data() + size, value);
    size_ = size;
  }
  void clear() { *this = SArray(); }

  // Copies elements into this memory, which grows as needed.
  void CopyFrom(const V *data, std::size_t size) {
    reserve(size);
    if (size)
      std::memmove(static_cast<void *>(ptr_.get()), data, size * sizeof(V));
    size_ = size;
  }
  void CopyFrom(const SArray &other) { CopyFrom(other.data(), other.size()); }
  template <class Iterator> void CopyFrom(Iterator begin, Iterator end) {
    const auto size = static_cast<std::size_t>(std::distance(begin, end));
    reserve(size);
    std::copy(begin, end, ptr_.get());
    size_ = size;
  }

  // The elements from begin up to, but not including, end; shares. If the segment grows, it moves, and so leaves the
  // elements after end as they are. Throws fserver::ShapeError if it is not within the array.
  SArray segment(std::size_t begin, std::size_t end) const {
    if (begin > end || end > size_)
      throw fserver::ShapeError(
          "SArray::segment: from " + std::to_string(begin) + " to " +
          std::to_string(end) + " of " + std::to_string(size_) + " elements");
    SArray part = *this;
    part.ptr_ = std::shared_ptr<V>(ptr_, data() + begin);
    part.size_ = part.capacity_ = end - begin;
    return part;
  }
  void append(const SArray &other) {
    const std::size_t at = size_;
    const SArray kept = other; // which may be this one
    resize(size_ + kept.size());
    std::copy(kept.begin(), kept.end(), data() + at);
  }
  void push_back(const V &value) {
    const V kept = value;
    if (size_ == capacity_)
      reserve(size_ * 2 + 5);
    ptr_.get()[size_++] = kept;
  }
  void pop_back() {
    if (size_)
      size_--;
  }

  V *data() const { return ptr_.get(); }
  std::size_t size() const { return size_; }
  std::size_t capacity() const { return capacity_; }
  bool empty() const { return size_ == 0; }
  V *begin() const { return data(); }
  V *end() const { return data() + size_; }
  V &operator[](std::size_t i) const { return data()[i]; }
  V &front() const { return data()[0]; }
  V &back() const { return data()[size_ - 1]; }
  // What keeps the memory.
  const std::shared_ptr<V> &ptr() const { return ptr_; }
  std::shared_ptr<V> &ptr() { return ptr_; }
  // The number of elements, and the devices, in one line.
  std::string DebugString() const {
    const auto device = [](DeviceType type, int id) {
      return std::string(DeviceTypeName[type]) + "[" + std::to_string(id) + "]";
    };
    return "[data_size=" + std::to_string(size_) + " " +
           device(src_device_type_, src_device_id_) + "->" +
           device(dst_device_type_, dst_device_id_) + "]";
  }

  // Where the memory is (UNK: the CPU), and where it goes to, which fserver does not look at.
  DeviceType src_device_type_ = UNK;
  int src_device_id_ = -1;
  DeviceType dst_device_type_ = UNK;
  int dst_device_id_ = -1;

private:
  // Takes memory of new V[].
  void own(std::unique_ptr<V[]> data, std::size_t capacity) {
    auto block = std::make_unique<detail::Block>(
        data.get(), capacity * sizeof(V), fserver::kCpu, 2,
        [](void *p) { delete[] static_cast<V *>(p); });
    V *const at = data.release();
    ptr_ = std::shared_ptr<V>(at, detail::Owner{block.release()});
    capacity_ = capacity;
  }

  std::shared_ptr<V> ptr_;
  std::size_t size_ = 0, capacity_ = 0;
};

// The indices of the elements of a sorted array that lie in a range of values.
template <class V> Range FindRange(const SArray<V> &sorted, V lower, V upper) {
  if (upper <= lower)
    return Range(0, 0);
  const V *first = std::lower_bound(sorted.begin(), sorted.end(), lower);
  const V *last = std::lower_bound(sorted.begin(), sorted.end(), upper);
  return Range(static_cast<std::uint64_t>(first - sorted.begin()),
               static_cast<std::uint64_t>(last - sorted.begin()));
}

// "[1, 2, 3]", with at most the first and last five.
template <class V>
std::ostream &operator<<(std::ostream &out, const SArray<V> &all) {
  out << "[";
  for (std::size_t i = 0; i < all.size(); i++) {
    if (all.size() > 10 && i == 5) {
      out << ", ...";
      i = all.size() - 5;
    }
    out << (i ? ", " : "") << +all[i];
  }
  return out << "]";
}

} // namespace ps
