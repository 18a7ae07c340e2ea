// Environment: the variables of the process, and those that a program sets instead.
#pragma once

#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>

#include "fserver/error.hpp"

namespace ps {

class Environment {
public:
  static Environment *Get() {
    static Environment *one = new Environment; // never destroyed
    return one;
  }

  // The value of a variable; nullptr: it is not set. A value that the program has set (Set) comes
  // before that of the process.
  const char *find(const char *name) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = own_.find(name);
    return it != own_.end() ? it->second.c_str() : std::getenv(name);
  }

  // Reads a variable into *out, which gets `otherwise` if it is not set. Throws ConfigError if the
  // value is not of the type.
  template <class T> void find(const char *name, T *out, T otherwise) const {
    const char *text = find(name);
    if (!text) {
      *out = otherwise;
      return;
    }
    if constexpr (std::is_same_v<T, std::string>) {
      *out = text;
    } else {
      std::istringstream in(text);
      std::string more;
      if (!(in >> *out) || in >> more)
        throw fserver::ConfigError(std::string(name) + "=" + text +
                                   ": want a number");
    }
  }

  // Sets a variable for this process alone: nodes that are started later have it, too.
  void Set(const std::string &name, const std::string &value) {
    std::lock_guard<std::mutex> lock(mutex_);
    own_[name] = value;
  }
  // What Set has set.
  std::map<std::string, std::string> own() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return own_;
  }

private:
  Environment() = default;

  mutable std::mutex mutex_;
  std::map<std::string, std::string> own_;
};

} // namespace ps
