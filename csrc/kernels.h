// The small kernels of flags, and of channels whose messages the engine carries.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver.h"

namespace fserver {

enum class Kernel {
  kWriteFlag, // flag, seq: *flag = *seq
  kWaitFlag,  // flag, seq, page, since, patience: until *flag >= *seq
  kSeqAddOne, // seq: ++*seq
  kRing,      // count, flag, n, copies: the copies, then *flag = ++*count
  kAwait, // count, add, asked, done, page, since, n, copies: *asked = *count +=
          // add, until *done is that, then the copies
};
constexpr size_t kKernels = 5;

// What kRing and kAwait copy, between memory of the GPU and pinned memory. Both addresses
// are divisible by 16.
struct SmallCopy {
  uint64_t to, from, bytes;
};
constexpr size_t kSmallCopies =
    9; // that a kernel takes: 8, and numbers of rows
// Bytes up to which a kernel is faster: in sum, and, of what is copied beside larger copies, each.
constexpr uint64_t kSmallest = 8192 + 8 * 8, kTiny = 512;

// A kernel of a device, which is current. Like what follows, it is called without the GIL.
cs_function kernel(int device, Kernel which, Tried *tried);

// Launches one. threads: of its only block.
bool start(cs_function f, cs_stream stream, unsigned threads, void **arguments,
           Tried *tried);

// Where the GPU that is current finds memory of the host.
uint64_t seen(void *host, Tried *tried);

// What a kernel that waits looks at now and then, in pinned memory.
struct Page {
  volatile uint64_t ended; // counts the times that all waits were to end
  volatile uint64_t
      before; // those of them that a captured wait is not to end for
  volatile uint64_t late; // a wait has lasted for its time
};

// The page, made if there is none.
Page *the_page(Tried *tried);
// nullptr: there is none.
Page *page_there();

// The argument since of a wait: what `ended` is now, or, captured, that it looks at `before`.
uint64_t since(const Page *p, bool captured);

} // namespace fserver
