#include "cs_calls.h"

/* What a call changes for its thread, which may be the application's, and puts
 * back. While any thread captures a graph, others must not make calls that might
 * disturb that, unless they say that they know what they do: none of ours touches
 * a stream that is captured. */
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

int cs_count(int *count) { return cs_cu.DeviceGetCount(count); }

int cs_identify(int ordinal, void *uuid, char *name, int room) {
  cs_device device;
  int rc = cs_cu.DeviceGet(&device, ordinal);
  if (rc == CS_CU_SUCCESS)
    rc = cs_cu.DeviceGetUuid((cs_uuid *)uuid, device);
  if (rc == CS_CU_SUCCESS)
    rc = cs_cu.DeviceGetName(name, room, device);
  return rc;
}

int cs_retain(int ordinal, uint64_t *context) {
  cs_device device;
  cs_context made;
  int rc = cs_cu.DeviceGet(&device, ordinal);
  if (rc == CS_CU_SUCCESS)
    rc = cs_cu.DevicePrimaryCtxRetain(&made, device);
  if (rc == CS_CU_SUCCESS)
    *context = (uint64_t)made;
  return rc;
}

int cs_release(int ordinal) {
  cs_device device;
  int rc = cs_cu.DeviceGet(&device, ordinal);
  return rc == CS_CU_SUCCESS ? cs_cu.DevicePrimaryCtxRelease(device) : rc;
}

int cs_stream_create(uint64_t context, uint64_t *stream) {
  ENTER(context);
  cs_stream made;
  int rc = cs_cu.StreamCreate(&made, CS_STREAM_NON_BLOCKING);
  if (rc == CS_CU_SUCCESS)
    *stream = (uint64_t)made;
  return rc;
}

int cs_stream_destroy(uint64_t context, uint64_t stream) {
  ENTER(context);
  return cs_cu.StreamDestroy((cs_stream)stream);
}

int cs_stream_query(uint64_t context, uint64_t stream) {
  ENTER(context);
  return cs_cu.StreamQuery((cs_stream)stream);
}

int cs_stream_synchronize(uint64_t context, uint64_t stream) {
  ENTER(context);
  return cs_cu.StreamSynchronize((cs_stream)stream);
}

int cs_stream_capturing(uint64_t context, uint64_t stream, int *status) {
  ENTER(context);
  return cs_cu.StreamIsCapturing((cs_stream)stream, status);
}

int cs_event_create(uint64_t context, uint64_t *event) {
  ENTER(context);
  cs_event made;
  int rc = cs_cu.EventCreate(&made, CS_EVENT_DISABLE_TIMING);
  if (rc == CS_CU_SUCCESS)
    *event = (uint64_t)made;
  return rc;
}

int cs_event_record(uint64_t context, uint64_t event, uint64_t stream) {
  ENTER(context);
  return cs_cu.EventRecord((cs_event)event, (cs_stream)stream);
}

int cs_event_query(uint64_t context, uint64_t event) {
  ENTER(context);
  return cs_cu.EventQuery((cs_event)event);
}

int cs_event_destroy(uint64_t context, uint64_t event) {
  ENTER(context);
  return cs_cu.EventDestroy((cs_event)event);
}

int cs_enqueue(uint64_t context, uint64_t stream, uint64_t event,
               const cs_copy *copies, size_t n, uint64_t flag, uint64_t value) {
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

int cs_alloc(uint64_t context, uint64_t bytes, uint64_t *address) {
  ENTER(context);
  cs_ptr made;
  int rc = cs_cu.MemAlloc(&made, bytes);
  if (rc == CS_CU_SUCCESS)
    *address = made;
  return rc;
}

int cs_free(uint64_t context, uint64_t address) {
  ENTER(context);
  return cs_cu.MemFree(address);
}

int cs_free_host(uint64_t context, uint64_t address) {
  ENTER(context);
  return cs_cu.MemFreeHost((void *)address);
}

int cs_unload(uint64_t context, uint64_t module) {
  ENTER(context);
  return cs_cu.ModuleUnload((cs_module)module);
}

int cs_destroy(uint64_t context, uint64_t at) {
  cs_context other =
      __atomic_exchange_n((cs_context *)at, NULL, __ATOMIC_ACQ_REL);
  ENTER(context);
  return other ? cs_cu.CtxDestroy(other) : CS_CU_SUCCESS;
}

int cs_pin(uint64_t context, uint64_t address, uint64_t bytes,
           uint64_t *device) {
  ENTER(context);
  cs_ptr seen;
  int rc = cs_cu.MemHostRegister((void *)address, bytes,
                                 CS_HOST_PORTABLE | CS_HOST_DEVICEMAP);
  if (rc != CS_CU_SUCCESS)
    return rc;
  rc = cs_cu.MemHostGetDevicePointer(&seen, (void *)address, 0);
  if (rc == CS_CU_SUCCESS)
    *device = seen;
  else
    cs_cu.MemHostUnregister((void *)address);
  return rc;
}

int cs_unpin(uint64_t context, uint64_t address) {
  ENTER(context);
  return cs_cu.MemHostUnregister((void *)address);
}

int cs_read(uint64_t context, void *to, uint64_t from, uint64_t bytes) {
  ENTER(context);
  return cs_cu.MemcpyDtoH(to, from, bytes);
}

int cs_write(uint64_t context, uint64_t to, const void *from, uint64_t bytes) {
  ENTER(context);
  int rc = cs_cu.MemcpyHtoD(to, from, bytes);
  /* From pageable memory, it returns when the bytes are staged. */
  return rc == CS_CU_SUCCESS ? cs_cu.StreamSynchronize(NULL) : rc;
}

/* An attribute that the driver does not know, or that the memory does not have,
 * is left as it is. */
static void ask(cs_ptr address, int what, void *value) {
  cs_cu.PointerGetAttribute(value, what, address);
}

int cs_describe(uint64_t context, uint64_t address, cs_memory *out) {
  ENTER(context);
  unsigned type = 0;
  unsigned long long id = 0, handles = 0;
  cs_ptr base = 0;
  size_t bytes = 0;
  void *pool = NULL;
  cs_memory m = {0};
  int rc = cs_cu.PointerGetAttribute(&type, CS_PTR_MEMORY_TYPE, address);
  if (rc == CS_CU_SUCCESS)
    rc = cs_cu.PointerGetAttribute(&id, CS_PTR_BUFFER_ID, address);
  if (rc == CS_CU_SUCCESS)
    rc = cs_cu.MemGetAddressRange(&base, &bytes, address);
  if (rc != CS_CU_SUCCESS)
    return rc;
  m.device = -1;
  ask(address, CS_PTR_DEVICE_ORDINAL, &m.device);
  ask(address, CS_PTR_LEGACY_IPC_CAPABLE, &m.legacy_ipc);
  ask(address, CS_PTR_ALLOWED_HANDLE_TYPES, &handles);
  ask(address, CS_PTR_MEMPOOL, &pool);
  if (!m.legacy_ipc &&
      handles) { /* in a reserved range: the piece that is mapped here */
    cs_ptr start = 0;
    size_t mapped = 0;
    ask(address, CS_PTR_MAPPING_BASE, &start);
    ask(address, CS_PTR_MAPPING_SIZE, &mapped);
    if (start && mapped) {
      base = start;
      bytes = mapped;
    }
  }
  m.type = (int)type;
  m.id = id;
  m.base = base;
  m.bytes = bytes;
  m.handles = handles;
  m.pool = pool != NULL;
  *out = m;
  return rc;
}

int cs_buffer_id(uint64_t context, uint64_t address, uint64_t *id) {
  ENTER(context);
  unsigned long long found = 0;
  int rc = cs_cu.PointerGetAttribute(&found, CS_PTR_BUFFER_ID, address);
  *id = found;
  return rc;
}

int cs_ipc_get(uint64_t context, uint64_t base, void *handle) {
  ENTER(context);
  return cs_cu.IpcGetMemHandle((cs_ipc_handle *)handle, base);
}

int cs_ipc_open(uint64_t context, const void *handle, uint64_t *base) {
  ENTER(context);
  cs_ptr mapped;
  int rc = cs_cu.IpcOpenMemHandle(&mapped, *(const cs_ipc_handle *)handle,
                                  CS_IPC_LAZY_PEER_ACCESS);
  if (rc == CS_CU_SUCCESS)
    *base = mapped;
  return rc;
}

int cs_ipc_close(uint64_t context, uint64_t base) {
  ENTER(context);
  return cs_cu.IpcCloseMemHandle(base);
}

int cs_peer(uint64_t context, uint64_t peer) {
  ENTER(context);
  int rc = cs_cu.CtxEnablePeerAccess((cs_context)peer, 0);
  return rc == CS_CU_PEER_ACCESS_ALREADY_ENABLED ? CS_CU_SUCCESS : rc;
}

int cs_export_fd(uint64_t context, uint64_t address, int *fd) {
  ENTER(context);
  cs_allocation handle;
  int made = -1;
  int rc = cs_cu.MemRetainAllocationHandle(&handle, (void *)address);
  if (rc != CS_CU_SUCCESS)
    return rc;
  rc = cs_cu.MemExportToShareableHandle(&made, handle, CS_HANDLE_POSIX_FD, 0);
  cs_cu.MemRelease(handle);
  if (rc == CS_CU_SUCCESS)
    *fd = made;
  return rc;
}

int cs_unmap_fds(uint64_t context, uint64_t base, const uint64_t *bytes,
                 size_t n) {
  ENTER(context);
  uint64_t at = base;
  int rc = CS_CU_SUCCESS;
  for (size_t i = 0; i < n; i++) {
    int one = cs_cu.MemUnmap(at, bytes[i]);
    if (rc == CS_CU_SUCCESS)
      rc = one;
    at += bytes[i];
  }
  int one = cs_cu.MemAddressFree(base, at - base);
  return rc == CS_CU_SUCCESS ? one : rc;
}

int cs_map_fds(uint64_t context, int ordinal, const int *fds,
               const uint64_t *bytes, size_t n, uint64_t *base) {
  ENTER(context);
  uint64_t total = 0, at;
  cs_ptr range;
  size_t done = 0;
  for (size_t i = 0; i < n; i++)
    total += bytes[i];
  int rc = cs_cu.MemAddressReserve(&range, total, 0, 0, 0);
  if (rc != CS_CU_SUCCESS)
    return rc;
  for (at = range; done < n; done++) {
    cs_allocation handle;
    rc = cs_cu.MemImportFromShareableHandle(
        &handle, (void *)(uintptr_t)fds[done], CS_HANDLE_POSIX_FD);
    if (rc != CS_CU_SUCCESS)
      break;
    rc = cs_cu.MemMap(at, bytes[done], 0, handle, 0);
    cs_cu.MemRelease(handle); /* the mapping keeps the memory */
    if (rc != CS_CU_SUCCESS)
      break;
    at += bytes[done];
  }
  if (rc == CS_CU_SUCCESS) {
    cs_access access = {{CS_LOCATION_DEVICE, ordinal}, CS_ACCESS_READWRITE};
    rc = cs_cu.MemSetAccess(range, total, &access, 1);
  }
  if (rc == CS_CU_SUCCESS) {
    *base = range;
    return rc;
  }
  for (at = range; done > 0; done--) {
    cs_cu.MemUnmap(at, bytes[0]);
    at += *bytes++;
  }
  cs_cu.MemAddressFree(range, total);
  return rc;
}
