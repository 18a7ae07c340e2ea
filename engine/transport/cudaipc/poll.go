package cudaipc

import (
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// pollEvery is how often a sleeping user is woken while a GPU works: it cannot
// ring.
const pollEvery = 50 * time.Microsecond

// FD is an epoll descriptor over inner's and a timer.
func (f *Fabric) FD() int {
	fd := f.sleep.FD()
	if f.dev == nil {
		return fd
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.epoll
	}
	f.tick()
	f.look()
	f.slept = true
	if len(f.told) != 0 || f.at < f.got {
		f.arm(1)
	} else {
		f.arm(f.rest())
	}
	return f.epoll
}

// arm has the descriptor readable after d; 0: not at all.
func (f *Fabric) arm(d time.Duration) {
	at := unix.ItimerSpec{Value: unix.Timespec{Nsec: int64(d)}}
	_ = unix.TimerfdSettime(f.timer, 0, &at, nil)
}

// rouse wakes a sleeper who has not heard of work that a GPU has been given since.
func (f *Fabric) rouse() {
	if f.slept {
		f.slept = false
		f.arm(pollEvery)
	}
}

// rest returns when to look how far GPUs are; 0: nothing waits for one.
func (f *Fabric) rest() time.Duration {
	working, left := f.in.waiting(), false
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

// tick looks once a second whether the device still works, and which mappings are not used any
// more: no event tells of that.
func (f *Fabric) tick() {
	now := time.Now()
	if now.Sub(f.scan) < time.Second {
		return
	}
	f.scan = now
	if f.in.waiting() {
		idle, err := f.dev.Idle(f.in.stream)
		f.look()
		switch {
		case err != nil:
			f.in.fail(f, err)
		case idle && f.in.waiting(): // the flag of the last copy was not enqueued
			wordIn(f.in.page).Store(f.in.next)
		}
	}
	for _, c := range f.conns {
		if !c.copying() {
			c.sweep()
			continue
		}
		idle, err := f.dev.Idle(c.lane.stream)
		f.look()
		if err != nil || idle && c.over != nil && c.copying() { // what is left was not enqueued
			c.lane.broken = true
			c.seg().begun.Store(c.seg().done.Load()) // for the peer: none is under way
			c.fail(err)
			c.wake()
		}
	}
}

// Poll implements transport.Fabric. It finds nothing while a Post has f.mu: that is in
// the driver for microseconds, and who parks meanwhile is not back for longer.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	if f.dev == nil && f.tracked.Load() == 0 {
		return f.pollBare(ev)
	}
	if !f.mu.TryLock() {
		return 0, nil
	}
	defer f.mu.Unlock()
	f.slept = false
	f.look()
	if f.polls++; f.polls%(1<<16) == 0 {
		f.tick()
	}
	p := poll{ev: ev}
	f.tell(&p)
	for _, c := range f.busy {
		c.give(&p)
	}
	var err error
	if f.at == f.got && p.room() {
		f.at = 0
		most := len(f.ev)
		if f.dev == nil { // leave nothing for later: FD would not tell of it
			most = min(most, len(ev)-p.n)
		}
		f.got, err = f.inner.Poll(f.ev[:most])
	}
	f.take(&p)
	if p.n != 0 || f.at < f.got || len(f.told) != 0 {
		err = nil // it comes again
	}
	return p.n, err
}

// look finds out how far the streams are, if they do not say so by themselves.
func (f *Fabric) look() {
	if f.events != nil {
		f.events.settle()
	}
}

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

// tell gives the completions that wait, as far as p has room.
func (f *Fabric) tell(p *poll) {
	k := copy(p.ev[p.n:], f.told)
	p.n += k
	f.told = f.told[:copy(f.told, f.told[k:])]
}

// take gives the events of inner, and what follows from them, as far as p has room.
func (f *Fabric) take(p *poll) {
	for f.at < f.got && p.room() {
		f.event(&f.ev[f.at], p)
		f.at++
	}
	f.tell(p)
	f.service(p)
	f.tell(p)
}

// event takes one event of inner, for which p has room.
func (f *Fabric) event(e *transport.Event, p *poll) {
	c := f.conns[e.Conn]
	if c == nil {
		if !f.first(e) || !f.wraps(e.Conn) {
			p.put(*e)
			return
		}
		c = f.conn(e.Conn)
	}
	if e.Kind == transport.EvDone {
		c.open--
		c.finish(e.User, e.Err)
		return
	}
	if c.over != nil { // it has ended since inner was asked
		drop(e)
		return
	}
	var err error
	switch e.Kind {
	case transport.EvDown:
		c.end(e.Err)
	case transport.EvLent:
		err = c.lent(e, p)
	case transport.EvFrame:
		err = c.message(e.Data, p)
	default:
		out := *e
		out.Conn = c.self
		p.put(out)
	}
	if err != nil {
		c.fail(err)
	}
}

// drop drops the view of an event that the user does not get.
func drop(e *transport.Event) {
	if e.View != nil {
		_ = e.View.Drop() // our own mapping
		e.View = nil
	}
}

// service does what is due on the Conns.
func (f *Fabric) service(p *poll) {
	kept := f.busy[:0]
	for _, c := range f.busy {
		c.give(p)
		c.advance()
		c.flush()
		c.answer()
		if c.ended() && p.room() && len(f.told) == 0 {
			c.down = true
			p.put(transport.Event{Kind: transport.EvDown, Conn: c.self, Err: c.over})
		}
		if c.gone() {
			f.forget(c)
			continue
		}
		if c.listed = c.due(); c.listed {
			kept = append(kept, c)
		}
	}
	clear(f.busy[len(kept):])
	f.busy = kept
}
