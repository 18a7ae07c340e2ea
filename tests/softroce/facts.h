/* What the facts share (facts.c). */
#ifndef FSERVER_TESTS_SOFTROCE_FACTS_H
#define FSERVER_TESTS_SOFTROCE_FACTS_H

#include "rdma.h"

enum { DEPTH = 64, BYTES = 4 << 20, HALF = BYTES / 2 };
static const struct patience usual = {.retries = 6, .rnr_retries = 6};
extern struct end a, b; /* on rxe0 and on rxe1 */
extern int failures;

/* Prints a line of the fact that is being shown. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Counts a failure, and prints it, if something does not hold. */
void want(int holds, const char *what);

void open_both(int gid_index);
void join_with(struct patience patience);
void start(void); /* opens and joins both as usual */
void close_both(void);
const char *state_of(const struct end *end);
/* Waits for the next completion; returns its status, or -1 if none came. */
int outcome(struct end *end, double seconds, double *milliseconds);
const char *status_name(int status);
/* Names the asynchronous events that a device has had. */
void say_events(const struct end *end);

/* facts_faults.c */
void wrong_key(void);
void out_of_bounds(void);
void no_receive(void);
void end_of_peer(void);
void deregister(void);
void killed_peer(void);
void link_down(void);
void memlock(void);

#endif
