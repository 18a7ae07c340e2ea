#include "host.h"

#include "process.h"

namespace fserver {

// Calls that take their time are not to be made twice.
constexpr size_t kRoom = 1 << 18;

std::vector<const char *> pointers(const Settings &v) {
  std::vector<const char *> p;
  for (const std::string &s : v)
    p.push_back(s.c_str());
  return p;
}

std::string settings_json(const Settings &settings) {
  enter("settings");
  auto list = pointers(settings);
  return text_from("settings", [&](char *buf, size_t cap, size_t *need) {
    return fs_settings(list.data(), list.size(), buf, cap, need);
  });
}

std::string host_json(const Settings &settings) {
  enter("host");
  auto list = pointers(settings);
  auto f = [&](char *buf, size_t cap, size_t *need) {
    return unlocked(
        [&] { return fs_host(list.data(), list.size(), buf, cap, need); });
  };
  return text_from("host", f, kRoom);
}

std::string probe_json(const Settings &settings, int64_t timeout_ns) {
  enter("probe");
  auto list = pointers(settings);
  auto f = [&](char *buf, size_t cap, size_t *need) {
    return unlocked([&] {
      return fs_probe(list.data(), list.size(), timeout_ns, buf, cap, need);
    });
  };
  return text_from("probe", f, kRoom);
}

} // namespace fserver
