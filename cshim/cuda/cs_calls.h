/* Calls of the driver for Go: handles are numbers, what belongs together is one
 * crossing, and each makes its context current for its time, because Go runs a
 * goroutine on any thread. All return a cs_result. */
#ifndef CS_CALLS_H
#define CS_CALLS_H

#include "cs_cuda.h"

typedef struct {
  uint64_t to, from, bytes;
} cs_copy;

/* What the driver knows of an address. */
typedef struct {
  uint64_t base,
      bytes;   /* of the allocation; of the mapping, in a reserved range */
  uint64_t id; /* buffer id: no other allocation of the process ever has it */
  uint64_t handles; /* CS_HANDLE_* that it can be exported as */
  int device;       /* ordinal */
  int type;         /* CS_MEMORY_* */
  int legacy_ipc;   /* IpcGetMemHandle works */
  int pool;         /* it is of a memory pool */
} cs_memory;

/* How many GPUs there are, and who one is; no context is needed. */
int cs_count(int *count);
int cs_identify(int ordinal, void *uuid, char *name, int room);

int cs_retain(int ordinal, uint64_t *context);
int cs_release(int ordinal);

int cs_stream_create(uint64_t context, uint64_t *stream);
int cs_stream_destroy(uint64_t context, uint64_t stream);
int cs_stream_query(uint64_t context, uint64_t stream);
int cs_stream_synchronize(uint64_t context, uint64_t stream);
int cs_stream_capturing(uint64_t context, uint64_t stream, int *status);

int cs_event_create(uint64_t context, uint64_t *event);
int cs_event_record(uint64_t context, uint64_t event, uint64_t stream);
int cs_event_query(uint64_t context, uint64_t event);
int cs_event_destroy(uint64_t context, uint64_t event);

/* Has stream wait for event (0: for nothing), make the n copies, and store value at
 * flag (a device address; 0: nowhere). It returns at once. */
int cs_enqueue(uint64_t context, uint64_t stream, uint64_t event,
               const cs_copy *copies, size_t n, uint64_t flag, uint64_t value);

int cs_alloc(uint64_t context, uint64_t bytes, uint64_t *address);
int cs_free(uint64_t context, uint64_t address);
int cs_free_host(uint64_t context, uint64_t address);
int cs_unload(uint64_t context, uint64_t module);
/* Ends a context, of which there is a pointer at this address. It is NULL from then on. */
int cs_destroy(uint64_t context, uint64_t at);
int cs_pin(uint64_t context, uint64_t address, uint64_t bytes,
           uint64_t *device);
int cs_unpin(uint64_t context, uint64_t address);
int cs_read(uint64_t context, void *to, uint64_t from, uint64_t bytes);
int cs_write(uint64_t context, uint64_t to, const void *from, uint64_t bytes);

int cs_describe(uint64_t context, uint64_t address, cs_memory *out);
int cs_buffer_id(uint64_t context, uint64_t address, uint64_t *id);

int cs_ipc_get(uint64_t context, uint64_t base, void *handle);
int cs_ipc_open(uint64_t context, const void *handle, uint64_t *base);
int cs_ipc_close(uint64_t context, uint64_t base);
int cs_peer(uint64_t context, uint64_t peer);

/* The piece of mapped memory that address lies in, as a descriptor, which is the
 * caller's. */
int cs_export_fd(uint64_t context, uint64_t address, int *fd);
/* Maps n pieces, one behind the other, for device ordinal. The descriptors stay
 * the caller's. cs_unmap undoes it. */
int cs_map_fds(uint64_t context, int ordinal, const int *fds,
               const uint64_t *bytes, size_t n, uint64_t *base);
int cs_unmap_fds(uint64_t context, uint64_t base, const uint64_t *bytes,
                 size_t n);

#endif
