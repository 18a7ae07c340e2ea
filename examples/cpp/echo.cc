// echo.cc: a worker pushes floats, a server sends them back doubled. DMLC_ROLE says which one this
// process is; `fserver run -- ./echo` starts both.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <fserver/fserver.hpp>

using fserver::DType;

// The programs read and write the tensors themselves, so also on a host with GPUs they are in memory of the CPU.
static fserver::Options on_cpu() {
  fserver::Options options;
  options.backend = "CPU";
  return options;
}

static void work() {
  fserver::Worker worker(on_cpu()); // other settings from the environment
  const std::int64_t n = 1024;
  fserver::Memory memory(2 * n * sizeof(float));
  const fserver::Tensor x = memory.tensor(DType::kFloat32, {n}, 0);
  const fserver::Tensor y =
      memory.tensor(DType::kFloat32, {n}, 0, n * sizeof(float));
  for (int step = 0; step < 1000; step++) {
    x.as<float>()[n - 1] = static_cast<float>(step);
    const fserver::Handle handle = worker.push_pull(x, y); // returns at once
    worker.wait(handle, std::chrono::seconds(10));
    if (y.as<float>()[n - 1] != 2 * x.as<float>()[n - 1])
      throw std::runtime_error("a wrong answer");
  }
  std::puts("1000 answers are right");
  worker.stop(); // leaves together with the server
}

static void serve() {
  fserver::Server server(on_cpu());
  fserver::Batch batch; // used again, so that nothing is allocated
  try {
    while (server.get_batch(batch)) {
      for (fserver::Request &request : batch) {
        const fserver::Tensor &x = request[0]; // a view of the receive buffer
        for (std::int64_t i = 0; i < x.shape[0]; i++)
          x.as<float>()[i] *= 2;
        server.respond(x, request);
      }
    }
  } catch (const fserver::ClosedError &) {
    // the workers have left
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
    std::fprintf(stderr, "echo: %s\n", e.what());
    return 1;
  }
}
