// SArray: an array that copies share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fserver/error.hpp"
#include "ps/internal/message.h"

namespace ps {

// A shared array: copying it, segment() and the conversion between element types share the memory,
// which goes with the last of them. Elements are plain data.
template <class V> class SArray {
public:
  SArray() = default;

  // size elements that are zero.
  explicit SArray(std::size_t size, V value = V()) { resize(size, value); }

  // Shares with an array of another type. Throws ShapeError if the bytes are no whole elements.
  template <class W> explicit SArray(const SArray<W> &other) { *this = other; }
  template <class W> SArray &operator=(const SArray<W> &other) {
    const std::size_t bytes = other.size() * sizeof(W);
    if (bytes % sizeof(V))
      throw fserver::ShapeError("SArray: " + std::to_string(bytes) +
                                " bytes are no whole elements of " +
                                std::to_string(sizeof(V)));
    size_ = bytes / sizeof(V);
    capacity_ = other.capacity() * sizeof(W) / sizeof(V);
    owner_ =
        std::shared_ptr<V>(other.ptr(), reinterpret_cast<V *>(other.data()));
    src_device_type_ = other.src_device_type_;
    src_device_id_ = other.src_device_id_;
    dst_device_type_ = other.dst_device_type_;
    dst_device_id_ = other.dst_device_id_;
    return *this;
  }

  // Memory of the caller's; with deletable the array deletes it.
  SArray(V *data, std::size_t size, bool deletable = false) {
    if (deletable)
      reset(data, size, [](V *p) { delete[] p; });
    else
      reset(data, size, [](V *) {});
  }

  // Copies.
  explicit SArray(const std::vector<V> &v) { CopyFrom(v.data(), v.size()); }
  SArray(std::initializer_list<V> v) { CopyFrom(v.begin(), v.size()); }
  // Shares with a vector, which the array keeps.
  explicit SArray(const std::shared_ptr<std::vector<V>> &v)
      : owner_(v, v->data()), size_(v->size()), capacity_(v->size()) {}

  // Memory of the caller's, which deleter(data) gives back with the last copy.
  template <class Deleter>
  void reset(V *data, std::size_t size, Deleter deleter) {
    owner_.reset(data, std::move(deleter));
    size_ = capacity_ = size;
  }

  // Takes size elements; those that are new are value. It shares no more if it has to grow.
  void resize(std::size_t size, V value = V()) {
    const std::size_t old = size_;
    reserve(size);
    size_ = size;
    if (size > old)
      std::fill(data() + old, data() + size, value);
  }

  void reserve(std::size_t capacity) {
    if (capacity <= capacity_)
      return;
    V *fresh = new V[capacity];
    std::copy(begin(), end(), fresh);
    owner_.reset(fresh, [](V *p) { delete[] p; });
    capacity_ = capacity;
  }

  void push_back(const V &value) {
    if (size_ == capacity_)
      reserve(std::max<std::size_t>(2 * size_, 5));
    data()[size_++] = value;
  }

  void CopyFrom(const V *from, std::size_t size) {
    SArray fresh;
    fresh.reserve(size);
    std::copy(from, from + size, fresh.data());
    owner_ = std::move(fresh.owner_);
    size_ = capacity_ = size;
  }
  void CopyFrom(const SArray &other) { CopyFrom(other.data(), other.size()); }
  template <class It> void CopyFrom(It first, It last) {
    const std::vector<V> v(first, last);
    CopyFrom(v.data(), v.size());
  }

  // The elements from begin to end, without end, of the same memory. Throws ShapeError.
  SArray segment(std::size_t begin, std::size_t end) const {
    if (begin > end || end > size_)
      throw fserver::ShapeError("SArray::segment: [" + std::to_string(begin) +
                                ", " + std::to_string(end) + ") is not in " +
                                std::to_string(size_) + " elements");
    SArray part = *this;
    part.owner_ = std::shared_ptr<V>(owner_, data() + begin);
    part.size_ = part.capacity_ = end - begin;
    return part;
  }

  void clear() {
    owner_.reset();
    size_ = capacity_ = 0;
  }

  V *data() const { return owner_.get(); }
  std::size_t size() const { return size_; }
  std::size_t capacity() const { return capacity_; }
  bool empty() const { return size_ == 0; }
  V *begin() const { return data(); }
  V *end() const { return data() + size_; }
  V &operator[](std::size_t i) const { return data()[i]; }
  V front() const { return data()[0]; }
  V back() const { return data()[size_ - 1]; }
  const std::shared_ptr<V> &ptr() const { return owner_; }

  // Where the memory is, at the sender and at the receiver.
  DeviceType src_device_type_ = UNK, dst_device_type_ = UNK;
  int src_device_id_ = -1, dst_device_id_ = -1;

private:
  std::shared_ptr<V> owner_;
  std::size_t size_ = 0, capacity_ = 0;
};

} // namespace ps
