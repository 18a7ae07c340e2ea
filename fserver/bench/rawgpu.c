/*
 * rawgpu: what two processes can do at best with the copy engine and a flag in
 * host memory: each way one copy straight into the peer's GPU memory (CUDA IPC),
 * behind which the stream stores a number where the peer's CPU sees it. raw.h
 * says how it is driven.
 *
 *   cc -O2 -Wall -Wextra -o rawgpu rawgpu.c -ldl
 *   ./rawgpu CLIENT_CORE SERVER_CORE CLIENT_GPU,SERVER_GPU
 *
 * The driver is opened at run time, so that no toolkit is needed. Messages of
 * one size are an echo. Numbers on a GPU cost a copy each to write and to read,
 * so only one message each way has one, behind the round and outside its times.
 */
#define _GNU_SOURCE
#define NAME "rawgpu"
#include "raw.h"
#include <dlfcn.h>
#include <sys/mman.h>

typedef unsigned long long address;
typedef struct {
  char bytes[64];
} handle;

enum { NON_BLOCKING = 1, LAZY_PEER_ACCESS = 1, DEVICE_MAP = 2 };

/* The driver's calls that this uses: name here, symbol, arguments. */
#define CALLS(F)                                                               \
  F(Init, "cuInit", (unsigned flags))                                          \
  F(DeviceGet, "cuDeviceGet", (int *device, int ordinal))                      \
  F(Retain, "cuDevicePrimaryCtxRetain", (void **context, int device))          \
  F(SetCurrent, "cuCtxSetCurrent", (void *context))                            \
  F(Alloc, "cuMemAlloc_v2", (address * at, size_t size))                       \
  F(Free, "cuMemFree_v2", (address at))                                        \
  F(Export, "cuIpcGetMemHandle", (handle * h, address at))                     \
  F(Import, "cuIpcOpenMemHandle_v2", (address * at, handle h, unsigned flags)) \
  F(CloseImport, "cuIpcCloseMemHandle", (address at))                          \
  F(Pin, "cuMemHostRegister_v2", (void *at, size_t size, unsigned flags))      \
  F(Pinned, "cuMemHostGetDevicePointer_v2",                                    \
    (address * at, void *host, unsigned flags))                                \
  F(NewStream, "cuStreamCreate", (void **stream, unsigned flags))              \
  F(Synchronize, "cuStreamSynchronize", (void *stream))                        \
  F(Copy, "cuMemcpyAsync", (address to, address from, size_t size, void *s))   \
  F(Store, "cuStreamWriteValue64_v2",                                          \
    (void *stream, address at, uint64_t value, unsigned flags))                \
  F(Put, "cuMemcpyHtoD_v2", (address to, const void *from, size_t size))       \
  F(Get, "cuMemcpyDtoH_v2", (void *to, address from, size_t size))             \
  F(Text, "cuGetErrorString", (int result, const char **text))

#define FIELD(name, symbol, arguments) int(*name) arguments;
static struct {
  CALLS(FIELD)
} cu;

#define MUST(what, call)                                                       \
  do {                                                                         \
    int result_ = (call);                                                      \
    const char *text_ = NULL;                                                  \
    if (result_ != 0) {                                                        \
      cu.Text(result_, &text_);                                                \
      die(what ": %s", text_ != NULL ? text_ : "unknown error");               \
    }                                                                          \
  } while (0)

#define PAGE 4096

/* Mapped by both, and pinned. Each flag counts the messages that are with its
 * side, and has a cache line of its own. */
struct shared {
  _Alignas(LINE) _Atomic uint64_t request;
  _Alignas(LINE) _Atomic uint64_t reply;
  char rest[PAGE - 2 * LINE];
};

/* One end. `ours` is memory that is sent from, `in` where the peer's message
 * comes to, and `peer` where ours goes. */
struct side {
  int control; /* a socket to the other end, blocked on between rounds */
  struct shared *shared;
  void *stream;
  address ours, in, peer, flag;
};

static void open_driver(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL)
    die("%s (is there a GPU, and its driver?)", dlerror());
#define LOAD(name, symbol, arguments)                                          \
  *(void **)&cu.name = dlsym(library, symbol);                                 \
  if (cu.name == NULL)                                                         \
    die("libcuda.so.1 has no " symbol ": the driver is older than CUDA 11.7");
  CALLS(LOAD)
}

/* In the process that uses the GPU, as CUDA does not survive a fork. `flag` is
 * that of the peer. */
static void begin(struct side *s, int gpu, _Atomic uint64_t *flag) {
  int device;
  void *context;
  open_driver();
  MUST("start the driver", cu.Init(0));
  if (cu.DeviceGet(&device, gpu) != 0)
    die("there is no GPU %d", gpu);
  MUST("hold the GPU's context", cu.Retain(&context, device));
  MUST("use the GPU's context", cu.SetCurrent(context));
  MUST("pin memory", cu.Pin(s->shared, sizeof *s->shared, DEVICE_MAP));
  MUST("map pinned memory", cu.Pinned(&s->flag, (void *)flag, 0));
  MUST("make a stream", cu.NewStream(&s->stream, NON_BLOCKING));
}

/* Gets memory for messages of `send` and `receive` bytes, and tells the peer
 * where. */
static void prepare(struct side *s, size_t send, size_t receive) {
  handle own, theirs;
  MUST("allocate", cu.Alloc(&s->ours, send < 8 ? 8 : send));
  MUST("allocate", cu.Alloc(&s->in, receive < 8 ? 8 : receive));
  MUST("share memory", cu.Export(&own, s->in));
  tell(s->control, &own, sizeof own);
  if (!hear(s->control, &theirs, sizeof theirs))
    die("the peer is gone");
  MUST("map the peer's memory", cu.Import(&s->peer, theirs, LAZY_PEER_ACCESS));
}

/* The peer has no copy under way any more. */
static void finish(struct side *s) {
  char over = 0;
  MUST("copy", cu.Synchronize(s->stream));
  MUST("unmap the peer's memory", cu.CloseImport(s->peer));
  tell(s->control, &over, 1);
  if (!hear(s->control, &over, 1))
    die("the peer is gone");
  MUST("free", cu.Free(s->ours));
  MUST("free", cu.Free(s->in));
}

/* Starts the copy of a message, and the store of its number behind it. */
static void copy(struct side *s, address from, size_t size, uint64_t number) {
  MUST("copy", cu.Copy(s->peer, from, size, s->stream));
  MUST("store a flag", cu.Store(s->stream, s->flag, number, 0));
}

/* The driver may return before the number is there; our stream would not wait. */
static void mark(address at, uint64_t size, uint64_t i) {
  if (size < sizeof i)
    return;
  MUST("write a number", cu.Put(at, &i, sizeof i));
  MUST("write a number", cu.Synchronize(NULL));
}

static void compare(address at, uint64_t size, uint64_t i) {
  uint64_t got = i;
  if (size >= sizeof got)
    MUST("read a number", cu.Get(&got, at, sizeof got));
  check((char *)&got, sizeof got, i);
}

static void serve(struct side *s) {
  struct round r;
  uint64_t at = 0; /* messages so far */
  while (hear(s->control, &r, sizeof r)) {
    prepare(s, r.back, r.out);
    for (uint64_t i = 0; i <= r.iters; i++) {
      spin(&s->shared->request, ++at);
      if (i == r.iters) {
        compare(s->in, r.out, at);
        mark(s->ours, r.back, at);
      }
      copy(s, r.back == r.out ? s->in : s->ours, r.back, at);
    }
    finish(s);
  }
}

static void play(struct side *s) {
  struct buffer times = {0};
  struct round r;
  uint64_t warmup, at = 0;
  while (next_round(&r, &warmup)) {
    uint64_t n = r.iters - warmup;
    reserve(&times, n * sizeof(uint64_t));
    uint64_t *ns = (uint64_t *)(void *)times.data;
    tell(s->control, &r, sizeof r);
    prepare(s, r.out, r.back);
    for (uint64_t i = 0; i < r.iters; i++) {
      uint64_t start = now();
      copy(s, s->ours, r.out, ++at);
      spin(&s->shared->reply, at);
      uint64_t end = now();
      if (i >= warmup)
        ns[i - warmup] = end - start;
    }
    mark(s->ours, r.out, ++at);
    copy(s, s->ours, r.out, at);
    spin(&s->shared->reply, at);
    compare(s->in, r.back, at);
    finish(s);
    answer(ns, n);
  }
}

int main(int argc, char **argv) {
  int ends[2], client_gpu, server_gpu;
  struct side s = {0};
  if (argc != 4 || sscanf(argv[3], "%d,%d", &client_gpu, &server_gpu) != 2)
    die("want CLIENT_CORE SERVER_CORE CLIENT_GPU,SERVER_GPU");
  int client_core = atoi(argv[1]), server_core = atoi(argv[2]);
  yielding = client_core >= 0 && client_core == server_core;
  s.shared = mmap(NULL, sizeof *s.shared, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (s.shared == MAP_FAILED || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
    die("share memory: %s", strerror(errno));
  signal(SIGCHLD, on_child);
  if (split() == 0) {
    close(ends[0]);
    s.control = ends[1];
    pin(server_core);
    begin(&s, server_gpu, &s.shared->reply);
    serve(&s);
    return 0;
  }
  close(ends[1]);
  s.control = ends[0];
  pin(client_core);
  begin(&s, client_gpu, &s.shared->request);
  play(&s);
  return 0;
}
