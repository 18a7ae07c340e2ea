/*
 * Mode carry: stream channels whose messages the engine exchanges (fs_channel_carry). Each member has one thread for
 * each channel, which plays a stream: it writes the words of a stream and reads those of the engine, and calls nothing.
 * No other thread calls the engine meanwhile.
 *
 * A message of a worker is a tensor of rows, whose number changes, and a whole one; each server answers with one tensor.
 * Every byte is compared. Afterwards members are killed in the middle, each time in a new cluster.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mesh.h"

enum { LANES = 3, OUT = 2, TENSORS = OUT + SERVERS };
static const struct {
  const char *name;
  int64_t rows, row; /* of a tensor, and bytes of a row */
  int64_t one_in;    /* one message for so many of --count */
} kinds[LANES] = {
    {"small", 100, 8, 1}, {"middle", 64, 1024, 1}, {"large", 2, 600000, 20}};

/* One side of a channel. */
struct lane {
  int kind;
  pthread_t thread;
  fs_channel channel;
  int64_t words[FS_CARRY_WORDS];
  int64_t rows[OUT], counts[OUT * WORKERS];
  int64_t dims[2];
  fs_tensor out[OUT + WORKERS], in[OUT * WORKERS + SERVERS];
};

static struct {
  const struct options *o;
  struct board *board;
  struct row *row;
  fs_node node;
  int member;
  struct lane lanes[LANES];
} side;

static int64_t load(const int64_t *word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static void store(int64_t *word, int64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static int64_t messages(const struct options *o, int kind) {
  return (o->count + kinds[kind].one_in - 1) / kinds[kind].one_in;
}

uint64_t carried_most(void) {
  return (uint64_t)(kinds[LANES - 1].rows * kinds[LANES - 1].row);
}

int64_t carried(const struct options *o) {
  int64_t sum = 0;
  for (int i = 0; i < LANES; i++)
    sum += (WORKERS + SERVERS) * messages(o, i);
  return sum;
}

/* How many rows of the first tensor message i of a worker has: all of them now and then, and none. */
static int64_t rows_of(int kind, int64_t i, int worker) {
  return (i * 37 + worker * 11) % (kinds[kind].rows + 1);
}

/* What a tensor of a message is; server is that which answers, or -1. */
static struct head content(int kind, int64_t i, int index, int worker,
                           int server) {
  const int64_t rows = index == 0 ? rows_of(kind, i, worker) : kinds[kind].rows;
  return (struct head){.seed = (uint64_t)side.o->seed,
                       .seq = (uint64_t)i,
                       .bytes = (uint64_t)(rows * kinds[kind].row),
                       .worker = worker,
                       .run = 1,
                       .index = index,
                       .server = server,
                       .server_run = 1,
                       .key = kind};
}

/* A tensor of its own memory. */
static fs_tensor make(struct lane *l, int index) {
  static _Atomic uint64_t allocations = 1 << 20;
  const uint64_t bytes = (uint64_t)(kinds[l->kind].rows * kinds[l->kind].row);
  void *at;
  if (posix_memalign(&at, 4096, bytes) != 0)
    die("no memory for %llu bytes", (unsigned long long)bytes);
  memset(at, 0xA5, bytes);
  l->dims[0] = kinds[l->kind].rows;
  l->dims[1] = kinds[l->kind].row;
  return (fs_tensor){.data = at,
                     .bytes = bytes,
                     .key = (uint64_t)(10 * l->kind + index),
                     .base = at,
                     .base_bytes = bytes,
                     .alloc = ++allocations,
                     .dims = l->dims,
                     .ndim = 2,
                     .device = -1};
}

/* A channel is open when all peers have told of their side. */
static void greet(struct lane *l, uint32_t peers) {
  char text[8];
  size_t need;
  int rc;
  for (uint32_t i = 0; i < peers; i++)
    check(fs_channel_tell(side.node, l->channel, i, "open", 4),
          "fs_channel_tell");
  for (uint32_t i = 0; i < peers; i++) {
    while ((rc = fs_channel_text(side.node, l->channel, i, text, sizeof(text),
                                 &need, 100 * MS)) == -EAGAIN)
      ;
    check(rc, "fs_channel_text");
  }
}

/* Messages of the small kind are copied by the servers; the others land. */
static void open_lane(struct lane *l) {
  const bool worker = role_of(side.member) == FS_ROLE_WORKER;
  fs_carried what = {.words = l->words,
                     .out = l->out,
                     .in = l->in,
                     .rows = l->rows,
                     .counts = l->counts,
                     .timeout_ns = side.o->limit,
                     .lands = l->kind > 0};
  for (int i = 0; i < OUT; i++)
    l->rows[i] = kinds[l->kind].rows;
  if (worker) {
    while (what.nout < OUT)
      l->out[what.nout] = make(l, (int)what.nout), what.nout++;
    while (what.nin < SERVERS)
      l->in[what.nin++] = make(l, OUT);
  } else {
    while (what.nout < WORKERS)
      l->out[what.nout++] = make(l, OUT);
    while (what.nin < OUT * WORKERS)
      l->in[what.nin] = make(l, (int)what.nin % OUT), what.nin++;
  }
  check(fs_channel_open(side.node, kinds[l->kind].name, &l->channel),
        "fs_channel_open");
  if (worker)
    greet(l, SERVERS);
  check(fs_channel_carry(side.node, l->channel, &what), "fs_channel_carry");
  if (!worker)
    greet(l, WORKERS);
}

/* Waits as a stream does, until message i is through. False: the channel has ended. */
static bool done(struct lane *l, int64_t i) {
  int64_t seen, looks = 0;
  store(&l->words[FS_CARRY_ASKED], i);
  while ((seen = load(&l->words[FS_CARRY_DONE])) < i)
    nap(looks++ < 5 ? MS / 10 : MS); /* the others need the cores */
  return seen != INT64_MAX;
}

static void ring(struct lane *l, int64_t i) {
  store(&l->words[FS_CARRY_RUNG], i);
}

static void compare(const void *data, struct head h) {
  const int64_t wrong = count_wrong(data, &h);
  side.row->tensors++;
  side.row->bytes += (int64_t)h.bytes;
  side.row->wrong += wrong;
  if (wrong)
    fprintf(stderr,
            "mesh: wrong bytes: %s: %lld of %llu bytes of message %lld on %s, "
            "tensor %d, worker %d, server %d\n",
            name_of(side.member), (long long)wrong, (unsigned long long)h.bytes,
            (long long)h.seq, kinds[h.key].name, h.index, h.worker, h.server);
}

/* Message i of a worker. False: the channel has ended. */
static bool ask(struct lane *l, int64_t i) {
  const int me = rank_of(side.member);
  for (int k = 0; k < OUT; k++) {
    const struct head h = content(l->kind, i, k, me, -1);
    fill(l->out[k].data, &h);
  }
  l->rows[0] = rows_of(l->kind, i, me);
  ring(l, i);
  if (!done(l, i))
    return false;
  for (int k = 0; k < SERVERS; k++)
    compare(l->in[k].data, content(l->kind, i, OUT, me, k));
  return true;
}

/* Message i at a server. */
static bool answer(struct lane *l, int64_t i) {
  const int me = rank_of(side.member);
  if (!done(l, i))
    return false;
  for (int w = 0; w < WORKERS; w++) {
    const int64_t rows = rows_of(l->kind, i, w), got = l->counts[OUT * w];
    if (got != rows || l->counts[OUT * w + 1] != kinds[l->kind].rows)
      die("message %lld of worker %d on %s has %lld rows, want %lld",
          (long long)i, w, kinds[l->kind].name, (long long)got,
          (long long)rows);
    for (int k = 0; k < OUT; k++)
      compare(l->in[OUT * w + k].data, content(l->kind, i, k, w, -1));
    const struct head h = content(l->kind, i, OUT, w, me);
    fill(l->out[w].data, &h);
    if (i == side.o->spoil)
      ((char *)l->out[w].data)[h.bytes - 1] ^= 1;
  }
  ring(l, i);
  return true;
}

static void *play(void *arg) {
  struct lane *l = arg;
  const bool worker = role_of(side.member) == FS_ROLE_WORKER;
  const int64_t count =
      side.board->wait ? INT64_MAX - 1 : messages(side.o, l->kind);
  for (int64_t i = 1; i <= count; i++) {
    if (!(worker ? ask(l, i) : answer(l, i)))
      return NULL;
    side.row->exchanges++;
  }
  while (load(&l->words[FS_CARRY_SENT]) <
         count) /* what is not sent goes with the channel */
    nap(MS);
  return NULL;
}

/* Why a channel is not open, if it is not: a member is lost, or a peer has closed its side. */
static void see_state(struct lane *l) {
  fs_error e;
  const int rc = fs_channel_state(side.node, l->channel, 0);
  if (rc == 0)
    return;
  if (rc == -ECONNRESET && side.board->wait) {
    lose(rc, "fs_channel_state");
    return;
  }
  check(fs_errmsg(&e), "fs_errmsg");
  if (!strstr(e.text, "has closed its side"))
    die("fs_channel_state gives %d: %s", rc, e.text);
  side.row->closed++;
}

static void close_lane(struct lane *l, bool in_order) {
  int rc;
  while ((rc = fs_channel_close(side.node, l->channel, NULL, 0,
                                in_order ? 100 * MS : -1)) == -EAGAIN)
    ;
  check(rc, "fs_channel_close");
  while (in_order && load(&l->words[FS_CARRY_OVER]) != 1)
    nap(MS);
}

void carry(const struct options *o, struct board *board, struct row *row,
           fs_node node, int member) {
  side.o = o, side.board = board, side.row = row;
  side.node = node, side.member = member;
  const bool lasting = board->wait;
  for (int i = 0; i < LANES; i++) {
    side.lanes[i].kind = i;
    open_lane(&side.lanes[i]);
  }
  for (int i = 0; i < LANES; i++)
    if (pthread_create(&side.lanes[i].thread, NULL, play, &side.lanes[i]) != 0)
      die("no thread");
  for (int i = 0; i < LANES; i++)
    pthread_join(side.lanes[i].thread, NULL);
  for (int i = 0; i < LANES; i++)
    see_state(&side.lanes[i]);
  for (int i = 0; i < LANES; i++)
    close_lane(&side.lanes[i], !lasting);
  if (!lasting)
    return;
  row->barriers++; /* the driver waits for that */
  while (!board->quit)
    nap(10 * MS);
  check(fs_close(node), "fs_close");
  for (int i = 0; i < LANES; i++)
    if (load(&side.lanes[i].words[FS_CARRY_OVER]) != 1)
      die("%s: memory is in use after fs_close", kinds[i].name);
}

/* The driver */

/* Everybody has had some messages, so the channels are in the middle of them. */
static bool all_exchange(struct cluster *c) {
  for (int i = 1; i < MEMBERS; i++)
    if (c->members[i].row->exchanges < 20)
      return false;
  return true;
}

static int victim;

/* All channels of the others have ended: those of the peers of the victim name it. */
static bool all_have_ended(struct cluster *c) {
  for (int i = 1; i < MEMBERS; i++) {
    const struct row *r = c->members[i].row;
    if (i == victim)
      continue;
    if (r->barriers == 0)
      return false;
    if (are_peers(i, victim) && r->lost[victim] != LANES) {
      fprintf(stderr, "mesh: %s has lost %s on %lld channels, want %d\n",
              name_of(i), victim > WORKERS ? "a server" : "a worker",
              (long long)r->lost[victim], LANES);
      c->ends++;
    }
  }
  return true;
}

void carry_all(struct cluster *c) {
  bool good = exchange(c);
  for (int64_t i = 0; good && i < c->o->times; i++) {
    victim = 1 + (int)(i * WORKERS + i / 2) % (WORKERS + SERVERS);
    c->board->wait = 1; /* until somebody is lost */
    good = start_all(c) && wait_until(c, all_exchange, -1, "no messages");
    if (!good)
      break;
    kill(c->members[victim].pid, SIGKILL);
    c->kills++;
    const int64_t since = fs_now();
    good = wait_until(c, all_have_ended, victim, "not every channel has ended");
    if (good && c->o->verbose)
      printf("mesh: %s was killed: all channels had ended after %.3f s\n",
             name_of(victim), (double)(fs_now() - since) / 1e9);
    c->board->quit = 1;
    while (!has_ended(&c->members[victim]))
      nap(MS);
    c->members[victim].status = 0;
    good = good && wait_left(c);
    end_all(c, c->hangs != 0);
  }
}
