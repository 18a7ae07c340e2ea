package cudaipc

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
	if !f.closed {
		f.slept = true
		f.Wake(f.rest())
	}
	return again || len(f.told) != 0 || f.refused
}

// rest returns when to look how far GPUs are; 0: nothing waits for one.
func (f *Fabric) rest() time.Duration {
	working, left := f.calls.Busy(), len(f.ending) > 0
	for _, c := range f.conns {
		if c.through() && c.writing() { // for as long as the peer likes
			left = true
			continue
		}
		working = working || c.due()
	}
	switch {
	case working:
		return pollEvery
	case left:
		return deadEvery
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
	}
	for _, r := range f.ending {
		f.settle(r)
	}
}

// tick looks once a second whether the device still works, and which mappings are not used any
// more: no event tells of that.
func (f *Fabric) tick() {
	now := time.Now()
	if now.Sub(f.scan) < time.Second {
		return
	}
	f.scan = now
	for _, c := range f.conns {
		if !c.lane.working() {
			c.sweep()
			continue
		}
		idle, err := f.calls.Idle(c.lane.stream)
		if err != nil || idle && c.over != nil && c.lane.working() { // what is left was not enqueued
			c.lane.broken = true
			c.lane.seg.begun.Store(c.lane.seg.done.Load()) // for the peer: none is under way
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
			got, err = f.ask(min(len(f.ev), len(ev)-p.N))
		}
		f.take(f.ev[:got], &p)
		again = f.closed && got > 0 && p.N == 0 // all was dropped: more may come
	}
	if p.N != 0 || len(f.told) != 0 {
		err = nil // it comes again
	}
	return p.N, err
}

// pollCalm is Poll when there is nothing to look at but inner.
func (f *Fabric) pollCalm(ev []transport.Event) (int, error) {
	n, err := f.Fabric.Poll(ev)
	if n == 0 {
		return 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.polls++
	p := link.Found{Events: ev}
	f.take(ev[:n], &p)
	if p.N != 0 {
		err = nil // it comes again
	}
	return p.N, err
}

// ask polls inner, which may call the device, for at most n events.
func (f *Fabric) ask(n int) (int, error) {
	defer f.calls.Leave().Back()
	return f.Fabric.Poll(f.ev[:n])
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
	case e.Kind == transport.EvDone && e.User&c.Mark != 0: // of ours
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
	case e.Kind == transport.EvLent:
		err = c.lent(e, p)
	case e.Kind == transport.EvFrame:
		err = c.message(e.Data, p)
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
		if c.unanswered() {
			c.introduce()
		}
		c.review()
		if c.over != nil && !c.down && c.held.Len() == 0 && p.Room() && len(f.told) == 0 {
			c.down = true
			p.Put(transport.Event{Kind: transport.EvDown, Conn: c, Err: c.over})
		}
		if c.through() && !c.writing() && !c.waits && p.Room() && len(f.told) == 0 {
			c.release()
			delete(f.conns, c.Conn)
			f.last = nil
			p.Put(transport.Event{Kind: transport.EvClosed, Conn: c})
		} else if c.listed = c.due(); c.listed {
			f.busy[left] = c
			left++
		}
	}
	clear(f.busy[left:])
	f.busy = f.busy[:left]
}
