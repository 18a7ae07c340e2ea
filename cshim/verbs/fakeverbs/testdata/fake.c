/* Objects of the fake libibverbs, and what tests set. */
#define _GNU_SOURCE
#include "fake.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr

static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
void lock(void) { pthread_mutex_lock(&big); }
void unlock(void) { pthread_mutex_unlock(&big); }

struct context *contexts;
struct mr *mrs;

/* Options: what the devices are like. */
static long opt_td = 1, opt_cqe = 4096, opt_mr_size = 1L << 40, opt_gids = 2,
            opt_down, opt_locked = -1, opt_dmabuf = 1, opt_stall;
long opt_devices = 2, opt_inline = 220, opt_mute, opt_qps = 1000, opt_wr = 4096,
     opt_lag, opt_ib, opt_away = -1, opt_ports = 1;
int opt_hold;
long opt_patient, opt_late;
static long locked;

static struct {
  char name[32];
  long value;
} counts[32];

long *counter(const char *name) {
  for (int i = 0; i < 32; i++) {
    if (!*counts[i].name)
      snprintf(counts[i].name, sizeof counts[i].name, "%s", name);
    if (!strcmp(counts[i].name, name))
      return &counts[i].value;
  }
  abort();
}

void count(const char *name, long by) { *counter(name) += by; }

static struct {
  char call[32];
  int error, after, times;
} fails[8];

int injected(const char *call) {
  for (int i = 0; i < 8; i++)
    if (!strcmp(fails[i].call, call) && fails[i].times) {
      if (fails[i].after-- > 0)
        return 0;
      fails[i].after = 0;
      fails[i].times--;
      return fails[i].error;
    }
  return 0;
}

static struct {
  int status, after;
} statuses[5]; /* by op */

int injected_status(int op) {
  int s = statuses[op].status;
  if (!s || statuses[op].after-- > 0)
    return 0;
  statuses[op].status = 0;
  return s;
}

static int dead[DEVICES];

struct context *of(struct ibv_context *c) {
  return (struct context *)((char *)c - offsetof(struct context, v.context));
}

int gone(struct ibv_context *c) { return dead[of(c)->device]; }

void notify(struct ibv_context *c, enum ibv_event_type type, void *element,
            int port) {
  struct ibv_async_event e = {.event_type = type};
  if (port)
    e.element.port_num = port;
  else
    e.element.qp = element;
  if (write(of(c)->pipe[1], &e, sizeof e) != sizeof e)
    abort();
}

int gid_of(int device, int index, struct ibv_gid_entry *e) {
  static const int type[GIDS] = {IBV_GID_TYPE_ROCE_V1,
                                 IBV_GID_TYPE_ROCE_V2,
                                 IBV_GID_TYPE_ROCE_V1,
                                 IBV_GID_TYPE_ROCE_V2,
                                 0,
                                 IBV_GID_TYPE_ROCE_V2};
  char text[64];
  memset(e, 0, sizeof *e);
  e->gid_index = (uint32_t)index;
  e->port_num = 1;
  if (opt_ib) {
    snprintf(text, sizeof text, "fe80::%d:0:0:%d:%d", opt_ib == 2 ? device : 0,
             index, device + 1);
    inet_pton(AF_INET6, text, e->gid.raw);
    if (opt_ib == 2)
      e->gid.raw[7] = (uint8_t)(device + 1);
    return index < 2 ? 0 : ENODATA;
  }
  e->gid_type = (uint32_t)type[index];
  e->ndev_ifindex = index == opt_away ? 9999 : 1; /* lo */
  if (index == 4 || (opt_gids < 2 && index >= 2 && index < 4) || opt_gids < 1)
    return ENODATA;
  snprintf(text, sizeof text,
           index < 2 ? "fe80::%d"
           : index < 4
               ? opt_gids > 2 ? "::ffff:127.0.77.%d" : "::ffff:10.77.0.%d"
               : "fd00:77::%d",
           device + 1);
  inet_pton(AF_INET6, text, e->gid.raw);
  return 0;
}

static struct ibv_device all[DEVICES];

struct ibv_device **ibv_get_device_list(int *n) {
  lock();
  MAY_FAIL("ibv_get_device_list", NULL, NULL);
  struct ibv_device **list = calloc(DEVICES + 1, sizeof *list);
  for (int i = 0; i < opt_devices; i++) {
    snprintf(all[i].name, sizeof all[i].name, "fake%d", i);
    all[i].node_type = IBV_NODE_CA;
    list[i] = &all[i];
  }
  *n = (int)opt_devices;
  unlock();
  return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

__be64 ibv_get_device_guid(struct ibv_device *d) {
  return htobe64(0xfa4e0000 + (uint64_t)(d - all));
}

static struct ibv_td *alloc_td(struct ibv_context *c,
                               struct ibv_td_init_attr *a) {
  lock();
  (void)a;
  if (!opt_td) {
    unlock();
    errno = EOPNOTSUPP;
    return NULL;
  }
  MAY_FAIL("ibv_alloc_td", c, NULL);
  struct td *t = calloc(1, sizeof *t);
  t->td.context = c;
  of(c)->objects++;
  unlock();
  return &t->td;
}

static int dealloc_td(struct ibv_td *t) {
  lock();
  of(t->context)->objects--;
  unlock();
  free(t);
  return 0;
}

static struct pd *new_pd(struct ibv_context *c, struct pd *parent) {
  struct pd *p = calloc(1, sizeof *p);
  p->pd.context = c;
  p->of = parent;
  if (parent)
    parent->users++;
  of(c)->objects++;
  return p;
}

static struct ibv_pd *
alloc_parent_domain(struct ibv_context *c,
                    struct ibv_parent_domain_init_attr *a) {
  lock();
  MAY_FAIL("ibv_alloc_parent_domain", c, NULL);
  struct pd *p = new_pd(c, (struct pd *)a->pd);
  unlock();
  return &p->pd;
}

struct ibv_context *ibv_open_device(struct ibv_device *d) {
  lock();
  MAY_FAIL("ibv_open_device", NULL, NULL);
  if (dead[d - all]) {
    unlock();
    errno = ENODEV;
    return NULL;
  }
  struct context *c = calloc(1, sizeof *c);
  if (pipe2(c->pipe, O_CLOEXEC))
    abort();
  c->device = (int)(d - all);
  c->v.sz = sizeof c->v;
  c->v.alloc_td = alloc_td;
  c->v.dealloc_td = dealloc_td;
  c->v.alloc_parent_domain = alloc_parent_domain;
  c->v.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
  c->v.context.device = d;
  c->v.context.async_fd = c->pipe[0];
  c->v.context.num_comp_vectors = 1;
  c->v.context.ops.post_send = post_send;
  c->v.context.ops.post_recv = post_recv;
  c->v.context.ops.poll_cq = poll_cq;
  c->v.context.ops.req_notify_cq = arm_cq;
  c->next = contexts;
  contexts = c;
  count("contexts", 1);
  unlock();
  return &c->v.context;
}

int ibv_close_device(struct ibv_context *v) {
  struct context *c = of(v), **at = &contexts;
  lock();
  MAY_FAIL("ibv_close_device", NULL, -1);
  if (c->objects) {
    unlock();
    errno = EBUSY;
    return -1;
  }
  while (*at != c)
    at = &(*at)->next;
  *at = c->next;
  count("contexts", -1);
  unlock();
  close(c->pipe[0]);
  close(c->pipe[1]);
  free(c);
  return 0;
}

int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a) {
  lock();
  MAY_FAIL("ibv_query_device", c, error_);
  memset(a, 0, sizeof *a);
  strcpy(a->fw_ver, "fake");
  a->max_mr_size = (uint64_t)opt_mr_size;
  a->max_qp = (int)opt_qps;
  a->max_qp_wr = (int)opt_wr;
  a->max_sge = SGES;
  a->max_cq = 100;
  a->max_cqe = (int)opt_cqe;
  a->max_mr = 100000;
  a->max_qp_rd_atom = 16;
  a->phys_port_cnt = (uint8_t)opt_ports;
  unlock();
  return 0;
}

int ibv_query_port(struct ibv_context *c, uint8_t n,
                   struct _compat_ibv_port_attr *to) {
  struct ibv_port_attr *a = (struct ibv_port_attr *)to;
  lock();
  MAY_FAIL("ibv_query_port", c, error_);
  unlock();
  if (n < 1 || n > opt_ports)
    return EINVAL;
  int down = opt_down == 1 || opt_down >> (1 + of(c)->device) & 1 ||
             (opt_ports > 1 && n == 1); /* of two the second is up */
  a->state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  a->link_layer = opt_ib ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
  a->flags = opt_ib == 3 ? IBV_QPF_GRH_REQUIRED : 0;
  a->lid = opt_ib ? (uint16_t)(70 + of(c)->device) : 0;
  a->max_mtu = IBV_MTU_4096;
  a->active_mtu = IBV_MTU_1024;
  a->gid_tbl_len = GIDS;
  a->active_speed = 32;
  a->active_width = 2;
  return 0;
}

int _ibv_query_gid_ex(struct ibv_context *c, uint32_t port, uint32_t index,
                      struct ibv_gid_entry *e, uint32_t flags, size_t size) {
  (void)flags;
  lock();
  MAY_FAIL("ibv_query_gid_ex", c, error_);
  unlock();
  if (port < 1 || port > (uint32_t)opt_ports || index >= GIDS ||
      size != sizeof *e)
    return EINVAL;
  return gid_of(of(c)->device, (int)index, e);
}

int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *e) {
  lock(); /* the user has made the pipe non-blocking */
  int rc = read(of(c)->pipe[0], e, sizeof *e) == sizeof *e ? 0 : -1;
  unlock();
  return rc;
}

/* Takes back the events of q that nobody has read, as its destruction does. */
void take_back(struct qp *q) {
  struct context *c = of(q->qp.context);
  struct ibv_async_event e;
  int waiting;
  if (ioctl(c->pipe[0], FIONREAD, &waiting))
    abort();
  for (; waiting > 0; waiting -= (int)sizeof e) {
    if (read(c->pipe[0], &e, sizeof e) != sizeof e)
      abort();
    if (e.element.qp != &q->qp)
      if (write(c->pipe[1], &e, sizeof e) != sizeof e)
        abort();
  }
}

void ibv_ack_async_event(struct ibv_async_event *e) { (void)e; }

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) {
  lock();
  MAY_FAIL("ibv_alloc_pd", c, NULL);
  struct pd *p = new_pd(c, NULL);
  unlock();
  return &p->pd;
}

int ibv_dealloc_pd(struct ibv_pd *v) {
  struct pd *p = (struct pd *)v;
  lock();
  if (p->users) {
    unlock();
    return EBUSY;
  }
  if (p->of)
    p->of->users--;
  of(v->context)->objects--;
  unlock();
  free(p);
  return 0;
}

/* Whether all of it is mapped; what is not cannot be pinned. */
static int mapped(void *addr, size_t length) {
  uintptr_t page = 4095, from = (uintptr_t)addr & ~page;
  size_t pages = ((uintptr_t)addr + length - from + page) / 4096;
  unsigned char *in = malloc(pages + 1);
  int ok = mincore((void *)from, pages * 4096, in) == 0;
  free(in);
  return ok;
}

static int allowed(size_t length, unsigned access) {
  return length && length <= (size_t)opt_mr_size &&
         (!(access & IBV_ACCESS_REMOTE_WRITE) ||
          access & IBV_ACCESS_LOCAL_WRITE);
}

static void drop(struct mr *m) {
  free(m->piece);
  free(m);
}

/* Takes m, which is prepared, or lets go of it for an error. Unlocks. */
static struct ibv_mr *taken(struct mr *m, struct ibv_pd *v, size_t length,
                            int rc) {
  static uint32_t last = 0x1000;
  if (rc) {
    drop(m);
    unlock();
    errno = rc;
    return NULL;
  }
  last += 0x101;
  m->mr = (struct ibv_mr){
      v->context, v, (void *)(uintptr_t)m->start, length, 0, last, last};
  m->next = mrs;
  mrs = m;
  ((struct pd *)v)->users++;
  locked += m->pieces ? 0 : (long)length;
  count("regions", 1);
  count("registered", 1);
  count("relaxed", m->access & IBV_ACCESS_RELAXED_ORDERING ? 1 : 0);
  unlock();
  return &m->mr;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *v, void *addr, size_t length,
                                uint64_t iova, unsigned access) {
  lock();
  for (int waits = 0; opt_stall && (long)length >= opt_stall; waits = 1) {
    count("stalled", !waits);
    unlock();
    usleep(1000);
    lock();
  }
  MAY_FAIL("ibv_reg_mr", v->context, NULL);
  struct mr *m = calloc(1, sizeof *m);
  m->start = iova;
  m->access = access;
  int rc = !allowed(length, access) || iova != (uintptr_t)addr     ? EINVAL
           : peer_pieces(iova, length, m)                          ? 0
           : !mapped(addr, length) || !seen(addr, length)          ? EFAULT
           : opt_locked >= 0 && locked + (long)length > opt_locked ? ENOMEM
                                                                   : 0;
  return taken(m, v, length, rc);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *v, uint64_t offset,
                                 size_t length, uint64_t iova, int fd,
                                 int access) {
  lock();
  MAY_FAIL("ibv_reg_dmabuf_mr", v->context, NULL);
  struct mr *m = calloc(1, sizeof *m);
  m->start = iova;
  m->access = (unsigned)access;
  int rc = !opt_dmabuf                             ? EOPNOTSUPP
           : fcntl(fd, F_GETFD) < 0                ? EBADF
           : !allowed(length, m->access)           ? EINVAL
           : (iova ^ offset) % 4096                ? EINVAL
           : dma_buf_pieces(fd, offset, length, m) ? EINVAL
                                                   : 0;
  if (!rc)
    count("dmabufs", 1);
  return taken(m, v, length, rc);
}

int ibv_dereg_mr(struct ibv_mr *v) {
  struct mr **at = &mrs;
  lock();
  int rc = injected("ibv_dereg_mr");
  if (!rc) {
    while (*at != (struct mr *)v)
      at = &(*at)->next;
    *at = (*at)->next;
    ((struct pd *)v->pd)->users--;
    struct mr *m = (struct mr *)v;
    arrive(m);
    locked -= m->pieces ? 0 : (long)v->length;
    count("regions", -1);
    drop(m);
  }
  unlock();
  return rc;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c) {
  int fd[2];
  lock();
  MAY_FAIL("ibv_create_comp_channel", c, NULL);
  struct channel *ch = calloc(1, sizeof *ch);
  if (pipe2(fd, O_CLOEXEC))
    abort();
  ch->channel.context = c;
  ch->channel.fd = fd[0];
  ch->in = fd[1];
  of(c)->objects++;
  unlock();
  return &ch->channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *v) {
  lock();
  of(v->context)->objects--;
  unlock();
  close(v->fd);
  close(((struct channel *)v)->in);
  free(v);
  return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int cqe, void *context,
                             struct ibv_comp_channel *channel, int vector) {
  lock();
  (void)vector;
  MAY_FAIL("ibv_create_cq", c, NULL);
  if (cqe < 1 || cqe > opt_cqe) {
    unlock();
    errno = EINVAL;
    return NULL;
  }
  struct cq *q = calloc(1, sizeof *q);
  q->cq.context = c;
  q->cq.channel = channel;
  q->cq.cq_context = context;
  q->cq.cqe = cqe;
  q->ring = calloc((size_t)cqe, sizeof *q->ring);
  of(c)->objects++;
  count("queues", 1);
  unlock();
  return &q->cq;
}

int ibv_destroy_cq(struct ibv_cq *v) {
  struct cq *q = (struct cq *)v;
  lock();
  int rc = q->users ? EBUSY : injected("ibv_destroy_cq");
  if (!rc) {
    of(v->context)->objects--;
    count("queues", -1);
  }
  unlock();
  if (!rc) {
    free(q->ring);
    free(q);
  }
  return rc;
}

int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq,
                     void **context) {
  if (read(ch->fd, cq, sizeof *cq) != sizeof *cq) {
    if (gone(ch->context)) /* as kernels say since 2023 */
      errno = EIO;
    return -1;
  }
  *context = (*cq)->cq_context;
  return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n) {
  (void)cq;
  (void)n;
}

/* For tests. */

static const struct {
  const char *name;
  long *value, first;
} options[] = {
    {"devices", &opt_devices, 2}, {"td", &opt_td, 1},
    {"cqe", &opt_cqe, 4096},      {"mr_size", &opt_mr_size, 1L << 40},
    {"inline", &opt_inline, 220}, {"gids", &opt_gids, 2},
    {"down", &opt_down, 0},       {"locked", &opt_locked, -1},
    {"qps", &opt_qps, 1000},      {"wr", &opt_wr, 4096},
    {"lag", &opt_lag, 0},         {"patient", &opt_patient, 0},
    {"infiniband", &opt_ib, 0},   {"away", &opt_away, -1},
    {"ports", &opt_ports, 1},     {"dmabuf", &opt_dmabuf, 1},
    {"late", &opt_late, 0},       {"mute", &opt_mute, 0},
    {"stall", &opt_stall, 0}};

int fake_set(const char *name, long value) {
  lock();
  int found = !strcmp(name, "hold");
  if (found) {
    opt_hold = (int)value;
    for (struct qp *q = qps; value != 1 && q; q = q->next)
      run(q);
  }
  for (size_t i = 0; i < sizeof options / sizeof *options; i++)
    if (!strcmp(options[i].name, name)) {
      *options[i].value = value;
      found = 1;
    }
  if (!opt_late)
    arrive(NULL);
  unlock();
  return found ? 0 : -1;
}

void fake_reset(void) {
  lock();
  memset(fails, 0, sizeof fails);
  memset(statuses, 0, sizeof statuses);
  memset(dead, 0, sizeof dead);
  for (size_t i = 0; i < sizeof options / sizeof *options; i++)
    *options[i].value = options[i].first;
  unlock();
  fake_set("hold", 0);
}

int fake_fail(const char *call, int error, int after, int times) {
  int rc = -1;
  lock();
  for (int i = 0; i < 8 && rc; i++)
    if (!fails[i].times) {
      snprintf(fails[i].call, sizeof fails[i].call, "%s", call);
      fails[i].error = error;
      fails[i].after = after;
      fails[i].times = times;
      rc = 0;
    }
  unlock();
  return rc;
}

void fake_status(int op, int after, int status) {
  lock();
  statuses[op].status = status;
  statuses[op].after = after;
  unlock();
}

/* An event of all contexts of a device: of the port, or of a queue pair. */
void fake_event(int device, int type, int port, uint32_t number) {
  lock();
  for (struct context *c = contexts; c; c = c->next)
    if (c->device == device)
      notify(&c->v.context, (enum ibv_event_type)type, find_qp(number), port);
  unlock();
}

void fake_vanish(int device) {
  lock();
  dead[device] = 1;
  for (struct context *c = contexts; c; c = c->next)
    if (c->device == device)
      notify(&c->v.context, IBV_EVENT_DEVICE_FATAL, NULL, 0);
  for (struct qp *q = qps; q; q = q->next)
    if (of(q->qp.context)->device == device)
      end(q);
  unlock();
}

/* Queue pairs that send over a port of a bond, or, for port 3, that have a flow of
 * their own. */
static long sending_over(int port) {
  long n = 0;
  for (struct qp *q = qps; q; q = q->next) {
    int other = 0;
    for (struct qp *p = q->next; p; p = p->next)
      other |= p->flow == q->flow;
    n += port == 3 ? q->flow && !other : q->lag == port;
  }
  return n;
}

long fake_count(const char *name) {
  lock();
  long value = !strcmp(name, "port1")   ? sending_over(1)
               : !strcmp(name, "port2") ? sending_over(2)
               : !strcmp(name, "flows") ? sending_over(3)
                                        : *counter(name);
  unlock();
  return value;
}
