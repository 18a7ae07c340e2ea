/* What a device does where the design of a transport depends on it, one fact after the other.
 *
 *   facts [--list] [FACT...]       without names: all
 *
 * Each prints what happened. Where a transport needs a certain outcome, another one is a failure: the program
 * ends with status 1. Figures in milliseconds are reported, not judged. The devices are rxe0 and rxe1.
 */
#define _GNU_SOURCE
#include "facts.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct end a, b;
static const char *fact;
int failures;

void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  printf("%-14s ", fact);
  vprintf(format, arguments);
  va_end(arguments);
  printf("\n");
  fflush(stdout);
}

void want(int holds, const char *what) {
  if (!holds) {
    failures++;
    say("FAILED: %s", what);
  }
}

void join_with(struct patience patience) {
  struct address of_a = end_address(&a), of_b = end_address(&b);
  end_connect(&a, &of_b, patience);
  end_connect(&b, &of_a, patience);
}

void open_both(int gid_index) {
  end_open(&a, "rxe0", gid_index, DEPTH, BYTES);
  end_open(&b, "rxe1", gid_index, DEPTH, BYTES);
}

void close_both(void) {
  end_close(&a);
  end_close(&b);
}

void start(void) {
  open_both(GID_IPV4);
  join_with(usual);
}

const char *state_of(const struct end *end) {
  static const char *const names[] = {"RESET", "INIT", "RTR", "RTS",
                                      "SQD",   "SQE",  "ERR"};
  enum ibv_qp_state state = end_state(end);
  return state <= IBV_QPS_ERR ? names[state] : "unknown";
}

int outcome(struct end *end, double seconds, double *took) {
  struct ibv_wc wc = {0};
  double begin = now();
  int came = wait_completion(end, &wc, seconds);
  if (took != NULL)
    *took = (now() - begin) * 1e3;
  return came ? (int)wc.status : -1;
}

const char *status_name(int status) {
  return status < 0 ? "no completion" : ibv_wc_status_str(status);
}

void say_events(const struct end *end) {
  struct ibv_async_event event;
  int n = 0;
  fcntl(end->context->async_fd, F_SETFL,
        fcntl(end->context->async_fd, F_GETFL) | O_NONBLOCK);
  while (ibv_get_async_event(end->context, &event) == 0) {
    say("%s: asynchronous event: %s", end->device,
        ibv_event_type_str(event.event_type));
    ibv_ack_async_event(&event);
    n++;
  }
  if (n == 0)
    say("%s: no asynchronous event", end->device);
}

static long long counter(const char *name) {
  char path[128];
  long long value = -1;
  snprintf(path, sizeof path, "/sys/class/net/%s", name);
  FILE *file = fopen(path, "r");
  if (file != NULL && fscanf(file, "%lld", &value) != 1)
    value = -1;
  if (file != NULL)
    fclose(file);
  return value;
}

static void device(void) {
  struct ibv_device_attr attributes;
  open_both(GID_IPV4);
  if (ibv_query_device(a.context, &attributes) != 0)
    die("ibv_query_device");
  say("work requests of a queue %d, entries of a completion queue %d, parts of "
      "a request %d, queue pairs %d",
      attributes.max_qp_wr, attributes.max_cqe, attributes.max_sge,
      attributes.max_qp);
  struct ibv_td_init_attr none = {0};
  struct ibv_td *td = ibv_alloc_td(a.context, &none);
  say("thread domain (for a parent domain): %s",
      td != NULL ? "made" : strerror(errno));
  if (td != NULL)
    ibv_dealloc_td(td);
  struct ibv_qp_init_attr with_inline = {.send_cq = a.cq,
                                         .recv_cq = a.cq,
                                         .qp_type = IBV_QPT_RC,
                                         .cap = {.max_send_wr = 8,
                                                 .max_recv_wr = 8,
                                                 .max_send_sge = 1,
                                                 .max_recv_sge = 1,
                                                 .max_inline_data = 64}};
  struct ibv_qp *qp = ibv_create_qp(a.pd, &with_inline);
  say("queue pair with 64 bytes inline: %s, says %u",
      qp != NULL ? "made" : strerror(errno), with_inline.cap.max_inline_data);
  if (qp != NULL)
    ibv_destroy_qp(qp);
  close_both();
}

/* One write by the GID of this index; its bytes have to leave by the interface. */
static void one_write(const char *name, int gid_index, int needed) {
  double took;
  open_both(gid_index);
  join_with(usual);
  long long before = counter("rdma0/statistics/tx_bytes");
  memset(a.memory, 0x5a, HALF);
  double begin = now();
  post_write(&a, 1, 0, HALF, (uintptr_t)b.memory, b.mr->rkey);
  double posted = now() - begin;
  int status = outcome(&a, 20, &took);
  int equal = memcmp(a.memory, b.memory, HALF) == 0;
  say("GID %d (%s): %s, ibv_post_send took %.1f ms and the completion %.1f ms "
      "more; bytes %s, rdma0 sent %lld bytes for %d",
      gid_index, name, status_name(status), posted * 1e3, took,
      equal ? "equal" : "differ", counter("rdma0/statistics/tx_bytes") - before,
      HALF);
  if (needed) {
    want(status == IBV_WC_SUCCESS && equal, "a write has to arrive whole");
    want(counter("rdma0/statistics/tx_bytes") - before > HALF,
         "the write has to travel over the interface");
  }
  close_both();
}

static void gids(void) {
  one_write("link-local IPv6", 0, 0);
  one_write("IPv4", 1, 1);
  one_write("global IPv6", 2, 1);
}

static void flush(void) {
  enum { N = 16 };
  struct ibv_wc wc;
  int in_order = 1, flushed = 0, n = 0;
  start();
  for (int i = 0; i < N; i++)
    post_receive(&a, (uint64_t)i, 0, 64);
  double begin = now();
  end_to_error(&a);
  double changed = (now() - begin) * 1e3;
  for (; n < N && wait_completion(&a, &wc, 5); n++) {
    flushed += wc.status == IBV_WC_WR_FLUSH_ERR;
    in_order &= wc.wr_id == (uint64_t)n;
  }
  say("%d posted receives: to ERR took %.2f ms, %d flushed, %s order, the last "
      "%.2f ms after",
      N, changed, flushed, in_order ? "in" : "not in", (now() - begin) * 1e3);
  want(flushed == N, "each posted receive has to be flushed");
  int error = post_send(&a, 77, 0, 64);
  say("a send posted in ERR: ibv_post_send %s, completion: %s",
      error == 0 ? "takes it" : strerror(error),
      status_name(outcome(&a, 2, NULL)));
  struct ibv_recv_wr receive = {.wr_id = 78}, *bad;
  error = ibv_post_recv(a.qp, &receive, &bad);
  say("a receive posted in ERR: ibv_post_recv %s, completion: %s",
      error == 0 ? "takes it" : strerror(error),
      status_name(outcome(&a, 2, NULL)));
  close_both();
}

static int readable(struct end *end, int milliseconds) {
  struct pollfd fd = {.fd = end->channel->fd, .events = POLLIN};
  return poll(&fd, 1, milliseconds) == 1;
}

static void take_event(struct end *end) {
  struct ibv_cq *cq;
  void *context;
  if (ibv_get_cq_event(end->channel, &cq, &context) != 0)
    die("ibv_get_cq_event");
  ibv_ack_cq_events(cq, 1);
}

static void arming(void) {
  struct ibv_wc wc;
  start();
  for (int i = 0; i < 4; i++)
    post_receive(&b, (uint64_t)i, 0, 64);
  post_send(&a, 1, 0, 64);
  outcome(&a, 5, NULL);
  nap(0.2);
  ibv_req_notify_cq(b.cq, 0);
  int before = readable(&b, 500);
  say("a completion that was there before ibv_req_notify_cq: %s",
      before ? "an event" : "no event, so poll after arming");
  while (before && readable(&b, 0))
    take_event(&b);
  post_send(&a, 2, 0, 64);
  int after = readable(&b, 2000);
  say("the first completion after it: %s", after ? "an event" : "no event");
  want(before || after, "arming has to wake");
  if (after)
    take_event(&b);
  post_send(&a, 3, 0, 64);
  say("the next one, not armed again: %s",
      readable(&b, 500) ? "an event" : "no event");
  int n = 0;
  while (wait_completion(&b, &wc, 0.2))
    n++;
  say("completions then: %d of 3", n);
  want(n == 3, "no completion may be lost");
  close_both();
}

static const struct {
  const char *name;
  void (*show)(void);
} facts[] = {
    {"device", device},         {"gids", gids},
    {"wrong-key", wrong_key},   {"out-of-bounds", out_of_bounds},
    {"no-receive", no_receive}, {"end-of-peer", end_of_peer},
    {"deregister", deregister}, {"killed-peer", killed_peer},
    {"flush", flush},           {"arming", arming},
    {"link-down", link_down},   {"memlock", memlock},
};
#define FACTS (sizeof facts / sizeof *facts)

static int run(const char *name) {
  int found = 0;
  for (size_t i = 0; i < FACTS; i++)
    if (name == NULL || strcmp(facts[i].name, name) == 0) {
      fact = facts[i].name;
      facts[i].show();
      found = 1;
    }
  return found;
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "--list") == 0) {
    for (size_t i = 0; i < FACTS; i++)
      puts(facts[i].name);
    return 0;
  }
  for (int i = 1; i < argc; i++)
    if (!run(argv[i]))
      die("facts: %s: no such fact (facts --list)", argv[i]);
  if (argc < 2)
    run(NULL);
  return failures != 0;
}
