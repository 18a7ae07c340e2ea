/*
 * The engine through fserver.h, as a C program sees it. `abi_test NAME` runs
 * one case; test_cabi.py builds it and runs them all.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "fserver.h"

#define MS INT64_C(1000000)
#define SECOND (1000 * MS)
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

#define CHECK(ok)                                                              \
  do {                                                                         \
    if (!(ok))                                                                 \
      die(__LINE__, #ok);                                                      \
  } while (0)

/* The call gives this code, and an error whose text has this part. */
#define FAILS(call, errno_, part)                                              \
  do {                                                                         \
    CHECK((call) == -(errno_));                                                \
    fs_error e_;                                                               \
    CHECK(fs_errmsg(&e_) == 0);                                                \
    CHECK(e_.code == -(errno_));                                               \
    if (!strstr(e_.text, part))                                                \
      die(__LINE__, e_.text);                                                  \
  } while (0)

static void die(int line, const char *what) {
  fs_error e;
  fprintf(stderr, "abi_test.c:%d: %s\n", line, what);
  if (fs_errmsg(&e) == 0)
    fprintf(stderr, "  last error of this thread: %s\n", e.text);
  exit(1);
}

struct test {
  const char *name;
  void (*run)(void);
  struct test *next;
};
static struct test *tests;

#define CASE(name)                                                             \
  static void name(void);                                                      \
  __attribute__((constructor)) static void add_##name(void) {                  \
    static struct test t = {#name, name, NULL};                                \
    t.next = tests;                                                            \
    tests = &t;                                                                \
  }                                                                            \
  static void name(void)

/* A cluster of one scheduler, one worker and one server. */
struct mesh {
  fs_node scheduler, worker, server;
};

static fs_node open_node(const char *role, const char *port,
                         const char *timeout) {
  char role_[64], port_[64], timeout_[64];
  snprintf(role_, sizeof(role_), "DMLC_ROLE=%s", role);
  snprintf(port_, sizeof(port_), "DMLC_PS_ROOT_PORT=%s", port);
  snprintf(timeout_, sizeof(timeout_), "FSERVER_INIT_TIMEOUT=%s", timeout);
  const char *settings[] = {role_,
                            port_,
                            timeout_,
                            "DMLC_PS_ROOT_URI=127.0.0.1",
                            "DMLC_NUM_WORKER=1",
                            "DMLC_NUM_SERVER=1",
                            "STEPMESH_BACKEND=CPU",
                            "FSERVER_STOP_TIMEOUT=10"};
  fs_node node = 0;
  CHECK(fs_open(settings, COUNT(settings), &node) == 0);
  CHECK(node != 0);
  return node;
}

static void wait_ready(fs_node node) {
  int rc;
  while ((rc = fs_wait_ready(node, 100 * MS)) == -EAGAIN)
    ;
  CHECK(rc == 0);
}

static struct mesh open_mesh(void) {
  struct mesh m;
  fs_info info;
  m.scheduler = open_node("scheduler", "0", "20");
  CHECK(fs_get_info(m.scheduler, &info) == 0);
  const char *port = strrchr(info.address, ':');
  CHECK(port);
  m.worker = open_node("worker", port + 1, "20");
  m.server = open_node("server", port + 1, "20");
  wait_ready(m.scheduler);
  wait_ready(m.worker);
  wait_ready(m.server);
  return m;
}

/* Nothing is left of it. */
static void free_mesh(struct mesh *m) {
  int64_t nodes, buffers, goroutines;
  CHECK(fs_free(m->worker) == 0);
  CHECK(fs_free(m->server) == 0);
  CHECK(fs_free(m->scheduler) == 0);
  CHECK(fs_live(&nodes, &buffers, &goroutines) == 0);
  CHECK(nodes == 0 && buffers == 0);
}

static fs_tensor tensor(void *data, const int64_t *dims, uint64_t key) {
  fs_tensor t = {.data = data,
                 .bytes = (uint64_t)(dims[0] * dims[1]),
                 .key = key,
                 .base = data,
                 .base_bytes = (uint64_t)(dims[0] * dims[1]),
                 .dims = dims,
                 .ndim = 2,
                 .device = -1,
                 .dtype = 5};
  return t;
}

static int wait_ticket(fs_node node, fs_ticket ticket) {
  int rc;
  uint32_t flags = 0;
  int64_t end = fs_now() + 20 * SECOND;
  while ((rc = fs_wait(node, ticket, 100 * MS, flags)) == -EAGAIN &&
         fs_now() < end)
    flags = FS_NOSPIN;
  return rc;
}

static int next_batch(fs_node node, uint64_t *buf, size_t cap, size_t *need) {
  int rc;
  int64_t end = fs_now() + 20 * SECOND;
  while ((rc = fs_get_batch(node, 0, 0, buf, cap, need, 100 * MS, 0)) ==
             -EAGAIN &&
         fs_now() < end)
    ;
  return rc;
}

CASE(basics) {
  fs_error e;
  CHECK(fs_abi() == FS_ABI);
  int64_t before = fs_now();
  CHECK(before > 0 && fs_now() >= before);
  CHECK(fs_errmsg(&e) == -ENOENT);
}

/* No node is needed; a number of the past is refused. */
CASE(shared) {
  fs_shared a = 0, b = 0;
  uint64_t at_a = 0, at_b = 0;
  CHECK(fs_shared_alloc(5000, &a, &at_a) == 0);
  CHECK(fs_shared_alloc(1, &b, &at_b) == 0);
  CHECK(a != b && at_a != at_b && at_a % 4096 == 0);
  unsigned char *p = (unsigned char *)at_a;
  for (int i = 0; i < 5000; i++) {
    CHECK(p[i] == 0);
    p[i] = 7;
  }
  CHECK(fs_shared_free(a) == 0);
  CHECK(fs_shared_free(a) < 0);
  CHECK(fs_shared_free(b) == 0);
  CHECK(fs_shared_alloc(0, &a, &at_a) < 0);
}

/* What a GPU has is given back when nobody holds it; none is needed here. */
CASE(gpu) {
  fs_error e;
  CHECK(fs_gpu_release(3, 0) == -EINVAL);
  CHECK(fs_errmsg(&e) == 0 && strstr(e.text, "gpu 3 is not held"));
  CHECK(fs_gpu_hold(3) == 0 && fs_gpu_hold(3) == 0);
  CHECK(fs_gpu_release(3, SECOND) == 0 && fs_gpu_release(3, SECOND) == 0);
  CHECK(fs_gpu_release(3, 0) == -EINVAL);
  CHECK(fs_gpu_reclaim(3, 0, SECOND) == 0);
  CHECK(fs_gpu_free(3, 5, 0, 0) == -EINVAL);
  CHECK(fs_errmsg(&e) == 0 && strstr(e.text, "what is 5, want 0 to 4"));
}

CASE(settings) {
  const char *given[] = {"DMLC_NUM_WORKER=3", "DMLC_NUM_WORKERS=3"};
  size_t need = 0, again = 0;
  CHECK(fs_settings(given, COUNT(given), NULL, 0, &need) == -ENOBUFS);
  char *json = calloc(need + 1, 1);
  CHECK(json);
  CHECK(fs_settings(given, COUNT(given), json, need, &again) == 0);
  CHECK(again == need && strlen(json) == need);
  CHECK(json[0] == '{' && strstr(json, "\"DMLC_NUM_WORKER\""));
  CHECK(strstr(json, "DMLC_NUM_WORKERS")); /* the warning */
  free(json);
}

CASE(host) {
  const char *given[] = {"DMLC_ROLE=worker", "DMLC_PS_ROOT_PORT=7000"};
  size_t need = 0;
  char *json = calloc(1 << 20, 1);
  CHECK(json);
  CHECK(fs_host(given, COUNT(given), json, 16, &need) == -ENOBUFS);
  CHECK(need > 16 && need < 1 << 20);
  CHECK(fs_host(given, COUNT(given), json, 1 << 20, &need) == 0);
  CHECK(strlen(json) == need && strstr(json, "\"listen\":\"127.0.0.1\""));
  free(json);
}

CASE(probe) {
  char json[4096] = "";
  size_t need = 0;
  const char *none[] = {"DMLC_ROLE=worker"};
  FAILS(fs_probe(none, 1, 1000000000, json, sizeof json, &need), EINVAL,
        "DMLC_PS_ROOT_PORT");
  const char *closed[] = {"DMLC_ROLE=worker", "DMLC_PS_ROOT_PORT=1"};
  CHECK(fs_probe(closed, 2, 5000000000, json, sizeof json - 1, &need) == 0);
  CHECK(strstr(json, "\"spoke\":false") && strstr(json, "no process listens"));
}

CASE(wrong_setting) {
  const char *given[] = {"DMLC_ROLE=attention"};
  fs_node node = 0;
  FAILS(fs_open(given, COUNT(given), &node), EINVAL, "DMLC_ROLE");
  fs_error e;
  CHECK(fs_errmsg(&e) == -ENOENT); /* it was given once */
  CHECK(node == 0);
}

CASE(no_such_node) {
  fs_info info;
  fs_ticket ticket;
  uint64_t word = 0, token = 0;
  size_t need = 0, count = 0;
  int64_t stamps[8], dims[] = {1, 1};
  int32_t rank = 0;
  fs_pending pending;
  fs_mail mail;
  char byte;
  fs_tensor t = tensor(&byte, dims, 0);
  for (fs_node node = 0; node < 3; node++) {
    FAILS(fs_wait_ready(node, 0), EBADF, "handle");
    FAILS(fs_get_info(node, &info), EBADF, "handle");
    FAILS(fs_push_pull(node, 0, NULL, &t, 1, NULL, 0, &ticket), EBADF,
          "handle");
    FAILS(fs_push_pull_to(node, 0, NULL, &t, 1, NULL, 0, &ticket), EBADF,
          "handle");
    FAILS(fs_wait(node, 0, 0, 0), EBADF, "handle");
    FAILS(fs_get_batch(node, 0, 0, &word, 1, &need, 0, 0), EBADF, "handle");
    FAILS(fs_respond(node, NULL, &word, &count, 1, NULL, &ticket, &need), EBADF,
          "handle");
    FAILS(fs_fail(node, 0, "", 0), EBADF, "handle");
    FAILS(fs_waits_for(node, 0, &pending), EBADF, "handle");
    FAILS(fs_register_recv(node, &t, &rank, &word, 1), EBADF, "handle");
    FAILS(fs_channel_open(node, "a", &word), EBADF, "handle");
    FAILS(fs_channel_watch(node, 1, NULL), EBADF, "handle");
    FAILS(fs_channel_tell(node, 1, 0, "", 0), EBADF, "handle");
    FAILS(fs_channel_text(node, 1, 0, &byte, 1, &need, 0), EBADF, "handle");
    FAILS(fs_channel_state(node, 1, 0), EBADF, "handle");
    FAILS(fs_push_pull(node, 1, NULL, &t, 1, NULL, 0, &ticket), EBADF,
          "handle");
    FAILS(fs_get_batch(node, 1, 0, &word, 1, &need, 0, 0), EBADF, "handle");
    FAILS(fs_channel_close(node, 1, "", 0, 0), EBADF, "handle");
    FAILS(fs_barrier(node, FS_BARRIER_WORKERS, 0, &token, 0), EBADF, "handle");
    FAILS(fs_send(node, FS_TO_SERVERS, 0, 0, "", 0, &token, 0), EBADF,
          "handle");
    FAILS(fs_send_drop(node, 1), EBADF, "handle");
    FAILS(fs_receive(node, &mail, &byte, 1, &need, 0), EBADF, "handle");
    FAILS(fs_members(node, NULL, 0, &need), EBADF, "handle");
    FAILS(fs_trace(node, 0, stamps), EBADF, "handle");
    FAILS(fs_forget(node, 1), EBADF, "handle");
    FAILS(fs_watch_open(node, 0, &word), EBADF, "handle");
    FAILS(fs_watch_arm(node, 1), EBADF, "handle");
    FAILS(fs_watch_close(node, 1), EBADF, "handle");
    FAILS(fs_describe(node, &byte, 1, &need), EBADF, "handle");
    FAILS(fs_stop(node, 0), EBADF, "handle");
    FAILS(fs_close(node), EBADF, "handle");
    FAILS(fs_free(node), EBADF, "handle");
  }
  CHECK(fs_buffer_release(12345, 1) < 0);
}

/* Sleeps until an eventfd is written to. */
static void hear(int fd) {
  struct pollfd p = {fd, POLLIN, 0};
  uint64_t times = 0;
  CHECK(poll(&p, 1, 10000) == 1);
  CHECK(read(fd, &times, sizeof times) == sizeof times);
  CHECK(times >= 1);
}

CASE(watched) {
  struct mesh m = open_mesh();
  fs_watch at_worker, at_server;
  int worker = eventfd(0, EFD_NONBLOCK), server = eventfd(0, EFD_NONBLOCK);
  CHECK(worker >= 0 && server >= 0);
  CHECK(fs_watch_open(m.worker, worker, &at_worker) == 0);
  CHECK(fs_watch_open(m.server, server, &at_server) == 0);
  FAILS(fs_watch_open(m.server, 12345, &at_server), EBADF, "descriptor 12345");
  FAILS(fs_watch_arm(m.worker, 77), EINVAL, "watch 77");
  uint64_t buffer = 0;
  fs_info info;
  CHECK(fs_get_info(m.worker, &info) == 0);
  for (int i = 0; i < 20; i++) {
    char out[64] = "";
    const int64_t dims[] = {8, 8};
    fs_tensor push = tensor(out, dims, 1);
    fs_ticket asked = 0, answered = 0;
    uint64_t words[64];
    size_t need = 0, none = 0, count = 0;
    int rc;
    CHECK(fs_push_pull(m.worker, 0, NULL, &push, 1, NULL, 0, &asked) == 0);
    for (;;) {
      CHECK(fs_watch_arm(m.server, at_server) == 0);
      rc = fs_get_batch(m.server, 0, 0, words, COUNT(words), &need, 0, 0);
      if (rc != -EAGAIN)
        break;
      hear(server);
    }
    CHECK(rc == 0);
    buffer = words[7]; /* that of every round */
    CHECK(fs_respond(m.server, NULL, &words[1], &none, 1, NULL, &answered,
                     &count) == 0);
    for (;;) {
      CHECK(fs_watch_arm(m.worker, at_worker) == 0);
      if (info.words[asked & info.mask] != asked << 2)
        break;
      hear(worker);
    }
    CHECK(info.words[asked & info.mask] == (asked << 2 | 1));
    uint64_t drained;
    (void)!read(worker, &drained, sizeof drained);
    (void)!read(server, &drained, sizeof drained);
  }
  CHECK(fs_watch_close(m.worker, at_worker) == 0);
  CHECK(fs_watch_close(m.worker, at_worker) == 0); /* it does nothing */
  CHECK(fs_close(m.server) == 0);
  hear(server);
  FAILS(fs_watch_arm(m.server, at_server), ESHUTDOWN, "closed");
  CHECK(fs_buffer_release(buffer, 20) == 0);
  close(worker);
  close(server);
  free_mesh(&m);
}

CASE(no_scheduler) {
  fs_node node = open_node("worker", "9", "0.3"); /* port 9: nobody is there */
  int rc;
  int64_t start = fs_now();
  while ((rc = fs_wait_ready(node, 20 * MS)) == -EAGAIN)
    CHECK(fs_now() - start < 20 * SECOND);
  FAILS(rc, ETIMEDOUT, "127.0.0.1:9");
  CHECK(fs_free(node) == 0);
  FAILS(fs_free(node), EBADF, "handle");
}

CASE(round_trip) {
  struct mesh m = open_mesh();
  fs_info info;
  CHECK(fs_get_info(m.worker, &info) == 0);
  CHECK(info.role == FS_ROLE_WORKER && info.rank == 0 && info.group == 0);
  CHECK(info.workers == 1 && info.servers == 1 && info.device == -1);

  char out[2][64], back[32], answer[32];
  const int64_t out_dims[][2] = {{8, 8}, {0, 16}}, back_dims[] = {4, 8};
  memset(out, 'x', sizeof(out));
  memset(answer, 'y', sizeof(answer));
  memset(back, 0, sizeof(back));
  fs_tensor push[] = {tensor(out[0], out_dims[0], UINT64_MAX),
                      tensor(out[1], out_dims[1], 7)};
  fs_tensor pull = tensor(back, back_dims, 8);
  fs_ticket asked = 0;
  CHECK(fs_push_pull(m.worker, 0, NULL, push, 2, &pull, 1, &asked) == 0);
  CHECK(fs_wait(m.worker, asked, 5 * MS, 0) == -EAGAIN);
  CHECK(info.words[asked & info.mask] == asked << 2);

  uint64_t batch[64], *b = batch;
  size_t need = 0;
  CHECK(next_batch(m.server, batch, 3, &need) == -ENOBUFS);
  CHECK(need == 1 + 4 + 2 * (8 + 2) + 1);
  CHECK(next_batch(m.server, batch, need, &need) == 0);
  CHECK(*b++ == 1);
  uint64_t handler = *b++;
  CHECK(*b++ == 0 && *b++ == 2 && *b++ == 1); /* rank, pushes, pulls */
  uint64_t owed[2] = {0, 0};
  for (int i = 0; i < 2; i++) {
    CHECK(*b++ == push[i].key);
    b++; /* slot */
    owed[i] = *b++;
    const void *data = (const void *)(uintptr_t)*b++;
    CHECK(*b++ == push[i].bytes);
    CHECK(memcmp(data, push[i].data, push[i].bytes) == 0);
    CHECK(*b++ == push[i].dtype && (int64_t)*b++ == -1 && *b++ == 2);
    CHECK(b[0] == (uint64_t)push[i].dims[0]);
    CHECK(b[1] == (uint64_t)push[i].dims[1]);
    b += 2;
  }
  CHECK(*b++ == sizeof(back));

  /* An answer of another size is refused, and the request stays. */
  const int64_t wrong_dims[] = {4, 4};
  fs_tensor wrong = tensor(answer, wrong_dims, 0);
  fs_tensor right = tensor(answer, back_dims, 0);
  fs_ticket answered = 0;
  size_t count = 1, done = 9;
  FAILS(
      fs_respond(m.server, NULL, &handler, &count, 1, &wrong, &answered, &done),
      EMSGSIZE, "16");
  CHECK(done == 0);
  /* So is one of another type, unless it says that it may be any. */
  fs_error error;
  wrong = right;
  wrong.dtype = 6;
  CHECK(fs_respond(m.server, NULL, &handler, &count, 1, &wrong, &answered,
                   &done) == -EMSGSIZE);
  CHECK(fs_errmsg(&error) == 0 && error.got == 6 && error.want == right.dtype);
  right.dtype = FS_ANY;
  CHECK(fs_respond(m.server, NULL, &handler, &count, 1, &right, &answered,
                   &done) == 0);
  CHECK(done == 1);
  CHECK(fs_respond(m.server, NULL, &handler, &count, 1, &right, &answered,
                   &done) < 0);
  CHECK(done == 0);

  CHECK(wait_ticket(m.worker, asked) == 0);
  CHECK(info.words[asked & info.mask] == (asked << 2 | 1));
  CHECK(memcmp(back, answer, sizeof(back)) == 0);
  CHECK(wait_ticket(m.worker, asked) == 0); /* it may be asked again */
  FAILS(fs_wait(m.worker, asked + 1000, 0, 0), EBADF, "ticket");

  /* What each side stamped is in order: 0 1 6 7 the worker, 2 3 4 5 the
     server. One host, one clock. */
  int64_t s[8];
  CHECK(fs_trace(m.worker, asked, s) == 0);
  CHECK(0 < s[0] && s[0] <= s[1] && s[1] <= s[6] && s[6] <= s[7]);
  CHECK(s[0] <= s[2] && s[2] <= s[3] && s[3] <= s[4] && s[4] <= s[5]);
  CHECK(s[5] <= s[7] && s[7] <= fs_now());

  char json[1 << 16];
  CHECK(fs_describe(m.worker, json, sizeof(json), &need) == 0);
  CHECK(json[0] == '{' && json[need - 1] == '}');

  for (int i = 0; i < 2; i++)
    CHECK(owed[i] == 0 || fs_buffer_release(owed[i], 1) == 0);
  free_mesh(&m);
}

CASE(own_receive_buffer) {
  struct mesh m = open_mesh();
  char mine[128], out[64];
  const int64_t mine_dims[] = {2, 64}, dims[] = {1, 64};
  const int32_t ranks[] = {0, 0};
  const uint64_t keys[] = {1, 2};
  memset(mine, 0, sizeof(mine));
  memset(out, 'z', sizeof(out));
  fs_tensor whole = tensor(mine, mine_dims, 0);
  CHECK(fs_register_recv(m.server, &whole, ranks, keys, 2) == 0);
  FAILS(fs_register_recv(m.server, &whole, ranks, keys, 0), EMSGSIZE, "keys");

  fs_tensor push = tensor(out, dims, 2);
  fs_ticket ticket, answer;
  CHECK(fs_push_pull(m.worker, 0, NULL, &push, 1, NULL, 0, &ticket) == 0);
  uint64_t batch[32];
  size_t need, count = 0, done;
  CHECK(next_batch(m.server, batch, COUNT(batch), &need) == 0);
  CHECK(batch[7] == 0); /* nobody owes a release */
  CHECK(batch[8] == (uint64_t)(uintptr_t)(mine + 64));
  CHECK(memcmp(mine + 64, out, sizeof(out)) == 0 && mine[63] == 0);
  CHECK(fs_respond(m.server, NULL, &batch[1], &count, 1, NULL, &answer,
                   &done) == 0);
  CHECK(wait_ticket(m.worker, ticket) == 0);
  free_mesh(&m);
}

/* A push_pull with one server, which is in no batch. */
CASE(unicast) {
  struct mesh m = open_mesh();
  char out[64], back[64] = "", answer[64];
  const int64_t dims[] = {1, 64};
  fs_tensor push = tensor(out, dims, 1), pull = tensor(back, dims, 1),
            reply = tensor(answer, dims, 1);
  fs_ticket ticket, behind, other, answered;
  uint64_t batch[32];
  size_t need, count = 1, none = 0, done;
  memset(out, 'o', sizeof out);
  memset(answer, 'a', sizeof answer);
  FAILS(fs_push_pull_to(m.worker, 1, NULL, &push, 1, NULL, 0, &ticket),
        EMSGSIZE, "give 0 to 0");
  FAILS(fs_push_pull_to(m.server, 0, NULL, &push, 1, NULL, 0, &ticket), EINVAL,
        "only a worker");
  FAILS(
      fs_get_batch(m.server, 0, 1, batch, COUNT(batch), &need, 0, FS_UNICASTS),
      EINVAL, "least 1");
  FAILS(
      fs_get_batch(m.worker, 0, 0, batch, COUNT(batch), &need, 0, FS_UNICASTS),
      EINVAL, "only a server");
  CHECK(fs_get_batch(m.server, 0, 0, batch, COUNT(batch), &need, 0,
                     FS_UNICASTS) == -EAGAIN);

  uint64_t asked[2] = {0, 0};
  uint32_t losses = 7;
  CHECK(fs_losses(m.server, 0, &losses) == 0 && losses == 0);
  FAILS(fs_losses(m.server, 1, &losses), EMSGSIZE, "worker 1 is not one");
  FAILS(fs_losses(m.worker, 0, &losses), EINVAL, "only a server");
  FAILS(fs_pull_keys(m.worker, 0, asked, 2, &need), EINVAL, "only a server");
  pull.key = 77;
  CHECK(fs_push_pull_to(m.worker, 0, NULL, &push, 1, &pull, 1, &ticket) == 0);
  CHECK(fs_push_pull_to(m.worker, 0, NULL, &push, 1, NULL, 0, &behind) == 0);
  push.key = 2;
  CHECK(fs_push_pull_to(m.worker, 0, NULL, &push, 1, NULL, 0, &other) == 0);
  uint64_t handlers[3], keys[] = {1, 2, 1}, buffers[3];
  fs_ticket of[] = {ticket, other, behind};
  for (int i = 0; i < 3; i++) {
    int rc;
    while ((rc = fs_get_batch(m.server, 0, 0, batch, COUNT(batch), &need,
                              SECOND, FS_UNICASTS)) == -EAGAIN) {
    }
    CHECK(rc == 0 && batch[0] == 1 && batch[5] == keys[i]);
    CHECK(memcmp((void *)(uintptr_t)batch[8], out, sizeof out) == 0);
    handlers[i] = batch[1];
    CHECK(fs_pull_keys(m.server, batch[1], asked, 2, &need) == 0);
    CHECK(need == (i == 0) && asked[0] == 77 && asked[1] == 0);
    if (i == 0)
      CHECK(fs_pull_keys(m.server, batch[1], NULL, 0, &need) == -ENOBUFS &&
            need == 1);
    FAILS(fs_pull_keys(m.server, batch[1] + 1, asked, 2, &need), EMSGSIZE,
          "pull_keys handler");
    buffers[i] = batch[7];
    if (i == 0) /* the one behind it waits, the other passes */
      continue;
    if (i == 1)
      CHECK(fs_respond(m.server, NULL, &handlers[0], &count, 1, &reply,
                       &answered, &done) == 0);
    CHECK(fs_respond(m.server, NULL, &handlers[i], &none, 1, NULL, &answered,
                     &done) == 0);
  }
  for (int i = 0; i < 3; i++)
    CHECK(wait_ticket(m.worker, of[i]) == 0);
  CHECK(memcmp(back, answer, sizeof back) == 0);
  CHECK(fs_get_batch(m.server, 0, 0, batch, COUNT(batch), &need, 0, 0) ==
        -EAGAIN);
  /* Named twice: two releases are owed, and no third. */
  CHECK(buffers[0] == buffers[2]);
  for (uint64_t times = 0; times <= 3; times += 3)
    CHECK(fs_buffer_release(buffers[0], times) < 0);
  for (int i = 0; i < 2; i++)
    CHECK(fs_buffer_release(buffers[i], 2 - i) == 0);
  free_mesh(&m);
}

/* A server refuses a request, and what it has no type for. */
CASE(refusals) {
  const uint8_t sizes[] = {0, 0, 0, 0, 0, 1};
  CHECK(fs_dtypes(sizes, sizeof sizes) == 0);
  struct mesh m = open_mesh();
  char out[64] = "";
  const int64_t dims[] = {1, 64};
  fs_tensor good = tensor(out, dims, 1), odd = tensor(out, dims, 2);
  fs_ticket first, again, behind, refused;
  fs_pending p;
  odd.dtype = 4;
  CHECK(fs_push_pull(m.worker, 0, NULL, &odd, 1, NULL, 0, &refused) == 0);
  FAILS(wait_ticket(m.worker, refused), EMSGSIZE, "key 2, has dtype 4");
  odd.dtype = 5;
  odd.bytes = 63;
  CHECK(fs_push_pull(m.worker, 0, NULL, &odd, 1, NULL, 0, &refused) == 0);
  FAILS(wait_ticket(m.worker, refused), EMSGSIZE, "has 63 bytes");
  FAILS(fs_waits_for(m.worker, refused, &p), EBADF,
        "has ended, or was never issued");

  CHECK(fs_push_pull(m.worker, 0, NULL, &good, 1, NULL, 0, &first) == 0);
  uint64_t batch[32];
  size_t need;
  CHECK(next_batch(m.server, batch, COUNT(batch), &need) == 0);
  CHECK(batch[0] == 1 && batch[5] == 1); /* one request, key 1 */
  CHECK(fs_push_pull(m.worker, 0, NULL, &good, 1, NULL, 0, &again) == 0);
  CHECK(fs_push_pull(m.worker, 0, NULL, NULL, 0, &odd, 1, &behind) == 0);
  CHECK(fs_waits_for(m.worker, first, &p) == 0);
  CHECK(p.sent == 1 && p.server == 0 && p.key == 1 && p.behind == 0);
  CHECK(fs_waits_for(m.worker, again, &p) == 0);
  CHECK(p.sent == 0 && p.server == 0 && p.key == 1 && p.behind == first);
  CHECK(fs_waits_for(m.worker, behind, &p) == 0);
  CHECK(p.sent == 0 && p.server == 0 && p.key == 2 && p.behind == again);
  FAILS(fs_waits_for(m.server, first, &p), EINVAL, "server");

  fs_error e;
  FAILS(fs_fail(m.worker, batch[1], "no", 2), EINVAL, "only a server");
  FAILS(fs_fail(m.server, batch[1] + 1, "no", 2), EMSGSIZE, "fail handler");
  CHECK(fs_fail(m.server, batch[1], "no room", 7) == 0);
  CHECK(wait_ticket(m.worker, first) == -EREMOTEIO);
  CHECK(fs_errmsg(&e) == 0 && e.code == -EREMOTEIO);
  CHECK(e.role == FS_ROLE_SERVER && e.rank == 0);
  CHECK(strcmp(e.reason, "no room") == 0 && strstr(e.text, "no room"));
  CHECK(fs_buffer_release(batch[7], 1) == 0);
  free_mesh(&m);
  CHECK(fs_dtypes(NULL, 0) == 0);
}

CASE(wrong_role) {
  struct mesh m = open_mesh();
  char byte = 0;
  const int64_t dims[] = {1, 1};
  fs_tensor t = tensor(&byte, dims, 0);
  fs_ticket ticket;
  uint64_t word = 0;
  size_t need;
  FAILS(fs_push_pull(m.server, 0, NULL, &t, 1, NULL, 0, &ticket), EINVAL,
        "worker");
  FAILS(fs_push_pull(m.worker, 1, &word, &t, 1, NULL, 0, &ticket), EINVAL,
        "stream is not NULL");
  FAILS(fs_get_batch(m.worker, 0, 0, &word, 1, &need, 0, 0), EINVAL, "server");
  t.device = 0;
  FAILS(fs_push_pull(m.worker, 0, NULL, &t, 1, NULL, 0, &ticket), EINVAL,
        "CPU");
  /* The flags are those of the wire. */
  word = 0;
  FAILS(
      fs_barrier(m.worker, FS_BARRIER_SERVERS | FS_BARRIER_GROUPS, 0, &word, 0),
      EINVAL, "barrier of servers by groups");
  FAILS(fs_barrier(m.server, FS_BARRIER_WORKERS, 0, &word, 0), EINVAL,
        "barrier of workers called by a server");
  FAILS(fs_barrier(m.worker, FS_BARRIER_GROUPS, 0, &word, 0), EINVAL,
        "neither servers nor workers");
  FAILS(fs_barrier(m.worker, 0x101, 0, &word, 0), EINVAL, "0x101");
  free_mesh(&m);
}

struct call {
  fs_node node;
  int rc;
  fs_error error;
};

static void *blocked_get_batch(void *arg) {
  struct call *c = arg;
  uint64_t buf[8];
  size_t need;
  c->rc = fs_get_batch(c->node, 0, 0, buf, COUNT(buf), &need, 60 * SECOND, 0);
  fs_errmsg(&c->error);
  return NULL;
}

static void *stop(void *arg) {
  struct call *c = arg;
  while ((c->rc = fs_stop(c->node, 100 * MS)) == -EAGAIN)
    ;
  return NULL;
}

static void *barrier(void *arg) {
  struct call *c = arg;
  uint64_t token = 0;
  while ((c->rc = fs_barrier(c->node, FS_BARRIER_SERVERS | FS_BARRIER_WORKERS,
                             20 * SECOND, &token, 100 * MS)) == -EAGAIN)
    ;
  return NULL;
}

CASE(close_ends_a_blocked_call) {
  struct mesh m = open_mesh();
  struct call c = {.node = m.server, .rc = 1};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, blocked_get_batch, &c) == 0);
  CHECK(fs_close(m.server) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(c.rc == -ESHUTDOWN && c.error.code == -ESHUTDOWN);
  CHECK(fs_close(m.server) == 0);
  free_mesh(&m);
}

static void *trace_until_gone(void *arg) {
  struct call *c = arg;
  int64_t stamps[8];
  do
    c->rc = fs_trace(c->node, 1, stamps);
  while (c->rc != -EBADF);
  return NULL;
}

CASE(free_beside_calls) {
  struct mesh m = open_mesh();
  struct call c = {.node = m.server, .rc = 1};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, trace_until_gone, &c) == 0);
  free_mesh(&m);
  CHECK(pthread_join(thread, NULL) == 0);
}

/* A pointer into the first page makes the engine panic where it is used: here while it
 * holds what only one thread may hold. The process goes on, the node is closed, and
 * whoever waits or calls gets the error. */
CASE(panic_closes_the_node) {
  struct mesh m = open_mesh();
  struct call c = {.node = m.server, .rc = 1};
  pthread_t thread;
  fs_channel channel;
  fs_error e;
  fs_info info;
  uint64_t word = 0;
  size_t need;
  CHECK(fs_channel_open(m.server, "c", &channel) == 0);
  uint32_t *volatile nowhere = (uint32_t *)8; /* the compiler would know it */
  CHECK(fs_channel_watch(m.server, channel, nowhere) == 0);
  CHECK(pthread_create(&thread, NULL, blocked_get_batch, &c) == 0);
  int64_t start = fs_now();
  FAILS(fs_channel_close(m.server, channel, NULL, 0, SECOND), EIO,
        "at channel.(*Channel)");
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(c.rc == -EIO && strstr(c.error.text, "engine: panic: "));
  FAILS(fs_get_batch(m.server, 0, 0, &word, 1, &need, SECOND, 0), EIO,
        "engine: panic: ");
  CHECK(fs_close(m.server) == 0);
  CHECK(fs_now() - start < 5 * SECOND);

  FAILS(fs_get_info(m.worker, NULL), EIO, "engine: panic: "); /* without it */
  FAILS(fs_barrier(m.worker, FS_BARRIER_WORKERS, SECOND, &word, 0), EIO,
        "engine: panic: ");
  CHECK(fs_get_info(m.scheduler, &info) == 0);

  CHECK(fs_close(1234) == -EBADF);
  CHECK(fs_errmsg(NULL) == -EIO);
  CHECK(fs_errmsg(&e) == 0 && strstr(e.text, "engine: panic: "));
  free_mesh(&m);
}

CASE(lost_peer) {
  struct mesh m = open_mesh();
  struct call c = {.node = m.server, .rc = 1};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, blocked_get_batch, &c) == 0);
  int64_t start = fs_now();
  CHECK(fs_close(m.worker) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(fs_now() - start < 5 * SECOND);
  CHECK(c.rc == -ECONNRESET && c.error.code == -ECONNRESET);
  CHECK(c.error.role == FS_ROLE_WORKER && c.error.rank == 0);
  CHECK(c.error.address[0] && c.error.reason[0]);
  free_mesh(&m);
}

CASE(barrier_and_stop) {
  struct mesh m = open_mesh();
  struct call calls[] = {
      {.node = m.worker}, {.node = m.server}, {.node = m.scheduler}};
  pthread_t threads[COUNT(calls)];
  for (int i = 0; i < 2; i++)
    CHECK(pthread_create(&threads[i], NULL, barrier, &calls[i]) == 0);
  for (int i = 0; i < 2; i++) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(calls[i].rc == 0);
  }
  for (size_t i = 0; i < COUNT(calls); i++)
    CHECK(pthread_create(&threads[i], NULL, stop, &calls[i]) == 0);
  for (size_t i = 0; i < COUNT(calls); i++) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(calls[i].rc == 0);
    CHECK(fs_stop(calls[i].node, 0) == 0);
  }
  fs_ticket ticket;
  char byte = 0;
  const int64_t dims[] = {1, 1};
  fs_tensor t = tensor(&byte, dims, 0);
  FAILS(fs_push_pull(m.worker, 0, NULL, &t, 1, NULL, 0, &ticket), ESHUTDOWN,
        "");
  free_mesh(&m);
}

static void *wrong_handle(void *arg) {
  (void)arg;
  fs_error e;
  CHECK(fs_errmsg(&e) == -ENOENT);
  CHECK(fs_close(1234) == -EBADF);
  CHECK(fs_errmsg(&e) == 0 && strstr(e.text, "1234"));
  return NULL;
}

CASE(errors_belong_to_their_thread) {
  pthread_t thread;
  fs_error e;
  CHECK(fs_close(5678) == -EBADF);
  CHECK(pthread_create(&thread, NULL, wrong_handle, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(fs_errmsg(&e) == 0 && strstr(e.text, "5678"));
}

int main(int argc, char **argv) {
  for (struct test *t = tests; t && argc == 2; t = t->next) {
    if (strcmp(t->name, argv[1]) == 0) {
      t->run();
      return 0;
    }
  }
  fprintf(stderr, "usage: abi_test CASE\n");
  return 2;
}
