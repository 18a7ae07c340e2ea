// What needs no cluster: arrays, ranges, numbers of nodes, settings, the log.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <numeric>
#include <sstream>

#include "ps/internal/threadsafe_queue.h"
#include "scenes.hpp"

using namespace ps;

CASE(copies_of_an_array_share) {
  SArray<int> a{1, 2, 3};
  SArray<int> b = a, part = a.segment(1, 3);
  part[0] = 7;
  EXPECT_EQ(b[1], 7);
  EXPECT(a.data() == b.data() && part.data() == a.data() + 1);
  EXPECT_EQ(part.size(), 2u);
  b.push_back(4); // moves b alone
  b[0] = 9;
  EXPECT_EQ(a[0], 1);
  EXPECT_EQ(b.back(), 4);
  EXPECT_THROW(fserver::ShapeError, "from 2 to 4 of 3", a.segment(2, 4));
  EXPECT_THROW(fserver::ShapeError, "from 2 to 1", a.segment(2, 1));
  SArray<int> first = a.segment(0, 1); // which may not grow over the rest of a
  EXPECT_EQ(first.capacity(), 1u);
  first.push_back(8);
  part.resize(3, 8);
  EXPECT(first[1] == 8 && part[2] == 8);
  EXPECT(a[0] == 1 && a[1] == 7 && a[2] == 3);
  const auto list = std::make_shared<std::vector<int>>(3, 5);
  SArray<int> c(list);
  c[2] = 6;
  EXPECT_EQ((*list)[2], 6);
  EXPECT_EQ(list.use_count(), 2);
  c.clear();
  EXPECT_EQ(list.use_count(), 1);
}

CASE(an_array_keeps_what_it_is_given) {
  int deleted = 0;
  {
    int memory[4] = {1, 2, 3, 4};
    SArray<int> a(memory, 4, [&deleted](int *) { deleted++; });
    SArray<int> last = a.segment(3, 4);
    a.clear();
    EXPECT_EQ(deleted, 0);
    EXPECT_EQ(last[0], 4);
    SArray<int> owned(new int[2], 2, true);
    SArray<int> view(memory, 2);
    EXPECT(view.data() == memory);
  }
  EXPECT_EQ(deleted, 1);
  const std::vector<int> from{1, 2, 3};
  SArray<int> copy(from), into(8);
  EXPECT(copy.data() != from.data());
  into.CopyFrom(from.begin(), from.end());
  EXPECT(into.size() == 3 && into[2] == 3);
  into.CopyFrom(copy.segment(1, 3));
  EXPECT(into.size() == 2 && into[0] == 2);
}

namespace {

// The number that the engine gets of the memory of an array; 0: it registers the memory for this call alone.
template <class V> std::uint64_t number_of(const SArray<V> &a) {
  const fserver::Tensor t =
      detail::tensor_of(a.ptr(), a.data(), a.size() * sizeof(V), 7,
                        a.src_device_type_ == GPU ? a.src_device_id_ : -1);
  EXPECT(t.data == a.data() && t.bytes == a.size() * sizeof(V) && t.key == 7);
  EXPECT(t.base <= t.data && static_cast<char *>(t.base) + t.base_bytes >=
                                 static_cast<char *>(t.data) + t.bytes);
  return t.alloc;
}

} // namespace

CASE(memory_of_an_array_is_registered_once) {
  SArray<float> a(2000);
  EXPECT_EQ(number_of(a), 0u);
  const std::uint64_t number = number_of(a);
  EXPECT(number != 0);
  SArray<char> bytes(a);
  EXPECT_EQ(number_of(bytes), number);
  EXPECT_EQ(number_of(a.segment(10, 20)), number);
  SArray<float> longer = a;
  longer.resize(2001); // moves
  EXPECT_EQ(number_of(longer), 0u);
  EXPECT(number_of(longer) != number);
  EXPECT_EQ(number_of(a), number);
  SArray<float> deleted(new float[2000], 2000, true);
  EXPECT_EQ(deleted.size(), 2000u);
  number_of(deleted);
  EXPECT(number_of(deleted) != 0);
  // As if it were elsewhere.
  a.src_device_type_ = GPU;
  a.src_device_id_ = 0;
  EXPECT_EQ(number_of(a), 0u);
}

CASE(memory_of_the_program_is_registered_when_it_says_so) {
  std::vector<int> memory(2000);
  const auto list = std::make_shared<std::vector<int>>(2000);
  SArray<int> small(100), view(memory.data(), 2000), shared(list),
      given(memory.data(), 2000, [](int *) {});
  for (SArray<int> *a : {&small, &view, &shared, &given}) {
    for (int i = 0; i < 3; i++)
      EXPECT_EQ(number_of(*a), 0u);
  }
  const SArray<int> before = shared;
  shared.register_once();
  EXPECT(number_of(shared) != 0);
  EXPECT_EQ(number_of(shared.segment(5, 1500)), number_of(shared));
  EXPECT_EQ(number_of(before), 0u);
  EXPECT_EQ(list.use_count(), 3);
  shared.clear();
  EXPECT_EQ(list.use_count(), 2);
  view.src_device_type_ = GPU;
  view.src_device_id_ = 3;
  view.register_once();
  EXPECT(number_of(view) != 0);
  // Only so many are.
  std::vector<SArray<char>> all;
  int registered = 0;
  for (int i = 0; i < detail::Block::kMost; i++) {
    all.emplace_back(std::size_t{4096});
    number_of(all.back());
    registered += number_of(all.back()) != 0;
  }
  EXPECT_EQ(registered, detail::Block::kMost - 1); // and that of view
  all.clear();
  all.emplace_back(std::size_t{4096});
  number_of(all[0]);
  EXPECT(number_of(all[0]) != 0);
}

CASE(an_array_changes_its_size) {
  SArray<float> a(2, 1.f);
  a.resize(5, 2.f);
  EXPECT(a[1] == 1.f && a[4] == 2.f);
  const float *data = a.data();
  a.resize(3);
  EXPECT(a.size() == 3 && a.data() == data && a.capacity() == 5);
  a.resize(4);
  EXPECT(a.data() == data && a[3] == 0.f);
  a.append(a);
  EXPECT(a.size() == 8 && a[4] == 1.f);
  a.pop_back();
  EXPECT(a.size() == 7 && a.front() == 1.f && a.back() == 2.f);
  a.reserve(100);
  EXPECT(a.size() == 7 && a.capacity() == 100 && a[0] == 1.f);
  EXPECT_EQ(std::accumulate(a.begin(), a.end(), 0.f), 8.f);
  std::ostringstream s;
  s << SArray<char>{1, 2} << SArray<int>(11, 3);
  EXPECT(s.str() == "[1, 2][3, 3, 3, 3, 3, ..., 3, 3, 3, 3, 3]");
}

CASE(an_array_of_another_type) {
  SArray<float> a(2);
  a.reset(a.data(), 2, [keep = a](float *) {}, GPU, 3, CPU, 1);
  const SArray<char> bytes(a);
  EXPECT_EQ(bytes.size(), 8u);
  EXPECT(bytes.src_device_type_ == GPU && bytes.src_device_id_ == 3);
  EXPECT(bytes.dst_device_type_ == CPU && bytes.dst_device_id_ == 1);
  SArray<float> back;
  back = bytes;
  EXPECT(back.size() == 2 && back.data() == a.data());
  EXPECT_THROW(fserver::ShapeError, "7 bytes are no multiple of 4",
               SArray<float>(bytes.segment(0, 7)));
}

CASE(devices_of_an_array) {
  float memory[3] = {};
  const SArray<float> a(memory, 3, GPU, 5, CPU, 1);
  EXPECT(a.data() == memory && a.size() == 3);
  EXPECT(a.src_device_type_ == GPU && a.src_device_id_ == 5);
  EXPECT(a.dst_device_type_ == CPU && a.dst_device_id_ == 1);
  EXPECT_EQ(a.DebugString(), "[data_size=3 GPU[5]->CPU[1]]");
  EXPECT_EQ(SArray<int>().DebugString(), "[data_size=0 UNK[-1]->UNK[-1]]");
  const SArray<int> owned(new int[2], 2, CPU, 0, GPU, 1, true);
  EXPECT_EQ(owned.DebugString(), "[data_size=2 CPU[0]->GPU[1]]");
  EXPECT_THROW(fserver::ConfigError, "GPU 5 is deletable",
               SArray<float>(memory, 3, GPU, 5, CPU, 1, true));
}

CASE(ranges_of_sorted_keys) {
  const SArray<Key> keys{1, 3, 5, 7};
  const Range r = FindRange<Key>(keys, 3, 7);
  EXPECT(r.begin() == 1 && r.end() == 3 && r.size() == 2);
  EXPECT_EQ(FindRange<Key>(keys, 8, 100).size(), 0u);
  EXPECT_EQ(FindRange<Key>(keys, 5, 5).size(), 0u);
}

CASE(the_key_space_is_cut_evenly) {
  Environment::Init({{"DMLC_NUM_SERVER", "3"},
                     {"DMLC_NUM_WORKER", "5"},
                     {"DMLC_GROUP_SIZE", "2"},
                     {"DMLC_ROLE", "worker"}});
  Postoffice *p = Postoffice::Get();
  EXPECT(p == Postoffice::GetWorker() && p->is_worker());
  EXPECT(!p->is_server() && !p->is_scheduler());
  EXPECT(Postoffice::GetServer()->is_server());
  EXPECT(Postoffice::GetScheduler()->is_scheduler());
  const std::vector<Range> &all = p->GetServerKeyRanges();
  EXPECT_EQ(all.size(), 3u);
  EXPECT(all[0].begin() == 0 && all[2].end() == kMaxKey);
  for (std::size_t i = 1; i < 3; i++)
    EXPECT(all[i].begin() == all[i - 1].end() &&
           all[i].size() == all[0].size());
  EXPECT(p->group_size() == 2 && GetGroupSize() == 2);
  EXPECT_EQ(p->num_workers(), 5);
  EXPECT_EQ(p->num_servers(), 3);
  EXPECT_EQ(p->num_worker_instances(), 10);
  EXPECT_EQ(p->num_server_instances(), 6);
  EXPECT_EQ(p->GroupWorkerRankToInstanceID(2, 1), 19);
  EXPECT_EQ(p->GroupServerRankToInstanceID(2, 1), 18);
  EXPECT_EQ(p->InstanceIDtoGroupRank(19), 2);
  EXPECT_EQ(p->GetNodeIDs(kScheduler + kServerGroup).size(), 7u);
  EXPECT_EQ(p->GetNodeIDs(kWorkerGroup).at(9), 27);
  EXPECT_EQ(p->GetNodeIDs(11).at(0), 11);
  EXPECT(Postoffice::GetWorker(1) != p);
  EXPECT_THROW(fserver::ConfigError, "instance is 2, want 0 to 1",
               Postoffice::GetWorker(2));
  EXPECT(!p->started());
  EXPECT_THROW(fserver::ClosedError, "call StartPS first", KVWorker<int>(0, 0));
}

CASE(ids) {
  for (int rank : {0, 1, 40}) {
    EXPECT_EQ(Postoffice::WorkerRankToID(rank), 2 * rank + 9);
    EXPECT_EQ(Postoffice::ServerRankToID(rank), 2 * rank + 8);
    EXPECT_EQ(Postoffice::IDtoRank(2 * rank + 9), rank);
    EXPECT_EQ(Postoffice::IDtoRank(2 * rank + 8), rank);
  }
  EXPECT_EQ(Postoffice::IDtoRank(kScheduler), 0);
  EXPECT(GetRole("joint") == Node::JOINT && GetRole("server") == Node::SERVER);
  EXPECT_THROW(fserver::ConfigError, "role is \"boss\"", GetRole("boss"));
}

CASE(settings) {
  Environment::Init({{"A", "12"}, {"B", "x"}, {"C", "1.5"}});
  const Environment *e = Environment::Get();
  setenv("KV_TEST", "of the process", 1);
  EXPECT_EQ(std::string(e->find("KV_TEST")), "of the process");
  EXPECT(e->find("KV_TEST_UNSET") == nullptr);
  int i = 0;
  double d = 0;
  EXPECT(e->find("A", &i, 3) && i == 12);
  EXPECT(!e->find("KV_TEST_UNSET", &i, 3) && i == 3);
  EXPECT(e->find("C", &d, 3.0) && d == 1.5);
  EXPECT_THROW(fserver::ConfigError, "B=x: want", e->find("B", &i, 3));
  EXPECT_THROW(fserver::ConfigError, "C=1.5: want", e->find("C", &i, 3));
  Environment::Init({});
}

CASE(variables_of_any_type) {
  setenv("KV_TEST", "of the process", 1);
  setenv("KV_TEST_NUMBER", "7", 1);
  Environment::Init({{"KV_TEST_SET", "ibverbs"},
                     {"KV_TEST_NUMBER", "12"},
                     {"KV_TEST_LARGE", "5000000000"},
                     {"KV_TEST_PART", "1.5"}});
  EXPECT_EQ(std::string(GetEnv("KV_TEST", "zmq")), "of the process");
  EXPECT_EQ(std::string(GetEnv("KV_TEST_SET", "zmq")), "ibverbs");
  EXPECT_EQ(std::string(GetEnv("KV_TEST_UNSET", "zmq")), "zmq");
  EXPECT_EQ(GetEnv("KV_TEST_SET", std::string("zmq")), "ibverbs");
  EXPECT_EQ(GetEnv("KV_TEST_UNSET", std::string("zmq")), "zmq");
  EXPECT_EQ(GetEnv("KV_TEST_NUMBER", 3), 12); // not that of the process
  EXPECT_EQ(GetEnv("KV_TEST_UNSET", 3), 3);
  EXPECT_EQ(GetEnv("KV_TEST", 3), 0);
  EXPECT_EQ(GetEnv("KV_TEST_LARGE", UINT64_C(3)), UINT64_C(5000000000));
  EXPECT_EQ(GetEnv("KV_TEST_PART", 3.0), 1.5);
  EXPECT_EQ(GetEnv("KV_TEST_NUMBER", false), true);
  Environment::Init({});
}

CASE(a_queue_between_threads) {
  ThreadsafeQueue<std::unique_ptr<int>> q;
  std::thread t([&] {
    for (int i = 0; i < 100; i++)
      q.Push(std::make_unique<int>(i));
  });
  std::unique_ptr<int> got;
  for (int i = 0; i < 100; i++) {
    q.WaitAndPop(&got);
    EXPECT_EQ(*got, i);
  }
  t.join();
  EXPECT(!q.TryPop(&got) && q.Size() == 0);
}

namespace {

// What f writes to the standard error, and how its process ends.
template <class F> std::pair<std::string, int> output(F &&f) {
  int ends[2];
  EXPECT(pipe(ends) == 0);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], 2);
    f();
    std::_Exit(0);
  }
  close(ends[1]);
  std::string text;
  char c;
  while (read(ends[0], &c, 1) == 1)
    text += c;
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  return {text, WIFSIGNALED(status) ? WTERMSIG(status) : 0};
}

bool ends_with(const std::string &text, const std::string &end) {
  return text.size() >= end.size() &&
         text.compare(text.size() - end.size(), end.size(), end) == 0;
}

} // namespace

CASE(a_check_that_fails_ends_the_program) {
  int calls = 0;
  const auto one = [&calls] { return ++calls; };
  CHECK(one() == 1) << "not evaluated " << ++calls;
  CHECK_LT(calls, 2);
  EXPECT_EQ(*CHECK_NOTNULL(&calls), 1);
  if (calls)
    CHECK_EQ(calls, 1);
  else
    failed(__FILE__, __LINE__, "the else of another if");
  auto [text, signal] = output([] { CHECK_EQ(1 + 1, 3) << "sums"; });
  EXPECT_EQ(signal, SIGABRT);
  EXPECT(ends_with(text, ": check failed: 1 + 1 == 3 (2 and 3) sums\n"));
  std::tie(text, signal) = output([] { PS_CHECK(false) << "why"; });
  EXPECT(signal == SIGABRT && ends_with(text, "check failed: false why\n"));
  std::tie(text, signal) = output([] { LOG(FATAL) << "the end"; });
  EXPECT(signal == SIGABRT && ends_with(text, "the end\n"));
  std::tie(text, signal) =
      output([] { CHECK_NOTNULL(static_cast<int *>(nullptr)); });
  EXPECT(signal == SIGABRT && ends_with(text, "is null\n"));
}

// A check that fails has evaluated its arguments once.
CASE(arguments_of_a_check) {
  int calls = 0;
  const auto [text, signal] = output([&calls] { CHECK_LT(++calls, 1); });
  EXPECT_EQ(signal, SIGABRT);
  EXPECT(ends_with(text, ": check failed: ++calls < 1 (1 and 1) \n"));
  if (calls == 0)
    CHECK_EQ(text.size(), text.size() + 0u); // neither is the next line's
  else
    CHECK_EQ(calls, 0);
}

// Values that a stream does not take, and null pointers of C.
CASE(checks_of_many_types) {
  enum class Colour { kRed, kBlue };
  std::map<int, int> map{{1, 2}};
  int *const none = nullptr;
  CHECK_NE(map.find(1), map.end());
  CHECK_EQ(Colour::kRed, Colour::kRed);
  CHECK_NE(map.begin()->second, 0);
  CHECK_EQ(none, 0);
  CHECK_NE(&map, 0);
  const auto [text, signal] =
      output([] { CHECK_EQ(Colour::kRed, Colour::kBlue); });
  EXPECT_EQ(signal, SIGABRT);
  EXPECT(ends_with(text,
                   " (a value that has no << and a value that has no <<) \n"));
}

// StepMesh's names of the same.
CASE(a_check_of_stepmesh) {
  PS_CHECK_EQ(1, 1) << "never said";
  PS_CHECK_NE(1, 2);
  PS_CHECK_LT(1, 2);
  PS_CHECK_LE(2, 2);
  PS_CHECK_GT(2, 1);
  PS_CHECK_GE(2, 2);
  CHECK_NE(1, 2) << "never said";
  CHECK_LE(2, 2);
  CHECK_GT(2, 1);
  CHECK_GE(2, 2);
  int one = 1;
  EXPECT_EQ(PS_CHECK_NOTNULL(&one), &one);
  const auto [text, signal] = output([] { PS_CHECK_GT(1, 2) << "why"; });
  EXPECT_EQ(signal, SIGABRT);
  EXPECT(ends_with(text, ": check failed: 1 > 2 (1 and 2) why\n"));
}

CASE(small_things) {
  class Alone {
  public:
    Alone() = default;
    DISALLOW_COPY_AND_ASSIGN(Alone);
  };
  static_assert(!std::is_copy_constructible_v<Alone>);
  static_assert(!std::is_copy_assignable_v<Alone>);
  for (const auto &[type, name] :
       {std::pair{UNK, "UNK"}, std::pair{CPU, "CPU"}, std::pair{GPU, "GPU"}})
    EXPECT_EQ(std::string(DeviceTypeName[DeviceType{type}]), name);
  const Range none;
  EXPECT(none.begin() == 0 && none.size() == 0);
  const Customer customer(3, 4);
  EXPECT(customer.app_id() == 3 && customer.customer_id() == 4);
}

CASE(lines_of_the_log) {
  auto [text, signal] = output([] { LOG(INFO) << "a" << 1; });
  EXPECT(signal == 0 && text[0] == '[');
  EXPECT(text.find("] INFO ") == 9 && ends_with(text, ": a1\n"));
  std::tie(text, signal) = output([] { PS_VLOG(1) << "more"; });
  EXPECT(text.empty());
  Environment::Init({{"PS_VERBOSE", "1"}});
  std::tie(text, signal) = output([] {
    PS_VLOG(1) << "more";
    PS_VLOG(2) << "still more";
  });
  EXPECT(ends_with(text, ": more\n"));
  Environment::Init({});
  std::tie(text, signal) = output([] { LL << "a" << 1; });
  EXPECT(text.find("] ERROR ") == 9 && ends_with(text, ": a1\n"));
  std::tie(text, signal) = output([] {
    PS_LOG(WARNING) << "careful";
    LOG_IF(ERROR, false) << "not this";
  });
  EXPECT(ends_with(text, ": careful\n"));
}

CASE(timestamps_of_numbers) {
  using detail::number_of, detail::timestamp_of;
  constexpr std::int64_t kAll = detail::kTimestamps;
  for (std::int64_t next : {std::int64_t{5000}, kAll - 1, kAll, kAll + 1,
                            2 * kAll, 2 * kAll + 3, 5 * kAll + 77}) {
    for (std::int64_t n = next - 4100; n < next; n++) {
      EXPECT(timestamp_of(n) >= 0 && timestamp_of(n) < kAll);
      EXPECT_EQ(number_of(next, timestamp_of(n)), n);
    }
  }
  EXPECT(number_of(3, 3) < 0 && number_of(3, -1) < 0 && number_of(0, 0) < 0);
  EXPECT(number_of(kAll + 9, detail::kTimestamps) < 0);
  EXPECT_EQ(detail::clamped(7), 7);
  EXPECT_EQ(detail::clamped(UINT64_C(1) << 31), INT32_MAX);
}

// No two requests of an app share an engine key by accident, and shared ones are few.
CASE(engine_keys) {
  std::set<std::uint64_t> keys, shared;
  for (int app = 0; app < 3; app++) {
    for (Key k = 0; k < 10000; k++) {
      const std::uint64_t key = detail::engine_key(app, k << 40);
      EXPECT_EQ(key & 3, 0u);
      keys.insert(key);
      shared.insert(detail::shared_key(key));
    }
  }
  EXPECT_EQ(keys.size(), 30000u);
  EXPECT(shared.size() <= detail::kSharedKeys && shared.size() > 4000);
  for (std::uint64_t key : shared)
    EXPECT_EQ(key & 3, 2u);
}
