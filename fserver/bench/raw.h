/*
 * What the raw baselines share: two pinned processes that move bytes to and
 * fro in rounds, driven over standard input.
 *
 *   PROGRAM CLIENT_CORE SERVER_CORE ...
 *
 * Client and server are two processes, each pinned to its core (-1: not
 * pinned). Both spin during a round, and yield between tries if they share a
 * core. Between rounds both are blocked, so that another benchmark has the
 * cores to itself.
 *
 * Each line on standard input starts a round:
 *
 *   OUT BACK WARMUP ITERS
 *
 * In each iteration the client moves OUT bytes to the server, which, when it
 * has them all, moves BACK bytes home. The first WARMUP are not counted. The
 * answer is one line of JSON, times from the first byte out to the last byte
 * back:
 *
 *   {"iters":1000,"p50_us":8.213,"p99_us":11.020,"min_us":7.700,"mean_us":8.400}
 *
 * Where a message has at least 8 bytes they carry the number of the iteration,
 * and both ends check it. End of input ends both processes; any error ends them
 * with status 1 and a line on standard error.
 *
 * A program defines NAME before it includes this.
 */
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

#define LINE 64 /* bytes that two cores contend for */

#define MAX_BYTES (UINT64_C(1) << 32)
#define MAX_ITERS (UINT64_C(1) << 26)

struct round {
  uint64_t out, back, iters; /* iters includes the warm-up */
};

struct buffer {
  char *data;
  size_t size;
};

static int yielding;

static void die(const char *format, ...) {
  va_list args;
  fputs(NAME ": ", stderr);
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fputc('\n', stderr);
  exit(1);
}

static void pin(int core) {
  cpu_set_t set;
  if (core < 0)
    return;
  CPU_ZERO(&set);
  CPU_SET((unsigned)core, &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0)
    die("pin to core %d: %s", core, strerror(errno));
}

/* Makes room for size bytes whose pages are there. */
static void reserve(struct buffer *b, size_t size) {
  if (size <= b->size)
    return;
  free(b->data);
  b->data = malloc(size);
  if (b->data == NULL)
    die("allocate %zu bytes", size);
  memset(b->data, 0x5a, size);
  b->size = size;
}

static inline void stamp(char *data, uint64_t size, uint64_t i) {
  if (size >= sizeof i)
    memcpy(data, &i, sizeof i);
}

static void check(const char *data, uint64_t size, uint64_t i) {
  uint64_t got;
  if (size < sizeof got)
    return;
  memcpy(&got, data, sizeof got);
  if (got != i)
    die("iteration %" PRIu64 ": got the data of %" PRIu64, i, got);
}

static int by_value(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return (x > y) - (x < y);
}

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* The smallest sample that at least percent of the n sorted ones do not
 * exceed. */
static double percentile(const uint64_t *sorted, uint64_t n, unsigned percent) {
  return (double)sorted[(n * percent + 99) / 100 - 1] / 1e3;
}

/* Prints the answer to a round from its n times. */
static void answer(uint64_t *ns, uint64_t n) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < n; i++)
    sum += ns[i];
  qsort(ns, n, sizeof *ns, by_value);
  printf("{\"iters\":%" PRIu64 ",\"p50_us\":%.3f,\"p99_us\":%.3f,"
         "\"min_us\":%.3f,\"mean_us\":%.3f}\n",
         n, percentile(ns, n, 50), percentile(ns, n, 99), (double)ns[0] / 1e3,
         (double)sum / (double)n / 1e3);
  fflush(stdout);
}

/* Reads the next round. Returns 0 at the end of the input. */
static int next_round(struct round *r, uint64_t *warmup) {
  char line[256];
  if (fgets(line, sizeof line, stdin) == NULL)
    return 0;
  if (sscanf(line, "%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &r->out,
             &r->back, warmup, &r->iters) != 4 ||
      r->out < 1 || r->out > MAX_BYTES || r->back < 1 || r->back > MAX_BYTES ||
      *warmup > MAX_ITERS || r->iters < 1 || r->iters > MAX_ITERS)
    die("want OUT BACK WARMUP ITERS, sizes from 1 to 2^32, counts to 2^26: %s",
        line);
  r->iters += *warmup;
  return 1;
}

/* Forks the server. Spinning must not outlive the client, however that ends.
 * Returns the child's id in the client and 0 in the server. */
static pid_t split(void) {
  pid_t parent = getpid(), child = fork();
  if (child < 0)
    die("fork: %s", strerror(errno));
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
      exit(1);
  }
  return child;
}

/* What two processes with shared memory need: flags to spin on during a round,
 * and a socket to block on between rounds. */

static inline void spin(_Atomic uint64_t *flag, uint64_t want) {
  while (atomic_load_explicit(flag, memory_order_acquire) < want) {
    if (yielding)
      sched_yield();
    else
      PAUSE();
  }
}

static inline void tell(int fd, const void *data, size_t size) {
  if (send(fd, data, size, MSG_NOSIGNAL) != (ssize_t)size)
    die("the peer is gone");
}

/* Returns 0 at the end of the connection. */
static inline int hear(int fd, void *data, size_t size) {
  ssize_t n = recv(fd, data, size, MSG_WAITALL);
  if (n != 0 && n != (ssize_t)size)
    die("receive: %s", n < 0 ? strerror(errno) : "the peer closed early");
  return n != 0;
}

/* The server has failed, and said why. */
static inline void on_child(int sig) {
  (void)sig;
  _exit(1);
}
