// echo_torch.cc: the same with tensors of torch, in C++.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <ATen/ATen.h>
#include <fserver/fserver.hpp>

// A view of a contiguous tensor, which has to outlive the calls that take it. The numbers of DType
// are those of torch. The number of the allocation is 0: it is registered by each call.
static fserver::Tensor view(const at::Tensor &t, std::uint64_t key) {
  TORCH_CHECK(t.is_contiguous(), "want a contiguous tensor");
  return {t.data_ptr(), static_cast<fserver::DType>(t.scalar_type()),
          fserver::Shape(t.sizes().data(), static_cast<std::size_t>(t.dim())),
          key, t.is_cuda() ? static_cast<int>(t.get_device()) : fserver::kCpu};
}

// The programs read and write the tensors themselves, so also on a host with GPUs they are in memory of the CPU.
static fserver::Options on_cpu() {
  fserver::Options options;
  options.backend = "CPU";
  return options;
}

static void work() {
  fserver::Worker worker(on_cpu());
  const at::Tensor x = at::randn({16, 64}, at::kBFloat16);
  at::Tensor y = at::empty_like(x);
  for (int step = 0; step < 100; step++)
    worker.push_pull(view(x, 0), view(y, 0)).wait();
  TORCH_CHECK(at::equal(y, x * 2), "a wrong answer");
  std::puts("the answers are right");
  worker.stop();
}

static void serve() {
  fserver::Server server(on_cpu());
  fserver::Batch batch;
  try {
    while (server.get_batch(batch)) {
      for (fserver::Request &request : batch) {
        const fserver::Tensor &t = request[0];
        const at::Tensor x = at::from_blob(
            t.data, at::IntArrayRef(t.shape.data(), t.shape.size()),
            at::dtype(static_cast<at::ScalarType>(t.dtype)));
        const at::Tensor y = x * 2;
        server.respond(view(y, 0), request).wait(); // y is freed after this
      }
    }
  } catch (const fserver::ClosedError &) {
  }
  server.stop();
}

int main() {
  const char *role = std::getenv("DMLC_ROLE");
  try {
    if (role && std::string(role) == "server")
      serve();
    else
      work();
  } catch (const std::exception &e) {
    std::fprintf(stderr, "echo_torch: %s\n", e.what());
    return 1;
  }
}
