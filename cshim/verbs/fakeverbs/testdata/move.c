/* What moves: requests, completions, the end of a queue pair. */
#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void complete(struct qp *q, struct cq *cq, struct ibv_wc wc, uint64_t retires) {
  if (cq->dead)
    return;
  if (cq->head - cq->tail == (uint64_t)cq->cq.cqe) { /* overrun */
    cq->dead = 1;
    notify(cq->cq.context, IBV_EVENT_CQ_ERR, cq, 0);
    for (struct qp *o = qps; o; o = o->next)
      if (o->qp.send_cq == &cq->cq && o->qp.state != IBV_QPS_ERR) {
        o->qp.state = IBV_QPS_ERR;
        notify(cq->cq.context, IBV_EVENT_QP_FATAL, o, 0);
      }
    return;
  }
  struct cqe *e = &cq->ring[cq->head++ % (uint64_t)cq->cq.cqe];
  wc.qp_num = q->qp.qp_num;
  *e = (struct cqe){wc, q, retires};
  if (cq->armed && cq->cq.channel) {
    struct channel *ch = (struct channel *)cq->cq.channel;
    cq->armed = 0;
    if (write(ch->in, &cq, sizeof cq) != sizeof cq)
      abort();
  }
}

static void complete_send(struct qp *q, struct sent *s, int status) {
  struct ibv_wc wc = {.wr_id = s->id, .status = (enum ibv_wc_status)status};
  wc.opcode = s->op == IBV_WR_SEND         ? IBV_WC_SEND
              : s->op == IBV_WR_RDMA_WRITE ? IBV_WC_RDMA_WRITE
                                           : IBV_WC_RDMA_READ;
  free(s->inlined);
  s->inlined = NULL;
  q->done++;
  if (status || s->signaled)
    complete(q, (struct cq *)q->qp.send_cq, wc, q->done);
}

static void complete_recv(struct qp *q, uint64_t id, int status,
                          uint64_t bytes) {
  struct ibv_wc wc = {.wr_id = id, .status = (enum ibv_wc_status)status};
  wc.opcode = IBV_WC_RECV;
  wc.byte_len = (uint32_t)bytes;
  q->used++;
  complete(q, (struct cq *)q->qp.recv_cq, wc, q->used);
}

/* Flushes what is posted. */
static void flush(struct qp *q) {
  while (q->done < q->posted)
    complete_send(q, &q->sends[q->done % q->cap.max_send_wr],
                  IBV_WC_WR_FLUSH_ERR);
  while (q->used < q->given)
    complete_recv(q, q->recvs[q->used % q->cap.max_recv_wr].wr_id,
                  IBV_WC_WR_FLUSH_ERR, 0);
}

void end(struct qp *q) {
  q->qp.state = IBV_QPS_ERR;
  flush(q);
}

static struct mr *find_mr(struct ibv_context *c, uint32_t key, uint64_t address,
                          uint64_t bytes) {
  for (struct mr *m = mrs; m; m = m->next) {
    if (m->mr.lkey == key && m->mr.context == c)
      return !m->freed && address >= m->start && bytes <= m->mr.length &&
                     address - m->start <= m->mr.length - bytes
                 ? m
                 : NULL;
  }
  return NULL;
}

static int readable(struct qp *q, struct sent *s) {
  for (int i = 0; i < s->count; i++) {
    struct ibv_sge *e = &s->sges[i];
    if (!s->inlined && !find_mr(q->qp.context, e->lkey, e->addr, e->length))
      return 0;
  }
  return 1;
}

static void gather(struct qp *q, struct sent *s, char *at) {
  if (s->inlined) {
    memcpy(at, s->inlined, s->bytes);
    return;
  }
  for (int i = 0; i < s->count; i++) {
    struct ibv_sge *e = &s->sges[i];
    if (e->length) /* readable has found its region */
      copy_out(find_mr(q->qp.context, e->lkey, e->addr, e->length), e->addr, at,
               e->length);
    at += e->length;
  }
}

/* The peer's queue pair if packets of q reach it. */
static struct qp *reach(struct qp *q) {
  struct ibv_gid_entry e;
  struct qp *p = find_qp(q->peer);
  if (!p || p->peer != q->qp.qp_num || p->rq_psn != q->sq_psn ||
      (p->qp.state != IBV_QPS_RTR && p->qp.state != IBV_QPS_RTS))
    return NULL;
  for (int i = 0; i < GIDS; i++)
    if (!gid_of(of(p->qp.context)->device, i, &e) &&
        !memcmp(e.gid.raw, q->gid, sizeof q->gid))
      return p;
  return NULL;
}

enum { WAITS = -1 };

static int do_write(struct qp *q, struct sent *s) {
  struct qp *p = reach(q);
  if (!p)
    return opt_patient ? WAITS : IBV_WC_RETRY_EXC_ERR;
  struct mr *m = find_mr(p->qp.context, s->rkey, s->remote, s->bytes);
  if (s->bytes && (!m || !(m->access & p->access & IBV_ACCESS_REMOTE_WRITE))) {
    notify(p->qp.context, IBV_EVENT_QP_ACCESS_ERR, p, 0);
    end(p);
    return IBV_WC_REM_ACCESS_ERR;
  }
  if (s->bytes && m->pieces) {
    char *all = malloc(s->bytes);
    gather(q, s, all);
    if (opt_late)
      put_off(m, s->remote, all, s->bytes);
    else
      copy_in(m, s->remote, all, s->bytes);
    free(all);
  } else {
    gather(q, s, (char *)(uintptr_t)s->remote);
  }
  return IBV_WC_SUCCESS;
}

/* A read of a GPU comes behind the writes to it. */
static int do_read(struct qp *q, struct sent *s) {
  struct qp *p = reach(q);
  if (!p)
    return IBV_WC_RETRY_EXC_ERR;
  struct mr *m = find_mr(p->qp.context, s->rkey, s->remote, s->bytes);
  if (!m || !(m->access & p->access & IBV_ACCESS_REMOTE_READ)) {
    notify(p->qp.context, IBV_EVENT_QP_ACCESS_ERR, p, 0);
    end(p);
    return IBV_WC_REM_ACCESS_ERR;
  }
  if (m->pieces)
    arrive(NULL);
  uint64_t at = s->remote;
  for (int i = 0; i < s->count; i++) {
    struct ibv_sge *e = &s->sges[i];
    struct mr *to = find_mr(q->qp.context, e->lkey, e->addr, e->length);
    if (!(to->access & IBV_ACCESS_LOCAL_WRITE))
      return IBV_WC_LOC_PROT_ERR;
    char *all = malloc(e->length + 1);
    copy_out(m, at, all, e->length);
    copy_in(to, e->addr, all, e->length);
    free(all);
    at += e->length;
  }
  count("reads", 1);
  return IBV_WC_SUCCESS;
}

static int do_send(struct qp *q, struct sent *s) {
  struct qp *p = reach(q);
  if (!p)
    return opt_patient ? WAITS : IBV_WC_RETRY_EXC_ERR;
  if (p->used == p->given)
    return q->retries == 7 ? WAITS : IBV_WC_RNR_RETRY_EXC_ERR;
  uint64_t at = p->used % p->cap.max_recv_wr, id = p->recvs[at].wr_id;
  struct ibv_sge to = p->to[at];
  int status = injected_status(3), theirs = IBV_WC_REM_OP_ERR;
  if (!status && s->bytes > to.length) {
    status = IBV_WC_LOC_LEN_ERR;
    theirs = IBV_WC_REM_INV_REQ_ERR;
  }
  if (!status) {
    struct mr *m = find_mr(p->qp.context, to.lkey, to.addr, s->bytes);
    if (!m || !(m->access & IBV_ACCESS_LOCAL_WRITE))
      status = IBV_WC_LOC_PROT_ERR;
  }
  if (status) {
    complete_recv(p, id, status, 0);
    end(p);
    return theirs;
  }
  gather(q, s, (char *)(uintptr_t)to.addr);
  complete_recv(p, id, IBV_WC_SUCCESS, s->bytes);
  return IBV_WC_SUCCESS;
}

void run(struct qp *q) {
  while (q->done < q->posted && q->qp.state == IBV_QPS_RTS && opt_hold != 1) {
    struct sent *s = &q->sends[q->done % q->cap.max_send_wr];
    int write = s->op == IBV_WR_RDMA_WRITE, read = s->op == IBV_WR_RDMA_READ;
    if (read && opt_hold)
      return;
    int status = injected_status(read ? 4 : write ? 2 : 1);
    if (!status && !readable(q, s))
      status = IBV_WC_LOC_PROT_ERR;
    if (!status)
      status = read ? do_read(q, s) : write ? do_write(q, s) : do_send(q, s);
    if (status == WAITS)
      return;
    if (q->qp.state == IBV_QPS_ERR)
      return; /* the queue of completions has overrun */
    complete_send(q, s, status);
    if (status)
      end(q);
  }
}

static int take(struct qp *q, struct ibv_send_wr *w) {
  if (w->num_sge > (int)q->cap.max_send_sge || w->num_sge > SGES ||
      (w->opcode != IBV_WR_SEND && w->opcode != IBV_WR_RDMA_WRITE &&
       w->opcode != IBV_WR_RDMA_READ))
    return EINVAL;
  if (q->posted - q->retired >= q->cap.max_send_wr)
    return ENOMEM;
  struct sent *s = &q->sends[q->posted % q->cap.max_send_wr];
  *s = (struct sent){.id = w->wr_id, .remote = w->wr.rdma.remote_addr};
  s->rkey = w->wr.rdma.rkey;
  s->op = w->opcode;
  s->signaled = w->send_flags & IBV_SEND_SIGNALED;
  s->count = w->num_sge;
  for (int i = 0; i < w->num_sge; i++) {
    s->sges[i] = w->sg_list[i];
    s->bytes += w->sg_list[i].length;
  }
  if (w->send_flags & IBV_SEND_INLINE) {
    if (s->bytes > q->cap.max_inline_data)
      return EINVAL;
    char *to = s->inlined = malloc(s->bytes + 1);
    for (int i = 0; i < s->count; to += s->sges[i++].length) /* without a key */
      memcpy(to, (void *)(uintptr_t)s->sges[i].addr, s->sges[i].length);
    count("inlined", 1);
  }
  q->posted++;
  count("requests", 1);
  return 0;
}

int post_send(struct ibv_qp *v, struct ibv_send_wr *w,
              struct ibv_send_wr **bad) {
  struct qp *q = (struct qp *)v;
  lock();
  int rc = injected("ibv_post_send");
  count("doorbells", 1);
  if (!rc && (v->state == IBV_QPS_RESET || v->state == IBV_QPS_INIT ||
              v->state == IBV_QPS_RTR))
    rc = EINVAL;
  for (; !rc && w; w = w->next)
    if ((rc = take(q, w)))
      break;
  if (rc)
    *bad = w;
  if (v->state == IBV_QPS_ERR)
    flush(q);
  else
    run(q);
  unlock();
  return rc;
}

int post_recv(struct ibv_qp *v, struct ibv_recv_wr *w,
              struct ibv_recv_wr **bad) {
  struct qp *q = (struct qp *)v;
  lock();
  int rc = injected("ibv_post_recv");
  if (!rc && v->state == IBV_QPS_RESET)
    rc = EINVAL;
  for (; !rc && w; w = w->next) {
    if (w->num_sge != 1)
      rc = EINVAL;
    else if (q->given - q->freed >= q->cap.max_recv_wr)
      rc = ENOMEM;
    if (rc)
      break;
    q->recvs[q->given % q->cap.max_recv_wr] = *w;
    q->to[q->given++ % q->cap.max_recv_wr] = w->sg_list[0];
    count("receives", 1);
  }
  if (rc)
    *bad = w;
  struct qp *p = find_qp(q->peer);
  if (v->state == IBV_QPS_ERR)
    flush(q);
  else if (p)
    run(p);
  unlock();
  return rc;
}

int poll_cq(struct ibv_cq *v, int room, struct ibv_wc *wc) {
  struct cq *c = (struct cq *)v;
  int n = 0;
  lock();
  if (injected("ibv_poll_cq"))
    n = -1;
  while (n >= 0 && n < room && c->tail < c->head) {
    struct cqe *e = &c->ring[c->tail++ % (uint64_t)c->cq.cqe];
    if (!e->qp)
      continue; /* destroyed */
    if (e->wc.opcode == IBV_WC_RECV)
      e->qp->freed = e->retires;
    else
      e->qp->retired = e->retires;
    wc[n] = e->wc;
    if (e->wc.status) /* as a NIC does: nothing else is defined then */
      wc[n].opcode = (enum ibv_wc_opcode)77; // NOLINT(*EnumCastOutOfRange)
    n++;
  }
  count("polls", 1);
  count("completions", n > 0 ? n : 0);
  unlock();
  return n;
}

int arm_cq(struct ibv_cq *v, int solicited) {
  lock();
  int rc = injected("ibv_req_notify_cq");
  (void)solicited;
  if (!rc)
    ((struct cq *)v)->armed = 1;
  unlock();
  return rc;
}
