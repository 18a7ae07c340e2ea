// The CUDA driver, opened at run time. Neither a toolkit nor a driver is needed
// to build, and a machine without one runs the same build.
//
// What is declared here by hand is the ABI of libcuda.so.1: types by their size,
// constants by their value. cs_cuda_open looks up every function of the table
// once; from then on cs_cu holds them, for C and C++ alike:
//
//     char why[256];
//     if (cs_cuda_open(why, sizeof why) != 0) ...
//     int rc = cs_cu.StreamWriteValue64(stream, address, 1, 0);
//     if (rc != CS_CU_SUCCESS) ... cs_cuda_text(rc, why, sizeof why) ...
//
// Functions of the table return a cs_result. This is mechanism only: no policy, no
// threads, no logging, no state but the table.
#ifndef CS_CUDA_H
#define CS_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int cs_result;
typedef int cs_device;             /* ordinal among the visible GPUs */
typedef unsigned long long cs_ptr; /* CUdeviceptr */
typedef struct cs_context_ *cs_context;
typedef struct cs_stream_ *cs_stream;
typedef struct cs_event_ *cs_event;
typedef struct cs_module_ *cs_module;
typedef struct cs_function_ *cs_function;
typedef struct cs_graph_ *cs_graph;
typedef struct cs_user_object_ *cs_user_object;
typedef unsigned long long cs_allocation; /* CUmemGenericAllocationHandle */

typedef struct {
  char bytes[64];
} cs_ipc_handle;

// Results that callers tell apart.
enum {
  CS_CU_SUCCESS = 0,
  CS_CU_OUT_OF_MEMORY = 2,
  CS_CU_ALREADY_MAPPED = 208,
  CS_CU_PEER_ACCESS_UNSUPPORTED = 217,
  CS_CU_NOT_READY = 600,
  CS_CU_PEER_ACCESS_ALREADY_ENABLED = 704,
  CS_CU_STREAM_CAPTURE_UNSUPPORTED = 900,
  CS_CU_STREAM_CAPTURE_INVALIDATED = 901,
  CS_CU_STREAM_CAPTURE_WRONG_THREAD = 908, /* the last of that sort */
};

// Of DeviceGetAttribute.
enum {
  CS_DEV_PCI_BUS = 33,
  CS_DEV_PCI_SLOT = 34,
  CS_DEV_PCI_DOMAIN = 50,
  CS_DEV_COMPUTE_CAPABILITY_MAJOR = 75,
  CS_DEV_COMPUTE_CAPABILITY_MINOR = 76,
  CS_DEV_HOST_PAGE_TABLES = 100, /* the GPU walks those of the CPU: C2C */
  CS_DEV_GPU_DIRECT = 116,
  CS_DEV_GPU_DIRECT_WRITES_ORDERING = 118, /* CS_ORDERING_* */
  CS_DEV_DMA_BUF = 124,
};

// Of PointerGetAttribute.
enum {
  CS_PTR_MEMORY_TYPE = 2,         /* uint32_t: CS_MEMORY_* */
  CS_PTR_BUFFER_ID = 7,           /* uint64_t, never used twice in a process */
  CS_PTR_LEGACY_IPC_CAPABLE = 10, /* int: IpcGetMemHandle works */
  CS_PTR_ALLOWED_HANDLE_TYPES = 14, /* uint64_t: CS_HANDLE_* */
  CS_PTR_MEMPOOL = 17,              /* NULL if it is of none */
  CS_PTR_MAPPING_SIZE = 18,
  CS_PTR_MAPPING_BASE = 19,
};

enum { CS_MEMORY_DEVICE = 2 };

enum { CS_CTX_BLOCKING_SYNC = 4 };
enum { CS_STREAM_NON_BLOCKING = 1 };
enum { CS_EVENT_DISABLE_TIMING = 2 };
enum { CS_IPC_LAZY_PEER_ACCESS = 1 };
enum { CS_HOST_PORTABLE = 1, CS_HOST_DEVICEMAP = 2 };
enum { CS_WAIT_GEQ = 0 };
enum { CS_WRITE_DEFAULT = 0 };
enum { CS_OP_WAIT_32 = 1, CS_OP_WRITE_32 = 2 };
enum { CS_CAPTURE_NONE = 0, CS_CAPTURE_ACTIVE = 1, CS_CAPTURE_INVALIDATED = 2 };
enum { CS_CAPTURE_MODE_GLOBAL = 0, CS_CAPTURE_MODE_RELAXED = 2 };
enum { CS_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1 };
enum { CS_GRAPH_USER_OBJECT_MOVE = 1 };
enum { CS_HANDLE_POSIX_FD = 1 };
enum { CS_RANGE_DMA_BUF_FD = 1 };
enum { CS_ORDERING_NONE = 0, CS_ORDERING_OWNER = 100 };
enum { CS_LOCATION_DEVICE = 1 };
enum { CS_ACCESS_READWRITE = 3 };
enum { CS_FUNC_NUM_REGS = 4 };
enum { CS_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

typedef struct {
  int type; /* CS_LOCATION_* */
  int id;
} cs_location;

typedef struct {
  cs_location location;
  int flags; /* CS_ACCESS_* */
} cs_access;

typedef struct {
  int id; /* CS_LAUNCH_* */
  char pad[4];
  union {
    char pad[64];
    int flag; /* programmatic serialization */
  } value;
} cs_launch_attribute;

typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  cs_stream stream;
  cs_launch_attribute *attributes;
  unsigned count;
} cs_launch_config;

// CUstreamBatchMemOpParams: a wait or a write.
typedef union {
  struct {
    int op;
    cs_ptr address;
    uint64_t value;
    unsigned flags;
    cs_ptr alias;
  } is;
  uint64_t pad[6];
} cs_memory_op;

// The table: CS_CUDA_TABLE(F) is F(name, version, arguments) for each function.
// version is the CUDA version in which the signature came (1000 * major + 10 * minor),
// and the driver is asked for cuNAME of that version. A driver of CS_CUDA_OLDEST has
// them all.
enum { CS_CUDA_OLDEST = 11070 };
#define CS_CUDA_TABLE(F)                                                       \
  F(GetErrorName, 6000, (cs_result error, const char **text))                  \
  F(GetErrorString, 6000, (cs_result error, const char **text))                \
  F(Init, 2000, (unsigned flags))                                              \
  F(DeviceGetCount, 2000, (int *count))                                        \
  F(DeviceGet, 2000, (cs_device * device, int ordinal))                        \
  F(DeviceGetAttribute, 2000, (int *value, int what, cs_device device))        \
  F(DevicePrimaryCtxRetain, 7000, (cs_context * context, cs_device device))    \
  F(DevicePrimaryCtxRelease, 11000, (cs_device device))                        \
  F(CtxCreate, 3020, (cs_context * context, unsigned flags, cs_device device)) \
  F(CtxDestroy, 4000, (cs_context context))                                    \
  F(CtxGetCurrent, 4000, (cs_context * context))                               \
  F(CtxSetCurrent, 4000, (cs_context context))                                 \
  F(CtxEnablePeerAccess, 4000, (cs_context peer, unsigned flags))              \
  F(MemAlloc, 3020, (cs_ptr * address, size_t bytes))                          \
  F(MemFree, 3020, (cs_ptr address))                                           \
  F(MemGetAddressRange, 3020, (cs_ptr * base, size_t *bytes, cs_ptr address))  \
  F(MemGetHandleForAddressRange, 11070,                                        \
    (void *handle, cs_ptr address, size_t bytes, int type,                     \
     unsigned long long flags))                                                \
  F(PointerGetAttribute, 4000, (void *value, int what, cs_ptr address))        \
  F(MemHostAlloc, 2020, (void **address, size_t bytes, unsigned flags))        \
  F(MemFreeHost, 2000, (void *address))                                        \
  F(MemHostRegister, 6050, (void *address, size_t bytes, unsigned flags))      \
  F(MemHostUnregister, 4000, (void *address))                                  \
  F(MemHostGetDevicePointer, 3020,                                             \
    (cs_ptr * device, void *address, unsigned flags))                          \
  F(IpcGetMemHandle, 4010, (cs_ipc_handle * handle, cs_ptr address))           \
  F(IpcOpenMemHandle, 11000,                                                   \
    (cs_ptr * address, cs_ipc_handle handle, unsigned flags))                  \
  F(IpcCloseMemHandle, 4010, (cs_ptr address))                                 \
  F(MemRelease, 10020, (cs_allocation handle))                                 \
  F(MemRetainAllocationHandle, 11000, (cs_allocation * handle, void *address)) \
  F(MemExportToShareableHandle, 10020,                                         \
    (void *shareable, cs_allocation handle, int type,                          \
     unsigned long long flags))                                                \
  F(MemImportFromShareableHandle, 10020,                                       \
    (cs_allocation * handle, void *shareable, int type))                       \
  F(MemAddressReserve, 10020,                                                  \
    (cs_ptr * address, size_t bytes, size_t alignment, cs_ptr hint,            \
     unsigned long long flags))                                                \
  F(MemAddressFree, 10020, (cs_ptr address, size_t bytes))                     \
  F(MemMap, 10020,                                                             \
    (cs_ptr address, size_t bytes, size_t offset, cs_allocation handle,        \
     unsigned long long flags))                                                \
  F(MemUnmap, 10020, (cs_ptr address, size_t bytes))                           \
  F(MemSetAccess, 10020,                                                       \
    (cs_ptr address, size_t bytes, const cs_access *access, size_t count))     \
  F(MemcpyAsync, 4000,                                                         \
    (cs_ptr to, cs_ptr from, size_t bytes, cs_stream stream))                  \
  F(MemsetD8Async, 3020,                                                       \
    (cs_ptr address, unsigned char value, size_t bytes, cs_stream stream))     \
  F(StreamCreate, 2000, (cs_stream * stream, unsigned flags))                  \
  F(StreamDestroy, 4000, (cs_stream stream))                                   \
  F(StreamSynchronize, 2000, (cs_stream stream))                               \
  F(CtxSynchronize, 2000, (void))                                              \
  F(StreamQuery, 2000, (cs_stream stream))                                     \
  F(StreamWaitEvent, 3020, (cs_stream stream, cs_event event, unsigned flags)) \
  F(StreamIsCapturing, 10000, (cs_stream stream, int *status))                 \
  F(ThreadExchangeStreamCaptureMode, 10010, (int *mode))                       \
  F(StreamGetCaptureInfo, 11030,                                               \
    (cs_stream stream, int *status, uint64_t *id, cs_graph *graph,             \
     const void **dependencies, size_t *count))                                \
  F(UserObjectCreate, 11030,                                                   \
    (cs_user_object * object, void *data, void (*destroy)(void *data),         \
     unsigned references, unsigned flags))                                     \
  F(GraphRetainUserObject, 11030,                                              \
    (cs_graph graph, cs_user_object object, unsigned count, unsigned flags))   \
  F(StreamWriteValue32, 11070,                                                 \
    (cs_stream stream, cs_ptr address, uint32_t value, unsigned flags))        \
  F(StreamWriteValue64, 11070,                                                 \
    (cs_stream stream, cs_ptr address, uint64_t value, unsigned flags))        \
  F(StreamWaitValue64, 11070,                                                  \
    (cs_stream stream, cs_ptr address, uint64_t value, unsigned flags))        \
  F(StreamBatchMemOp, 11070,                                                   \
    (cs_stream stream, unsigned count, cs_memory_op *ops, unsigned flags))     \
  F(EventCreate, 2000, (cs_event * event, unsigned flags))                     \
  F(EventRecord, 2000, (cs_event event, cs_stream stream))                     \
  F(EventQuery, 2000, (cs_event event))                                        \
  F(EventDestroy, 4000, (cs_event event))                                      \
  F(ModuleLoadData, 2000, (cs_module * module, const void *image))             \
  F(ModuleUnload, 2000, (cs_module module))                                    \
  F(ModuleGetFunction, 2000,                                                   \
    (cs_function * function, cs_module module, const char *name))              \
  F(FuncGetAttribute, 2020, (int *value, int what, cs_function function))      \
  F(LaunchKernelEx, 11060,                                                     \
    (const cs_launch_config *config, cs_function function, void **arguments,   \
     void **extra))

#define CS_CUDA_FIELD(name, version, arguments) cs_result(*name) arguments;
struct cs_cuda {
  CS_CUDA_TABLE(CS_CUDA_FIELD)
};
#undef CS_CUDA_FIELD

// Filled by cs_cuda_open; not to be written to.
extern struct cs_cuda cs_cu;

// Opens the driver, fills the table and calls Init; idempotent, and safe from any
// thread. 0, or -1 and the reason in why: a library that is missing, a driver that is
// too old, lacks a function or does not start. It creates no context.
int cs_cuda_open(char *why, size_t room);

// What a result means: "out of memory (CUDA_ERROR_OUT_OF_MEMORY)". Always ends
// with a zero byte.
void cs_cuda_text(cs_result result, char *text, size_t room);

#ifdef __cplusplus
}
#endif
#endif
