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
	if len(f.given) != 0 {
		for _, b := range f.given {
			f.pool.put(b)
		}
		f.given = f.given[:0]
	}
	p := &f.found
	p.Events, p.N = ev, 0
	f.catchUp()
	f.rest(p)
	if f.stirred {
		f.deliver(p)
	}
	err := f.panicked
	for again := err == nil; again; {
		got := 0
		if p.Room() {
			got, err = f.look(p)
		}
		if f.stirred || f.polls%agePolls == 0 && (f.polls-f.active >= agePolls || f.polls%(8*agePolls) == 0) {
			f.serve(p)
		}
		f.rest(p)
		again = f.closing && got > 0 && p.N == 0 // all was ours: more may come
	}
	p.Events = nil
	if p.N != 0 || len(f.told) != 0 {
		err = nil // it comes again
	}
	return p.N, err
}

// done is what told has of an EvDone, or of an EvFreed if c is nil.
type done struct {
	c    *Conn
	user uint64
	err  error
}

// put returns the next event of p, for which there is room, to be filled in place.
func put(p *link.Found) *transport.Event {
	e := &p.Events[p.N]
	p.N++
	*e = transport.Event{}
	return e
}

// tell gives EvDone, in this Poll if that has room.
func (f *Fabric) tell(c *Conn, user uint64, err error) {
	if p := &f.found; p.Room() && len(f.told) == 0 {
		e := put(p)
		e.Kind, e.User, e.Conn, e.Err = transport.EvDone, user, c, err
		c.told()
		return
	}
	f.told = append(f.told, done{c, user, err})
}

// rest gives completions and freed keys that wait, as far as p has room.
func (f *Fabric) rest(p *link.Found) {
	k := min(len(f.told), len(p.Events)-p.N)
	if k == 0 {
		return
	}
	for i := range f.told[:k] {
		d, e := &f.told[i], put(p)
		if e.User = d.user; d.c == nil {
			e.Kind = transport.EvFreed
			continue
		}
		e.Kind, e.Conn, e.Err = transport.EvDone, d.c, d.err
		d.c.told()
	}
	left := copy(f.told, f.told[k:])
	clear(f.told[left:])
	f.told = f.told[:left]
}

// calm reports whether this Poll need not ask members that have had nothing for some time, while others had
// something. To ask costs a system call. A Poll that finds nothing has time for it, so more of those ask. A Poll
// after Arm asks all.
func (f *Fabric) calm() bool {
	return f.skipped < askBusy && f.polls-f.active < calmPolls && !f.armed && !f.closing
}

// look takes what the members have.
func (f *Fabric) look(p *link.Found) (got int, err error) {
	f.polls++
	err = f.lost
	calm := f.calm()
	for i, at := 0, f.next; i < len(f.members); i, at = i+1, at+1 {
		if at == len(f.members) {
			at = 0
		}
		a := &f.asked[at]
		if calm && f.polls-a.seen > calmPolls {
			continue
		}
		if f.dead[at].over {
			a.quiet += quietPolls
			continue
		}
		n, bad := f.members[at].Poll(f.ev[:])
		switch {
		case n > 0:
			a.seen, f.active = f.polls, f.polls
		case bad == nil:
			a.quiet++
		}
		for j := range f.ev[:n] {
			e := &f.ev[j]
			switch {
			case e.Kind == transport.EvDone && e.User == 0: // of a frame
			case e.Kind == transport.EvFrame:
				if r := f.find(at, e.Conn); !r.recvSmall(e.Data, p) {
					r.frame(e.Data, p)
				}
			default:
				f.event(at, e)
			}
		}
		if bad != nil {
			if bad = f.broke(at, n, bad); bad != nil && (err == nil || !errors.Is(bad, transport.ErrClosed)) {
				err = bad
			}
		}
		got += n
	}
	if len(f.timed) != 0 {
		f.measure()
	}
	switch {
	case !calm:
		f.skipped = 0
	case got > 0:
		f.skipped++
	default:
		f.skipped += askBusy / askIdle
	}
	if f.next++; f.next == len(f.members) {
		f.next = 0
	}
	f.armed = false
	return got, err
}

// measure takes how long members needed for the writes that they have let go of in this Poll.
func (f *Fabric) measure() {
	now := f.now()
	for _, r := range f.timed {
		r.meter.stop(now, r.load == 0)
	}
	clear(f.timed)
	f.timed = f.timed[:0]
}

// event takes an event of member Fabric at that is no frame.
func (f *Fabric) event(at int, e *transport.Event) {
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
	case c == nil && g.Member == 0 && int(g.Strand) < f.o.Strands:
		c = f.conn(false, g.Conn, int(g.Count), int(g.Strands), &about)
		c.fresh = true
	case c == nil || g.Member == 0 || int(g.Strand) >= f.o.Strands || int(g.Count) != c.peers || !f.o.Same(about.Hello, c.about.Hello):
		r.refuse()
		return
	}
	if r.strand, r.theirs = int(g.Strand), int(g.At); !c.add(r, g.Member, nil) {
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
	f.stirred = false
	f.busy = slices.DeleteFunc(f.busy, func(c *Conn) bool { // none wakes another one
		c.serve(p)
		stirred := c.stirs()
		f.stirred = f.stirred || stirred
		c.listed = stirred || !c.order.over && c.order.owes() != 0
		return !c.listed
	})
}
