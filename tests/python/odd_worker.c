// Worker 0 of two: it pushes one tensor whose description no torch would make,
// under key 1, prints how that is refused, and pushes a good one, float32[4],
// under key 2. Twice.
// usage: odd_worker PORT own|shared DTYPE BYTES [DIM...]

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fserver.h"

static void check(const char *call, int rc) {
  fs_error e;
  if (rc >= 0)
    return;
  fprintf(stderr, "%s: %s\n", call, fs_errmsg(&e) == 0 ? e.text : "?");
  exit(1);
}

static char own[4096], *memory = own;

static int wait_for(fs_node node, fs_ticket ticket) {
  int rc;
  while ((rc = fs_wait(node, ticket, 1000000000, 0)) == -EAGAIN)
    ;
  return rc;
}

static fs_ticket push(fs_node node, uint64_t key, uint8_t dtype, uint64_t bytes,
                      const int64_t *dims, uint32_t ndim) {
  fs_tensor t = {.data = memory,
                 .bytes = bytes,
                 .key = key,
                 .base = memory,
                 .base_bytes = sizeof own,
                 .dims = dims,
                 .ndim = ndim,
                 .device = -1,
                 .dtype = dtype};
  fs_ticket ticket;
  check("push_pull", fs_push_pull(node, 0, NULL, &t, 1, NULL, 0, &ticket));
  return ticket;
}

int main(int argc, char **argv) {
  char port[64];
  const char *settings[] = {"DMLC_ROLE=worker", "DMLC_PS_ROOT_URI=127.0.0.1",
                            port, "FSERVER_LOG=error", "DMLC_NUM_WORKER=2"};
  int64_t dims[128], four = 4;
  int rc;
  fs_node node;
  snprintf(port, sizeof port, "DMLC_PS_ROOT_PORT=%s", argv[1]);
  check("open", fs_open(settings, 5, &node));
  while ((rc = fs_wait_ready(node, 1000000000)) == -EAGAIN)
    ;
  check("wait_ready", rc);
  if (strcmp(argv[2], "shared") == 0) {
    fs_shared shared;
    uint64_t address;
    check("shared_alloc", fs_shared_alloc(sizeof own, &shared, &address));
    memory = (char *)address;
  }
  for (int i = 5; i < argc; i++)
    dims[i - 5] = strtoll(argv[i], NULL, 10);
  for (int turn = 0; turn < 2; turn++) {
    fs_error e;
    fs_ticket odd =
        push(node, 1, (uint8_t)atoi(argv[3]), strtoull(argv[4], NULL, 10), dims,
             (uint32_t)(argc - 5));
    fs_ticket good = push(node, 2, 6, 16, &four, 1);
    if (wait_for(node, odd) != -EMSGSIZE || fs_errmsg(&e) != 0)
      return 2;
    puts(e.text);
    check("wait", wait_for(node, good));
  }
  check("close", fs_close(node));
  return 0;
}
