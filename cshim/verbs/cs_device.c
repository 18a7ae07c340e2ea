#include "cs_table.h"

#ifdef CS_VERBS_BUILT_IN

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int cs_ib_list(cs_ib_name *names, int room, int *count) {
  int n = 0;
  errno = 0;
  struct ibv_device **list = cs_ib.get_device_list(&n);
  if (!list)
    return cs_ib_errno();
  for (int i = 0; i < n && i < room; i++) {
    memset(&names[i], 0, sizeof names[i]);
    memcpy(names[i].name, list[i]->name,
           strnlen(list[i]->name, sizeof names[i].name - 1));
  }
  cs_ib.free_device_list(list);
  *count = n;
  return 0;
}

// A thread domain lets the library post without locks. Few devices have one.
static void add_thread_domain(cs_ib_device *d) {
  struct ibv_td_init_attr plain = {0};
  struct ibv_parent_domain_init_attr attr = {.pd = d->pd};
  d->parent = d->pd;
  d->td = ibv_alloc_td(d->context, &plain);
  if (!d->td)
    return;
  attr.td = d->td;
  d->parent = ibv_alloc_parent_domain(d->context, &attr);
  if (d->parent)
    return;
  ibv_dealloc_td(d->td);
  d->td = NULL;
  d->parent = d->pd;
}

static int open_context(const char *name, struct ibv_context **context) {
  int n = 0, rc = ENODEV;
  errno = 0;
  struct ibv_device **list = cs_ib.get_device_list(&n);
  if (!list)
    return cs_ib_errno();
  for (int i = 0; i < n; i++) {
    if (strcmp(list[i]->name, name) != 0)
      continue;
    errno = 0;
    *context = cs_ib.open_device(list[i]);
    rc = *context ? 0 : cs_ib_errno();
    break;
  }
  cs_ib.free_device_list(list);
  return rc;
}

int cs_ib_device_open(const char *name, cs_ib_device **device,
                      cs_ib_facts *facts) {
  struct ibv_device_attr a;
  cs_ib_device *d = calloc(1, sizeof *d);
  if (!d)
    return ENOMEM;
  int rc = open_context(name, &d->context);
  if (rc) {
    free(d);
    return rc;
  }
  rc = cs_ib.query_device(d->context, &a);
  rc = rc ? rc : cs_ib_nonblocking(d->context->async_fd);
  errno = 0;
  if (!rc && !(d->pd = cs_ib.alloc_pd(d->context)))
    rc = cs_ib_errno();
  if (rc) {
    cs_ib.close_device(d->context);
    free(d);
    return rc;
  }
  add_thread_domain(d);
  *facts = (cs_ib_facts){
      a.max_mr_size,        a.max_qp,     a.max_cqe, a.phys_port_cnt,
      d->context->async_fd, d->td != NULL};
  *device = d;
  return 0;
}

int cs_ib_device_close(cs_ib_device *d) {
  int rc = 0, first = 0;
  if (d->td) {
    first = cs_ib.dealloc_pd(d->parent);
    rc = ibv_dealloc_td(d->td);
    first = first ? first : rc;
  }
  rc = cs_ib.dealloc_pd(d->pd);
  first = first ? first : rc;
  errno = 0;
  if (cs_ib.close_device(d->context) && !first)
    first = cs_ib_errno();
  free(d);
  return first;
}

int cs_ib_port_of(cs_ib_device *d, int number, cs_ib_port *port) {
  struct ibv_port_attr a;
  memset(&a, 0, sizeof a);
  if (number < 1 || number > UINT8_MAX)
    return EINVAL;
  int rc = cs_ib.query_port(d->context, (uint8_t)number,
                            (struct _compat_ibv_port_attr *)&a);
  if (rc)
    return rc;
  port->active = a.state == IBV_PORT_ACTIVE;
  port->ethernet = a.link_layer == IBV_LINK_LAYER_ETHERNET;
  port->global = port->ethernet || a.flags & IBV_QPF_GRH_REQUIRED;
  port->mtu = 128 << a.active_mtu;
  port->gids = a.gid_tbl_len;
  port->lid = a.lid;
  return 0;
}

int cs_ib_gids(cs_ib_device *d, int port, cs_ib_gid *gids, int room,
               int *count) {
  cs_ib_port p;
  int rc = cs_ib_port_of(d, port, &p), n = 0, first = 0;
  for (int i = 0; !rc && i < p.gids && n < room; i++) {
    struct ibv_gid_entry e;
    const int bad = cs_ib.query_gid_ex(d->context, (uint32_t)port, (uint32_t)i,
                                       &e, 0, sizeof e);
    if (bad) { /* ENODATA: it is empty. ENODEV, too: it is another namespace's */
      first = first || bad == ENODATA ? first : bad;
      continue;
    }
    memcpy(gids[n].gid, e.gid.raw, sizeof gids[n].gid);
    gids[n].index = i;
    gids[n].type = (int32_t)e.gid_type;
    gids[n].link = (int32_t)e.ndev_ifindex;
    n++;
  }
  if (!rc && n == 0)
    rc = first;
  if (!rc)
    *count = n;
  return rc;
}

int cs_ib_async(cs_ib_device *d, cs_ib_event *event) {
  struct ibv_async_event e;
  errno = 0;
  if (cs_ib.get_async_event(d->context, &e))
    return cs_ib_errno();
  event->type = (int32_t)e.event_type;
  event->qp = 0;
  if (e.event_type >= IBV_EVENT_QP_FATAL &&
      e.event_type <= IBV_EVENT_QP_ACCESS_ERR)
    event->qp = e.element.qp->qp_num;
  cs_ib.ack_async_event(&e);
  return 0;
}

static unsigned access_of(int access) {
  unsigned a = 0;
  a |= access & CS_IB_LOCAL_WRITE ? IBV_ACCESS_LOCAL_WRITE : 0;
  a |= access & CS_IB_REMOTE_WRITE ? IBV_ACCESS_REMOTE_WRITE : 0;
  a |= access & CS_IB_REMOTE_READ ? IBV_ACCESS_REMOTE_READ : 0;
  a |= access & CS_IB_RELAXED_ORDERING ? IBV_ACCESS_RELAXED_ORDERING : 0;
  return a;
}

static int registered(struct ibv_mr *m, cs_ib_mr **mr, uint32_t *lkey,
                      uint32_t *rkey) {
  if (!m)
    return cs_ib_errno();
  *mr = (cs_ib_mr *)m;
  *lkey = m->lkey;
  *rkey = m->rkey;
  return 0;
}

int cs_ib_register(cs_ib_device *d, uint64_t address, uint64_t bytes,
                   int access, cs_ib_mr **mr, uint32_t *lkey, uint32_t *rkey) {
  errno = 0;
  return registered(cs_ib.reg_mr(d->pd, (void *)(uintptr_t)address, bytes,
                                 address, access_of(access)),
                    mr, lkey, rkey);
}

// A descriptor that is none is refused as such only where others are taken.
int cs_ib_dma_buf(cs_ib_device *d) {
  if (!cs_dma_buf.reg_mr)
    return ENOSYS;
  errno = 0;
  struct ibv_mr *m = cs_dma_buf.reg_mr(d->pd, 0, 0, 0, -1, 0);
  if (m)
    return cs_ib.dereg_mr(m);
  return errno == EOPNOTSUPP || errno == EPROTONOSUPPORT ? EOPNOTSUPP : 0;
}

int cs_ib_register_dma_buf(cs_ib_device *d, int fd, uint64_t offset,
                           uint64_t bytes, uint64_t address, int access,
                           cs_ib_mr **mr, uint32_t *lkey, uint32_t *rkey) {
  if (!cs_dma_buf.reg_mr)
    return ENOSYS;
  errno = 0;
  return registered(cs_dma_buf.reg_mr(d->pd, offset, bytes, address, fd,
                                      (int)access_of(access)),
                    mr, lkey, rkey);
}

int cs_ib_deregister(cs_ib_mr *mr) {
  return cs_ib.dereg_mr((struct ibv_mr *)mr);
}

#endif
