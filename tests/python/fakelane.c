/* A libcuda.so.1 for tests of csrc/lane*.cc, which run in one process: GPU memory is memory of
 * the process, what is enqueued on a stream has run when a call returns, and a kernel does, in one
 * block for each segment, what that of channel.cu does, but for waiting. Each fail_... has calls fail, each count can be read. (fakecuda.c is the one for the raw
 * baselines of the bench, which are two processes without kernels.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "../../cshim/cuda/cs_channel.h"
#include "../../cshim/cuda/cs_cuda.h"

enum {
  UNKNOWN = 999,
  WAIT_MS = 6000,
  GPUS = 2,
  BEHIND = 0x2000,
  THERE = 0x3000,
  SECOND = 0x100
};

/* Out of memory for what is of the GPU of this number, from 1 on. */
int fail_alloc, fail_host, fail_load, fail_stream;
int fail_second; /* a context that is not the primary one */
int seconds;     /* contexts of that sort that are there */
int misplaced;   /* calls in another context than that of their stream */
int fail_later;  /* so many streams are made before fail_stream counts */

int full;      /* out of memory until some is freed */
int full_host; /* the same of pinned memory */
int taken; /* what is imported is where another mapping is, until that is closed */

int old; /* it is a driver for CUDA 11.6; to be set before it is opened */
int fail_context; /* 1: in all threads, 2: in those that did not start the driver */
int fail_copy;      /* the copy of this number, from 1 on */
int fail_import;    /* memory of other processes: with this result */
int fail_launch;    /* so many launches: the capture is invalid */
int fail_launch_at; /* the launch of this number, from 1 on */
int foreign;        /* memory that did not come from here: no handle names it */
int no_access;      /* from one GPU to another */
int missed; /* segments, or words, that a kernel would have waited for */
int launches, copies; /* made */
int small_copies;     /* by fs_ring and fs_await */
int held; /* memory, streams, contexts and modules that were not given back */
int unfinished; /* so many times, a capture forbids to wait for all of the GPU */
int spoiled;    /* calls that a capture in another thread forbids */
int waited_in_vain; /* streams that went on, so that a test ends */
int capturing; /* the number of a capture of this thread's stream, which something has spoiled */
int busy;      /* a stream has not done what is enqueued */
int asked;     /* streams whether they have */
int words;     /* written by streams */
int behind; /* so many streams, from the next on, are behind one that waits */
int waits; /* for this to be 0 again: what frees memory, launches, and batches */
int waiting;  /* calls that wait so */
int unloaded; /* launches of kernels of kernels.cc that were not loaded before */
int captures; /* a stream of another thread is captured, in the mode "global" */
int with_gil; /* calls of a thread that kept other Python threads from running */
uint64_t launched_bytes; /* of the first segment of the newest launch */
unsigned launched_rows;

static _Thread_local cs_context current;
static _Thread_local int mode = CS_CAPTURE_MODE_GLOBAL, starter;

/* Any call may wait for the GPU, but those that look at the thread alone. */
static void called(const char *name) {
  static int (*holds)(void);
  if (!holds) {
    void *found = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    memcpy(&holds, &found, sizeof found);
  }
  if (!holds || !holds())
    return;
  fprintf(stderr, "the driver is called with the GIL: %s\n", name);
  __atomic_add_fetch(&with_gil, 1, __ATOMIC_SEQ_CST);
}

/* Refused while another thread captures, unless this one says that it knows what it does. */
static int unsafe(void) {
  called(__func__);
  if (!captures || mode == CS_CAPTURE_MODE_RELAXED)
    return CS_CU_SUCCESS;
  spoiled++;
  return CS_CU_STREAM_CAPTURE_UNSUPPORTED;
}

static int finish(void) {
  int rc = unsafe();
  if (!unfinished)
    return rc;
  unfinished--;
  return CS_CU_STREAM_CAPTURE_UNSUPPORTED;
}

/* As the driver waits for the GPU. */
static int wait_for_it(void) {
  const struct timespec step = {0, 1000000};
  __atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
  for (int ms = 0; __atomic_load_n(&waits, __ATOMIC_SEQ_CST); ms++) {
    if (ms == WAIT_MS) {
      waited_in_vain++;
      break;
    }
    nanosleep(&step, NULL);
  }
  __atomic_sub_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
  return CS_CU_SUCCESS;
}

static void take(void) { __atomic_add_fetch(&held, 1, __ATOMIC_SEQ_CST); }
static void give_back(void) { __atomic_sub_fetch(&held, 1, __ATOMIC_SEQ_CST); }

static int give_back_safely(void) {
  called(__func__);
  give_back();
  wait_for_it();
  return unsafe();
}

static int good(void) {
  called(__func__);
  return CS_CU_SUCCESS;
}
static int version(int *out) {
  *out = old ? 11060 : 13000;
  return CS_CU_SUCCESS;
}
static int start(unsigned flags) {
  starter = 1;
  return (int)flags;
}
static int text(int result, const char **out) {
  *out = result == CS_CU_OUT_OF_MEMORY ? "out of memory" : "an error";
  return CS_CU_SUCCESS;
}

static int get_device(cs_device *out, int ordinal) {
  called(__func__);
  *out = ordinal;
  return ordinal >= GPUS;
}
static int retain(cs_context *out, int device) {
  called(__func__);
  *out = (cs_context)(intptr_t)(device + 1);
  take();
  return CS_CU_SUCCESS;
}
static int release(void) {
  called(__func__);
  give_back();
  return CS_CU_SUCCESS;
}
static int get_context(cs_context *out) {
  *out = current;
  return CS_CU_SUCCESS;
}
static int set_context(cs_context context) {
  if (fail_context == 1 || (fail_context == 2 && !starter))
    return UNKNOWN;
  current = context;
  return CS_CU_SUCCESS;
}
static unsigned there; /* the newest of them */
static int new_context(cs_context *out, unsigned flags, cs_device device) {
  called(__func__);
  (void)flags;
  if (fail_second)
    return CS_CU_OUT_OF_MEMORY;
  *out = current = (cs_context)(intptr_t)(device + SECOND);
  seconds++;
  there++;
  take();
  return unsafe();
}
static int end_context(cs_context which) {
  called(__func__);
  misplaced += which == current || (intptr_t)which < SECOND;
  seconds--;
  return give_back_safely();
}
static int exchange_mode(int *other) {
  int old = mode;
  mode = *other;
  *other = old;
  return CS_CU_SUCCESS;
}

static void *room(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    return NULL;
  take();
  return p;
}
static int in_second(void) { return (intptr_t)current >= SECOND; }
static int none_left(int of) { return of && (intptr_t)current == of; }
static int free_safely(void) {
  called(__func__);
  full = 0;
  return give_back_safely();
}
static int free_host_safely(void) {
  called(__func__);
  full_host = 0;
  return give_back_safely();
}
static int unmap(void) {
  called(__func__);
  taken = 0;
  return give_back_safely();
}
int gpus_shown = GPUS; // to CUDA
static int count_devices(int *out) {
  called(__func__);
  *out = gpus_shown;
  return CS_CU_SUCCESS;
}
static int import(cs_ptr *out) {
  called(__func__);
  if (taken)
    return CS_CU_ALREADY_MAPPED;
  *out = fail_import ? 0 : (cs_ptr)(uintptr_t)room(2 << 20);
  return fail_import;
}
static int load(cs_module *out) {
  called(__func__);
  if (none_left(fail_load))
    return CS_CU_OUT_OF_MEMORY;
  *out = (cs_module)(uintptr_t)1;
  take();
  return unsafe();
}
static struct {
  cs_ptr at;
  size_t bytes;
} given[256]; /* the newest */
static int alloc(cs_ptr *out, size_t bytes) {
  called(__func__);
  static unsigned n;
  if (full || none_left(fail_alloc))
    return CS_CU_OUT_OF_MEMORY;
  *out = (cs_ptr)(uintptr_t)room(bytes);
  given[n % 256].at = *out;
  given[n++ % 256].bytes = bytes;
  return *out ? unsafe() : CS_CU_OUT_OF_MEMORY;
}
static int alloc_host(void **out, size_t bytes) {
  called(__func__);
  if (full_host || none_left(fail_host))
    return CS_CU_OUT_OF_MEMORY;
  *out = room(bytes);
  return *out ? unsafe() : CS_CU_OUT_OF_MEMORY;
}
static int seen_at(cs_ptr *out, void *host) {
  called(__func__);
  *out = (cs_ptr)(uintptr_t)host;
  return CS_CU_SUCCESS;
}
static int range(cs_ptr *base, size_t *bytes, cs_ptr address) {
  called(__func__);
  *base = address & ~0xfffull;
  *bytes = 2 << 20;
  for (size_t i = 0; i < 256; i++) {
    if (address - given[i].at < given[i].bytes) {
      *base = given[i].at;
      *bytes = given[i].bytes;
    }
  }
  return CS_CU_SUCCESS;
}
static int pointer(void *out, int what, cs_ptr address) {
  called(__func__);
  if (what != CS_PTR_LEGACY_IPC_CAPABLE)
    return CS_CU_SUCCESS;
  *(int *)out = !foreign;
  for (size_t i = 0; i < 256; i++) {
    if (address - given[i].at < given[i].bytes)
      *(int *)out = 1;
  }
  return CS_CU_SUCCESS;
}
static int enable_peer(void) {
  called(__func__);
  return no_access ? CS_CU_PEER_ACCESS_UNSUPPORTED : CS_CU_SUCCESS;
}

static int new_stream(cs_stream *out) {
  called(__func__);
  if (fail_later == 0 && none_left(fail_stream))
    return CS_CU_OUT_OF_MEMORY;
  fail_later -= fail_later > 0;
  if (in_second()) { /* it ends with that */
    *out = (cs_stream)(uintptr_t)(THERE + there);
    return CS_CU_SUCCESS;
  }
  *out = (cs_stream)(uintptr_t)(behind > 0 ? BEHIND : 0x1000);
  behind -= behind > 0;
  take();
  return CS_CU_SUCCESS;
}
static int is_behind(cs_stream s) { return (uintptr_t)s == BEHIND; }
static void check_place(cs_stream s) {
  misplaced += in_second() != ((uintptr_t)s == THERE + there);
}
static int query(cs_stream s) {
  called(__func__);
  check_place(s);
  asked++;
  return busy || is_behind(s) ? CS_CU_NOT_READY : CS_CU_SUCCESS;
}
static int finish_stream(void) {
  if (!capturing)
    return unsafe();
  called(__func__);
  spoiled++;
  return CS_CU_STREAM_CAPTURE_UNSUPPORTED;
}
static int is_capturing(cs_stream s, int *out) {
  called(__func__);
  (void)s;
  *out = capturing ? CS_CAPTURE_INVALIDATED : CS_CAPTURE_NONE;
  return CS_CU_SUCCESS;
}
static int copy(cs_ptr to, cs_ptr from, size_t bytes) {
  called(__func__);
  misplaced += in_second();
  if (++copies == fail_copy)
    return UNKNOWN;
  memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
  return CS_CU_SUCCESS;
}
static int fill(cs_ptr at, unsigned char value, size_t bytes) {
  called(__func__);
  memset((void *)(uintptr_t)at, value, bytes);
  return CS_CU_SUCCESS;
}
static int write_word(cs_stream s, cs_ptr at, uint32_t value) {
  called(__func__);
  check_place(s);
  if (is_behind(s))
    return CS_CU_SUCCESS;
  words++;
  __atomic_store_n((uint32_t *)(uintptr_t)at, value, __ATOMIC_SEQ_CST);
  return CS_CU_SUCCESS;
}
static void wait_word(cs_ptr at, uint32_t value) {
  const struct timespec step = {0, 1000000};
  for (int ms = 0; ms < WAIT_MS; ms++) {
    uint32_t now = __atomic_load_n((uint32_t *)(uintptr_t)at, __ATOMIC_SEQ_CST);
    if ((int32_t)(now - value) >= 0)
      return;
    nanosleep(&step, NULL);
  }
  waited_in_vain++;
}
static int batch(cs_stream s, unsigned n, cs_memory_op *ops) {
  called(__func__);
  wait_for_it();
  for (unsigned i = 0; i < n; i++) {
    if (ops[i].is.op == CS_OP_WRITE_32)
      write_word(s, ops[i].is.address, (uint32_t)ops[i].is.value);
    else
      wait_word(ops[i].is.address, (uint32_t)ops[i].is.value);
  }
  return CS_CU_SUCCESS;
}
/* An event is passed when its stream has done what is enqueued, as all have that do not wait. */
int unpassed; /* no event is */
int events;   /* recorded */
static int new_event(cs_event *out) {
  called(__func__);
  *out = (cs_event)(uintptr_t)1;
  return CS_CU_SUCCESS;
}
static int record(void) {
  called(__func__);
  __atomic_add_fetch(&events, 1, __ATOMIC_SEQ_CST);
  return wait_for_it();
}
static int passed(void) {
  called(__func__);
  return __atomic_load_n(&unpassed, __ATOMIC_SEQ_CST) ? CS_CU_NOT_READY
                                                      : unsafe();
}

/* The graph that is captured, and what it retains. */
static struct {
  void *data;
  void (*destroy)(void *);
} retained[16];
int retains; /* how many */
static int capture_info(cs_stream s, int *status, uint64_t *id,
                        uintptr_t *graph) {
  is_capturing(s, status);
  if (capturing)
    *status = CS_CAPTURE_ACTIVE;
  if (id)
    *id = (uint64_t)capturing;
  *graph = 1;
  return CS_CU_SUCCESS;
}
static int user_object(uintptr_t *out, void *data, void (*destroy)(void *)) {
  called(__func__);
  retained[retains].data = data;
  retained[retains].destroy = destroy;
  *out = (uintptr_t)retains;
  return CS_CU_SUCCESS;
}
static int retain_object(cs_graph graph, uintptr_t object) {
  called(__func__);
  retains += graph && object == (uintptr_t)retains;
  return CS_CU_SUCCESS;
}
void drop_graph(void) {
  while (retains > 0) {
    retains--;
    retained[retains].destroy(retained[retains].data);
  }
}

static int write_word64(cs_stream s, cs_ptr at, uint64_t value) {
  called(__func__);
  (void)s;
  words++;
  __atomic_store_n((uint64_t *)(uintptr_t)at, value, __ATOMIC_SEQ_CST);
  return CS_CU_SUCCESS;
}

static int find_kernel(cs_function *out, cs_module module, const char *name) {
  called(__func__);
  (void)module;
  *out = (cs_function)(uintptr_t)name;
  return CS_CU_SUCCESS;
}

static unsigned loaded; /* kernels of kernels.cc */
static int load_kernel(int *value, int what, cs_function f) {
  called(__func__);
  (void)what;
  *value = 1;
  loaded += strncmp((const char *)f, "fs_", 3) == 0;
  return CS_CU_SUCCESS;
}
static void *at(uint64_t address) { return (void *)(uintptr_t)address; }

/* What the newest wait for a flag was given. */
uint64_t wait_page, wait_since, wait_patience;
/* What fs_ring and fs_await copy: their arguments from n on. */
static void copy_small(void **arguments) {
  const uint64_t *c = arguments[1];
  for (uint32_t i = 0; i < *(uint32_t *)arguments[0]; i++, c += 3) {
    small_copies++;
    memcpy(at(c[0]), at(c[1]), c[2]);
  }
}
static int launch_one(const cs_launch_config *c, cs_function f,
                      void **arguments) {
  const unsigned size =
      c->grid_x * c->grid_y * c->grid_z * c->block_x * c->block_y * c->block_z;
  const int rings = strcmp((const char *)f, "fs_ring") == 0;
  const int awaits = strcmp((const char *)f, "fs_await") == 0;
  if (size != (rings || awaits ? 32 : 1) || c->count != 0)
    return UNKNOWN;
  if (++launches == fail_launch_at)
    return UNKNOWN;
  unloaded += loaded < 5;
  if (rings) {
    copy_small(arguments + 2);
    *(uint64_t *)at(*(uint64_t *)arguments[1]) =
        ++*(uint64_t *)at(*(uint64_t *)arguments[0]);
  }
  if (awaits) {
    uint64_t *count = at(*(uint64_t *)arguments[0]);
    *count += *(uint64_t *)arguments[1];
    *(uint64_t *)at(*(uint64_t *)arguments[2]) = *count;
    missed += *(uint64_t *)at(*(uint64_t *)arguments[3]) < *count;
    wait_page = *(uint64_t *)arguments[4];
    wait_since = *(uint64_t *)arguments[5];
    copy_small(arguments + 6);
  }
  if (strcmp((const char *)f, "fs_wait_flag") == 0) {
    wait_page = *(uint64_t *)arguments[2];
    wait_since = *(uint64_t *)arguments[3];
    wait_patience = *(uint64_t *)arguments[4];
  }
  return wait_for_it();
}

static size_t part(uint64_t bytes, uint64_t begin) {
  return bytes - begin < 8 ? bytes - begin : 8;
}
static void send(const cs_segment *s, uint32_t (*packets)[4], uint32_t seq) {
  if (s->kind != CS_BY_PACKETS) {
    memcpy(at(s->to), at(s->from), s->bytes);
    *(uint64_t *)at(s->flags) = (uint64_t)s->rows << 32 | seq;
    return;
  }
  for (uint64_t i = 0; i <= (s->bytes + 7) / 8; i++) {
    uint64_t v = s->rows;
    if (i)
      memcpy(&v, at(s->from + 8 * (i - 1)), part(s->bytes, 8 * (i - 1)));
    packets[i][0] = (uint32_t)v;
    packets[i][2] = (uint32_t)(v >> 32);
    packets[i][1] = packets[i][3] = seq;
  }
}
/* 0: something has not come. */
static int recv(const cs_segment *s, uint32_t (*packets)[4], uint32_t seq) {
  uint64_t *counted = at(s->counted);
  if (s->kind != CS_BY_PACKETS) {
    uint64_t v = *(uint64_t *)at(s->flags);
    if ((uint32_t)v != seq)
      return 0;
    *counted = v >> 32;
    if (s->kind == CS_BY_LANDING)
      memcpy(at(s->to), at(s->from), s->bytes);
    return 1;
  }
  for (uint64_t i = 0; i <= (s->bytes + 7) / 8; i++) {
    uint64_t v = packets[i][0] | (uint64_t)packets[i][2] << 32;
    if (packets[i][1] != seq || packets[i][3] != seq)
      return 0;
    if (i)
      memcpy(at(s->to + 8 * (i - 1)), &v, part(s->bytes, 8 * (i - 1)));
    else
      *counted = v;
  }
  return 1;
}

int waiters;  /* launches of recv_wait that no recv has followed */
int spinning; /* launches that would wait in all blocks */
static int landing(const cs_launch_many *a) {
  for (unsigned i = 0; i < a->head.count; i++)
    if (a->segment[i].kind == CS_BY_LANDING)
      return 1;
  return 0;
}
static int launch(const cs_launch_config *config, cs_function f,
                  void **arguments) {
  called(__func__);
  if (strncmp((const char *)f, "fs_", 3) == 0)
    return launch_one(config, f, arguments);
  if (fail_launch) {
    fail_launch--;
    return CS_CU_STREAM_CAPTURE_INVALIDATED;
  }
  if (++launches == fail_launch_at)
    return UNKNOWN;
  wait_for_it();
  const cs_launch_many *a = arguments[0];
  const int lands = landing(a);
  if (strcmp((const char *)f, "recv_wait") == 0) {
    waiters += lands && config->grid_x == 1;
    return CS_CU_SUCCESS;
  }
  spinning += strncmp((const char *)f, "recv", 4) == 0 && lands && !waiters;
  waiters -= strncmp((const char *)f, "recv", 4) == 0 && lands;
  launched_rows = a->segment[0].rows;
  launched_bytes = a->segment[0].bytes;
  const int sends = strncmp((const char *)f, "send", 4) == 0;
  for (unsigned i = 0; i < a->head.count; i++) {
    const cs_segment *s = &a->segment[i];
    uint32_t *count = at(a->head.counts + 4 * s->first), seq = ++*count;
    uint32_t (*packets)[4] = at(sends ? s->to : s->from);
    packets += (seq & 1) * (s->kind == CS_BY_PACKETS ? s->stride : 0);
    if (sends)
      send(s, packets, seq);
    else
      missed += !recv(s, packets, seq);
  }
  return CS_CU_SUCCESS;
}

static const struct {
  const char *name;
  void *function;
} table[] = {
    {"cuDriverGetVersion", (void *)version},
    {"cuInit", (void *)start},
    {"cuGetErrorName", (void *)text},
    {"cuGetErrorString", (void *)text},
    {"cuDeviceGet", (void *)get_device},
    {"cuDeviceGetCount", (void *)count_devices},
    {"cuDevicePrimaryCtxRetain", (void *)retain},
    {"cuDevicePrimaryCtxRelease", (void *)release},
    {"cuCtxCreate", (void *)new_context},
    {"cuCtxDestroy", (void *)end_context},
    {"cuCtxGetCurrent", (void *)get_context},
    {"cuCtxSetCurrent", (void *)set_context},
    {"cuCtxEnablePeerAccess", (void *)enable_peer},
    {"cuCtxSynchronize", (void *)finish},
    {"cuThreadExchangeStreamCaptureMode", (void *)exchange_mode},
    {"cuMemAlloc", (void *)alloc},
    {"cuMemFree", (void *)free_safely},
    {"cuMemHostAlloc", (void *)alloc_host},
    {"cuMemFreeHost", (void *)free_host_safely},
    {"cuMemHostGetDevicePointer", (void *)seen_at},
    {"cuMemGetAddressRange", (void *)range},
    {"cuPointerGetAttribute", (void *)pointer},
    {"cuIpcOpenMemHandle", (void *)import},
    {"cuIpcCloseMemHandle", (void *)unmap},
    {"cuModuleLoadData", (void *)load},
    {"cuModuleUnload", (void *)give_back_safely},
    {"cuModuleGetFunction", (void *)find_kernel},
    {"cuStreamCreate", (void *)new_stream},
    {"cuStreamDestroy", (void *)release},
    {"cuStreamIsCapturing", (void *)is_capturing},
    {"cuStreamQuery", (void *)query},
    {"cuStreamSynchronize", (void *)finish_stream},
    {"cuStreamWriteValue32", (void *)write_word},
    {"cuStreamBatchMemOp", (void *)batch},
    {"cuStreamWriteValue64", (void *)write_word64},
    {"cuStreamGetCaptureInfo", (void *)capture_info},
    {"cuUserObjectCreate", (void *)user_object},
    {"cuGraphRetainUserObject", (void *)retain_object},
    {"cuEventCreate", (void *)new_event},
    {"cuEventRecord", (void *)record},
    {"cuEventQuery", (void *)passed},
    {"cuMemcpyAsync", (void *)copy},
    {"cuMemsetD8Async", (void *)fill},
    {"cuFuncGetAttribute", (void *)load_kernel},
    {"cuLaunchKernelEx", (void *)launch},
};

/* What the table does not name succeeds. */
int cuGetProcAddress_v2(const char *name, void **out, int since) {
  *out = NULL;
  if (old && since >= 11070)
    return UNKNOWN;
  *out = (void *)good;
  for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
    if (strcmp(table[i].name, name) == 0)
      *out = table[i].function;
  }
  return CS_CU_SUCCESS;
}
