/* A libibverbs for tests: devices whose queue pairs talk inside one process, by
 * memory copies made in ibv_post_send. It keeps to the rules of a NIC where users
 * can break them: keys, bounds, states, packet numbers, room in queues, receiver
 * not ready, flushing. What is injected is set through fake_*, at the end. */
#ifndef FAKE_VERBS_H
#define FAKE_VERBS_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>

enum { DEVICES = 4, SGES = 32, GIDS = 6 };

struct context {
  int device; /* its number */
  int pipe[2];
  int objects; /* that are to be gone before it closes */
  struct context *next;
  struct verbs_context v; /* the last */
};

struct pd {
  struct ibv_pd pd;
  int users;
  struct pd *of; /* a parent domain's */
};

struct td {
  struct ibv_td td;
};

/* Memory of a GPU, which the CPU sees at alias. */
struct piece {
  uint64_t start, alias, length;
};

struct mr {
  struct ibv_mr mr;
  uint64_t start;
  unsigned access;
  int pieces; /* of a GPU's memory; 0: it is the host's */
  int peer;   /* by peer memory, so it ends when the memory is freed */
  int freed;
  struct piece *piece;
  struct mr *next;
};

/* A write to a GPU that has not reached its memory. */
struct late {
  struct mr *mr;
  uint64_t at, length;
  struct late *next;
  char bytes[];
};

struct cqe {
  struct ibv_wc wc;
  struct qp *qp;    /* NULL once that is destroyed */
  uint64_t retires; /* requests of the queue that are over with it */
};

struct cq {
  struct ibv_cq cq;
  struct cqe *ring;
  uint64_t head, tail;
  int armed, dead, users;
};

struct channel {
  struct ibv_comp_channel channel;
  int in;
};

struct sent {
  uint64_t id, remote, bytes;
  uint32_t rkey;
  int op, signaled, count;
  struct ibv_sge sges[SGES];
  void *inlined;
};

struct qp {
  struct ibv_qp qp;
  struct ibv_qp_cap cap;
  unsigned access;
  uint32_t peer, rq_psn, sq_psn;
  uint8_t gid[16];
  uint32_t flow;
  int retries, lag;          /* the port of a bond; 0: not chosen */
  struct sent *sends;        /* ring of cap.max_send_wr */
  struct ibv_recv_wr *recvs; /* ring of cap.max_recv_wr */
  struct ibv_sge *to;
  uint64_t posted, done, retired; /* sends: taken, executed, polled */
  uint64_t given, used, freed;    /* receives, likewise */
  struct qp *next;
};

/* fake.c, all under the lock */
extern struct context *contexts;
extern struct mr *mrs;
extern int opt_hold;
extern long opt_patient, opt_late, opt_devices, opt_inline, opt_mute, opt_qps,
    opt_wr, opt_lag, opt_ib, opt_away, opt_ports;
struct context *of(struct ibv_context *c);
int injected(const char *call);
int gone(struct ibv_context *c);
int injected_status(int op);
void notify(struct ibv_context *c, enum ibv_event_type type, void *element,
            int port);
void count(const char *name, long by);
long *counter(const char *name);
void take_back(struct qp *q);
int gid_of(int device, int index, struct ibv_gid_entry *entry);

/* Fails a call: with what is injected, or because the device is gone. */
#define MAY_FAIL(call, context, fails)                                         \
  do {                                                                         \
    int error_ = injected(call);                                               \
    if (!error_ && (context) && gone(context))                                 \
      error_ = EIO;                                                            \
    if (error_) {                                                              \
      unlock();                                                                \
      errno = error_;                                                          \
      return fails;                                                            \
    }                                                                          \
  } while (0)

/* pair.c, likewise */
extern struct qp *qps;
struct qp *find_qp(uint32_t number);

/* gpu.c, likewise */
int peer_pieces(uint64_t start, uint64_t length, struct mr *m);
int dma_buf_pieces(int fd, uint64_t offset, uint64_t length, struct mr *m);
int seen(void *addr, size_t length);
void copy_in(struct mr *m, uint64_t at, const char *from, uint64_t n);
void copy_out(struct mr *m, uint64_t at, char *to, uint64_t n);
void put_off(struct mr *m, uint64_t at, char *from, uint64_t n);
void arrive(struct mr *m);

/* move.c */
void complete(struct qp *q, struct cq *cq, struct ibv_wc wc, uint64_t retires);
void end(struct qp *q);
void run(struct qp *q);
int post_send(struct ibv_qp *q, struct ibv_send_wr *w,
              struct ibv_send_wr **bad);
int post_recv(struct ibv_qp *q, struct ibv_recv_wr *w,
              struct ibv_recv_wr **bad);
int poll_cq(struct ibv_cq *c, int room, struct ibv_wc *wc);
int arm_cq(struct ibv_cq *c, int solicited);
void lock(void);
void unlock(void);

#endif
