/* Memory of a GPU: by dma-buf, by peer memory; writes that reach it late. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PEERS = 256 };
static struct piece peers[PEERS]; /* of length 0: none */
static struct late *first, **last = &first;

static void add(struct mr *m, struct piece p) {
  struct piece *more = realloc(m->piece, (size_t)(m->pieces + 1) * sizeof p);
  if (!more)
    abort();
  m->piece = more;
  m->piece[m->pieces++] = p;
}

/* The pieces of peer memory that a range lies in; 0: it does not. */
int peer_pieces(uint64_t start, uint64_t length, struct mr *m) {
  for (uint64_t at = start, end = start + length; at < end;) {
    int i = 0;
    while (i < PEERS && at - peers[i].start >= peers[i].length)
      i++;
    if (i == PEERS)
      return 0;
    uint64_t skip = at - peers[i].start, n = peers[i].length - skip;
    n = n < end - at ? n : end - at;
    add(m, (struct piece){at, peers[i].alias + skip, n});
    at += n;
  }
  m->peer = m->pieces > 0;
  return m->pieces;
}

/* A dma-buf of the fake GPU has the alias and the length of each piece. */
int dma_buf_pieces(int fd, uint64_t offset, uint64_t length, struct mr *m) {
  uint64_t entry[2], at = m->start, left = length;
  off_t where = 0;
  while (left && pread(fd, entry, sizeof entry, where) == sizeof entry) {
    where += sizeof entry;
    if (offset >= entry[1]) {
      offset -= entry[1];
      continue;
    }
    uint64_t n = entry[1] - offset;
    n = n < left ? n : left;
    add(m, (struct piece){at, entry[0] + offset, n});
    at += n;
    left -= n;
    offset = 0;
  }
  return left ? EINVAL : 0;
}

/* Whether the CPU can read the ends of a range. It cannot in a GPU's. */
int seen(void *addr, size_t length) {
  char byte;
  struct iovec to = {&byte, 1},
               from[2] = {{addr, 1}, {(char *)addr + length - 1, 1}};
  for (int i = 0; i < 2; i++)
    if (process_vm_readv(getpid(), &to, 1, &from[i], 1, 0) != 1)
      return 0;
  return 1;
}

static void copy(struct mr *m, uint64_t at, char *host, uint64_t n, int in) {
  for (int i = 0; i < m->pieces && n; i++) {
    struct piece *p = &m->piece[i];
    uint64_t skip = at - p->start, k = p->length - skip;
    if (skip >= p->length)
      continue;
    k = k < n ? k : n;
    char *gpu = (char *)(uintptr_t)(p->alias + skip);
    memcpy(in ? gpu : host, in ? host : gpu, k);
    at += k;
    host += k;
    n -= k;
  }
  if (!m->pieces)
    memcpy(in ? (char *)(uintptr_t)at : host, in ? host : (char *)(uintptr_t)at,
           n);
}

void copy_in(struct mr *m, uint64_t at, const char *from, uint64_t n) {
  copy(m, at, (char *)from, n, 1);
}

void copy_out(struct mr *m, uint64_t at, char *to, uint64_t n) {
  copy(m, at, to, n, 0);
}

/* Has a write arrive with the next read, or when the memory is let go of. */
void put_off(struct mr *m, uint64_t at, char *from, uint64_t n) {
  struct late *l = malloc(sizeof *l + n);
  *l = (struct late){m, at, n, NULL};
  memcpy(l->bytes, from, n);
  *last = l;
  last = &l->next;
}

/* Has the writes arrive that were put off: to one registration, or all. */
void arrive(struct mr *m) {
  struct late **at = &first;
  while (*at) {
    struct late *l = *at;
    if (m && l->mr != m) {
      at = &l->next;
      continue;
    }
    if (!l->mr->freed)
      copy_in(l->mr, l->at, l->bytes, l->length);
    *at = l->next;
    free(l);
  }
  last = at;
}

/* For tests: memory of a GPU that peer memory has registered for. With no alias
 * it is freed, and registrations of it are void. */
int fake_peer(uint64_t start, uint64_t alias, uint64_t length) {
  int rc = -1;
  lock();
  for (int i = 0; i < PEERS && rc; i++) {
    struct piece *p = &peers[i];
    if (alias ? p->length == 0 : p->length && p->start == start) {
      *p = (struct piece){start, alias, alias ? length : 0};
      rc = 0;
    }
  }
  for (struct mr *m = mrs; m && !alias; m = m->next)
    m->freed |=
        m->peer && m->start < start + length && start < m->start + m->mr.length;
  unlock();
  return rc;
}
