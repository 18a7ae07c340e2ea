// The tensor API of StepMesh, over tensors of torch: AFTensorWorker and AFTensorServer.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ps/internal/backend.h"
#include "ps/internal/life.h"
#include "ps/internal/threadsafe_queue.h"
#include "ps/internal/trace.h"
#include "ps/kv_app.h"
#include "ps/simple_app.h"

namespace ps {

enum {
  AF_FLAG_BATCH_START = 1,
  AF_FLAG_BATCH_MIDDLE = 2,
  AF_FLAG_BATCH_END = 3
};

struct KeyTensor {
  Key key = 0;
  at::Tensor val;
};
using KeyTensorBatch = std::vector<KeyTensor>;

// A ZBatchPushPull, for programs that keep them. fserver does not use it.
struct AFTensorRequest {
  KeyTensorBatch push, pull;
  std::vector<int> push_timestamps, pull_timestamps;
  TensorEvent *event = nullptr;
};

namespace internal {

// A view of a tensor. Throws ShapeError unless its memory is what it says, in one piece.
inline fserver::Tensor View(const char *call, const KeyTensor &kt) {
  const at::Tensor &t = kt.val;
  const auto refuse = [&](const char *what) {
    throw fserver::ShapeError(std::string(call) + ": the tensor of key " +
                              std::to_string(kt.key) + " is " + what);
  };
  if (!t.defined() || !t.is_contiguous())
    refuse("not contiguous or not defined: pass .contiguous()");
  if (t.is_conj())
    refuse("a conjugate that is not computed yet: pass .resolve_conj()");
  if (t.is_neg())
    refuse("a negative that is not computed yet: pass .resolve_neg()");
  return fserver::Tensor(
      t.data_ptr(), static_cast<fserver::DType>(t.scalar_type()),
      fserver::Shape(t.sizes().data(), static_cast<std::size_t>(t.dim())),
      kt.key,
      t.is_cpu() ? fserver::kCpu : static_cast<int>(t.device().index()));
}

// A view whose bytes go to, or take those of, a tensor of any dtype.
inline fserver::Tensor BytesOf(const char *call, const KeyTensor &kt) {
  fserver::Tensor t = View(call, kt);
  t.dtype = fserver::DType::kAny;
  return t;
}

// The GPU of a node, as CUDA counts; kCpu if it has none, or torch has no CUDA.
inline int GpuOf(const fserver::Node &node) {
  return detail::GpuBackend::there() ? node.device() : fserver::kCpu;
}

// Makes a GPU the current one of this thread.
inline void SetDevice(int gpu) {
  if (gpu != fserver::kCpu)
    c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(
        at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)));
}

// The current stream of a GPU.
inline std::optional<fserver::Stream> CurrentStream(int gpu) {
  if (gpu == fserver::kCpu)
    return std::nullopt;
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  void *stream =
      c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device).native_handle();
  return fserver::Stream{reinterpret_cast<std::uintptr_t>(stream)};
}

} // namespace internal

// The worker of this process, which StartPS has opened. Its calls may come from several threads.
class AFTensorWorker {
public:
  // Throws ClosedError if StartPS has not started that worker.
  explicit AFTensorWorker(int instance_idx = 0)
      : node_(Postoffice::GetWorker(instance_idx)->worker("AFTensorWorker")),
        worker_(node_->worker), gpu_(internal::GpuOf(worker_)) {
    internal::SetDevice(gpu_);
  }

  // Sends all push tensors to every server, and has every server write its answers into the pull
  // tensors: pull[i * Q + j] takes answer j of server i, which has as many bytes, of any dtype. Returns at
  // once, but waits while a request of a KVWorker of this node is 3,000 push_pulls behind, for at most 10 s (then
  // fserver::LimitError); the tensors are kept until the request has completed. need_event: the tensors, also those on
  // the CPU, are sent behind what is queued on the current stream of the node's GPU, which is not being
  // captured. Returns the first of P + Q numbers, counted from 0 in a process, and after 2^30 - 1 again.
  //
  // Throws what fserver::Worker::push_pull throws.
  int ZBatchPushPull(KeyTensorBatch &push, KeyTensorBatch &pull,
                     bool need_event = true) {
    std::vector<fserver::Tensor> out, in;
    for (const KeyTensor &kt : push)
      out.push_back(internal::View("ZBatchPushPull", kt));
    for (const KeyTensor &kt : pull)
      in.push_back(internal::BytesOf("ZBatchPushPull", kt));
    KeyTensorBatch kept = push;
    kept.insert(kept.end(), pull.begin(), pull.end());
    const auto memory = std::make_shared<KeyTensorBatch>(std::move(kept));
    const auto after =
        need_event ? internal::CurrentStream(gpu_) : std::nullopt;
    node_->wait_for_room("ZBatchPushPull");
    const auto started = std::chrono::steady_clock::now();
    const std::size_t servers = static_cast<std::size_t>(worker_.servers());
    const int count = static_cast<int>(push.size() + pull.size() / servers);

    detail::Kept::Gone gone; // is let go of without the lock
    std::lock_guard<std::mutex> lock(mutex_);
    const fserver::Handle h = worker_.push_pull(out, in, after);
    node_->issued(h);
    node_->kept.until_ended(worker_, h, memory, &gone);
    const std::int64_t first = Next().fetch_add(count);
    requests_[first] = {h, count, started};
    if (requests_.size() > kRemembered)
      requests_.erase(requests_.begin());
    return detail::timestamp_of(first);
  }

  // Returns when the request that a number belongs to has completed. timeout_ms counts from its
  // ZBatchPushPull. Throws TimeoutError, after which the number stays valid, ConfigError for an
  // unknown number (4,096 are remembered), and what fserver::Handle::wait throws.
  void Wait(int timestamp, std::uint64_t timeout_ms = 10000) {
    const Request r = Find("Wait", timestamp);
    constexpr std::uint64_t kYear = 366ull * 24 * 3600 * 1000;
    const std::chrono::milliseconds limit(std::min(timeout_ms, kYear));
    worker_.wait(r.handle,
                 r.started + limit - std::chrono::steady_clock::now());
  }

  // All numbers of the request that a number belongs to.
  std::vector<int> GetAllHandlers(int timestamp) {
    std::int64_t first = 0;
    const Request r = Find("GetAllHandlers", timestamp, &first);
    std::vector<int> all(static_cast<std::size_t>(r.count));
    for (int &number : all)
      number = detail::timestamp_of(first++);
    return all;
  }

  // The stamps of a completed request, and of its answer.
  std::pair<Trace, Trace> FetchTrace(int timestamp) {
    const auto t = worker_.trace(Find("FetchTrace", timestamp).handle);
    const auto four = [&t](std::size_t i) {
      const auto at = [&](std::size_t k) {
        return static_cast<std::uint64_t>(t[i + k]);
      };
      return Trace{at(0), at(1), at(2), at(3)};
    };
    return {four(0), four(4)};
  }

private:
  struct Request {
    fserver::Handle handle;
    int count = 0;
    std::chrono::steady_clock::time_point started;
  };
  static constexpr std::size_t kRemembered = 4096;

  static std::atomic<std::int64_t> &Next() {
    static std::atomic<std::int64_t> next{0};
    return next;
  }

  Request Find(const char *call, int timestamp, std::int64_t *first = nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t number = detail::number_of(Next().load(), timestamp);
    auto it = requests_.upper_bound(number);
    const bool known = it != requests_.begin();
    if (known)
      --it;
    if (!known || number - it->first >= it->second.count)
      throw fserver::ConfigError(std::string(call) + ": timestamp " +
                                 std::to_string(timestamp) +
                                 " is not known: pass one of the last 4,096 "
                                 "of ZBatchPushPull");
    if (first)
      *first = it->first;
    return it->second;
  }

  const std::shared_ptr<detail::WorkerNode> node_;
  fserver::Worker &worker_;
  const int gpu_; // of the node
  std::mutex mutex_;
  std::map<std::int64_t, Request> requests_; // by their first number
};

// A request: what was pushed, and what is to be answered.
struct AFTensorMeta {
  int sender = 0;      // WorkerRankToID of sender_rank
  int sender_rank = 0; // the number of the worker's group
  bool single = false; // one tensor in all
  int last_timestamp = 0;
  std::vector<KVMeta> push_metas;
  std::vector<KeyTensor> push_tensors; // views, valid until the answer
  std::vector<KVMeta> pull_metas;
  // One for each tensor of the answer, in the order of the worker's pull tensors, with their keys. The values are not
  // defined.
  std::vector<KeyTensor> pull_tensors;

  std::uint64_t handler = 0; // of fserver::Server
};

// One tensor of an answer, for programs that keep them. fserver does not use it.
struct AFTensorResponse {
  KVMeta kv_meta;
  KVPairs<char> kv_pair;
  TensorEvent *event = nullptr;
  std::uint64_t rsp_start = 0; // in nanoseconds
};

// The server of this process, which StartPS has opened. A thread of its own takes the requests.
class AFTensorServer {
public:
  using AFServerRequestHandle =
      std::function<void(const AFTensorMeta &, AFTensorServer *)>;

  // gpu: the instance, if this process runs all of its group; else it is not used: the node's device is STEPMESH_GPU.
  // Throws ClosedError if StartPS has not started that server.
  explicit AFTensorServer(int gpu)
      : office_(*Postoffice::GetServer(detail::instances_here() > 1 ? gpu : 0)),
        node_(office_.server("AFTensorServer")), server_(node_->server),
        gpu_(internal::GpuOf(server_)) {
    internal::SetDevice(gpu_);
  }
  AFTensorServer(const AFTensorServer &) = delete;
  AFTensorServer &operator=(const AFTensorServer &) = delete;
  // Takes no further requests. Waits for the handle to return, and at most 0.1 s beside.
  ~AFTensorServer() {
    ending_.store(true);
    if (thread_.joinable())
      thread_.join();
  }

  // Has `handle` called for each request, one at a time, in their order. It calls Response, then or
  // later. What it throws is told to the worker, whose Wait throws RefusedError. Throws ConfigError
  // if the handle is empty, or there is one already.
  void SetRequestHandle(const AFServerRequestHandle &handle) {
    if (!handle || thread_.joinable())
      throw fserver::ConfigError("SetRequestHandle: the handle is empty, or "
                                 "there is one already: set one, once");
    handle_ = handle;
    thread_ = std::thread([this] { Serve(); });
  }

  // Answers a request, once, with a tensor for each pull tensor. If their keys are those of the pull tensors, and each
  // occurs once, each goes to the pull tensor of its key; else they are in the order of the pull tensors. The tensors are
  // kept until they are sent. need_event as of ZBatchPushPull.
  //
  // Throws what fserver::Server::respond throws.
  void Response(const AFTensorMeta &meta, KeyTensorBatch tensors = {},
                bool need_event = true) {
    Sort(meta, &tensors);
    std::vector<fserver::Tensor> t;
    for (const KeyTensor &kt : tensors)
      t.push_back(internal::BytesOf("Response", kt));
    const auto after =
        need_event ? internal::CurrentStream(gpu_) : std::nullopt;
    const auto memory = std::make_shared<KeyTensorBatch>(std::move(tensors));
    detail::Kept::Gone gone;
    const fserver::Handle h = server_.respond(t, meta.handler, after);
    node_->kept.until_ended(server_, h, memory, &gone);
  }

  // Receives in memory of the caller's: the tensor is cut into equal parts, and part i receives
  // keys[i] of the worker of group worker_ranks[i]. It is kept until the node is closed. Throws what
  // fserver::Server::register_recv throws.
  void RegisterRecvTensor(const at::Tensor &tensor,
                          std::vector<int> &worker_ranks,
                          std::vector<Key> &keys) {
    std::vector<int> workers;
    workers.reserve(worker_ranks.size());
    for (const int rank : worker_ranks)
      workers.push_back(rank * office_.group_size() + server_.instance());
    server_.register_recv(internal::View("RegisterRecvTensor", {0, tensor}),
                          workers, keys);
    node_->kept.until_closed(std::make_shared<at::Tensor>(tensor));
    std::lock_guard<std::mutex> lock(mutex_);
    registered_.push_back(tensor);
  }

private:
  // Puts tensors in the order of the pull tensors, if they have the same keys, each once.
  static void Sort(const AFTensorMeta &meta, KeyTensorBatch *tensors) {
    const std::vector<KeyTensor> &pull = meta.pull_tensors;
    const auto same = [](const KeyTensor &a, const KeyTensor &b) {
      return a.key == b.key;
    };
    if (std::equal(pull.begin(), pull.end(), tensors->begin(), tensors->end(),
                   same))
      return;
    std::map<Key, const KeyTensor *> by;
    for (const KeyTensor &kt : *tensors)
      by[kt.key] = &kt;
    if (by.size() != tensors->size() || by.size() != pull.size())
      return;
    KeyTensorBatch sorted;
    for (const KeyTensor &kt : pull) {
      const auto it = by.find(kt.key);
      if (it == by.end())
        return;
      sorted.push_back(*it->second);
      by.erase(it); // a second pull tensor of this key finds none
    }
    *tensors = std::move(sorted);
  }

  void Serve() {
    internal::SetDevice(gpu_);
    fserver::Batch batch;
    while (!ending_.load()) {
      try {
        if (!server_.get_batch(batch, std::chrono::milliseconds(100), 1))
          continue;
      } catch (const fserver::Error &e) {
        if (!detail::no_worker(server_, e))
          return;
        std::this_thread::sleep_for(detail::kNoWorker);
        continue;
      }
      for (fserver::Request &r : batch)
        Handle(std::make_shared<fserver::Request>(std::move(r)));
    }
  }

  void Handle(const std::shared_ptr<fserver::Request> &r) {
    try {
      try {
        handle_(Meta(r), this);
      } catch (const std::exception &e) {
        server_.fail(*r, e.what());
      } catch (...) {
        server_.fail(*r, "the handle has thrown what is no std::exception");
      }
    } catch (const fserver::Error &) {
      // It was answered before, or the worker is gone.
    }
  }

  AFTensorMeta Meta(const std::shared_ptr<fserver::Request> &r) const {
    AFTensorMeta m;
    m.handler = r->handler();
    m.sender_rank = r->worker() / office_.group_size();
    m.sender = Postoffice::WorkerRankToID(m.sender_rank);
    m.last_timestamp = static_cast<int>(r->handler());
    m.single = r->tensors().size() + r->answers().size() == 1;
    KVMeta kv;
    kv.sender = m.sender;
    kv.worker = r->worker();
    kv.timestamp = m.last_timestamp;
    for (const fserver::Tensor &t : r->tensors()) {
      const at::Device device =
          t.device < 0
              ? at::Device(at::kCPU)
              : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(t.device));
      const auto options = at::TensorOptions().device(device).dtype(
          static_cast<at::ScalarType>(t.dtype));
      // The tensor keeps the request.
      m.push_tensors.push_back(
          {t.key, at::from_blob(
                      t.data, at::IntArrayRef(t.shape.data(), t.shape.size()),
                      [r](void *) {}, options)});
      kv.push = true;
      kv.key = t.key;
      kv.addr = reinterpret_cast<std::uintptr_t>(t.data);
      kv.val_len = detail::clamped(t.bytes);
      m.push_metas.push_back(kv);
    }
    const std::vector<std::uint64_t> keys = server_.pull_keys(*r);
    for (std::size_t j = 0; j < keys.size(); j++) {
      kv.push = false;
      kv.key = keys[j];
      kv.addr = 0;
      kv.val_len = detail::clamped(r->answers()[j]);
      m.pull_metas.push_back(kv);
      m.pull_tensors.push_back({keys[j], at::Tensor()});
    }
    return m;
  }

  const Postoffice &office_;
  const std::shared_ptr<detail::ServerNode> node_;
  fserver::Server &server_;
  const int gpu_; // of the node
  AFServerRequestHandle handle_;
  std::mutex mutex_;
  std::vector<at::Tensor> registered_; // of which handles have views
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

} // namespace ps
