// What the engine says in JSON, of itself and of this host.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "error.h"

namespace fserver {

using Settings = std::vector<std::string>; // each "NAME=value"

// Settings as the C interface takes them, valid as long as v.
std::vector<const char *> pointers(const Settings &v);

// Text of a call f(buf, cap, &need) that says -ENOBUFS when it needs more than
// room, and is then made again.
template <class F>
std::string text_from(const char *call, F &&f, size_t room = 4096) {
  std::string text(room, '\0');
  for (;;) {
    size_t need = 0;
    int rc = f(text.data(), text.size(), &need);
    if (rc != -ENOBUFS)
      check(call, rc);
    text.resize(need);
    if (rc != -ENOBUFS)
      return text;
  }
}

// fs_settings, fs_host and fs_probe. The last two release the GIL.
std::string settings_json(const Settings &settings);
std::string host_json(const Settings &settings);
std::string probe_json(const Settings &settings, int64_t timeout_ns);

} // namespace fserver
