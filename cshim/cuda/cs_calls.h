// Calls of the driver for Go, which alone includes this file: handles are numbers,
// what belongs together is one crossing, and each makes its context current for
// its time, because Go runs a goroutine on any thread. All return a cs_result.
#ifndef CS_CALLS_H
#define CS_CALLS_H

#include <stdbool.h>

#include "cs_cuda.h"

typedef struct {
  uint64_t to, from, bytes;
} cs_copy;

// What the driver knows of an address.
typedef struct {
  uint64_t base;
  size_t bytes; /* of the allocation; of the mapping, in a reserved range */
  uint64_t id;  /* buffer id: no other allocation of the process ever has it */
  bool on_gpu, legacy_ipc, descriptor; /* as Memory of Go has them */
} cs_memory;

// What a NIC has to know of a GPU to use its memory.
typedef struct {
  int32_t domain, bus, slot; /* on PCI */
  int32_t ordering;          /* CS_ORDERING_*, of what NICs write */
  bool gpu_direct, dma_buf;  /* peer memory; descriptors of its memory */
  bool c2c;                  /* it is joined to its CPU by C2C */
} cs_direct;

// What a call changes for its thread, which may be the application's, and puts
// back. While any thread captures a graph, others must not make calls that might
// disturb that, unless they say that they know what they do: none of ours touches
// a stream that is captured.
typedef struct {
  cs_context before; /* NULL: it had none */
  int changed, mode;
} scope;

static int enter(uint64_t context, scope *s) {
  cs_context now = NULL;
  s->mode = CS_CAPTURE_MODE_RELAXED;
  cs_cu.ThreadExchangeStreamCaptureMode(&s->mode);
  int rc = cs_cu.CtxGetCurrent(&now);
  if (rc == CS_CU_SUCCESS && now == (cs_context)context)
    return rc;
  rc = cs_cu.CtxSetCurrent((cs_context)context);
  s->changed = rc == CS_CU_SUCCESS;
  s->before = now;
  return rc;
}

static void leave(scope *s) {
  if (s->changed)
    cs_cu.CtxSetCurrent(s->before);
  cs_cu.ThreadExchangeStreamCaptureMode(&s->mode);
}

#define ENTER(context)                                                         \
  scope entered __attribute__((cleanup(leave))) = {NULL, 0, 0};                \
  int usable = enter(context, &entered);                                       \
  if (usable != CS_CU_SUCCESS)                                                 \
  return usable

// How many GPUs there are; no context is needed.
static int cs_count(int *count) { return cs_cu.DeviceGetCount(count); }

static int cs_retain(int ordinal, uint64_t *context) {
  cs_device device;
  int rc = cs_cu.DeviceGet(&device, ordinal);
  return rc == CS_CU_SUCCESS
             ? cs_cu.DevicePrimaryCtxRetain((cs_context *)context, device)
             : rc;
}

// Needs no context. An attribute that the driver does not know is 0.
static int cs_direct_of(int ordinal, cs_direct *out) {
  cs_device device;
  int rc = cs_cu.DeviceGet(&device, ordinal);
  if (rc != CS_CU_SUCCESS)
    return rc;
  const int what[] = {CS_DEV_PCI_DOMAIN,      CS_DEV_PCI_BUS,
                      CS_DEV_PCI_SLOT,        CS_DEV_GPU_DIRECT_WRITES_ORDERING,
                      CS_DEV_GPU_DIRECT,      CS_DEV_DMA_BUF,
                      CS_DEV_HOST_PAGE_TABLES};
  enum { COUNT = sizeof what / sizeof *what };
  int value[COUNT] = {0};
  for (int i = 0; i < COUNT; i++)
    if (cs_cu.DeviceGetAttribute(&value[i], what[i], device) != CS_CU_SUCCESS)
      value[i] = 0;
  *out = (cs_direct){value[0], value[1], value[2], value[3],
                     value[4], value[5], value[6]};
  return rc;
}

// A call that takes one number at most, on, and makes one at most.
#define CALL(name, call)                                                       \
  static int cs_##name(uint64_t context, uint64_t on, uint64_t *made) {        \
    ENTER(context);                                                            \
    return cs_cu.call;                                                         \
  }
CALL(stream_create, StreamCreate((cs_stream *)made, CS_STREAM_NON_BLOCKING))
CALL(stream_destroy, StreamDestroy((cs_stream)on))
CALL(stream_query, StreamQuery((cs_stream)on))
CALL(event_create, EventCreate((cs_event *)made, CS_EVENT_DISABLE_TIMING))
CALL(event_destroy, EventDestroy((cs_event)on))
CALL(event_query, EventQuery((cs_event)on))
CALL(alloc, MemAlloc((cs_ptr *)made, on))
CALL(free, MemFree(on))
CALL(free_host, MemFreeHost((void *)on))
CALL(unpin, MemHostUnregister((void *)on))
CALL(unload, ModuleUnload((cs_module)on))
CALL(ipc_close, IpcCloseMemHandle(on))
#undef CALL

// Destroys a context, of which there is a pointer at an address: NULL from then
// on.
static int cs_destroy(uint64_t context, uint64_t address) {
  ENTER(context);
  cs_context other =
      __atomic_exchange_n((cs_context *)address, NULL, __ATOMIC_ACQ_REL);
  return other ? cs_cu.CtxDestroy(other) : CS_CU_SUCCESS;
}

// Lets a context use the memory of another.
static int cs_peer(uint64_t context, uint64_t peer) {
  ENTER(context);
  int rc = cs_cu.CtxEnablePeerAccess((cs_context)peer, 0);
  return rc == CS_CU_PEER_ACCESS_ALREADY_ENABLED ? CS_CU_SUCCESS : rc;
}

static int cs_event_record(uint64_t context, uint64_t event, uint64_t stream) {
  ENTER(context);
  return cs_cu.EventRecord((cs_event)event, (cs_stream)stream);
}

// Has stream wait for event (0: for nothing), make the n copies, and store value
// at flag (a device address; 0: nowhere). It returns at once.
static int cs_enqueue(uint64_t context, uint64_t stream, uint64_t event,
                      const cs_copy *copies, size_t n, uint64_t flag,
                      uint64_t value) {
  ENTER(context);
  cs_stream s = (cs_stream)stream;
  int rc = event ? cs_cu.StreamWaitEvent(s, (cs_event)event, 0) : CS_CU_SUCCESS;
  for (size_t i = 0; i < n && rc == CS_CU_SUCCESS; i++)
    if (copies[i].bytes)
      rc = cs_cu.MemcpyAsync(copies[i].to, copies[i].from, copies[i].bytes, s);
  if (rc == CS_CU_SUCCESS && flag)
    rc = cs_cu.StreamWriteValue64(s, flag, value, CS_WRITE_DEFAULT);
  return rc;
}

static int cs_pin(uint64_t context, uint64_t address, uint64_t bytes,
                  uint64_t *device) {
  ENTER(context);
  int rc = cs_cu.MemHostRegister((void *)address, bytes,
                                 CS_HOST_PORTABLE | CS_HOST_DEVICEMAP);
  if (rc != CS_CU_SUCCESS)
    return rc;
  rc = cs_cu.MemHostGetDevicePointer((cs_ptr *)device, (void *)address, 0);
  if (rc != CS_CU_SUCCESS)
    cs_cu.MemHostUnregister((void *)address);
  return rc;
}

// An attribute that the driver does not know, or that the memory does not have,
// is left as it is.
static void ask(cs_ptr address, int what, void *value) {
  cs_cu.PointerGetAttribute(value, what, address);
}

static int cs_describe(uint64_t context, uint64_t address, cs_memory *out) {
  ENTER(context);
  void *pool = NULL;
  cs_ptr start = 0;
  size_t mapped = 0;
  uint64_t handles = 0;
  int type = 0, legacy_ipc = 0;
  int rc = cs_cu.PointerGetAttribute(&type, CS_PTR_MEMORY_TYPE, address);
  if (rc == CS_CU_SUCCESS)
    rc = cs_cu.PointerGetAttribute(&out->id, CS_PTR_BUFFER_ID, address);
  if (rc == CS_CU_SUCCESS)
    rc = cs_cu.MemGetAddressRange((cs_ptr *)&out->base, &out->bytes, address);
  if (rc != CS_CU_SUCCESS)
    return rc;
  ask(address, CS_PTR_LEGACY_IPC_CAPABLE, &legacy_ipc);
  ask(address, CS_PTR_ALLOWED_HANDLE_TYPES, &handles);
  ask(address, CS_PTR_MEMPOOL, &pool);
  out->on_gpu = type == CS_MEMORY_DEVICE;
  out->legacy_ipc = legacy_ipc && !pool;
  out->descriptor = (handles & CS_HANDLE_POSIX_FD) && !pool;
  if (legacy_ipc || !handles)
    return rc;
  // In a reserved range: the piece that is mapped here.
  ask(address, CS_PTR_MAPPING_BASE, &start);
  ask(address, CS_PTR_MAPPING_SIZE, &mapped);
  if (start && mapped) {
    out->base = start;
    out->bytes = mapped;
  }
  return rc;
}

static int cs_ipc_get(uint64_t context, uint64_t base, void *handle) {
  ENTER(context);
  return cs_cu.IpcGetMemHandle((cs_ipc_handle *)handle, base);
}

static int cs_ipc_open(uint64_t context, const void *handle, uint64_t *base) {
  ENTER(context);
  return cs_cu.IpcOpenMemHandle((cs_ptr *)base, *(const cs_ipc_handle *)handle,
                                CS_IPC_LAZY_PEER_ACCESS);
}

// The piece of mapped memory that address lies in, as a descriptor, which is the
// caller's.
static int cs_export_fd(uint64_t context, uint64_t address, int *fd) {
  ENTER(context);
  cs_allocation handle;
  int rc = cs_cu.MemRetainAllocationHandle(&handle, (void *)address);
  if (rc != CS_CU_SUCCESS)
    return rc;
  rc = cs_cu.MemExportToShareableHandle(fd, handle, CS_HANDLE_POSIX_FD, 0);
  cs_cu.MemRelease(handle);
  return rc;
}

// A range of whole pages, for the kernel's drivers of other devices, as a
// descriptor, which is the caller's.
static int cs_export_dma_buf(uint64_t context, uint64_t address, uint64_t bytes,
                             int *fd) {
  ENTER(context);
  return cs_cu.MemGetHandleForAddressRange(fd, address, bytes,
                                           CS_RANGE_DMA_BUF_FD, 0);
}

// Unmaps the first n pieces of a range of total bytes, and gives it back.
static int unmap(cs_ptr range, const uint64_t *bytes, size_t n,
                 uint64_t total) {
  int rc = CS_CU_SUCCESS;
  for (cs_ptr at = range; n > 0; n--) {
    int one = cs_cu.MemUnmap(at, *bytes);
    if (rc == CS_CU_SUCCESS)
      rc = one;
    at += *bytes++;
  }
  int one = cs_cu.MemAddressFree(range, total);
  return rc == CS_CU_SUCCESS ? one : rc;
}

static uint64_t sum(const uint64_t *bytes, size_t n) {
  uint64_t total = 0;
  while (n > 0)
    total += bytes[--n];
  return total;
}

static int cs_unmap_fds(uint64_t context, uint64_t base, const uint64_t *bytes,
                        size_t n) {
  ENTER(context);
  return unmap(base, bytes, n, sum(bytes, n));
}

// Maps n pieces, one behind the other, for device ordinal. The descriptors stay
// the caller's. cs_unmap_fds undoes it.
static int cs_map_fds(uint64_t context, int ordinal, const int *fds,
                      const uint64_t *bytes, size_t n, uint64_t *base) {
  ENTER(context);
  uint64_t total = sum(bytes, n);
  cs_ptr range;
  size_t done = 0;
  int rc = cs_cu.MemAddressReserve(&range, total, 0, 0, 0);
  if (rc != CS_CU_SUCCESS)
    return rc;
  for (cs_ptr at = range; done < n; at += bytes[done++]) {
    cs_allocation handle;
    rc = cs_cu.MemImportFromShareableHandle(
        &handle, (void *)(uintptr_t)fds[done], CS_HANDLE_POSIX_FD);
    if (rc != CS_CU_SUCCESS)
      break;
    rc = cs_cu.MemMap(at, bytes[done], 0, handle, 0);
    cs_cu.MemRelease(handle); /* the mapping keeps the memory */
    if (rc != CS_CU_SUCCESS)
      break;
  }
  if (rc == CS_CU_SUCCESS) {
    cs_access access = {{CS_LOCATION_DEVICE, ordinal}, CS_ACCESS_READWRITE};
    rc = cs_cu.MemSetAccess(range, total, &access, 1);
  }
  if (rc == CS_CU_SUCCESS)
    *base = range;
  else
    unmap(range, bytes, done, total);
  return rc;
}

#endif
