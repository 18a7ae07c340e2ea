// Worker: the node that pushes tensors and pulls answers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "fserver/node.hpp"

namespace fserver {

class Worker : public Node {
public:
  // Throws ConfigError if a setting is wrong, and TimeoutError as connect().
  explicit Worker(const Options &options = {})
      : Node("worker", detail::Settings(options)) {
    if (options.connect)
      connect();
  }

  // Sends the P push tensors to every server and lets every server write Q answers. Returns at
  // once; a lost server is no error here: wait throws it.
  //
  // The memory of all tensors must stay valid until ended(handle) is true, as it is when the handle's
  // wait has returned, or until the node is closed. Until then do not change what is pushed, do not
  // read what is pulled, and name no pull tensor in another push_pull. wait may throw before: with
  // two servers, one is lost while the other still writes its answer. The Tensor objects themselves
  // are read during the call only.
  //
  // push: distinct keys. A key that is pushed again waits until the server has answered its last
  //     push. Shapes may change from call to call.
  // pull: servers() * Q tensors. pull[i * Q + j] takes answer j of server i.
  // after: with tensors on the GPU, sends when what is queued on that stream has run.
  //
  // Throws ConfigError: a pointer is null, a device is wrong, a key is pushed twice, or a pull
  // tensor shares memory with another tensor of the call. ShapeError: counts do not fit, or bytes
  // are not those of dtype and shape. LimitError: 4,096 push_pulls have not completed.
  Handle push_pull(Tensors push, Tensors pull,
                   std::optional<Stream> after = std::nullopt) {
    State &s = enter_connected("push_pull");
    const std::size_t np = push.size(), nq = pull.size();
    const auto servers = static_cast<std::size_t>(s.info.servers);
    if (np + nq == 0 || nq % servers)
      refuse_counts(nq, servers);
    fs_tensor *t = list("push_pull", push, pull, s.info.device, servers > 1);
    fs_ticket ticket = 0;
    detail::check("push_pull",
                  fs_push_pull(s.id, 0, after ? &after->handle : nullptr, t, np,
                               t + np, nq, &ticket));
    return handle(s.id, ticket);
  }

  // push_pull with one server of the rail, 0 to servers() - 1: all pull tensors are for it. The server
  // takes such a request with get_unicasts. Only requests that push the same key keep their order.
  Handle push_pull_to(int server, Tensors push, Tensors pull,
                      std::optional<Stream> after = std::nullopt) {
    State &s = enter_connected("push_pull_to");
    const std::size_t np = push.size(), nq = pull.size();
    if (server < 0 || server >= s.info.servers)
      throw ConfigError("push_pull_to: server is " + std::to_string(server) +
                        ", want 0 to " + std::to_string(s.info.servers - 1));
    if (np + nq == 0)
      refuse_counts(0, 1);
    fs_tensor *t = list("push_pull_to", push, pull, s.info.device, false);
    fs_ticket ticket = 0;
    detail::check("push_pull_to",
                  fs_push_pull_to(s.id, server,
                                  after ? &after->handle : nullptr, t, np,
                                  t + np, nq, &ticket));
    return handle(s.id, ticket);
  }

private:
  // Checks the tensors of a call and describes them for the engine: those pushed, then those pulled.
  static fs_tensor *list(const char *call, Tensors push, Tensors pull,
                         int device, bool strict) {
    const std::size_t np = push.size(), nq = pull.size();
    fs_tensor *t = detail::scratch<fs_tensor>(np + nq);
    for (std::size_t i = 0; i < np; i++)
      detail::describe(call, "push", i, push[i], device, &t[i]);
    for (std::size_t j = 0; j < nq; j++)
      detail::describe(call, "pull", j, pull[j], device, &t[np + j]);
    if (np > 1)
      check_distinct(push);
    if (nq > 1 || (np && strict))
      check_overlap(t, np, nq, strict);
    return t;
  }

  [[noreturn]] static void refuse_counts(std::size_t nq, std::size_t servers) {
    if (nq % servers == 0)
      throw ShapeError("push_pull: push and pull are both empty: give at least "
                       "one tensor");
    throw ShapeError("push_pull: pull has " + std::to_string(nq) +
                     " tensors, want a multiple of the number of servers (" +
                     std::to_string(servers) +
                     "): pull[i*Q + j] is tensor j of Q from server i");
  }

  // Refuses keys that are pushed twice: both would go to one receive buffer.
  static void check_distinct(Tensors push) {
    const std::size_t n = push.size();
    auto *keys = detail::scratch<std::uint64_t>(n);
    for (std::size_t i = 0; i < n; i++)
      keys[i] = push[i].key;
    std::sort(keys, keys + n);
    const auto *twice = std::adjacent_find(keys, keys + n);
    if (twice != keys + n)
      throw ConfigError("push_pull: push has key " + std::to_string(*twice) +
                        " twice: give each tensor of a call a different key");
  }

  struct Range {
    std::uintptr_t begin, end;
    std::size_t i;
  };

  // Refuses memory that is written twice, and, if strict, memory that is written while it is sent.
  static void check_overlap(const fs_tensor *t, std::size_t np, std::size_t nq,
                            bool strict) {
    auto *ranges = detail::scratch<Range>(np + nq);
    std::size_t n = 0;
    for (std::size_t i = strict ? 0 : np; i < np + nq; i++) {
      const auto begin = reinterpret_cast<std::uintptr_t>(t[i].data);
      if (t[i].bytes)
        ranges[n++] = {begin, begin + t[i].bytes, i};
    }
    std::sort(ranges, ranges + n,
              [](const Range &a, const Range &b) { return a.begin < b.begin; });
    // The furthest end so far of any tensor, and of a pull tensor.
    const Range *any = nullptr, *pull = nullptr;
    for (const Range *r = ranges; r != ranges + n; r++) {
      const bool writes = r->i >= np;
      const Range *other = writes ? any : pull;
      if (other && other->end > r->begin)
        refuse_overlap(std::min(other->i, r->i), std::max(other->i, r->i), np);
      if (!any || r->end > any->end)
        any = r;
      if (writes && (!pull || r->end > pull->end))
        pull = r;
    }
  }

  [[noreturn]] static void refuse_overlap(std::size_t a, std::size_t b,
                                          std::size_t np) {
    const std::string first = a < np ? "push[" + std::to_string(a) + "]"
                                     : "pull[" + std::to_string(a - np) + "]";
    throw ConfigError("push_pull: pull[" + std::to_string(b - np) + "] and " +
                      first +
                      " share memory: pass tensors that do not overlap");
  }
};

} // namespace fserver
