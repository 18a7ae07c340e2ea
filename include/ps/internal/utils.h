// Small things that programs of ps-lite use.
#pragma once

#include <cstdlib>
#include <type_traits>

#include "dmlc/logging.h" // or dmlc-core's
#include "ps/internal/env.h"
#include "ps/internal/log.h"

#ifndef DISALLOW_COPY_AND_ASSIGN
#define DISALLOW_COPY_AND_ASSIGN(Type)                                         \
  Type(const Type &) = delete;                                                 \
  void operator=(const Type &) = delete
#endif

namespace ps {

// A variable of Environment as a number, or as what can be made of its text, such as a std::string; `otherwise` if it is
// not set. A text that is no number reads as 0.
template <class V> V GetEnv(const char *name, V otherwise) {
  const char *value = Environment::Get()->find(name);
  if (!value)
    return otherwise;
  if constexpr (std::is_floating_point_v<V>)
    return static_cast<V>(std::atof(value));
  else if constexpr (!std::is_arithmetic_v<V> &&
                     std::is_constructible_v<V, const char *>)
    return V(value);
  else
    return static_cast<V>(std::atoll(value));
}
inline int GetEnv(const char *name, int otherwise) {
  const char *value = Environment::Get()->find(name);
  return value ? std::atoi(value) : otherwise;
}

} // namespace ps
