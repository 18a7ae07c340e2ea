#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "rdma.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

void die(const char *format, ...) {
  int error = errno;
  va_list arguments;
  va_start(arguments, format);
  fflush(stdout);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fprintf(stderr, " (errno: %s)\n", strerror(error));
  exit(1);
}

double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

void nap(double seconds) {
  struct timespec t = {(time_t)seconds,
                       (long)((seconds - (time_t)seconds) * 1e9)};
  nanosleep(&t, NULL);
}

void pin(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  sched_setaffinity(0, sizeof set, &set);
}

static struct ibv_context *open_device(const char *name) {
  struct ibv_device **devices = ibv_get_device_list(NULL);
  struct ibv_context *context = NULL;
  for (int i = 0; devices != NULL && devices[i] != NULL; i++)
    if (strcmp(ibv_get_device_name(devices[i]), name) == 0)
      context = ibv_open_device(devices[i]);
  if (context == NULL)
    die("%s: no such RDMA device, or it cannot be opened", name);
  ibv_free_device_list(devices);
  return context;
}

static void make_qp(struct end *end) {
  struct ibv_qp_init_attr want = {
      .send_cq = end->cq,
      .recv_cq = end->cq,
      .qp_type = IBV_QPT_RC,
      .cap = {.max_send_wr = end->depth,
              .max_recv_wr = end->depth,
              .max_send_sge = 1,
              .max_recv_sge = 1},
  };
  end->qp = ibv_create_qp(end->pd, &want);
  if (end->qp == NULL)
    die("%s: ibv_create_qp, depth %u", end->device, end->depth);
  struct ibv_qp_attr init = {
      .qp_state = IBV_QPS_INIT,
      .port_num = 1,
      .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
  };
  if (ibv_modify_qp(end->qp, &init,
                    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                        IBV_QP_ACCESS_FLAGS) != 0)
    die("%s: queue pair to INIT", end->device);
}

void end_open(struct end *end, const char *device, int gid_index,
              uint32_t depth, size_t bytes) {
  *end = (struct end){
      .device = device, .gid_index = gid_index, .depth = depth, .bytes = bytes};
  end->context = open_device(device);
  end->pd = ibv_alloc_pd(end->context);
  end->channel = ibv_create_comp_channel(end->context);
  if (end->pd == NULL || end->channel == NULL)
    die("%s: no protection domain or completion channel", device);
  end->cq =
      ibv_create_cq(end->context, (int)(2 * depth), NULL, end->channel, 0);
  if (end->cq == NULL)
    die("%s: ibv_create_cq, %u entries", device, 2 * depth);
  end->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (end->memory == MAP_FAILED)
    die("mmap of %zu bytes", bytes);
  end->mr = ibv_reg_mr(end->pd, end->memory, bytes,
                       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  if (end->mr == NULL)
    die("%s: ibv_reg_mr of %zu bytes", device, bytes);
  make_qp(end);
}

struct address end_address(const struct end *end) {
  struct address address = {.qp_number = end->qp->qp_num,
                            .rkey = end->mr->rkey,
                            .memory = (uint64_t)(uintptr_t)end->memory};
  if (ibv_query_gid(end->context, 1, end->gid_index, &address.gid) != 0)
    die("%s: no GID %d", end->device, end->gid_index);
  return address;
}

void end_connect(struct end *end, const struct address *peer,
                 struct patience patience) {
  struct ibv_port_attr port;
  if (ibv_query_port(end->context, 1, &port) != 0)
    die("%s: ibv_query_port", end->device);
  struct ibv_qp_attr ready = {
      .qp_state = IBV_QPS_RTR,
      .path_mtu = port.active_mtu,
      .dest_qp_num = peer->qp_number,
      .max_dest_rd_atomic = 1,
      .min_rnr_timer = 12, /* 0.64 ms */
      .ah_attr = {.is_global = 1,
                  .port_num = 1,
                  .grh = {.dgid = peer->gid,
                          .sgid_index = (uint8_t)end->gid_index,
                          .hop_limit = 64}},
  };
  int fields = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
               IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  if (ibv_modify_qp(end->qp, &ready, fields) != 0)
    die("%s: queue pair to RTR", end->device);
  struct ibv_qp_attr send = {
      .qp_state = IBV_QPS_RTS,
      .timeout = 14, /* 67 ms */
      .retry_cnt = patience.retries,
      .rnr_retry = patience.rnr_retries,
      .max_rd_atomic = 1,
  };
  fields = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
           IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  if (ibv_modify_qp(end->qp, &send, fields) != 0)
    die("%s: queue pair to RTS", end->device);
}

void end_close(struct end *end) {
  if (end->qp != NULL && ibv_destroy_qp(end->qp) != 0)
    die("%s: ibv_destroy_qp", end->device);
  if (end->mr != NULL && ibv_dereg_mr(end->mr) != 0)
    die("%s: ibv_dereg_mr", end->device);
  if (ibv_destroy_cq(end->cq) != 0 ||
      ibv_destroy_comp_channel(end->channel) != 0 ||
      ibv_dealloc_pd(end->pd) != 0 || ibv_close_device(end->context) != 0)
    die("%s: what the device had is not given back", end->device);
  munmap(end->memory, end->bytes);
}

void end_renew(struct end *end) {
  struct ibv_wc wc;
  if (end->qp != NULL && ibv_destroy_qp(end->qp) != 0)
    die("%s: ibv_destroy_qp", end->device);
  while (ibv_poll_cq(end->cq, 1, &wc) > 0)
    ;
  make_qp(end);
}

enum ibv_qp_state end_state(const struct end *end) {
  struct ibv_qp_attr state;
  struct ibv_qp_init_attr init;
  if (ibv_query_qp(end->qp, &state, IBV_QP_STATE, &init) != 0)
    die("%s: ibv_query_qp", end->device);
  return state.qp_state;
}

void end_to_error(struct end *end) {
  struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
  if (ibv_modify_qp(end->qp, &error, IBV_QP_STATE) != 0)
    die("%s: queue pair to ERR", end->device);
}

void post_receive(struct end *end, uint64_t id, size_t offset, uint32_t bytes) {
  struct ibv_sge part = {(uintptr_t)(end->memory + offset), bytes,
                         end->mr->lkey};
  struct ibv_recv_wr receive = {.wr_id = id, .sg_list = &part, .num_sge = 1},
                     *bad;
  int error = ibv_post_recv(end->qp, &receive, &bad);
  if (error != 0)
    errno = error, die("%s: ibv_post_recv", end->device);
}

static int post(struct end *end, struct ibv_send_wr *request, size_t offset,
                uint32_t bytes) {
  struct ibv_sge part = {(uintptr_t)(end->memory + offset), bytes,
                         end->mr->lkey};
  struct ibv_send_wr *bad;
  request->sg_list = &part;
  request->num_sge = 1;
  request->send_flags = IBV_SEND_SIGNALED;
  return ibv_post_send(end->qp, request, &bad);
}

int post_write(struct end *end, uint64_t id, size_t offset, uint32_t bytes,
               uint64_t to, uint32_t rkey) {
  struct ibv_send_wr request = {.wr_id = id,
                                .opcode = IBV_WR_RDMA_WRITE,
                                .wr.rdma = {.remote_addr = to, .rkey = rkey}};
  return post(end, &request, offset, bytes);
}

int post_send(struct end *end, uint64_t id, size_t offset, uint32_t bytes) {
  struct ibv_send_wr request = {.wr_id = id, .opcode = IBV_WR_SEND};
  return post(end, &request, offset, bytes);
}

int wait_completion(struct end *end, struct ibv_wc *wc, double seconds) {
  double end_of_wait = now() + seconds;
  for (;;) {
    int n = ibv_poll_cq(end->cq, 1, wc);
    if (n < 0)
      die("%s: ibv_poll_cq", end->device);
    if (n > 0)
      return 1;
    if (now() > end_of_wait)
      return 0;
    sched_yield();
  }
}
