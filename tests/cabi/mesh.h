/*
 * What the parts of the program `mesh` share. mesh.c starts the processes,
 * mesh_kill.c disturbs them, mesh_node.c is a member of the cluster, mesh_carry.c
 * the channels of one, and mesh_bytes.c says which bytes a tensor has.
 */
#ifndef MESH_H
#define MESH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "fserver.h"

#define MS INT64_C(1000000)
#define SECOND (1000 * MS)

enum { WORKERS = 2, SERVERS = 2, MEMBERS = 1 + WORKERS + SERVERS };
enum { MAX_SIZES = 32, MAX_SETTINGS = 16, MAX_TENSORS = 3, MAX_TIMES = 10000 };

/* Members are numbered: the scheduler, the workers, the servers. */
static inline int member_of(int role, int rank) {
  return role == FS_ROLE_SCHEDULER
             ? 0
             : 1 + (role == FS_ROLE_SERVER) * WORKERS + rank;
}
static inline int role_of(int member) {
  return member == 0         ? FS_ROLE_SCHEDULER
         : member <= WORKERS ? FS_ROLE_WORKER
                             : FS_ROLE_SERVER;
}
static inline int rank_of(int member) {
  return member == 0 ? 0 : (member - 1) % WORKERS;
}
static inline bool are_peers(int a, int b) {
  return a != 0 && b != 0 && role_of(a) != role_of(b);
}
const char *name_of(int member);

/* The command line. */
struct options {
  enum { EXCHANGE, KILL, DISTURB, CARRY } mode;
  const char *transport;  /* FSERVER_TRANSPORT */
  const char *link;       /* what each link must be; NULL: anything */
  const char *hosts[2];   /* of workers and of servers */
  const char *devices[2]; /* FSERVER_RDMA_DEVICE of them; NULL: chosen */
  const char *settings[MAX_SETTINGS];
  int nsettings;
  uint64_t sizes[MAX_SIZES];
  int nsizes;
  int64_t
      count; /* push_pulls of each worker (EXCHANGE without a command), or messages (CARRY) */
  int64_t keys;
  int64_t open;  /* push_pulls that a worker has under way */
  int64_t pause; /* ns; after a push_pull or a loss, unless EXCHANGE */
  int64_t times; /* kills, or runs of the command */
  int64_t seed;
  int64_t spoil; /* servers answer this push_pull with a wrong byte; -1: none */
  int64_t limit; /* ns; what takes longer is a hang */
  const char *command;
  bool verbose;
};

/* What one process says of itself. The driver resets lost and met. */
struct row {
  _Atomic int64_t run; /* of its member, once it is in the cluster */
  _Atomic int64_t exchanges, tensors, bytes, wrong;
  _Atomic int64_t open;       /* the most push_pulls that were under way */
  _Atomic int64_t barriers;   /* that it has come through */
  _Atomic int64_t barrier_at; /* the last one */
  _Atomic int64_t
      closed; /* channels that ended because a peer closed its side */
  _Atomic int64_t losses;        /* errors that named a member as lost */
  _Atomic int64_t lost[MEMBERS]; /* of these, by the member */
  _Atomic int64_t met[MEMBERS];  /* the peer's run in the last right exchange */
  char why[200];                 /* the first loss; written before losses */
};

struct board {
  _Atomic int32_t port; /* of the scheduler */
  _Atomic int32_t
      wait; /* FSERVER_ON_PEER_LOST=wait, else raise; with CARRY, messages go on until
                           somebody is lost */
  _Atomic int32_t done;      /* workers that have made all their exchanges */
  _Atomic int32_t quit;      /* everybody leaves */
  _Atomic int32_t disturbed; /* EXCHANGE: the command has run --times times */
  _Atomic int64_t last;      /* push_pulls of each worker then; 0: not set */
  struct row rows[];
};

/* mesh_bytes.c */

/* What a tensor is. Its bytes follow from it, and start with it if they have
 * room. */
struct head {
  uint64_t seed, seq, bytes;
  int32_t worker, run;        /* who pushes, and in which run of the process */
  int32_t index;              /* of the tensor within its push_pull */
  int32_t server, server_run; /* of an answer; of a push -1 */
  int32_t key;
};
void fill(void *data, const struct head *h);
/* The number of bytes that are not those of h. */
int64_t count_wrong(const void *data, const struct head *h);
/* The head at the start of a tensor. False: the tensor is too short for one. */
bool read_head(const void *data, uint64_t bytes, struct head *out);
/* The push_pull seq of a worker: how many tensors, and of how many bytes. */
int plan(const struct options *o, uint64_t seq, uint64_t *bytes);
int32_t key_of(const struct options *o, uint64_t seq, int index);

/* mesh_node.c: the life of a member. Its exit status is that of the process. */
enum { TAKEN_FOR_LOST = 3 };
_Noreturn void die(const char *format, ...);
/* Ends the process unless rc is 0. */
void check(int rc, const char *what);
/* A call has given rc: a member is lost. The error names it, or the process ends. */
void lose(int rc, const char *what);
int live(const struct options *o, struct board *board, int member, int run,
         int row);

/* mesh.c */
struct process {
  pid_t pid;  /* 0: none */
  int status; /* of waitpid, when pid has ended */
  bool ended;
  struct row *row;
  int64_t started;
};
/* The processes of a cluster, and what was seen of all so far. */
struct cluster {
  const struct options *o;
  struct board *board;
  struct process members[MEMBERS];
  int rows; /* that are taken */
  int64_t kills, hangs, ends;
};
void nap(int64_t ns);
void start(struct cluster *c, int member, int run);
bool has_ended(struct process *p);
/* Waits until met, while all members but one (-1: all) run. False: a hang, or a
 * member has ended, which was said and counted. */
bool wait_until(struct cluster *c, bool (*met)(struct cluster *), int but,
                const char *otherwise);
bool start_all(struct cluster *c);
bool wait_left(struct cluster *c);
/* A cluster from its start to its end, which comes when the workers are through. */
bool exchange(struct cluster *c);
/* Ends what runs. If something is wrong, it says first where it is. */
void end_all(struct cluster *c, bool wrong);

/* mesh_kill.c */
void disturb_all(struct cluster *c);
/* Runs the command --times times, with rests between. False: it has failed. */
bool run_commands(struct cluster *c);

/* mesh_carry.c */
void carry_all(struct cluster *c);
/* The bytes of the largest tensor; some have none. */
uint64_t carried_most(void);
/* The messages that all members have together. */
int64_t carried(const struct options *o);
/* What a worker or server does with its channels. Its node is closed if somebody was to be lost. */
void carry(const struct options *o, struct board *board, struct row *row,
           fs_node node, int member);

#endif
