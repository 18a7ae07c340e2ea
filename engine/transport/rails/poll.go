package rails

import (
	"errors"
	"slices"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Poll implements transport.Fabric. It asks each member once, since a frame of it stays valid until the
// member is asked again.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rung {
		f.rung = false
		f.Wake(0)
	}
	for _, b := range f.given {
		f.pool.put(b)
	}
	f.given = f.given[:0]
	p := link.Found{Events: ev}
	f.tell(&p)
	f.deliver(&p)
	err := f.panicked
	for again := err == nil; again; {
		got := 0
		if p.Room() {
			got, err = f.look(&p)
		}
		f.serve(&p)
		f.tell(&p)
		again = f.closing && got > 0 && p.N == 0 // all was ours: more may come
	}
	if p.N != 0 || len(f.told) != 0 {
		err = nil // it comes again
	}
	return p.N, err
}

// tell gives completions and freed keys, as far as p has room.
func (f *Fabric) tell(p *link.Found) {
	k := copy(p.Events[p.N:], f.told)
	p.N += k
	for i := range f.told[:k] {
		if c, ok := f.told[i].Conn.(*Conn); ok {
			if c.open--; c.open == 0 {
				c.wake()
			}
		}
	}
	f.told = slices.Delete(f.told, 0, k)
}

// calm reports whether this Poll need not ask a member: for some time others have had something and it
// had not. To ask costs a system call. Whoever sleeps, and is woken, asks all.
func (f *Fabric) calm(at int) bool {
	return f.polls-f.seen[at] > calmPolls && f.polls-f.active < calmPolls && f.polls%askPolls != 0 && !f.armed && !f.closing
}

// look takes what the members have.
func (f *Fabric) look(p *link.Found) (got int, err error) {
	f.polls++
	err = f.lost
	for i := range f.members {
		at := (f.next + i) % len(f.members)
		if f.quiet[at] = f.dead[at].over; f.quiet[at] || f.calm(at) {
			continue
		}
		n, bad := f.members[at].Poll(f.ev[:])
		if f.quiet[at] = n == 0; n > 0 {
			f.seen[at], f.active = f.polls, f.polls
		}
		for j := range f.ev[:n] {
			f.event(at, &f.ev[j], p)
		}
		if bad = f.broke(at, n, bad); bad != nil && (err == nil || !errors.Is(bad, transport.ErrClosed)) {
			err = bad
		}
		got += n
	}
	f.next, f.armed = (f.next+1)%len(f.members), false
	return got, err
}

// event takes an event of member Fabric at.
func (f *Fabric) event(at int, e *transport.Event, p *link.Found) {
	if e.Kind == transport.EvFreed {
		f.freed(at, e.User)
		return
	}
	r := f.find(at, e.Conn)
	switch e.Kind {
	case transport.EvAccept:
		f.accepted(r)
	case transport.EvDone:
		r.ended(e.User)
	case transport.EvFrame:
		r.frame(e.Data, p)
	case transport.EvLent:
		link.Drop(e)
		r.breach(errors.New("rails: the peer lends memory, which rails does not"))
	case transport.EvDown:
		r.wentDown(e.Err)
	case transport.EvClosed:
		r.hasEnded()
	}
}

// accepted takes a member that a peer has opened.
func (f *Fabric) accepted(r *rail) {
	if f.closing {
		r.refuse()
		return
	}
	if len(f.fresh) == maxFresh {
		f.fresh[0].refuse()
	}
	r.fresh, r.known = true, true
	f.fresh = append(f.fresh, r)
}

// greeted takes the first frame of a member that a peer has opened. A member that is refused is closed,
// and nobody else hears of it.
func (f *Fabric) greeted(r *rail, data []byte) {
	f.unfresh(r)
	g, err := parseGreeting(data)
	if err != nil || f.closing {
		if err != nil && len(data) > 0 && kind(data[0]) == greeting {
			_, _ = r.conn.Post([]transport.Op{{Kind: transport.OpFrame, Frame: parting(err)}})
		}
		r.refuse()
		return
	}
	about := r.conn.Peer()
	var c *Conn
	if i := slices.IndexFunc(f.conns, func(c *Conn) bool { return !c.order.dialer && c.id == g.Conn }); i >= 0 {
		c = f.conns[i]
	}
	switch {
	case c == nil && g.Member == 0 && int(g.Lane) < f.o.Lanes:
		c = f.conn(false, g.Conn, int(g.Count), int(g.Lanes), &about)
		c.fresh = true
	case c == nil || g.Member == 0 || int(g.Lane) >= f.o.Lanes || int(g.Count) != c.peers || !f.o.Same(about.Hello, c.about.Hello):
		r.refuse()
		return
	}
	if r.lane, r.theirs = int(g.Lane), int(g.At); !c.add(r, g.Member, nil) {
		r.refuse()
	} else if g.Member == 0 {
		c.order.acknowledge() // the dialer then dials the others
	}
	c.after()
}

// unfresh says that r has said what it is for, or will not.
func (f *Fabric) unfresh(r *rail) {
	r.fresh = false
	f.fresh = slices.DeleteFunc(f.fresh, func(o *rail) bool { return o == r })
}

// deliver gives what has come before, each time to another Conn first.
func (f *Fabric) deliver(p *link.Found) {
	n := uint64(len(f.busy))
	for i := range n {
		f.busy[(f.polls+i)%n].give(p)
	}
}

// serve does what is due on the Conns.
func (f *Fabric) serve(p *link.Found) {
	f.busy = slices.DeleteFunc(f.busy, func(c *Conn) bool { // none wakes another one
		c.serve(p)
		c.listed = c.due()
		return !c.listed
	})
}
