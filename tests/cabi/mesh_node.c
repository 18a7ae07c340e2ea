/*
 * A member of the cluster: it opens a node, makes exchanges until the end, and
 * compares every byte. What nobody expects ends the process with status 1 and
 * the text of the error.
 */
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mesh.h"

enum {
  MOST_OPEN = 4096,
  GUARD = 64,
  GUARD_BYTE = 0xA5,
  RECENT = 64,
  ANSWERS = 64
};
/* The lengths of a batch: see fs_get_batch. */
enum { WORDS = 1 + WORKERS * (4 + MAX_TENSORS * (8 + 1 + 1)) };

/* Memory of one allocation, which the engine may keep registered. */
struct memory {
  unsigned char *base;
  uint64_t bytes, alloc;
};

/* A push_pull, or the answers to a batch, and the memory of their tensors. */
struct slot {
  fs_ticket tickets[WORKERS];
  int ntickets;
  struct memory memory;
  uint64_t begin, end; /* what the slot has of it */
  uint64_t at;         /* where the next tensor goes */
};

struct member {
  const struct options *o;
  struct board *board;
  struct row *row;
  int member, run;
  fs_node node;
  fs_info info;
  struct slot *slots;
  int64_t nslots;
};

static struct member self;

void die(const char *format, ...) {
  fs_error e = {0};
  char text[300];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  const bool more = fs_errmsg(&e) == 0;
  fprintf(stderr, "mesh: %s, run %d: %s%s%s\n", name_of(self.member), self.run,
          text, more ? ": " : "", e.text);
  _exit(more && e.code == -ESHUTDOWN ? TAKEN_FOR_LOST : 1);
}

void check(int rc, const char *what) {
  if (rc != 0)
    die("%s gives %d", what, rc);
}

void lose(int rc, const char *what) {
  fs_error e;
  if (rc != -ECONNRESET)
    check(rc, what);
  check(fs_errmsg(&e), "fs_errmsg");
  const int gone = (e.role == FS_ROLE_WORKER || e.role == FS_ROLE_SERVER) &&
                           e.rank >= 0 && e.rank < WORKERS && e.reason[0]
                       ? member_of(e.role, e.rank)
                       : 0;
  if (gone == 0 || gone == self.member)
    die("%s: the error does not name a lost member: %s", what, e.text);
  if (self.row->losses == 0)
    snprintf(self.row->why, sizeof(self.row->why), "%.199s", e.text);
  self.row->losses++;
  self.row->lost[gone]++;
}

static bool quits(void) { return self.board->quit; }

/* Memory */

/* Forgets the tensors of a slot and makes room for n bytes of new ones. Slots with
 * small tensors share an allocation. None is freed before the end. */
static void make_room(struct slot *s, uint64_t n) {
  static struct memory chunk;
  static uint64_t taken, allocations;
  if (s->end - s->begin < n) {
    const bool small = n <= 4096;
    struct memory m = chunk;
    if (!small || m.bytes - taken < n) {
      m = (struct memory){NULL, small ? 1 << 20 : n, ++allocations};
      if (posix_memalign((void **)&m.base, 4096, m.bytes) != 0)
        die("no memory for %llu bytes", (unsigned long long)m.bytes);
    }
    if (small) {
      taken = m.alloc == chunk.alloc ? taken : 0;
      chunk = m;
    }
    s->memory = m;
    s->begin = small ? taken : 0;
    s->end = s->begin + n;
    taken += small ? n : 0;
  }
  s->at = s->begin + GUARD;
  memset(s->memory.base + s->begin, GUARD_BYTE, GUARD);
}

/* A tensor takes this much room, with the guard behind it. */
static uint64_t room_of(uint64_t bytes) {
  return ((bytes + 7) & ~UINT64_C(7)) + GUARD;
}

/* The next tensor in a slot. */
static fs_tensor carve(struct slot *s, uint64_t bytes, uint64_t key,
                       const int64_t *dims) {
  unsigned char *data = s->memory.base + s->at;
  s->at += room_of(bytes);
  memset(data + bytes, GUARD_BYTE, room_of(bytes) - bytes);
  return (fs_tensor){.data = data,
                     .bytes = bytes,
                     .key = key,
                     .base = s->memory.base,
                     .base_bytes = s->memory.bytes,
                     .alloc = s->memory.alloc,
                     .dims = dims,
                     .ndim = 1,
                     .device = -1};
}

/* The number of bytes that somebody has written behind a tensor. */
static int64_t count_overrun(const fs_tensor *t) {
  const unsigned char *p = t->data;
  int64_t wrong = 0;
  for (uint64_t i = t->bytes; i < room_of(t->bytes); i++)
    wrong += p[i] != GUARD_BYTE;
  return wrong;
}

/* Waits for a ticket. */
static int wait_ticket(fs_ticket ticket) {
  int rc;
  uint32_t flags = 0;
  while ((rc = fs_wait(self.node, ticket, 100 * MS, flags)) == -EAGAIN)
    flags = FS_NOSPIN;
  return rc;
}

/* Waits until no peer writes to the memory of a slot any more. */
static void make_quiet(const struct slot *s) {
  for (int i = 0; i < s->ntickets; i++) {
    const fs_ticket t = s->tickets[i];
    while (self.info.words[t & self.info.mask] == (t << 2 | 3))
      nap(MS);
  }
}

static void say_wrong(int64_t wrong, const char *what, const struct head *h) {
  self.row->wrong += wrong;
  fprintf(stderr,
          "mesh: wrong bytes: %s, run %d: %lld of %llu bytes of %s %d, tensor "
          "%d, worker %d, run %d, server %d, run %d\n",
          name_of(self.member), self.run, (long long)wrong,
          (unsigned long long)h->bytes, what, (int)h->seq, h->index, h->worker,
          h->run, h->server, h->server_run);
}

/* Compares a tensor with what it has to be. */
static bool compare(const fs_tensor *t, const struct head *h,
                    const char *what) {
  const int64_t wrong = count_wrong(t->data, h);
  self.row->tensors++;
  self.row->bytes += (int64_t)h->bytes;
  if (wrong)
    say_wrong(wrong, what, h);
  return wrong == 0;
}

/* The worker */

static struct head pushed(int worker, int run, uint64_t seq, int index) {
  struct head h = {.seed = (uint64_t)self.o->seed,
                   .seq = seq,
                   .worker = worker,
                   .run = run,
                   .index = index,
                   .server = -1,
                   .server_run = -1,
                   .key = key_of(self.o, seq, index)};
  plan(self.o, seq, &h.bytes);
  return h;
}

/* Begins push_pull seq. */
static void ask(uint64_t seq) {
  struct slot *s = &self.slots[seq % (uint64_t)self.nslots];
  fs_tensor push[MAX_TENSORS], pull[MAX_TENSORS * SERVERS];
  uint64_t bytes;
  const int n = plan(self.o, seq, &bytes);
  const int64_t dims = (int64_t)bytes;
  make_quiet(s);
  s->ntickets = 0;
  make_room(s, GUARD + (uint64_t)(n * (1 + SERVERS)) * room_of(bytes));
  for (int i = 0; i < n; i++) { /* hear knows the order */
    const struct head h = pushed(self.info.rank, self.run, seq, i);
    push[i] = carve(s, bytes, (uint64_t)h.key, &dims);
    fill(push[i].data, &h);
  }
  for (int i = 0; i < n * SERVERS; i++)
    pull[i] = carve(s, bytes, push[i % n].key, &dims);
  const int rc = fs_push_pull(self.node, 0, NULL, push, (size_t)n, pull,
                              (size_t)(n * SERVERS), &s->tickets[0]);
  if (rc == 0)
    s->ntickets = 1;
  else
    lose(rc, "fs_push_pull");
}

/* Compares the answers to push_pull seq, of n tensors. */
static void compare_answers(uint64_t seq, const fs_tensor *pull, int n) {
  bool good = true;
  for (int i = 0; i < n * SERVERS; i++) {
    struct head got, want = pushed(self.info.rank, self.run, seq, i % n);
    want.server = i / n;
    want.server_run =
        read_head(pull[i].data, want.bytes, &got) ? got.server_run : 1;
    good &= compare(&pull[i], &want, "answer");
    const int64_t over = count_overrun(&pull[i]);
    if (over)
      say_wrong(over, "bytes behind answer", &want);
    if (i % n == n - 1 && good)
      self.row->met[member_of(FS_ROLE_SERVER, want.server)] = want.server_run;
  }
  self.row->exchanges += good;
}

/* Ends push_pull seq. */
static void hear(uint64_t seq) {
  struct slot *s = &self.slots[seq % (uint64_t)self.nslots];
  fs_tensor pull[MAX_TENSORS * SERVERS];
  uint64_t bytes;
  const int n = plan(self.o, seq, &bytes);
  int rc = 0;
  if (s->ntickets == 0 || (rc = wait_ticket(s->tickets[0])) != 0) {
    if (rc != 0) /* else it failed when it began */
      lose(rc, "fs_wait");
    nap(self.o->pause);
    return;
  }
  for (int i = 0; i < n * SERVERS; i++) {
    const uint64_t at = s->begin + GUARD + (uint64_t)(n + i) * room_of(bytes);
    pull[i] = (fs_tensor){.data = s->memory.base + at, .bytes = bytes};
  }
  compare_answers(seq, pull, n);
}

/* How many push_pulls each worker makes. The caller has begun next of them. When the command has
 * run, the first worker that asks sets the number for all. No other has begun more: a server takes
 * requests of all workers at once, so no worker is more than --open ahead of another. */
static uint64_t wanted(uint64_t next) {
  const struct options *o = self.o;
  int64_t none = 0;
  if (o->mode == EXCHANGE && !o->command)
    return (uint64_t)o->count;
  if (o->mode != EXCHANGE || !self.board->disturbed)
    return UINT64_MAX;
  atomic_compare_exchange_strong(&self.board->last, &none,
                                 (int64_t)next + o->open);
  return (uint64_t)self.board->last;
}

static void work_as_worker(void) {
  const struct options *o = self.o;
  uint64_t first = 0, next = 0; /* under way */
  for (;;) {
    const bool more = !quits() && next < wanted(next);
    const int64_t open = (int64_t)(next - first);
    if (more && open < o->open) {
      ask(next++);
      continue;
    }
    if (open == 0)
      return;
    if (open > self.row->open)
      self.row->open = open;
    hear(first++);
    if (o->mode != EXCHANGE)
      nap(o->pause); /* the others need the cores too */
  }
}

/* The server */

/* What came from one worker. */
struct source {
  int32_t run;
  uint64_t next; /* seq */
  struct {
    int32_t run;
    uint64_t seq;
  } recent[RECENT];
  uint64_t count;
};
static struct source sources[WORKERS];

/* Compares the tensors of a request, and gives its seq and the worker's run. */
static bool compare_request(int worker, const fs_tensor *push, int n,
                            uint64_t *seq, int32_t *run) {
  struct source *from = &sources[worker];
  struct head got;
  uint64_t bytes;
  const bool strict = self.o->mode == EXCHANGE;
  *seq = from->next;
  *run = 1;
  if (read_head(push[0].data, push[0].bytes, &got)) {
    *seq = got.seq;
    *run = got.run;
  }
  bool good = n == plan(self.o, *seq, &bytes) && *run >= from->run &&
              (!strict || *seq == from->next);
  for (int i = 0; good && i < RECENT && self.o->mode == KILL; i++)
    good = i >= (int)from->count || from->recent[i].run != *run ||
           from->recent[i].seq != *seq;
  if (!good) {
    const struct head want = pushed(worker, *run, *seq, 0);
    say_wrong(1, "a request that is out of order:", &want);
  }
  for (int i = 0; i < n; i++) {
    const struct head want = pushed(worker, *run, *seq, i);
    if (push[i].bytes != want.bytes || push[i].key != (uint64_t)want.key) {
      say_wrong(1, "a request with another size or key:", &want);
      good = false;
    } else {
      good &= compare(&push[i], &want, "request");
    }
  }
  from->run = *run;
  from->next = *seq + 1;
  from->recent[from->count % RECENT].run = *run;
  from->recent[from->count++ % RECENT].seq = *seq;
  return good;
}

/* A request of a batch, and the answer to it. */
struct request {
  uint64_t handler;
  int worker, n;
  fs_tensor push[MAX_TENSORS];
  int32_t run;
  uint64_t seq;
  int64_t dims;
  bool good;
};

/* Reads a request from the words of a batch; gives where the next one begins. */
static const uint64_t *parse(const uint64_t *w, struct request *r) {
  uint64_t buffers[MAX_TENSORS];
  r->handler = *w++;
  r->worker = (int)*w++;
  r->n = (int)*w++;
  const uint64_t pulls = *w++;
  if (r->worker < 0 || r->worker >= WORKERS || r->n < 1 || r->n > MAX_TENSORS ||
      pulls != (uint64_t)r->n)
    die("a request of worker %d with %d push and %llu pull tensors", r->worker,
        r->n, (unsigned long long)pulls);
  for (int i = 0; i < r->n; i++) {
    buffers[i] = w[2];
    r->push[i] = (fs_tensor){
        .key = w[0], .data = (void *)(uintptr_t)w[3], .bytes = w[4]};
    w += 8 + w[7];
  }
  w += pulls;
  r->good = compare_request(r->worker, r->push, r->n, &r->seq, &r->run);
  for (int i = 0; i < r->n; i++)
    check(fs_buffer_release(buffers[i], 1), "fs_buffer_release");
  return w;
}

/* Answers n requests of a batch, with the memory of a slot. */
static void respond(struct slot *s, struct request *r, int n) {
  fs_tensor answers[WORKERS * MAX_TENSORS], *next = answers;
  uint64_t handlers[WORKERS], room = GUARD;
  size_t counts[WORKERS], answered;
  for (int i = 0; i < n; i++)
    room += (uint64_t)r[i].n * room_of(r[i].push[0].bytes);
  make_room(s, room);
  for (int i = 0; i < n; i++) {
    handlers[i] = r[i].handler;
    counts[i] = (size_t)r[i].n;
    r[i].dims = (int64_t)r[i].push[0].bytes;
    for (int j = 0; j < r[i].n; j++) {
      struct head h = pushed(r[i].worker, r[i].run, r[i].seq, j);
      h.server = self.info.rank;
      h.server_run = self.run;
      *next = carve(s, r[i].push[0].bytes, (uint64_t)h.key, &r[i].dims);
      fill(next->data, &h);
      if (self.o->spoil == (int64_t)h.seq && j == 0)
        ((char *)next->data)[h.bytes - 1] ^= 1;
      next++;
    }
  }
  next = answers;
  for (int i = 0; i < n;) { /* a lost worker keeps the others from nothing */
    fs_ticket tickets[WORKERS];
    const int rc = fs_respond(self.node, NULL, handlers + i, counts + i,
                              (size_t)(n - i), next, tickets, &answered);
    for (size_t k = 0; k < answered; k++, i++) {
      s->tickets[s->ntickets++] = tickets[k];
      next += counts[i];
      self.row->exchanges += r[i].good;
      if (r[i].good)
        self.row->met[member_of(FS_ROLE_WORKER, r[i].worker)] = r[i].run;
    }
    if (rc == 0)
      break;
    lose(rc, "fs_respond");
    next += counts[i++];
  }
}

/* Waits until the answers in a slot have arrived. */
static void flush(struct slot *s) {
  for (int i = 0; i < s->ntickets; i++) {
    const int rc = wait_ticket(s->tickets[i]);
    if (rc != 0)
      lose(rc, "fs_wait of an answer");
  }
  make_quiet(s);
  s->ntickets = 0;
}

static void work_as_server(void) {
  static uint64_t words[WORDS];
  struct request requests[WORKERS];
  size_t need;
  for (uint64_t turn = 0;; turn++) {
    /* With FSERVER_ON_PEER_LOST=raise, a call that takes requests of all workers
       tells of a lost one. */
    const uint32_t least = self.o->mode != EXCHANGE && turn % 2;
    const int rc =
        fs_get_batch(self.node, 0, least, words, WORDS, &need, 50 * MS, 0);
    if (rc == -ESHUTDOWN && (quits() || self.board->done))
      return; /* a worker has left */
    if (rc == -EAGAIN)
      continue;
    if (rc != 0) {
      lose(rc, "fs_get_batch");
      nap(self.o->pause);
      continue;
    }
    const uint64_t *w = words;
    const int n = (int)*w++;
    for (int i = 0; i < n; i++)
      w = parse(w, &requests[i]);
    struct slot *s = &self.slots[turn % (uint64_t)self.nslots];
    flush(s);
    respond(s, requests, n);
  }
}

/* The node */

static void *meet(void *arg) {
  (void)arg;
  while (!quits()) {
    uint64_t token = 0;
    int rc;
    while ((rc = fs_barrier(self.node, FS_BARRIER_SERVERS | FS_BARRIER_WORKERS,
                            3600 * SECOND, &token, 100 * MS)) == -EAGAIN &&
           !quits())
      ;
    if (rc == 0) {
      self.row->barrier_at = fs_now();
      self.row->barriers++;
    } else if (rc == -EAGAIN) {
      check(fs_barrier_drop(self.node, token), "fs_barrier_drop");
    } else if (rc == -ESHUTDOWN) {
      break;
    } else {
      lose(rc, "fs_barrier");
    }
    nap(10 * self.o->pause);
  }
  return NULL;
}

static void open_node(void) {
  static const char *const roles[] = {"scheduler", "worker", "server"};
  static char text[16][256];
  const char *settings[16 + MAX_SETTINGS];
  const int role = role_of(self.member), rank = rank_of(self.member);
  const double limit = (double)self.o->limit / 1e9;
  size_t n = 0;
#define SET(...)                                                               \
  (snprintf(text[n], sizeof(text[n]), __VA_ARGS__), settings[n] = text[n], n++)
  SET("DMLC_ROLE=%s", roles[role]);
  SET("DMLC_NODE_RANK=%d", rank);
  SET("DMLC_NUM_WORKER=%d", WORKERS);
  SET("DMLC_NUM_SERVER=%d", SERVERS);
  SET("DMLC_PS_ROOT_URI=%s", self.o->hosts[0]);
  SET("DMLC_PS_ROOT_PORT=%d", self.board->port);
  SET("DMLC_NODE_HOST=%s", self.o->hosts[role == FS_ROLE_SERVER]);
  SET("FSERVER_TRANSPORT=%s", self.o->transport);
  SET("FSERVER_ON_PEER_LOST=%s",
      self.board->wait && self.o->mode != CARRY ? "wait" : "raise");
  SET("FSERVER_INIT_TIMEOUT=%g", limit);
  SET("FSERVER_STOP_TIMEOUT=%g", limit);
  SET("FSERVER_REJOIN_TIMEOUT=%g", limit);
  SET("FSERVER_LOG=error");
  SET("STEPMESH_BACKEND=CPU");
  if (role != FS_ROLE_SCHEDULER && self.o->devices[role == FS_ROLE_SERVER])
    SET("FSERVER_RDMA_DEVICE=%s", self.o->devices[role == FS_ROLE_SERVER]);
#undef SET
  for (int i = 0; i < self.o->nsettings; i++)
    settings[n++] = self.o->settings[i];
  check(fs_open(settings, n, &self.node), "fs_open");
  check(fs_get_info(self.node, &self.info), "fs_get_info");
  const char *port = strrchr(self.info.address, ':');
  if (role == FS_ROLE_SCHEDULER)
    self.board->port = port ? atoi(port + 1) : 0;
}

/* Whether a place in the JSON lies in a connection that a link is made of. */
static bool in_member(const char *json, const char *at) {
  static const char member[] = "{\"interface\"";
  while (at > json && *at != '{')
    at--;
  return strncmp(at, member, sizeof(member) - 1) == 0;
}

/* Every link to a peer is of the transport that is asked for. */
static void check_links(void) {
  static char json[1 << 16];
  static const char key[] = "\"transport\":\"";
  size_t need;
  int links = 0;
  if (!self.o->link || self.member == 0)
    return;
  check(fs_describe(self.node, json, sizeof(json) - 1, &need), "fs_describe");
  for (const char *at = json; (at = strstr(at, key)) != NULL;) {
    at += sizeof(key) - 1;
    if (in_member(json, at))
      continue;
    links++;
    if (strncmp(at, self.o->link, strlen(self.o->link)) != 0)
      die("a link is not %s: %s", self.o->link, json);
  }
  if ((self.o->mode == EXCHANGE || self.o->mode == CARRY) && links != WORKERS)
    die("%d links: %s", links, json);
}

/* Leaves the cluster. Nothing of the node is left afterwards. */
static void leave(void) {
  int64_t nodes, buffers, goroutines;
  int rc;
  while ((rc = fs_stop(self.node, 100 * MS)) == -EAGAIN)
    ;
  check(rc, "fs_stop");
  check(fs_free(self.node), "fs_free");
  check(fs_live(&nodes, &buffers, &goroutines), "fs_live");
  if (nodes != 0 || buffers != 0)
    die("%lld nodes and %lld buffers are left", (long long)nodes,
        (long long)buffers);
}

int live(const struct options *o, struct board *board, int member, int run,
         int row) {
  pthread_t thread;
  int rc;
  self = (struct member){.o = o, .board = board, .row = &board->rows[row]};
  self.member = member;
  self.run = run;
  const int role = role_of(member);
  /* In a slot that has failed a peer may still write for a moment. */
  self.nslots = role == FS_ROLE_SERVER ? ANSWERS
                : o->mode == EXCHANGE  ? o->open
                                       : 4 * o->open;
  self.slots = calloc((size_t)self.nslots, sizeof(self.slots[0]));
  if (!self.slots)
    die("no memory");
  open_node();
  while ((rc = fs_wait_ready(self.node, 100 * MS)) == -EAGAIN)
    ;
  check(rc, "fs_wait_ready");
  check_links();
  self.row->run = run;
  const bool meets =
      role != FS_ROLE_SCHEDULER && o->mode != EXCHANGE && o->mode != CARRY;
  if (meets && pthread_create(&thread, NULL, meet, NULL) != 0)
    die("no thread");
  bool leaves = o->mode != CARRY || !board->wait;
  if (o->mode == CARRY && role != FS_ROLE_SCHEDULER)
    carry(o, board, self.row, self.node, member);
  else if (role == FS_ROLE_SERVER)
    work_as_server();
  else if (role == FS_ROLE_WORKER)
    work_as_worker();
  if (role == FS_ROLE_WORKER && ++board->done == WORKERS)
    board->quit = 1;
  while (role == FS_ROLE_SCHEDULER && !quits())
    nap(20 * MS);
  if (meets)
    pthread_join(thread, NULL);
  if (leaves)
    leave();
  else
    check(fs_free(self.node), "fs_free");
  return 0;
}
