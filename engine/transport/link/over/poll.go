package over

import (
	"time"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

const (
	// pollEvery is how often a sleeping user is woken while a GPU works: it cannot
	// ring.
	pollEvery = 50 * time.Microsecond
	// LingerEvery is the same while there is only to wait for a peer, or for inner.
	LingerEvery = 10 * time.Millisecond
	// TickPolls is after how many Polls to look at the clock, for tick.
	TickPolls = 1 << 16
)

// Lock takes Mu for what a Poll may have to look at.
func (b *Base) Lock() {
	b.Mu.Lock()
	b.Calm.Store(false)
}

// Arm implements transport.Fabric.
func (b *Base) Arm() (again bool) {
	again = b.Fabric.Arm()
	b.Lock()
	defer b.Mu.Unlock()
	if b.Calls.Dev != nil && !b.Closed {
		b.slept = true
		b.Wake(b.rest())
	}
	return again || len(b.told) != 0 || b.refused
}

// rest returns when to look how far GPUs are; 0: nothing waits for one.
func (b *Base) rest() time.Duration {
	working, left := b.Calls.Busy() || b.layer.Waits(), len(b.ending) > 0
	for _, c := range b.Conns {
		if c.through() && c.Lingers() { // for as long as the peer likes
			left = true
			continue
		}
		working = working || c.due()
	}
	switch {
	case working:
		return pollEvery
	case left:
		return LingerEvery
	}
	return 0
}

// rouse wakes a sleeper, who has not heard of what there is to do now.
func (b *Base) rouse() {
	if b.slept {
		b.slept = false
		b.Wake(pollEvery)
	}
}

// drive takes what calls aside have made, finds out how far the GPU is, and goes on with what
// is not of one Conn.
func (b *Base) drive(tick bool) {
	if !b.Calls.Inside {
		b.Calls.Proceed()
		if tick {
			b.tick()
		}
		b.Calls.Look()
		b.layer.Proceed()
	}
	if len(b.ending) > 0 { // to range over an empty map costs time
		for id, e := range b.ending {
			b.settle(id, e)
		}
	}
}

// tick looks once a second whether the device still works: no event tells of that.
func (b *Base) tick() {
	now := time.Now()
	if now.Sub(b.Looked) < time.Second {
		return
	}
	b.Looked = now
	b.layer.Look()
	for _, c := range b.Conns {
		if c.Working() {
			idle, err := b.Calls.Idle(c.Stream())
			c.idled(idle, err)
		}
	}
}

// Poll implements transport.Fabric. It finds nothing while a Post is in the driver.
func (b *Base) Poll(ev []transport.Event) (int, error) {
	if b.spins++; b.Calm.Load() && b.spins%TickPolls != 0 {
		return b.pollCalm(ev)
	}
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if b.Calls.Inside {
		return 0, nil
	}
	b.polls++
	b.drive(b.slept || b.spins%TickPolls == 0)
	b.slept, b.refused = false, false
	p := &b.found
	*p = link.Found{Events: ev}
	b.tell(p)
	for _, c := range b.busy {
		c.give(p)
	}
	err := b.Calls.Panicked
	for again := true; again; {
		got := 0
		if err == nil && p.Room() {
			got, err = b.ask(min(len(b.ev), len(ev)-p.N))
		}
		b.take(b.ev[:got], p)
		again = b.Closed && got > 0 && p.N == 0 // all was dropped: more may come
	}
	if p.N != 0 || len(b.told) != 0 {
		err = nil // it comes again
	}
	p.Events = nil
	return p.N, err
}

// pollCalm is Poll when there is nothing to look at but inner. It hands on what inner gives, until an event is of a
// Conn that is wrapped.
func (b *Base) pollCalm(ev []transport.Event) (n int, err error) {
	n, err = b.Fabric.Poll(ev)
	for i := range ev[:n] {
		if b.Wraps == nil || b.Tracked.Load() != 0 || ev[i].Kind == transport.EvAccept && b.wraps(ev[i].Conn) {
			if n = b.takeFrom(ev, i, n); n != 0 {
				err = nil // it comes again
			}
			break
		}
	}
	return n, err
}

// takeFrom takes the events i to n of inner, and returns how many events ev has then. Those before i stay as
// they are. It is no part of pollCalm because a defer in a loop slows each call.
func (b *Base) takeFrom(ev []transport.Event, i, n int) int {
	b.Mu.Lock()
	defer b.Mu.Unlock()
	b.polls++
	p := &b.found
	*p = link.Found{Events: ev, N: i}
	b.take(ev[i:n], p)
	p.Events = nil
	return p.N
}

// ask polls inner for at most n events.
func (b *Base) ask(n int) (int, error) {
	if b.Below {
		defer b.Calls.Leave().Back()
	}
	got, err := b.Fabric.Poll(b.ev[:n])
	if got == 0 && err == nil {
		b.quiet++
	}
	return got, err
}

// tell gives the events that wait, as far as p has room.
func (b *Base) tell(p *link.Found) {
	k := copy(p.Events[p.N:], b.told)
	p.N += k
	b.told = b.told[:copy(b.told, b.told[k:])]
}

// take takes events of inner, for which p has room, and gives what follows from them, as far as p
// has room. They may lie where p puts its own: none is put behind the one that it comes of.
func (b *Base) take(ev []transport.Event, p *link.Found) {
	for i := range ev {
		b.event(&ev[i], p)
	}
	b.tell(p)
	b.service(p)
	b.tell(p)
	b.Calm.Store(len(b.busy)+len(b.told)+len(b.ending) == 0 && !b.Calls.Busy() && !b.layer.Waits() && b.Calls.Panicked == nil && !b.Closed)
}

// event takes one event of inner, for which p has room.
func (b *Base) event(e *transport.Event, p *link.Found) {
	if e.Kind == transport.EvFreed {
		if m := b.ending[e.User]; m != nil {
			m.freed = true
			b.settle(e.User, m)
		} else {
			p.Put(*e)
		}
		return
	}
	if b.lastIn == nil || b.lastIn != e.Conn {
		c := b.Conns[e.Conn]
		if c == nil {
			// It may be the first event of its Conn. Events of Conns that are not wrapped cost no look
			// at the Conn.
			first := b.Wraps == nil || e.Kind == transport.EvAccept || int(b.Tracked.Load()) > len(b.Conns)
			if !first || !b.wraps(e.Conn) {
				p.Put(*e)
				return
			}
			if b.Closed { // nobody knows it
				link.Drop(e)
				return
			}
			c = b.conn(e.Conn)
		}
		b.last, b.lastIn = c, e.Conn
	}
	if e.Kind == transport.EvDone && e.User&b.mark == 0 && e.Err == nil { // the most frequent
		e.Conn = b.last
		p.Put(*e)
		return
	}
	b.last.event(e, p)
}

// service does what is due on the Conns.
func (b *Base) service(p *link.Found) {
	left := 0
	for i := 0; i < len(b.busy); i++ { // one may wake another
		c := b.busy[i]
		if c.serve(p) {
			b.busy[left] = c
			left++
		}
	}
	clear(b.busy[left:])
	b.busy = b.busy[:left]
}
