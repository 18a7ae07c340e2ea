/* What calls of the driver, copies and a socket take without us.
 *
 *   gpu_floor calls GPU_A GPU_B
 *
 * prints what single calls of the driver take on an idle GPU: median and 99th
 * percentile in nanoseconds, and the name.
 *
 *   gpu_floor copies GPU CORE BYTES...
 *
 * copies each size from the GPU to pinned host memory, and then back, with a
 * number that the stream stores behind each copy. Prints the bytes and the two
 * medians in nanoseconds, from the call until the CPU sees the number.
 *
 *   gpu_floor staged GPU_A GPU_B CORE_A CORE_B BYTES...
 *
 * sends each size from one GPU to the other and back, through pinned memory and
 * a TCP socket of this host, in pieces that are copied while others travel.
 * Prints the bytes and the median of the round trips in nanoseconds; for what is
 * one piece, also what they take without the copies: sockets that send what a
 * GPU has just written. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MUST(call)                                                             \
  do {                                                                         \
    int rc_ = (int)(call);                                                     \
    if (rc_ != 0) {                                                            \
      fprintf(stderr, "%s:%d: %s: error %d\n", __FILE__, __LINE__, #call,      \
              rc_);                                                            \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
  long long x = *(const long long *)a, y = *(const long long *)b;
  return (x > y) - (x < y);
}

#define TIMES 500

/* Each call starts when nothing is under way. */
#define TAKES(call)                                                            \
  do {                                                                         \
    static long long took[TIMES];                                              \
    for (int i = -50; i < TIMES; i++) {                                        \
      const long long start = now();                                           \
      int rc = (int)(call);                                                    \
      const long long end = now();                                             \
      MUST(rc);                                                                \
      MUST(cudaStreamSynchronize(stream));                                     \
      if (i >= 0)                                                              \
        took[i] = end - start;                                                 \
    }                                                                          \
    qsort(took, TIMES, sizeof *took, by_size);                                 \
    printf("%lld %lld %s\n", took[TIMES / 2], took[TIMES * 99 / 100], #call);  \
  } while (0)

static int calls(int a, int b) {
  char *near, *far;
  MUST(cudaSetDevice(b));
  MUST(cudaMalloc((void **)&far, 1 << 20));
  MUST(cudaSetDevice(a));
  MUST(cudaMalloc((void **)&near, 1 << 20));
  if (a != b)
    MUST(cudaDeviceEnablePeerAccess(b, 0));
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaEvent_t event;
  MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  void *page;
  CUdeviceptr flag;
  MUST(cudaHostAlloc(&page, 4096, cudaHostAllocMapped));
  MUST(cudaHostGetDevicePointer((void **)&flag, page, 0));
  CUcontext context;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CUstreamCaptureStatus status;
  TAKES(cuCtxGetCurrent(&context));
  TAKES(cuCtxSetCurrent(context));
  TAKES(cuThreadExchangeStreamCaptureMode(&mode));
  TAKES(cuStreamIsCapturing(NULL, &status));
  TAKES(cuStreamIsCapturing(stream, &status));
  TAKES(cuStreamQuery(NULL));
  TAKES(cuStreamQuery(stream));
  TAKES(cuEventRecord(event, NULL));
  TAKES(cuEventRecord(event, stream));
  TAKES(cuStreamWaitEvent(stream, event, 0));
  TAKES(cuMemcpyAsync((CUdeviceptr)far, (CUdeviceptr)near, 4096, stream));
  TAKES(cuMemcpyDtoDAsync((CUdeviceptr)far, (CUdeviceptr)near, 4096, stream));
  TAKES(cuMemcpyAsync((CUdeviceptr)far, (CUdeviceptr)near, 1 << 20, stream));
  TAKES(cuStreamWriteValue64(stream, flag, 1, 0));
  return 0;
}

static void bind_to(int core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  MUST(sched_setaffinity(0, sizeof one, &one));
}

static int copies(int gpu, int core, char **sizes) {
  bind_to(core);
  MUST(cudaSetDevice(gpu));
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  volatile unsigned long long *page;
  CUdeviceptr flag;
  MUST(cudaHostAlloc((void **)&page, 4096, cudaHostAllocMapped));
  MUST(cudaHostGetDevicePointer((void **)&flag, (void *)page, 0));
  for (unsigned long long number = *page = 0; *sizes; sizes++) {
    const size_t bytes = strtoull(*sizes, NULL, 10);
    static long long took[2][TIMES];
    void *here, *there;
    MUST(cudaHostAlloc(&here, bytes, cudaHostAllocDefault));
    MUST(cudaMalloc(&there, bytes));
    for (int i = -50; i < TIMES; i++)
      for (int up = 0; up < 2; up++) {
        const CUdeviceptr from = (CUdeviceptr)(up ? here : there);
        const long long start = now();
        MUST(cuMemcpyAsync((CUdeviceptr)(up ? there : here), from, bytes,
                           stream));
        MUST(cuStreamWriteValue64(stream, flag, ++number, 0));
        while (*page != number)
          ;
        took[up][i < 0 ? 0 : i] = now() - start;
      }
    for (int up = 0; up < 2; up++)
      qsort(took[up], TIMES, sizeof **took, by_size);
    printf("%zu %lld %lld\n", bytes, took[0][TIMES / 2], took[1][TIMES / 2]);
    MUST(cudaFreeHost(here));
    MUST(cudaFree(there));
  }
  return 0;
}

#define PIECE ((size_t)1 << 20)

/* One of the two processes. */
struct staging {
  int socket;
  cudaStream_t out, in;
  char *gpu, *sent, *came; /* memory of the GPU, and pinned */
  volatile unsigned long long *page;
  CUdeviceptr flag; /* of out, and behind it that of in */
  unsigned long long outs, ins;
  int alone;         /* nothing is sent while the GPU copies */
  long long copying; /* then, how long it copied */
};

static size_t piece(size_t bytes, size_t at) {
  return bytes - at < PIECE ? bytes - at : PIECE;
}

/* Waits until the GPU has done so many copies, and notes how long they took. */
static void copied(struct staging *s, int which, unsigned long long number,
                   long long start) {
  while (s->page[which] < number)
    ;
  s->copying += now() - start;
}

static void push(struct staging *s, size_t bytes) {
  unsigned long long number = s->outs;
  const long long start = now();
  for (size_t at = 0; at < bytes; at += PIECE) {
    MUST(cuMemcpyAsync((CUdeviceptr)(s->sent + at), (CUdeviceptr)(s->gpu + at),
                       piece(bytes, at), s->out));
    MUST(cuStreamWriteValue64(s->out, s->flag, ++s->outs, 0));
  }
  if (s->alone)
    copied(s, 0, s->outs, start);
  for (size_t at = 0; at < bytes; at += PIECE) {
    for (number++; s->page[0] < number;)
      ;
    for (size_t done = 0, n = piece(bytes, at); done < n;) {
      const ssize_t k =
          send(s->socket, s->sent + at + done, n - done, MSG_NOSIGNAL);
      MUST(k <= 0);
      done += (size_t)k;
    }
  }
}

static void pull(struct staging *s, size_t bytes) {
  long long start = 0;
  for (size_t at = 0; at < bytes; at += PIECE) {
    for (size_t done = 0, n = piece(bytes, at); done < n;) {
      const ssize_t k =
          recv(s->socket, s->came + at + done, n - done, MSG_DONTWAIT);
      MUST(k == 0);
      done += k > 0 ? (size_t)k : 0;
    }
    start = now();
    MUST(cuMemcpyAsync((CUdeviceptr)(s->gpu + at), (CUdeviceptr)(s->came + at),
                       piece(bytes, at), s->in));
    MUST(cuStreamWriteValue64(s->in, s->flag + 64, ++s->ins, 0));
  }
  copied(s, 8, s->ins, start);
}

/* Connects two processes; the child's is the other end. */
static int apart(int *me) {
  struct sockaddr_in at = {.sin_family = AF_INET,
                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t n = sizeof at;
  const int door = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  MUST(bind(door, (void *)&at, sizeof at) || listen(door, 1) ||
       getsockname(door, (void *)&at, &n));
  *me = fork() == 0;
  int s = socket(AF_INET, SOCK_STREAM, 0);
  if (*me)
    MUST(connect(s, (void *)&at, sizeof at));
  else
    MUST((s = accept(door, NULL, NULL)) < 0);
  MUST(setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
  return s;
}

/* The median of round trips, without the copies if they are alone. */
static long long trips(struct staging *s, int me, size_t bytes, int times) {
  static long long took[TIMES];
  for (int i = -10; i < times; i++) {
    long long theirs = 0;
    if (!me) /* as who has just computed something */
      MUST(cudaMemset(s->gpu, i, 8) || cudaDeviceSynchronize());
    s->copying = 0;
    const long long start = now();
    if (me)
      pull(s, bytes);
    push(s, bytes);
    if (!me)
      pull(s, bytes);
    const long long end = now();
    if (me)
      MUST(send(s->socket, &s->copying, sizeof theirs, MSG_NOSIGNAL) < 0);
    else
      MUST(recv(s->socket, &theirs, sizeof theirs, MSG_WAITALL) !=
           sizeof theirs);
    took[i < 0 ? 0 : i] = end - start - (s->alone ? s->copying + theirs : 0);
  }
  qsort(took, (size_t)times, sizeof *took, by_size);
  return took[times / 2];
}

static int staged(char **argv) {
  int me;
  struct staging s = {.socket = apart(&me)};
  bind_to(atoi(argv[2 + me]));
  MUST(cudaSetDevice(atoi(argv[me])));
  MUST(cudaStreamCreateWithFlags(&s.out, cudaStreamNonBlocking));
  MUST(cudaStreamCreateWithFlags(&s.in, cudaStreamNonBlocking));
  MUST(cudaHostAlloc((void **)&s.page, 4096, cudaHostAllocMapped));
  MUST(cudaHostGetDevicePointer((void **)&s.flag, (void *)s.page, 0));
  memset((void *)s.page, 0, 4096);
  for (char **size = argv + 4; *size; size++) {
    const size_t bytes = strtoull(*size, NULL, 10);
    const int times = bytes < 4 << 20 ? TIMES : 50;
    long long took[2];
    MUST(cudaMalloc((void **)&s.gpu, bytes));
    MUST(cudaHostAlloc((void **)&s.sent, bytes, cudaHostAllocDefault));
    MUST(cudaHostAlloc((void **)&s.came, bytes, cudaHostAllocDefault));
    for (s.alone = 0; s.alone < (bytes > PIECE ? 1 : 2); s.alone++)
      took[s.alone] = trips(&s, me, bytes, times);
    if (!me && bytes > PIECE)
      printf("%zu %lld\n", bytes, took[0]);
    else if (!me)
      printf("%zu %lld %lld\n", bytes, took[0], took[1]);
    MUST(cudaFree(s.gpu) || cudaFreeHost(s.sent) || cudaFreeHost(s.came));
  }
  if (!me)
    wait(0);
  return 0;
}

int main(int argc, char **argv) {
  if (argc > 6 && strcmp(argv[1], "staged") == 0)
    return staged(argv + 2);
  if (argc > 4 && strcmp(argv[1], "copies") == 0)
    return copies(atoi(argv[2]), atoi(argv[3]), argv + 4);
  if (argc == 4 && strcmp(argv[1], "calls") == 0)
    return calls(atoi(argv[2]), atoi(argv[3]));
  fprintf(stderr,
          "gpu_floor: want calls, copies or staged, and its arguments\n");
  return 2;
}
