#include <cuda.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <algorithm>
#include <vector>
#define M(c) do { int r = (int)(c); if (r) { printf("%s: %d line %d\n", #c, r, __LINE__); exit(1); } } while (0)
static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e6 + t.tv_nsec / 1e3; }
__global__ void cp(const int4 *a, int4 *b, int n, volatile unsigned long long *f, unsigned long long v) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) b[i] = a[i];
  __threadfence_system(); __syncthreads();
  if (!threadIdx.x) *f = v;
}
int main() {
  M(cudaSetDevice(0)); M(cudaFree(0)); cuInit(0);
  char *d, *h; volatile unsigned long long *f; CUdeviceptr fd; unsigned long long v = 0;
  size_t big = 1 << 20;
  M(cudaMalloc((void **)&d, big)); M(cudaMallocHost((void **)&h, big)); M(cudaMallocHost((void **)&f, 4096)); M(cuMemHostGetDevicePointer(&fd, (void *)f, 0));
  *f = 0;
  cudaStream_t s; M(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking)); cudaEvent_t e, e2; M(cudaEventCreateWithFlags(&e, cudaEventDisableTiming)); M(cudaEventCreateWithFlags(&e2, cudaEventDisableTiming));
  for (size_t n : {64ul, 4096ul, 65536ul, 524288ul}) for (int way = 0; way < 11; way++) {
    std::vector<double> t, c;
    for (int i = 0; i < 2000; i++) {
      double a = now(); v++;
      switch (way) {
      case 0: M(cuMemcpyDtoHAsync(h, (CUdeviceptr)d, n, s)); M(cuStreamWriteValue64(s, fd, v, 0)); break;
      case 1: M(cuMemcpyHtoDAsync((CUdeviceptr)d, h, n, s)); M(cuStreamWriteValue64(s, fd, v, 0)); break;
      case 2: M(cuMemcpyDtoHAsync(h, (CUdeviceptr)d, n, s)); M(cudaEventRecord(e, s)); break;
      case 3: M(cuMemcpyHtoDAsync((CUdeviceptr)d, h, n, s)); M(cudaEventRecord(e, s)); break;
      case 4: M(cuMemcpyDtoH(h, (CUdeviceptr)d, n)); break;
      case 5: M(cuMemcpyHtoD((CUdeviceptr)d, h, n)); break;
      case 6: cp<<<1, 256, 0, s>>>((int4 *)d, (int4 *)h, n / 16, f, v); break;
      case 7: cp<<<1, 256, 0, s>>>((int4 *)h, (int4 *)d, n / 16, f, v); break;
      case 8: M(cudaStreamWaitEvent(s, e2, 0)); M(cuMemcpyDtoHAsync(h, (CUdeviceptr)d, n, s)); M(cuStreamWriteValue64(s, fd, v, 0)); break;
      case 9: M(cuMemcpyAsync((CUdeviceptr)h, (CUdeviceptr)d, n, s)); M(cuStreamWriteValue64(s, fd, v, 0)); break;
      case 10: M(cuMemcpyAsync((CUdeviceptr)d, (CUdeviceptr)h, n, s)); M(cuStreamWriteValue64(s, fd, v, 0)); break;
      }
      double b = now();
      if (way == 2 || way == 3) while (cudaEventQuery(e) == cudaErrorNotReady); else if (way != 4 && way != 5) while (*f != v);
      double z = now();
      if (i > 200) { t.push_back(z - a); c.push_back(b - a); }
      M(cudaStreamSynchronize(s));
    }
    std::sort(t.begin(), t.end()); std::sort(c.begin(), c.end());
    const char *names[] = {"dtoh+write", "htod+write", "dtoh+event", "htod+event", "dtoh sync", "htod sync", "kernel dtoh", "kernel htod", "wait+dtoh+write", "memcpyasync dtoh+write", "memcpyasync htod+write"};
    printf("%-24s %7zu B  call %5.1f  all %5.1f us\n", names[way], n, c[c.size() / 2], t[t.size() / 2]);
  }
}
