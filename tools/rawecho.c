/*
 * rawecho: what two processes can do at best over TCP on loopback. It is the
 * baseline that `fserver bench pingpong` runs in turn with fserver.
 *
 *   cc -O2 -Wall -Wextra -o build/rawecho tools/rawecho.c
 *   build/rawecho CLIENT_CORE SERVER_CORE
 *
 * Client and server are two processes, each pinned to its core (-1: not
 * pinned), with one connection between them. Both spin on non-blocking sockets
 * during a round, and yield between tries if they share a core. Between rounds
 * both are blocked, so that another benchmark has the cores to itself.
 *
 * Each line on standard input starts a round:
 *
 *   OUT BACK WARMUP ITERS
 *
 * In each iteration the client sends OUT bytes and the server, when it has them
 * all, sends BACK bytes; nothing else travels. The first WARMUP are not
 * counted. The answer is one line of JSON, times from send to the last byte
 * back:
 *
 *   {"iters":1000,"p50_us":8.213,"p99_us":11.020,"min_us":7.700,"mean_us":8.400}
 *
 * Where a message has at least 8 bytes they carry the number of the iteration,
 * and both ends check it. End of input ends both processes; any error ends them
 * with status 1 and a line on standard error.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

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
  fputs("rawecho: ", stderr);
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

/* After a try that moved nothing: goes on spinning, or ends the process. */
static void retry(const char *what) {
  if (errno != EAGAIN && errno != EINTR)
    die("%s: %s", what, strerror(errno));
  if (yielding)
    sched_yield();
}

static void send_all(int fd, const void *data, size_t size) {
  const char *p = data;
  while (size > 0) {
    ssize_t n = send(fd, p, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
      retry("send");
      continue;
    }
    p += n;
    size -= (size_t)n;
  }
}

/* Returns 0 if the peer closed before the first byte. The first try waits if
 * blocking is set; all others spin. */
static int recv_all(int fd, void *data, size_t size, int blocking) {
  char *p = data;
  size_t left = size;
  while (left > 0) {
    ssize_t n = recv(fd, p, left, blocking ? 0 : MSG_DONTWAIT);
    if (n < 0) {
      retry("receive");
      continue;
    }
    if (n == 0) {
      if (left == size)
        return 0;
      die("receive: the peer closed %zu bytes early", left);
    }
    p += n;
    left -= (size_t)n;
    blocking = 0;
  }
  return 1;
}

static void stamp(char *data, uint64_t size, uint64_t i) {
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

static void serve(int fd) {
  struct buffer in = {0}, reply = {0};
  struct round r;
  while (recv_all(fd, &r, sizeof r, 1)) {
    reserve(&in, r.out);
    reserve(&reply, r.back);
    send_all(fd, "", 1);
    for (uint64_t i = 0; i < r.iters; i++) {
      if (!recv_all(fd, in.data, r.out, 0))
        exit(1); /* the client said why */
      check(in.data, r.out, i);
      stamp(reply.data, r.back, i);
      send_all(fd, reply.data, r.back);
    }
  }
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

static void play(int fd, struct round r, uint64_t warmup, struct buffer *out,
                 struct buffer *back, struct buffer *times) {
  uint64_t n = r.iters - warmup, sum = 0;
  char ready;
  reserve(out, r.out);
  reserve(back, r.back);
  reserve(times, n * sizeof(uint64_t));
  uint64_t *ns = (uint64_t *)(void *)times->data;
  send_all(fd, &r, sizeof r);
  if (!recv_all(fd, &ready, 1, 1))
    die("the server is gone");
  for (uint64_t i = 0; i < r.iters; i++) {
    stamp(out->data, r.out, i);
    uint64_t start = now();
    send_all(fd, out->data, r.out);
    if (!recv_all(fd, back->data, r.back, 0))
      die("the server is gone");
    uint64_t end = now();
    check(back->data, r.back, i);
    if (i >= warmup) {
      ns[i - warmup] = end - start;
      sum += end - start;
    }
  }
  qsort(ns, n, sizeof *ns, by_value);
  printf("{\"iters\":%" PRIu64 ",\"p50_us\":%.3f,\"p99_us\":%.3f,"
         "\"min_us\":%.3f,\"mean_us\":%.3f}\n",
         n, percentile(ns, n, 50), percentile(ns, n, 99), (double)ns[0] / 1e3,
         (double)sum / (double)n / 1e3);
  fflush(stdout);
}

static void control(int fd) {
  struct buffer out = {0}, back = {0}, times = {0};
  char line[256];
  while (fgets(line, sizeof line, stdin) != NULL) {
    struct round r;
    uint64_t warmup, iters;
    if (sscanf(line, "%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &r.out,
               &r.back, &warmup, &iters) != 4 ||
        r.out < 1 || r.out > MAX_BYTES || r.back < 1 || r.back > MAX_BYTES ||
        warmup > MAX_ITERS || iters < 1 || iters > MAX_ITERS)
      die("want OUT BACK WARMUP ITERS, sizes from 1 to 2^32, counts to 2^26: "
          "%s",
          line);
    r.iters = warmup + iters;
    play(fd, r, warmup, &out, &back, &times);
  }
}

int main(int argc, char **argv) {
  struct sockaddr_in addr = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof addr;
  int on = 1;
  if (argc != 3)
    die("want CLIENT_CORE SERVER_CORE");
  int client_core = atoi(argv[1]), server_core = atoi(argv[2]);
  yielding = client_core >= 0 && client_core == server_core;

  int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (listener < 0 || bind(listener, (struct sockaddr *)&addr, len) != 0 ||
      getsockname(listener, (struct sockaddr *)&addr, &len) != 0 ||
      listen(listener, 1) != 0)
    die("listen on 127.0.0.1: %s", strerror(errno));
  int client = socket(AF_INET, SOCK_STREAM, 0);
  if (client < 0 || connect(client, (struct sockaddr *)&addr, len) != 0)
    die("connect to 127.0.0.1: %s", strerror(errno));
  int server = accept(listener, NULL, NULL);
  if (server < 0)
    die("accept: %s", strerror(errno));
  close(listener);
  setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);

  pid_t parent = getpid();
  pid_t child = fork();
  if (child < 0)
    die("fork: %s", strerror(errno));
  if (child == 0) {
    /* Spinning must not outlive the client, however that ends. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
      return 1;
    close(client);
    pin(server_core);
    serve(server);
    return 0;
  }
  close(server);
  pin(client_core);
  control(client);
  return 0;
}
