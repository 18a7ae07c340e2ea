/* What the programs of tests/softroce share: one end of a reliable connected queue pair on a named
 * device. Every failure that a program does not ask for ends it with a message and status 1. */
#ifndef FSERVER_TESTS_SOFTROCE_RDMA_H
#define FSERVER_TESTS_SOFTROCE_RDMA_H

#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>

/* What one end has to know of the other. */
struct address {
  uint32_t qp_number;
  uint32_t rkey;
  uint64_t memory;
  union ibv_gid gid;
};

struct end {
  const char *device;
  int gid_index;
  uint32_t depth; /* work requests that each queue takes */
  struct ibv_context *context;
  struct ibv_pd *pd;
  struct ibv_comp_channel *channel;
  struct ibv_cq *cq;
  struct ibv_qp *qp;
  struct ibv_mr *mr;
  char *memory; /* registered for the peer's writes */
  size_t bytes;
};

/* How long a sender goes on. rxe never gives up with 7 retries. */
struct patience {
  uint8_t retries;     /* of packets that nobody acknowledges */
  uint8_t rnr_retries; /* while the peer has posted no receive; 7 is for ever */
};

#define GID_IPV4                                                               \
  1 /* its index on rxe: RoCE v2 over the interface's first IPv4 address */

_Noreturn void die(const char *format, ...)
    __attribute__((format(printf, 1, 2)));
double now(void); /* seconds */
void nap(double seconds);
void pin(int processor); /* this process, where there is such a processor */

/* Opens the device, and makes a queue pair in INIT and registered memory. */
void end_open(struct end *end, const char *device, int gid_index,
              uint32_t depth, size_t bytes);
struct address end_address(const struct end *end);
void end_connect(struct end *end, const struct address *peer,
                 struct patience patience);
void end_close(struct end *end);
/* Replaces a queue pair, for example one in the error state. */
void end_renew(struct end *end);
enum ibv_qp_state end_state(const struct end *end);
void end_to_error(struct end *end);

/* Posts a receive of `bytes` at `offset` of the end's memory. */
void post_receive(struct end *end, uint64_t id, size_t offset, uint32_t bytes);
/* Posts one signalled write; returns what ibv_post_send returned. */
int post_write(struct end *end, uint64_t id, size_t offset, uint32_t bytes,
               uint64_t to, uint32_t rkey);
int post_send(struct end *end, uint64_t id, size_t offset, uint32_t bytes);
/* Polls until there is a completion, for at most `seconds`; returns whether there was one. */
int wait_completion(struct end *end, struct ibv_wc *wc, double seconds);

#endif
