// The functions of libibverbs, and whether they are built in.
#ifndef CS_VERBS_TABLE_H
#define CS_VERBS_TABLE_H

#include "cs_verbs.h"

#if defined(__has_include) && !defined(CS_VERBS_ABSENT)
#if __has_include(<infiniband/verbs.h>)
#define CS_VERBS_BUILT_IN 1
#endif
#endif

#ifdef CS_VERBS_BUILT_IN
#include <errno.h>
#include <infiniband/verbs.h>

// X(field, symbol, result, arguments). Calls that verbs.h makes through the
// context of a device (post_send, poll_cq, alloc_td and so on) need no entry.
#define CS_IB_TABLE(X)                                                         \
  X(get_device_list, "ibv_get_device_list", struct ibv_device **, (int *))     \
  X(free_device_list, "ibv_free_device_list", void, (struct ibv_device **))    \
  X(open_device, "ibv_open_device", struct ibv_context *,                      \
    (struct ibv_device *))                                                     \
  X(close_device, "ibv_close_device", int, (struct ibv_context *))             \
  X(query_device, "ibv_query_device", int,                                     \
    (struct ibv_context *, struct ibv_device_attr *))                          \
  X(query_port, "ibv_query_port", int,                                         \
    (struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *))           \
  X(query_gid_ex, "_ibv_query_gid_ex", int,                                    \
    (struct ibv_context *, uint32_t, uint32_t, struct ibv_gid_entry *,         \
     uint32_t, size_t))                                                        \
  X(get_async_event, "ibv_get_async_event", int,                               \
    (struct ibv_context *, struct ibv_async_event *))                          \
  X(ack_async_event, "ibv_ack_async_event", void, (struct ibv_async_event *))  \
  X(alloc_pd, "ibv_alloc_pd", struct ibv_pd *, (struct ibv_context *))         \
  X(dealloc_pd, "ibv_dealloc_pd", int, (struct ibv_pd *))                      \
  X(reg_mr, "ibv_reg_mr_iova2", struct ibv_mr *,                               \
    (struct ibv_pd *, void *, size_t, uint64_t, unsigned))                     \
  X(dereg_mr, "ibv_dereg_mr", int, (struct ibv_mr *))                          \
  X(create_comp_channel, "ibv_create_comp_channel", struct ibv_comp_channel *, \
    (struct ibv_context *))                                                    \
  X(destroy_comp_channel, "ibv_destroy_comp_channel", int,                     \
    (struct ibv_comp_channel *))                                               \
  X(create_cq, "ibv_create_cq", struct ibv_cq *,                               \
    (struct ibv_context *, int, void *, struct ibv_comp_channel *, int))       \
  X(destroy_cq, "ibv_destroy_cq", int, (struct ibv_cq *))                      \
  X(get_cq_event, "ibv_get_cq_event", int,                                     \
    (struct ibv_comp_channel *, struct ibv_cq **, void **))                    \
  X(ack_cq_events, "ibv_ack_cq_events", void, (struct ibv_cq *, unsigned))     \
  X(create_qp, "ibv_create_qp", struct ibv_qp *,                               \
    (struct ibv_pd *, struct ibv_qp_init_attr *))                              \
  X(modify_qp, "ibv_modify_qp", int,                                           \
    (struct ibv_qp *, struct ibv_qp_attr *, int))                              \
  X(destroy_qp, "ibv_destroy_qp", int, (struct ibv_qp *))

struct cs_ib_table {
#define CS_IB_FIELD(field, symbol, result, arguments) result(*field) arguments;
  CS_IB_TABLE(CS_IB_FIELD)
#undef CS_IB_FIELD
};

extern struct cs_ib_table cs_ib; /* after cs_ib_open */

// What libmlx5 adds for its devices; NULL where the system has none.
struct cs_mlx5_table {
  bool (*is_supported)(struct ibv_device *);
  int (*modify_qp_lag_port)(struct ibv_qp *, uint8_t);
};

extern struct cs_mlx5_table cs_mlx5; /* after cs_ib_open */

// What rdma-core 34 added; NULL in 33.
struct cs_dma_buf_table {
  struct ibv_mr *(*reg_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int,
                           int);
};

extern struct cs_dma_buf_table cs_dma_buf; /* after cs_ib_open */

struct cs_ib_device {
  struct ibv_context *context;
  struct ibv_pd *pd;     /* of all memory */
  struct ibv_td *td;     /* or NULL */
  struct ibv_pd *parent; /* of queue pairs; pd where there is no td */
};

struct cs_ib_queue { /* a cs_ib_cq points to it */
  struct ibv_cq *cq;
  struct ibv_comp_channel *channel;
};

// The errno of a call that has failed, which some providers forget to set.
static inline int cs_ib_errno(void) { return errno ? errno : EIO; }

// Makes a descriptor non-blocking.
int cs_ib_nonblocking(int fd);
#endif

#endif
