// RDMA verbs: libibverbs, opened at run time. The headers come from
// libibverbs-dev. Without them this folder builds as "not built in": then
// cs_ib_open fails with the reason and every other call returns ENOSYS.
//
// Every call returns 0 or an errno. What a call gives back goes through its last
// pointers, which are unchanged when it fails. Calls on the hot path take arrays
// and return counts: cs_ib_post_send, cs_ib_post_recv and cs_ib_poll do not
// block, allocate or enter the kernel on a NIC that is driven from user space.
//
// The thread rule is that of a thread domain: one thread at a time may be inside
// cs_ib_post_send and cs_ib_post_recv for all queue pairs of a device, because
// they take no lock where the device can do without. Every other call is safe
// from any thread at any time.
//
// This is mechanism only: no policy, no threads, no logging, no state but the
// table of the library's functions.
#ifndef CS_VERBS_H
#define CS_VERBS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cs_ib_device cs_ib_device; /* an open device and its domains */
typedef struct cs_ib_mr cs_ib_mr;
/* Addresses as numbers. cgo checks a pointer to an unknown type at each call,
   and these are for the hot path. */
typedef uintptr_t cs_ib_cq; /* with a completion channel */
typedef uintptr_t cs_ib_qp; /* reliable connected */

typedef struct {
  char name[64];
} cs_ib_name;

typedef struct {
  uint64_t max_mr; /* bytes of one registration; 0: any */
  int32_t max_qp, max_cqe, ports;
  int32_t fd;     /* non-blocking, readable when cs_ib_async has an event */
  bool lock_free; /* posting takes no lock of the library */
} cs_ib_facts;

typedef struct {
  int32_t mtu;  /* bytes that one packet carries at most now */
  int32_t gids; /* length of the GID table */
  int32_t lid;  /* InfiniBand */
  bool active;
  bool ethernet; /* RoCE; else InfiniBand */
  bool global;   /* each way is by GID: Ethernet, or the port requires it */
} cs_ib_port;

enum { CS_IB_GID_IB = 0, CS_IB_GID_ROCE_V1 = 1, CS_IB_GID_ROCE_V2 = 2 };

typedef struct {
  uint8_t gid[16];
  int32_t index;
  int32_t type; /* CS_IB_GID_* */
  int32_t link; /* index of its network interface, or 0 */
} cs_ib_gid;

enum { /* of cs_ib_register, joined by | */
       CS_IB_LOCAL_WRITE = 1,
       CS_IB_REMOTE_WRITE = 2,
       CS_IB_RELAXED_ORDERING = 4, /* where the device knows it */
       CS_IB_REMOTE_READ = 8,
};

typedef struct {
  int32_t send, recv;
  int32_t port;    /* from 1 */
  int32_t inlined; /* bytes that one request may carry by itself */
  bool readable;   /* the peer will be able to read, and not to write */
} cs_ib_room;

typedef struct { /* to the peer's queue pair */
  uint8_t gid[16];
  uint32_t qp, psn;       /* the peer's */
  uint32_t own_psn;       /* ours */
  int32_t gid_index, mtu; /* ours; mtu in bytes */
  int32_t lid;            /* the peer's, on InfiniBand */
  uint32_t flow;          /* 20 bits, from which RoCE makes the UDP source
                             port; 0: the device chooses */
  int32_t port;           /* ours, from 1 */
  uint8_t timeout, retries, not_ready_retries;
  uint8_t traffic_class; /* with global */
  uint8_t service_level;
  bool global; /* the way is by GID */
} cs_ib_path;

enum { CS_IB_SEND = 1, CS_IB_WRITE = 2, CS_IB_READ = 3 };
enum { /* joined by | */
       CS_IB_SIGNALED = 1,
       CS_IB_INLINE = 2, /* post_send copies the bytes, which the CPU reads; no
                            lkey is needed */
};

typedef struct {
  uint64_t address;
  uint32_t bytes, lkey;
} cs_ib_sge;

typedef struct {
  uint64_t id;
  uint64_t remote; /* the address at the peer, of a write or a read */
  uint32_t rkey;
  uint8_t op; /* CS_IB_SEND, CS_IB_WRITE, CS_IB_READ */
  uint8_t flags;
  cs_ib_sge from; /* of a read: where it goes. Nothing else is looked at if it
                     has no bytes */
} cs_ib_wr;

typedef struct {
  uint64_t id;
  cs_ib_sge to;
} cs_ib_recv;

// So many requests go to the device at once, with one doorbell.
enum { CS_IB_CHAIN = 64 };

typedef struct { /* as ibv_wc */
  uint64_t id;
  uint32_t status; /* IBV_WC_*: 0 is success */
  uint32_t unused[2];
  uint32_t bytes; /* of a receive */
  uint32_t unused2;
  uint32_t qp; /* number of our queue pair */
  uint32_t unused3[4];
} cs_ib_wc;

typedef struct {
  int32_t type; /* IBV_EVENT_* */
  uint32_t qp;  /* number of the queue pair of events 1 to 3, else 0 */
} cs_ib_event;

// Opens the library that path names. The first call that succeeds counts for the
// process; another path fails from then on. NULL or empty is the one that is
// open, or else libibverbs.so.1.
int cs_ib_open(const char *path, char *why, size_t room);

// The calls. cs_table.c defines them all where the headers are missing.
//
// cs_ib_list            names at most room devices and says how many there are
// cs_ib_device_open     opens a device; cs_ib_device_close needs all else closed
// cs_ib_gids            names at most room valid entries of the GID table
// cs_ib_async           takes one event, EAGAIN if there is none
// cs_ib_register        pins memory and makes it known to the device; may block
// cs_ib_dma_buf         0 if the device takes descriptors of memory of others;
//                       EOPNOTSUPP if its driver does not, ENOSYS if the library
// cs_ib_register_dma_buf  cs_ib_register of the bytes at offset of a dma-buf, which
//                       requests name from address on. Both have the same place in a
//                       page. The descriptor stays the caller's
// cs_ib_cq_create       makes a queue of at least entries, and says how many; fd
//                       is non-blocking, readable after cs_ib_arm and a
//                       completion
// cs_ib_arm             asks for one event when the next completion comes
// cs_ib_quiet           takes the events that have come, and says how many
// cs_ib_qp_create       makes a queue pair of a port whose both queues complete on
//                       cq; room is what is wanted, and then what there is. Receives may
//                       be posted. The peer will be able to write
// cs_ib_qp_connect      joins it to the peer's: both directions may be used
// cs_ib_qp_lag_port     has a connected queue pair send over one port, from 1, of
//                       a bonded mlx5 NIC; EOPNOTSUPP where it is not that
// cs_ib_qp_error        to ERR: what is posted completes with status 5
// cs_ib_qp_destroy      may block; completions that are not polled are dropped
// cs_ib_post_send       hands 1 to CS_IB_CHAIN requests over in order, and says
//                       how many; the rest of an error was not taken
// cs_ib_post_recv       likewise for receives
// cs_ib_poll            says how many completions there were, at most room
#define CS_IB_CALLS(X)                                                         \
  X(cs_ib_list, (cs_ib_name * names, int room, int *count))                    \
  X(cs_ib_device_open,                                                         \
    (const char *name, cs_ib_device **device, cs_ib_facts *facts))             \
  X(cs_ib_device_close, (cs_ib_device * device))                               \
  X(cs_ib_port_of, (cs_ib_device * device, int number, cs_ib_port *port))      \
  X(cs_ib_gids,                                                                \
    (cs_ib_device * device, int port, cs_ib_gid *gids, int room, int *count))  \
  X(cs_ib_async, (cs_ib_device * device, cs_ib_event * event))                 \
  X(cs_ib_register,                                                            \
    (cs_ib_device * device, uint64_t address, uint64_t bytes, int access,      \
     cs_ib_mr **mr, uint32_t *lkey, uint32_t *rkey))                           \
  X(cs_ib_dma_buf, (cs_ib_device * device))                                    \
  X(cs_ib_register_dma_buf, (cs_ib_device * device, int fd, uint64_t offset,   \
                             uint64_t bytes, uint64_t address, int access,     \
                             cs_ib_mr **mr, uint32_t *lkey, uint32_t *rkey))   \
  X(cs_ib_deregister, (cs_ib_mr * mr))                                         \
  X(cs_ib_cq_create,                                                           \
    (cs_ib_device * device, int *entries, cs_ib_cq *cq, int *fd))              \
  X(cs_ib_cq_destroy, (cs_ib_cq cq))                                           \
  X(cs_ib_arm, (cs_ib_cq cq))                                                  \
  X(cs_ib_quiet, (cs_ib_cq cq, int *count))                                    \
  X(cs_ib_qp_create, (cs_ib_device * device, cs_ib_cq cq, cs_ib_room * room,   \
                      cs_ib_qp * qp, uint32_t *number))                        \
  X(cs_ib_qp_connect, (cs_ib_qp qp, const cs_ib_path *path))                   \
  X(cs_ib_qp_lag_port, (cs_ib_qp qp, int port))                                \
  X(cs_ib_qp_error, (cs_ib_qp qp))                                             \
  X(cs_ib_qp_destroy, (cs_ib_qp qp))                                           \
  X(cs_ib_post_send,                                                           \
    (cs_ib_qp qp, const cs_ib_wr *requests, int count, int *posted))           \
  X(cs_ib_post_recv,                                                           \
    (cs_ib_qp qp, const cs_ib_recv *receives, int count, int *posted))         \
  X(cs_ib_poll, (cs_ib_cq cq, cs_ib_wc * completions, int room, int *count))

#define CS_IB_DECLARE(name, arguments) int name arguments;
CS_IB_CALLS(CS_IB_DECLARE)
#undef CS_IB_DECLARE

#endif
