// fserver.h in C, as far as include/fserver and include/ps call it: one worker and one server of one process, which
// pass requests through a list, unicasts too. For ThreadSanitizer, which does not see how the engine's Go
// synchronises.
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fserver.h"

#define MASK 4095u
#define BUFFER 4096u
#define KEYS 64u
#define MOST 4u /* tensors of a request each way */

enum { FREE, QUEUED, TAKEN };

struct request {
  int state;
  fs_ticket ticket;
  size_t np, nq;
  fs_tensor push[MOST], pull[MOST];
  int64_t dims[MOST][8];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static volatile uint64_t words[MASK + 1];
static struct request requests[MASK + 1]; // by ticket
static fs_ticket last, taken;
static char closed[MASK + 1], worker[MASK + 1]; // by node
static char left; // the last worker is closed, so no unicasts come any more
static struct watch {
  int fd;
  char open, armed;
} watches[MASK + 1]; // by number
static fs_watch watching;
static char buffers[KEYS][BUFFER];
static uint64_t owed; // releases of buffers
static fs_node nodes;

static __thread int code;

static int fail(int rc) {
  code = rc;
  return rc;
}

int fs_abi(void) { return FS_ABI; }
int fs_dtypes(const uint8_t *bytes, size_t n) {
  (void)bytes, (void)n;
  return 0;
}

int fs_errmsg(fs_error *out) {
  if (!code)
    return -ENOENT;
  memset(out, 0, sizeof *out);
  out->code = code;
  out->role = out->rank = -1;
  out->got = out->want = FS_ANY;
  strcpy(out->text, "stub: an error");
  code = 0;
  return 0;
}

int fs_open(const char *const *settings, size_t n, fs_node *out) {
  pthread_mutex_lock(&mutex);
  *out = ++nodes;
  for (size_t i = 0; i < n; i++) {
    if (strcmp(settings[i], "DMLC_ROLE=worker") == 0)
      worker[*out & MASK] = 1, left = 0;
  }
  pthread_mutex_unlock(&mutex);
  return 0;
}

int fs_wait_ready(fs_node node, int64_t slice_ns) {
  (void)node, (void)slice_ns;
  return 0;
}

int fs_get_info(fs_node node, fs_info *out) {
  (void)node;
  memset(out, 0, sizeof *out);
  out->workers = out->servers = 1;
  out->device = -1;
  out->words = words;
  out->mask = MASK;
  strcpy(out->address, "127.0.0.1:1");
  return 0;
}

// Says that there is one. The mutex is held.
static void changes(void) {
  const uint64_t one = 1;
  pthread_cond_broadcast(&changed);
  for (fs_watch i = 1; i <= watching; i++) {
    struct watch *w = &watches[i & MASK];
    if (w->open && w->armed && write(w->fd, &one, sizeof one) == sizeof one)
      w->armed = 0;
  }
}

// Waits for a change. 0: look again; -EAGAIN: the slice is over. The mutex is held.
static int change(const struct timespec *until) {
  return pthread_cond_timedwait(&changed, &mutex, until) ? -EAGAIN : 0;
}

static struct timespec after(int64_t ns) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  ns += t.tv_nsec;
  t.tv_sec += ns / 1000000000;
  t.tv_nsec = ns % 1000000000;
  return t;
}

int fs_push_pull(fs_node node, fs_channel channel, const uint64_t *stream,
                 const fs_tensor *push, size_t np, const fs_tensor *pull,
                 size_t nq, fs_ticket *out) {
  (void)node, (void)channel, (void)stream;
  if (np > MOST || nq > MOST)
    return fail(-EMSGSIZE);
  pthread_mutex_lock(&mutex);
  struct request *r = &requests[++last & MASK];
  if (r->state != FREE) {
    last--;
    pthread_mutex_unlock(&mutex);
    return fail(-EXFULL);
  }
  r->state = QUEUED;
  *out = r->ticket = last;
  r->np = np;
  r->nq = nq;
  for (size_t i = 0; i < np; i++) {
    r->push[i] = push[i];
    memcpy(r->dims[i], push[i].dims, push[i].ndim * sizeof(int64_t));
  }
  if (nq)
    memcpy(r->pull, pull, nq * sizeof *pull);
  __atomic_store_n(&words[last & MASK], last << 2, __ATOMIC_RELEASE);
  changes();
  pthread_mutex_unlock(&mutex);
  return 0;
}

int fs_push_pull_to(fs_node node, int32_t server, const uint64_t *stream,
                    const fs_tensor *push, size_t np, const fs_tensor *pull,
                    size_t nq, fs_ticket *out) {
  (void)server;
  return fs_push_pull(node, 0, stream, push, np, pull, nq, out);
}

int fs_wait(fs_node node, fs_ticket ticket, int64_t slice_ns, uint32_t flags) {
  (void)flags;
  const struct timespec until = after(slice_ns);
  int rc = 0;
  pthread_mutex_lock(&mutex);
  while (rc == 0 && words[ticket & MASK] == ticket << 2)
    rc = closed[node & MASK] ? fail(-ESHUTDOWN) : change(&until);
  pthread_mutex_unlock(&mutex);
  return rc;
}

int fs_waits_for(fs_node node, fs_ticket ticket, fs_pending *out) {
  (void)node, (void)ticket;
  memset(out, 0, sizeof *out);
  out->sent = 1;
  return 0;
}

// Writes a request as fs_get_batch does. Odd keys are lent; others are in the key's buffer, each
// time in another slot.
static size_t write_request(struct request *r, uint64_t *w) {
  const uint64_t *begin = w;
  owed += r->np;
  *w++ = 1;
  *w++ = r->ticket;
  *w++ = 0;
  *w++ = r->np;
  *w++ = r->nq;
  for (size_t i = 0; i < r->np; i++) {
    const fs_tensor *t = &r->push[i];
    const int lent = t->key % 2 == 1;
    char *to = lent ? malloc(t->bytes) : buffers[t->key % KEYS];
    memcpy(to, t->data, t->bytes);
    *w++ = t->key;
    *w++ = lent ? FS_LENT : r->ticket & MASK;
    *w++ = lent ? (uint64_t)(uintptr_t)to : t->key % KEYS + 1;
    *w++ = (uint64_t)(uintptr_t)to;
    *w++ = t->bytes;
    *w++ = t->dtype;
    *w++ = (uint64_t)(int64_t)t->device;
    *w++ = t->ndim;
    memcpy(w, r->dims[i], t->ndim * sizeof *w);
    w += t->ndim;
  }
  for (size_t i = 0; i < r->nq; i++)
    *w++ = r->pull[i].bytes;
  return (size_t)(w - begin);
}

int fs_get_batch(fs_node node, fs_channel channel, uint32_t least,
                 uint64_t *buf, size_t cap, size_t *need, int64_t slice_ns,
                 uint32_t flags) {
  (void)channel, (void)least;
  if (cap < 512) {
    *need = 512;
    return -ENOBUFS;
  }
  const struct timespec until = after(slice_ns);
  int rc = 0;
  pthread_mutex_lock(&mutex);
  while (rc == 0 && taken == last) {
    const int over = closed[node & MASK] || (flags & FS_UNICASTS && left);
    rc = over ? fail(-ESHUTDOWN) : change(&until);
  }
  if (rc == 0) {
    struct request *r = &requests[++taken & MASK];
    r->state = TAKEN;
    *need = write_request(r, buf);
  }
  pthread_mutex_unlock(&mutex);
  return rc;
}

// A release that is not owed ends the program.
int fs_buffer_release(uint64_t buffer, uint64_t times) {
  pthread_mutex_lock(&mutex);
  if (times == 0 || times > owed)
    abort();
  owed -= times;
  pthread_mutex_unlock(&mutex);
  if (buffer > KEYS)
    free((void *)(uintptr_t)buffer);
  return 0;
}

int fs_respond(fs_node node, const uint64_t *stream, const uint64_t *handlers,
               const size_t *counts, size_t nh, const fs_tensor *t,
               fs_ticket *tickets, size_t *answered) {
  (void)node, (void)stream;
  pthread_mutex_lock(&mutex);
  for (*answered = 0; *answered < nh; (*answered)++) {
    struct request *r = &requests[handlers[*answered] & MASK];
    if (r->state != TAKEN || counts[*answered] != r->nq)
      break;
    for (size_t i = 0; i < r->nq; i++)
      memcpy(r->pull[i].data, t++->data, r->pull[i].bytes);
    r->state = FREE;
    tickets[*answered] = r->ticket;
    __atomic_store_n(&words[r->ticket & MASK], r->ticket << 2 | 1,
                     __ATOMIC_RELEASE);
  }
  changes();
  pthread_mutex_unlock(&mutex);
  return *answered == nh ? 0 : fail(-EMSGSIZE);
}

int fs_close(fs_node node) {
  pthread_mutex_lock(&mutex);
  left |= worker[node & MASK] && !closed[node & MASK];
  closed[node & MASK] = 1;
  changes();
  pthread_mutex_unlock(&mutex);
  return 0;
}

int fs_stop(fs_node node, int64_t slice_ns) {
  (void)slice_ns;
  return fs_close(node);
}

int fs_free(fs_node node) { return fs_close(node); }

int fs_losses(fs_node node, int32_t rank, uint32_t *losses) {
  (void)node, (void)rank;
  *losses = 0;
  return 0;
}

int fs_watch_open(fs_node node, int fd, fs_watch *out) {
  (void)node;
  pthread_mutex_lock(&mutex);
  *out = ++watching;
  watches[*out & MASK] = (struct watch){.fd = fd, .open = 1};
  pthread_mutex_unlock(&mutex);
  return 0;
}
int fs_watch_arm(fs_node node, fs_watch watch) {
  pthread_mutex_lock(&mutex);
  watches[watch & MASK].armed = 1;
  const int rc = closed[node & MASK] ? fail(-ESHUTDOWN) : 0;
  pthread_mutex_unlock(&mutex);
  return rc;
}
int fs_watch_close(fs_node node, fs_watch watch) {
  (void)node;
  pthread_mutex_lock(&mutex);
  watches[watch & MASK].open = 0;
  pthread_mutex_unlock(&mutex);
  return 0;
}

int fs_forget(fs_node node, uint64_t alloc) {
  (void)node, (void)alloc;
  return 0;
}

int fs_shared_alloc(uint64_t bytes, fs_shared *out, uint64_t *address) {
  *address = *out = (uint64_t)(uintptr_t)calloc(bytes, 1);
  return 0;
}

int fs_shared_free(fs_shared shared) {
  free((void *)(uintptr_t)shared);
  return 0;
}

int fs_fail(fs_node node, uint64_t handler, const char *text, size_t bytes) {
  (void)node, (void)handler, (void)text, (void)bytes;
  return 0;
}

int fs_register_recv(fs_node node, const fs_tensor *t, const int32_t *ranks,
                     const uint64_t *keys, size_t n) {
  (void)node, (void)t, (void)ranks, (void)keys, (void)n;
  return 0;
}

int fs_barrier(fs_node node, uint32_t flags, int64_t timeout_ns,
               uint64_t *token, int64_t slice_ns) {
  (void)node, (void)flags, (void)timeout_ns, (void)token, (void)slice_ns;
  return 0;
}

int fs_trace(fs_node node, fs_ticket ticket, int64_t stamps[8]) {
  (void)node, (void)ticket, (void)stamps;
  return 0;
}

int fs_describe(fs_node node, char *buf, size_t cap, size_t *need) {
  (void)node, (void)cap;
  memcpy(buf, "{}", *need = 2);
  return 0;
}

int fs_send(fs_node node, uint32_t to, int32_t rank, uint64_t run,
            const void *data, size_t bytes, uint64_t *token, int64_t slice_ns) {
  (void)node, (void)to, (void)rank, (void)run, (void)data, (void)bytes;
  (void)token, (void)slice_ns;
  return 0;
}

int fs_send_drop(fs_node node, uint64_t token) {
  (void)node, (void)token;
  return 0;
}

int fs_receive(fs_node node, fs_mail *from, void *buf, size_t cap, size_t *need,
               int64_t slice_ns) {
  (void)from, (void)buf, (void)cap, (void)need;
  const struct timespec until = after(slice_ns);
  int rc = 0;
  pthread_mutex_lock(&mutex);
  while (!closed[node & MASK] && rc == 0)
    rc = change(&until); // no message ever comes
  pthread_mutex_unlock(&mutex);
  return rc ? rc : fail(-ESHUTDOWN);
}

int fs_members(fs_node node, fs_member *out, size_t cap, size_t *need) {
  (void)node, (void)out, (void)cap;
  *need = 0;
  return 0;
}
