#include "driver.h"

#include "error.h"
#include "process.h"

namespace fserver {

void open_driver(const char *call) {
  char why[256];
  if (unlocked([&] { return cs_cuda_open(why, sizeof why); }) != 0)
    raise(Kind::kConfig,
          "%s: cannot use a GPU: %s (install an NVIDIA driver for CUDA 11.7 or "
          "later, or use CPU tensors)",
          call, why);
}

void enter_gpu(int device) {
  cs_context context = nullptr;
  cs_device handle = 0;
  if (!cs_cu.CtxGetCurrent || cs_cu.CtxGetCurrent(&context) != CS_CU_SUCCESS ||
      context || cs_cu.DeviceGet(&handle, device) != CS_CU_SUCCESS ||
      cs_cu.DevicePrimaryCtxRetain(&context, handle) != CS_CU_SUCCESS)
    return; // the call that follows says what is wrong
  cs_cu.CtxSetCurrent(context);
  cs_cu.DevicePrimaryCtxRelease(handle);
}

} // namespace fserver
