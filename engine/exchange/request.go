package exchange

import (
	"fmt"
	"sync"
	"sync/atomic"

	"fserver/engine/mem"
	"fserver/engine/wire"
)

// Received is a pushed tensor as the application sees it: a view of the
// receive buffer, valid until the key's next push is accepted; or of the
// worker's own memory, which must not be written to, valid until the answer.
type Received struct {
	Key    uint64
	Slot   uint64 // numbers (worker, key) from 0
	Buffer uint64 // the receive buffer, 0 for the application's own memory
	Lent   bool   // Buffer is the worker's memory, and of this request alone
	Span   mem.Span
	Dev    mem.Device
	DType  uint8
	NDim   int
	Rows   int64
	Tail   []int64
}

// Request is one push-pull at the server.
type Request struct {
	handler uint64 // generation above, place in the list of requests below
	state   atomic.Uint32
	client  *client
	life    uint32 // of the client
	lost    error  // why nobody can be answered; valid when lost
	refusal string // why the server cannot take it; empty: it can
	channel string // whose Take gives it; empty: a batch does
	seq     uint64
	push    []Received
	keys    []*receiver // of push
	awaits  bool        // it is counted in keys
	pull    []answer
	stamps  [4]int64
}

// answer is where a pull tensor of a request is to be written.
type answer struct {
	key   uint64
	bytes uint64
	dtype uint8
	target
}

// The life of a request. The owner moves it up to delivered; from there on a
// caller may take it by moving it to responding, and the owner frees it. One
// whose worker is gone becomes lost, and is freed by whoever asks for it, or with its channel.
const (
	reqFree = iota
	reqReady
	reqDelivered
	reqResponding
	reqLost
)

// handlerPlace is the number of bits of a handler that name the place.
const handlerPlace = 24

// Handler is the number under which the request is answered.
func (r *Request) Handler() uint64 { return r.handler }

// Rank is the worker that asks.
func (r *Request) Rank() int32 { return r.client.rank }

// Push gives the tensors of the request; valid until it is answered.
func (r *Request) Push() []Received { return r.push }

// Pulls is the number of answers that the worker expects.
func (r *Request) Pulls() int { return len(r.pull) }

// PullBytes is the size of answer i.
func (r *Request) PullBytes(i int) uint64 { return r.pull[i].bytes }

// requests is the list of all requests of a server, by place.
type requests struct {
	mu   sync.Mutex // guards the slices; never held while waiting
	all  []*Request
	free []*Request
}

func (rs *requests) get() *Request {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if n := len(rs.free); n > 0 {
		r := rs.free[n-1]
		rs.free = rs.free[:n-1]
		return r
	}
	r := &Request{handler: uint64(len(rs.all))}
	rs.all = append(rs.all, r)
	return r
}

// put frees r. The generation of its handler goes up, so that the old handler
// is not taken for the next request in this place.
func (rs *requests) put(r *Request) {
	r.state.Store(reqFree)
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r.handler += 1 << handlerPlace
	r.client = nil
	rs.free = append(rs.free, r)
}

// claim takes the delivered request of a handler to answer it with t. lost says that
// its worker is gone. With an error the request stays as it was: that is known before it
// is taken, as whoever else looks for delivered requests meanwhile must find it.
func (rs *requests) claim(handler uint64, t *Ticket) (r *Request, lost bool, err error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if r := rs.find(handler); r != nil {
		if r.state.Load() == reqDelivered { // and stays so while rs.mu is held
			if err := r.match(t); err != nil {
				return nil, false, err
			}
			r.state.Store(reqResponding)
			return r, false, nil
		}
		if r.state.CompareAndSwap(reqLost, reqResponding) {
			return r, true, nil
		}
	}
	call := "respond to"
	if t.fails {
		call = "fail"
	}
	return nil, false, Shapef("exchange: %s handler %d: no such request is waiting for an answer (each handler of get_batch is answered once)", call, handler)
}

// find returns the request of a handler, or nil.
func (rs *requests) find(handler uint64) *Request {
	if place := handler & (1<<handlerPlace - 1); place < uint64(len(rs.all)) && rs.all[place].handler == handler {
		return rs.all[place]
	}
	return nil
}

// ask calls f with the request of a handler, if the application has it and has not answered it, and reports whether that is so.
func (rs *requests) ask(handler uint64, f func(*Request)) bool {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r := rs.find(handler)
	if r == nil || r.state.Load() != reqDelivered && r.state.Load() != reqLost {
		return false
	}
	f(r)
	return true
}

// strand gives the requests that were delivered on a channel, and that nobody will
// answer any more.
func (rs *requests) strand(channel string) (found []*Request) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	for _, r := range rs.all {
		if r.channel == channel && (r.state.CompareAndSwap(reqDelivered, reqReady) || r.state.CompareAndSwap(reqLost, reqReady)) {
			found = append(found, r)
		}
	}
	return found
}

// giveBack ends what a request uses of its worker's memory. Whoever looks at it
// still goes on.
func (r *Request) giveBack(b *Buffers) {
	for i := range r.push {
		if r.push[i].Lent {
			_ = b.drop(r.push[i].Buffer) // our own mapping: it can be unmapped
		}
	}
	r.push = r.push[:0]
}

// lose marks the delivered requests of c, whose worker is gone.
func (rs *requests) lose(c *client, b *Buffers) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	for _, r := range rs.all {
		if r.client == c && r.state.Load() == reqDelivered {
			r.lost = c.lost
			if r.state.CompareAndSwap(reqDelivered, reqLost) {
				r.giveBack(b)
			}
		}
	}
}

// await has the request wait to be delivered, in buffers that stay as they are until then. For the owner, as served.
func (r *Request) await() {
	r.awaits = true
	r.count(1)
	r.state.Store(reqReady)
}

// served says that the request waits no longer.
func (r *Request) served() {
	if r.awaits {
		r.awaits = false
		r.count(-1)
	}
}

func (r *Request) count(by int) {
	for i := range r.push {
		if v := &r.push[i]; v.Buffer != 0 && !v.Lent {
			r.keys[i].waits += by
		}
	}
}

// match checks the tensors of an answer against what the worker expects.
func (r *Request) match(t *Ticket) error {
	if t.fails {
		return nil
	}
	if len(t.push) != len(r.pull) {
		return Shapef("exchange: respond to worker %d: %d tensors, want %d, one for each pull tensor of the request", r.client.rank, len(t.push), len(r.pull))
	}
	for i := range r.pull {
		if got, want := t.push[i].Span.Len, r.pull[i].bytes; got != want {
			return Shapef("exchange: respond to worker %d: tensor %d has %d bytes, want %d as in the pull tensor of the request", r.client.rank, i, got, want)
		}
		if got, want := t.push[i].DType, r.pull[i].dtype; got != want && got != wire.AnyType && want != wire.AnyType {
			text := fmt.Sprintf("exchange: respond to worker %d: tensor %d is of type %d, want %d as in the pull tensor of the request", r.client.rank, i, got, want)
			return &TypeError{text, got, want}
		}
	}
	return nil
}

// fill takes what a request frame says, checked against its plan and buffers.
func (r *Request) fill(c *client, p *clientPlan, q *wire.Request) error {
	if len(q.Push) != len(p.plan.Push) || len(q.Pull) != len(p.plan.Pull) {
		return fmt.Errorf("exchange: worker %d sent a request with %d pushed and %d pulled tensors, but its plan has %d and %d", c.rank, len(q.Push), len(q.Pull), len(p.plan.Push), len(p.plan.Pull))
	}
	r.channel, r.refusal = p.on, p.refusal
	r.client, r.life, r.seq = c, c.life.Load(), q.Seq
	r.push, r.keys, r.pull = r.push[:0], p.keys, r.pull[:0]
	for i := range q.Push {
		x, d, k := &q.Push[i], &p.plan.Push[i], p.keys[i]
		if r.refusal == "" {
			r.refusal = p.misfit(i, x)
		}
		v := Received{Key: d.Key, Slot: k.slot, Lent: x.Lent, Dev: mem.CPU, DType: d.DType, NDim: d.NDim, Rows: x.Rows, Tail: d.Tail}
		switch {
		case x.Lent:
			l, err := c.claim(uint32(q.Seq), x.Bytes, k)
			if err != nil {
				return err
			}
			v.Buffer, v.Span = k.buffers.lend(l.view), l.span
		case x.Bytes > k.cap:
			return fmt.Errorf("exchange: worker %d pushed %d bytes for key %d, but its buffer has %d", c.rank, x.Bytes, d.Key, k.cap)
		case x.Bytes != 0:
			v.Buffer, v.Dev, v.Span = k.id, k.region.Dev, mem.Span{Addr: k.region.Addr, Len: x.Bytes}
		}
		r.push = append(r.push, v)
	}
	if c.lent(uint32(q.Seq)) >= 0 {
		return fmt.Errorf("exchange: worker %d lent a tensor that push_pull %d does not name", c.rank, q.Seq)
	}
	for j := range q.Pull {
		t := &q.Pull[j]
		if t.Changed {
			p.targets[j] = target{transportKey(t.Region), t.Off}
		}
		r.pull = append(r.pull, answer{p.plan.Pull[j].Key, t.Bytes, p.plan.Pull[j].DType, p.targets[j]})
	}
	return nil
}

// behind makes the point of an answer. A handler that is not known is refused later.
func (s *Server) behind(handler uint64, t *Ticket) error {
	if !t.behind {
		return nil
	}
	var i int
	if !s.requests.ask(handler, func(r *Request) { i = r.client.index }) {
		return nil
	}
	return s.point(t, i, i+1)
}
