// fserver._C: registers what the other files define. lane_bind.cc registers what stream
// channels use.

#include "bind.h"

#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "args.h"
#include "error.h"
#include "flags.h"
#include "host.h"
#include "join.h"
#include "node.h"
#include "process.h"
#include "server.h"
#include "shared.h"
#include "tensor.h"
#include "worker.h"

namespace fserver {
namespace {

PyObject *push_pull(PyObject *self, PyObject *const *args, Py_ssize_t n,
                    PyObject *kw) {
  return guarded([&] {
    static constexpr const char *kNames[] = {
        "push_tensors", "push_keys", "pull_tensors", "pull_keys", "need_event"};
    PyObject *a[5];
    bind_args("push_pull", kNames, 5, 4, args, n, kw, a);
    Worker &worker = self_as<Worker>(self);
    PyObject *first = PyLong_FromUnsignedLongLong(
        worker.push_pull(a[0], a[1], a[2], a[3], !a[4] || truth(a[4])));
    if (!first || !worker.handle_type())
      return first;
    const Ref number = Ref::steal(first);
    return PyObject_CallOneArg(worker.handle_type(), number.get());
  });
}

PyObject *wait(PyObject *self, PyObject *const *args, Py_ssize_t n,
               PyObject *kw) {
  return guarded([&] {
    static constexpr const char *kNames[] = {"handler", "timeout_ms"};
    PyObject *a[2];
    bind_args("wait", kNames, 2, 1, args, n, kw, a);
    self_as<Worker>(self).wait(a[0], a[1]);
    return Py_NewRef(Py_None);
  });
}

PyObject *get_batch(PyObject *self, PyObject *const *args, Py_ssize_t n,
                    PyObject *kw) {
  return guarded([&] {
    static constexpr const char *kNames[] = {"timeout_ms", "at_least"};
    PyObject *a[2];
    bind_args("get_batch", kNames, 2, 0, args, n, kw, a);
    return self_as<Server>(self).get_batch(a[0], a[1]);
  });
}

// kBehind: need_event where it is not given.
template <bool kBehind>
PyObject *respond(PyObject *self, PyObject *const *args, Py_ssize_t n,
                  PyObject *kw) {
  return guarded([&] {
    static constexpr const char *kNames[] = {"tensors", "handler",
                                             "need_event"};
    PyObject *a[3];
    bind_args("respond", kNames, 3, 2, args, n, kw, a);
    self_as<Server>(self).respond(a[0], a[1], a[2] ? truth(a[2]) : kBehind);
    return Py_NewRef(Py_None);
  });
}

PyObject *respond_vec(PyObject *self, PyObject *const *args, Py_ssize_t n,
                      PyObject *kw) {
  return guarded([&] {
    static constexpr const char *kNames[] = {"ret_buffer", "tensors_vec",
                                             "handler_vec"};
    PyObject *a[3];
    bind_args("respond_vec", kNames, 3, 3, args, n, kw, a);
    self_as<Server>(self).respond_vec(a[0], a[1], a[2]);
    return Py_NewRef(Py_None);
  });
}

// Each "NAME=value". The value may be a secret, so no error has it.
Settings read_settings(const py::handle &list) {
  Settings all;
  const Items items(list.ptr(), {"conf", "settings"}, "strings");
  for (size_t i = 0; i < items.size(); i++) {
    const auto text = py::reinterpret_borrow<py::object>(items.at(i));
    if (!PyUnicode_Check(text.ptr()))
      raise(Kind::kConfig, "conf: settings[%zu] is of type %s, want a str", i,
            Py_TYPE(text.ptr())->tp_name);
    // What is not Unicode stays readable in the name.
    const Ref bytes = Ref::steal(
        PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
    const std::string s(PyBytes_AS_STRING(bytes.get()),
                        static_cast<size_t>(PyBytes_GET_SIZE(bytes.get())));
    const std::string name = s.substr(0, s.find('='));
    if (s.find('\0') != s.npos)
      raise(Kind::kConfig, "conf: %s contains a zero byte: remove it",
            name.c_str());
    if (!PyUnicode_AsUTF8(text.ptr())) {
      PyErr_Clear();
      raise(Kind::kConfig,
            "conf: %s is not UTF-8: encode the value as UTF-8, or unset it",
            name.c_str());
    }
    all.push_back(s);
  }
  return all;
}

// Python calls these functions in reverse order: nodes are closed before what was imported earlier ends.
void close_at_exit() {
  static const auto *close = new py::cpp_function(&close_all);
  auto atexit = py::module_::import("atexit");
  atexit.attr("unregister")(*close);
  atexit.attr("register")(*close);
}

void define_node(py::module_ &m) {
  py::class_<Node>(m, "Node", py::module_local(),
                   "A node of a cluster: what all roles have.")
      .def("connect", &Node::connect)
      .def(
          "barrier",
          [](Node &n, py::handle include_server, py::handle include_client,
             py::handle instance_barrier, py::handle timeout_ms) {
            n.barrier(include_server.ptr(), include_client.ptr(),
                      instance_barrier.ptr(), timeout_ms.ptr());
          },
          py::arg("include_server"), py::arg("include_client"),
          py::arg("instance_barrier") = true,
          py::arg("timeout_ms") = py::none())
      .def("stop", &Node::stop)
      .def("close", &Node::close)
      .def("describe", &Node::describe)
      .def("channel_open", &Node::channel_open)
      .def("channel_watch", &Node::channel_watch)
      .def("channel_tell", &Node::channel_tell)
      .def("channel_text",
           [](Node &n, uint64_t channel, uint32_t peer, py::handle timeout_ms) {
             return n.channel_text(channel, peer, timeout_ms.ptr());
           })
      .def("channel_state",
           [](Node &n, uint64_t channel) { n.channel_state(channel); })
      .def("channel_end", &Node::channel_end)
      .def(
          "channel_close",
          [](Node &n, uint64_t channel, py::handle timeout_ms,
             const std::string &why, bool forget) {
            return n.channel_close(channel, timeout_ms.ptr(), why, forget);
          },
          py::arg("channel"), py::arg("timeout_ms"), py::arg("why"),
          py::arg("forget") = true)
      .def("watch_open", &Node::watch_open)
      .def("watch_arm", &Node::watch_arm)
      .def("watch_close", &Node::watch_close)
      .def("ended", &Node::ended)
      .def_property_readonly("rank", [](Node &n) { return n.info().rank; })
      .def_property_readonly("group", [](Node &n) { return n.info().group; })
      .def_property_readonly("instance",
                             [](Node &n) { return n.info().instance; })
      .def_property_readonly("workers",
                             [](Node &n) { return n.info().workers; })
      .def_property_readonly("servers",
                             [](Node &n) { return n.info().servers; })
      .def_property_readonly("device", [](Node &n) { return n.info().device; })
      .def_property_readonly("address",
                             [](Node &n) { return n.info().address; })
      .def_property_readonly("closed", &Node::closed)
      .def_property_readonly("connected", &Node::connected)
      .def_property_readonly("held", &Node::held,
                             "Tickets whose tensors are kept alive.");

  py::class_<Scheduler, Node>(m, "Scheduler", py::module_local())
      .def(py::init([](const py::handle &settings) {
             return std::make_unique<Scheduler>(read_settings(settings));
           }),
           py::arg("settings"));
}

// What is known without a node.
void define_queries(py::module_ &m) {
  m.def(
      "settings",
      [](const py::handle &settings) {
        return settings_json(read_settings(settings));
      },
      py::arg("settings"),
      "JSON of every setting, for \"NAME=value\" strings.");
  m.def(
      "host",
      [](const py::handle &settings) {
        return host_json(read_settings(settings));
      },
      py::arg("settings"),
      "JSON about this host, and what a node with these settings would make "
      "of it.");
  m.def(
      "probe",
      [](const py::handle &settings, py::handle timeout_ms) {
        return probe_json(read_settings(settings),
                          read_ms(timeout_ms.ptr(), {"probe", "timeout_ms"}));
      },
      py::arg("settings"), py::arg("timeout_ms"),
      "JSON about the way to the scheduler that the settings name.");
}

// What needs no torch.
void define_engine(py::module_ &m) {
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      std::rethrow_exception(std::move(p));
    } catch (const Raised &) { // the Python error is set
    }
  });
  try {
    load_errors();
  } catch (const Raised &) {
    throw py::error_already_set();
  }
  watch_fork();
  m.def(
      "enter", [] { enter("load"); },
      "Raises if this process may not use the engine, such as a child of fork "
      "in which it does\n"
      "not run.");
  define_node(m);
  define_queries(m);
  m.def(
      "live",
      [] {
        int64_t nodes = 0, buffers = 0, goroutines = 0;
        enter("live");
        check("live", fs_live(&nodes, &buffers, &goroutines));
        return py::make_tuple(nodes, buffers, goroutines);
      },
      "What is alive: nodes, receive buffers, goroutines.");
  m.def(
      "heap",
      [] {
        int64_t bytes = 0, own = 0;
        enter("heap");
        check("heap", fs_heap(&bytes, &own));
        return py::make_tuple(bytes, own);
      },
      "Bytes of Go's heap that are in use, after a collection, and what of "
      "them the engine has\n"
      "asked for: -1 without GODEBUG=memprofilerate=1.");
  close_at_exit();
}

// For the roles that carry tensors.
template <class C> void add_carry(py::class_<C, Node> &c) {
  c.def("channel_carry",
        [](C &n, uint64_t channel, py::handle words, py::handle out,
           py::handle out_keys, py::handle in, py::handle in_keys,
           py::handle rows, py::handle counts, py::handle timeout_ms,
           bool lands) {
          n.channel_carry(channel, words.ptr(), out.ptr(), out_keys.ptr(),
                          in.ptr(), in_keys.ptr(), rows.ptr(), counts.ptr(),
                          timeout_ms.ptr(), lands);
        });
  c.def("gpu_direct", &C::gpu_direct);
}

void define_worker(py::module_ &m) {
  auto worker =
      py::class_<Worker, Node>(m, "Worker", py::module_local())
          .def(py::init([](const py::handle &settings) {
                 return std::make_unique<Worker>(read_settings(settings));
               }),
               py::arg("settings"))
          .def(
              "get_all_handlers",
              [](Worker &w, py::handle handler) {
                auto [first, n] = w.handlers(handler.ptr());
                py::list l;
                for (uint64_t i = 0; i < n; i++)
                  l.append(first + i);
                return l;
              },
              py::arg("handler"))
          .def(
              "fetch_trace",
              [](Worker &w, py::handle handler) {
                int64_t stamps[8];
                w.trace(handler.ptr(), stamps);
                return std::vector<int64_t>(stamps, stamps + 8);
              },
              py::arg("handler"))
          .def("channel_awaits",
               [](Worker &w, uint64_t channel, py::handle handler) {
                 if (const uint64_t t = w.ticket(handler.ptr()))
                   w.channel_state(channel, t);
               })
          .def("channel_push_pull",
               [](Worker &w, uint64_t channel, py::handle push,
                  py::handle push_keys, py::handle pull, py::handle pull_keys) {
                 return w.push_pull(push.ptr(), push_keys.ptr(), pull.ptr(),
                                    pull_keys.ptr(), true, channel);
               })
          .def("ticket",
               [](Worker &w, py::handle handler) {
                 return w.ticket(handler.ptr());
               })
          .def("done", [](Worker &w,
                          py::handle handler) { return w.done(handler.ptr()); })
          .def("give_handles",
               [](Worker &w, py::handle type) { w.give_handles(type.ptr()); })
          .def_property_readonly("next_handler", &Worker::next_handler);
  add_carry(worker);
  add_fast(worker, "push_pull", push_pull,
           "push_pull($self, /, push_tensors, push_keys, pull_tensors, "
           "pull_keys, need_event=True)\n--\n\n"
           "Sends tensors to every server and takes their answers.");
  add_fast(worker, "wait", wait,
           "wait($self, /, handler, timeout_ms=10000)\n--\n\n"
           "Returns when the push_pull has completed.");
}

void define_stepmesh_worker(py::module_ &m) {
  py::class_<StepmeshWorker, Worker>(m, "StepmeshWorker", py::module_local(),
                                     "A worker that keeps to StepMesh.")
      .def(py::init([](const py::handle &settings, uint64_t next_handler) {
             return std::make_unique<StepmeshWorker>(read_settings(settings),
                                                     next_handler);
           }),
           py::arg("settings"), py::arg("next_handler"));
}

void define_server(py::module_ &m) {
  auto server =
      py::class_<Server, Node>(m, "Server", py::module_local())
          .def(py::init([](const py::handle &settings) {
                 return std::make_unique<Server>(read_settings(settings));
               }),
               py::arg("settings"))
          .def("channel_take",
               [](Server &s, uint64_t channel, py::handle timeout_ms) {
                 return py::reinterpret_steal<py::object>(
                     s.get_batch(timeout_ms.ptr(), nullptr, channel));
               })
          .def(
              "worker_of",
              [](Server &s, py::handle handler) {
                return s.worker_of(handler.ptr());
              },
              py::arg("handler"))
          .def(
              "fail",
              [](Server &s, py::handle handler, py::handle text) {
                s.fail(handler.ptr(), text.ptr());
              },
              py::arg("handler"), py::arg("text"))
          .def(
              "register_recv_buffer",
              [](Server &s, py::handle tensor, py::handle ranks,
                 py::handle keys) {
                s.register_recv_buffer(tensor.ptr(), ranks.ptr(), keys.ptr());
              },
              py::arg("tensor"), py::arg("worker_ranks"), py::arg("push_keys"));
  add_carry(server);
  add_fast(server, "get_batch", get_batch,
           "get_batch($self, /, timeout_ms=None, at_least=None)\n--\n\n"
           "Takes one request of each worker group.");
  add_fast(server, "respond", respond<true>,
           "respond($self, /, tensors, handler, need_event=True)\n--\n\n"
           "Answers a request.");
  add_fast(server, "respond_vec", respond_vec,
           "respond_vec($self, /, ret_buffer, tensors_vec, handler_vec)\n--\n\n"
           "Answers several requests with the rows of one tensor.");

  auto stepmesh = py::class_<StepmeshServer, Server>(
                      m, "StepmeshServer", py::module_local(),
                      "A server that keeps to StepMesh.")
                      .def(py::init([](const py::handle &settings) {
                             return std::make_unique<StepmeshServer>(
                                 read_settings(settings));
                           }),
                           py::arg("settings"));
  add_fast(stepmesh, "respond", respond<false>,
           "respond($self, /, tensors, handler, need_event=False)\n--\n\n"
           "Answers a request.");
}

void define_flags(py::module_ &m) {
  m.def(
      "shared_bytes",
      [](uint64_t bytes) {
        return py::reinterpret_steal<py::object>(shared_bytes(bytes));
      },
      py::arg("bytes"), "A tensor of uint8 in shared memory.");
  m.def(
      "write_flag",
      [](py::handle flag, py::handle seq) {
        write_flag(flag.ptr(), seq.ptr());
      },
      py::arg("flag"), py::arg("seq"), "Writes seq to flag on the stream.");
  m.def(
      "wait_flag",
      [](py::handle flag, py::handle seq, py::handle timeout_ms) {
        wait_flag(flag.ptr(), seq.ptr(), timeout_ms.ptr());
      },
      py::arg("flag"), py::arg("seq"), py::arg("timeout_ms") = py::none(),
      "The stream waits until flag >= seq.");
  m.def(
      "seq_add_one", [](py::handle seq) { seq_add_one(seq.ptr()); },
      py::arg("seq"), "Adds one to seq on the stream.");
  m.def(
      "wait_value",
      [](py::handle flag, py::handle value) {
        wait_value(flag.ptr(), value.ptr());
      },
      py::arg("flag"), py::arg("value"),
      "The stream waits until flag >= value.");
  m.def(
      "set_word",
      [](py::handle word, py::handle value) {
        set_word(word.ptr(), value.ptr());
      },
      py::arg("word"), py::arg("value"), "Writes a word on the CPU.");
  m.def(
      "map_pinned_tensor",
      [](py::handle tensor, py::handle device_index) {
        return py::reinterpret_steal<py::object>(
            map_pinned(tensor.ptr(), device_index.ptr()));
      },
      py::arg("tensor"), py::arg("device_index"),
      "A tensor of a GPU over the memory of a pinned one.");
}

// The rest, once there is an adapter to torch.
void define_tensors(py::module_ &m) {
  uint8_t sizes[256];
  for (size_t i = 0; i < 256; i++)
    sizes[i] = static_cast<uint8_t>(dtype_bytes(i));
  fs_dtypes(sizes, 256);
  define_worker(m);
  define_stepmesh_worker(m);
  define_server(m);
  define_lanes(m);
  define_flags(m);
  close_at_exit(); // before torch goes
}

} // namespace
} // namespace fserver

// Until join() has succeeded, the module has nothing that needs torch.
PYBIND11_MODULE(_C, m) {
  m.doc() = "The engine of fserver.";
  if (fs_abi() != FS_ABI)
    throw py::import_error("fserver._C and its engine were built with "
                           "different versions of fserver.h: run make ext");
  m.attr("abi") = fs_abi();
  m.def(
      "join",
      [handle = py::handle(m)](const std::string &path, py::handle tensor,
                               py::handle facts) {
        std::string why;
        try {
          why = fserver::join(path.c_str(), tensor.ptr(), facts.ptr());
        } catch (const fserver::Raised &) {
          throw py::error_already_set();
        }
        if (!why.empty())
          throw py::import_error(why);
        auto module = py::reinterpret_borrow<py::module_>(handle);
        if (!py::hasattr(module, "Worker"))
          fserver::define_tensors(module);
      },
      py::arg("path"), py::arg("tensor"), py::arg("facts"),
      "Loads an adapter to torch, and defines the rest of the module.");
  fserver::define_engine(m);
}
