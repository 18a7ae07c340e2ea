// A plugin: a server that runs within a program that has an engine of its own.
#include <thread>

#include "fserver/fserver.hpp"

static std::thread serving;

// Opens a server that doubles floats; it ends when its worker leaves.
extern "C" int plugin_begin(const char *scheduler) {
  try {
    fserver::Options o;
    o.scheduler = scheduler;
    o.connect = false;
    serving = std::thread([server = fserver::Server(o)]() mutable {
      try {
        server.connect();
        fserver::Batch batch;
        while (server.get_batch(batch)) {
          for (fserver::Request &r : batch) {
            const fserver::Tensor &x = r[0];
            for (std::uint64_t i = 0; i < x.bytes / sizeof(float); i++)
              x.as<float>()[i] *= 2;
            server.respond(x, r);
          }
        }
      } catch (const fserver::ClosedError &) {
      }
      server.stop();
    });
    return 0;
  } catch (const fserver::Error &e) {
    return e.code();
  }
}

extern "C" void plugin_end() { serving.join(); }
