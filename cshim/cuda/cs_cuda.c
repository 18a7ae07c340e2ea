#include "cs_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

struct cs_cuda cs_cu;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char reason[256]; /* why the driver is not open; empty: it is */

// A driver of CUDA 12 has the first, one of 11.3 the second.
typedef cs_result (*lookup_v2)(const char *, void **, int, uint64_t, int *);
typedef cs_result (*lookup_v1)(const char *, void **, int, uint64_t);

static void *library;
static lookup_v2 by_version;
static lookup_v1 by_version_v1;

// find is the function of a name with the signature that came in version, and a
// symbol where the driver cannot be asked.
static void *find(const char *name, const char *symbol, int version) {
  void *function = NULL;
  cs_result rc = CS_CU_SUCCESS;
  int found;
  if (by_version)
    rc = by_version(name, &function, version, 0, &found);
  else if (by_version_v1)
    rc = by_version_v1(name, &function, version, 0);
  return rc == CS_CU_SUCCESS && function ? function : dlsym(library, symbol);
}

// A driver's function is stored through a pointer to its field.
static void set(void *field, void *function) {
  memcpy(field, &function, sizeof function);
}

// The CUDA version of the driver, 0 if it does not say.
static int version_there(void) {
  cs_result (*get)(int *) = NULL;
  int version = 0;
  set(&get, find("cuDriverGetVersion", "cuDriverGetVersion", 2020));
  if (get)
    get(&version);
  return version;
}

static void lacks(const char *symbol, int since) {
  int there = version_there();
  int n = snprintf(reason, sizeof reason,
                   "libcuda.so.1 has no function %s, which CUDA %d.%d added",
                   symbol, since / 1000, since % 1000 / 10);
  if (there && n > 0 && (size_t)n < sizeof reason)
    snprintf(reason + n, sizeof reason - (size_t)n,
             "; this driver supports CUDA %d.%d", there / 1000,
             there % 1000 / 10);
}

static void open_library(void) {
  library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    snprintf(reason, sizeof reason, "%s", dlerror());
    return;
  }
  set(&by_version, dlsym(library, "cuGetProcAddress_v2"));
  if (!by_version)
    set(&by_version_v1, dlsym(library, "cuGetProcAddress"));

#define LOOK_UP(name, suffix, version, arguments)                              \
  set(&cs_cu.name, find("cu" #name, "cu" #name #suffix, version));             \
  if (!cs_cu.name && version <= CS_CUDA_OLDEST)                                \
    return lacks("cu" #name #suffix, version);
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

void cs_cuda_too_old(int needed, char *why, size_t room) {
  int there = version_there();
  snprintf(why, room, "this driver supports CUDA %d.%d, want %d.%d or later",
           there / 1000, there % 1000 / 10, needed / 1000, needed % 1000 / 10);
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
