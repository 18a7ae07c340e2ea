// What needs no cluster: tensors, shapes, memory, options, errors.
#include <chrono>
#include <clocale>
#include <cstdint>
#include <cstdlib>
#include <locale>
#include <type_traits>
#include <utility>

#include "cluster.hpp"

using namespace fserver;

CASE(shapes) {
  Shape s{2, 3};
  EXPECT_EQ(s.size(), 2u);
  EXPECT(s.text() == "[2, 3]");
  EXPECT(Shape().text() == "[]");
  const std::int64_t many[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  Shape large(many, 10);
  EXPECT_EQ(large.size(), 10u);
  EXPECT_EQ(large[9], 10);
  Shape copy = large;
  large.assign(many, 3);
  EXPECT_EQ(large.size(), 3u);
  EXPECT_EQ(large[2], 3);
  EXPECT_EQ(copy[9], 10);
  EXPECT(copy != large);
  Shape moved = std::move(copy);
  EXPECT_EQ(moved[9], 10);
  EXPECT_EQ(copy.size(), 0u); // moved from
  EXPECT(s == Shape({2, 3}));
}

CASE(limits) {
  using namespace std::chrono;
  EXPECT_EQ(Limit(milliseconds(3)).count(), 3'000'000);
  EXPECT_EQ(Limit(seconds(-1)).count(), -1'000'000'000);
  for (Limit most : {Limit(hours::max()), Limit(seconds::max()),
                     Limit(milliseconds::max()), Limit(kNoLimit)})
    EXPECT_EQ(most.count(), INT64_MAX);
  EXPECT_EQ(Limit(seconds::min()).count(), INT64_MIN);
  static_assert(!std::is_convertible_v<duration<double>, Limit>);
}

CASE(tensors) {
  float data[6] = {};
  const Tensor t(data, DType::kFloat32, {2, 3}, 7);
  EXPECT_EQ(t.bytes, 24u);
  EXPECT_EQ(t.key, 7u);
  EXPECT_EQ(t.as<float>(), data);
  EXPECT_EQ(t.device, kCpu);
  EXPECT_EQ(Tensor::of(data, 6).bytes, 24u);
  EXPECT_EQ(Tensor(data, DType::kFloat32, {}).bytes, 4u);
  EXPECT_EQ(Tensor(nullptr, DType::kFloat32, {0, 5}).bytes, 0u);
  EXPECT_EQ(Tensor().bytes, 0u);
  EXPECT_THROW(ShapeError, "shape [2, -1] has a negative dimension",
               Tensor(data, DType::kFloat32, {2, -1}));
  EXPECT_THROW(ShapeError, "more elements than memory can hold",
               Tensor(data, DType::kFloat32, {1LL << 40, 1LL << 40}));
  EXPECT_THROW(ShapeError, "dtype 255 has no size",
               Tensor(data, DType::kAny, {1}));
  EXPECT_THROW(ShapeError, "shape [1099511627776, 1099511627776]",
               Tensor(data, DType::kFloat32, {1LL << 40, 1LL << 40}));
  EXPECT_THROW(ShapeError, "shape [0, -1]",
               Tensor(data, DType::kFloat32, {0, -1}));
  EXPECT_EQ(Tensor(data, DType::kFloat32, {1LL << 40, 1LL << 40, 0}).bytes, 0u);
  EXPECT_EQ(Tensor(data, DType::kFloat32, {0, 1LL << 40, 1LL << 40}).bytes, 0u);
}

CASE(dtypes) {
  static_assert(dtype_of<float> == DType::kFloat32);
  static_assert(size_of(DType::kBFloat16) == 2);
  EXPECT_EQ(size_of(static_cast<DType>(200)), 0u);
  EXPECT(std::string(name_of(DType::kFloat8E4M3FN)) == "float8_e4m3fn");
}

CASE(memory) {
  Memory m(1000);
  EXPECT_EQ(m.bytes(), 1000u);
  EXPECT_EQ(m.as<char>()[999], 0);
  const Tensor t = m.tensor(DType::kInt32, {10}, 5, 40);
  EXPECT(static_cast<char *>(t.data) == m.as<char>() + 40);
  EXPECT_EQ(t.base, m.data());
  EXPECT_EQ(t.base_bytes, 1000u);
  EXPECT(t.alloc != 0);
  EXPECT_THROW(ShapeError, "40 bytes from offset 961 do not fit into 1000",
               m.tensor(DType::kInt32, {10}, 5, 961));
  EXPECT_THROW(ShapeError, "do not fit", m.tensor(DType::kInt32, {0}, 5, 1001));
  Memory other = std::move(m);
  EXPECT_EQ(other.bytes(), 1000u);
  EXPECT_EQ(m.data(), nullptr);
  EXPECT(Memory(8).tensor(DType::kInt64, {1}).alloc != t.alloc);
  for (const std::size_t less : {std::size_t(0), std::size_t(1000)}) {
    const volatile std::size_t most = SIZE_MAX - less;
    EXPECT_THROW(std::bad_alloc, "", Memory made(most));
  }

  double mine[4];
  const Memory named = Memory::of(mine, sizeof mine);
  EXPECT(named.tensor(DType::kFloat64, {4}).data == mine);
  Memory shared = Memory::shared(100);
  shared.as<char>()[99] = 1;
  other = std::move(shared);
  EXPECT_EQ(other.as<char>()[99], 1);
  EXPECT_THROW(ConfigError, "bytes is 0", Memory::shared(0));
}

CASE(options) {
  Options o;
  o.connect = false;
  for (const char *bad : {"here", ":7", "host:", "host:x", "::1:7", ""}) {
    o.scheduler = bad;
    if (*bad)
      EXPECT_THROW(ConfigError, std::string("scheduler is \"") + bad,
                   Worker w(o));
  }
  o.scheduler = "127.0.0.1:7000";
  o.transport = "pigeon";
  EXPECT_THROW(ConfigError, "FSERVER_TRANSPORT=\"pigeon\"", Worker w(o));
  o.transport = "";
  o.workers = 0;
  EXPECT_THROW(ConfigError, "DMLC_NUM_WORKER", Worker w(o));
  o.workers.reset();
  o.settings["FSERVER_HOST_SCHEDULER"] = "maybe";
  EXPECT_THROW(ConfigError, "FSERVER_HOST_SCHEDULER=maybe", Server s(o));
}

// Seconds and milliseconds have a decimal point, whatever the program's locale has.
CASE(locales) {
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
  };
  const std::locale before =
      std::locale::global(std::locale(std::locale::classic(), new Comma));
  for (const char *name : {"de_DE.UTF-8", "fr_FR.UTF-8", "C"}) {
    if (!std::setlocale(LC_ALL, name)) // the host does not have it
      continue;
    Options o;
    o.init_timeout = 2.5;
    EXPECT_EQ(detail::Settings(o).take("FSERVER_INIT_TIMEOUT"), "2.500000");
    EXPECT_EQ(detail::in_ms(std::chrono::microseconds(1500)), "1.5 ms");
  }
  std::locale::global(before);
}

CASE(environment) {
  setenv("DMLC_NUM_SERVER", "3", 1);
  Options o;
  o.connect = false;
  o.scheduler = "127.0.0.1:7000";
  EXPECT_EQ(Worker(o).servers(), 3);
  o.environment = false;
  EXPECT_EQ(Worker(o).servers(), 1);
  o.environment = true;
  o.settings["DMLC_NUM_SERVER"] = "4";
  EXPECT_EQ(Worker(o).servers(), 4);
  o.servers = 5;
  EXPECT_EQ(Worker(o).servers(), 5);
  unsetenv("DMLC_NUM_SERVER");
}

CASE(options_before_the_environment) {
  setenv("DMLC_INTERFACE", "auto", 1);
  setenv("DMLC_NODE_HOST", "10.0.0.1", 1);
  setenv("DMLC_LOCAL", "1", 1);
  const auto left = [](const char *name, const Options &o) {
    return detail::Settings(o).take(name);
  };
  Options host, interface, scheduler, none;
  host.host = "127.0.0.1";
  EXPECT_EQ(left("DMLC_INTERFACE", host), "");
  EXPECT_EQ(left("DMLC_LOCAL", host), "1");
  host.settings["DMLC_INTERFACE"] = "eth1";
  EXPECT_EQ(left("DMLC_INTERFACE", host), "eth1");
  interface.settings["DMLC_INTERFACE"] = "eth0";
  EXPECT_EQ(left("DMLC_NODE_HOST", interface), "");
  EXPECT_EQ(left("DMLC_LOCAL", interface), "");
  scheduler.scheduler = "10.0.0.2:7000";
  EXPECT_EQ(left("DMLC_LOCAL", scheduler), "");
  EXPECT_EQ(left("DMLC_INTERFACE", scheduler), "auto");
  EXPECT_EQ(left("DMLC_NODE_HOST", none), "10.0.0.1");
  EXPECT_EQ(left("DMLC_LOCAL", none), "1");
  for (const char *name : {"DMLC_INTERFACE", "DMLC_NODE_HOST", "DMLC_LOCAL"})
    unsetenv(name);
}

CASE(errors) {
  static_assert(std::is_base_of_v<std::runtime_error, Error>);
  static_assert(std::is_nothrow_copy_constructible_v<PeerLostError>);
  static_assert(std::is_nothrow_copy_constructible_v<RefusedError>);
  EXPECT_EQ(ConfigError("x").code(), EINVAL);
  EXPECT_EQ(ShapeError("x").code(), EMSGSIZE);
  EXPECT_EQ(TimeoutError("x").code(), ETIMEDOUT);
  EXPECT_EQ(ClosedError("x").code(), ESHUTDOWN);
  EXPECT_EQ(LimitError("x").code(), EXFULL);
  EXPECT_EQ(Error("x").code(), EIO);
  // Each code of the engine is one class.
  const auto as = [](int code) {
    fs_error e{};
    e.code = -code;
    e.rank = 2;
    e.got = e.want = FS_ANY;
    std::strcpy(e.text, "text");
    std::strcpy(e.address, "there");
    std::strcpy(e.reason, "why");
    detail::raise(e);
  };
  EXPECT_THROW(ConfigError, "text", as(EINVAL));
  EXPECT_THROW(ShapeError, "text", as(EMSGSIZE));
  EXPECT_THROW(LimitError, "text", as(EXFULL));
  EXPECT_THROW(TimeoutError, "text", as(ETIMEDOUT));
  EXPECT_THROW(ClosedError, "text", as(ESHUTDOWN));
  EXPECT_THROW(ClosedError, "text", as(EBADF));
  EXPECT_EQ(EXPECT_THROW(Error, "text", as(ENOMEM)).code(), ENOMEM);
  const auto lost = EXPECT_THROW(PeerLostError, "text", as(ECONNRESET));
  EXPECT(lost.rank() == 2 && lost.address() == "there" &&
         lost.reason() == "why");
  const auto refused = EXPECT_THROW(RefusedError, "text", as(EREMOTEIO));
  EXPECT(refused.rank() == 2 && refused.reason() == "why");
}
