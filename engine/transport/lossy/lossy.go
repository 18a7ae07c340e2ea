// Package lossy puts two things over any transport that tests of programs ask
// for: it loses frames on purpose, and it sends again what is not acknowledged.
// Writes pass as they are. A Fabric that does neither is not to be wrapped, so
// that nothing of this is on its way.
//
// Both ends must agree on Resend: with it, each frame has a header (kind, sequence
// number), and the receiver gives them to its user once and in order. What it has
// given is acknowledged once for each Poll that has found something.
package lossy

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Options say what to do. The zero value does nothing.
type Options struct {
	Drop    float64 // share of the frames that are lost, acknowledgements too
	Seed    uint64  // of what is lost
	Resend  bool
	Timeout time.Duration // without an acknowledgement, until a frame is sent again
}

// A Fabric is another one, with losses. It is a Sleeper.
type Fabric struct {
	inner transport.Fabric
	sleep transport.Sleeper
	o     Options
	epoll int
	timer int

	// mu guards the rest. It is held during Posts and Polls of inner, which do
	// not wait.
	mu     sync.Mutex
	closed bool
	rng    *rand.Rand
	conns  map[transport.Conn]*Conn // by inner's
	busy   []*Conn                  // with something to do in a Poll: see due
	told   []transport.Event        // completions of what inner has no part in
	ev     [64]transport.Event      // of inner
	at     int                      // the first of them that is not given yet
	got    int
}

// Wrap puts a Fabric over inner, which is a Sleeper. It is a Binder if inner is.
// With an error, inner is still the caller's.
func Wrap(inner transport.Fabric, o Options) (transport.Fabric, error) {
	s, ok := inner.(transport.Sleeper)
	if !ok {
		return nil, fmt.Errorf("lossy: transport %s has no descriptor to wait on", inner.Name())
	}
	f := &Fabric{inner: inner, sleep: s, o: o, rng: rand.New(rand.NewPCG(o.Seed, 0)), conns: map[transport.Conn]*Conn{}}
	var err error
	if f.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("lossy: %w", err)
	}
	if f.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		unix.Close(f.epoll)
		return nil, fmt.Errorf("lossy: %w", err)
	}
	for _, fd := range []int{s.FD(), f.timer} {
		if err = unix.EpollCtl(f.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
			f.shut()
			return nil, fmt.Errorf("lossy: %w", err)
		}
	}
	if b, ok := inner.(transport.Binder); ok {
		return binding{f, b}, nil
	}
	return f, nil
}

// binding is a Fabric over a Binder.
type binding struct {
	*Fabric
	binder transport.Binder
}

// Bind implements transport.Binder.
func (f binding) Bind(k transport.Key, conn transport.Conn) error {
	c, ok := conn.(*Conn)
	if !ok {
		return fmt.Errorf("lossy: bind key %d: the connection belongs to another transport", k.ID)
	}
	return f.binder.Bind(k, c.inner)
}

func (f *Fabric) shut() {
	unix.Close(f.timer)
	unix.Close(f.epoll)
}

// Name is inner's, and so is what follows.
func (f *Fabric) Name() string                                 { return f.inner.Name() }
func (f *Fabric) Addr() transport.Addr                         { return f.inner.Addr() }
func (f *Fabric) Reaches(peer transport.Addr) bool             { return f.inner.Reaches(peer) }
func (f *Fabric) Beyond(peer transport.Addr) string            { return transport.Beyond(f.inner, peer) }
func (f *Fabric) Register(r mem.Region) (transport.Key, error) { return f.inner.Register(r) }
func (f *Fabric) Deregister(k transport.Key) error             { return f.inner.Deregister(k) }

// Connect implements transport.Fabric.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	in, err := f.inner.Connect(ctx, peer)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conn(in), nil
}

// conn is the Conn over one of inner, whose events may come before Connect returns.
func (f *Fabric) conn(in transport.Conn) *Conn {
	c := f.conns[in]
	if c == nil {
		c = &Conn{f: f, inner: in, users: make([]uint64, 1)}
		if f.o.Resend {
			c.out, c.in = make([]sent, window), make([]received, window)
		}
		f.conns[in] = c
	}
	return c
}

// FD is an epoll descriptor over inner's and a timer.
func (f *Fabric) FD() int {
	f.sleep.FD()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.epoll
	}
	var at unix.ItimerSpec
	if len(f.told) != 0 || f.at < f.got {
		at.Value.Nsec = 1
	} else if wait, ok := f.wait(); ok {
		at.Value = unix.NsecToTimespec(int64(max(wait, 1)))
	}
	_ = unix.TimerfdSettime(f.timer, 0, &at, nil)
	return f.epoll
}

// wait is how long a sleeping user may stay so.
func (f *Fabric) wait() (d time.Duration, ok bool) {
	now := time.Now()
	for _, c := range f.busy {
		switch {
		case c.ready() || c.ended():
			return 0, true
		case c.first != c.next && !c.out[c.first%window].at.IsZero():
			s := &c.out[c.first%window]
			if left := s.at.Add(s.wait).Sub(now); !ok || left < d {
				d, ok = left, true
			}
		}
	}
	return d, ok
}

// Poll implements transport.Fabric. It asks inner for many events at a time, and
// gives what there is no room for in the next Polls, before it asks again.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := poll{ev: ev}
	p.n = copy(ev, f.told)
	f.told = f.told[:copy(f.told, f.told[p.n:])]
	for _, c := range f.busy {
		c.deliver(&p)
	}
	var err error
	// What inner gives may be nothing to the user, with more behind it. After Close, whoever
	// polls stops at the first Poll that gives nothing.
	for round := 0; round < maxRounds || f.closed; round++ {
		if f.at == f.got {
			f.at = 0
			f.got, err = f.inner.Poll(f.ev[:])
		}
		for f.at < f.got && p.room() {
			f.event(&f.ev[f.at], &p)
			f.at++
		}
		if p.n != 0 || f.got < len(f.ev) || !p.room() {
			break
		}
	}
	f.service(&p)
	if p.n != 0 || f.at < f.got || len(f.told) != 0 {
		err = nil // it comes again
	}
	return p.n, err
}

// maxRounds bounds the Polls of inner in one Poll, so that peers cannot keep us in it.
const maxRounds = 64

// poll is what one Poll has found.
type poll struct {
	ev []transport.Event
	n  int
}

func (p *poll) room() bool { return p.n < len(p.ev) }

func (p *poll) put(e transport.Event) {
	p.ev[p.n] = e
	p.n++
}

// event takes one event of inner, for which p has room.
func (f *Fabric) event(e *transport.Event, p *poll) {
	c := f.conn(e.Conn)
	out := *e
	out.Conn = c
	if e.Kind == transport.EvDone {
		c.open--
		user, ours := c.release(e.User)
		if !ours {
			out.User = user
			p.put(out)
		}
		return
	}
	if c.down || c.broken { // its user has closed it since inner was asked, or we have
		dropLoan(e)
		return
	}
	switch e.Kind {
	case transport.EvFrame:
		if f.o.Resend {
			if err := c.receive(e.Data, p); err != nil {
				c.fail(err)
			}
			c.deliver(p)
			return
		}
	case transport.EvDown:
		c.end(e.Err) // after the frames that are here
		return
	}
	p.put(out)
}

// service sends what is due on all Conns.
func (f *Fabric) service(p *poll) {
	kept := f.busy[:0]
	for _, c := range f.busy {
		c.deliver(p)
		c.send()
		if c.gone() {
			delete(f.conns, c.inner)
			continue
		}
		if c.listed = c.due(); c.listed {
			kept = append(kept, c)
		}
	}
	clear(f.busy[len(kept):])
	f.busy = kept
}

// lose says whether the next frame is lost.
func (f *Fabric) lose() bool { return f.o.Drop > 0 && f.rng.Float64() < f.o.Drop }

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	err := f.inner.Close()
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.closed = true
		f.shut()
	}
	for _, c := range f.conns {
		c.stop()
	}
	for i := f.at; i < f.got; i++ { // nobody need poll any more
		dropLoan(&f.ev[i])
	}
	return err
}

// dropLoan drops the loan that an event brings, if it does: nobody is handed it.
func dropLoan(e *transport.Event) {
	if e.Kind == transport.EvLent && e.View != nil {
		_ = e.View.Drop() // our own mapping
		e.View = nil
	}
}

var errKind = errors.New("lossy: the peer sent a frame without a valid header (PS_RESEND must be the same on all nodes)")
