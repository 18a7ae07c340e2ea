// Cases of a test program, and what they check with. A program runs all of its cases, or those that its arguments name,
// by themselves or by their file ("kv_faults"); the first that fails ends it with status 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <typeinfo>
#include <vector>

struct Case {
  const char *name, *path; // of the file
  void (*run)();

  bool is(const std::string &wanted) const {
    const std::string p = path, file = p.substr(p.rfind('/') + 1);
    return wanted == name || wanted + ".cc" == file;
  }
};

inline std::vector<Case> &cases() {
  static std::vector<Case> all;
  return all;
}

#define CASE(name)                                                             \
  static void case_##name();                                                   \
  static const bool added_##name =                                             \
      (cases().push_back({#name, __FILE__, case_##name}), true);               \
  static void case_##name()

[[noreturn]] inline void failed(const char *file, int line,
                                const std::string &text) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition))                                                          \
      failed(__FILE__, __LINE__, "not true: " #condition);                     \
  } while (0)

template <class A, class B>
void expect_equal(const char *file, int line, const char *what, const A &a,
                  const B &b) {
  if (a == b)
    return;
  if constexpr (std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
    failed(file, line,
           std::string(what) + ": " + std::to_string(a) + " and " +
               std::to_string(b));
  else
    failed(file, line, std::string(what) + " differ");
}

#define EXPECT_EQ(a, b) expect_equal(__FILE__, __LINE__, #a ", " #b, a, b)

// Runs f, which has to throw an E, of that very class, whose text has `part`.
template <class E, class F>
E thrown(const char *file, int line, const std::string &part, F &&f) {
  try {
    f();
  } catch (const E &e) {
    if (typeid(e) != typeid(E) ||
        std::string(e.what()).find(part) == std::string::npos)
      failed(file, line,
             std::string("thrown: ") + typeid(e).name() + ": " + e.what() +
                 "\nwant: " + typeid(E).name() + ": " + part);
    return e;
  } catch (const std::exception &e) {
    failed(file, line,
           std::string("thrown: ") + typeid(e).name() + ": " + e.what());
  }
  failed(file, line, "nothing was thrown, want: " + part);
}

#define EXPECT_THROW(E, part, ...)                                             \
  thrown<E>(__FILE__, __LINE__, part, [&] { __VA_ARGS__; })

inline int run_cases(int argc, char **argv) {
  int ran = 0;
  for (const Case &c : cases()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; i++)
      wanted = wanted || c.is(argv[i]);
    if (!wanted)
      continue;
    std::printf("%s\n", c.name);
    std::fflush(stdout);
    try {
      c.run();
    } catch (const std::exception &e) {
      failed(c.name, 0, std::string(typeid(e).name()) + ": " + e.what());
    }
    ran++;
  }
  return ran ? 0 : 2;
}
