// Memory of a GPU, for programs that are compiled without a toolkit: the driver is opened at run time.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

namespace gpumem {

// The driver, with the context of one GPU that CUDA's runtime uses too. Methods throw std::runtime_error.
class Gpu {
public:
  // GPU `ordinal`, as CUDA counts; there is one of each in a process. Throws the reason if it cannot be used.
  static Gpu &get(int ordinal) {
    static std::mutex mutex;
    static std::unique_ptr<Gpu> all[kMost];
    std::lock_guard<std::mutex> lock(mutex);
    if (ordinal < 0 || ordinal >= kMost)
      throw std::runtime_error("there is no GPU " + std::to_string(ordinal));
    if (!all[ordinal])
      all[ordinal].reset(new Gpu(ordinal));
    return *all[ordinal];
  }

  // Allocates at least one byte.
  void *alloc(std::size_t bytes) {
    unsigned long long at = 0;
    use();
    must("allocate GPU memory", alloc_(&at, bytes ? bytes : 1));
    return reinterpret_cast<void *>(at);
  }
  void free(void *at) noexcept {
    if (current_(context_) == 0)
      free_(reinterpret_cast<unsigned long long>(at));
  }
  // Copies between memory of any kind. All bytes are there when it returns.
  void copy(void *to, const void *from, std::size_t bytes) {
    use();
    must("copy", copy_(reinterpret_cast<unsigned long long>(to),
                       reinterpret_cast<unsigned long long>(from), bytes));
    must("wait for a copy", wait_());
  }

private:
  static constexpr int kMost = 64;

  explicit Gpu(int ordinal) {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library_)
      throw std::runtime_error(std::string("no GPU can be used: ") + dlerror());
    int (*init)(unsigned) = nullptr, (*device)(int *, int) = nullptr,
        (*retain)(void **, int) = nullptr, found = 0;
    load("cuGetErrorString", &text_);
    load("cuInit", &init);
    load("cuDeviceGet", &device);
    load("cuDevicePrimaryCtxRetain", &retain);
    load("cuCtxSetCurrent", &current_);
    load("cuCtxSynchronize", &wait_);
    load("cuMemAlloc_v2", &alloc_);
    load("cuMemFree_v2", &free_);
    load("cuMemcpy", &copy_);
    must("start the driver", init(0));
    must("find GPU " + std::to_string(ordinal), device(&found, ordinal));
    must("hold the GPU's context", retain(&context_, found));
  }

  template <class F> void load(const char *name, F *f) {
    *f = reinterpret_cast<F>(dlsym(library_, name));
    if (!*f)
      throw std::runtime_error(std::string("libcuda.so.1 has no ") + name +
                               ": install a newer driver");
  }
  void use() { must("use the GPU's context", current_(context_)); }
  void must(const std::string &what, int result) {
    const char *text = nullptr;
    if (result == 0)
      return;
    text_(result, &text);
    throw std::runtime_error("cannot " + what + ": " +
                             (text ? text : "unknown error"));
  }

  void *library_ = nullptr, *context_ = nullptr;
  int (*text_)(int, const char **) = nullptr;
  int (*current_)(void *) = nullptr;
  int (*wait_)() = nullptr;
  int (*alloc_)(unsigned long long *, std::size_t) = nullptr;
  int (*free_)(unsigned long long) = nullptr;
  int (*copy_)(unsigned long long, unsigned long long, std::size_t) = nullptr;
};

} // namespace gpumem
