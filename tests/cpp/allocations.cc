// In the steady state no call of the hot path allocates, in the caller's thread.
#include <cstdlib>
#include <new>

#include "cluster.hpp"

using namespace fserver;

// Everything that allocates comes through these.
extern "C" {
void *__libc_malloc(std::size_t);
void *__libc_calloc(std::size_t, std::size_t);
void *__libc_realloc(void *, std::size_t);
}

static thread_local long allocated;

extern "C" {
void *malloc(std::size_t n) {
  allocated++;
  return __libc_malloc(n);
}
void *calloc(std::size_t n, std::size_t size) {
  allocated++;
  return __libc_calloc(n, size);
}
void *realloc(void *p, std::size_t n) {
  allocated++;
  return __libc_realloc(p, n);
}
}

namespace {

// Allocations of 200 runs, after some that fill the lists.
template <class F> long steady(F &&f) {
  for (int i = 0; i < 50; i++)
    f();
  const long before = allocated;
  for (int i = 0; i < 200; i++)
    f();
  return allocated - before;
}

// What one exchange allocates, with so many tensors each way.
void exchanges(int n) {
  Pair p;
  Memory m(1 << 16);
  std::vector<Tensor> push, pull;
  for (int i = 0; i < n; i++) {
    const auto key = static_cast<std::uint64_t>(i);
    push.push_back(floats(m, key * 64, 32, key));
    pull.push_back(floats(m, key * 64 + 32, 32, key));
  }
  Batch batch;
  std::vector<Handle> answers(1);
  EXPECT_EQ(steady([&] {
              const Handle h = p.w().push_pull(push, pull);
              EXPECT(p.s().get_batch(batch, seconds(5)));
              for (Request &r : batch)
                answers[0] = p.s().respond(r.tensors(), r);
              (void)h.done();
              h.wait();
              p.w().wait(h);
            }),
            0);
  p.stop();
}

} // namespace

CASE(the_counter_counts) {
  const long before = allocated;
  // Calls, which a compiler may not leave out as it may leave out a new.
  ::operator delete(::operator new(4));
  ::operator delete(::operator new(40));
  EXPECT_EQ(allocated - before, 2);
}

CASE(one_tensor) { exchanges(1); }
CASE(forty_tensors) { exchanges(40); }

CASE(tensors_that_are_made_for_the_call) {
  Pair p;
  float x[8] = {}, y[8] = {};
  Batch batch;
  EXPECT_EQ(steady([&] {
              const Handle h =
                  p.w().push_pull({Tensor(x, DType::kFloat32, {2, 2}, 1),
                                   Tensor::of(x + 4, 4, 2)},
                                  {Tensor::of(y, 4), Tensor::of(y + 4, 4)});
              EXPECT(p.s().get_batch(batch, seconds(5)));
              p.s().respond(batch[0].tensors(), batch[0]);
              h.wait();
            }),
            0);
  p.stop();
}

CASE(lent_tensors) {
  Pair p;
  Memory out = Memory::shared(4096);
  const Tensor x = out.tensor(DType::kUInt8, {4096}, 1);
  Batch batch;
  EXPECT_EQ(steady([&] {
              const Handle h = p.w().push_pull(x, {});
              EXPECT(p.s().get_batch(batch, seconds(5)));
              p.s().respond({}, batch[0]);
              h.wait();
            }),
            0);
  p.stop();
}
