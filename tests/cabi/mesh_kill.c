/* Kills members of a cluster and starts them again, or runs a command. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "mesh.h"

/* The turn that is under way. */
static struct {
  int runs[MEMBERS];
  int victim;    /* -1: none */
  int64_t since; /* exchanges and barriers count that end later */
} turn;

static uint64_t state;

/* A number from 0 to n - 1. */
static int draw(int n) {
  state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (int)((state >> 33) % (uint64_t)n);
}

/* Everybody has made an exchange with the present run of each peer, and all have
 * met in a barrier. */
static bool is_whole(struct cluster *c) {
  for (int i = 1; i < MEMBERS; i++) {
    struct row *r = c->members[i].row;
    if (r->run != turn.runs[i] || r->barrier_at <= turn.since)
      return false;
    for (int peer = 1; peer < MEMBERS; peer++)
      if (are_peers(i, peer) && r->met[peer] != turn.runs[peer])
        return false;
  }
  return true;
}

/* Every peer of the victim has had an error that names it. */
static bool all_know(struct cluster *c) {
  for (int i = 1; i < MEMBERS; i++)
    if (are_peers(i, turn.victim) && !c->members[i].row->lost[turn.victim])
      return false;
  return true;
}

static void forget(struct cluster *c) {
  for (int i = 1; i < MEMBERS; i++)
    for (int peer = 0; peer < MEMBERS; peer++)
      c->members[i].row->lost[peer] = c->members[i].row->met[peer] = 0;
}

/* kill -9 of one, who is started again once its peers know, or after a while. */
static bool kill_one(struct cluster *c) {
  struct process gone;
  forget(c);
  turn.victim = 1 + draw(MEMBERS - 1);
  gone = c->members[turn.victim];
  kill(gone.pid, SIGKILL);
  c->kills++;
  if (c->board->wait)
    nap(draw(3) * 100 * MS);
  else if (!wait_until(c, all_know, turn.victim, "not everybody knows"))
    return false;
  while (!has_ended(&gone))
    nap(MS);
  if (!WIFSIGNALED(gone.status)) {
    fprintf(stderr, "mesh: %s has ended by itself\n", name_of(turn.victim));
    c->ends++;
    return false;
  }
  turn.since = fs_now();
  start(c, turn.victim, ++turn.runs[turn.victim]);
  return true;
}

static bool run_command(struct cluster *c) {
  char pids[MEMBERS * 12] = "";
  for (int i = 0, at = 0; i < MEMBERS; i++)
    at += sprintf(pids + at, "%d ", c->members[i].pid);
  setenv("PIDS", pids, 1);
  const int status = system(c->o->command);
  if (status != 0) {
    fprintf(stderr, "mesh: status %d of: %s\n", status, c->o->command);
    c->ends++;
    return false;
  }
  c->kills++;
  forget(c);
  turn.since = fs_now();
  return true;
}

bool run_commands(struct cluster *c) {
  state = (uint64_t)c->o->seed;
  for (int64_t i = 0; i < c->o->times; i++) {
    nap(draw(600) * MS);
    if (!run_command(c))
      return false;
  }
  return true;
}

/* With --verbose, how long something has taken. */
static void say(const struct cluster *c, const char *what, int64_t since) {
  if (c->o->verbose)
    printf("mesh: %s: %s after %.3f s\n", c->board->wait ? "wait" : "raise",
           what, (double)(fs_now() - since) / 1e9);
}

static bool disturb_one(struct cluster *c) {
  const bool kills = c->o->mode == KILL;
  char what[64];
  nap(draw(200) * MS);
  if (!(kills ? kill_one(c) : run_command(c)))
    return false;
  if (!wait_until(c, is_whole, -1, "not everybody has met everybody again"))
    return false;
  snprintf(what, sizeof(what), "%s, all are back",
           kills ? name_of(turn.victim) : "command");
  say(c, what, turn.since);
  return true;
}

/* One cluster, whose calls raise or wait. */
static bool disturb_cluster(struct cluster *c, int wait, int64_t times) {
  int64_t since = fs_now();
  c->board->wait = wait;
  turn.since = 0;
  for (int i = 0; i < MEMBERS; i++)
    turn.runs[i] = 1;
  bool good =
      start_all(c) && wait_until(c, is_whole, -1, "not everybody has met");
  say(c, "all have met", since);
  while (good && times-- > 0)
    good = disturb_one(c);
  since = fs_now();
  c->board->quit = 1;
  good = good && wait_left(c);
  end_all(c, c->hangs != 0);
  say(c, "all have ended", since);
  return good;
}

/* Half of the times calls raise, half of the times they wait. */
void disturb_all(struct cluster *c) {
  const int64_t waits = c->o->times / 2;
  state = (uint64_t)c->o->seed;
  if (disturb_cluster(c, 0, c->o->times - waits) && waits > 0)
    disturb_cluster(c, 1, waits);
}
