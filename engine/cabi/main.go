// Command cabi is the engine as a C archive: fserver.h in Go. It translates
// between C and package node, and holds nothing but the tables of handles and
// of errors.
package main

// The header promises const where Go cannot say it. Without the word, its
// prototypes and those of the exports must be the same, and the compiler
// checks that they are.

/*
#include <stddef.h>
#include <stdint.h>
#define const
#include "fserver.h"
#undef const
*/
import "C"

import (
	"fmt"
	"maps"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"fserver/engine/mem"
	"fserver/engine/node"
)

func main() {}

// Threads of C enter Go while others poll inside it, and each of both holds a
// P. With one P per core, entry takes up to 15 ms.
func init() { runtime.GOMAXPROCS(max(8, runtime.NumCPU()+2)) }

// buffers outlives the nodes: tensors over receive buffers may.
var buffers = node.NewBuffers()

//export fs_abi
func fs_abi() C.int { return C.FS_ABI }

//export fs_now
func fs_now() C.int64_t { return C.int64_t(node.Now()) }

//export fs_errmsg
func fs_errmsg(out *C.fs_error) (rc C.int) {
	defer guard(&rc, 0)
	return lastError(out)
}

//export fs_dtypes
func fs_dtypes(bytes *C.uint8_t, n C.size_t) (rc C.int) {
	defer guard(&rc, 0)
	buffers.Hold(append([]byte(nil), array[byte](bytes, n)...)) // a copy; nil for none
	return 0
}

//export fs_open
func fs_open(settings **C.char, n C.size_t, out *C.fs_node) C.int {
	return call(func() error {
		nd, err := node.Open(goStrings(settings, n), buffers)
		if err == nil {
			*out = nodes.add(nd)
		}
		return err
	})
}

//export fs_wait_ready
func fs_wait_ready(h C.fs_node, slice C.int64_t) C.int {
	return on(h, func(nd *node.Node) error { return nd.WaitReady(time.Duration(slice)) })
}

//export fs_get_info
func fs_get_info(h C.fs_node, out *C.fs_info) C.int {
	return on(h, func(nd *node.Node) error {
		fillInfo(out, nd.Info())
		return nil
	})
}

//export fs_push_pull
func fs_push_pull(h C.fs_node, channel C.fs_channel, stream *C.uint64_t, push *C.fs_tensor, np C.size_t, pull *C.fs_tensor, nq C.size_t, out *C.fs_ticket) C.int {
	return on(h, func(nd *node.Node) error {
		submit := nd.PushPull
		if channel != 0 {
			if stream != nil {
				return fmt.Errorf("engine: %w: fs_push_pull: stream is not NULL: tensors on a channel wait for no stream", syscall.EINVAL)
			}
			submit = func(t *node.Ticket) error { return nd.PushPullOn(uint64(channel), t) }
		}
		return issue(nd, nd.BeginPushPull, stream, tensors(push, np), tensors(pull, nq), out, submit)
	})
}

//export fs_push_pull_to
func fs_push_pull_to(h C.fs_node, server C.int32_t, stream *C.uint64_t, push *C.fs_tensor, np C.size_t, pull *C.fs_tensor, nq C.size_t, out *C.fs_ticket) C.int {
	return on(h, func(nd *node.Node) error {
		submit := func(t *node.Ticket) error { return nd.PushPullTo(int(server), t) }
		return issue(nd, nd.BeginPushPull, stream, tensors(push, np), tensors(pull, nq), out, submit)
	})
}

//export fs_wait
func fs_wait(h C.fs_node, ticket C.fs_ticket, slice C.int64_t, flags C.uint32_t) C.int {
	return on(h, func(nd *node.Node) error {
		return nd.Wait(uint64(ticket), time.Duration(slice), flags&C.FS_NOSPIN == 0)
	})
}

//export fs_waits_for
func fs_waits_for(h C.fs_node, ticket C.fs_ticket, out *C.fs_pending) C.int {
	return on(h, func(nd *node.Node) error {
		p, err := nd.Waits(uint64(ticket))
		if err != nil {
			return err
		}
		*out = C.fs_pending{server: C.int32_t(p.Rank), key: C.uint64_t(p.Key), behind: C.fs_ticket(p.Behind)}
		if p.Sent {
			out.sent = 1
		}
		return nil
	})
}

//export fs_get_batch
func fs_get_batch(h C.fs_node, channel C.fs_channel, least C.uint32_t, buf *C.uint64_t, room C.size_t, need *C.size_t, slice C.int64_t, flags C.uint32_t) C.int {
	return on(h, func(nd *node.Node) error {
		return take(buf, room, need, func(s *sink) error {
			limit, spin := time.Duration(slice), flags&C.FS_NOSPIN == 0
			switch {
			case flags&C.FS_UNICASTS != 0 && (channel != 0 || least != 0):
				return fmt.Errorf("engine: %w: fs_get_batch: channel is %d and least %d, want 0 with FS_UNICASTS", syscall.EINVAL, channel, least)
			case flags&C.FS_UNICASTS != 0:
				return nd.TakeUnicasts(s, limit, spin)
			case channel != 0:
				return nd.TakeOn(uint64(channel), s, limit, spin)
			}
			return nd.GetBatch(s, int(least), limit, spin)
		})
	})
}

//export fs_worker_of
func fs_worker_of(h C.fs_node, handler C.uint64_t, rank *C.int32_t) C.int {
	return on(h, func(nd *node.Node) error {
		r, err := nd.WorkerOf(uint64(handler))
		*rank = C.int32_t(r)
		return err
	})
}

//export fs_pull_keys
func fs_pull_keys(h C.fs_node, handler C.uint64_t, keys *C.uint64_t, room C.size_t, need *C.size_t) C.int {
	return on(h, func(nd *node.Node) error {
		n, err := nd.PullKeys(uint64(handler), array[uint64](keys, room))
		*need = C.size_t(n)
		if err == nil && C.size_t(n) > room {
			return syscall.ENOBUFS
		}
		return err
	})
}

//export fs_losses
func fs_losses(h C.fs_node, rank C.int32_t, losses *C.uint32_t) C.int {
	return on(h, func(nd *node.Node) error {
		n, err := nd.Losses(int32(rank))
		*losses = C.uint32_t(n)
		return err
	})
}

//export fs_buffer_release
func fs_buffer_release(id, times C.uint64_t) C.int {
	return call(func() error { return buffers.Release(uint64(id), uint64(times)) })
}

//export fs_shared_alloc
func fs_shared_alloc(bytes C.uint64_t, out *C.fs_shared, address *C.uint64_t) C.int {
	return call(func() error {
		s, err := mem.NewShared(uint64(bytes))
		if err == nil {
			*out, *address = C.fs_shared(s.ID()), C.uint64_t(s.Region().Addr)
		}
		return err
	})
}

//export fs_shared_free
func fs_shared_free(id C.fs_shared) C.int {
	return call(func() error { return mem.FreeShared(uint64(id)) })
}

//export fs_respond
func fs_respond(h C.fs_node, stream, handlers *C.uint64_t, counts *C.size_t, nh C.size_t, t *C.fs_tensor, tickets *C.fs_ticket, answered *C.size_t) (rc C.int) {
	defer guard(&rc, h)
	*answered = 0
	return on(h, func(nd *node.Node) error { return respond(nd, stream, handlers, counts, nh, t, tickets, answered) })
}

//export fs_fail
func fs_fail(h C.fs_node, handler C.uint64_t, text *C.char, bytes C.size_t) C.int {
	return on(h, func(nd *node.Node) error { return nd.Fail(uint64(handler), goText(text, bytes)) })
}

//export fs_register_recv
func fs_register_recv(h C.fs_node, t *C.fs_tensor, ranks *C.int32_t, keys *C.uint64_t, n C.size_t) C.int {
	return on(h, func(nd *node.Node) error {
		return nd.RegisterRecv(tensor(t), array[int32](ranks, n), array[uint64](keys, n))
	})
}

//export fs_barrier
func fs_barrier(h C.fs_node, flags C.uint32_t, timeout C.int64_t, token *C.uint64_t, slice C.int64_t) C.int {
	return on(h, func(nd *node.Node) error {
		if *token == 0 {
			id, err := nd.Barrier(uint32(flags), time.Duration(timeout))
			if err != nil {
				return err
			}
			*token = C.uint64_t(id)
		}
		return nd.WaitBarrier(uint64(*token), time.Duration(slice))
	})
}

//export fs_barrier_drop
func fs_barrier_drop(h C.fs_node, token C.uint64_t) C.int {
	return on(h, func(nd *node.Node) error {
		nd.DropBarrier(uint64(token))
		return nil
	})
}

//export fs_trace
func fs_trace(h C.fs_node, ticket C.fs_ticket, out *C.int64_t) C.int {
	return on(h, func(nd *node.Node) error {
		s, err := nd.Stamps(uint64(ticket))
		if err == nil {
			copy(array[int64](out, node.NumStamps), s[:])
		}
		return err
	})
}

//export fs_forget
func fs_forget(h C.fs_node, alloc C.uint64_t) C.int {
	return on(h, func(nd *node.Node) error {
		nd.Forget(uint64(alloc))
		return nil
	})
}

//export fs_describe
func fs_describe(h C.fs_node, buf *C.char, room C.size_t, need *C.size_t) C.int {
	return on(h, func(nd *node.Node) error { return space{buf, room, need}.put(nd.Describe()) })
}

//export fs_stop
func fs_stop(h C.fs_node, slice C.int64_t) C.int {
	return on(h, func(nd *node.Node) error { return nd.Stop(time.Duration(slice)) })
}

//export fs_close
func fs_close(h C.fs_node) C.int {
	return on(h, func(nd *node.Node) error { return nd.Close() })
}

//export fs_free
func fs_free(h C.fs_node) C.int {
	return on(h, func(nd *node.Node) error {
		n := nodes.drop(h)
		if n == nil {
			return errHandle(h)
		}
		_ = nd.Close() // which ends the other calls; Free says why it failed
		n.alone()
		return nd.Free()
	})
}

//export fs_live
func fs_live(n, b, goroutines *C.int64_t) (rc C.int) {
	defer guard(&rc, 0)
	*n, *b, *goroutines = C.int64_t(len(nodes.all())), C.int64_t(buffers.Len()), C.int64_t(runtime.NumGoroutine())
	return 0
}

//export fs_heap
func fs_heap(bytes, own *C.int64_t) (rc C.int) {
	defer guard(&rc, 0)
	all, asked := heap()
	*bytes, *own = C.int64_t(all), C.int64_t(asked)
	return 0
}

//export fs_settings
func fs_settings(settings **C.char, n C.size_t, buf *C.char, room C.size_t, need *C.size_t) C.int {
	return call(func() error {
		return space{buf, room, need}.put(node.DescribeSettings(goStrings(settings, n)), nil)
	})
}

// call runs an export that needs no node. It keeps the error of f for fs_errmsg and gives its code.
func call(f func() error) (rc C.int) {
	defer guard(&rc, 0)
	return fail(f())
}

// on is call for an export that needs the node of a handle.
func on(h C.fs_node, f func(*node.Node) error) (rc C.int) {
	defer guard(&rc, h)
	n := nodes.all()[h]
	if n == nil {
		return fail(errHandle(h))
	}
	n.calls.Add(1)
	defer n.calls.Add(-1)
	if n.gone.Load() {
		return fail(errHandle(h))
	}
	return fail(f(n.Node))
}

// guard turns a panic into an error, and closes the node that it was a call of: no
// fault of the engine ends the process. It is to be deferred; h is 0 where there is no
// node.
func guard(rc *C.int, h C.fs_node) {
	if p := recover(); p != nil {
		if nd := nodes.all()[h]; nd != nil {
			*rc = fail(nd.Panicked(p))
		} else {
			*rc = fail(node.Caught(p))
		}
	}
}

// table has the open nodes by handle. A handle is never used twice. Looking one up takes no lock,
// because every call does: a change makes a new map.
type table struct {
	mu   sync.Mutex
	last C.fs_node
	open atomic.Pointer[map[C.fs_node]*entry]
}

// entry is an open node, and how many calls of it are under way.
type entry struct {
	*node.Node
	calls atomic.Int64
	gone  atomic.Bool // no further call begins
}

// alone waits until the call that asks is the only one.
func (n *entry) alone() {
	for n.gone.Store(true); n.calls.Load() > 1; {
		time.Sleep(100 * time.Microsecond)
	}
}

var nodes table

func (tb *table) all() map[C.fs_node]*entry {
	if open := tb.open.Load(); open != nil {
		return *open
	}
	return nil
}

func (tb *table) add(n *node.Node) C.fs_node {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	tb.last++
	open := maps.Clone(tb.all())
	if open == nil {
		open = map[C.fs_node]*entry{}
	}
	open[tb.last] = &entry{Node: n}
	tb.open.Store(&open)
	return tb.last
}

// drop takes a node out and returns it, or nil if it is not there.
func (tb *table) drop(h C.fs_node) *entry {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	open := maps.Clone(tb.all())
	n := open[h]
	delete(open, h)
	tb.open.Store(&open)
	return n
}
