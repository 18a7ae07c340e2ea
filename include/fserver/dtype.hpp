// The types of a tensor's elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fserver.h"

namespace fserver {

// The numbers are those of torch's ScalarType, so that a peer in Python sees the same type.
enum class DType : std::uint8_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kComplex32 = 8,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kBFloat16 = 15,
  kFloat8E5M2 = 23,
  kFloat8E4M3FN = 24,
  kFloat8E5M2FNUZ = 25,
  kFloat8E4M3FNUZ = 26,
  kUInt16 = 27,
  kUInt32 = 28,
  kUInt64 = 29,
  kFloat8E8M0FNU = 44,
  kFloat4E2M1FNX2 = 45, // two elements in a byte; shapes count bytes
  kAny = FS_ANY,        // of a pull tensor or an answer: not compared
};

namespace detail {

struct DTypeFacts {
  std::uint8_t bytes;
  const char *name; // as torch's
};

constexpr DTypeFacts facts_of(DType t) {
  switch (t) {
  case DType::kUInt8:
    return {1, "uint8"};
  case DType::kInt8:
    return {1, "int8"};
  case DType::kInt16:
    return {2, "int16"};
  case DType::kInt32:
    return {4, "int32"};
  case DType::kInt64:
    return {8, "int64"};
  case DType::kFloat16:
    return {2, "float16"};
  case DType::kFloat32:
    return {4, "float32"};
  case DType::kFloat64:
    return {8, "float64"};
  case DType::kComplex32:
    return {4, "complex32"};
  case DType::kComplex64:
    return {8, "complex64"};
  case DType::kComplex128:
    return {16, "complex128"};
  case DType::kBool:
    return {1, "bool"};
  case DType::kBFloat16:
    return {2, "bfloat16"};
  case DType::kFloat8E5M2:
    return {1, "float8_e5m2"};
  case DType::kFloat8E4M3FN:
    return {1, "float8_e4m3fn"};
  case DType::kFloat8E5M2FNUZ:
    return {1, "float8_e5m2fnuz"};
  case DType::kFloat8E4M3FNUZ:
    return {1, "float8_e4m3fnuz"};
  case DType::kUInt16:
    return {2, "uint16"};
  case DType::kUInt32:
    return {4, "uint32"};
  case DType::kUInt64:
    return {8, "uint64"};
  case DType::kFloat8E8M0FNU:
    return {1, "float8_e8m0fnu"};
  case DType::kFloat4E2M1FNX2:
    return {1, "float4_e2m1fn_x2"};
  case DType::kAny:
    break;
  }
  return {0, "unknown dtype"};
}

} // namespace detail

// Bytes of one element; 0: kAny, or a number that is no DType.
constexpr std::size_t size_of(DType t) { return detail::facts_of(t).bytes; }

// The name, as torch has it: "float32".
constexpr const char *name_of(DType t) { return detail::facts_of(t).name; }

namespace detail {

template <class T> DType no_dtype() = delete;

} // namespace detail

// The DType of a type of C++: dtype_of<float>.
template <class T> constexpr DType dtype_of = detail::no_dtype<T>();
template <> inline constexpr DType dtype_of<std::uint8_t> = DType::kUInt8;
template <> inline constexpr DType dtype_of<char> = DType::kUInt8;
template <> inline constexpr DType dtype_of<std::int8_t> = DType::kInt8;
template <> inline constexpr DType dtype_of<std::int16_t> = DType::kInt16;
template <> inline constexpr DType dtype_of<std::int32_t> = DType::kInt32;
template <> inline constexpr DType dtype_of<std::int64_t> = DType::kInt64;
template <> inline constexpr DType dtype_of<std::uint16_t> = DType::kUInt16;
template <> inline constexpr DType dtype_of<std::uint32_t> = DType::kUInt32;
template <> inline constexpr DType dtype_of<std::uint64_t> = DType::kUInt64;
template <> inline constexpr DType dtype_of<float> = DType::kFloat32;
template <> inline constexpr DType dtype_of<double> = DType::kFloat64;
template <> inline constexpr DType dtype_of<bool> = DType::kBool;

} // namespace fserver
