#include "cs_table.h"

#ifdef CS_VERBS_BUILT_IN

#include <errno.h>
#include <stdlib.h>
#include <string.h>

// The queue keeps its lock, also where queue pairs have none: ibv_destroy_qp
// takes it to remove completions, and may run beside a poll.
int cs_ib_cq_create(cs_ib_device *d, int *entries, cs_ib_cq *cq, int *fd) {
  int rc = 0;
  struct cs_ib_queue *q = calloc(1, sizeof *q);
  if (!q)
    return ENOMEM;
  errno = 0;
  q->channel = cs_ib.create_comp_channel(d->context);
  if (!q->channel) {
    rc = cs_ib_errno();
    free(q);
    return rc;
  }
  rc = cs_ib_nonblocking(q->channel->fd);
  errno = 0;
  if (!rc &&
      !(q->cq = cs_ib.create_cq(d->context, *entries, NULL, q->channel, 0)))
    rc = cs_ib_errno();
  if (rc) {
    cs_ib.destroy_comp_channel(q->channel);
    free(q);
    return rc;
  }
  *entries = q->cq->cqe;
  *fd = q->channel->fd;
  *cq = (cs_ib_cq)q;
  return 0;
}

static struct cs_ib_queue *queue(cs_ib_cq cq) {
  return (struct cs_ib_queue *)cq;
}

int cs_ib_cq_destroy(cs_ib_cq cq) {
  struct cs_ib_queue *q = queue(cq);
  int first = cs_ib.destroy_cq(q->cq);
  int rc = cs_ib.destroy_comp_channel(q->channel);
  free(q);
  return first ? first : rc;
}

int cs_ib_arm(cs_ib_cq cq) { return ibv_req_notify_cq(queue(cq)->cq, 0); }

int cs_ib_quiet(cs_ib_cq cq, int *count) {
  struct cs_ib_queue *q = queue(cq);
  struct ibv_cq *from;
  void *context;
  unsigned n = 0;
  errno = 0;
  while (cs_ib.get_cq_event(q->channel, &from, &context) == 0)
    n++;
  int rc = cs_ib_errno();
  if (n)
    cs_ib.ack_cq_events(q->cq, n);
  *count = (int)n;
  return rc == EAGAIN || rc == EINTR ? 0 : rc;
}

int cs_ib_qp_create(cs_ib_device *d, cs_ib_cq cq, cs_ib_room *room,
                    cs_ib_qp *qp, uint32_t *number) {
  struct ibv_qp_init_attr a;
  memset(&a, 0, sizeof a);
  a.send_cq = a.recv_cq = queue(cq)->cq;
  a.qp_type = IBV_QPT_RC;
  a.cap.max_send_wr = (uint32_t)room->send;
  a.cap.max_recv_wr = (uint32_t)room->recv;
  a.cap.max_send_sge = a.cap.max_recv_sge = 1;
  a.cap.max_inline_data = (uint32_t)room->inlined;
  errno = 0;
  struct ibv_qp *q = cs_ib.create_qp(d->parent, &a);
  if (!q)
    return cs_ib_errno();
  struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT,
                             .port_num = (uint8_t)room->port,
                             .qp_access_flags = room->readable
                                                    ? IBV_ACCESS_REMOTE_READ
                                                    : IBV_ACCESS_REMOTE_WRITE};
  int rc = cs_ib.modify_qp(q, &init,
                           IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                               IBV_QP_ACCESS_FLAGS);
  if (rc) {
    cs_ib.destroy_qp(q);
    return rc;
  }
  room->send = (int32_t)a.cap.max_send_wr;
  room->recv = (int32_t)a.cap.max_recv_wr;
  room->inlined = (int32_t)a.cap.max_inline_data;
  *qp = (cs_ib_qp)q;
  *number = q->qp_num;
  return 0;
}

// The enum of an MTU in bytes, the largest that is not above it.
static enum ibv_mtu mtu_of(int bytes) {
  int m = IBV_MTU_256;
  while (m < IBV_MTU_4096 && (128 << (m + 1)) <= bytes)
    m++;
  return (enum ibv_mtu)m;
}

int cs_ib_qp_connect(cs_ib_qp qp, const cs_ib_path *p) {
  struct ibv_qp_attr a;
  memset(&a, 0, sizeof a);
  a.qp_state = IBV_QPS_RTR;
  a.path_mtu = mtu_of(p->mtu);
  a.dest_qp_num = p->qp;
  a.rq_psn = p->psn;
  a.max_dest_rd_atomic = 1;
  a.min_rnr_timer = 12; /* 0.64 ms */
  a.ah_attr.port_num = (uint8_t)p->port;
  a.ah_attr.sl = p->service_level;
  a.ah_attr.dlid = (uint16_t)p->lid;
  if (p->global) {
    a.ah_attr.is_global = 1;
    memcpy(a.ah_attr.grh.dgid.raw, p->gid, sizeof p->gid);
    a.ah_attr.grh.sgid_index = (uint8_t)p->gid_index;
    a.ah_attr.grh.hop_limit = 64;
    a.ah_attr.grh.flow_label = p->flow;
    a.ah_attr.grh.traffic_class = p->traffic_class;
  }
  int rc = cs_ib.modify_qp(
      (struct ibv_qp *)qp, &a,
      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
          IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (rc)
    return rc;
  a.qp_state = IBV_QPS_RTS;
  a.timeout = p->timeout;
  a.retry_cnt = p->retries;
  a.rnr_retry = p->not_ready_retries;
  a.sq_psn = p->own_psn;
  a.max_rd_atomic = 1;
  return cs_ib.modify_qp((struct ibv_qp *)qp, &a,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                             IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                             IBV_QP_MAX_QP_RD_ATOMIC);
}

int cs_ib_qp_lag_port(cs_ib_qp qp, int port) {
  struct ibv_qp *q = (struct ibv_qp *)qp;
  if (!cs_mlx5.modify_qp_lag_port || !cs_mlx5.is_supported(q->context->device))
    return EOPNOTSUPP;
  return cs_mlx5.modify_qp_lag_port(q, (uint8_t)port);
}

int cs_ib_qp_error(cs_ib_qp qp) {
  struct ibv_qp_attr a;
  memset(&a, 0, sizeof a);
  a.qp_state = IBV_QPS_ERR;
  return cs_ib.modify_qp((struct ibv_qp *)qp, &a, IBV_QP_STATE);
}

int cs_ib_qp_destroy(cs_ib_qp qp) {
  return cs_ib.destroy_qp((struct ibv_qp *)qp);
}

_Static_assert(sizeof(cs_ib_sge) == sizeof(struct ibv_sge) &&
                   offsetof(cs_ib_sge, bytes) ==
                       offsetof(struct ibv_sge, length) &&
                   offsetof(cs_ib_sge, lkey) == offsetof(struct ibv_sge, lkey),
               "a cs_ib_sge is an ibv_sge");

int cs_ib_post_send(cs_ib_qp qp, const cs_ib_wr *requests, int count,
                    int *posted) {
  struct ibv_send_wr list[CS_IB_CHAIN], *bad = list;
  *posted = 0;
  if (count < 1 || count > CS_IB_CHAIN)
    return EINVAL;
  for (int i = 0; i < count; i++) {
    struct ibv_send_wr *w = &list[i];
    const cs_ib_wr *f = &requests[i];
    memset(w, 0, sizeof *w);
    w->wr_id = f->id;
    w->next = i + 1 < count ? w + 1 : NULL;
    w->sg_list = (struct ibv_sge *)(uintptr_t)&f->from;
    w->num_sge = f->from.bytes != 0;
    w->opcode = f->op == CS_IB_WRITE  ? IBV_WR_RDMA_WRITE
                : f->op == CS_IB_READ ? IBV_WR_RDMA_READ
                                      : IBV_WR_SEND;
    w->send_flags = f->flags & CS_IB_SIGNALED ? IBV_SEND_SIGNALED : 0;
    w->send_flags |= f->flags & CS_IB_INLINE ? IBV_SEND_INLINE : 0;
    w->wr.rdma.remote_addr = f->remote;
    w->wr.rdma.rkey = f->rkey;
  }
  int rc = ibv_post_send((struct ibv_qp *)qp, list, &bad);
  *posted = rc ? (int)(bad - list) : count;
  return rc;
}

int cs_ib_post_recv(cs_ib_qp qp, const cs_ib_recv *receives, int count,
                    int *posted) {
  struct ibv_recv_wr list[CS_IB_CHAIN], *bad = list;
  *posted = 0;
  if (count < 1 || count > CS_IB_CHAIN)
    return EINVAL;
  for (int i = 0; i < count; i++) {
    list[i].wr_id = receives[i].id;
    list[i].next = i + 1 < count ? &list[i + 1] : NULL;
    list[i].sg_list = (struct ibv_sge *)(uintptr_t)&receives[i].to;
    list[i].num_sge = 1;
  }
  int rc = ibv_post_recv((struct ibv_qp *)qp, list, &bad);
  *posted = rc ? (int)(bad - list) : count;
  return rc;
}

_Static_assert(sizeof(cs_ib_wc) == sizeof(struct ibv_wc) &&
                   offsetof(cs_ib_wc, status) ==
                       offsetof(struct ibv_wc, status) &&
                   offsetof(cs_ib_wc, bytes) ==
                       offsetof(struct ibv_wc, byte_len) &&
                   offsetof(cs_ib_wc, qp) == offsetof(struct ibv_wc, qp_num),
               "a cs_ib_wc is an ibv_wc");

int cs_ib_poll(cs_ib_cq cq, cs_ib_wc *completions, int room, int *count) {
  int n = ibv_poll_cq(queue(cq)->cq, room, (struct ibv_wc *)completions);
  *count = n < 0 ? 0 : n;
  return n == -1 ? EIO : n < 0 ? -n : 0;
}

#endif
