#include "kernels.h"

#include <atomic>
#include <mutex>
#include <new>
#include <unordered_map>

namespace fserver {
namespace {

// The copies of a kernel, by the threads of one warp. %r1: the thread. %r2: how many
// copies. %rd20: where they are. Each thread has 8 loads under way, because one from host memory
// takes more than a microsecond.
#define LOAD(k, at)                                                            \
  "  @%p" #k " ld.global.cv.v4.u32 {%a" #k ", %b" #k ", %c" #k ", %d" #k       \
  "}, [%rd26+" #at "];\n"
#define STORE(k, at)                                                           \
  "  @%p" #k " st.global.v4.u32 [%rd27+" #at "], {%a" #k ", %b" #k ", %c" #k   \
  ", %d" #k "};\n"
#define WITHIN(k, at)                                                          \
  "  add.u64 %rd28, %rd24, " #at ";\n  setp.lt.u64 %p" #k ", %rd28, %rd25;\n"
#define EACH(F)                                                                \
  F(0, 0)                                                                      \
  F(1, 512)                                                                    \
  F(2, 1024) F(3, 1536) F(4, 2048) F(5, 2560) F(6, 3072) F(7, 3584)
#define COPY_REGISTERS                                                         \
  "  .reg .pred %q, %p<8>;\n  .reg .b32 %r<8>, %a<8>, %b<8>, %c<8>, %d<8>;\n"  \
  "  .reg .b64 %rd<32>;\n"
#define COPIES                                                                 \
  "  mov.u32 %r3, 0;\n"                                                        \
  "next:\n"                                                                    \
  "  setp.ge.u32 %q, %r3, %r2;\n  @%q bra copied;\n"                           \
  "  add.u32 %r3, %r3, 1;\n"                                                   \
  "  ld.param.u64 %rd21, [%rd20];\n"                                           \
  "  ld.param.u64 %rd22, [%rd20+8];\n"                                         \
  "  ld.param.u64 %rd23, [%rd20+16];\n"                                        \
  "  add.u64 %rd20, %rd20, 24;\n"                                              \
  "  and.b64 %rd25, %rd23, -16;\n"                                             \
  "  cvt.u64.u32 %rd24, %r1;\n  shl.b64 %rd24, %rd24, 4;\n"                    \
  "units:\n"                                                                   \
  "  setp.ge.u64 %q, %rd24, %rd25;\n  @%q bra tail;\n"                         \
  "  add.u64 %rd26, %rd22, %rd24;\n  add.u64 %rd27, %rd21, %rd24;\n" EACH(     \
      WITHIN) EACH(LOAD)                                                       \
      EACH(                                                                    \
          STORE) "  add.u64 %rd24, %rd24, 4096;\n  bra units;\n"               \
                 "tail:\n"                                                     \
                 "  cvt.u64.u32 %rd24, %r1;\n  add.u64 %rd24, %rd24, %rd25;\n" \
                 "  setp.ge.u64 %q, %rd24, %rd23;\n  @%q bra next;\n"          \
                 "  add.u64 %rd26, %rd22, %rd24;\n  add.u64 %rd27, %rd21, "    \
                 "%rd24;\n"                                                    \
                 "  ld.global.cv.u8 %r4, [%rd26];\n  st.global.u8 [%rd27], "   \
                 "%r4;\n"                                                      \
                 "  bra next;\n"                                               \
                 "copied:\n"

// One look of a wait. It branches to `over` when the flag at %rd1 has reached %rd3. Each 1024th look also
// reads the page at %rd5, branches to `over` if waits are to end, and else falls through. All other looks
// branch to `nap`. p is a predicate; looks and low are registers of 32 bits.
#define LOOK(p, looks, low, over)                                              \
  "  ld.acquire.sys.s64 %rd4, [%rd1];\n"                                       \
  "  setp.ge.s64 " p ", %rd4, %rd3;\n"                                         \
  "  @" p " bra " over ";\n"                                                   \
  "  add.u32 " looks ", " looks ", 1;\n"                                       \
  "  and.b32 " low ", " looks ", 1023;\n"                                      \
  "  setp.ne.u32 " p ", " low ", 0;\n"                                         \
  "  @" p " bra nap;\n"                                                        \
  "  ld.relaxed.sys.u64 %rd6, [%rd5];\n"                                       \
  "  ld.param.u64 %rd7, [since];\n"                                            \
  "  setp.eq.s64 " p ", %rd7, -1;\n"                                           \
  "  @" p " ld.relaxed.sys.u64 %rd7, [%rd5+8];\n"                              \
  "  setp.ne.u64 " p ", %rd6, %rd7;\n"                                         \
  "  @" p " bra " over ";\n"

// Release and acquire at system scope: what was written before the flag, by this
// GPU, is seen by whoever has seen the flag, also the CPU or another GPU. The barrier has
// a release of one thread cover what the others have written before it, and has what they read
// after it come after an acquire.
constexpr char kCode[] = R"(
.version 6.4
.target sm_70
.address_size 64

.visible .entry fs_write_flag(.param .u64 flag, .param .u64 seq)
{
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [flag];
  ld.param.u64 %rd2, [seq];
  ld.relaxed.sys.u64 %rd3, [%rd2];
  st.release.sys.u64 [%rd1], %rd3;
  ret;
}

.visible .entry fs_wait_flag(.param .u64 flag, .param .u64 seq, .param .u64 page, .param .u64 since, .param .u64 patience)
{
  .reg .b64 %rd<10>;
  .reg .b32 %r<3>;
  .reg .pred %p;
  ld.param.u64 %rd1, [flag];
  ld.param.u64 %rd2, [seq];
  ld.param.u64 %rd5, [page];
  ld.relaxed.sys.s64 %rd3, [%rd2];
  mov.u64 %rd8, 0;
  mov.u32 %r1, 0;
again:
)" LOOK("%p", "%r1", "%r2", "over") R"(  ld.param.u64 %rd7, [patience];
  setp.eq.u64 %p, %rd7, 0;
  @%p bra nap;
  mov.u64 %rd9, %globaltimer;
  setp.eq.u64 %p, %rd8, 0;
  @%p mov.u64 %rd8, %rd9;
  sub.u64 %rd9, %rd9, %rd8;
  setp.lt.u64 %p, %rd9, %rd7;
  @%p bra nap;
  mov.u64 %rd9, 1;
  st.relaxed.sys.u64 [%rd5+16], %rd9;
  bra over;
nap:
  nanosleep.u32 64;
  bra again;
over:
  ret;
}

.visible .entry fs_seq_add_one(.param .u64 seq)
{
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [seq];
  ld.relaxed.sys.u64 %rd2, [%rd1];
  add.s64 %rd3, %rd2, 1;
  st.relaxed.sys.u64 [%rd1], %rd3;
  ret;
}

.visible .entry fs_ring(.param .u64 count, .param .u64 flag, .param .u32 n, .param .align 8 .b8 copies[216])
{
)" COPY_REGISTERS R"(
  mov.u32 %r1, %tid.x;
  ld.param.u32 %r2, [n];
  mov.u64 %rd20, copies;
)" COPIES R"(
  bar.sync 0;
  setp.ne.u32 %q, %r1, 0;
  @%q bra over;
  ld.param.u64 %rd1, [count];
  ld.param.u64 %rd2, [flag];
  ld.relaxed.sys.u64 %rd3, [%rd1];
  add.s64 %rd3, %rd3, 1;
  st.relaxed.sys.u64 [%rd1], %rd3;
  st.release.sys.u64 [%rd2], %rd3;
over:
  ret;
}

.visible .entry fs_await(.param .u64 count, .param .u64 add, .param .u64 asked, .param .u64 done, .param .u64 page, .param .u64 since, .param .u32 n, .param .align 8 .b8 copies[216])
{
)" COPY_REGISTERS R"(
  mov.u32 %r1, %tid.x;
  setp.ne.u32 %q, %r1, 0;
  @%q bra here;
  ld.param.u64 %rd1, [count];
  ld.param.u64 %rd2, [add];
  ld.relaxed.sys.u64 %rd3, [%rd1];
  add.s64 %rd3, %rd3, %rd2;
  st.relaxed.sys.u64 [%rd1], %rd3;
  ld.param.u64 %rd1, [asked];
  st.relaxed.sys.u64 [%rd1], %rd3;
  ld.param.u64 %rd1, [done];
  ld.param.u64 %rd5, [page];
  mov.u32 %r5, 0;
again:
)" LOOK("%q", "%r5", "%r6", "here") R"(nap:
  nanosleep.u32 64;
  bra again;
here:
  bar.sync 0;
  ld.param.u32 %r2, [n];
  mov.u64 %rd20, copies;
)" COPIES R"(
  ret;
}
)";

constexpr const char *kNames[kKernels] = {
    "fs_write_flag", "fs_wait_flag", "fs_seq_add_one", "fs_ring", "fs_await"};

struct Kernels {
  cs_function function[kKernels];
};

std::mutex mutex; // guards what follows; no call of the driver is made under it
std::unordered_map<int, Kernels> loaded; // by device

std::atomic<Page *> page{nullptr};

// since, of a wait that is captured.
constexpr uint64_t kCaptured = ~uint64_t{0};

} // namespace

// Loading is allowed while a stream is being captured: it is no work of the stream's.
// Asking for an attribute loads a kernel. At its first launch it would be too late: one that
// waits may be running then, for which the driver waits.
cs_function kernel(int device, Kernel which, Tried *tried) {
  const auto index = static_cast<size_t>(which);
  {
    const std::lock_guard<std::mutex> locked(mutex);
    const auto it = loaded.find(device);
    if (it != loaded.end())
      return it->second.function[index];
  }
  static const char *const what = "load the kernels for flags";
  Kernels k{};
  cs_module module = nullptr;
  int registers;
  bool ok = tried->ok(what, cs_cu.ModuleLoadData(&module, kCode));
  for (size_t i = 0; i < kKernels; i++)
    ok = ok &&
         tried->ok(what, cs_cu.ModuleGetFunction(&k.function[i], module,
                                                 kNames[i])) &&
         tried->ok(what, cs_cu.FuncGetAttribute(&registers, CS_FUNC_NUM_REGS,
                                                k.function[i]));
  if (!ok)
    return nullptr;
  const std::lock_guard<std::mutex> locked(mutex);
  return loaded.emplace(device, k).first->second.function[index];
}

bool start(cs_function f, cs_stream stream, unsigned threads, void **arguments,
           Tried *tried) {
  cs_launch_config c{};
  c.grid_x = c.grid_y = c.grid_z = c.block_y = c.block_z = 1;
  c.block_x = threads;
  c.stream = stream;
  return tried->good() &&
         tried->ok("launch a kernel",
                   cs_cu.LaunchKernelEx(&c, f, arguments, nullptr));
}

uint64_t seen(void *host, Tried *tried) {
  cs_ptr address = 0;
  tried->ok("get the GPU address of a pinned tensor",
            cs_cu.MemHostGetDevicePointer(&address, host, 0));
  return address;
}

// Of two that are made at once, one stays unused.
Page *the_page(Tried *tried) {
  if (Page *p = page.load())
    return p;
  void *made = nullptr;
  if (!tried->ok("allocate pinned memory",
                 cs_cu.MemHostAlloc(&made, sizeof(Page),
                                    CS_HOST_PORTABLE | CS_HOST_DEVICEMAP)))
    return nullptr;
  auto *p = new (made) Page{};
  Page *none = nullptr;
  return page.compare_exchange_strong(none, p) ? p : none;
}

Page *page_there() { return page.load(); }

uint64_t since(const Page *p, bool captured) {
  return captured ? kCaptured : p->ended;
}

} // namespace fserver
