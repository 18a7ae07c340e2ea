// A program with the archive, and a plugin with the shared library: two engines in one process.
#include <dlfcn.h>

#include "cluster.hpp"

using namespace fserver;

int main(int argc, char **argv) {
  EXPECT_EQ(argc, 2);
  void *plugin = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
  if (!plugin)
    failed(__FILE__, __LINE__, dlerror());
  const auto begin =
      reinterpret_cast<int (*)(const char *)>(dlsym(plugin, "plugin_begin"));
  const auto end = reinterpret_cast<void (*)()>(dlsym(plugin, "plugin_end"));
  Dl_info ours{}, theirs{};
  EXPECT(dladdr(reinterpret_cast<void *>(&fs_abi), &ours) != 0);
  const std::string name = "libfserver.so." + std::to_string(FS_ABI);
  void *library = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  EXPECT(library != nullptr);
  EXPECT(dladdr(dlsym(library, "fs_abi"), &theirs) != 0);
  EXPECT(ours.dli_fbase != theirs.dli_fbase);

  Options o;
  o.scheduler = "127.0.0.1:0";
  o.connect = false;
  Scheduler scheduler(o);
  EXPECT_EQ(begin(scheduler.scheduler().c_str()), 0);
  o.scheduler = scheduler.scheduler();
  o.connect = true;
  Worker w(o);
  // Only one of the two engines has the worker.
  std::int64_t nodes[2], buffers, goroutines;
  EXPECT_EQ(fs_live(&nodes[0], &buffers, &goroutines), 0);
  const auto live =
      reinterpret_cast<decltype(&fs_live)>(dlsym(library, "fs_live"));
  EXPECT_EQ(live(&nodes[1], &buffers, &goroutines), 0);
  EXPECT_EQ(nodes[0], 2);
  EXPECT_EQ(nodes[1], 1);
  Memory m(8192);
  const Tensor x = floats(m, 0, 1000, 1), y = floats(m, 1000, 1000, 1);
  for (int i = 0; i < 1000; i++) {
    x.as<float>()[999] = static_cast<float>(i);
    w.push_pull(x, y).wait();
    EXPECT_EQ(y.as<float>()[999], static_cast<float>(2 * i));
  }
  w.stop();
  end();
  scheduler.stop();
}
