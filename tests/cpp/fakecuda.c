/* The functions of the driver that gpumem.h finds by name, over the driver of tests/python/fakelane.c, whose
 * memory of a GPU is memory of the host. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../../cshim/cuda/cs_cuda.h"

int cuGetProcAddress_v2(const char *name, void **out, int since);

#define EXPORT __attribute__((visibility("default")))
#define CALL(name, type, ...)                                                  \
  do {                                                                         \
    __typeof__(type) call;                                                     \
    void *found = NULL;                                                        \
    if (cuGetProcAddress_v2(name, &found, 12000) != 0 || !found)               \
      return 1;                                                                \
    memcpy(&call, &found, sizeof call);                                        \
    return call(__VA_ARGS__);                                                  \
  } while (0)

EXPORT int cuInit(unsigned flags) { return (int)flags; }
EXPORT int cuGetErrorString(int result, const char **text) {
  *text = result ? "an error of the fake driver" : "no error";
  return 0;
}
EXPORT int cuDeviceGet(int *device, int ordinal) {
  CALL("cuDeviceGet", int (*)(int *, int), device, ordinal);
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
  CALL("cuDevicePrimaryCtxRetain", int (*)(void **, int), context, device);
}
EXPORT int cuCtxSetCurrent(void *context) {
  CALL("cuCtxSetCurrent", int (*)(void *), context);
}
EXPORT int cuCtxSynchronize(void) { return 0; } /* nothing is ever under way */
EXPORT int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  CALL("cuMemAlloc", int (*)(uint64_t *, size_t), address, bytes);
}
EXPORT int cuMemFree_v2(uint64_t address) {
  CALL("cuMemFree", int (*)(uint64_t), address);
}
EXPORT int cuMemcpy(uint64_t to, uint64_t from, size_t bytes) {
  memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
  return 0;
}
