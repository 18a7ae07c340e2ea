// What `fserver bench graph trips` is measured by: the same exchanges in plain CUDA, two processes with a
// GPU each (one for both if there is one), fixed sizes, no checks, no abort. Prints a JSON line for each.
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

static int side;

static void check(int rc, const char *what, int line) {
  if (rc != 0) {
    printf("side %d, line %d: %s: error %d\n", side, line, what, rc);
    fflush(stdout);
    _exit(1);
  }
}
#define OK(call) check(static_cast<int>(call), #call, __LINE__)

struct Meeting {
  std::atomic<int> arrived;
  cudaIpcMemHandle_t handle[2];
};
static Meeting *meeting;

static double microseconds() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

static void meet() {
  static int round = 0;
  round += 2;
  meeting->arrived++;
  const double since = microseconds();
  while (meeting->arrived < round)
    if (microseconds() - since > 30e6)
      check(-1, "the other side does not come", __LINE__);
}

// One message: slice of a block, then its flag.
__global__ void __launch_bounds__(1024) put(const uint4 *from, uint4 *to, size_t n, unsigned *count, unsigned *flags) {
  const size_t per = (n + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * per, end = min(n, begin + per);
  for (size_t i = begin + threadIdx.x; i < end; i += blockDim.x)
    to[i] = from[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned next = ++count[blockIdx.x];
    __threadfence_system();
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flags + blockIdx.x), "r"(next) : "memory");
  }
}

__global__ void take(unsigned *flags, unsigned n, unsigned *count) {
  const unsigned next = *count + 1;
  __syncthreads();
  if (threadIdx.x < n) {
    unsigned v;
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(flags + threadIdx.x) : "memory");
    } while (static_cast<int>(v - next) < 0);
  }
  __syncthreads();
  if (threadIdx.x == 0)
    *count = next;
}

static void report(const std::string &what, size_t push, size_t pull, std::vector<double> v) {
  if (side != 0)
    return;
  std::sort(v.begin(), v.end());
  printf("{\"what\": \"%s\", \"push\": %zu, \"pull\": %zu, \"p50_us\": %.2f, \"p99_us\": %.2f, \"min_us\": %.2f, "
         "\"n\": %zu}\n",
         what.c_str(), push, pull, v[v.size() / 2], v[v.size() * 99 / 100], v[0], v.size());
  fflush(stdout);
}

int main() {
  meeting = static_cast<Meeting *>(
      mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const pid_t child = fork(); // before CUDA
  side = child == 0;
  int gpus = 0;
  OK(cudaGetDeviceCount(&gpus));
  OK(cudaSetDevice(gpus > 1 ? side : 0));
  const int runs = gpus > 1 ? 100 : 10;
  constexpr int kInner = 20;
  constexpr size_t kRoom = 160 << 20, kFlags = 128 << 20;
  char *mine, *theirs;
  OK(cudaMalloc(&mine, kRoom));
  OK(cudaMemset(mine, 0, kRoom));
  OK(cudaDeviceSynchronize());
  OK(cudaIpcGetMemHandle(&meeting->handle[side], mine));
  meet();
  OK(cudaIpcOpenMemHandle(reinterpret_cast<void **>(&theirs), meeting->handle[1 - side],
                          cudaIpcMemLazyEnablePeerAccess));
  cudaStream_t stream;
  OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  char *source = mine + (64 << 20);
  auto word = [](char *base, int i) { return reinterpret_cast<unsigned *>(base + kFlags) + 64 * i; };

  auto time = [&](const std::string &work, size_t push, size_t pull, bool graph, std::function<void()> body) {
    cudaGraph_t g;
    cudaGraphExec_t exec;
    if (graph) {
      OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < kInner; i++)
        body();
      OK(cudaStreamEndCapture(stream, &g));
      OK(cudaGraphInstantiate(&exec, g, 0));
    }
    std::vector<double> v;
    for (int r = 0; r < runs + 5; r++) {
      meet();
      const double started = microseconds();
      if (graph)
        OK(cudaGraphLaunch(exec, stream));
      else
        for (int i = 0; i < kInner; i++)
          body();
      OK(cudaStreamSynchronize(stream));
      if (r >= 5)
        v.push_back((microseconds() - started) / kInner);
    }
    if (graph) {
      OK(cudaGraphExecDestroy(exec));
      OK(cudaGraphDestroy(g));
    }
    report(work + (graph ? ", graph x20" : ", enqueued x20"), push, pull, v);
    meet();
  };

  const size_t sizes[3][2] = {{4096, 4096}, {65536, 65536}, {896 << 10, 1792 << 10}};
  int area = 2;
  for (auto &size : sizes) {
    const size_t bytes = side == 0 ? size[0] : size[1];
    // Copy engine: a flag that is set to 1, waited for and set back.
    auto flag = [](char *base) { return reinterpret_cast<CUdeviceptr>(base + kFlags); };
    auto out = [&] {
      OK(cudaMemcpyAsync(theirs, source, bytes, cudaMemcpyDeviceToDevice, stream));
      OK(cuStreamWriteValue32(stream, flag(theirs), 1, 0));
    };
    auto in = [&] {
      OK(cuStreamWaitValue32(stream, flag(mine), 1, CU_STREAM_WAIT_VALUE_GEQ));
      OK(cuStreamWriteValue32(stream, flag(mine), 0, 0));
    };
    auto copies = [&] {
      side == 0 ? out() : in();
      side == 0 ? in() : out();
    };
    time("copy engine", size[0], size[1], true, copies);
    time("copy engine", size[0], size[1], false, copies);

    const int blocks = size[0] > 65536 ? 16 : size[0] > 4096 ? 8 : 1;
    unsigned *counts = word(mine, area), *seen = word(mine, area + 1), *flags = word(mine, area + 2);
    unsigned *far = word(theirs, area + 2);
    area += 3;
    auto send = [&] {
      put<<<blocks, 1024, 0, stream>>>(reinterpret_cast<uint4 *>(source), reinterpret_cast<uint4 *>(theirs),
                                       bytes / 16, counts, far);
    };
    auto recv = [&] { take<<<1, 32, 0, stream>>>(flags, blocks, seen); };
    auto kernels = [&] {
      side == 0 ? send() : recv();
      side == 0 ? recv() : send();
    };
    time("kernels with flags", size[0], size[1], true, kernels);
    time("kernels with flags", size[0], size[1], false, kernels);
  }
  const size_t large = 64 << 20;
  auto copy = [&] { OK(cudaMemcpyAsync(theirs, source, large, cudaMemcpyDeviceToDevice, stream)); };
  time("copy engine both ways", large, large, false, copy);
  time("copy engine one way", large, 0, false, [&] {
    if (side == 0)
      copy();
  });
  OK(cudaGetLastError());
  meet();
  if (side == 0) {
    int status = 0;
    wait(&status);
    return status != 0;
  }
  return 0;
}
