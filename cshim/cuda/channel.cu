// The kernels of stream channels; cs_channel.h says what they are given.
//
// A sequence number counts the launches of each block. It lies in device memory,
// so that a captured graph can be replayed, and wraps: only differences and
// equality are looked at. Memory that a peer writes, or reads, is touched with
// .sys operations. The numbers are read past the first-level cache, which need not
// be empty when a kernel begins under programmatic dependent launch.
//
// A wait polls its flag alone. Once in kPolls it asks whether another kernel has
// given up, and more rarely whether time is up or the host has ended the channel (host
// memory: a microsecond away), so that a short wait pays nothing. Whoever gives up marks
// the channel dead; a later kernel that waits gives up after kPolls.
//
// What a kernel does first decides its latency: the count and the data are loaded at
// the same time, nothing is asked before, and up to eight loads of a thread are on
// their way at once (a loop that stores what it has just loaded waits for each).

typedef unsigned u32;
typedef unsigned long long u64;

constexpr u32 kPolls = 64;
constexpr u32 kAsks = 32;     // of the dead word, for one of the clock
constexpr u64 kTick = 100000; // nanoseconds from one look at the host to the next

// LOAD(name, type, how, reg) and STORE are one access to global memory.
#define LOAD(name, type, how, reg) \
  __device__ __forceinline__ type name(u64 p) { \
    type v; \
    asm volatile("ld." how " %0, [%1];" : "=" reg(v) : "l"(p) : "memory"); \
    return v; \
  }
#define STORE(name, type, how, reg) \
  __device__ __forceinline__ void name(u64 p, type v) { \
    asm volatile("st." how " [%0], %1;" ::"l"(p), reg(v) : "memory"); \
  }
LOAD(load_own, u32, "relaxed.gpu.global.u32", "r")
STORE(store_own, u32, "relaxed.gpu.global.u32", "r")
LOAD(load_own64, u64, "relaxed.gpu.global.u64", "l")
LOAD(acquire32, u32, "acquire.sys.global.u32", "r")
LOAD(acquire64, u64, "acquire.sys.global.u64", "l")
STORE(release32, u32, "release.sys.global.u32", "r")
STORE(release64, u64, "release.sys.global.u64", "l")
LOAD(host_word, u32, "relaxed.sys.global.u32", "r")
STORE(host_store, u32, "relaxed.sys.global.u32", "r")

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Before a kernel touches anything: all work before it on the stream is done. Then
// the next kernel may be brought to the SMs, where it waits for this one's end.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether to go on with a wait that began at since (0: not known yet): when it began,
// or kOver. The host is asked by one thread of all in a tick: where thousands read one
// word of host memory, they queue up for longer than most waits take.
constexpr u64 kOver = ~0ull;
__device__ __noinline__ u64 ask(const cs_launch_head &h, u32 peer, u64 since, u32 polls) {
  u32 why = load_own(h.dead) != 0 ? CS_LOST : 0;
  if (why == 0 && polls % (kPolls * kAsks) == 0) {
    const u64 now = nanoseconds(), asked = h.dead + 4;
    if (since == 0)
      since = now;
    const u32 tick = (u32)(now / kTick), last = load_own(asked);
    u32 ended = 0, parted = 0;
    if (tick != last && threadIdx.x % 32 == __ffs(__activemask()) - 1 &&
        atomicCAS((unsigned *)asked, last, tick) == last)
      ended = host_word(h.status);
    if (ended > 1)
      parted = host_word(h.status + 4 * (CS_BIT + peer / 32)) >> peer % 32 & 1;
    if (ended == 1 || (parted != 0 && now - since > CS_AFTERWARDS))
      why = CS_LOST;
    else if (now - since > h.patience)
      why = CS_LATE;
  }
  if (why == 0)
    return since;
  if (atomicExch((unsigned *)h.dead, 1u) == 0)
    host_store(h.status + 4, why | peer << 8);
  return kOver;
}

// Counts the polls of a thread.
struct Patience {
  u32 polls = 0;
  u64 since = 0;
  __device__ __forceinline__ bool over(const cs_launch_head &h, u32 peer) {
    if (++polls % kPolls != 0)
      return false;
    since = ask(h, peer, since, polls);
    return since == kOver;
  }
};

// Copies elements [begin, end) of T.
template <class T>
__device__ __forceinline__ void copy_as(const char *from, char *to, u64 begin, u64 end) {
  constexpr int kAtOnce = 8;
  const T *s = (const T *)from;
  T *d = (T *)to;
  const u64 step = blockDim.x;
  for (u64 i = begin + threadIdx.x; i < end; i += kAtOnce * step) {
    T v[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; k++)
      if (i + k * step < end)
        v[k] = s[i + k * step];
#pragma unroll
    for (int k = 0; k < kAtOnce; k++)
      if (i + k * step < end)
        d[i + k * step] = v[k];
  }
}

// Copies this block's share. A sender of fewer rows cuts fewer bytes than the receiver, which copies
// out all. So neither side counts on a share: recv_wait waits for all flags, and credit for all words.
__device__ void copy_share(const char *from, char *to, u64 bytes, u32 block, u32 blocks) {
  const u64 whole = bytes / 16, per = (whole + blocks - 1) / blocks;
  const u64 begin = min(whole, block * per), end = min(whole, begin + per);
  const u64 bits = (u64)from | (u64)to;
  if (bits % 16 == 0)
    copy_as<uint4>(from, to, begin, end);
  else if (bits % 4 == 0)
    copy_as<u32>(from, to, begin * 4, end * 4);
  else
    copy_as<char>(from, to, begin * 16, end * 16);
  if (block == blocks - 1 && threadIdx.x < bytes % 16)
    to[whole * 16 + threadIdx.x] = from[whole * 16 + threadIdx.x];
}

union Eight {
  char c[8];
  uint2 v;
};

__device__ __forceinline__ uint2 load8(const char *p, u64 left, bool aligned) {
  if (aligned && left >= 8)
    return *(const uint2 *)p;
  Eight u;
  u.v = make_uint2(0, 0);
  for (u32 i = 0; i < 8 && i < left; i++)
    u.c[i] = p[i];
  return u.v;
}

__device__ __forceinline__ void store8(char *p, uint2 v, u64 left, bool aligned) {
  if (aligned && left >= 8) {
    *(uint2 *)p = v;
    return;
  }
  Eight u;
  u.v = v;
  for (u32 i = 0; i < 8 && i < left; i++)
    p[i] = u.c[i];
}

// Packet 0 carries the number of rows, packet i + 1 the bytes from 8 * i on.
// Blocks of the two sides may have different numbers of threads, and so other packets.
struct Packets {
  const char *from;
  u64 bytes, n, step;
  u32 rows;
  bool aligned;

  __device__ __forceinline__ Packets(const cs_segment &s)
      : from((const char *)s.from), bytes(s.bytes), n((s.bytes + 7) / 8 + 1), step((u64)s.blocks * blockDim.x),
        rows(s.rows), aligned(s.from % 8 == 0) {}
  __device__ __forceinline__ uint2 load(u64 i) const {
    if (i == 0 || i >= n)
      return make_uint2(rows, 0);
    return load8(from + (i - 1) * 8, bytes - (i - 1) * 8, aligned);
  }
};

__device__ __forceinline__ void store_packet(uint4 *to, uint2 v, u32 seq) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(seq), "r"(v.y), "r"(seq)
               : "memory");
}

// The number of rows, where the application reads it. A store at the end of a kernel
// is waited for, so there is none where the number is the one that was there.
struct Told {
  u64 had = 0;
  __device__ __forceinline__ Told(const cs_segment &s, u32 block) {
    if (block == 0 && threadIdx.x == 0)
      had = load_own64(s.counted);
  }
  __device__ __forceinline__ void tell(const cs_segment &s, u64 rows) const {
    if (rows != had)
      *(u64 *)s.counted = rows;
  }
};

__device__ bool recv_packets(const cs_segment &s, const cs_launch_head &h, const Told &told, u32 block, u32 seq) {
  const uint4 *from = (const uint4 *)s.from + (seq & 1) * (u64)s.stride;
  char *to = (char *)s.to;
  const bool aligned = s.to % 8 == 0;
  const u64 n = (s.bytes + 7) / 8 + 1, step = (u64)s.blocks * blockDim.x;
  Patience patience;
  for (u64 i = (u64)block * blockDim.x + threadIdx.x; i < n; i += step) {
    uint4 x;
    for (;;) {
      asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "l"(from + i)
                   : "memory");
      if (x.y == seq && x.w == seq)
        break;
      if (patience.over(h, s.peer))
        return false;
    }
    if (i)
      store8(to + (i - 1) * 8, make_uint2(x.x, x.z), s.bytes - (i - 1) * 8, aligned);
    else
      told.tell(s, x.x);
  }
  return true;
}

// Waits until flag `block` of s says seq, and gives the number of rows.
__device__ __forceinline__ bool arrived(const cs_segment &s, const cs_launch_head &h, u32 block, u32 seq, u64 *rows) {
  Patience patience;
  for (;;) {
    const u64 v = acquire64(s.flags + 8 * block);
    if ((int)((u32)v - seq) >= 0) {
      *rows = v >> 32;
      return true;
    }
    if (patience.over(h, s.peer))
      return false;
  }
}

// The same, and tells the rows.
__device__ __forceinline__ bool await(const cs_segment &s, const cs_launch_head &h, const Told &told, u32 block,
                                      u32 seq) {
  u64 rows;
  if (!arrived(s, h, block, seq, &rows))
    return false;
  if (block == 0)
    told.tell(s, rows);
  return true;
}

template <class Launch> __device__ __forceinline__ const cs_segment &mine(const Launch &a) {
  u32 i = 0;
  while (i + 1 < a.head.count && blockIdx.x >= a.segment[i + 1].first)
    i++;
  return a.segment[i];
}

// Waits until the receiver has room; all threads of the block. All blocks of the receiver say so,
// because the two sides may share a message out differently: see copy_share and Packets.
__device__ bool credit(const cs_segment &s, const cs_launch_head &h, u32 seq) {
  const u32 words = s.kind == CS_IN_PLACE ? 1 : s.blocks;
  bool ok = true;
  Patience patience;
  for (u32 b = threadIdx.x; ok && b < words; b += blockDim.x)
    while (ok && (int)(acquire32(s.credits + 4 * b) - (seq - s.ahead)) < 0)
      ok = !patience.over(h, s.peer);
  return __syncthreads_and(ok);
}

// A channel that has ended sends nothing: what a wait before it has given up on is not
// there, and nobody is to take it for the next message.
__device__ __forceinline__ void send(const cs_launch_head &h, const cs_segment &s) {
  const u32 block = blockIdx.x - s.first;
  const u64 count = h.counts + 4 * blockIdx.x;
  const u32 dead = load_own(h.dead), seq = load_own(count) + 1;
  if (s.kind == CS_BY_PACKETS) {
    const Packets packets(s);
    const u64 first = (u64)block * blockDim.x + threadIdx.x;
    uint2 v = packets.load(first); // beside the load of the count
    __syncthreads();               // all have read the count
    if (threadIdx.x == 0)
      store_own(count, seq);
    if (dead || (s.credits != 0 && !credit(s, h, seq)))
      return;
    uint4 *to = (uint4 *)s.to + (seq & 1) * (u64)s.stride;
    for (u64 i = first; i < packets.n; i += packets.step) {
      const uint2 next = packets.load(i + packets.step);
      store_packet(to + i, v, seq);
      v = next;
    }
    return;
  }
  if (s.credits != 0 && !credit(s, h, seq))
    return;
  if (!dead)
    copy_share((const char *)s.from, (char *)s.to, s.bytes, block, s.blocks);
  if (__syncthreads_or(dead)) // it may end just now
    return;
  if (threadIdx.x == 0) {
    __threadfence_system(); // what the other threads wrote, too
    release64(s.flags + 8 * block, (u64)s.rows << 32 | seq);
    store_own(count, seq);
  }
}

__device__ __forceinline__ void recv(const cs_launch_head &h, const cs_segment &s) {
  const u32 block = blockIdx.x - s.first;
  const u64 count = h.counts + 4 * blockIdx.x;
  const Told told(s, block);
  const u32 dead = s.credits != 0 ? load_own(h.dead) : 0; // the sender's memory may be gone
  const u32 seq = load_own(count) + 1;
  __syncthreads(); // all have read the count
  if (threadIdx.x == 0)
    store_own(count, seq);
  if (s.kind == CS_IN_PLACE) { // one block here for all of the sender's
    if (s.credits != 0 && !dead && threadIdx.x == 0)
      release32(s.credits, seq);
    bool ok = true;
    for (u32 b = threadIdx.x; ok && b < s.stride; b += blockDim.x)
      ok = await(s, h, told, b, seq);
    return;
  }
  bool ok = true;
  if (s.kind == CS_BY_PACKETS)
    ok = recv_packets(s, h, told, block, seq);
  else if (threadIdx.x == 0)
    ok = await(s, h, told, block, seq);
  if (s.kind == CS_BY_LANDING && __syncthreads_and(ok))
    copy_share((const char *)s.from, (char *)s.to, s.bytes, block, s.blocks);
  if (s.credits != 0 && __syncthreads_and(ok && !dead) && threadIdx.x == 0) // all have read it
    release32(s.credits + 4 * block, seq);
}

// Before a launch that copies out of landing buffers, whose blocks would hold the SMs
// while they wait: what lets peers write to tensors, as in that launch,
__device__ __forceinline__ void give_room(const cs_launch_head &h, const cs_segment &s) {
  if (s.kind == CS_IN_PLACE && s.credits != 0 && threadIdx.x == 0 && load_own(h.dead) == 0)
    release32(s.credits, load_own(h.counts + 4 * s.first) + 1);
}
// and the wait, by one block for all of a segment's. It counts nothing.
__device__ __forceinline__ bool landed(const cs_launch_head &h, const cs_segment &s) {
  bool ok = true;
  u64 rows;
  if (s.kind == CS_BY_LANDING)
    for (u32 b = threadIdx.x; ok && b < s.blocks; b += blockDim.x)
      ok = arrived(s, h, b, load_own(h.counts + 4 * (s.first + b)) + 1, &rows);
  return ok;
}

// Does the segment of this block. Where a launch has few, one tensor has code of its own, in
// which the addresses of its numbers are constants.
template <void (*does)(const cs_launch_head &, const cs_segment &), class Launch>
__device__ __forceinline__ void run(const Launch &a) {
  begin();
  if (sizeof a.segment == CS_FEW * sizeof(cs_segment) && a.head.count == 1)
    does(a.head, a.segment[0]);
  else
    does(a.head, mine(a));
}

extern "C" {
__global__ void __launch_bounds__(1024) send_few(const __grid_constant__ cs_launch_few a) { run<send>(a); }
__global__ void __launch_bounds__(1024) send_many(const __grid_constant__ cs_launch_many a) { run<send>(a); }
__global__ void __launch_bounds__(1024) recv_few(const __grid_constant__ cs_launch_few a) { run<recv>(a); }
__global__ void __launch_bounds__(1024) recv_many(const __grid_constant__ cs_launch_many a) { run<recv>(a); }
// The next kernel is not brought to the SMs before this one has ended.
__global__ void __launch_bounds__(1024) recv_wait(const __grid_constant__ cs_launch_many a) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  for (u32 i = 0; i < a.head.count; i++)
    give_room(a.head, a.segment[i]);
  for (u32 i = 0; i < a.head.count && landed(a.head, a.segment[i]); i++) {
  }
}
}
