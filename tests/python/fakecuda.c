/* A libcuda.so.1 for tests of fserver/bench/rawgpu.c: GPU memory is host memory that
 * other processes of the user can map, and what is enqueued on a stream has run when
 * a call returns. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef unsigned long long address;
typedef struct {
  char bytes[64];
} handle;

static struct {
  address at;
  size_t size;
  int fd;
} table[64];

int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)(intptr_t)(device + 1);
  return 0;
}
int cuCtxSetCurrent(void *context) { return context == NULL; }

int cuMemAlloc_v2(address *at, size_t size) {
  for (int i = 0; i < 64; i++) {
    if (table[i].at != 0)
      continue;
    int fd = (int)syscall(SYS_memfd_create, "gpu", 0);
    if (fd < 0 || ftruncate(fd, (off_t)size) != 0)
      return 2;
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
      return 2;
    *at = table[i].at = (address)(uintptr_t)p;
    table[i].size = size;
    table[i].fd = fd;
    return 0;
  }
  return 2;
}

int cuMemFree_v2(address at) {
  for (int i = 0; i < 64; i++) {
    if (table[i].at == at) {
      munmap((void *)(uintptr_t)at, table[i].size);
      close(table[i].fd);
      table[i].at = 0;
      return 0;
    }
  }
  return 1;
}

int cuIpcGetMemHandle(handle *h, address at) {
  for (int i = 0; i < 64; i++) {
    if (table[i].at == at) {
      snprintf(h->bytes, sizeof h->bytes, "/proc/%d/fd/%d %zu", getpid(),
               table[i].fd, table[i].size);
      return 0;
    }
  }
  return 1;
}

int cuIpcOpenMemHandle_v2(address *at, handle h, unsigned flags) {
  char path[64];
  size_t size;
  if (flags != 1 || sscanf(h.bytes, "%63s %zu", path, &size) != 2)
    return 1;
  int fd = open(path, O_RDWR);
  void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  *at = (address)(uintptr_t)p;
  return p == MAP_FAILED;
}

int cuIpcCloseMemHandle(address at) { return at == 0; }
int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
  return at == NULL || size == 0 || flags != 2;
}
int cuMemHostGetDevicePointer_v2(address *at, void *host, unsigned flags) {
  *at = (address)(uintptr_t)host;
  return (int)flags;
}
int cuStreamCreate(void **stream, unsigned flags) {
  *stream = stream;
  return flags != 1;
}

/* What was copied from the host, which other streams see only when its stream has been waited for. */
static struct {
  address to;
  size_t size;
  char data[64];
} late;

int cuStreamSynchronize(void *stream) {
  if (stream == NULL)
    memcpy((void *)(uintptr_t)late.to, late.data, late.size);
  return 0;
}

/* FAKECUDA_LOSE: copies that are not made, as a test of the test. */
int cuMemcpyAsync(address to, address from, size_t size, void *stream) {
  if (getenv("FAKECUDA_LOSE") == NULL)
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
  return stream == NULL;
}
int cuStreamWriteValue64_v2(void *stream, address at, uint64_t value,
                            unsigned flags) {
  atomic_store((_Atomic uint64_t *)(uintptr_t)at, value);
  return stream == NULL || flags != 0;
}
int cuMemcpyHtoD_v2(address to, const void *from, size_t size) {
  if (size > sizeof late.data)
    return 1;
  late.to = to;
  late.size = size;
  memcpy(late.data, from, size);
  return 0;
}
int cuMemcpyDtoH_v2(void *to, address from, size_t size) {
  memcpy(to, (void *)(uintptr_t)from, size);
  return 0;
}
int cuGetErrorString(int result, const char **text) {
  *text = result == 2 ? "out of memory" : "invalid value";
  return 0;
}
