// Memory of a GPU through include/fserver and include/ps. Without a GPU it says why and ends with status 77, or, with
// NEED_GPU set, 1.
#include "../../fserver/bench/gpumem.h"
#include "scenes.hpp"

using namespace ps;

int main(int argc, char **argv) {
  try {
    gpumem::Gpu::get(0);
  } catch (const std::exception &e) {
    std::printf("skipped: %s\n", e.what());
    return std::getenv("NEED_GPU") ? 1 : 77;
  }
  backend = "GPU";
  return run_scenes(argc, argv);
}

namespace {

constexpr std::size_t kSizes[] = {1, 4096, (1 << 20) + 3};
constexpr int kSteps = 5;

// Bytes in memory of GPU 0, or of the CPU.
class Bytes {
public:
  Bytes(std::size_t size, bool on_gpu) {
    if (!on_gpu) {
      array = SArray<char>(size);
      return;
    }
    array.reset(
        static_cast<char *>(gpumem::Gpu::get(0).alloc(size)), size,
        [](char *at) { gpumem::Gpu::get(0).free(at); }, GPU, 0, GPU, 0);
  }
  void put(const std::vector<char> &from) {
    gpumem::Gpu::get(0).copy(array.data(), from.data(), from.size());
  }
  void put(const SArray<char> &from) {
    gpumem::Gpu::get(0).copy(array.data(), from.data(), from.size());
  }
  std::vector<char> get() const {
    std::vector<char> to(array.size());
    gpumem::Gpu::get(0).copy(to.data(), array.data(), to.size());
    return to;
  }

  SArray<char> array;
};

std::vector<char> pattern(std::size_t size, int seed) {
  std::vector<char> all(size);
  for (std::size_t i = 0; i < size; i++)
    all[i] =
        static_cast<char>(i * 31 + i / 251 + static_cast<std::size_t>(seed));
  return all;
}

} // namespace

// Each kind of memory at the worker; the server echoes what it has received.
SCENE(tensors_of_fserver, 1, 1) {
  using namespace fserver;
  if (IsServer()) {
    Server &s = Postoffice::GetServer()->server("gpu")->server;
    Batch batch;
    for (int i = 0; i < 4 * kSteps * 3; i++) {
      EXPECT(s.get_batch(batch, std::chrono::seconds(30)));
      s.respond(batch[0].tensors(), batch[0], Stream{0});
    }
    return;
  }
  Worker &w = Postoffice::GetWorker()->worker("gpu")->worker;
  EXPECT_EQ(w.device(), 0);
  for (std::size_t size : kSizes) {
    for (int kind = 0; kind < 4; kind++) {
      Bytes out(size, kind & 1), in(size, kind & 2);
      const Memory x = Memory::of(out.array.data(), size, kind & 1 ? 0 : kCpu);
      const Memory y = Memory::of(in.array.data(), size, kind & 2 ? 0 : kCpu);
      const Shape shape{static_cast<std::int64_t>(size)};
      for (int step = 0; step < kSteps; step++) {
        out.put(pattern(size, step));
        in.put(pattern(size, step + 1));
        w.push_pull(x.tensor(DType::kUInt8, shape,
                             size * 4 + static_cast<std::uint64_t>(kind)),
                    y.tensor(DType::kUInt8, shape), Stream{0})
            .wait(std::chrono::seconds(30));
        EXPECT(in.get() == pattern(size, step));
      }
    }
  }
}

// Values of a worker and of a server, each on the GPU or not, registered by each request or once.
SCENE(values_of_ps, 1, 1) {
  if (IsServer()) {
    static std::map<std::pair<Key, int>, Bytes> values;
    serve<char>([](const KVMeta &meta, const KVPairs<char> &data,
                   KVServer<char> *server) {
      const bool on_gpu = meta.cmd & 4;
      KVPairs<char> res;
      if (meta.push) {
        Bytes b(data.vals.size(), on_gpu);
        b.put(data.vals);
        values.insert_or_assign({meta.key, meta.cmd}, b);
      } else {
        res.vals = values.at({meta.key, meta.cmd}).array;
      }
      server->Response(meta, res);
    });
    return;
  }
  KVWorker<char> kv(0, 0);
  for (std::size_t size : kSizes) {
    for (int kind = 0; kind < 16; kind++) {
      const SArray<Key> key{static_cast<Key>(size)};
      Bytes out(size, kind & 1), in(size, kind & 2);
      if (kind & 8) {
        out.array.register_once();
        in.array.register_once();
      }
      for (int step = 0; step < kSteps; step++) {
        out.put(pattern(size, step + kind));
        in.put(pattern(size, step + kind + 1));
        kv.Wait(kv.ZPush(key, out.array, {}, kind));
        kv.Wait(kv.ZPull(key, &in.array, nullptr, kind));
        EXPECT(in.get() == pattern(size, step + kind));
      }
    }
  }
}

// Pushes are received in memory of the GPU that the program has taken for them.
SCENE(registered_memory_on_a_gpu, 1, 1) {
  const int everybody = kServerGroup + kWorkerGroup;
  SArray<Key> key{5};
  if (IsServer()) {
    static Bytes mine(4096, true);
    auto *server = new KVServer<char>(0);
    server->RegisterRecvBufferWithRank(0, key, mine.array);
    server->set_request_handle(
        [](const KVMeta &meta, const KVPairs<char> &data, KVServer<char> *s) {
          EXPECT(data.vals.data() == mine.array.data());
          EXPECT(data.vals.src_device_type_ == GPU);
          EXPECT(mine.get() == pattern(4096, meta.cmd));
          s->Response(meta);
        });
    Postoffice::Get()->Barrier(0, everybody);
    return;
  }
  Postoffice::Get()->Barrier(0, everybody);
  KVWorker<char> kv(0, 0);
  for (int step = 0; step < kSteps; step++) {
    Bytes out(4096, step & 1);
    out.put(pattern(4096, step));
    kv.Wait(kv.ZPush(key, out.array, {}, step));
  }
}
