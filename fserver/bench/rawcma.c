/*
 * rawcma: what two processes of one host can do at best with one copy each way
 * and a flag in shared memory. raw.h says how it is driven.
 *
 *   cc -O2 -Wall -Wextra -o rawcma rawcma.c
 *   ./rawcma CLIENT_CORE SERVER_CORE cma|shm
 *
 * cma: process_vm_writev from private memory straight into private memory of
 * the peer. shm: a copy from private memory into memory that both map, where
 * the peer reads it in place. In both ways a flag then tells the peer, which
 * spins on it. Messages of one size are an echo: what came goes back.
 */
#define _GNU_SOURCE
#define NAME "rawcma"
#include "raw.h"
#include <sys/mman.h>
#include <sys/uio.h>

#define ALIGN 4096

/* Mapped by both. Each flag counts the messages that its side may read, and has
 * a cache line of its own. */
struct shared {
  _Alignas(LINE) _Atomic uint64_t request;
  _Alignas(LINE) _Atomic uint64_t reply;
};

/* One end. `ours` is private memory that is sent from; `in` is where the peer's
 * message is read, and `peer` where ours goes. */
struct side {
  int control; /* a socket to the other end, blocked on between rounds */
  int memory;  /* of way shm */
  int cma;
  pid_t peer_pid;
  struct shared *shared;
  struct buffer ours, theirs;
  char *map;
  size_t mapped;
  char *in, *peer;
};

/* Moves size bytes to the peer. */
static void copy(struct side *s, char *data, size_t size) {
  if (!s->cma) {
    memcpy(s->peer, data, size);
    return;
  }
  for (size_t done = 0; done < size;) {
    struct iovec from = {data + done, size - done};
    struct iovec to = {s->peer + done, size - done};
    ssize_t n = process_vm_writev(s->peer_pid, &from, 1, &to, 1, 0);
    if (n <= 0)
      die("process_vm_writev of %zu bytes: %s", size - done, strerror(errno));
    done += (size_t)n;
  }
}

static size_t aligned(size_t size) {
  return (size + ALIGN - 1) / ALIGN * ALIGN;
}

/* Gets memory for messages of `send` and `receive` bytes, and tells the peer
 * where. `place` is that of our message in memory that both map. */
static void prepare(struct side *s, size_t send, size_t receive, size_t place,
                    size_t expected) {
  reserve(&s->ours, send);
  if (s->cma) {
    reserve(&s->theirs, receive);
    s->in = s->theirs.data;
    tell(s->control, &s->in, sizeof s->in);
    if (!hear(s->control, &s->peer, sizeof s->peer))
      die("the peer is gone");
    return;
  }
  size_t size = aligned(send) + aligned(receive);
  char ready = 0;
  if (size > s->mapped) {
    if (s->map != NULL)
      munmap(s->map, s->mapped);
    if (ftruncate(s->memory, (off_t)size) != 0)
      die("share %zu bytes: %s", size, strerror(errno));
    s->map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                  s->memory, 0);
    if (s->map == MAP_FAILED)
      die("map %zu bytes: %s", size, strerror(errno));
    s->mapped = size;
  }
  s->peer = s->map + place;
  s->in = s->map + expected;
  tell(s->control, &ready, 1);
  if (!hear(s->control, &ready, 1))
    die("the peer is gone");
}

static void serve(struct side *s) {
  struct round r;
  uint64_t at = 0; /* messages so far */
  while (hear(s->control, &r, sizeof r)) {
    prepare(s, r.back, r.out, aligned(r.out), 0);
    for (uint64_t i = 0; i < r.iters; i++) {
      spin(&s->shared->request, ++at);
      check(s->in, r.out, i);
      if (r.back == r.out) {
        copy(s, s->in, r.back);
      } else {
        stamp(s->ours.data, r.back, i);
        copy(s, s->ours.data, r.back);
      }
      atomic_store_explicit(&s->shared->reply, at, memory_order_release);
    }
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
    prepare(s, r.out, r.back, 0, aligned(r.out));
    for (uint64_t i = 0; i < r.iters; i++) {
      stamp(s->ours.data, r.out, i);
      uint64_t start = now();
      copy(s, s->ours.data, r.out);
      atomic_store_explicit(&s->shared->request, ++at, memory_order_release);
      spin(&s->shared->reply, at);
      uint64_t end = now();
      check(s->in, r.back, i);
      if (i >= warmup)
        ns[i - warmup] = end - start;
    }
    answer(ns, n);
  }
}

int main(int argc, char **argv) {
  int ends[2];
  struct side s = {0};
  if (argc != 4 || (strcmp(argv[3], "cma") != 0 && strcmp(argv[3], "shm") != 0))
    die("want CLIENT_CORE SERVER_CORE cma|shm");
  int client_core = atoi(argv[1]), server_core = atoi(argv[2]);
  yielding = client_core >= 0 && client_core == server_core;
  s.cma = strcmp(argv[3], "cma") == 0;

  s.shared = mmap(NULL, sizeof *s.shared, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  s.memory = memfd_create("rawcma", MFD_CLOEXEC);
  if (s.shared == MAP_FAILED || s.memory < 0 ||
      socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
    die("share memory: %s", strerror(errno));
  /* Yama lets a child be written to by its parent, and others on demand. */
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
  signal(SIGCHLD, on_child);
  pid_t client = getpid(), child = split();
  if (child == 0) {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    close(ends[0]);
    s.control = ends[1];
    s.peer_pid = client;
    pin(server_core);
    serve(&s);
    return 0;
  }
  close(ends[1]);
  s.control = ends[0];
  s.peer_pid = child;
  pin(client_core);
  play(&s);
  return 0;
}
