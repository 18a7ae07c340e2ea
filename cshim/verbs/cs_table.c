#include "cs_table.h"

#include <errno.h>
#include <stdio.h>

#ifdef CS_VERBS_BUILT_IN

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/utsname.h>

struct cs_ib_table cs_ib;
struct cs_mlx5_table cs_mlx5;
struct cs_dma_buf_table cs_dma_buf;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char opened[PATH_MAX]; /* the library in use; empty: none */

// A function of the library is stored through a pointer to its field.
static void set(void *field, void *function) {
  memcpy(field, &function, sizeof function);
}

// Looks in the library itself too, since one of tests has all in one.
static void open_mlx5(void *library) {
  static const char check[] = "mlx5dv_is_supported";
  if (!dlsym(library, check))
    library = dlopen("libmlx5.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return;
  set(&cs_mlx5.is_supported, dlsym(library, check));
  if (cs_mlx5.is_supported)
    set(&cs_mlx5.modify_qp_lag_port,
        dlsym(library, "mlx5dv_modify_qp_lag_port"));
}

// Whether the kernel moves registered pages of a process that forks. Later ones give a copy to
// the child, which ibv_fork_init would take away.
static int moves_pages(void) {
  struct utsname host;
  int major = 0, minor = 0;
  return uname(&host) == 0 &&
         sscanf(host.release, "%d.%d", &major, &minor) == 2 &&
         (major < 5 || (major == 5 && minor < 12));
}

static int open_library(const char *path, char *why, size_t room) {
  struct cs_ib_table table;
  if (strlen(path) >= sizeof opened) {
    snprintf(why, room, "%.64s...: the name is too long", path);
    return ENAMETOOLONG;
  }
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    snprintf(why, room, "%s", dlerror());
    return ENOENT;
  }
#define FIND(field, symbol, result, arguments)                                 \
  set(&table.field, dlsym(library, symbol));                                   \
  if (!table.field) {                                                          \
    snprintf(why, room, "%s has no function %s (want rdma-core 33 or later)",  \
             path, symbol);                                                    \
    dlclose(library);                                                          \
    return ENOSYS;                                                             \
  }
  CS_IB_TABLE(FIND)
#undef FIND
  int (*fork_init)(void) = NULL;
  if (moves_pages())
    set(&fork_init, dlsym(library, "ibv_fork_init"));
  if (fork_init)
    fork_init(); /* fails where another user of the library came first */
  cs_ib = table;
  set(&cs_dma_buf.reg_mr, dlsym(library, "ibv_reg_dmabuf_mr"));
  open_mlx5(library);
  snprintf(opened, sizeof opened, "%s", path);
  return 0;
}

int cs_ib_open(const char *path, char *why, size_t room) {
  int rc = 0;
  if (!path)
    path = "";
  pthread_mutex_lock(&lock);
  if (!*opened) {
    rc = open_library(*path ? path : "libibverbs.so.1", why, room);
  } else if (*path && strcmp(opened, path) != 0) {
    snprintf(why, room, "this process already uses %s", opened);
    rc = EBUSY;
  }
  pthread_mutex_unlock(&lock);
  return rc;
}

int cs_ib_nonblocking(int fd) {
  int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
    return errno;
  return 0;
}

#else

int cs_ib_open(const char *path, char *why, size_t room) {
  snprintf(why, room,
           "not built in: infiniband/verbs.h was not there (install "
           "libibverbs-dev, or rdma-core-devel, and build again)");
  return ENOSYS;
}

#define ABSENT(name, arguments)                                                \
  int name arguments { return ENOSYS; }
CS_IB_CALLS(ABSENT)
#undef ABSENT

#endif
