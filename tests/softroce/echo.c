/* The library beside tests/softroce/floor.c: push_pulls of one tensor each way between a worker on
 * one device and a server on the other, through the C interface, over verbs.
 *
 *   echo [--seconds S] [--largest BYTES] [--floor FILE] [DEVICE DEVICE]
 *
 * The worker and the server poll, each on its own processor; the scheduler is a third process, which
 * sleeps. The server answers with memory of its own. With --floor FILE, what floor has written with --json, it
 * prints how many times the floor's round trip each one takes.
 *
 * Before a size is timed, one round trip compares every byte; in each round trip the last byte is
 * compared. A failure ends the program with status 1.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "fserver.h"
#include "rdma.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGEST = 16 << 20, WARM = 5, FEWEST = 5, MOST = 20000 };
enum { SLICE = 1000000000 };
static const uint32_t sizes[] = {64, 4 << 10, 64 << 10, 1 << 20, LARGEST};
#define SIZES (sizeof sizes / sizeof *sizes)

static const char *devices[2] = {"rxe0", "rxe1"};

static void check(int rc, const char *call) {
  fs_error e = {0};
  if (rc == 0)
    return;
  fs_errmsg(&e);
  fprintf(stderr, "echo: %s gives %d: %s\n", call, rc, e.text);
  exit(1);
}

static uint8_t byte_at(uint32_t i, uint8_t mark) {
  return (uint8_t)(i * 7 + (i >> 8) + mark);
}

/* One allocation, which is registered once. */
static fs_tensor memory(uint64_t alloc, uint64_t key) {
  void *at = mmap(NULL, LARGEST, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (at == MAP_FAILED)
    die("mmap");
  return (fs_tensor){.data = at,
                     .key = key,
                     .base = at,
                     .base_bytes = LARGEST,
                     .alloc = alloc,
                     .ndim = 1,
                     .device = -1};
}

static void size(fs_tensor *t, const int64_t *bytes) {
  t->bytes = (uint64_t)*bytes;
  t->dims = bytes;
}

static void fill(const fs_tensor *t, uint8_t mark, int all) {
  uint8_t *out = t->data;
  for (uint32_t i = all ? 0 : (uint32_t)t->bytes - 1; i < t->bytes; i++)
    out[i] = byte_at(i, mark);
}

static void compare(const void *data, uint64_t bytes, uint8_t mark, int all) {
  const uint8_t *in = data;
  for (uint32_t i = all ? 0 : (uint32_t)bytes - 1; i < bytes; i++)
    if (in[i] != byte_at(i, mark))
      die("byte %u of %llu is %u; want %u", i, (unsigned long long)bytes, in[i],
          byte_at(i, mark));
}

static fs_node open_node(const char *role, int side) {
  char text[12][100];
  const char *settings[12];
  size_t n = 0;
  fs_node node;
#define SET(...)                                                               \
  (snprintf(text[n], sizeof(text[n]), __VA_ARGS__), settings[n] = text[n], n++)
  SET("DMLC_ROLE=%s", role);
  SET("DMLC_NUM_WORKER=1");
  SET("DMLC_NUM_SERVER=1");
  SET("DMLC_PS_ROOT_URI=127.0.0.1");
  SET("DMLC_PS_ROOT_PORT=17777");
  SET("DMLC_NODE_HOST=127.0.0.1");
  SET("FSERVER_TRANSPORT=verbs");
  SET("FSERVER_PROGRESS=caller");
  SET("FSERVER_SPIN_US=1000000");
  SET("FSERVER_LOG=error");
  SET("STEPMESH_BACKEND=CPU");
  if (side >= 0)
    SET("FSERVER_RDMA_DEVICE=%s", devices[side]);
#undef SET
  check(fs_open(settings, n, &node), "fs_open");
  return node;
}

static void ready(fs_node node) {
  int rc;
  while ((rc = fs_wait_ready(node, SLICE)) == -EAGAIN)
    ;
  check(rc, "fs_wait_ready");
}

static void leave(fs_node node) {
  int rc;
  while ((rc = fs_stop(node, SLICE)) == -EAGAIN)
    ;
  check(rc, "fs_stop");
  check(fs_free(node), "fs_free");
}

static void schedule(void) {
  fs_node node = open_node("scheduler", -1);
  ready(node);
  leave(node);
}

static void serve(void) {
  fs_node node = open_node("server", 1);
  fs_tensor answer = memory(1, 0);
  uint64_t words[64];
  size_t need, one = 1, answered;
  fs_ticket ticket = 0;
  ready(node);
  pin(1);
  for (uint8_t mark = 0;; mark++) {
    int rc;
    while ((rc = fs_get_batch(node, 0, 0, words, 64, &need, SLICE, 0)) ==
           -EAGAIN)
      ;
    if (rc == -ESHUTDOWN) /* the worker has left */
      break;
    check(rc, "fs_get_batch");
    /* One request with one tensor: see fs_get_batch. */
    const int64_t bytes = (int64_t)words[9];
    const uint8_t *in = (const uint8_t *)(uintptr_t)words[8];
    const uint8_t first =
        (uint8_t)(in[bytes - 1] - byte_at((uint32_t)bytes - 1, 0));
    const int all = first < WARM;
    compare(in, (uint64_t)bytes, first, all);
    while (ticket && (rc = fs_wait(node, ticket, SLICE, 0)) == -EAGAIN)
      ;
    check(ticket ? rc : 0, "fs_wait");
    size(&answer, &bytes);
    fill(&answer, (uint8_t)(first + 1), all);
    check(
        fs_respond(node, NULL, &words[1], &one, 1, &answer, &ticket, &answered),
        "fs_respond");
  }
  leave(node);
}

static double round_trip(fs_node node, fs_tensor *push, fs_tensor *pull,
                         uint8_t mark, int all) {
  fs_ticket ticket;
  int rc;
  fill(push, mark, all);
  double start = now();
  check(fs_push_pull(node, 0, NULL, push, 1, pull, 1, &ticket), "fs_push_pull");
  while ((rc = fs_wait(node, ticket, SLICE, 0)) == -EAGAIN)
    ;
  double took = now() - start;
  check(rc, "fs_wait");
  compare(pull->data, pull->bytes, (uint8_t)(mark + 1), all);
  return took;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* The times of floor for a size, from its file; 0 if they are not there. */
static int floor_of(const char *file, uint32_t bytes, double *p10,
                    double *median) {
  char line[300];
  uint32_t its;
  FILE *f = file ? fopen(file, "r") : NULL;
  int found = 0;
  while (f && !found && fgets(line, sizeof line, f))
    found = sscanf(line,
                   "%*[ [{]\"bytes\": %u, \"trips\": %*d, \"p10_us\": %lf, "
                   "\"median_us\": %lf",
                   &its, p10, median) == 3 &&
            its == bytes;
  if (f)
    fclose(f);
  return found;
}

static void measure(fs_node node, fs_tensor *push, fs_tensor *pull,
                    uint32_t bytes, double seconds, const char *file) {
  static double took[MOST];
  const int64_t dims = bytes;
  double end = 0, p10, median;
  int n = 0;
  size(push, &dims);
  size(pull, &dims);
  for (int i = 0; i < WARM; i++)
    round_trip(node, push, pull, (uint8_t)i, 1);
  for (end = now() + seconds; n < MOST && (n < FEWEST || now() < end); n++)
    took[n] = round_trip(node, push, pull, (uint8_t)(WARM + n % 200), 0);
  qsort(took, (size_t)n, sizeof *took, by_value);
  const double mine = took[n / 2] * 1e6, low = took[n / 10] * 1e6;
  printf("%10u %8d %12.1f %12.1f %12.1f %9.1f", bytes, n, low, mine,
         took[n * 9 / 10] * 1e6, 2.0 * bytes / mine * 1e6 / (1 << 20));
  if (floor_of(file, bytes, &p10, &median))
    printf("   %5.2f %5.2f times the floor", low / p10, mine / median);
  printf("\n");
}

/* Starts this program anew: the engine does not live on in a forked child. */
static void start(const char *role) {
  pid_t child = fork();
  if (child < 0)
    die("fork");
  if (child == 0) {
    execl("/proc/self/exe", "echo", role, devices[0], devices[1], NULL);
    die("execl");
  }
}

int main(int argc, char **argv) {
  const char *file = NULL, *role = "";
  uint32_t largest = LARGEST;
  double seconds = 1;
  int named = 0;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--floor") == 0 && i + 1 < argc)
      file = argv[++i];
    else if (strcmp(argv[i], "--largest") == 0 && i + 1 < argc)
      largest = (uint32_t)atoi(argv[++i]);
    else if (strcmp(argv[i], "--seconds") == 0 && i + 1 < argc)
      seconds = atof(argv[++i]);
    else if (strcmp(argv[i], "--schedule") == 0 ||
             strcmp(argv[i], "--serve") == 0)
      role = argv[i];
    else if (argv[i][0] != '-' && named < 2)
      devices[named++] = argv[i];
    else
      die("echo: %s: want [--seconds S] [--largest BYTES] [--floor FILE] "
          "[DEVICE DEVICE]",
          argv[i]);
  }
  if (*role) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    strcmp(role, "--serve") == 0 ? serve() : schedule();
    return 0;
  }
  start("--schedule");
  start("--serve");
  fs_node node = open_node("worker", 0);
  fs_tensor push = memory(1, 1), pull = memory(2, 1);
  ready(node);
  pin(0);
  printf("%10s %8s %12s %12s %12s %9s   p10 median\n", "bytes", "trips",
         "p10 us", "median us", "p90 us", "MiB/s");
  for (size_t i = 0; i < SIZES && sizes[i] <= largest; i++)
    measure(node, &push, &pull, sizes[i], seconds, file);
  leave(node);
  for (int i = 0, status = 0; i < 2; i++)
    if (wait(&status) < 0 || status != 0)
      die("a process failed: status %d", status);
  return 0;
}
