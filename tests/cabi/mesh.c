/*
 * A cluster of 2 workers and 2 servers through fserver.h, each a process of its
 * own, that exchange tensors and compare every byte. `mesh --help` says how to
 * use it; test_cabi.py and tests/softroce build and run it.
 */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "mesh.h"

static const char usage[] =
    "usage: mesh exchange|kill|disturb [OPTION...]\n"
    "\n"
    "exchange  each worker makes --count push_pulls; with --command, as many "
    "as "
    "it takes to\n"
    "          run that --times times\n"
    "kill      kill -9 of --times workers and servers, one at a time, each of "
    "which is\n"
    "          started again: half of them with FSERVER_ON_PEER_LOST=raise, "
    "half "
    "with wait\n"
    "disturb   runs --command --times times, in both ways, while push_pulls go "
    "on\n"
    "carry     messages on three channels, which the engine carries for "
    "threads "
    "that play\n"
    "          streams: --count on each of two; then --times members are "
    "killed while\n"
    "          messages are under way, each of another cluster\n"
    "\n"
    "--transport NAME   FSERVER_TRANSPORT (default auto)\n"
    "--link NAME        each link must be of this transport (default: that of\n"
    "                   --transport, if it is not auto)\n"
    "--worker-host A    address of workers and scheduler (127.0.0.1)\n"
    "--server-host A    address of servers (127.0.0.1)\n"
    "--worker-device D  FSERVER_RDMA_DEVICE of workers\n"
    "--server-device D  FSERVER_RDMA_DEVICE of servers\n"
    "--set NAME=VALUE   a setting of all members; may be given 16 times\n"
    "--sizes N,N,...    bytes of the tensors, in turn, 48 or more unless the "
    "mode "
    "is\n"
    "                   exchange (48,777,4096,65536)\n"
    "--count N          push_pulls of each worker (100)\n"
    "--keys N           3 to 4096 keys (4)\n"
    "--open N           push_pulls that a worker has under way, 1 to 4096 "
    "(3)\n"
    "--pause MS         the members rest so long after a push_pull or a loss, "
    "except in mode\n"
    "                   exchange (1)\n"
    "--times N          kills, or runs of the command (10)\n"
    "--command TEXT     what sh runs; $PIDS are the members: scheduler, "
    "workers, "
    "servers\n"
    "--seed N           of bytes, victims and pauses (1)\n"
    "--spoil N          servers answer push_pull N with a wrong byte, to see "
    "that "
    "it is found\n"
    "--limit S          seconds after which something hangs (20)\n"
    "--verbose          a line for each kill\n"
    "\n"
    "The last line says what was compared. Exit status: 0 all is right, 1 it "
    "is "
    "not, 2 wrong\n"
    "arguments.\n";

void nap(int64_t ns) {
  const struct timespec t = {ns / SECOND, ns % SECOND};
  nanosleep(&t, NULL);
}

const char *name_of(int member) {
  static char name[32];
  if (member == 0)
    return "scheduler";
  snprintf(name, sizeof(name), "%s %d",
           role_of(member) == FS_ROLE_WORKER ? "worker" : "server",
           rank_of(member));
  return name;
}

/* Options */

static void refuse(const char *name, const char *value, const char *want) {
  fprintf(stderr, "mesh: --%s %s: want %s (mesh --help)\n", name, value, want);
  exit(2);
}

static int64_t number(const char *name, const char *value, int64_t lo,
                      int64_t hi) {
  char want[64], *end;
  errno = 0;
  const long long n = strtoll(value, &end, 10);
  if (errno || end == value || *end || n < lo || n > hi) {
    snprintf(want, sizeof(want), "a whole number from %lld to %lld",
             (long long)lo, (long long)hi);
    refuse(name, value, want);
  }
  return n;
}

static void parse_sizes(struct options *o, const char *value) {
  char *list = strdup(value), *rest = list, *word;
  o->nsizes = 0;
  while ((word = strsep(&rest, ",")) != NULL) {
    if (o->nsizes == MAX_SIZES)
      refuse("sizes", value, "at most 32 sizes");
    o->sizes[o->nsizes++] = (uint64_t)number("sizes", word, 1, 1 << 30);
  }
  free(list);
}

static void set_option(struct options *o, const char *name, const char *value) {
  const struct {
    const char *name;
    const char **at;
  } texts[] = {
      {"transport", &o->transport},      {"link", &o->link},
      {"worker-host", &o->hosts[0]},     {"server-host", &o->hosts[1]},
      {"worker-device", &o->devices[0]}, {"server-device", &o->devices[1]},
      {"command", &o->command}};
  const struct {
    const char *name;
    int64_t *at, lo, hi, scale;
  } numbers[] = {{"count", &o->count, 1, 1 << 30, 1},
                 {"keys", &o->keys, MAX_TENSORS, 4096, 1},
                 {"open", &o->open, 1, 4096, 1},
                 {"times", &o->times, 1, MAX_TIMES, 1},
                 {"pause", &o->pause, 0, 1000, MS},
                 {"seed", &o->seed, 0, INT64_MAX, 1},
                 {"spoil", &o->spoil, 0, INT64_MAX, 1},
                 {"limit", &o->limit, 1, 3600, SECOND}};
  for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
    if (strcmp(name, texts[i].name) == 0)
      *texts[i].at = value;
  for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
    if (strcmp(name, numbers[i].name) == 0)
      *numbers[i].at =
          numbers[i].scale * number(name, value, numbers[i].lo, numbers[i].hi);
  if (strcmp(name, "sizes") == 0)
    parse_sizes(o, value);
  if (strcmp(name, "set") == 0) {
    if (o->nsettings == MAX_SETTINGS)
      refuse("set", value, "at most 16 settings");
    o->settings[o->nsettings++] = value;
  }
}

static void set_mode(struct options *o, const char *name) {
  static const char *const modes[] = {"exchange", "kill", "disturb", "carry"};
  for (int i = 0; i < 4; i++) {
    if (strcmp(name, modes[i]) == 0) {
      o->mode = i;
      return;
    }
  }
  fputs(usage, stderr);
  exit(2);
}

static struct options parse_options(int argc, char **argv) {
  static const struct option names[] = {
      {"transport", 1, 0, 1},     {"link", 1, 0, 1},
      {"worker-host", 1, 0, 1},   {"server-host", 1, 0, 1},
      {"worker-device", 1, 0, 1}, {"server-device", 1, 0, 1},
      {"set", 1, 0, 1},           {"sizes", 1, 0, 1},
      {"count", 1, 0, 1},         {"keys", 1, 0, 1},
      {"open", 1, 0, 1},          {"times", 1, 0, 1},
      {"pause", 1, 0, 1},         {"seed", 1, 0, 1},
      {"spoil", 1, 0, 1},         {"command", 1, 0, 1},
      {"limit", 1, 0, 1},         {"help", 0, 0, 'h'},
      {"verbose", 0, 0, 'v'},     {0, 0, 0, 0}};
  struct options o = {.transport = "auto",
                      .hosts = {"127.0.0.1", "127.0.0.1"},
                      .sizes = {48, 777, 4096, 65536},
                      .nsizes = 4,
                      .count = 100,
                      .keys = 4,
                      .open = 3,
                      .times = 10,
                      .pause = MS,
                      .seed = 1,
                      .spoil = -1,
                      .limit = 20 * SECOND};
  int c, at = 0;
  while ((c = getopt_long(argc, argv, "", names, &at)) != -1) {
    if (c == 'h') {
      fputs(usage, stdout);
      exit(0);
    } else if (c == 'v') {
      o.verbose = true;
    } else if (c == 1) {
      set_option(&o, names[at].name, optarg);
    } else {
      exit(2);
    }
  }
  set_mode(&o, optind == argc - 1 ? argv[optind] : "");
  for (int i = 0; i < o.nsizes && o.mode != EXCHANGE; i++) {
    char size[24];
    snprintf(size, sizeof(size), "%llu", (unsigned long long)o.sizes[i]);
    if (o.sizes[i] < sizeof(struct head))
      refuse("sizes", size, "48 or more, except in mode exchange");
  }
  if (o.mode == DISTURB ? !o.command : o.command && o.mode != EXCHANGE)
    refuse("command", o.command ? o.command : "is not given",
           "a command in mode disturb, none in modes kill and carry");
  if (!o.link && strcmp(o.transport, "auto") != 0)
    o.link = o.transport;
  return o;
}

/* Processes */

static char **arguments;

/* Starts a run of a member: this program again, with the same arguments. */
void start(struct cluster *c, int member, int run) {
  extern char **environ;
  struct process *p = &c->members[member];
  char as[64];
  snprintf(as, sizeof(as), "%d %d %d", member, run, c->rows);
  *p = (struct process){.row = &c->board->rows[c->rows++], .started = fs_now()};
  setenv("MESH_MEMBER", as, 1);
  setenv("GOTRACEBACK", "all", 1); /* for end_all */
  const int rc =
      posix_spawn(&p->pid, "/proc/self/exe", NULL, NULL, arguments, environ);
  if (rc != 0) {
    fprintf(stderr, "mesh: cannot start a process: %s\n", strerror(rc));
    exit(1);
  }
}

bool has_ended(struct process *p) {
  if (p->pid && !p->ended)
    p->ended = waitpid(p->pid, &p->status, WNOHANG) == p->pid;
  return p->ended;
}

bool wait_until(struct cluster *c, bool (*met)(struct cluster *), int but,
                const char *otherwise) {
  const int64_t end = fs_now() + c->o->limit;
  while (!met(c)) {
    for (int i = 0; i < MEMBERS; i++) {
      struct process *p = &c->members[i];
      if (i != but && has_ended(p) && !(c->board->quit && p->status == 0)) {
        fprintf(stderr, "mesh: %s has ended with %s %d\n", name_of(i),
                WIFSIGNALED(p->status) ? "signal" : "status",
                WIFSIGNALED(p->status) ? WTERMSIG(p->status)
                                       : WEXITSTATUS(p->status));
        c->ends++;
        return false;
      }
    }
    if (fs_now() > end) {
      fprintf(stderr, "mesh: %s after %g s\n", otherwise,
              (double)c->o->limit / 1e9);
      c->hangs++;
      return false;
    }
    nap(5 * MS);
  }
  return true;
}

static bool has_port(struct cluster *c) { return c->board->port != 0; }

static bool all_run(struct cluster *c) {
  for (int i = 0; i < MEMBERS; i++)
    if (c->members[i].row->run == 0)
      return false;
  return true;
}

bool start_all(struct cluster *c) {
  c->board->port = c->board->done = c->board->quit = 0;
  memset(c->members, 0, sizeof(c->members));
  start(c, 0, 1);
  if (!wait_until(c, has_port, -1, "the scheduler has no port"))
    return false;
  for (int i = 1; i < MEMBERS; i++)
    start(c, i, 1);
  return wait_until(c, all_run, -1, "the cluster is not complete");
}

static bool all_left(struct cluster *c) {
  for (int i = 0; i < MEMBERS; i++)
    if (!has_ended(&c->members[i]) || c->members[i].status != 0)
      return false;
  return true;
}

bool wait_left(struct cluster *c) {
  return wait_until(c, all_left, -1, "not everybody has left");
}

void end_all(struct cluster *c, bool wrong) {
  const int signals[] = {SIGSEGV, SIGKILL}; /* Go's runtime says where it is */
  for (int k = wrong ? 0 : 1; k < 2; k++) {
    for (int i = 0; i < MEMBERS; i++) {
      if (c->members[i].pid && !has_ended(&c->members[i]))
        kill(c->members[i].pid, signals[k]);
    }
    for (int n = 0; wrong && k == 0 && n < 100; n++)
      nap(10 * MS);
  }
  for (int i = 0; i < MEMBERS; i++)
    while (c->members[i].pid && !has_ended(&c->members[i]))
      nap(MS);
}

/* Exchanges */

static int64_t total(const struct cluster *c, size_t field) {
  int64_t sum = 0;
  for (int i = 0; i < c->rows; i++)
    sum += *(const _Atomic int64_t *)((const char *)&c->board->rows[i] + field);
  return sum;
}
#define TOTAL(c, field) total(c, offsetof(struct row, field))

/* For wait_until: all workers are through, or nothing has moved on yet. */
static bool through_or_on(struct cluster *c) {
  static int64_t seen;
  const int64_t now = TOTAL(c, tensors);
  const bool on = now != seen;
  seen = now;
  return on || c->board->quit;
}

bool exchange(struct cluster *c) {
  bool good = start_all(c);
  if (c->o->mode == EXCHANGE && c->o->command) {
    good = good && run_commands(c);
    c->board->disturbed = good;
  }
  while (good && !c->board->quit)
    good = wait_until(c, through_or_on, -1, "no exchange has been made");
  good = good && wait_left(c);
  end_all(c, c->hangs || c->ends);
  return good;
}

/* After exchange: nobody was lost, and each server has answered what the workers asked. */
static bool all_exchanged(const struct cluster *c) {
  int64_t asked = 0;
  for (int i = 0; i < MEMBERS && i < c->rows; i++)
    if (role_of(i) == FS_ROLE_WORKER)
      asked += c->board->rows[i].exchanges;
  return asked == WORKERS * (c->o->command ? c->board->last : c->o->count) &&
         TOTAL(c, exchanges) == (1 + SERVERS) * asked && !TOTAL(c, losses);
}

/* The last line. */
static bool report(const struct cluster *c, double seconds) {
  const struct options *o = c->o;
  uint64_t least = UINT64_MAX, most = 0;
  int64_t open = 0;
  const char *why = "";
  for (int i = 0; i < o->nsizes; i++) {
    least = o->sizes[i] < least ? o->sizes[i] : least;
    most = o->sizes[i] > most ? o->sizes[i] : most;
  }
  if (o->mode == CARRY)
    least = 0, most = carried_most();
  for (int i = 0; i < c->rows; i++) {
    open = c->board->rows[i].open > open ? c->board->rows[i].open : open;
    if (!*why)
      why = c->board->rows[i].why;
  }
  if (*why)
    printf("mesh: the first of %lld losses: %s\n", (long long)TOTAL(c, losses),
           why);
  printf("mesh: %s, seed %lld: ", o->transport, (long long)o->seed);
  if (o->mode != EXCHANGE || o->command)
    printf("%lld %s, ", (long long)c->kills,
           o->command ? "disturbances" : "kills");
  printf("%lld exchanges, %lld tensors of %llu to %llu bytes and %lld bytes "
         "compared, at most %lld open, %lld hangs, %lld wrong bytes, %lld "
         "other ends, %.1f s\n",
         (long long)TOTAL(c, exchanges), (long long)TOTAL(c, tensors),
         (unsigned long long)least, (unsigned long long)most,
         (long long)TOTAL(c, bytes), (long long)open, (long long)c->hangs,
         (long long)TOTAL(c, wrong), (long long)c->ends, seconds);
  const bool enough = o->mode == EXCHANGE ? all_exchanged(c)
                      : o->mode == CARRY  ? TOTAL(c, exchanges) >= carried(o)
                                          : true;
  return enough && !c->hangs && !c->ends && !TOTAL(c, wrong);
}

/* The memory that all processes share: standard input of the members. */
static struct board *map_board(const struct options *o, int fd) {
  const size_t rows = MEMBERS * (2 + (size_t)o->times);
  const size_t bytes = sizeof(struct board) + rows * sizeof(struct row);
  struct board *b = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0)
    b = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (b == MAP_FAILED) {
    perror("mesh: memory that processes share");
    exit(1);
  }
  return b;
}

int main(int argc, char **argv) {
  // By lines: what a case has said is there if its time is up.
  setvbuf(stdout, NULL, _IOLBF, 0);
  const struct options o = parse_options(argc, argv);
  const char *as = getenv("MESH_MEMBER");
  int member, run, row;
  if (as) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (sscanf(as, "%d %d %d", &member, &run, &row) != 3)
      return 2;
    return live(&o, map_board(&o, STDIN_FILENO), member, run, row);
  }
  const int fd = memfd_create("mesh", 0);
  struct cluster c = {.o = &o, .board = map_board(&o, fd)};
  if (dup2(fd, STDIN_FILENO) != STDIN_FILENO) {
    perror("mesh: standard input");
    return 1;
  }
  arguments = argv;
  const int64_t begin = fs_now();
  if (o.mode == EXCHANGE)
    exchange(&c);
  else if (o.mode == CARRY)
    carry_all(&c);
  else
    disturb_all(&c);
  return report(&c, (double)(fs_now() - begin) / 1e9) ? 0 : 1;
}
