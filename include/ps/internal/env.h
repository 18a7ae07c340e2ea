// Environment: the settings that a program was started with.
#pragma once

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <unordered_map>

#include "fserver/error.hpp"

namespace ps {

namespace detail {

// Whether a text is empty, or white space alone.
inline bool is_blank(const char *text) {
  return text[std::strspn(text, " \t\n\v\f\r")] == 0;
}

} // namespace detail

// The variables of the process, and those that Init has set, which come first.
class Environment {
public:
  static Environment *Get() {
    static Environment *environment = new Environment;
    return environment;
  }
  // Sets variables for this process. Call it before StartPS, and before threads read any.
  static Environment *
  Init(const std::unordered_map<std::string, std::string> &all) {
    Get()->set_ = all;
    return Get();
  }

  // The value of a variable; null if it is not set.
  const char *find(const char *name) const {
    const auto it = set_.find(name);
    return it != set_.end() ? it->second.c_str() : std::getenv(name);
  }
  // Reads a variable into *out, which is `otherwise` if it is not set or blank. Returns its text, or null. Throws
  // fserver::ConfigError if the text is no T.
  template <class T>
  const char *find(const char *name, T *out, T otherwise) const {
    *out = otherwise;
    const char *text = find(name);
    if (!text || detail::is_blank(text))
      return nullptr;
    std::istringstream in(text);
    if (!(in >> *out) || !(in >> std::ws).eof())
      throw fserver::ConfigError(std::string(name) + "=" + text +
                                 ": want a value of the kind of " +
                                 show(otherwise));
    return text;
  }

  // What Init has set.
  const std::unordered_map<std::string, std::string> &set() const {
    return set_;
  }

private:
  Environment() = default;
  template <class T> static std::string show(const T &value) {
    std::ostringstream s;
    s << value;
    return s.str();
  }
  std::unordered_map<std::string, std::string> set_;
};

namespace detail {

// The value of a setting of fserver; null if it is not set or blank.
inline const char *setting(const char *name) {
  const char *text = Environment::Get()->find(name);
  return text && !is_blank(text) ? text : nullptr;
}

} // namespace detail

} // namespace ps
