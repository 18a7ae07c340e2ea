/* A libcuda.so.1 for tests of Reach and GPUDirect. FAKE_SEES has the numbers of the GPUs that the process sees,
 * in its order, as CUDA_VISIBLE_DEVICES has it; FAKE_PEER that of the one whose memory is to be
 * reached. Numbers are those of the host. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID = 1, NO_DEVICE = 101 };

static intptr_t current;

/* A variable that the test has set. */
static const char *variable(const char *name) {
  const char *value = getenv(name);
  if (!value)
    abort();
  return value;
}

static int good(void) { return 0; }
static int version(int *out) {
  *out = 13000;
  return 0;
}
/* Refused while a thread has the context of a call that is over. */
static int count(int *out) {
  *out = (int)strlen(variable("FAKE_SEES"));
  return current ? INVALID : 0;
}
static int device(int *out, int ordinal) {
  int n;
  count(&n);
  if (ordinal < 0 || ordinal >= n)
    return NO_DEVICE;
  *out = variable("FAKE_SEES")[ordinal] - '0';
  return 0;
}
static int retain(intptr_t *out, int number) {
  *out = 100 + number;
  return 0;
}
static int get_context(intptr_t *out) {
  *out = current;
  return 0;
}
static int set_context(intptr_t context) {
  current = context;
  return 0;
}
/* Tells the GPU and what was asked for. */
static int attribute(int *out, int what, int number) {
  *out = number * 1000 + what;
  return 0;
}
/* Gives the context in place of a descriptor. */
static int dma_buf(int *fd, uint64_t address, size_t bytes, int type,
                   unsigned long long flags) {
  if (!current || address % 4096 || bytes % 4096 || type != 1 || flags)
    return INVALID;
  *fd = (int)current;
  return 0;
}
static int enable(intptr_t context) {
  return context == current || context != 100 + atoi(variable("FAKE_PEER"))
             ? INVALID
             : 0;
}

static const struct {
  const char *name;
  void *function;
} table[] = {
    {"cuDriverGetVersion", (void *)version},
    {"cuDeviceGetCount", (void *)count},
    {"cuDeviceGet", (void *)device},
    {"cuDevicePrimaryCtxRetain", (void *)retain},
    {"cuCtxGetCurrent", (void *)get_context},
    {"cuCtxSetCurrent", (void *)set_context},
    {"cuDeviceGetAttribute", (void *)attribute},
    {"cuMemGetHandleForAddressRange", (void *)dma_buf},
    {"cuCtxEnablePeerAccess", (void *)enable},
};

int cuGetProcAddress_v2(const char *name, void **out) {
  *out = (void *)good;
  for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
    if (strcmp(table[i].name, name) == 0)
      *out = table[i].function;
  }
  return 0;
}
