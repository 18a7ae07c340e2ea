/* The floor for a library over verbs: two processes, one on each device, joined by one reliable
 * connected queue pair.
 *
 *   floor [--json FILE] [--seconds S] [--gid INDEX] [DEVICE DEVICE]
 *
 * In a round trip each side posts one RDMA write of the message and one send of a frame of 64 bytes
 * behind it: a chain of two work requests, one doorbell, one signalled request. The frame's completion
 * at the peer says that the message is there. Receives are posted ahead, and are posted again in
 * chains of half of them. Both sides poll, each on its own processor.
 *
 * Prints for each size the median time of a round trip and 2 x size / median. Before a size is timed,
 * one round trip compares every byte; in each round trip the last byte of the message is compared.
 */
#define _GNU_SOURCE
#include "rdma.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
  FRAME = 64,
  RECEIVES = 32,
  DEPTH = 64,
  LARGEST = 16 << 20,
  WARM = 3,
  FEWEST = 5,
  MOST = 20000,
};
static const uint32_t sizes[] = {64, 4 << 10, 64 << 10, 1 << 20, LARGEST};
#define SIZES (sizeof sizes / sizeof *sizes)

/* The memory of an end: what it sends, what the peer writes, frames out, frames in. */
enum {
  OUT = 0,
  IN = LARGEST,
  FRAME_OUT = 2 * LARGEST,
  FRAMES_IN = FRAME_OUT + FRAME,
  BYTES = FRAMES_IN + RECEIVES * FRAME
};

/* What a frame says. */
struct frame {
  uint32_t bytes;
  uint8_t mark; /* each byte of the message depends on it */
  uint8_t
      compare; /* compare every byte, and answer with messages that do as well */
  uint8_t last;
};

/* Set up through memory that both processes share. */
struct board {
  struct address addresses[2];
  int posted[2];
};

struct counts {
  uint64_t doorbells, requests, completions;
};

struct side {
  struct end end;
  struct address peer;
  struct counts counts;
  int used;        /* receives that are to be posted again */
  int unsignalled; /* sends whose completion has not come */
};

static uint8_t byte_at(uint32_t i, uint8_t mark) {
  return (uint8_t)(i * 7 + (i >> 8) + mark);
}

static void fill(struct side *side, struct frame *frame) {
  uint8_t *out = (uint8_t *)side->end.memory + OUT;
  if (frame->compare)
    for (uint32_t i = 0; i < frame->bytes; i++)
      out[i] = byte_at(i, frame->mark);
  out[frame->bytes - 1] = byte_at(frame->bytes - 1, frame->mark);
}

static void check(struct side *side, const struct frame *frame) {
  const uint8_t *in = (uint8_t *)side->end.memory + IN;
  for (uint32_t i = frame->compare ? 0 : frame->bytes - 1; i < frame->bytes;
       i++)
    if (in[i] != byte_at(i, frame->mark))
      die("%s: byte %u of %u is %u; want %u", side->end.device, i, frame->bytes,
          in[i], byte_at(i, frame->mark));
}

/* Posts the message and its frame: one doorbell for both. */
static void post_batch(struct side *side, const struct frame *frame) {
  struct end *end = &side->end;
  memcpy(end->memory + FRAME_OUT, frame, sizeof *frame);
  struct ibv_sge message = {(uintptr_t)(end->memory + OUT), frame->bytes,
                            end->mr->lkey};
  struct ibv_sge word = {(uintptr_t)(end->memory + FRAME_OUT), FRAME,
                         end->mr->lkey};
  struct ibv_send_wr send = {.sg_list = &word,
                             .num_sge = 1,
                             .opcode = IBV_WR_SEND,
                             .send_flags = IBV_SEND_SIGNALED};
  struct ibv_send_wr write = {
      .next = &send,
      .sg_list = &message,
      .num_sge = 1,
      .opcode = IBV_WR_RDMA_WRITE,
      .wr.rdma = {.remote_addr = side->peer.memory + IN,
                  .rkey = side->peer.rkey},
  };
  struct ibv_send_wr *bad;
  int error = ibv_post_send(end->qp, &write, &bad);
  if (error != 0)
    errno = error, die("%s: ibv_post_send", end->device);
  side->counts.doorbells++;
  side->counts.requests += 2;
  side->unsignalled++;
}

/* Posts `n` receives in one chain, into the slots that follow `first`. */
static void post_receives(struct side *side, int n) {
  struct end *end = &side->end;
  struct ibv_sge parts[RECEIVES];
  struct ibv_recv_wr receives[RECEIVES], *bad;
  static int slot; /* they are used in the order in which they are posted */
  for (int i = 0; i < n; i++, slot = (slot + 1) % RECEIVES) {
    parts[i] =
        (struct ibv_sge){(uintptr_t)(end->memory + FRAMES_IN + slot * FRAME),
                         FRAME, end->mr->lkey};
    receives[i] =
        (struct ibv_recv_wr){.wr_id = (uint64_t)slot,
                             .next = i + 1 < n ? &receives[i + 1] : NULL,
                             .sg_list = &parts[i],
                             .num_sge = 1};
  }
  int error = ibv_post_recv(end->qp, receives, &bad);
  if (error != 0)
    errno = error, die("%s: ibv_post_recv", end->device);
  side->counts.doorbells++;
  side->counts.requests += (uint64_t)n;
}

/* Polls until the peer's next frame has come, and until no older send of ours is open. */
static struct frame next_frame(struct side *side) {
  struct frame frame = {0};
  double late = now() + 60;
  for (int found = 0; !found;) {
    struct ibv_wc wc[4];
    int n = ibv_poll_cq(side->end.cq, 4, wc);
    if (n < 0 || (n == 0 && now() > late))
      die("%s: no frame in 60 s (%d)", side->end.device, n);
    for (int i = 0; i < n; i++) {
      if (wc[i].status != IBV_WC_SUCCESS)
        die("%s: a request ended: %s", side->end.device,
            ibv_wc_status_str(wc[i].status));
      side->counts.completions++;
      if (wc[i].opcode == IBV_WC_RECV) {
        memcpy(&frame, side->end.memory + FRAMES_IN + wc[i].wr_id * FRAME,
               sizeof frame);
        found = 1;
        side->used++;
      } else {
        side->unsignalled--;
      }
    }
  }
  if (side->used >= RECEIVES / 2) {
    post_receives(side, side->used);
    side->used = 0;
  }
  return frame;
}

static void join(struct side *side, struct board *board, int me,
                 const char *device, int gid) {
  pin(me);
  end_open(&side->end, device, gid, DEPTH, BYTES);
  board->addresses[me] = end_address(&side->end);
  __atomic_store_n(&board->posted[me], 1, __ATOMIC_RELEASE);
  while (__atomic_load_n(&board->posted[!me], __ATOMIC_ACQUIRE) < 1)
    nap(0.001);
  side->peer = board->addresses[!me];
  end_connect(&side->end, &side->peer,
              (struct patience){.retries = 6, .rnr_retries = 0});
  post_receives(side, RECEIVES);
  __atomic_store_n(&board->posted[me], 2, __ATOMIC_RELEASE);
  while (__atomic_load_n(&board->posted[!me], __ATOMIC_ACQUIRE) < 2)
    nap(0.001);
}

/* The answering side: sends back as many bytes as came, until a frame says that it is the last. */
static void answer(struct side *side) {
  for (;;) {
    struct frame frame = next_frame(side);
    check(side, &frame);
    frame.mark++;
    fill(side, &frame);
    post_batch(side, &frame);
    if (frame.last)
      break;
  }
  struct ibv_wc wc;
  while (side->unsignalled > 0) {
    if (!wait_completion(&side->end, &wc, 10) || wc.status != IBV_WC_SUCCESS)
      die("%s: the last send did not complete", side->end.device);
    side->unsignalled--;
  }
}

static double round_trip(struct side *side, struct frame frame) {
  fill(side, &frame);
  double start = now();
  post_batch(side, &frame);
  struct frame back = next_frame(side);
  double took = now() - start;
  if (back.bytes != frame.bytes || back.mark != (uint8_t)(frame.mark + 1))
    die("%s: the answer is to another frame", side->end.device);
  check(side, &back);
  return took;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

struct result {
  uint32_t bytes;
  int trips;
  double p10, median, p90;
  struct counts each; /* x 100 */
};

static struct result measure(struct side *side, uint32_t bytes, double seconds,
                             int last) {
  static double took[MOST];
  struct frame frame = {.bytes = bytes, .compare = 1};
  for (int i = 0; i < WARM; i++, frame.compare = 0, frame.mark += 2)
    round_trip(side, frame);
  struct counts before = side->counts;
  double end = now() + seconds;
  int n = 0;
  for (int done = 0; !done; n++, frame.mark += 2) {
    done = (now() > end && n >= FEWEST) || n == MOST - 1;
    frame.last = (uint8_t)(done && last);
    took[n] = round_trip(side, frame);
  }
  qsort(took, (size_t)n, sizeof *took, by_value);
  return (struct result){
      .bytes = bytes,
      .trips = n,
      .p10 = took[n / 10],
      .median = took[n / 2],
      .p90 = took[n * 9 / 10],
      .each = {(side->counts.doorbells - before.doorbells) * 100 / n,
               (side->counts.requests - before.requests) * 100 / n,
               (side->counts.completions - before.completions) * 100 / n},
  };
}

static void print(const struct result *results, const char *json) {
  printf("%10s %8s %12s %12s %12s %9s %10s %9s %12s\n", "bytes", "trips",
         "p10 us", "median us", "p90 us", "MiB/s", "doorbells", "requests",
         "completions");
  FILE *file = json != NULL ? fopen(json, "w") : NULL;
  if (json != NULL && file == NULL)
    die("%s", json);
  for (size_t i = 0; i < SIZES; i++) {
    const struct result *r = &results[i];
    double rate = 2.0 * r->bytes / r->median / (1 << 20);
    printf("%10u %8d %12.1f %12.1f %12.1f %9.1f %10.2f %9.2f %12.2f\n",
           r->bytes, r->trips, r->p10 * 1e6, r->median * 1e6, r->p90 * 1e6,
           rate, r->each.doorbells / 100.0, r->each.requests / 100.0,
           r->each.completions / 100.0);
    if (file != NULL)
      fprintf(file,
              "%s{\"bytes\": %u, \"trips\": %d, \"p10_us\": %.2f, "
              "\"median_us\": %.2f, "
              "\"p90_us\": %.2f, \"mib_per_s\": %.2f}",
              i ? ",\n " : "[", r->bytes, r->trips, r->p10 * 1e6,
              r->median * 1e6, r->p90 * 1e6, rate);
  }
  if (file != NULL && (fprintf(file, "]\n") < 0 || fclose(file) != 0))
    die("%s", json);
}

int main(int argc, char **argv) {
  const char *json = NULL, *devices[2] = {"rxe0", "rxe1"};
  double seconds = 2;
  int gid = GID_IPV4, named = 0;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--json") == 0 && i + 1 < argc)
      json = argv[++i];
    else if (strcmp(argv[i], "--seconds") == 0 && i + 1 < argc)
      seconds = atof(argv[++i]);
    else if (strcmp(argv[i], "--gid") == 0 && i + 1 < argc)
      gid = atoi(argv[++i]);
    else if (argv[i][0] != '-' && named < 2)
      devices[named++] = argv[i];
    else
      die("floor: %s: want [--json FILE] [--seconds S] [--gid INDEX] [DEVICE "
          "DEVICE]",
          argv[i]);
  }
  struct board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  static struct side side;
  static struct result results[SIZES];
  pid_t child = fork();
  if (child < 0)
    die("fork");
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    join(&side, board, 1, devices[1], gid);
    answer(&side);
    return 0;
  }
  join(&side, board, 0, devices[0], gid);
  for (size_t i = 0; i < SIZES; i++)
    results[i] = measure(&side, sizes[i], seconds, i + 1 == SIZES);
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0)
    die("the answering process failed: status %d", status);
  printf("%s to %s, GID %d, one write and one send a direction; doorbells, "
         "requests and completions of one side per round trip\n",
         devices[0], devices[1], gid);
  print(results, json);
  return 0;
}
