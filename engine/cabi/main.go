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
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"fserver/engine/conf"
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
	buffers.Hold(goBytes(bytes, n))
	return 0
}

//export fs_open
func fs_open(settings **C.char, n C.size_t, out *C.fs_node) (rc C.int) {
	defer guard(&rc, 0)
	nd, err := node.Open(goStrings(settings, n), buffers)
	if err != nil {
		return fail(err)
	}
	id, err := nodes.add(nd)
	if err != nil {
		_ = nd.Free()
		return fail(err)
	}
	*out = C.fs_node(id)
	return 0
}

//export fs_wait_ready
func fs_wait_ready(h C.fs_node, slice C.int64_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.WaitReady(time.Duration(slice)))
}

//export fs_get_info
func fs_get_info(h C.fs_node, out *C.fs_info) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	fillInfo(out, nd.Info())
	return 0
}

//export fs_push_pull
func fs_push_pull(h C.fs_node, push *C.fs_tensor, np C.size_t, pull *C.fs_tensor, nq C.size_t, out *C.fs_ticket) (rc C.int) {
	defer guard(&rc, h)
	return fail(pushPull(h, nil, push, np, pull, nq, out))
}

//export fs_push_pull_on
func fs_push_pull_on(h C.fs_node, stream C.uint64_t, push *C.fs_tensor, np C.size_t, pull *C.fs_tensor, nq C.size_t, out *C.fs_ticket) (rc C.int) {
	defer guard(&rc, h)
	return fail(pushPull(h, &stream, push, np, pull, nq, out))
}

func pushPull(h C.fs_node, stream *C.uint64_t, push *C.fs_tensor, np C.size_t, pull *C.fs_tensor, nq C.size_t, out *C.fs_ticket) error {
	nd, err := nodes.get(h)
	if err != nil {
		return err
	}
	t, err := nd.BeginPushPull()
	if err != nil {
		return err
	}
	if err = addTensors(t, push, np, pull, nq); err == nil && stream != nil {
		err = nd.After(t, uint64(*stream))
	}
	if err != nil {
		nd.Abandon(t)
		return err
	}
	id := t.ID()
	if err := nd.PushPull(t); err != nil {
		return err
	}
	*out = C.fs_ticket(id)
	return nil
}

//export fs_wait
func fs_wait(h C.fs_node, ticket C.fs_ticket, slice C.int64_t, flags C.uint32_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.Wait(uint64(ticket), time.Duration(slice), flags&C.FS_NOSPIN == 0))
}

//export fs_waits_for
func fs_waits_for(h C.fs_node, ticket C.fs_ticket, out *C.fs_pending) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	p, err := nd.Waits(uint64(ticket))
	if err != nil {
		return fail(err)
	}
	*out = C.fs_pending{
		state: C.int32_t(p.State), server: C.int32_t(p.Rank), key: C.uint64_t(p.Key),
		head: C.fs_ticket(p.Head), holder: C.fs_ticket(p.Holder),
	}
	return 0
}

//export fs_get_batch
func fs_get_batch(h C.fs_node, least C.uint32_t, buf *C.uint64_t, room C.size_t, need *C.size_t, slice C.int64_t, flags C.uint32_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	s := sinks.Get().(*sink)
	defer sinks.Put(s)
	s.buf, s.need = words(buf, room), 0
	err = nd.GetBatch(s, int(least), time.Duration(slice), flags&C.FS_NOSPIN == 0)
	*need = C.size_t(s.need)
	return fail(err)
}

//export fs_worker_of
func fs_worker_of(h C.fs_node, handler C.uint64_t, rank *C.int32_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	r, err := nd.WorkerOf(uint64(handler))
	*rank = C.int32_t(r)
	return fail(err)
}

//export fs_buffer_release
func fs_buffer_release(id C.uint64_t) (rc C.int) {
	defer guard(&rc, 0)
	return fail(buffers.Release(uint64(id)))
}

//export fs_shared_alloc
func fs_shared_alloc(bytes C.uint64_t, out *C.fs_shared, address *C.uint64_t) (rc C.int) {
	defer guard(&rc, 0)
	s, err := mem.NewShared(uint64(bytes))
	if err != nil {
		return fail(err)
	}
	*out, *address = C.fs_shared(s.ID()), C.uint64_t(s.Region().Addr)
	return 0
}

//export fs_shared_free
func fs_shared_free(id C.fs_shared) (rc C.int) {
	defer guard(&rc, 0)
	return fail(mem.FreeShared(uint64(id)))
}

//export fs_respond
func fs_respond(h C.fs_node, handlers *C.uint64_t, counts *C.size_t, nh C.size_t, t *C.fs_tensor, tickets *C.fs_ticket, answered *C.size_t) (rc C.int) {
	defer guard(&rc, h)
	return fail(respondAll(h, nil, handlers, counts, nh, t, tickets, answered))
}

//export fs_respond_on
func fs_respond_on(h C.fs_node, stream C.uint64_t, handlers *C.uint64_t, counts *C.size_t, nh C.size_t, t *C.fs_tensor, tickets *C.fs_ticket, answered *C.size_t) (rc C.int) {
	defer guard(&rc, h)
	return fail(respondAll(h, &stream, handlers, counts, nh, t, tickets, answered))
}

func respondAll(h C.fs_node, stream *C.uint64_t, handlers *C.uint64_t, counts *C.size_t, nh C.size_t, t *C.fs_tensor, tickets *C.fs_ticket, answered *C.size_t) error {
	*answered = 0
	nd, err := nodes.get(h)
	if err != nil {
		return err
	}
	err = respond(nd, stream, words(handlers, nh), sizes(counts, nh), t, ticketsOf(tickets, nh), answered)
	nd.Flush()
	return err
}

//export fs_fail
func fs_fail(h C.fs_node, handler C.uint64_t, text *C.char, bytes C.size_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.Fail(uint64(handler), goText(text, bytes)))
}

//export fs_register_recv
func fs_register_recv(h C.fs_node, t *C.fs_tensor, ranks *C.int32_t, keys *C.uint64_t, n C.size_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.RegisterRecv(tensor(t), int32s(ranks, n), words(keys, n)))
}

//export fs_barrier
func fs_barrier(h C.fs_node, flags C.uint32_t, timeout C.int64_t, token *C.uint64_t, slice C.int64_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	if *token == 0 {
		id, err := nd.Barrier(node.BarrierOf(
			flags&C.FS_BARRIER_SERVERS != 0, flags&C.FS_BARRIER_WORKERS != 0, flags&C.FS_BARRIER_GROUPS != 0,
		), time.Duration(timeout))
		if err != nil {
			return fail(err)
		}
		*token = C.uint64_t(id)
	}
	return fail(nd.WaitBarrier(uint64(*token), time.Duration(slice)))
}

//export fs_barrier_drop
func fs_barrier_drop(h C.fs_node, token C.uint64_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	nd.DropBarrier(uint64(token))
	return 0
}

//export fs_trace
func fs_trace(h C.fs_node, ticket C.fs_ticket, out *C.int64_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	s, err := nd.Stamps(uint64(ticket))
	if err != nil {
		return fail(err)
	}
	copy(int64s(out, node.NumStamps), s[:])
	return 0
}

//export fs_forget
func fs_forget(h C.fs_node, alloc C.uint64_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	nd.Forget(uint64(alloc))
	return 0
}

//export fs_describe
func fs_describe(h C.fs_node, buf *C.char, room C.size_t, need *C.size_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	b, err := nd.Describe()
	if err != nil {
		return fail(err)
	}
	return text(b, buf, room, need)
}

//export fs_stop
func fs_stop(h C.fs_node, slice C.int64_t) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.Stop(time.Duration(slice)))
}

//export fs_close
func fs_close(h C.fs_node) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.get(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.Close())
}

//export fs_free
func fs_free(h C.fs_node) (rc C.int) {
	defer guard(&rc, h)
	nd, err := nodes.take(h)
	if err != nil {
		return fail(err)
	}
	return fail(nd.Free())
}

//export fs_live
func fs_live(n, b, goroutines *C.int64_t) (rc C.int) {
	defer guard(&rc, 0)
	*n, *b, *goroutines = C.int64_t(nodes.len()), C.int64_t(buffers.Len()), C.int64_t(runtime.NumGoroutine())
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
func fs_settings(settings **C.char, n C.size_t, buf *C.char, room C.size_t, need *C.size_t) (rc C.int) {
	defer guard(&rc, 0)
	return text(conf.Describe(goStrings(settings, n)), buf, room, need)
}

// guard turns a panic into an error, and closes the node that it was a call of: no
// fault of the engine ends the process. It is to be deferred; h is 0 where there is no
// node.
func guard(rc *C.int, h C.fs_node) {
	if p := recover(); p != nil {
		*rc = fail(panicked(h, p))
	}
}

func panicked(h C.fs_node, p any) error {
	if nd, err := nodes.get(h); err == nil {
		return nd.Panicked(p)
	}
	return node.Caught(p)
}

// maxNodes is how many nodes a process can have open.
const maxNodes = 1024

// table gives nodes numbers that are never used twice: a generation above, the
// place below. Looking one up is one load, because every call does.
type table struct {
	mu    sync.Mutex
	gen   uint64
	slots [maxNodes]atomic.Pointer[entry]
}

type entry struct {
	handle uint64
	node   *node.Node
}

var nodes table

func (tb *table) add(n *node.Node) (uint64, error) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	for i := range tb.slots {
		if tb.slots[i].Load() == nil {
			tb.gen++
			h := tb.gen*maxNodes + uint64(i)
			tb.slots[i].Store(&entry{h, n})
			return h, nil
		}
	}
	return 0, fmt.Errorf("node: open: %d nodes are open in this process (close some first)", maxNodes)
}

func (tb *table) get(h C.fs_node) (*node.Node, error) {
	if e := tb.slots[h%maxNodes].Load(); e != nil && e.handle == uint64(h) {
		return e.node, nil
	}
	return nil, errHandle(h)
}

func (tb *table) take(h C.fs_node) (*node.Node, error) {
	tb.mu.Lock()
	defer tb.mu.Unlock()
	n, err := tb.get(h)
	if err == nil {
		tb.slots[h%maxNodes].Store(nil)
	}
	return n, err
}

func (tb *table) len() (count int) {
	for i := range tb.slots {
		if tb.slots[i].Load() != nil {
			count++
		}
	}
	return count
}
