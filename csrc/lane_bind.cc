// Registers what stream channels use: Lane, HostCall, Mark, and functions about GPUs.

#include "bind.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "args.h"
#include "host_call.h"
#include "lane.h"
#include "mark.h"

namespace fserver {
namespace {

PyObject *lane_send(PyObject *self, PyObject *const *args, Py_ssize_t n,
                    PyObject *kw) {
  return guarded([&] {
    static constexpr const char *kNames[] = {"rows"};
    PyObject *a[1];
    bind_args("send", kNames, 1, 0, args, n, kw, a);
    self_as<Lane>(self).send(a[0]);
    return Py_NewRef(Py_None);
  });
}

PyObject *lane_recv(PyObject *self, PyObject *const *args, Py_ssize_t n,
                    PyObject *kw) {
  return guarded([&] {
    PyObject *a[1];
    bind_args("recv", nullptr, 0, 0, args, n, kw, a);
    self_as<Lane>(self).recv();
    return Py_NewRef(Py_None);
  });
}

// (tensor, row_bytes, kind, from, to, flags, credits, counted, bytes, rows,
// stride, ahead, blocks, peer)
Segment read_segment(const py::tuple &t) {
  auto at = [&](size_t i) { return t[i].cast<uint64_t>(); };
  Segment g;
  memset(&g, 0, sizeof g);
  g.tensor = t[0].cast<int>();
  g.row_bytes = at(1);
  g.s.kind = static_cast<unsigned short>(at(2));
  g.s.from = at(3);
  g.s.to = at(4);
  g.s.flags = at(5);
  g.s.credits = at(6);
  g.s.counted = at(7);
  g.s.bytes = at(8);
  g.s.rows = static_cast<unsigned>(at(9));
  g.s.stride = static_cast<unsigned>(at(10));
  g.s.ahead = static_cast<unsigned>(at(11));
  g.s.blocks = static_cast<unsigned short>(at(12));
  g.s.peer = static_cast<unsigned short>(at(13));
  return g;
}

std::vector<Segment> read_segments(const py::handle &list) {
  std::vector<Segment> all;
  for (py::handle t : list)
    all.push_back(read_segment(py::reinterpret_borrow<py::tuple>(t)));
  return all;
}

void define_lane(py::module_ &m) {
  auto lane =
      py::class_<Lane, std::unique_ptr<Lane, Lane::Leave>>(
          m, "Lane", py::module_local(),
          "The device's part of a stream channel.")
          .def(py::init([](int device, const std::string &image,
                           py::handle timeout_ms, bool programmatic) {
                 const int64_t timeout =
                     read_ms(timeout_ms.ptr(), {"channel", "timeout_ms"});
                 return std::unique_ptr<Lane, Lane::Leave>(
                     new Lane(device, image, timeout, programmatic));
               }),
               py::arg("device"), py::arg("image"), py::arg("timeout_ms"),
               py::arg("programmatic"))
          .def("allocate", &Lane::allocate)
          .def("share",
               [](Lane &l, uint64_t address) {
                 auto [handle, bytes, offset] = l.share(address);
                 return py::make_tuple(py::bytes(handle), bytes, offset);
               })
          .def("map",
               [](Lane &l, const py::bytes &handle, const std::string &owner) {
                 return l.map(handle, owner);
               })
          .def("reach", &Lane::reach)
          .def("plan",
               [](Lane &l, bool sends, const py::list &steps, uint64_t counts,
                  uint64_t dead) {
                 std::vector<Lane::Step> all;
                 for (py::handle h : steps) {
                   auto t = py::reinterpret_borrow<py::tuple>(h);
                   all.push_back({read_segments(t[0]), t[1].cast<int>()});
                 }
                 l.plan(sends, std::move(all), counts, dead);
               })
          .def("plan_copies",
               [](Lane &l, bool sends, const py::list &segments) {
                 l.plan_copies(sends, read_segments(segments));
               })
          .def("begin", &Lane::begin)
          .def("hold",
               [](Lane &l, py::handle tensors) { l.hold(tensors.ptr()); })
          .def("explain", [](Lane &l, py::handle why) { l.explain(why.ptr()); })
          .def("status", &Lane::status)
          .def_property_readonly("abort_word", &Lane::abort_word)
          .def("abort", &Lane::abort)
          .def("finish", &Lane::finish)
          .def("peek",
               [](Lane &l, uint64_t address, uint64_t bytes) {
                 return py::bytes(l.peek(address, bytes));
               })
          .def("pending", &Lane::pending)
          .def("end", &Lane::end)
          .def("close", &Lane::close);
  add_fast(lane, "send", lane_send,
           "send($self, /, rows=None)\n--\n\n"
           "Enqueues a send on the current stream.");
  add_fast(lane, "recv", lane_recv,
           "recv($self, /)\n--\n\n"
           "Enqueues a receive on the current stream.");
}

// For channels whose messages the engine carries.
void define_host_calls(py::module_ &m) {
  py::class_<Mark>(m, "Mark", py::module_local(),
                   "How far a stream of a GPU is.")
      .def(py::init<int>(), py::arg("device"))
      .def("use",
           [](Mark &m, const std::string &call, const py::function &f,
              const py::args &args) {
             const Mark::Use use(m, call.c_str());
             return f(*args);
           })
      .def("passed", &Mark::passed)
      .def("in_graphs", &Mark::in_graphs);
  py::class_<HostCall>(m, "HostCall", py::module_local(),
                       "What one call of a channel enqueues whose messages the "
                       "engine carries.")
      .def(py::init<Mark &, int, std::string>(), py::keep_alive<1, 2>(),
           py::arg("mark"), py::arg("device"), py::arg("call"))
      .def("ring", [](HostCall &c, py::handle count, py::handle flag,
                      bool last) { c.ring(count.ptr(), flag.ptr(), last); })
      .def("wait",
           [](HostCall &c, py::handle count, uint64_t add, py::handle asked,
              py::handle done) {
             c.wait(count.ptr(), add, asked.ptr(), done.ptr());
           })
      .def("copy", [](HostCall &c, py::handle to,
                      py::handle from) { c.copy(to.ptr(), from.ptr()); })
      .def("run", [](HostCall &c, py::handle bytes) {
        return static_cast<int>(c.run(bytes.ptr()));
      });
}

} // namespace

void define_lanes(py::module_ &m) {
  define_lane(m);
  define_host_calls(m);
  m.def("synchronize", &synchronize, py::arg("device"),
        "Waits for all that a GPU has to do.");
  m.def("settle", &settle, py::arg("device"),
        "Waits for what is on the current and the default stream of a GPU.");
  m.def("lane_source", &lane_source, "The source of the kernels, for NVRTC.");
  m.def("lane_arch", &lane_arch, "Compute capability of a GPU: 90 for 9.0.");
}

} // namespace fserver
