// What the headers share between threads, over the engine of stub.c.
#include <atomic>

#include "cluster.hpp"

using namespace fserver;

namespace {

Options quick() {
  Options o;
  o.scheduler = "127.0.0.1:1";
  return o;
}

// Echoes in n threads until the server is closed.
std::vector<std::thread> serve(Server &s, int n) {
  std::vector<std::thread> all;
  for (int i = 0; i < n; i++)
    all.emplace_back([&s] {
      Batch batch;
      try {
        while (s.get_batch(batch)) {
          for (Request &r : batch)
            s.respond(r.tensors(), r);
        }
      } catch (const ClosedError &) {
      } catch (const Error &e) {
        EXPECT_EQ(e.code(), ESHUTDOWN);
      }
    });
  return all;
}

} // namespace

CASE(threads_of_one_worker_and_one_server) {
  Server s(quick());
  Worker w(quick());
  auto serving = serve(s, 3);
  std::vector<std::thread> all;
  for (std::uint64_t k = 0; k < 6; k++)
    all.emplace_back([&w, k] {
      for (int i = 1; i <= 200; i++) {
        Memory m(1024); // comes and goes, while others do
        const Tensor x = floats(m, 0, 10, k), y = floats(m, 64, 10, k);
        x.as<float>()[9] = static_cast<float>(i);
        const Handle h = w.push_pull(x, y);
        if (i % 2)
          h.wait();
        else
          w.wait(h);
        EXPECT(h.done());
        EXPECT_EQ(y.as<float>()[9], static_cast<float>(i));
      }
    });
  for (std::thread &t : all)
    t.join();
  s.close();
  for (std::thread &t : serving)
    t.join();
}

CASE(close_while_others_wait) {
  for (int i = 0; i < 20; i++) {
    Worker w(quick());
    Server s(quick());
    float x = 0, y = 0;
    std::atomic<int> refused{0};
    std::vector<std::thread> all;
    for (int k = 0; k < 3; k++)
      all.emplace_back([&] {
        try {
          for (;;) {
            w.push_pull(Tensor::of(&x, 1, 2), {}).wait(milliseconds(50));
          }
        } catch (const ClosedError &) {
          refused++;
        } catch (const TimeoutError &) {
          EXPECT_THROW(
              ClosedError, "",
              for (;;) w.push_pull(Tensor::of(&y, 1, 2), {}).wait(seconds(1)));
          refused++;
        }
      });
    w.close();
    for (std::thread &t : all)
      t.join();
    EXPECT_EQ(refused.load(), 3);
    Batch b; // the next round begins without requests
    while (s.get_batch(b, milliseconds(0)))
      s.respond({}, b[0]);
  }
}

CASE(nodes_come_and_go) {
  std::vector<std::thread> all;
  for (int k = 0; k < 4; k++)
    all.emplace_back([] {
      for (int i = 0; i < 100; i++) {
        Worker w(quick());
        Memory m = Memory::shared(64);
        EXPECT(w.describe() == "{}");
        w.stop();
        w.stop();
      }
    });
  for (std::thread &t : all)
    t.join();
}
