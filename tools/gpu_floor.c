/* What the copy engine and a flag in shared host memory reach without us: two
 * processes, CUDA IPC, one thread each. Each round trip: copy to the peer, the
 * stream stores a number into host memory, the peer's CPU sees it and answers.
 *
 *   gpu_floor GPU_A GPU_B OUT BACK ROUNDS
 *
 * prints the round trips in nanoseconds, one a line. */
#include <cuda.h>
#include <cuda_runtime.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WARM 100

#define MUST(call)                                                             \
  do {                                                                         \
    int rc_ = (int)(call);                                                     \
    if (rc_ != 0) {                                                            \
      fprintf(stderr, "%s:%d: %s: error %d\n", __FILE__, __LINE__, #call,      \
              rc_);                                                            \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

struct side {
  cudaIpcMemHandle_t memory;
  volatile int ready;
  char pad[4096 - sizeof(cudaIpcMemHandle_t) - sizeof(int)];
  volatile unsigned long long number; /* of the copies that are here */
  char pad2[4088];
};

static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int main(int argc, char **argv) {
  if (argc != 6)
    return fprintf(stderr, "gpu_floor GPU_A GPU_B OUT BACK ROUNDS\n"), 2;
  int gpus[2] = {atoi(argv[1]), atoi(argv[2])};
  size_t bytes[2] = {strtoull(argv[3], 0, 10), strtoull(argv[4], 0, 10)};
  long rounds = atol(argv[5]);
  size_t most = bytes[0] > bytes[1] ? bytes[0] : bytes[1];
  struct side *sides = mmap(0, 2 * sizeof *sides, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  int me = fork() == 0;
  struct side *mine = &sides[me], *theirs = &sides[1 - me];

  MUST(cudaSetDevice(gpus[me]));
  MUST(cudaFree(0));
  char *own, *peer;
  MUST(cudaMalloc((void **)&own, 2 * most));
  char *source = own + most;
  MUST(cudaIpcGetMemHandle(&mine->memory, own));
  MUST(cudaHostRegister(sides, 2 * sizeof *sides,
                        cudaHostRegisterMapped | cudaHostRegisterPortable));
  CUdeviceptr flag; /* the peer's number, which our stream stores */
  MUST(cudaHostGetDevicePointer((void **)&flag, (void *)&theirs->number, 0));
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  __atomic_store_n(&mine->ready, 1, __ATOMIC_SEQ_CST);
  while (!__atomic_load_n(&theirs->ready, __ATOMIC_SEQ_CST))
    sched_yield();
  MUST(cudaIpcOpenMemHandle((void **)&peer, theirs->memory,
                            cudaIpcMemLazyEnablePeerAccess));
  long long *took = malloc(sizeof *took * (size_t)rounds);
  for (long i = 0; i < rounds + WARM; i++) {
    const unsigned long long n = (unsigned long long)i + 1;
    const long long start = now();
    if (me)
      while (mine->number < n)
        ;
    MUST(cudaMemcpyAsync(peer, source, bytes[me], cudaMemcpyDefault, stream));
    MUST(cuStreamWriteValue64(stream, flag, n, 0));
    if (!me)
      while (mine->number < n)
        ;
    if (i >= WARM)
      took[i - WARM] = now() - start;
  }
  MUST(cudaStreamSynchronize(stream));
  if (me)
    return 0;
  for (long i = 0; i < rounds; i++)
    printf("%lld\n", took[i]);
  wait(0);
  return 0;
}
