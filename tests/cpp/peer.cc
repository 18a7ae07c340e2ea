// A worker or a server, as DMLC_ROLE says; peer.py has the other one.
#include <cstdlib>

#include "cluster.hpp"

using namespace fserver;

namespace {

void work() {
  Worker w;
  Memory m(1 << 16);
  const Tensor x = m.tensor(DType::kBFloat16, {3, 4}, 1);
  const Tensor s = m.tensor(DType::kInt64, {2}, 2, 1024);
  const Tensor y = m.tensor(DType::kBFloat16, {3, 4}, 1, 2048);
  const Tensor shape = m.tensor(DType::kInt64, {2}, 2, 4096);
  for (std::uint16_t i = 0; i < 12; i++)
    x.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(0x3F80 + i); // from 1
  for (std::int64_t step = 0; step < 20; step++) {
    s.as<std::int64_t>()[0] = step;
    w.push_pull({x, s}, {y, shape}).wait(seconds(30));
    EXPECT(std::memcmp(x.data, y.data, y.bytes) == 0);
    EXPECT_EQ(shape.as<std::int64_t>()[0], 3 + step);
    EXPECT_EQ(shape.as<std::int64_t>()[1], 4);
  }
  EXPECT_THROW(RefusedError, "no more", w.push_pull(x, y).wait(seconds(30)));
  w.barrier();
  w.stop();
}

void serve() {
  Server s;
  Batch batch;
  try {
    while (s.get_batch(batch)) {
      for (Request &r : batch) {
        EXPECT(r[0].dtype == DType::kBFloat16);
        EXPECT(r[0].shape == Shape({3, 4}));
        if (r.tensors().size() == 1) {
          s.fail(r, "no more");
          continue;
        }
        std::int64_t shape[2] = {r[0].shape[0] + *r[1].as<std::int64_t>(),
                                 r[0].shape[1]};
        s.respond({r[0], Tensor::of(shape, 2)}, r).wait();
      }
      if (batch[0].tensors().size() == 1)
        break;
    }
    s.barrier();
  } catch (const ClosedError &) {
  }
  s.stop();
}

} // namespace

int main() {
  try {
    std::string(std::getenv("DMLC_ROLE")) == "worker" ? work() : serve();
  } catch (const std::exception &e) {
    failed("peer", 0, e.what());
  }
}
