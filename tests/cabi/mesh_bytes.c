/* Which bytes a tensor has, and whether it has them. */
#include <string.h>

#include "mesh.h"

#define STEP UINT64_C(0x9E3779B97F4A7C15)

static uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return x ^ (x >> 31);
}

/* Word i of a tensor is its base + i * STEP: no two places of a tensor, and no
 * two tensors, have the same bytes. */
static uint64_t base_of(const struct head *h) {
  const uint64_t parts[] = {
      h->seed,
      h->seq,
      h->bytes,
      (uint64_t)h->worker << 32 | (uint32_t)h->run,
      (uint64_t)h->server << 32 | (uint32_t)h->server_run,
      (uint64_t)h->index << 32 | (uint32_t)h->key,
  };
  uint64_t x = 0;
  for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++)
    x = mix(x + STEP + parts[i]);
  return x;
}

void fill(void *data, const struct head *h) {
  unsigned char *p = data;
  uint64_t word = base_of(h), whole = h->bytes / 8;
  for (uint64_t i = 0; i < whole; i++, word += STEP)
    memcpy(p + 8 * i, &word, 8);
  memcpy(p + 8 * whole, &word, h->bytes % 8);
  if (h->bytes >= sizeof(*h))
    memcpy(p, h, sizeof(*h));
}

/* The number of bytes of a that differ from those of b. */
static int64_t differ(const void *a, const void *b, size_t n) {
  int64_t wrong = 0;
  for (size_t i = 0; i < n; i++)
    wrong += ((const char *)a)[i] != ((const char *)b)[i];
  return wrong;
}

int64_t count_wrong(const void *data, const struct head *h) {
  const unsigned char *p = data;
  uint64_t word = base_of(h), whole = h->bytes / 8, got, i = 0;
  int64_t wrong = 0;
  if (h->bytes >= sizeof(*h)) {
    wrong = differ(p, h, sizeof(*h));
    i = sizeof(*h) / 8;
    word += i * STEP;
  }
  for (; i < whole; i++, word += STEP) {
    memcpy(&got, p + 8 * i, 8);
    if (got != word)
      wrong += differ(&got, &word, 8);
  }
  return wrong + differ(p + 8 * whole, &word, h->bytes % 8);
}

bool read_head(const void *data, uint64_t bytes, struct head *out) {
  if (bytes < sizeof(*out))
    return false;
  memcpy(out, data, sizeof(*out));
  return true;
}

int plan(const struct options *o, uint64_t seq, uint64_t *bytes) {
  *bytes = o->sizes[seq % (uint64_t)o->nsizes];
  return *bytes <= 64 << 10 ? 1 + (int)(seq / (uint64_t)o->nsizes % MAX_TENSORS)
                            : 1;
}

int32_t key_of(const struct options *o, uint64_t seq, int index) {
  return (int32_t)((seq * MAX_TENSORS + (uint64_t)index) % (uint64_t)o->keys);
}
