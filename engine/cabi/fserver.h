// fserver.h: the C interface of the engine.
//
// Every function may be called from any thread, blocks only where it says so,
// and returns 0 (or a count) or a negative errno; fs_errmsg then gives the
// text, except after -EAGAIN and -ENOBUFS, which have none. Handles are numbers that are never used twice: a stale one is refused.
// Pointers that are passed in are read during the call only, except the tensor
// memory itself (see fs_push_pull, fs_respond).
//
// The errno values in use and what they mean:
//  EINVAL       an argument or a setting is wrong              (ConfigError)
//  EMSGSIZE     a count, shape or size of tensors is wrong      (ShapeError)
//  EXFULL       4,096 tickets are under way, which is the limit, or a queue of
//               messages is full                              (LimitError)
//  ETIMEDOUT    the time given to the operation is up         (TimeoutError)
//  ECONNRESET   a peer is gone; fs_error names it            (PeerLostError)
//  EREMOTEIO    a server has refused the request; fs_error names it and says
//               why                                           (RefusedError)
//  ESHUTDOWN    the node is closed, or the cluster has ended   (ClosedError)
//  EBADF        no such ticket                                 (ClosedError)
//  EAGAIN       the slice of a waiting call is over: call again
//  ENOBUFS      the buffer is too small; *need says what is needed
//  everything else: a failure of the system or of the engine   (Error)
// A fault of the engine itself, or a pointer that is NULL where it must not be, is EIO with a text
// that starts with "engine: panic: " and names the functions that were running. It
// closes the node of the call: all its calls end with that error.
//
// The archive calls the library of the GPU driver, which need not be there,
// and binds it when it is first used. A program that is linked with it says
// -Wl,-z,lazy -Wl,--unresolved-symbols=ignore-in-object-files
// -Wl,--export-dynamic.
#ifndef FSERVER_H
#define FSERVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FS_ABI 15

typedef uint64_t fs_node;    // one worker, server or scheduler
typedef uint64_t fs_shared;  // memory of fs_shared_alloc
typedef uint64_t fs_ticket;  // one push_pull or one answer; they grow
typedef uint64_t fs_channel; // of one node; a handle is never used twice

enum { FS_ROLE_SCHEDULER = 0, FS_ROLE_WORKER = 1, FS_ROLE_SERVER = 2 };

typedef struct fs_error {
  int32_t code; // the negative errno
  int32_t role; // ECONNRESET, EREMOTEIO: role of the peer, else -1
  int32_t rank; // ECONNRESET, EREMOTEIO: its rank, else -1
  // EMSGSIZE because of dtypes: of the answer, of the pull tensor; else FS_ANY
  uint8_t got, want;
  char address[128];
  char reason[512];
  char text[1024]; // the whole message
} fs_error;

// One tensor: contiguous memory and what it means.
typedef struct fs_tensor {
  void *data;
  uint64_t bytes;
  uint64_t key;
  void *base;          // the allocation that data lies in, ...
  uint64_t base_bytes; // ... its size, ...
  uint64_t alloc;      // ... and a number of the caller's that is never given
                       // to another allocation; 0: do not cache
  const int64_t *dims;
  uint32_t ndim;
  int32_t device; // -1: CPU, else the node's GPU as CUDA counts
  // dtype is opaque to the engine; the receiver gets the same number. Those of a
  // pull tensor and of its answer must be equal, unless one is FS_ANY.
  uint8_t dtype;
} fs_tensor;

#define FS_ANY 255

typedef struct fs_info {
  int32_t role;      // FS_ROLE_*
  int32_t rank;      // within the role; -1 until fs_wait_ready has returned 0,
                     // if the scheduler assigns it
  int32_t group;     // index of the group; as rank
  int32_t instance;  // rail
  int32_t workers;   // worker groups: requests in a batch
  int32_t servers;   // server groups: answers to a push_pull
  int32_t device;    // -1: CPU
  int32_t registers; // what is sent is registered, too: alloc of pushed tensors
                     // and of answers saves doing that for each call
  int32_t recovery;  // 1: it has the place of a node that was lost
  // Completion words, see fs_push_pull. words[mask + 1] counts how often registrations were given
  // up: the next call that names such an allocation registers it again, and may wait.
  const volatile uint64_t *words;
  uint64_t mask;
  char address[128]; // where peers find this node; empty if nowhere
} fs_info;

// The ABI number that the archive was built with; compare with FS_ABI.
int fs_abi(void);

// Nanoseconds of the clock that traces use (CLOCK_MONOTONIC).
int64_t fs_now(void);

// The calling thread's last error, which is then forgotten. Returns 0, or
// -ENOENT if there is none.
int fs_errmsg(fs_error *out);

// What tensors the servers can hold that this process opens from now on. bytes[i] is
// the size of one element of dtype i, 0: there is no such type; n is at most 256. A
// push_pull with a tensor of another dtype, or whose bytes are not those of its shape,
// is refused to its worker, where fs_wait gives -EMSGSIZE, and is in no batch. With n = 0,
// and without this call, servers take any dtype and do not look at sizes.
int fs_dtypes(const uint8_t *bytes, size_t n);

// Opens a node and starts to connect it. settings is n strings "NAME=value";
// nothing is read from the process environment. Does not block.
int fs_open(const char *const *settings, size_t n, fs_node *out);

// Waits until the cluster is complete, at most slice_ns (then -EAGAIN). The
// bound on the whole is the setting FSERVER_INIT_TIMEOUT.
int fs_wait_ready(fs_node node, int64_t slice_ns);

int fs_get_info(fs_node node, fs_info *out);

// Worker: sends np push tensors to every server of the rail and takes nq pull
// tensors, server-major, nq divisible by the number of servers. Does not wait
// for the peer. The memory of all tensors must stay valid and the pushed bytes
// unchanged until the ticket's word says done:
// words[ticket & mask] == ticket << 2 | 1 (done) or | 2 (failed). | 3 means
// failed, so that fs_wait gives the error, while another peer may still write
// to the memory; | 0 under way. Other upper bits: forgotten, ended before.
//
// With a channel (0: none), fs_get_batch takes the requests on that channel. The keys
// must be the channel's own, and stream must be NULL.
//
// With *stream (NULL: none), the pushed tensors are read when what is queued so far on
// that stream of the node's GPU (a CUstream, 0: the default one) has run. The stream
// must not be under capture. The call does not wait for it.
int fs_push_pull(fs_node node, fs_channel channel, const uint64_t *stream,
                 const fs_tensor *push, size_t np, const fs_tensor *pull,
                 size_t nq, fs_ticket *out);

// Worker: fs_push_pull with one server of the rail alone: 0 to servers - 1 of fs_info. All nq pull
// tensors are for that server. The request is in no batch: the server takes it with FS_UNICASTS. It
// waits until earlier requests that push one of its keys are answered. It passes up to 64 others that wait.
int fs_push_pull_to(fs_node node, int32_t server, const uint64_t *stream,
                    const fs_tensor *push, size_t np, const fs_tensor *pull,
                    size_t nq, fs_ticket *out);

#define FS_NOSPIN 1u // goes on with a wait whose slice was over: no spinning

// Waits until the ticket is done or failed, at most slice_ns (then -EAGAIN).
// A failed one gives its error each time it is asked. A ticket that is no
// longer known (4,096 later ones have been issued and it has ended) gives
// -EBADF.
int fs_wait(fs_node node, fs_ticket ticket, int64_t slice_ns, uint32_t flags);

typedef struct fs_pending {
  int32_t server;   // rank of the first server that has not answered
  int32_t sent;     // 1: that server has it
  uint64_t key;     // the first that the push_pull names
  fs_ticket behind; // not sent: the one before it that it waits for, 0: none
} fs_pending;

// Worker: what a push_pull waits for. -EBADF: it is not under way.
int fs_waits_for(fs_node node, fs_ticket ticket, fs_pending *out);

// Server: takes one request of each worker group of the rail; with least above 0,
// of each that has one, when at least so many have. With a channel (0: none), it takes
// the requests on that, and least must be 0. With FS_UNICASTS in flags, one of each worker
// that has sent one by fs_push_pull_to, when any has; channel and least must be 0. Waits at
// most slice_ns (then -EAGAIN). Fills buf, an array of cap 64-bit words:
//
//  n
//  n times: handler, worker rank, np, nq,
//           np times: key, slot, buffer, address, bytes, dtype, device, ndim,
//                     ndim dims
//           nq times: bytes of the answer at that position
//
// in the order of the worker groups. *need is the number of words; if cap is
// smaller, -ENOBUFS, and the batch stays for the next call. slot numbers
// (worker rank, key) from 0; it may be given to another key when a worker has
// been restarted. buffer names the receive buffer, whose memory stays until the caller
// has released it by fs_buffer_release as many times as tensors in it were written here.
// buffer 0 is memory of the caller's own (fs_register_recv), or no memory at all where
// the tensor has no bytes. With slot FS_LENT, buffer is memory of the worker's own,
// mapped for reading alone, which is written here once; the bytes are valid until the
// request is answered.
int fs_get_batch(fs_node node, fs_channel channel, uint32_t least,
                 uint64_t *buf, size_t cap, size_t *need, int64_t slice_ns,
                 uint32_t flags);

#define FS_UNICASTS 2u
#define FS_LENT UINT64_MAX

// The rank of the worker whose request, not answered yet, has a handler.
int fs_worker_of(fs_node node, uint64_t handler, int32_t *rank);

// The keys of the pull tensors of such a request, in their order. *need is their number;
// if cap is smaller, -ENOBUFS.
int fs_pull_keys(fs_node node, uint64_t handler, uint64_t *keys, size_t cap,
                 size_t *need);

// Server: how often the worker with a rank was lost. If that has grown, the process that
// has asked for something is gone, and another one may have its rank.
int fs_losses(fs_node node, int32_t rank, uint32_t *losses);

// Releases a receive buffer so many times, when nobody looks at that many tensors of it any
// more; also valid after its node has been closed.
int fs_buffer_release(uint64_t buffer, uint64_t times);

// Makes shared memory of bytes zeros (more than none) in whole pages, at *address.
// It needs no node. A push of what lies wholly in it to a server of this host
// moves no bytes. The memory takes a descriptor until it is freed, which it must
// not be while a ticket names it.
int fs_shared_alloc(uint64_t bytes, fs_shared *out, uint64_t *address);
int fs_shared_free(fs_shared shared);

// Server: answers nh requests; request i takes the next counts[i] tensors of
// t. Each tensor goes to the pull tensor of that position, whose bytes and dtype
// it must match. stream and tickets (nh of them) work as in fs_push_pull. While 4,096 answers have not
// left it waits for room, at most 1 s, then -EXFULL; so does fs_fail. On an error
// in request i, *answered is i, and the requests before it have been answered.
int fs_respond(fs_node node, const uint64_t *stream, const uint64_t *handlers,
               const size_t *counts, size_t nh, const fs_tensor *t,
               fs_ticket *tickets, size_t *answered);

// Server: ends a request without an answer. At its worker fs_wait gives -EREMOTEIO with
// bytes of text (UTF-8), of which the first 500 travel; a run of white space is one space.
int fs_fail(fs_node node, uint64_t handler, const char *text, size_t bytes);

// Server: cuts memory into n equal slices; slice i receives keys[i] of worker
// ranks[i]. The memory must stay valid until fs_close. Allowed
// before fs_wait_ready has returned, so that no push can come first.
int fs_register_recv(fs_node node, const fs_tensor *t, const int32_t *ranks,
                     const uint64_t *keys, size_t n);

#define FS_BARRIER_SERVERS 1u
#define FS_BARRIER_WORKERS 2u
#define FS_BARRIER_GROUPS 4u // one call per group, not per instance

// *token is 0 for a new barrier and is set; call again with it after -EAGAIN.
// timeout_ns bounds the whole barrier and counts from the first call; 0: the
// setting FSERVER_BARRIER_TIMEOUT.
int fs_barrier(fs_node node, uint32_t flags, int64_t timeout_ns,
               uint64_t *token, int64_t slice_ns);

// Nobody waits for this barrier any more. The node has reached it all the same:
// the next barrier of the same kind goes on with it.
int fs_barrier_drop(fs_node node, uint64_t token);

// Small messages between any two nodes, the scheduler too. They go by the connections to the
// scheduler, which passes them on and keeps none. Those of one sender to one receiver keep their order.
#define FS_MAX_MESSAGE 1000000 // bytes

// For whom: a role, or several.
#define FS_TO_SCHEDULER 1u
#define FS_TO_SERVERS 2u
#define FS_TO_WORKERS 4u

// Sends bytes of data, which are copied, to the node of one role with a rank, or with rank -1 to
// all nodes of the roles `to`, this one included if its role is. With run above 0 (fs_mail, fs_member), only to
// that run of the node, not to a process that has taken its place.
//
// *token is 0 for a new message and is set; call again with it after -EAGAIN. 0: all whom it is
// for have it in their queues (1,024 messages, or 16 MiB, that fs_receive has not taken).
// -ECONNRESET: one of them is gone, or leaves; -EXFULL: the queue of one of them is full, or it does not
// answer (128 messages, or 4 MiB), or 256 messages, or 16 MiB, of this node have no answer yet. The
// others have got it. -EINVAL before fs_wait_ready has returned 0. -ESHUTDOWN when this node leaves or is closed, or the
// cluster has ended; also to a call that waits then, and the message may have arrived.
int fs_send(fs_node node, uint32_t to, int32_t rank, uint64_t run,
            const void *data, size_t bytes, uint64_t *token, int64_t slice_ns);

// Nobody asks any more what has become of a message. It is sent all the same.
int fs_send_drop(fs_node node, uint64_t token);

typedef struct fs_mail {
  int32_t role; // of the sender, FS_ROLE_*
  int32_t rank; // 0 for the scheduler
  uint64_t run; // which run of that process
} fs_mail;

// Takes the oldest message that has come; waits for one, at most slice_ns (then -EAGAIN), without
// moving other data. *need is its size; if cap is smaller, -ENOBUFS, and the message stays.
int fs_receive(fs_node node, fs_mail *from, void *buf, size_t cap, size_t *need,
               int64_t slice_ns);

enum { FS_PRESENT = 0, FS_LOST = 1, FS_LEFT = 2 };

typedef struct fs_member {
  int32_t role, rank; // FS_ROLE_*; 0 for the scheduler
  int32_t state;      // FS_PRESENT, FS_LOST (its place is free), FS_LEFT (in
                      // order, or about to)
  int32_t reserved;
  uint64_t run;      // of the last process that had its place; 0: not known
  int64_t silent_ns; // since it was last heard; -1: not heard by this node
                     // directly, as members are not by members
} fs_member;

// What this node knows of the scheduler and of all workers and servers, in this order by role
// and rank: *need of them. If cap is smaller, -ENOBUFS.
int fs_members(fs_node node, fs_member *out, size_t cap, size_t *need);

typedef uint64_t fs_watch; // of one node; a number is never used twice

// A watch wakes an event loop, which sleeps in no call of this interface. fd is an
// eventfd of the caller's. The engine keeps a duplicate of it, so that caller and engine
// may close theirs in any order.
int fs_watch_open(fs_node node, int fd, fs_watch *out);

// Arms a watch: the engine adds 1 to its eventfd when a ticket may have ended or a
// request may have come, once for each call. Arm first, then look (the words of fs_info,
// fs_get_batch with slice 0), then sleep: so nothing is missed. False alarms are
// possible. Until the alarm the engine drives the node where no caller does. fs_close
// writes to all watches, armed or not, and from then on this call gives -ESHUTDOWN.
int fs_watch_arm(fs_node node, fs_watch watch);

// Closes a watch. Its eventfd is not written to any more when this has returned.
// fs_free closes all watches of its node.
int fs_watch_close(fs_node node, fs_watch watch);

// The 8 stamps of a ticket (fetch_trace), among the last 4,096.
int fs_trace(fs_node node, fs_ticket ticket, int64_t stamps[8]);

// The allocation is gone: drop what is cached for it.
int fs_forget(fs_node node, uint64_t alloc);

// Opens a stream channel with all peers of the rail, under a name for both sides (1
// to 64 bytes). The peers number from 0 in the order of their groups.
int fs_channel_open(fs_node node, const char *name, fs_channel *out);

// words[0] becomes 1 when the channel ends: a peer is lost, or the node or this side
// closed; it becomes 2 when a peer has closed its side, after which that sends no
// more. Bit i % 32 of words[4 + i / 32] says that peer i has. words[1] to words[3]
// are the caller's. The words must stay valid until fs_channel_close has returned 0,
// or this has been called with others or NULL.
#define FS_WATCH_WORDS 4096
int fs_channel_watch(fs_node node, fs_channel channel,
                     uint32_t words[FS_WATCH_WORDS]);

// The words of fs_channel_carry, which count messages. A stream writes RUNG (it has filled, or
// emptied, the memory of so many) and ASKED (it waits until so many are done). The engine writes
// DONE (it is through with so many; INT64_MAX: the channel has ended, see fs_channel_state), SENT
// (it has sent so many) and, at last, OVER: it touches none of the memory any more.
enum {
  FS_CARRY_RUNG = 0,
  FS_CARRY_ASKED = 1,
  FS_CARRY_DONE = 8,
  FS_CARRY_SENT = 9,
  FS_CARRY_OVER = 10,
  FS_CARRY_WORDS = 16
};

typedef struct fs_carried {
  int64_t *words; // FS_CARRY_WORDS zeros
  // What goes out. Worker: what it pushes to every server. Server: what it answers, in
  // equal shares for its workers, in their order.
  const fs_tensor *out;
  size_t nout;
  // What comes in. Worker: pull tensors, as of fs_push_pull. Server: tensors that take what
  // is pushed, in equal shares as above.
  const fs_tensor *in;
  size_t nin;
  int64_t *rows;      // worker: how many rows of each of out are to be sent
  int64_t *counts;    // server: takes how many rows of each of in have come
  int64_t timeout_ns; // of a stream that waits for one message
  // 1: a server receives what a worker pushes in the tensor of `in` that has its key, among
  // those of this worker. Nothing else uses these keys, on either side, and a server tells
  // of its side after this call. 0: a server receives it elsewhere, and its CPU copies it
  // to `in`, which is on the CPU then.
  int32_t lands;
} fs_carried;

// Has the engine exchange all messages of a channel that is open at all peers, for streams
// that count them in words; nothing else may use the channel then. At a worker a message is
// sent when RUNG has reached it, and DONE reaches it when what all servers answer is in
// `in`. At a server DONE reaches it when the message of each worker is in `in`, and the
// answers are sent when RUNG has; with nin = 0, DONE when they have been. Data is in memory
// before the word that says so. Tensors may be on the GPU of the node if fs_gpu_direct says
// so. If this returns 0, the memory must stay valid until OVER is 1, at the latest when
// fs_close has returned: with `lands` not before all workers have closed their sides. It may
// register memory, and blocks for that.
int fs_channel_carry(fs_node node, fs_channel channel, const fs_carried *what);

// *direct is 1 if each peer's path reads and writes memory of the node's GPU by itself, as a
// NIC with GPUDirect does, else 0.
int fs_gpu_direct(fs_node node, int *direct);

// Tells a peer bytes of text about this side; more of it when the peer has read that. A
// server refuses what comes on a channel before it has heard of the worker's side: a worker
// sends when it has read what the server tells of its own.
int fs_channel_tell(fs_node node, fs_channel channel, uint32_t peer,
                    const char *text, size_t bytes);

// What a peer has told of its side, which is not given again when it was copied to buf,
// or, if it has said so, why it has closed it. Waits for that, at most slice_ns (then
// -EAGAIN). *need as in fs_describe.
int fs_channel_text(fs_node node, fs_channel channel, uint32_t peer, char *buf,
                    size_t cap, size_t *need, int64_t slice_ns);

// 0 while all sides are open, else the error that ended the channel. With a ticket
// of fs_push_pull on it, sides of servers that have answered it do not count.
int fs_channel_state(fs_node node, fs_channel channel, fs_ticket ticket);

// Closes this side and waits until all peers have closed theirs or are gone, at
// most slice_ns (then -EAGAIN; call again). With a slice below 0 it does not wait
// for them. bytes of text say why, to peers that were told of this side and open theirs
// later too; 0: in good order. The handle is gone when it returns 0; a stale one gives 0
// too.
int fs_channel_close(fs_node node, fs_channel channel, const char *why,
                     size_t bytes, int64_t slice_ns);

// Before it frees, unmaps or unpins memory, a GPU's driver waits for all that the
// GPU has to do, and meanwhile keeps the rest of the process from it, launches
// included. So from fs_gpu_hold to fs_gpu_release nothing is given back: kernels of the
// process may wait for messages then. The last release gives back all, and waits for
// that for at most wait_ns. Many may hold; of each sort at most 1 GiB, or 1,000 things,
// are put off. gpu is as CUDA counts. fs_gpu_hold waits for what is being given back, at
// most 5 s.
int fs_gpu_hold(int32_t gpu);
int fs_gpu_release(int32_t gpu, int64_t wait_ns);

// Gives back, as soon as nobody holds, what the driver knows by an address or handle:
// memory, a mapping of another process's, pinned memory, a module; or a context that is
// not the primary one, by the address of a pointer to it, which is NULL from then on (who
// holds may use it). bytes: how much that keeps from others; 0 for a context.
enum {
  FS_GPU_MEMORY,
  FS_GPU_MAPPING,
  FS_GPU_PINNED,
  FS_GPU_MODULE,
  FS_GPU_CONTEXT
};
int fs_gpu_free(int32_t gpu, int32_t what, uint64_t address, uint64_t bytes);

// Gives back what is put off of one sort, whoever holds: memory is short, or an address
// is taken. It waits for that, at most wait_ns. 1: try again; 0: there was nothing, or it
// has not ended.
int fs_gpu_reclaim(int32_t gpu, int32_t what, int64_t wait_ns);

// JSON about a node: who it is, links, counters. *need as in fs_get_batch, in
// bytes, without a final zero.
int fs_describe(fs_node node, char *buf, size_t cap, size_t *need);

// Leaves the cluster together with the others; -EAGAIN after slice_ns. When it
// returns anything else, the node is closed. Idempotent.
int fs_stop(fs_node node, int64_t slice_ns);

// Closes the node at once: every blocked call returns -ESHUTDOWN. When it
// returns, no memory of the caller's is touched any more. The words of fs_info
// stay readable until fs_free.
int fs_close(fs_node node);

// fs_close, waits until no other thread is in a call of the node, and forgets the
// handle and its words.
int fs_free(fs_node node);

// What is alive, for leak tests: nodes, receive buffers, goroutines.
int fs_live(int64_t *nodes, int64_t *buffers, int64_t *goroutines);

// Bytes of Go's heap that are in use, after a collection, which takes
// milliseconds; and of these what the engine has asked for, the rest being the
// runtime's: threads, notes of goroutines that wait. That is -1 unless
// GODEBUG=memprofilerate=1 is in the environment of the process.
int fs_heap(int64_t *bytes, int64_t *own);

// JSON of every setting: name, default, meaning, and, for the n settings given
// as in fs_open, value and source. Also the warnings about unknown names.
int fs_settings(const char *const *settings, size_t n, char *buf, size_t cap,
                size_t *need);

// JSON about this host: GPUs, interfaces, RDMA devices and how far they are
// from each other, cores, versions, and what a node with the n settings would
// make of it. May take seconds where a GPU driver starts.
int fs_host(const char *const *settings, size_t n, char *buf, size_t cap,
            size_t *need);

// Tries the way to the scheduler that the n settings name, without joining its
// cluster, for at most timeout_ns. JSON says what came of it; that nobody
// answers is no error. After -ENOBUFS the next call tries again.
int fs_probe(const char *const *settings, size_t n, int64_t timeout_ns,
             char *buf, size_t cap, size_t *need);

#ifdef __cplusplus
}
#endif
#endif
