/* A library of a GPU driver that has two GPUs, each with 18 NVLink lanes to a
 * switch. With -DOLD it is one that lacks a function. */
#include <string.h>

typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
} Pci;
typedef struct {
  unsigned long long total, free, used;
} Memory;

static int device(void *d) { return (int)((char *)d - (char *)0) - 1; }

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code ? "broken" : "fine"; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) {
  strncpy(out, "570.86.15", n);
  return 0;
}
int nvmlSystemGetCudaDriverVersion(int *out) { return *out = 12080, 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = 2, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) {
  *d = (char *)0 + i + 1;
  return 0;
}
int nvmlDeviceGetName(void *d, char *out, unsigned n) {
  strncpy(out, device(d) ? "Second" : "First", n);
  return 0;
}
int nvmlDeviceGetUUID(void *d, char *out, unsigned n) {
  strncpy(out, device(d) ? "GPU-2222" : "GPU-1111", n);
  return 0;
}
int nvmlDeviceGetPciInfo_v3(void *d, Pci *out) {
  memset(out, 0, sizeof *out);
  out->domain = 1;
  strcpy(out->bus_id, device(d) ? "00000001:AB:00.0" : "00000001:9A:00.0");
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *d, Memory *out) {
  out->total = (device(d) + 1ull) << 36;
  return 0;
}
#ifndef OLD
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *later) {
  *now = *later = 0;
  return device(d) ? 3 : 0; /* not supported */
}
#endif
int nvmlDeviceGetNvLinkState(void *d, unsigned link, unsigned *up) {
  (void)d;
  *up = 1;
  return link < 18 ? 0 : 2;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned link, unsigned *t) {
  (void)d, (void)link;
  return *t = 2, 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned link, Pci *out) {
  (void)link;
  return nvmlDeviceGetPciInfo_v3(d, out);
}
