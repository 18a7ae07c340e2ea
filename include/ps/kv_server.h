// KVServer: answers the requests of KVWorkers. Include ps/kv_app.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "ps/base.h"
#include "ps/internal/postoffice.h"
#include "ps/internal/serving.h"
#include "ps/sarray.h"
#include "ps/simple_app.h"

namespace ps {

// Keys, and the values of all of them, one after the other.
template <class Val> struct KVPairs {
  SArray<Key> keys;
  SArray<Val> vals;
  SArray<int> lens; // values of each key; empty: all have as many
};

// About a request. Response takes it, or a copy.
struct KVMeta {
  int cmd = 0;            // of the call
  bool push = false;      // else a pull
  int sender = 0;         // WorkerRankToID of the worker's group
  int timestamp = 0;      // of the worker
  int customer_id = 0;    // of the worker
  Key key = 0;            // the first key
  std::uint64_t addr = 0; // names the request for Response
  // Values that were pushed, or are asked for, at most INT_MAX; 0: any number of them.
  int val_len = 0;
  int option = 0;
  // What is to be answered, and to which worker: its rank, which counts instances.
  int worker = 0;
  detail::Op op = detail::Op::kPush;
  bool wants_lens = false;
  std::uint64_t keys = 0, vals = 0;
};

// Takes the requests of an app at this process's server, and answers them; and a SimpleApp, whose customer_id is app_id.
//
// One thread of each server calls the handlers of all its apps, in the order in which requests come.
// Keys, values and lens that a handler is given are views of received memory. They are valid until
// Response is called for that request: copy what is to stay. A handler that throws refuses its request
// with the exception's text.
template <class Val> class KVServer : public SimpleApp {
public:
  using ReqHandle = std::function<void(
      const KVMeta &req_meta, const KVPairs<Val> &req_data, KVServer *server)>;

  // Throws fserver::ClosedError before StartPS, and ConfigError if the server has a KVServer of this app.
  explicit KVServer(int app_id, bool is_scheduler = false, int instance_idx = 0)
      : SimpleApp(app_id, app_id, Postoffice::GetServer(instance_idx)),
        office_(*Postoffice::GetServer(instance_idx)),
        node_(office_.server("KVServer")), app_id_(app_id), app_(*this) {
    (void)is_scheduler;
    instance_idx_ = instance_idx;
    node_->add(app_id_, &app_);
  }
  KVServer(const KVServer &) = delete;
  KVServer &operator=(const KVServer &) = delete;
  // No handler runs any more when it has returned.
  ~KVServer() override { node_->remove(app_id_); }

  using SimpleApp::Response;
  using SimpleApp::set_request_handle; // of what Request has sent

  // What is done with pushes and pulls. Those that come before wait for it, at most 10 seconds. A handler may call it.
  void set_request_handle(const ReqHandle &handle) {
    auto shared = handle ? std::make_shared<const ReqHandle>(handle) : nullptr;
    node_->apart([&] { handle_.swap(shared); });
  }

  // Answers a request, once: now or later, from any thread. A pull needs res.vals, with res.lens if the keys
  // have different numbers of values. The memory of res is kept until it has been sent; if an SArray does not own
  // its memory, the program keeps it, unchanged, until the worker's next request. A pull of unknown size is answered in
  // two steps: values of the CPU and lens are copied, and values of a GPU are to stay, unchanged, until the worker's Wait
  // has returned.
  //
  // If res does not have what the worker has asked for, the request is refused, and the worker's Wait throws. It may have
  // fewer values, in memory of the CPU, if the worker takes lens. Does nothing if the worker is gone. Throws fserver::ShapeError if the request has been answered.
  void Response(const KVMeta &req, const KVPairs<Val> &res = KVPairs<Val>()) {
    detail::ServerNode::Gone gone; // other answers, let go of without a lock
    if (req.push) {
      node_->answer(req.addr, &gone,
                    [](Answer &, fserver::Tensor *) { return 0u; });
      return;
    }
    if (req.op == detail::Op::kSize)
      return keep(req, res);
    send(req, res);
  }

  // Has what a worker pushes under keys[0] received in vals, whose memory is kept until the node is closed. Call it
  // before the first push of the key, for example before a Barrier. worker_id is the ID of an instance, see
  // Postoffice::GroupWorkerRankToInstanceID; worker_rank is the number of a group.
  //
  // Throws fserver::ShapeError if there is no such worker, or its key has been pushed.
  void RegisterRecvBuffer(int worker_id, SArray<Key> &keys,
                          const SArray<Val> &vals, const SArray<int> &lens = {},
                          int cmd = 0) {
    (void)lens, (void)cmd;
    receive(Postoffice::IDtoRank(worker_id), keys, vals);
  }
  void RegisterRecvBufferWithRank(int worker_rank, SArray<Key> &keys,
                                  const SArray<Val> &vals,
                                  const SArray<int> &lens = {}, int cmd = 0) {
    (void)lens, (void)cmd;
    receive(worker_rank * office_.group_size() + node_->server.instance(), keys,
            vals);
  }

  int instance_idx_; // as the constructor was given it

private:
  using Answer = detail::ServerNode::Answer;

  // What a worker has asked the size of, and has not fetched yet.
  struct Kept {
    SArray<Val> vals;
    SArray<int> lens;
  };
  struct KeptFor {
    std::uint32_t losses = 0;                // of the worker, when it has asked
    std::map<std::pair<int, int>, Kept> all; // by customer_id and timestamp
  };
  static constexpr std::size_t kMostKept = 4096; // of one worker

  class TheApp final : public detail::App {
  public:
    explicit TheApp(KVServer &server) : server_(server) {}
    bool ready() const override { return server_.handle_ != nullptr; }
    void take(const detail::Taken &taken) override { server_.serve(taken); }
    std::shared_ptr<void> tend() override { return server_.tend(); }

  private:
    KVServer &server_;
  };

  // Has what the worker with a rank pushes under keys[0] received in vals.
  void receive(int worker, const SArray<Key> &keys, const SArray<Val> &vals) {
    if (keys.empty() || vals.empty())
      throw fserver::ShapeError("RegisterRecvBuffer: keys or vals is empty: "
                                "give the first key, and memory for its push");
    const auto bytes = static_cast<std::int64_t>(vals.size() * sizeof(Val));
    const int device =
        vals.src_device_type_ == GPU ? vals.src_device_id_ : fserver::kCpu;
    node_->server.register_recv(
        fserver::Tensor(vals.data(), fserver::DType::kUInt8, {bytes}, 0,
                        device),
        {worker}, {detail::engine_key(app_id_, keys[0]) + 1});
    node_->kept.until_closed(vals.ptr());
    node_->apart([&] { registered_[{worker, keys[0]}] = vals; });
  }

  void serve(const detail::Taken &t) {
    const detail::Head &h = t.head;
    KVMeta meta;
    meta.cmd = h.cmd;
    meta.push = h.op == detail::Op::kPush;
    meta.worker = t.request.worker();
    meta.sender =
        Postoffice::WorkerRankToID(meta.worker / office_.group_size());
    meta.timestamp = h.timestamp;
    meta.customer_id = h.customer;
    meta.key = t.keys[0];
    meta.addr = t.request.handler();
    meta.val_len = detail::clamped(h.vals);
    meta.option = h.option;
    meta.op = h.op;
    meta.wants_lens = h.flags & detail::kWantsLens;
    meta.keys = h.keys;
    meta.vals = h.vals;
    if (h.width != sizeof(Val))
      return node_->fail(meta.addr, "values have " + std::to_string(h.width) +
                                        " bytes at the worker, and " +
                                        std::to_string(sizeof(Val)) +
                                        " at the server");
    if (h.op == detail::Op::kFetch)
      return fetch(meta);
    KVPairs<Val> data;
    data.keys = SArray<Key>::view(const_cast<Key *>(t.keys), h.keys);
    if (h.lens)
      data.lens = SArray<int>::view(const_cast<int *>(t.lens), h.lens);
    if (meta.push && !values(t, &data.vals))
      return node_->fail(meta.addr, "the values are not aligned");
    const std::shared_ptr<const ReqHandle> handle =
        handle_; // which it may replace
    (*handle)(meta, data, this);
  }

  // The values of a push, in registered memory if there is any for them.
  bool values(const detail::Taken &t, SArray<Val> *out) {
    const fserver::Tensor &v = t.request.tensors()[1];
    if (reinterpret_cast<std::uintptr_t>(v.data) % alignof(Val))
      return false;
    *out = SArray<Val>::view(v.as<Val>(), t.head.vals);
    if (v.device != fserver::kCpu) {
      out->src_device_type_ = GPU;
      out->src_device_id_ = v.device;
    }
    const auto it = registered_.find({t.request.worker(), t.keys[0]});
    if (it == registered_.end() || v.data == it->second.data() ||
        v.device != fserver::kCpu || it->second.src_device_type_ == GPU ||
        t.head.vals > it->second.size())
      return true;
    // Past the worker's first 8,192 keys its keys share buffers of the engine.
    std::memcpy(static_cast<void *>(it->second.data()), v.data, v.bytes);
    *out = it->second.segment(0, t.head.vals);
    return true;
  }

  // Answers a pull.
  void send(const KVMeta &req, const KVPairs<Val> &res) {
    const bool fewer = res.vals.size() < req.vals && req.wants_lens &&
                       res.vals.src_device_type_ != GPU;
    if (res.vals.size() != req.vals && !fewer)
      return node_->fail(req.addr,
                         "the server has " + std::to_string(res.vals.size()) +
                             " values, want " + std::to_string(req.vals));
    SArray<int> lens;
    if (req.wants_lens && !lens_of(req, res, &lens))
      return node_->fail(req.addr,
                         "the server has " + std::to_string(res.lens.size()) +
                             " lens for " + std::to_string(req.keys) + " keys");
    const SArray<char> vals =
        fewer ? padded(res.vals, req.vals) : SArray<char>(res.vals);
    if (fewer && vals.empty())
      return node_->fail(req.addr, "the server has no memory for " +
                                       std::to_string(req.vals) + " values");
    detail::ServerNode::Gone gone;
    node_->answer(req.addr, &gone, [&](Answer &a, fserver::Tensor *t) {
      a.vals = vals;
      a.lens = lens;
      const int device = a.vals.src_device_type_ == GPU ? a.vals.src_device_id_
                                                        : fserver::kCpu;
      t[0] = detail::tensor_of(a.vals.ptr(), a.vals.data(), a.vals.size(), 0,
                               device);
      if (req.wants_lens)
        t[1] = detail::tensor_of(a.lens.ptr(), a.lens.data(),
                                 a.lens.size() * sizeof(int), 0, fserver::kCpu);
      return req.wants_lens ? 2u : 1u;
    });
  }

  // A copy of values that is as large as the memory of the worker, since the engine sends whole tensors. What is not
  // written takes no memory, however much the worker says it has. Empty if there is not that much.
  static SArray<char> padded(const SArray<Val> &vals, std::uint64_t count) {
    void *memory = std::calloc(count, sizeof(Val));
    if (!memory)
      return {};
    if (!vals.empty())
      std::memcpy(memory, vals.data(), vals.size() * sizeof(Val));
    return SArray<char>(static_cast<char *>(memory), count * sizeof(Val),
                        [](void *p) { std::free(p); });
  }

  // The lens that were asked for. Returns false if there are others.
  static bool lens_of(const KVMeta &req, const KVPairs<Val> &res,
                      SArray<int> *out) {
    if (res.lens.empty() && res.vals.size() % req.keys == 0) {
      *out =
          SArray<int>(req.keys, static_cast<int>(res.vals.size() / req.keys));
      return true;
    }
    *out = res.lens;
    return res.lens.size() == req.keys;
  }

  // How often a worker was lost.
  std::uint32_t losses(int worker) const {
    return node_->server.losses(worker);
  }

  // Answers how many values there are, and keeps them until the worker fetches them or is lost. A request of a worker
  // that was lost meanwhile cannot be answered, so it keeps nothing in the place of its successor's. fetch waits for the
  // lock.
  void keep(const KVMeta &req, const KVPairs<Val> &res) {
    Kept copy = copy_of(res);      // before the answer, since it may throw
    KeptFor gone;                  // is let go of without the lock,
    detail::ServerNode::Gone sent; // as are other answers
    std::lock_guard<std::mutex> lock(mutex_);
    const std::uint32_t lost = losses(req.worker); // before the answer
    const bool there =
        node_->answer(req.addr, &sent, [&](Answer &a, fserver::Tensor *t) {
          a.count = res.vals.size();
          t[0] = fserver::Tensor(&a.count, fserver::DType::kUInt8,
                                 {sizeof a.count});
          return 1u;
        });
    if (!there)
      return;
    KeptFor &kept = kept_[req.worker];
    if (kept.losses != lost)
      gone.all.swap(kept.all);
    kept.losses = lost;
    if (kept.all.size() == kMostKept)
      gone.all.insert(kept.all.extract(kept.all.begin()));
    std::swap(kept.all[{req.customer_id, req.timestamp}], copy);
  }

  // The handler may change its memory before the worker fetches the values.
  static Kept copy_of(const KVPairs<Val> &res) {
    Kept kept;
    if (res.vals.src_device_type_ == GPU)
      kept.vals = res.vals;
    else
      kept.vals.CopyFrom(res.vals);
    kept.lens.CopyFrom(res.lens);
    return kept;
  }

  void fetch(const KVMeta &req) {
    KVPairs<Val> res;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto &kept = kept_[req.worker].all;
      const auto it = kept.find({req.customer_id, req.timestamp});
      if (it == kept.end())
        return node_->fail(req.addr,
                           "the server does not keep these values any more: "
                           "the worker was lost in between, or has asked for "
                           "too many sizes at once");
      res.vals = std::move(it->second.vals);
      res.lens = std::move(it->second.lens);
      kept.erase(it);
    }
    send(req, res);
  }

  // Returns what is kept for workers that are lost.
  std::shared_ptr<void> tend() {
    const auto gone = std::make_shared<std::unordered_map<int, KeptFor>>();
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = kept_.begin(); it != kept_.end();) {
      const auto kept = it++;
      if (kept->second.losses != losses(kept->first))
        gone->insert(kept_.extract(kept));
    }
    return gone;
  }

  const Postoffice &office_;
  const std::shared_ptr<detail::ServerNode> node_;
  const int app_id_;
  TheApp app_;
  // Of the thread that serves.
  std::shared_ptr<const ReqHandle> handle_;
  std::map<std::pair<int, Key>, SArray<Val>>
      registered_;                        // by worker rank and first key
  std::mutex mutex_;                      // of what follows
  std::unordered_map<int, KeptFor> kept_; // by worker
};

// A handler that adds up what is pushed under each key, and answers pulls with the sums. All keys have one value.
template <class Val> struct KVServerDefaultHandle {
  void operator()(const KVMeta &meta, const KVPairs<Val> &data,
                  KVServer<Val> *server) {
    const std::size_t n = data.keys.size();
    if (meta.push && data.vals.size() != n)
      throw fserver::ShapeError(
          "KVServerDefaultHandle: " + std::to_string(data.vals.size()) +
          " values for " + std::to_string(n) + " keys, want one for each");
    KVPairs<Val> res;
    if (!meta.push) {
      res.keys = data.keys;
      res.vals.resize(n);
    }
    for (std::size_t i = 0; i < n; i++) {
      Val &sum = store[data.keys[i]];
      if (meta.push)
        sum += data.vals[i];
      else
        res.vals[i] = sum;
    }
    server->Response(meta, res);
  }
  std::unordered_map<Key, Val> store;
};

} // namespace ps
