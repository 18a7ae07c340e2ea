package exchange

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"fserver/engine/mem"
	"fserver/engine/trace"
	"fserver/engine/transport"
)

// fakeFabric registers and moves nothing.
type fakeFabric struct {
	next   uint64
	keys   map[transport.Key]mem.Region
	busy   bool     // writes are under way
	freed  []uint64 // keys that are to be freed
	room   *int     // registrations that there is room for; nil: any number
	blob   string
	local  bool // it sends what is registered
	gpu    mem.Device
	points bool // it takes points
}

func newFabric() *fakeFabric { return &fakeFabric{keys: map[transport.Key]mem.Region{}} }

func (f *fakeFabric) Name() string         { return "fake" }
func (f *fakeFabric) Addr() transport.Addr { return "fake:" }
func (f *fakeFabric) Caps() transport.Caps {
	return transport.Caps{Lends: true, LocalKeys: f.local, GPU: f.gpu, Points: f.points}
}
func (f *fakeFabric) Reaches(transport.Addr) error { return nil }
func (f *fakeFabric) Register(r mem.Region) (transport.Key, error) {
	if f.room != nil {
		if *f.room == 0 {
			return transport.Key{}, errors.New("fake: no room")
		}
		*f.room--
	}
	f.next++
	k := transport.Key{ID: f.next, Token: 7 * f.next, Blob: f.blob}
	f.keys[k] = r
	return k, nil
}

func (f *fakeFabric) Deregister(k transport.Key) {
	if _, ok := f.keys[k]; ok {
		delete(f.keys, k)
		f.freed = append(f.freed, k.ID)
	}
}

// free gives what waits for the end of keys at f, which as knows, its word.
func (f *fakeFabric) free(as transport.Fabric, tb *Table) (any bool) {
	if f.busy {
		return false
	}
	list := f.freed
	f.freed = nil
	for _, id := range list {
		tb.Freed(as, id)
	}
	return len(list) > 0
}

// knows reports whether s is registered.
func (f *fakeFabric) knows(s mem.Span) bool {
	for _, r := range f.keys {
		if r.Contains(s) {
			return true
		}
	}
	return false
}

func (f *fakeFabric) Connect(context.Context, transport.Addr) (transport.Conn, error) {
	return nil, nil
}
func (f *fakeFabric) Poll([]transport.Event) (int, error)      { return 0, nil }
func (f *fakeFabric) Bind(transport.Key, transport.Conn) error { return nil }
func (f *fakeFabric) FD() int                                  { return -1 }
func (f *fakeFabric) Arm() bool                                { return false }
func (f *fakeFabric) Close() error                             { return nil }

// wireConn is one direction of a path: what is posted waits in it until the
// test lets it through.
type wireConn struct {
	room int    // operations that Post takes at once
	lend bool   // shared memory may be lent
	held uint64 // the ticket whose writes wait, as behind a stream
	ops  []transport.Op
	dead error
	of   *fakeFabric
}

func (c *wireConn) Post(ops []transport.Op) (int, error) {
	if c.dead != nil {
		return 0, c.dead
	}
	n := min(len(ops), c.room)
	for _, o := range ops[:n] {
		o.Frame = append([]byte(nil), o.Frame...)
		if o.After.Event != 0 && (o.Dev == mem.CPU || c.of == nil || !c.of.points) {
			return 0, errors.New("fake: a point where none is taken")
		}
		if o.Kind == transport.OpWrite && c.of != nil && c.of.local && !c.of.knows(o.Src[0]) {
			return 0, errors.New("fake: the source is not registered")
		}
		c.ops = append(c.ops, o)
	}
	return n, nil
}
func (c *wireConn) Lends(s mem.Span) bool { return c.lend && mem.SharedAt(s) != nil }

func (c *wireConn) Unsent() bool         { return false }
func (c *wireConn) Close()               {}
func (c *wireConn) CloseFor(error)       {}
func (c *wireConn) Peer() transport.Peer { return transport.Peer{Remote: "fake"} }

// pair is one worker and its servers without transports. Nothing moves unless
// the test says so.
type pair struct {
	t       *testing.T
	w       *Worker
	wf      *fakeFabric
	as      transport.Fabric // what the worker knows wf by; nil: wf
	servers []*Server
	sf      []*fakeFabric
	to      []*wireConn // worker to server i
	from    []*wireConn
	copies  bool // move the bytes
	buffers *Buffers
	broken  error // what a server of aside has said
}

// inline is a Host for tests that lose the peer themselves: what helpers do is done at once.
var inline = Host{Broken: func(int, error) {}, Aside: func(f func()) { f() }, Owned: func(f func()) { f() }}

// meet gives the worker its path to server i. What tests look at comes after the Regroup.
func (p *pair) meet(i int, f transport.Fabric) {
	p.w.Up(i, 10+i, f, p.to[i])
	p.to[i].ops, p.w.servers[i].untold = nil, 0
}

func newPair(t *testing.T, servers int) *pair {
	p := &pair{t: t, wf: newFabric(), copies: true, buffers: NewBuffers()}
	var err error
	p.w, err = NewWorker(servers, new(trace.Counters), inline)
	require.NoError(t, err)
	for i := range servers {
		s, err := NewServer(1, p.buffers, new(trace.Counters), inline)
		require.NoError(t, err)
		p.servers = append(p.servers, s)
		p.sf = append(p.sf, newFabric())
		p.to = append(p.to, &wireConn{room: 1000, of: p.wf})
		p.from = append(p.from, &wireConn{room: 1000, of: p.sf[i]})
		p.meet(i, p.wf)
		s.Up(0, 0, p.sf[i], p.from[i])
		t.Cleanup(func() { s.Over(); require.NoError(t, s.Close()); require.NoError(t, s.Free()) })
	}
	t.Cleanup(func() { require.NoError(t, p.w.Free()) })
	return p
}

// ended lets come what has ended: keys, and Conns of peers that were lost.
func (p *pair) ended() (any bool) {
	as := p.as
	if as == nil {
		as = p.wf
	}
	any = p.wf.free(as, p.w.Tickets())
	tables := []*Table{p.w.Tickets()}
	for i, s := range p.servers {
		any = p.sf[i].free(p.sf[i], s.Tickets()) || any
		tables = append(tables, s.Tickets())
	}
	for _, tb := range tables {
		for c := range tb.ends.closed {
			tb.Closed(c)
			any = true
		}
	}
	return any
}

// settle lets everything through until nothing moves, and returns the first
// breach of the protocol that a side reports.
func (p *pair) settle() error {
	for moved := true; moved; {
		moved = p.ended()
		p.w.Drain()
		for i, s := range p.servers {
			s.Drain()
			s.Found(trace.Now())
			p.w.Found(trace.Now())
			a, errA := deliver(p.to[i], p.sf[i], p.copies, p.w.Done, func(of uint32, x mem.Span, v *mem.View) error { return s.Lent(0, of, x, v) }, func(b []byte) error { return s.Frame(0, b) })
			b, errB := deliver(p.from[i], p.wf, p.copies, s.Done, nil, func(b []byte) error { return p.w.Frame(i, b) })
			if err := errors.Join(errA, errB); err != nil {
				return err
			}
			moved = moved || a || b
		}
		moved = p.ended() || moved
		moved = moved || p.w.Pending() || slices.ContainsFunc(p.servers, func(s *Server) bool { return s.Pending() })
	}
	return nil
}

// deliver lets through what c holds: all but the writes of a ticket that waits for a device,
// and what is behind those and does not pass them.
func deliver(c *wireConn, to *fakeFabric, copies bool, done func(uint64, error), lent func(uint32, mem.Span, *mem.View) error, frame func([]byte) error) (bool, error) {
	ops := c.ops
	c.ops = nil
	waits := false
	for i := range ops {
		o := &ops[i]
		behind := waits && o.Kind != transport.OpWrite && !o.Passes
		if behind || o.Kind == transport.OpWrite && o.User == c.held {
			waits = true
			c.ops = append(c.ops, *o)
			continue
		}
		switch o.Kind {
		case transport.OpFrame:
			if err := frame(o.Frame); err != nil {
				return true, err
			}
		case transport.OpLend:
			span, view := show(o.Src[0])
			if err := lent(o.Loan, span, view); err != nil {
				return true, err
			}
		default:
			r, ok := to.keys[o.Key]
			if !ok {
				return true, fmt.Errorf("fake: no key %v", o.Key)
			}
			if r.Idle() {
				return true, fmt.Errorf("fake: a write to key %v, which no ticket names", o.Key)
			}
			n := o.Src[0].Len
			at, err := r.Slice(o.Off, n)
			if err != nil {
				return true, err
			}
			if copies {
				copy(at.Bytes(), o.Src[0].Bytes())
			}
		}
		done(o.User, nil)
	}
	return len(ops) != len(c.ops), nil
}

// through pushes a tensor of a key and pulls another of that size, through a channel if
// it has a name.
func (p *pair) through(ch string, key, n uint64, fill byte) (uint64, Tensor) {
	tk, err := p.w.Begin()
	require.NoError(p.t, err)
	x, y := bytesOf(p.t, key, n, fill), bytesOf(p.t, key, n, 0)
	require.NoError(p.t, tk.AddPush(x))
	require.NoError(p.t, tk.AddPull(y))
	tk.Through(ch)
	id := tk.ID()
	require.NoError(p.t, p.w.Submit(tk))
	return id, y
}

func (p *pair) pushPull(push, pull []Tensor) (uint64, error) {
	p.ended()
	t, err := p.w.Begin()
	require.NoError(p.t, err)
	for _, x := range push {
		if err := t.AddPush(x); err != nil {
			p.w.Abandon(t)
			return 0, err
		}
	}
	for _, x := range pull {
		if err := t.AddPull(x); err != nil {
			p.w.Abandon(t)
			return 0, err
		}
	}
	id := t.ID()
	return id, p.w.Submit(t)
}

// take gives the requests of the next batch of server i.
func (p *pair) take(i int) []*Request {
	b, err := p.servers[i].Batch(p.servers[i].Workers())
	require.NoError(p.t, err)
	if b != nil {
		p.servers[i].Deliver()
	}
	return b
}

func (p *pair) respond(i int, r *Request, tensors ...Tensor) error {
	t, err := p.servers[i].Begin()
	require.NoError(p.t, err)
	for _, x := range tensors {
		require.NoError(p.t, t.AddPush(x))
	}
	return p.servers[i].Respond(r.Handler(), t)
}

func (p *pair) state(id uint64) int {
	p.ended()
	s, ok := p.w.State(id)
	require.True(p.t, ok)
	return s
}

// bytes is a tensor over mapped memory.
func bytesOf(t *testing.T, key uint64, n uint64, fill byte) Tensor {
	r, err := mem.Map(max(n, 1))
	require.NoError(t, err)
	t.Cleanup(func() { _ = mem.Unmap(r) })
	x := Tensor{Span: mem.Span{Addr: r.Addr, Len: n}, Dev: mem.CPU, Key: key, Base: r, Alloc: uint64(r.Addr), Dims: []int64{int64(n)}}
	if n < 1<<30 {
		for i, b := 0, x.Span.Bytes(); i < len(b); i++ {
			b[i] = fill
		}
	}
	return x
}
