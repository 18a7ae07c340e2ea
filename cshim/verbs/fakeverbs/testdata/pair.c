/* The queue pairs of the fake libibverbs. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>

struct qp *qps;

struct qp *find_qp(uint32_t number) {
  for (struct qp *q = qps; q; q = q->next)
    if (q->qp.qp_num == number)
      return q;
  return NULL;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *v, struct ibv_qp_init_attr *a) {
  /* The device's first that is free: devices use numbers again. */
  uint32_t number = 0x101 + 0x1000 * (uint32_t)of(v->context)->device;
  lock();
  MAY_FAIL("ibv_create_qp", v->context, NULL);
  int rc = a->qp_type != IBV_QPT_RC || a->cap.max_send_wr > opt_wr ||
                   a->cap.max_recv_wr > opt_wr || a->cap.max_send_sge > SGES ||
                   a->cap.max_inline_data > opt_inline
               ? EINVAL
           : *counter("pairs") >= opt_qps ? ENOMEM
                                          : 0;
  if (rc) {
    unlock();
    if (!opt_mute)
      errno = rc;
    return NULL;
  }
  struct qp *q = calloc(1, sizeof *q);
  a->cap.max_inline_data = (uint32_t)opt_inline;
  q->qp.context = v->context;
  q->qp.pd = v;
  q->qp.send_cq = a->send_cq;
  q->qp.recv_cq = a->recv_cq;
  q->qp.state = IBV_QPS_RESET;
  while (find_qp(number))
    number++;
  q->qp.qp_num = number;
  q->cap = a->cap;
  q->sends = calloc(q->cap.max_send_wr, sizeof *q->sends);
  q->recvs = calloc(q->cap.max_recv_wr, sizeof *q->recvs);
  q->to = calloc(q->cap.max_recv_wr, sizeof *q->to);
  q->next = qps;
  qps = q;
  ((struct pd *)v)->users++;
  ((struct cq *)a->send_cq)->users++;
  of(v->context)->objects++;
  count("pairs", 1);
  unlock();
  return &q->qp;
}

static int known(const uint8_t *gid) {
  struct ibv_gid_entry e;
  for (int d = 0; d < opt_devices; d++)
    for (int i = 0; i < GIDS; i++)
      if (!gid_of(d, i, &e) && !memcmp(e.gid.raw, gid, 16))
        return 1;
  return 0;
}

static int to_state(struct qp *q, struct ibv_qp_attr *a, int mask) {
  struct ibv_gid_entry e;
  const int init = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  const int rtr = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                  IBV_QP_MIN_RNR_TIMER;
  const int rts = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  mask &= ~IBV_QP_STATE;
  switch (a->qp_state) {
  case IBV_QPS_INIT:
    q->access = a->qp_access_flags;
    return q->qp.state != IBV_QPS_RESET || mask != init ||
                   a->port_num != opt_ports
               ? EINVAL
               : 0;
  case IBV_QPS_RTR:
    *counter("tc") = a->ah_attr.grh.traffic_class;
    *counter("sl") = a->ah_attr.sl;
    *counter("mtu") = 128 << a->path_mtu;
    if (q->qp.state != IBV_QPS_INIT || mask != rtr ||
        a->ah_attr.port_num != opt_ports ||
        a->ah_attr.is_global != (opt_ib != 1))
      return EINVAL;
    if (opt_ib == 1) { /* by LID */
      q->peer = a->dest_qp_num;
      q->rq_psn = a->rq_psn;
      gid_of(a->ah_attr.dlid - 70, 0, &e);
      memcpy(q->gid, e.gid.raw, sizeof q->gid);
      return 0;
    }
    if (a->ah_attr.grh.sgid_index >= GIDS ||
        a->ah_attr.grh.sgid_index == opt_away ||
        gid_of(of(q->qp.context)->device, a->ah_attr.grh.sgid_index, &e))
      return EINVAL;
    if (!known(a->ah_attr.grh.dgid.raw))
      return ETIMEDOUT; /* the neighbour is not found */
    q->peer = a->dest_qp_num;
    q->rq_psn = a->rq_psn;
    q->flow = a->ah_attr.grh.flow_label;
    memcpy(q->gid, a->ah_attr.grh.dgid.raw, sizeof q->gid);
    return 0;
  case IBV_QPS_RTS:
    *counter("timeout") = a->timeout;
    *counter("retries") = a->retry_cnt;
    q->sq_psn = a->sq_psn;
    q->retries = a->rnr_retry;
    return q->qp.state != IBV_QPS_RTR || mask != rts ? EINVAL : 0;
  case IBV_QPS_ERR:
    return 0;
  default:
    return EINVAL;
  }
}

int ibv_modify_qp(struct ibv_qp *v, struct ibv_qp_attr *a, int mask) {
  static const char *const call[] = {"", "INIT", "RTR", "RTS"};
  struct qp *q = (struct qp *)v;
  lock();
  int rc = injected("ibv_modify_qp");
  if (!rc && a->qp_state <= IBV_QPS_RTS)
    rc = injected(call[a->qp_state]);
  if (!rc && gone(v->context))
    rc = EIO;
  if (!rc)
    rc = to_state(q, a, mask);
  if (!rc && a->qp_state == IBV_QPS_ERR)
    end(q);
  else if (!rc)
    v->state = a->qp_state;
  struct qp *p = find_qp(q->peer);
  if (!rc && p)
    run(p);
  unlock();
  return rc;
}

bool mlx5dv_is_supported(struct ibv_device *d) {
  (void)d;
  return true;
}

int mlx5dv_modify_qp_lag_port(struct ibv_qp *v, uint8_t port) {
  struct qp *q = (struct qp *)v;
  lock();
  int rc = injected("mlx5dv_modify_qp_lag_port");
  if (!rc && !opt_lag)
    rc = EOPNOTSUPP;
  if (!rc && (port < 1 || port > 2 || v->state != IBV_QPS_RTS))
    rc = EINVAL;
  if (!rc)
    q->lag = port;
  unlock();
  return rc;
}

int ibv_destroy_qp(struct ibv_qp *v) {
  struct qp *q = (struct qp *)v, **at = &qps;
  struct cq *c = (struct cq *)v->send_cq;
  lock();
  for (uint64_t i = c->tail; i < c->head; i++)
    if (c->ring[i % (uint64_t)c->cq.cqe].qp == q)
      c->ring[i % (uint64_t)c->cq.cqe].qp = NULL;
  while (*at != q)
    at = &(*at)->next;
  *at = q->next;
  ((struct pd *)v->pd)->users--;
  c->users--;
  of(v->context)->objects--;
  count("pairs", -1);
  struct qp *p = find_qp(q->peer);
  if (p)
    run(p); /* what it waited with finds nobody */
  take_back(q);
  unlock();
  for (; q->done < q->posted; q->done++)
    free(q->sends[q->done % q->cap.max_send_wr].inlined);
  free(q->sends);
  free(q->recvs);
  free(q->to);
  free(q);
  return 0;
}
