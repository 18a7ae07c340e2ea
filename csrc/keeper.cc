#include "keeper.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace fserver {
namespace {

using std::chrono::milliseconds;

// Between looks at whether streams have come further: it doubles while they have not.
constexpr milliseconds kShortest{1}, kLongest{50};

// What the thread does just now may wait for the GPU: so long is waited for it at the end.
constexpr milliseconds kEnding{2000};

struct Entry {
  cs_context context;
  cs_stream stream;
  cs_event event;
  Kept memory;
};

void leave(Kept &memory) {
  for (Memory &m : memory)
    m.release();
}

// All but the list of who is at work is guarded by the mutex, over which there is no call
// of the driver.
class Keeper {
public:
  // False: nobody watches.
  bool add(Entry &k) {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (!start())
      return false;
    fresh_.push_back(std::move(k));
    changed_.notify_one();
    return true;
  }

  // From a graph that is gone, in a thread of the driver's, which must not be called there.
  void drop(Kept *memory) {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (!start())
      return;
    gone_.push_back(std::move(*memory));
    delete memory;
    changed_.notify_one();
  }

  // An event of the context that is current, or nullptr.
  cs_event event(cs_context context) {
    {
      const std::lock_guard<std::mutex> locked(mutex_);
      const auto it =
          std::find_if(spare_.begin(), spare_.end(),
                       [&](const auto &x) { return x.first == context; });
      if (it != spare_.end()) {
        const cs_event e = it->second;
        *it = spare_.back();
        spare_.pop_back();
        return e;
      }
    }
    cs_event e = nullptr;
    return cs_cu.EventCreate(&e, CS_EVENT_DISABLE_TIMING) == CS_CU_SUCCESS
               ? e
               : nullptr;
  }

  void end() {
    std::unique_lock<std::mutex> locked(mutex_);
    ending_ = true;
    changed_.notify_one();
    ended_.wait_for(locked, kEnding, [&] { return !running_; });
  }

private:
  bool start() {
    if (running_ || ending_)
      return running_ && !ending_;
    try {
      std::thread([this] { run(); }).detach();
    } catch (const std::system_error &) {
      return false;
    }
    return running_ = true;
  }

  void run() {
    const Relaxed relaxed;
    std::vector<Entry> list;
    std::vector<Kept> gone;
    milliseconds nap = kShortest;
    std::unique_lock<std::mutex> locked(mutex_);
    while (!ending_) {
      if (list.empty())
        changed_.wait(locked, [&] {
          return ending_ || !fresh_.empty() || !gone_.empty();
        });
      else
        changed_.wait_for(locked, nap,
                          [&] { return ending_ || !gone_.empty(); });
      std::move(fresh_.begin(), fresh_.end(), std::back_inserter(list));
      fresh_.clear();
      gone.swap(gone_);
      locked.unlock();
      gone.clear(); // may call the driver
      std::vector<std::pair<cs_context, cs_event>> passed;
      if (!ending_)
        look(&list, &passed);
      nap = passed.empty() ? std::min(2 * nap, kLongest) : kShortest;
      locked.lock();
      spare_.insert(spare_.end(), passed.begin(), passed.end());
    }
    for (Entry &k : list) // the driver is ending too
      leave(k.memory);
    running_ = false;
    ended_.notify_all();
  }

  // Lets go of what streams have passed. One that waits is asked once.
  static void look(std::vector<Entry> *list,
                   std::vector<std::pair<cs_context, cs_event>> *passed) {
    std::vector<cs_stream> waiting;
    size_t left = 0;
    for (Entry &k : *list) {
      bool over = false;
      if (std::find(waiting.begin(), waiting.end(), k.stream) ==
          waiting.end()) {
        cs_cu.CtxSetCurrent(k.context);
        const cs_result rc = cs_cu.EventQuery(k.event);
        over = rc == CS_CU_SUCCESS;
        if (rc == CS_CU_NOT_READY)
          waiting.push_back(k.stream);
        else if (!over) { // of a context that has failed, nothing is known
          leave(k.memory);
          continue;
        }
      }
      if (over) {
        passed->emplace_back(k.context, k.event);
        const Kept old = std::move(k.memory);
      } else {
        if (&(*list)[left] != &k)
          (*list)[left] = std::move(k);
        left++;
      }
    }
    list->erase(list->begin() + static_cast<std::ptrdiff_t>(left), list->end());
  }

  std::mutex mutex_;
  std::condition_variable changed_, ended_;
  bool running_ = false;
  std::atomic<bool> ending_{false};
  std::vector<Entry> fresh_;
  std::vector<Kept> gone_;
  std::vector<std::pair<cs_context, cs_event>> spare_;
};

Keeper &keeper = *new Keeper; // memory may go after what is static

void graph_is_gone(void *memory) { keeper.drop(static_cast<Kept *>(memory)); }

// Has a graph that is captured keep data, until gone(data) is called in a thread of the driver's. If it
// cannot, the data is kept for good.
void keep_with_graph(cs_graph graph, void *data, void (*gone)(void *)) {
  cs_user_object object;
  if (cs_cu.UserObjectCreate(&object, data, gone, 1,
                             CS_USER_OBJECT_NO_DESTRUCTOR_SYNC) ==
      CS_CU_SUCCESS)
    cs_cu.GraphRetainUserObject(graph, object, 1, CS_GRAPH_USER_OBJECT_MOVE);
}

// Whether s is being captured, into which graph, and the number of the capture. No graph: it is not
// known, or none comes to be.
bool captured_into(cs_stream s, cs_graph *graph, uint64_t *number) {
  int state = CS_CAPTURE_NONE;
  if (cs_cu.StreamGetCaptureInfo(s, &state, number, graph, nullptr, nullptr) !=
      CS_CU_SUCCESS)
    return capturing(s);
  if (state != CS_CAPTURE_ACTIVE)
    *graph = nullptr;
  return state != CS_CAPTURE_NONE;
}

} // namespace

void keep(cs_stream s, Kept memory) {
  cs_graph graph = nullptr;
  uint64_t number = 0;
  if (captured_into(s, &graph, &number)) {
    auto *kept = new Kept(std::move(memory));
    if (graph)
      keep_with_graph(graph, kept, graph_is_gone);
    return; // NOLINT(clang-analyzer-cplusplus.NewDeleteLeaks)
  }
  cs_context context = nullptr;
  cs_cu.CtxGetCurrent(&context);
  Entry k{context, s, keeper.event(context), std::move(memory)};
  if (!k.event || cs_cu.EventRecord(k.event, s) != CS_CU_SUCCESS ||
      !keeper.add(k))
    leave(k.memory);
}

bool Graphs::note(cs_stream s) {
  cs_graph graph = nullptr;
  uint64_t number = 0;
  if (!captured_into(s, &graph, &number))
    return false;
  if (graph && number != newest_)
    keep_with_graph(graph, new One(one_),
                    [](void *one) { delete static_cast<One *>(one); });
  newest_ = number;
  return true; // NOLINT(clang-analyzer-cplusplus.NewDeleteLeaks)
}

void end_keeper() { keeper.end(); }

} // namespace fserver
