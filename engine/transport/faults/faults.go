// Package faults makes any Fabric worse, within the contract of package transport.
//
// Programs' tests ask for one of its faults by settings: it loses frames on purpose, and sends them
// again if that is wanted, too. Our own tests turn on the others: with them, memory in
// one process behaves like a NIC. A Fabric for which Options are zero is not to be wrapped,
// so that nothing of this is on its way.
package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Options say what to do. The zero value does nothing.
type Options struct {
	Seed uint64 // of all that is drawn

	Drop float64 // share of the frames that are lost
	// Resend sends a lost frame again, and may lose it again; the frames and loans behind it wait. The
	// inner Fabric loses nothing, so the sender knows what was lost, and the receiver need not help.
	Resend  bool
	Timeout time.Duration // until a lost frame is sent again; it doubles each time

	LateDone int // an EvDone is held back for 0 to so many Polls, each for itself
	// LateWrite holds a write back for 0 to so many Polls. Later writes land before it; the frame
	// that follows it waits for it.
	LateWrite int
	Early     float64 // share of the small writes that end as soon as they are posted, from a copy; with LateWrite
	Starve    float64 // share of the ops that find no credit, for some Polls
	Idle      float64 // share of the Polls that do not look at what has come
	Forget    float64 // share of the Closes that lose what LateWrite holds back; the others post it first
	// SlowRegister makes Register take 0 to so long.
	SlowRegister time.Duration
}

// NIC returns every fault of a NIC at once.
func NIC(seed uint64) Options {
	return Options{Seed: seed, LateDone: 6, LateWrite: 6, Early: 0.3, Starve: 0.1, Idle: 0.3, Forget: 0.5,
		SlowRegister: time.Millisecond}
}

// A Fabric is another one, with faults.
type Fabric struct {
	link.Over
	o Options

	// mu guards the rest. It is held during Posts and Polls of the inner Fabric, which do
	// not wait.
	mu     sync.Mutex
	closed bool
	fails  error // the next op ends in it
	rng    *rand.Rand
	polls  uint64                   // so far: the clock of what is late
	conns  map[transport.Conn]*Conn // by the inner one
	list   []*Conn                  // the same, in the order in which they came
	told   []done                   // completions to give
	chores []chore                  // in the order in which they came
	ev     [64]transport.Event      // of the inner Fabric
	at     int                      // the first of them that is not given yet
	got    int
}

// done is an EvDone that is to be given in Poll number due or a later one.
type done struct {
	c    *Conn
	user uint64
	err  error
	due  uint64
}

// chore is something that is to be done in Poll number due.
type chore struct {
	due uint64
	do  func()
}

// after has something done that LateWrite delays, while the writes of peers land.
func (f *Fabric) after(do func()) {
	f.chores = append(f.chores, chore{f.later(f.o.LateWrite), do})
	f.catchUp()
	f.Wake(1) // for whoever sleeps already
}

// catchUp does what is due.
func (f *Fabric) catchUp() {
	f.chores = slices.DeleteFunc(f.chores, func(c chore) bool {
		if c.due <= f.polls {
			c.do()
		}
		return c.due <= f.polls
	})
}

// Wrap puts a Fabric over inner. With an error, inner is still the caller's.
func Wrap(inner transport.Fabric, o Options) (transport.Fabric, error) {
	f := &Fabric{Over: link.Over{Fabric: inner}, o: o, rng: rand.New(rand.NewPCG(o.Seed, 0)), conns: map[transport.Conn]*Conn{}}
	if err := f.Open(); err != nil {
		f.Shut()
		return nil, fmt.Errorf("faults: %w", err)
	}
	return f, nil
}

// Bind implements transport.Fabric.
func (f *Fabric) Bind(k transport.Key, conn transport.Conn) error {
	c, ok := conn.(*Conn)
	if !ok {
		return fmt.Errorf("faults: bind key %d: the connection belongs to another transport", k.ID)
	}
	return f.Fabric.Bind(k, c.Conn)
}

// FailNext makes the next op of any Conn end in err, and the Conn with it, as a path does that
// cannot skip an op.
func (f *Fabric) FailNext(err error) {
	f.mu.Lock()
	f.fails = err
	f.mu.Unlock()
}

// Register implements transport.Fabric.
func (f *Fabric) Register(r mem.Region) (transport.Key, error) {
	if f.o.SlowRegister > 0 {
		f.mu.Lock()
		wait := time.Duration(f.rng.Int64N(int64(f.o.SlowRegister)))
		f.mu.Unlock()
		time.Sleep(wait)
	}
	return f.Fabric.Register(r)
}

// Deregister implements transport.Fabric. With LateWrite, writes land for some Polls more.
func (f *Fabric) Deregister(k transport.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.after(func() { f.Fabric.Deregister(k) })
}

// Connect implements transport.Fabric.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	in, err := f.Fabric.Connect(ctx, peer)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.conn(in)
	if f.closed { // meanwhile
		c.leave()
	}
	return c, nil
}

// conn is the Conn over an inner one, whose events may come before Connect returns.
func (f *Fabric) conn(in transport.Conn) *Conn {
	c := f.conns[in]
	if c == nil {
		c = &Conn{f: f, OverConn: link.OverConn[owner]{Conn: in}}
		f.conns[in] = c
		f.list = append(f.list, c)
	}
	return c
}

// Arm implements transport.Fabric.
func (f *Fabric) Arm() (again bool) {
	again = f.Fabric.Arm()
	f.mu.Lock()
	defer f.mu.Unlock()
	var wait time.Duration
	for _, c := range f.list {
		again = again || c.ended() || c.late()
		for i := range c.queue {
			if h := &c.queue[i]; h.wait != 0 {
				if left := max(time.Until(h.until), 1); wait == 0 || left < wait {
					wait = left
				}
			}
		}
	}
	f.Wake(wait)
	return again || len(f.told)+len(f.chores) != 0 || f.at < f.got
}

// Poll implements transport.Fabric. It asks the inner Fabric for many events at a time, and
// gives what there is no room for in the next Polls, before it asks again.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.polls++
	f.catchUp()
	p := poll{Found: link.Found{Events: ev}}
	f.complete(&p)
	var err error
	idle := !f.closed && f.at == f.got && f.chance(f.o.Idle)
	// What the inner Fabric gives may be nothing to the user. After Close, whoever polls stops at
	// the first Poll that gives nothing.
	for more := !idle; more; more = f.closed && f.got > 0 && p.N == 0 && p.Room() {
		if f.at == f.got {
			f.at = 0
			f.got, err = f.Fabric.Poll(f.ev[:])
			p.quiet = f.got == 0
		}
		for f.at < f.got && p.Room() {
			f.event(&f.ev[f.at], &p)
			f.at++
		}
	}
	f.service(&p)
	f.complete(&p)
	if p.N != 0 || f.at < f.got || len(f.told) != 0 {
		err = nil // it comes again
	}
	return p.N, err
}

// poll is what one Poll has found.
type poll struct {
	link.Found
	quiet bool // the inner Fabric had nothing
}

// complete gives the completions that are due.
func (f *Fabric) complete(p *poll) {
	kept := f.told[:0]
	for _, d := range f.told {
		if !p.Room() || d.due > f.polls && !f.closed {
			kept = append(kept, d)
			continue
		}
		d.c.Open--
		p.Put(transport.Event{Kind: transport.EvDone, User: d.user, Conn: d.c, Err: d.err})
	}
	clear(f.told[len(kept):])
	f.told = kept
}

// event takes one event of the inner Fabric, for which p has room.
func (f *Fabric) event(e *transport.Event, p *poll) {
	if e.Kind == transport.EvFreed {
		p.Put(*e)
		return
	}
	c := f.conn(e.Conn)
	if e.Kind == transport.EvDone {
		if o, known := c.Whose(e.User); known && !o.silent {
			c.tell(o.user, e.Err)
		}
		return
	}
	if e.Kind == transport.EvClosed {
		c.left = true
		return
	}
	if c.over != nil { // its user has closed it since the inner Fabric was asked, or we have
		link.Drop(e)
		return
	}
	switch e.Kind {
	case transport.EvAccept:
		if f.closed {
			c.leave()
		}
	case transport.EvDown:
		c.end(e.Err) // after the frames that are here
		return
	}
	out := *e
	out.Conn = c
	p.Put(out)
}

// service posts what is due on all Conns, and tells of those that have ended.
func (f *Fabric) service(p *poll) {
	for _, c := range f.list {
		if c.refused != nil && p.quiet { // what ended the inner Conn would have come
			c.fail(c.refused)
		}
		c.deliver(p)
		c.flush(false)
	}
	f.list = slices.DeleteFunc(f.list, func(c *Conn) bool { return f.conns[c.Conn] != c })
}

// chance is true for a share p of its calls.
func (f *Fabric) chance(p float64) bool { return p > 0 && f.rng.Float64() < p }

// later draws the number of a Poll, at most n from now.
func (f *Fabric) later(n int) uint64 {
	if n == 0 {
		return f.polls
	}
	return f.polls + f.rng.Uint64N(uint64(n)+1)
}

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	f.mu.Lock()
	for _, c := range f.conns {
		c.leave()
	}
	f.mu.Unlock()
	err := f.Fabric.Close()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.closed = true
		f.Shut()
	}
	for _, c := range f.conns {
		c.leave() // of a Connect that has returned meanwhile
	}
	for i := f.at; i < f.got; i++ { // nobody need poll any more
		link.Drop(&f.ev[i])
	}
	return err
}
