package node

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"fserver/engine/exchange"
	"fserver/engine/mem"
	"fserver/engine/trace"
)

// What callers hold of the layer below.
type (
	Tensor  = exchange.Tensor
	Ticket  = exchange.Ticket
	Request = exchange.Request
	Buffers = exchange.Buffers
)

// NewBuffers makes the set of receive buffers of a process.
func NewBuffers() *Buffers { return exchange.NewBuffers() }

// NumStamps is the number of time stamps of a ticket.
const NumStamps = trace.NumStamps

// Now is the clock of the stamps, CLOCK_MONOTONIC in nanoseconds.
func Now() int64 { return trace.Now() }

// ready gives the error of a call that needs a running node of a role.
func (n *Node) ready(is bool, call, role string) error {
	if !is {
		return badSetting("node: %s on a %v: only a %s does that", call, n.cfg.Role, role)
	}
	if err := n.failed(); err != nil {
		return err
	}
	switch n.phase.Load() {
	case joining:
		return badSetting("node: %s before the cluster is complete (wait for init)", call)
	case running:
		return nil
	}
	return ErrClosed
}

// BeginPushPull issues the ticket of a push-pull. It ends in PushPull or
// Abandon.
func (n *Node) BeginPushPull() (*Ticket, error) {
	if err := n.ready(n.worker != nil, "push_pull", "worker"); err != nil {
		return nil, err
	}
	return n.worker.Begin()
}

// BeginAnswer issues the ticket of an answer. It ends in Respond or Abandon.
//
// An application that answers many requests in a row makes no call that drives
// in between, so this one does when as many answers are under way as may be.
func (n *Node) BeginAnswer() (*Ticket, error) { return n.beginAnswer("respond") }

func (n *Node) beginAnswer(call string) (*Ticket, error) {
	if err := n.ready(n.server != nil, call, "server"); err != nil {
		return nil, err
	}
	t, err := n.server.Begin()
	if err != exchange.ErrFull {
		return t, err
	}
	n.driver.Spin(func() bool {
		t, err = n.server.Begin()
		return err != exchange.ErrFull
	}, answerRoom)
	return t, err
}

// answerRoom is how long BeginAnswer waits for an answer to have left.
const answerRoom = time.Second

// Abandon gives back a ticket that was not handed on.
func (n *Node) Abandon(t *Ticket) { n.table.Abandon(t) }

// PushPull starts the push-pull of t. It registers memory that is new, which may take
// milliseconds. With an error t is gone.
func (n *Node) PushPull(t *Ticket) error {
	n.driver.Enter() // Close waits for this
	defer n.driver.Leave()
	if err := n.worker.Submit(t); err != nil {
		return cmp.Or(n.failed(), closedError(err))
	}
	n.driver.Submit()
	return nil
}

// PushPullTo is PushPull with one server alone, from 0 in the order of the groups. At the server
// TakeUnicasts gives the request.
func (n *Node) PushPullTo(server int, t *Ticket) error {
	t.To(server)
	return n.PushPull(t)
}

// Respond answers the request of a handler with t. Flush after the last one.
// With an error t is gone.
func (n *Node) Respond(handler uint64, t *Ticket) error {
	return n.server.Respond(handler, t)
}

// Fail ends the request of a handler at its worker, with an error that has text.
func (n *Node) Fail(handler uint64, text string) error {
	t, err := n.beginAnswer("fail")
	if err != nil {
		return err
	}
	if err := n.server.Fail(handler, t, strings.Join(strings.Fields(text), " ")); err != nil {
		return err
	}
	n.driver.Submit()
	return nil
}

// Flush posts what Respond was given.
func (n *Node) Flush() { n.driver.Submit() }

// After has the tensors that t pushes, or answers with, sent when what is queued so
// far on a stream of the node's GPU has run. Between Begin and PushPull or Respond.
func (n *Node) After(t *Ticket, stream uint64) error {
	if n.gpu == nil {
		return badSetting("node: an operation behind a stream: this node has no GPU (STEPMESH_BACKEND)")
	}
	t.After(stream)
	return nil
}

// takes refuses tensors on a device, with an error for the end of a sentence.
func (n *Node) takes(d mem.Device) error {
	switch own := n.gpu.device(); {
	case d == mem.CPU || d == own:
		return nil
	case n.gpu == nil:
		return badSetting("is on %v, and this node takes CPU tensors only: pass .cpu(), or set STEPMESH_BACKEND=GPU where there is one", d)
	default:
		return badSetting("is on %v, and this node takes tensors on %v and on the CPU: move it there, or set STEPMESH_GPU", d, own)
	}
}

// Wait waits until a ticket is done or failed, at most limit; then ErrAgain.
func (n *Node) Wait(id uint64, limit time.Duration, spin bool) error {
	tb := n.table
	if n.scheduler != nil {
		return badSetting("node: wait on a %v, which has no push_pulls", n.cfg.Role)
	}
	open := func() bool {
		state, ok := tb.State(id)
		return ok && state == exchange.StateOpen
	}
	if !n.driver.Await(func() bool { return !open() || n.driver.Stopped() }, limit, spin) {
		return ErrAgain
	}
	if open() {
		return n.failed() // submitted while the node was being closed
	}
	return tb.Result(id)
}

// Waits returns what a push_pull that is under way waits for.
func (n *Node) Waits(id uint64) (exchange.Pending, error) {
	if n.worker == nil {
		return exchange.Pending{}, badSetting("node: a %v has no push_pulls that wait for an answer", n.cfg.Role)
	}
	if !n.driver.Own() {
		return exchange.Pending{}, ErrClosed
	}
	defer n.driver.Disown()
	n.side.Drain() // it may have just been submitted
	return n.worker.Waits(id)
}

// WorkerOf is the rank of the worker whose request has a handler.
func (n *Node) WorkerOf(handler uint64) (int32, error) {
	if err := n.ready(n.server != nil, "worker_of", "server"); err != nil {
		return 0, err
	}
	return n.server.WorkerOf(handler)
}

// PullKeys copies the keys of the pull tensors of the request with a handler to keys, as many as fit, and gives their
// number.
func (n *Node) PullKeys(handler uint64, keys []uint64) (int, error) {
	if err := n.ready(n.server != nil, "pull_keys", "server"); err != nil {
		return 0, err
	}
	return n.server.PullKeys(handler, keys)
}

// Losses is how often the worker with a rank was lost.
func (n *Node) Losses(rank int32) (uint32, error) {
	if err := n.ready(n.server != nil, "losses", "server"); err != nil {
		return 0, err
	}
	return n.server.Losses(rank)
}

// BatchSink takes a batch of requests. With an error the batch stays.
type BatchSink interface {
	Batch(reqs []*Request) error
}

// GetBatch gives the next batch to s: one request of each worker group that has one, when there
// are at least so many; of all with 0. It waits for at most limit; then ErrAgain.
func (n *Node) GetBatch(s BatchSink, least int, limit time.Duration, spin bool) error {
	if err := n.ready(n.server != nil, "get_batch", "server"); err != nil {
		return err
	}
	all := n.server.Workers()
	if least < 0 || least > all {
		return exchange.Shapef("node: get_batch: at_least is %d, want 1 to %d, the number of worker groups", least, all)
	}
	if least == 0 {
		least = all
	}
	ready := func() bool { return n.server.Ready(least) || n.failure.Load() != nil }
	return n.takeWhen(ready, func() ([]*Request, error) { return n.server.Batch(least) }, s, limit, spin)
}

// TakeUnicasts gives one request of each worker that has sent one to this server alone to s, when there is
// any. It waits for at most limit; then ErrAgain.
func (n *Node) TakeUnicasts(s BatchSink, limit time.Duration, spin bool) error {
	if err := n.ready(n.server != nil, "get_batch", "server"); err != nil {
		return err
	}
	ready := func() bool { return n.server.HasUnicasts() || n.failure.Load() != nil }
	return n.takeWhen(ready, n.server.Unicasts, s, limit, spin)
}

// takeWhen gives the requests that next gives to s, when ready says that there are any.
func (n *Node) takeWhen(ready func() bool, next func() ([]*Request, error), s BatchSink, limit time.Duration, spin bool) error {
	for end := int64(0); ; {
		if !n.driver.Await(ready, limit, spin) {
			return ErrAgain
		}
		if err := n.failed(); err != nil {
			return err
		}
		if taken, err := n.take(s, next); taken || err != nil {
			return err
		}
		// Another thread was faster. The limit counts from here.
		if end == 0 {
			end = trace.Now() + int64(min(limit, forever))
		}
		limit = time.Duration(end - trace.Now())
	}
}

// take gives the requests that next gives to s.
func (n *Node) take(s BatchSink, next func() ([]*Request, error)) (taken bool, err error) {
	if !n.driver.Own() {
		return false, n.failed()
	}
	defer n.driver.Submit()
	defer n.driver.GiveBack()
	reqs, err := next()
	if reqs == nil || err != nil {
		return false, err
	}
	if err = s.Batch(reqs); err != nil {
		return false, err
	}
	n.server.Deliver()
	return true, nil
}

// RegisterRecv cuts t into len(keys) equal slices; slice i receives keys[i] of
// worker ranks[i]. The memory must stay valid until Close. It may be called
// before the cluster is complete, which it can be at any time from then on: only
// what is registered before a barrier of all nodes is sure to be so before a push.
func (n *Node) RegisterRecv(t Tensor, ranks []int32, keys []uint64) error {
	if n.server == nil || n.phase.Load() != joining {
		if err := n.ready(n.server != nil, "register_recv_buffer", "server"); err != nil {
			return err
		}
	}
	if err := n.takes(t.Dev); err != nil {
		return fmt.Errorf("node: register_recv_buffer: the tensor %w", err)
	}
	k := uint64(len(keys))
	if k == 0 || len(ranks) != len(keys) || t.Span.Len%k != 0 || t.Span.Len == 0 {
		return exchange.Shapef("node: register_recv_buffer: %d bytes for %d worker ranks and %d keys (give as many ranks as keys, and a tensor that can be cut into so many equal slices)", t.Span.Len, len(ranks), k)
	}
	each := t.Span.Len / k
	all := make([]exchange.Own, k)
	for i := range all {
		r := mem.Region{Addr: t.Span.Addr + uintptr(uint64(i)*each), Len: each, Dev: t.Dev}
		all[i] = exchange.Own{Rank: ranks[i], Key: keys[i], Region: r}
	}
	return n.server.Fix(all)
}

// Stamps are the time stamps of a ticket that has ended.
func (n *Node) Stamps(id uint64) (trace.Stamps, error) {
	if n.worker == nil {
		return trace.Stamps{}, badSetting("node: fetch_trace on a %v: the traces are the worker's", n.cfg.Role)
	}
	return n.worker.Stamps(id)
}

// Forget drops what is cached for an allocation that is gone.
func (n *Node) Forget(alloc uint64) {
	if n.failed() == nil {
		n.table.Forget(alloc)
	}
}
