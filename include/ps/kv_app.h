// KVWorker and KVServer: push values under keys to the servers, and pull them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ps/base.h"
#include "ps/internal/postoffice.h"
#include "ps/internal/requests.h"
#include "ps/kv_server.h"
#include "ps/sarray.h"
#include "ps/simple_app.h"

namespace ps {

// What a worker pushes to the servers and pulls from them; and a SimpleApp. Methods may be called from several threads.
//
// The keys of a request are sorted, and each occurs once. Each key goes to the server whose range has it
// (Postoffice::GetServerKeyRanges); a server without keys gets nothing. Requests with the same first key at a server
// are handled there in the order of the calls; other requests in any order.
//
// Each request returns a timestamp, for Wait. A callback is called once, when the last server has answered or the
// request has failed, in a thread of this object. It may start requests, and wait for them; it must not throw.
template <class Val> class KVWorker : public SimpleApp {
public:
  using Callback = std::function<void()>;
  using SlicedKVs = std::vector<std::pair<bool, KVPairs<Val>>>;
  using Slicer =
      std::function<void(const KVPairs<Val> &send,
                         const std::vector<Range> &ranges, SlicedKVs *sliced)>;

  // app_id: that of the KVServers. customer_id: any number; servers see it in KVMeta. instance_idx: the instance of
  // this process. Throws fserver::ClosedError before StartPS.
  explicit KVWorker(int app_id, int customer_id, int instance_idx = 0)
      : SimpleApp(app_id, customer_id, Postoffice::GetWorker(instance_idx),
                  detail::kTimestamps),
        ranges_(Postoffice::GetWorker(instance_idx)->GetServerKeyRanges()),
        requests_(new detail::Requests(
            Postoffice::GetWorker(instance_idx)->worker("KVWorker"), app_id,
            customer_id, ranges_)) {}
  KVWorker(const KVWorker &) = delete;
  KVWorker &operator=(const KVWorker &) = delete;
  // Waits until all requests have ended and their callbacks have returned, at most 5 seconds. What has not ended
  // then keeps its memory for good.
  ~KVWorker() override {
    if (!requests_->drain(std::chrono::seconds(5)))
      requests_.release()->leave();
  }

  // Pushes copies of lists. lens: how many values each key has; empty: all have as many.
  //
  // Throws fserver::ConfigError if keys are not sorted, and ShapeError if counts do not fit.
  int Push(const std::vector<Key> &keys, const std::vector<Val> &vals,
           const std::vector<int> &lens = {}, int cmd = 0,
           const Callback &cb = nullptr) {
    return ZPush(SArray<Key>(keys), SArray<Val>(vals), SArray<int>(lens), cmd,
                 cb);
  }

  // Pulls into *vals. If that is empty, the servers are asked first how many values they have, and it
  // gets as many; else they must have as many as it has. lens: gets the number of values of each key; with it, the
  // servers may have fewer values. Then the first ones of *vals are those that lens says, its size stays, and the others
  // are not defined. Both stay where they are until the request has ended.
  int Pull(const std::vector<Key> &keys, std::vector<Val> *vals,
           std::vector<int> *lens = nullptr, int cmd = 0,
           const Callback &cb = nullptr) {
    return pull(SArray<Key>(keys), vals, lens, cmd, cb);
  }

  // As Push, without a copy. The memory must not change until the request has ended.
  int ZPush(const SArray<Key> &keys, const SArray<Val> &vals,
            const SArray<int> &lens = {}, int cmd = 0,
            const Callback &cb = nullptr) {
    detail::Ask ask = asked(detail::Op::kPush, keys, cmd, cb);
    ask.vals = vals;
    ask.lens = lens;
    if (slicer_)
      slice(ask, vals, lens);
    return requests_->start(std::move(ask));
  }

  // As Pull, without a copy of the keys.
  int ZPull(const SArray<Key> &keys, SArray<Val> *vals,
            SArray<int> *lens = nullptr, int cmd = 0,
            const Callback &cb = nullptr) {
    return pull(keys, vals, lens, cmd, cb);
  }

  // Waits until a request has ended and its callback has returned. Has no limit of time.
  //
  // Throws what the request has ended with, also if it has a callback: fserver::PeerLostError if a
  // server is gone, RefusedError if one has refused it, ShapeError if *vals has another size than the servers' values,
  // ClosedError after Finalize. Also waits for a Request.
  void Wait(int timestamp) override {
    if (timestamp >= detail::kTimestamps)
      SimpleApp::Wait(timestamp);
    else
      requests_->wait(timestamp);
  }

  // Cuts requests in place of the default. sliced->at(i) is for server i, and its first says whether that gets any.
  // What a pull's slicer makes has keys alone. Not while requests are started.
  void set_slicer(const Slicer &slicer) { slicer_ = slicer; }

private:
  detail::Ask asked(detail::Op op, const SArray<Key> &keys, int cmd,
                    const Callback &cb) {
    detail::Ask ask;
    ask.op = op;
    ask.cmd = cmd;
    ask.width = sizeof(Val);
    ask.keys = keys;
    ask.done = cb;
    return ask;
  }

  template <class T> static SArray<T> share(const SArray<T> &list) {
    return list;
  }
  template <class T> static SArray<T> share(std::vector<T> &list) {
    return SArray<T>::view(list.data(), list.size());
  }

  // Makes room for the values of a pull; `larger`: the list may be.
  template <class List, bool larger>
  static SArray<char> room(void *target, std::size_t count) {
    List &vals = *static_cast<List *>(target);
    if (vals.empty())
      vals.resize(count);
    if (vals.size() < count || (!larger && vals.size() != count))
      throw fserver::ShapeError(
          "Pull: vals has " + std::to_string(vals.size()) +
          " values, the servers have " + std::to_string(count) +
          ": pass an empty one, or one of that size" +
          (larger ? " or more" : ", or lens to learn how many there are"));
    return SArray<char>(share(vals).segment(0, count));
  }

  template <class Vals, class Lens>
  int pull(const SArray<Key> &keys, Vals *vals, Lens *lens, int cmd,
           const Callback &cb) {
    if (!vals)
      throw fserver::ConfigError("Pull: vals is null, want where to pull to");
    detail::Ask ask = asked(detail::Op::kPull, keys, cmd, cb);
    ask.vals = share(*vals);
    ask.room = lens ? &room<Vals, true> : &room<Vals, false>;
    ask.target = vals;
    if (lens) {
      if (lens->empty())
        lens->resize(keys.size());
      ask.lens = share(*lens);
      ask.wants_lens = true;
    }
    if (slicer_)
      slice(ask, {}, {});
    return requests_->start(std::move(ask));
  }

  // What a user's slicer has made, and the pieces that point into it.
  struct Sliced {
    SlicedKVs all;
    std::vector<detail::Piece> pieces;
  };

  void slice(detail::Ask &ask, const SArray<Val> &vals,
             const SArray<int> &lens) {
    auto sliced = std::make_shared<Sliced>();
    KVPairs<Val> send;
    send.keys = ask.keys;
    send.vals = vals;
    send.lens = lens;
    slicer_(send, ranges_, &sliced->all);
    if (sliced->all.size() != ranges_.size())
      throw fserver::ShapeError(
          "slicer: made " + std::to_string(sliced->all.size()) + " parts for " +
          std::to_string(ranges_.size()) + " servers: make one for each");
    const std::size_t total = ask.vals.size() / sizeof(Val);
    const std::size_t each = ask.keys.empty() ? 0 : total / ask.keys.size();
    std::size_t key = 0, val = 0;
    for (std::size_t i = 0; i < sliced->all.size(); i++) {
      const KVPairs<Val> &kvs = sliced->all[i].second;
      if (!sliced->all[i].first || kvs.keys.empty())
        continue;
      detail::Piece p{static_cast<int>(i), kvs.keys.data(), kvs.keys.size()};
      if (ask.op == detail::Op::kPush) {
        p.lens = kvs.lens.data();
        p.nlens = kvs.lens.size();
        p.vals = reinterpret_cast<char *>(kvs.vals.data());
        p.nvals = kvs.vals.size();
      } else {
        p.nvals = each * p.nkeys;
        p.vals = ask.vals.data() + val * sizeof(Val);
        p.lens_to = ask.wants_lens ? ask.lens.data() + key : nullptr;
      }
      key += p.nkeys;
      val += p.nvals;
      sliced->pieces.push_back(p);
    }
    if (key != ask.keys.size())
      throw fserver::ShapeError(
          "slicer: made parts with " + std::to_string(key) + " keys of " +
          std::to_string(ask.keys.size()) + ": give each key to one server");
    if (sliced->pieces.size() == 1 && ask.op == detail::Op::kPull)
      sliced->pieces[0].nvals = total;
    ask.pieces = &sliced->pieces;
    ask.kept = sliced;
  }

  const std::vector<Range> ranges_;
  std::unique_ptr<detail::Requests> requests_;
  Slicer slicer_;
};

} // namespace ps
