// Tensors: what a call is given, and what a server receives. They own no memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "fserver/dtype.hpp"
#include "fserver/error.hpp"

namespace fserver {

// The device of memory that is not on a GPU.
constexpr int kCpu = -1;

// The lengths of a tensor's dimensions, outermost first. None: one element. Up to 8 are kept in
// place; more are on the heap.
class Shape {
public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) {
    assign(dims.begin(), dims.size());
  }
  Shape(const std::int64_t *dims, std::size_t n) { assign(dims, n); }
  Shape(const Shape &) = default;
  Shape &operator=(const Shape &) = default;
  Shape(Shape &&o) noexcept { *this = std::move(o); }
  Shape &operator=(Shape &&o) noexcept {
    n_ = std::exchange(o.n_, 0);
    std::copy(o.few_, o.few_ + kInline, few_);
    more_ = std::move(o.more_);
    return *this;
  }
  ~Shape() = default;

  // Takes n dimensions; allocates only for more than 8, and more than ever before.
  void assign(const std::int64_t *dims, std::size_t n) {
    if (n > kInline)
      more_.assign(dims, dims + n);
    else
      std::copy(dims, dims + n, few_);
    n_ = n;
  }

  std::size_t size() const noexcept { return n_; }
  const std::int64_t *data() const noexcept {
    return n_ > kInline ? more_.data() : few_;
  }
  const std::int64_t *begin() const noexcept { return data(); }
  const std::int64_t *end() const noexcept { return data() + n_; }
  std::int64_t operator[](std::size_t i) const noexcept { return data()[i]; }
  bool operator==(const Shape &o) const noexcept {
    return std::equal(begin(), end(), o.begin(), o.end());
  }
  bool operator!=(const Shape &o) const noexcept { return !(*this == o); }

  // "[2, 3]"
  std::string text() const {
    std::string s = "[";
    for (std::size_t i = 0; i < n_; i++)
      s += (i ? ", " : "") + std::to_string(data()[i]);
    return s + "]";
  }

private:
  static constexpr std::size_t kInline = 8;
  std::size_t n_ = 0;
  std::int64_t few_[kInline] = {};
  std::vector<std::int64_t> more_;
};

namespace detail {

// Counts the bytes of a dtype and shape. False: there is no such tensor.
inline bool count_bytes(DType type, const Shape &dims, std::uint64_t *out) {
  std::uint64_t n = size_of(type);
  const bool none = std::find(dims.begin(), dims.end(), 0) != dims.end();
  bool fits = n != 0;
  for (std::int64_t d : dims) {
    fits &= d >= 0;
    fits &=
        none || !__builtin_mul_overflow(n, static_cast<std::uint64_t>(d), &n);
  }
  *out = none ? 0 : n;
  return fits;
}

} // namespace detail

// Contiguous memory and what it means. It is a view: whoever makes it keeps the memory for as
// long as the calls that take it say.
struct Tensor {
  Tensor() = default;

  // Elements of a type, of the given dimensions, at an address; the bytes follow. `on` is kCpu, or
  // the node's GPU as CUDA counts. Throws ShapeError if a dimension is negative or the elements are
  // too many.
  Tensor(void *at, DType type, Shape dims, std::uint64_t name = 0,
         int on = kCpu)
      : data(at), bytes(bytes_of(type, dims)), key(name), base(at),
        base_bytes(bytes), device(on), dtype(type), shape(std::move(dims)) {}

  // count elements of a type of C++, on the CPU: Tensor::of(floats, 1024, key).
  template <class T>
  static Tensor of(T *at, std::size_t count, std::uint64_t name = 0) {
    return Tensor(at, dtype_of<T>, {static_cast<std::int64_t>(count)}, name);
  }

  // The elements, for a caller that knows their type.
  template <class T> T *as() const { return static_cast<T *>(data); }

  // Bytes of a tensor. Throws ShapeError as the constructor.
  static std::uint64_t bytes_of(DType type, const Shape &dims) {
    if (size_of(type) == 0)
      throw ShapeError("Tensor: dtype " +
                       std::to_string(static_cast<int>(type)) +
                       " has no size: use a DType that has one");
    std::uint64_t bytes;
    if (!detail::count_bytes(type, dims, &bytes))
      throw ShapeError("Tensor: shape " + dims.text() +
                       " has a negative dimension, or more elements than "
                       "memory can hold");
    return bytes;
  }

  void *data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t key = 0; // the tensor's name at the other side

  // The allocation that data lies in, and its number, see Memory. 0: the engine registers the
  // memory of each call anew.
  void *base = nullptr;
  std::uint64_t base_bytes = 0;
  std::uint64_t alloc = 0;

  int device = kCpu;
  DType dtype = DType::kUInt8;
  Shape shape{0};
};

// A list of tensors that a call reads: one tensor, a vector, an array, or a list in braces. It is
// a view, for arguments alone.
class Tensors {
public:
  Tensors() = default;
  Tensors(const Tensor &one) : data_(&one), n_(1) {}
  Tensors(const Tensor *data, std::size_t n) : data_(data), n_(n) {}
  Tensors(const std::vector<Tensor> &all) : data_(all.data()), n_(all.size()) {}
  template <std::size_t N>
  Tensors(const Tensor (&all)[N]) : data_(all), n_(N) {}
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Winit-list-lifetime"
  // The list lives until the call that it is an argument of has returned.
  Tensors(std::initializer_list<Tensor> all)
      : data_(all.begin()), n_(all.size()) {}
#pragma GCC diagnostic pop

  std::size_t size() const noexcept { return n_; }
  const Tensor &operator[](std::size_t i) const noexcept { return data_[i]; }
  const Tensor *begin() const noexcept { return data_; }
  const Tensor *end() const noexcept { return data_ + n_; }

private:
  const Tensor *data_ = nullptr;
  std::size_t n_ = 0;
};

} // namespace fserver
