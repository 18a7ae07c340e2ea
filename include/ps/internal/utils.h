// Small things that programs of ps-lite use.
#pragma once

#include <cstdlib>

#include "dmlc/logging.h"

#ifndef DISALLOW_COPY_AND_ASSIGN
#define DISALLOW_COPY_AND_ASSIGN(Type)                                         \
  Type(const Type &) = delete;                                                 \
  void operator=(const Type &) = delete
#endif

namespace ps {

// A variable of the environment as a number; `otherwise` if it is not set.
template <class V> V GetEnv(const char *name, V otherwise) {
  const char *value = std::getenv(name);
  return value ? static_cast<V>(std::atoi(value)) : otherwise;
}

} // namespace ps
