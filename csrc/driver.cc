#include "driver.h"

#include "error.h"
#include "process.h"

namespace fserver {

void open_driver(const char *call) {
  char why[256];
  if (unlocked([&] { return cs_cuda_open(why, sizeof why); }) != 0)
    raise(Kind::kConfig,
          "%s: no GPU can be used: %s (install the NVIDIA driver, of CUDA 11.7 "
          "or later, or use CPU tensors)",
          call, why);
}

} // namespace fserver
