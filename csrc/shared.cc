#include "shared.h"

#include "error.h"
#include "fserver.h"
#include "process.h"
#include "tensor.h"

namespace fserver {
namespace {

// Runs when the storage is gone, in any thread.
void free_shared(void *shared) {
  if (!forked.load()) // the engine is not in a forked child
    fs_shared_free(reinterpret_cast<uint64_t>(shared));
}

} // namespace

PyObject *shared_bytes(uint64_t bytes) {
  enter("empty_shared");
  fs_shared shared = 0;
  uint64_t address = 0;
  check("empty_shared",
        unlocked([&] { return fs_shared_alloc(bytes, &shared, &address); }));
  return make_bytes(adopt(reinterpret_cast<void *>(address), bytes, -1,
                          reinterpret_cast<void *>(shared), free_shared));
}

} // namespace fserver
