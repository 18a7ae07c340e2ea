// Backend of programs of StepMesh.
#include "ps/internal/backend.h"

#include <cstring>
#include <thread>

#include "scenes.hpp"

using namespace ps;

namespace {

// A device of the program's own.
struct Other : ps::detail::CpuBackend {
  int GetDeviceId() override { return 42; }
};

// Memory and events, in any backend. The caller has set the device.
void use(Backend *b) {
  for (std::uint64_t n : {0u, 1u, 100'000u}) {
    void *m = b->Alloc(n);
    EXPECT(m);
    if (b->GetDevice().is_cpu())
      std::memset(m, 1, n);
    b->Free(m);
  }
  b->Free(nullptr);
  EXPECT(!b->Alloc(UINT64_MAX));
  void *e = b->CreateEvent();
  EXPECT_EQ(b->SyncEvent(e), BACKEND_OK); // not recorded
  for (int i = 0; i < 2; i++) {
    EXPECT_EQ(b->RecordEvent(e, nullptr), BACKEND_OK);
    EXPECT_EQ(b->SyncEvent(e), BACKEND_OK);
  }
  EXPECT_EQ(b->FreeEvent(e), BACKEND_OK);
  EXPECT_EQ(b->FreeEvent(nullptr), BACKEND_FAILED);
  EXPECT_EQ(b->RecordEvent(nullptr, nullptr), BACKEND_FAILED);
  EXPECT_EQ(b->SyncEvent(nullptr), BACKEND_FAILED);
}

} // namespace

CASE(cpu) {
  Environment::Init({{"STEPMESH_BACKEND", "CPU"}});
  Backend *b = Backend::Get();
  EXPECT(b->GetDevice().is_cpu());
  EXPECT_EQ(b->SetDevice(1), BACKEND_OK);
  EXPECT_EQ(b->GetDeviceId(), 1);
  std::thread([b] { EXPECT_EQ(b->GetDeviceId(), -1); }).join();
  use(b);
}

// A GPU, or failures that are no abort.
CASE(gpu) {
  Environment::Init({{"STEPMESH_BACKEND", "GPU"}});
  Backend *b = Backend::Get();
  EXPECT_EQ(b->SetDevice(-1), BACKEND_FAILED);
  if (b->SetDevice(0) == BACKEND_OK) {
    EXPECT(b->GetDeviceId() == 0 && b->GetDevice().is_cuda());
    use(b);
  } else {
    EXPECT(!b->Alloc(1));
    void *e = b->CreateEvent();
    EXPECT_EQ(b->RecordEvent(e, nullptr), BACKEND_FAILED);
    EXPECT_EQ(b->FreeEvent(e), BACKEND_OK);
  }
  Environment::Init({{"STEPMESH_BACKEND", ""}, {"STEPMESH_BAKCEND", ""}});
  EXPECT(Backend::Get()->GetDevice().is_cpu() ||
         Backend::Get()->SetDevice(0) == BACKEND_OK);
}

CASE(events_that_are_used_again) {
  Environment::Init({{"STEPMESH_BACKEND", "CPU"}});
  TensorEvent e;
  EXPECT(e.Occupy());
  EXPECT(!e.Occupy());
  e.Sync(); // not recorded
  e.Record();
  e.Sync();
  e.Release();
  EXPECT(e.Occupy());
  struct Failing : ps::detail::CpuBackend {
    int RecordEvent(void *, void *) override { return BACKEND_FAILED; }
  };
  Backend::Register("failing", new Failing);
  Environment::Init({{"STEPMESH_BACKEND", "failing"}});
  TensorEvent failing;
  EXPECT_THROW(fserver::Error, "TensorEvent::Record", failing.Record());
  failing.Sync(); // nothing is recorded
}

CASE(names) {
  Environment::Init({{"STEPMESH_BACKEND", "other"}});
  EXPECT_THROW(fserver::ConfigError, "want one of CPU, GPU, failing",
               Backend::Get());
  EXPECT_THROW(fserver::ConfigError, "backend is null",
               Backend::Register("other", nullptr));
  EXPECT_THROW(fserver::ConfigError, "name is \"\"",
               Backend::Register("", new Other));
  Backend::Register("other", new Other);
  EXPECT_EQ(Backend::Get()->GetDeviceId(), 42);
  Environment::Init({{"STEPMESH_BACKEND", ""}, {"STEPMESH_BAKCEND", "other"}});
  EXPECT_EQ(Backend::Get()->GetDeviceId(), 42);
  Environment::Init({});
}

// Nodes of a program with a backend of its own.
BARE_SCENE(a_cluster_with_another_backend, 1, 1) {
  const std::string own = "other";
  Environment::Init({{"STEPMESH_BACKEND", IsServer() ? "" : own},
                     {"STEPMESH_BAKCEND", IsServer() ? own : ""}});
  const Node::Role role = GetRole(std::getenv("DMLC_ROLE"));
  EXPECT_THROW(fserver::ConfigError, "other", StartPS(0, role, -1, true));
  Backend::Register("other", new Other);
  StartPS(0, role, -1, true);
  if (IsServer())
    serve<float>(KVServerDefaultHandle<float>());
  if (IsWorker()) {
    KVWorker<float> kv(0, 0);
    kv.Wait(kv.Push({1}, {1}));
  }
  Finalize(0, role);
}
