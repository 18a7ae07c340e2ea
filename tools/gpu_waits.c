/* Which calls of the driver wait for a GPU on which a stream waits for a message, and
 * which calls of other threads wait meanwhile for those (docs/adr/0019).
 *
 *   cc -O2 -pthread -o gpu_waits tools/gpu_waits.c cshim/cuda/cs_cuda.c -ldl
 *   gpu_waits GPU
 *   gpu_waits GPU streams
 *
 * Prints each call with the milliseconds that it took while a kernel waits, and while a
 * stream does by itself; "waits" if it had not come back after 200. Then, for each that
 * waits for a kernel, the calls that do not come back while another thread is in it.
 *
 * The second form: for each of 8 streams that waits, how many of 32 others do not go on,
 * as CUDA puts streams in few queues. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../cshim/cuda/cs_cuda.h"

#define LIMIT_MS 200
#define STREAMS 32
#define WAITERS 8
#define BYTES ((size_t)4 << 20)
#define HOST ((size_t)128 << 10)

#define MUST(call)                                                             \
  do {                                                                         \
    int rc_ = (int)(call);                                                     \
    if (rc_ != 0) {                                                            \
      char text_[160];                                                         \
      cs_cuda_text(rc_, text_, sizeof text_);                                  \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, text_);    \
      _exit(1);                                                                \
    }                                                                          \
  } while (0)

static const char kernels[] =
    ".version 6.4\n.target sm_70\n.address_size 64\n"
    ".visible .entry until(.param .u64 flag, .param .u64 value)\n"
    "{\n"
    "  .reg .b64 %rd<4>;\n"
    "  .reg .pred %p;\n"
    "  ld.param.u64 %rd1, [flag];\n"
    "  ld.param.u64 %rd2, [value];\n"
    "again:\n"
    "  ld.acquire.sys.u64 %rd3, [%rd1];\n"
    "  setp.ge.u64 %p, %rd3, %rd2;\n"
    "  @%p bra over;\n"
    "  bra again;\n"
    "over:\n"
    "  ret;\n"
    "}\n"
    ".visible .entry nothing()\n"
    "{\n"
    "  ret;\n"
    "}\n";

/* What a call needs, and leaves. */
struct item {
  const struct call *of;
  cs_ipc_handle handle;
  cs_ptr memory;
  void *host;
  cs_stream stream;
  cs_event event;
  cs_module module;
  cs_function function;
  cs_context second;
  double ms;
  atomic_int over;
};

struct call {
  const char *name;
  void (*before)(struct item *), (*make)(struct item *),
      (*after)(struct item *);
};

static cs_device device;
static cs_context context;
static cs_stream waiting, other;
static cs_event event;
static cs_ptr memory, seen; /* of the GPU, and of the host for the GPU */
static _Atomic uint64_t *flag;
static uint64_t turn;
static cs_function until, nothing;

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void none(struct item *i) { (void)i; }

static void stream_create(struct item *i) {
  MUST(cs_cu.StreamCreate(&i->stream, CS_STREAM_NON_BLOCKING));
}
static void stream_destroy(struct item *i) {
  MUST(cs_cu.StreamDestroy(i->stream));
}
static void stream_destroy_waiting(struct item *i) {
  MUST(cs_cu.StreamWaitValue64(i->stream, seen, turn, CS_WAIT_GEQ));
  stream_destroy(i);
}
static void event_create(struct item *i) {
  MUST(cs_cu.EventCreate(&i->event, CS_EVENT_DISABLE_TIMING));
}
static void event_destroy(struct item *i) {
  MUST(cs_cu.EventDestroy(i->event));
}
static void event_record(struct item *i) {
  (void)i;
  MUST(cs_cu.EventRecord(event, other));
}
static void event_query(struct item *i) {
  (void)i;
  cs_cu.EventQuery(event);
}
static void stream_query(struct item *i) {
  (void)i;
  cs_cu.StreamQuery(other);
}
static void wait_event(struct item *i) {
  (void)i;
  MUST(cs_cu.StreamWaitEvent(other, event, 0));
}
static void copy_inside(struct item *i) {
  (void)i;
  MUST(cs_cu.MemcpyAsync(memory, memory + BYTES / 2, 4096, other));
}
static void copy_out(struct item *i) {
  (void)i;
  MUST(cs_cu.MemcpyAsync(seen + 1024, memory, 1024, other));
}
static void write_value(struct item *i) {
  (void)i;
  MUST(cs_cu.StreamWriteValue64(other, memory, 1, CS_WRITE_DEFAULT));
}
static void write_value_done(struct item *i) {
  write_value(i);
  MUST(cs_cu.StreamSynchronize(other));
}
static void wait_value(struct item *i) {
  (void)i;
  MUST(cs_cu.StreamWaitValue64(other, seen, 0, CS_WAIT_GEQ));
}
static void launch(cs_function f, void **arguments, cs_stream s) {
  MUST(cs_cu.LaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, arguments, NULL));
}
static void launch_again(struct item *i) {
  (void)i;
  launch(nothing, NULL, other);
}
static void module_load(struct item *i) {
  MUST(cs_cu.ModuleLoadData(&i->module, kernels));
}
static void module_unload(struct item *i) {
  MUST(cs_cu.ModuleUnload(i->module));
}
static void find_kernel(struct item *i) {
  module_load(i);
  MUST(cs_cu.ModuleGetFunction(&i->function, i->module, "nothing"));
}
static void launch_first(struct item *i) { launch(i->function, NULL, other); }
static void allocate(struct item *i) {
  MUST(cs_cu.MemAlloc(&i->memory, BYTES));
}
static void release(struct item *i) { MUST(cs_cu.MemFree(i->memory)); }
static void host_alloc(struct item *i) {
  MUST(cs_cu.MemHostAlloc(&i->host, BYTES,
                          CS_HOST_PORTABLE | CS_HOST_DEVICEMAP));
}
static void host_free(struct item *i) { MUST(cs_cu.MemFreeHost(i->host)); }
static void host_map(struct item *i) {
  i->host = mmap(NULL, BYTES, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  MUST(i->host == MAP_FAILED);
}
static void host_register(struct item *i) {
  MUST(cs_cu.MemHostRegister(i->host, BYTES,
                             CS_HOST_PORTABLE | CS_HOST_DEVICEMAP));
}
static void host_pinned(struct item *i) {
  host_map(i);
  host_register(i);
}
static void host_unregister(struct item *i) {
  MUST(cs_cu.MemHostUnregister(i->host));
}
static void host_unmap(struct item *i) { munmap(i->host, BYTES); }
static void host_gone(struct item *i) {
  host_unregister(i);
  host_unmap(i);
}
static void attribute(struct item *i) {
  uint64_t id;
  (void)i;
  MUST(cs_cu.PointerGetAttribute(&id, CS_PTR_BUFFER_ID, memory));
}
static void ipc_get(struct item *i) {
  (void)i;
  cs_ipc_handle handle;
  MUST(cs_cu.IpcGetMemHandle(&handle, memory));
}
static void ipc_open(struct item *i) {
  MUST(cs_cu.IpcOpenMemHandle(&i->memory, i->handle, CS_IPC_LAZY_PEER_ACCESS));
}
static void ipc_close(struct item *i) {
  MUST(cs_cu.IpcCloseMemHandle(i->memory));
}
static void synchronize_other(struct item *i) {
  (void)i;
  MUST(cs_cu.StreamSynchronize(other));
}
static void synchronize(struct item *i) {
  (void)i;
  MUST(cs_cu.StreamSynchronize(waiting));
}
static void synchronize_all(struct item *i) {
  (void)i;
  MUST(cs_cu.CtxSynchronize());
}

/* Another context of the GPU writes a word. */
static void second_writes(struct item *i) {
  MUST(cs_cu.CtxCreate(&i->second, CS_CTX_BLOCKING_SYNC, device));
  stream_create(i);
  MUST(cs_cu.StreamWriteValue64(i->stream, memory, 1, CS_WRITE_DEFAULT));
  MUST(cs_cu.StreamSynchronize(i->stream));
  MUST(cs_cu.CtxSetCurrent(context));
}
static void second_destroy(struct item *i) {
  MUST(cs_cu.CtxDestroy(i->second));
}

static const struct call calls[] = {
    {"cuStreamCreate", none, stream_create, stream_destroy},
    {"cuStreamDestroy", stream_create, stream_destroy, none},
    {"cuStreamDestroy, of one that waits too", stream_create,
     stream_destroy_waiting, none},
    {"cuStreamQuery", none, stream_query, none},
    {"cuStreamSynchronize", none, synchronize_other, none},
    {"cuStreamWaitEvent", none, wait_event, none},
    {"cuStreamWaitValue64, of what is there", none, wait_value, none},
    {"cuStreamWriteValue64", none, write_value, none},
    {"cuStreamWriteValue64, until it is done", none, write_value_done, none},
    {"cuEventCreate", none, event_create, event_destroy},
    {"cuEventDestroy", event_create, event_destroy, none},
    {"cuEventQuery", none, event_query, none},
    {"cuEventRecord", none, event_record, none},
    {"cuMemcpyAsync, inside", none, copy_inside, none},
    {"cuMemcpyAsync, to the host", none, copy_out, none},
    {"cuLaunchKernel", none, launch_again, none},
    {"cuLaunchKernel, the first of a kernel", find_kernel, launch_first,
     module_unload},
    {"cuModuleLoadData", none, module_load, module_unload},
    {"cuModuleUnload", module_load, module_unload, none},
    {"cuMemAlloc", none, allocate, release},
    {"cuMemFree", allocate, release, none},
    {"cuMemHostAlloc", none, host_alloc, host_free},
    {"cuMemFreeHost", host_alloc, host_free, none},
    {"cuMemHostRegister", host_map, host_register, host_gone},
    {"cuMemHostUnregister", host_pinned, host_unregister, host_unmap},
    {"cuPointerGetAttribute", none, attribute, none},
    {"cuIpcGetMemHandle", none, ipc_get, none},
    {"cuIpcOpenMemHandle", none, ipc_open, ipc_close},
    {"cuIpcCloseMemHandle", ipc_open, ipc_close, none},
    {"cuStreamSynchronize, of the stream that waits", none, synchronize, none},
    {"cuCtxSynchronize", none, synchronize_all, none},
    {"cuCtxCreate, until a word is written there", none, second_writes,
     second_destroy},
    {"cuCtxDestroy, of another one", second_writes, second_destroy, none},
};
enum { CALLS = sizeof calls / sizeof calls[0] };

static void *thread(void *argument) {
  struct item *i = argument;
  MUST(cs_cu.CtxSetCurrent(context));
  const double start = now_ms();
  i->of->make(i);
  i->ms = now_ms() - start;
  i->over = 1;
  return NULL;
}

static pthread_t start(struct item *i) {
  pthread_t t;
  MUST(pthread_create(&t, NULL, thread, i));
  return t;
}

static void hold_up(int kernel) {
  turn++;
  void *arguments[] = {&seen, &turn};
  if (kernel)
    launch(until, arguments, waiting);
  else
    MUST(cs_cu.StreamWaitValue64(waiting, seen, turn, CS_WAIT_GEQ));
  usleep(5000);
}

static int comes_back(struct item *i) {
  for (double end = now_ms() + LIMIT_MS; !i->over && now_ms() < end;)
    usleep(50);
  return i->over;
}

static void go_on(void) { *flag = turn; }

/* Whether a call comes back while a stream waits, and, if there is one, while another
 * thread is in the call before. */
static int tried(const struct call *before, const struct call *call,
                 const cs_ipc_handle *handles, int kernel, double *ms) {
  struct item first = {.of = before, .handle = handles[0]},
              second = {.of = call, .handle = handles[1]};
  pthread_t one, two;
  if (before)
    before->before(&first);
  call->before(&second);
  hold_up(kernel);
  if (before) {
    one = start(&first);
    usleep(20000);
  }
  two = start(&second);
  const int back = comes_back(&second);
  go_on();
  if (before)
    MUST(pthread_join(one, NULL));
  MUST(pthread_join(two, NULL));
  MUST(cs_cu.CtxSynchronize());
  if (before)
    before->after(&first);
  call->after(&second);
  *ms = second.ms;
  return back;
}

static void copy_in(size_t bytes) {
  MUST(cs_cu.MemcpyAsync(memory, seen + 4096, bytes, other));
}
static void copy_in_small(struct item *i) {
  (void)i;
  copy_in(4096);
}
static void copy_in_large(struct item *i) {
  (void)i;
  copy_in(64 << 10);
}
static void copy_and_write(struct item *i) {
  copy_inside(i);
  write_value(i);
}

/* A stream stays in the queue that its last call chose: what comes first counts. */
static const struct call enqueued[] = {
    {"cuStreamWriteValue64", none, write_value, none},
    {"cuMemcpyAsync, inside, then cuStreamWriteValue64", none, copy_and_write,
     none},
    {"cuLaunchKernel", none, launch_again, none},
    {"cuMemcpyAsync, inside", none, copy_inside, none},
    {"cuMemcpyAsync, from the host, 4 KiB", none, copy_in_small, none},
    {"cuMemcpyAsync, from the host, 64 KiB", none, copy_in_large, none},
    {"cuMemcpyAsync, to the host", none, copy_out, none},
};

/* How many of the streams do not get a call done while one of the waiters waits; with
 * kernels, a second one stands behind that. */
static int kept(const struct call *call, cs_stream *streams, cs_stream *waiters,
                int kernel) {
  int n = 0;
  for (int w = 0; w < WAITERS; w++) {
    waiting = waiters[w];
    hold_up(kernel);
    if (kernel)
      launch(nothing, NULL, waiting);
    for (int i = 0; i < STREAMS; i++) {
      other = streams[i];
      call->make(NULL);
    }
    usleep(5000);
    for (int i = 0; i < STREAMS; i++)
      n += cs_cu.StreamQuery(streams[i]) != CS_CU_SUCCESS;
    go_on();
    MUST(cs_cu.CtxSynchronize());
  }
  return n;
}

static void try_streams(void) {
  const char *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  cs_stream streams[STREAMS], waiters[WAITERS];
  for (int i = 0; i < STREAMS; i++) {
    if (i % (STREAMS / WAITERS) == 0)
      MUST(cs_cu.StreamCreate(&waiters[i * WAITERS / STREAMS],
                              CS_STREAM_NON_BLOCKING));
    MUST(cs_cu.StreamCreate(&streams[i], CS_STREAM_NON_BLOCKING));
  }
  printf("CUDA_DEVICE_MAX_CONNECTIONS %s\n%-48s %10s %10s\n",
         queues ? queues : "not set",
         "of 256, not done while this waits:", "a kernel", "a stream");
  for (size_t i = 0; i < sizeof enqueued / sizeof enqueued[0]; i++)
    printf("%-48s %10d %10d\n", enqueued[i].name,
           kept(&enqueued[i], streams, waiters, 1),
           kept(&enqueued[i], streams, waiters, 0));
}

static void enter(int gpu) {
  char why[256];
  if (cs_cuda_open(why, sizeof why) != 0) {
    fprintf(stderr, "gpu_waits: %s\n", why);
    _exit(1);
  }
  if (cs_cu.DeviceGet(&device, gpu) != CS_CU_SUCCESS) {
    fprintf(stderr, "gpu_waits: CUDA shows no GPU %d\n", gpu);
    _exit(1);
  }
  MUST(cs_cu.DevicePrimaryCtxRetain(&context, device));
  MUST(cs_cu.CtxSetCurrent(context));
}

/* The other process, whose memory is mapped. */
static void lend(int gpu, int out, int in) {
  char c;
  enter(gpu);
  for (int i = 0; i < 2; i++) {
    cs_ipc_handle handle;
    MUST(cs_cu.MemAlloc(&memory, BYTES));
    MUST(cs_cu.IpcGetMemHandle(&handle, memory));
    MUST(write(out, &handle, sizeof handle) != sizeof handle);
  }
  _exit(read(in, &c, 1) != 0);
}

static void set_up(void) {
  cs_module module;
  void *host;
  int registers;
  MUST(cs_cu.StreamCreate(&waiting, CS_STREAM_NON_BLOCKING));
  MUST(cs_cu.StreamCreate(&other, CS_STREAM_NON_BLOCKING));
  MUST(cs_cu.EventCreate(&event, CS_EVENT_DISABLE_TIMING));
  MUST(cs_cu.MemAlloc(&memory, BYTES));
  MUST(cs_cu.MemHostAlloc(&host, HOST, CS_HOST_PORTABLE | CS_HOST_DEVICEMAP));
  MUST(cs_cu.MemHostGetDevicePointer(&seen, host, 0));
  memset(host, 0, HOST);
  flag = host;
  MUST(cs_cu.ModuleLoadData(&module, kernels));
  MUST(cs_cu.ModuleGetFunction(&until, module, "until"));
  MUST(cs_cu.ModuleGetFunction(&nothing, module, "nothing"));
  MUST(cs_cu.FuncGetAttribute(&registers, CS_FUNC_NUM_REGS, until));
  launch(nothing, NULL, other);
  event_record(NULL);
  MUST(cs_cu.CtxSynchronize());
}

static void try_calls(const cs_ipc_handle *handles) {
  double ms[2];
  int waits[CALLS];
  printf("%-48s %10s %10s\n", "while this waits:", "a kernel", "a stream");
  for (int i = 0; i < CALLS; i++) {
    printf("%-48s", calls[i].name);
    for (int kernel = 1; kernel >= 0; kernel--) {
      const int back = tried(NULL, &calls[i], handles, kernel, &ms[kernel]);
      if (kernel)
        waits[i] = !back;
      if (back)
        printf(" %10.3f", ms[kernel]);
      else
        printf(" %10s", "waits");
    }
    printf("\n");
    fflush(stdout);
  }
  for (int b = 0; b < CALLS; b++) {
    if (!waits[b])
      continue;
    for (int kernel = 1; kernel >= 0; kernel--) {
      printf("\nwhile a %s waits, and a thread is in %s, these wait too:\n",
             kernel ? "kernel" : "stream", calls[b].name);
      for (int i = 0; i < CALLS; i++)
        if (!waits[i] && !tried(&calls[b], &calls[i], handles, kernel, ms))
          printf("  %s\n", calls[i].name);
      fflush(stdout);
    }
  }
}

int main(int argc, char **argv) {
  char *end;
  int out[2], in[2];
  cs_ipc_handle handles[2];
  const int gpu = argc > 1 ? (int)strtol(argv[1], &end, 10) : 0,
            streams = argc == 3 && strcmp(argv[2], "streams") == 0;
  if (argc < 2 || argc > 3 || *end || end == argv[1] || (argc == 3 && !streams))
    return fprintf(stderr, "gpu_waits GPU [streams]: GPU as CUDA counts\n"), 2;
  if (streams) {
    enter(gpu);
    set_up();
    try_streams();
    return 0;
  }
  MUST(pipe(out) || pipe(in));
  if (fork() == 0) {
    close(in[1]);
    lend(gpu, out[1], in[0]);
  }
  close(out[1]);
  for (int i = 0; i < 2; i++)
    if (read(out[0], &handles[i], sizeof handles[i]) != sizeof handles[i])
      return 1; /* the other process has said why */
  enter(gpu);
  set_up();
  try_calls(handles);
  close(in[1]);
  wait(NULL);
  return 0;
}
