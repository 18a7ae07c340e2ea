#include "cs_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

struct cs_cuda cs_cu;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char reason[256]; /* why the driver is not open; empty: it is */

static int there; /* the CUDA version of the driver */

// cuGetProcAddress of CUDA 12. That of 11.3 takes no status, and does not look at it.
typedef cs_result (*lookup)(const char *name, void **function, int version,
                            uint64_t flags, int *status);

// Stores the function with the signature that came in version in a field. 0: there is
// none.
static int find(lookup ask, const char *name, int version, void *field) {
  void *function = NULL;
  int status;
  if (ask(name, &function, version, 0, &status) != CS_CU_SUCCESS || !function) {
    snprintf(reason, sizeof reason,
             "libcuda.so.1 has no function %s, which CUDA %d.%d added; this "
             "driver supports CUDA %d.%d",
             name, version / 1000, version % 1000 / 10, there / 1000,
             there % 1000 / 10);
    return 0;
  }
  memcpy(field, &function, sizeof function);
  return 1;
}

static void open_library(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    snprintf(reason, sizeof reason, "%s", dlerror());
    return;
  }
  void *symbol = dlsym(library, "cuGetProcAddress_v2");
  if (!symbol)
    symbol = dlsym(library, "cuGetProcAddress");
  if (!symbol) {
    snprintf(reason, sizeof reason,
             "libcuda.so.1 has no function cuGetProcAddress, which CUDA 11.3 "
             "added");
    return;
  }
  lookup ask;
  memcpy(&ask, &symbol, sizeof ask);

  cs_result (*get_version)(int *);
  if (!find(ask, "cuDriverGetVersion", 2020, &get_version))
    return;
  get_version(&there);
  if (there < CS_CUDA_OLDEST) {
    snprintf(reason, sizeof reason,
             "this driver supports CUDA %d.%d, want %d.%d or later",
             there / 1000, there % 1000 / 10, CS_CUDA_OLDEST / 1000,
             CS_CUDA_OLDEST % 1000 / 10);
    return;
  }
#define LOOK_UP(name, version, arguments)                                      \
  if (!find(ask, "cu" #name, version, &cs_cu.name))                            \
    return;
  CS_CUDA_TABLE(LOOK_UP)
#undef LOOK_UP

  cs_result rc = cs_cu.Init(0);
  if (rc != CS_CU_SUCCESS) {
    char text[160];
    cs_cuda_text(rc, text, sizeof text);
    snprintf(reason, sizeof reason, "the NVIDIA driver cannot start: %s", text);
  }
}

int cs_cuda_open(char *why, size_t room) {
  pthread_once(&once, open_library);
  if (*reason)
    snprintf(why, room, "%s", reason);
  return *reason ? -1 : 0;
}

void cs_cuda_text(cs_result result, char *text, size_t room) {
  const char *name = NULL, *words = NULL;
  if (!room)
    return;
  if (cs_cu.GetErrorName)
    cs_cu.GetErrorName(result, &name);
  if (cs_cu.GetErrorString)
    cs_cu.GetErrorString(result, &words);
  if (name && words)
    snprintf(text, room, "%s (%s)", words, name);
  else
    snprintf(text, room, "CUDA error %d", result);
}
