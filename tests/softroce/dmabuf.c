/* A libibverbs for tests, around that of the system: a software NIC takes no dma-buf, and this registers the
 * memory of the GPU of engine/gpu/fakegpu for it.
 *
 * That GPU's memory is a file in memory that is mapped twice: at the address of the tensor, where nobody can read
 * or write, and where the GPU copies. Its "dma-buf" is a file that says where the second mapping is. Registering it
 * is registering the second mapping by its address, as a peer memory module would have the kernel pin the GPU's
 * pages, for requests that name the first. All else is the system's library, the kernel and its NIC.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <unistd.h>

/* What fakegpu.ExportDMABuf writes of memory that is in one piece. */
struct piece {
  uint64_t alias, bytes;
};

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset,
                                 size_t length, uint64_t iova, int fd,
                                 int access) {
  struct piece p;
  ssize_t n = pread(fd, &p, sizeof p, 0);
  if (n != sizeof p || offset > p.bytes || length > p.bytes - offset) {
    if (n >= 0)
      errno = EINVAL;
    return NULL;
  }
  return ibv_reg_mr_iova2(pd, (void *)(uintptr_t)(p.alias + offset), length,
                          iova, (unsigned)access);
}
