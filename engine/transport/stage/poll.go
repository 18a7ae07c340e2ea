package stage

import (
	"time"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// pollEvery is how often a sleeping user is woken while a GPU works: it cannot
// ring.
const pollEvery = 50 * time.Microsecond

// tickPolls is after how many Polls to look at the clock, for tick.
const tickPolls = 1 << 16

// lock takes f.mu for what a Poll may have to look at.
func (f *Fabric) lock() {
	f.mu.Lock()
	f.calm.Store(false)
}

// Arm implements transport.Fabric.
func (f *Fabric) Arm() (again bool) {
	again = f.Fabric.Arm()
	f.lock()
	defer f.mu.Unlock()
	if f.calls.Dev != nil && !f.closed {
		f.slept = true
		f.Wake(f.rest())
	}
	return again || len(f.told) != 0 || f.refused
}

// rest returns when to look how far the GPU is; 0: nothing waits for it.
func (f *Fabric) rest() time.Duration {
	working := f.calls.Busy() || f.in.waiting()
	for _, c := range f.conns {
		working = working || c.due()
	}
	switch {
	case working:
		return pollEvery
	case len(f.ending) > 0:
		return 10 * time.Millisecond
	}
	return 0
}

// drive takes what calls aside have made, finds out how far the GPU is, and goes on with what
// is not of one Conn.
func (f *Fabric) drive(tick bool) {
	if !f.calls.Inside {
		f.calls.Proceed()
		if tick {
			f.tick()
		}
		f.calls.Look()
		f.land()
	}
	for _, r := range f.ending {
		f.settle(r)
	}
}

// tick looks once a second whether the device still works: no event tells of that.
func (f *Fabric) tick() {
	now := time.Now()
	if now.Sub(f.scan) < time.Second {
		return
	}
	f.scan = now
	if l := &f.in; l.word.Here != nil && l.word.Here.Load() < l.begun && l.broken == nil {
		idle, err := f.calls.Idle(l.stream)
		switch {
		case err != nil:
			l.fail(f, err)
		case idle && l.word.Here.Load() < l.begun: // the number of the last copy was not enqueued
			l.word.Here.Store(l.begun)
		}
	}
	for _, c := range f.conns {
		if !c.lane.working() {
			continue
		}
		idle, err := f.calls.Idle(c.lane.stream)
		if err != nil || idle && c.over != nil && c.lane.working() { // what is left was not enqueued
			c.lane.broken = true
			c.fail(err)
			c.wake()
		}
	}
}

// Poll implements transport.Fabric. It finds nothing while a Post is in the driver.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	if f.spins++; f.calm.Load() && f.spins%tickPolls != 0 {
		return f.pollCalm(ev)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.calls.Inside {
		return 0, nil
	}
	f.polls++
	f.drive(f.slept || f.spins%tickPolls == 0)
	f.slept, f.refused = false, false
	p := link.Found{Events: ev}
	f.tell(&p)
	for _, c := range f.busy {
		c.give(&p)
	}
	err := f.calls.Panicked
	for again := true; again; {
		got := 0
		if err == nil && p.Room() {
			got, err = f.Fabric.Poll(f.ev[:min(len(f.ev), len(ev)-p.N)])
		}
		f.take(f.ev[:got], &p)
		again = f.closed && got > 0 && p.N == 0 // all was dropped: more may come
	}
	if p.N != 0 || len(f.told) != 0 {
		err = nil // it comes again
	}
	return p.N, err
}

// tell gives the completions that wait, as far as p has room.
func (f *Fabric) tell(p *link.Found) {
	k := copy(p.Events[p.N:], f.told)
	p.N += k
	f.told = f.told[:copy(f.told, f.told[k:])]
}

// take takes events of inner, for which p has room, and gives what follows from them, as far as p
// has room. They may lie where p puts its own: none is put behind the one that it comes of.
func (f *Fabric) take(ev []transport.Event, p *link.Found) {
	for i := range ev {
		f.event(&ev[i], p)
	}
	f.tell(p)
	f.service(p)
	f.tell(p)
	f.calm.Store(len(f.busy)+len(f.told)+len(f.ending) == 0 && !f.calls.Busy() && f.calls.Panicked == nil && !f.closed)
}

// event takes one event of inner, for which p has room.
func (f *Fabric) event(e *transport.Event, p *link.Found) {
	if e.Kind == transport.EvFreed {
		if r := f.ending[e.User]; r != nil {
			r.freed = true
			f.settle(r)
		} else {
			p.Put(*e)
		}
		return
	}
	c := f.last
	if c == nil || c.Conn != e.Conn {
		c = f.conns[e.Conn]
	}
	if c == nil {
		// It may be the first event of its Conn. Events of Conns that are not wrapped cost no look
		// at the Conn.
		first := f.calls.Dev != nil || e.Kind == transport.EvAccept || int(f.tracked.Load()) > len(f.conns)
		if !first || !f.wraps(e.Conn) {
			p.Put(*e)
			return
		}
		if f.closed { // nobody knows it
			link.Drop(e)
			return
		}
		c = f.conn(e.Conn)
	}
	f.last = c
	c.event(e, p)
}

// event takes one event of inner's Conn, for which p has room.
func (c *Conn) event(e *transport.Event, p *link.Found) {
	var err error
	switch {
	case e.Kind == transport.EvDone && e.User&c.Mark != 0:
		c.finish(e.User, e.Err)
	case e.Kind == transport.EvDone:
		if e.Conn = c; e.Err != nil && c.over != nil {
			e.Err = c.over
		}
		p.Put(*e)
	case e.Kind == transport.EvClosed:
		c.left = true
		c.wake()
	case c.over != nil: // it has ended since inner was asked
		link.Drop(e)
	case e.Kind == transport.EvDown:
		c.end(e.Err)
	case e.Kind == transport.EvFrame:
		err = c.message(e.Data, p)
	case e.Kind == transport.EvLent:
		e.Conn = c
		err = c.arrive(e, p)
	default:
		e.Conn = c
		p.Put(*e)
	}
	if err != nil {
		c.fail(err)
	}
}

// service does what is due on the Conns.
func (f *Fabric) service(p *link.Found) {
	left := 0
	for i := 0; i < len(f.busy); i++ { // one may wake another
		c := f.busy[i]
		c.give(p)
		c.advance()
		c.flush()
		c.review()
		if c.over != nil && !c.down && c.held.Len() == 0 && p.Room() && len(f.told) == 0 {
			c.down = true
			p.Put(transport.Event{Kind: transport.EvDown, Conn: c, Err: c.over})
		}
		if c.gone() && p.Room() && len(f.told) == 0 {
			f.forget(c)
			p.Put(transport.Event{Kind: transport.EvClosed, Conn: c})
		} else if c.listed = c.due(); c.listed {
			f.busy[left] = c
			left++
		}
	}
	clear(f.busy[left:])
	f.busy = f.busy[:left]
}

// wraps reports whether this Fabric wraps a Conn of inner. A Fabric with a Device wraps all.
// One without wraps those to peers that may have a GPU.
func (f *Fabric) wraps(in transport.Conn) bool {
	return f.calls.Dev != nil || f.hasGPU != nil && f.hasGPU(in.Peer().Hello)
}

// pollCalm is Poll when there is nothing to look at but inner. On a Fabric without a Device it hands on what
// inner gives, until an event is of a Conn that has to be wrapped.
func (f *Fabric) pollCalm(ev []transport.Event) (n int, err error) {
	n, err = f.Fabric.Poll(ev)
	for i := range ev[:n] {
		if f.calls.Dev != nil || f.tracked.Load() != 0 || ev[i].Kind == transport.EvAccept && f.wraps(ev[i].Conn) {
			if n = f.takeFrom(ev, i, n); n != 0 {
				err = nil // it comes again
			}
			break
		}
	}
	return n, err
}

// takeFrom takes the events i to n of inner, and returns how many events ev has then. Those before i stay as
// they are. It is no part of pollCalm because a defer in a loop slows each call.
func (f *Fabric) takeFrom(ev []transport.Event, i, n int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.polls++
	p := link.Found{Events: ev, N: i}
	f.take(ev[i:n], &p)
	return p.N
}
