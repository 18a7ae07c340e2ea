// GetEnv: a number in the environment.
#pragma once

#include "dmlc/logging.h"
#include "ps/internal/env.h"

namespace ps {

// The variable as a number, or `otherwise` if it is not set. Throws ConfigError if it is no number.
template <class T> T GetEnv(const char *name, T otherwise) {
  T value;
  Environment::Get()->find(name, &value, otherwise);
  return value;
}

} // namespace ps
