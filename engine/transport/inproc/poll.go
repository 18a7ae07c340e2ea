package inproc

import (
	"fmt"

	"fserver/engine/transport"
)

// poll gives what has happened on c to r. The caller holds net.mu.
func (c *Conn) poll(r *round) {
	if c.fresh && !c.closed {
		if c.due > c.f.polls {
			r.again = true
			return
		}
		if !r.put(transport.Event{Kind: transport.EvAccept, Conn: c}) {
			return
		}
		c.fresh = false
	}
	if c.over == nil && !c.rel.held {
		c.receive(r)
		if c.over == nil && c.peer.over != nil && c.peer.out.unsent == 0 {
			c.end(c.peer.bye, c.peer.bye, false, &c.f.touched)
		}
	}
	if c.over == nil && c.out.unsent > 0 {
		r.owed = true
		if limit := c.f.limits.Stall; r.now.Sub(c.progress) > limit {
			c.end(fmt.Errorf("inproc: %s has read nothing for %v (Limits.Stall)", c.Remote(), limit),
				fmt.Errorf("inproc: %s closed a stalled connection", c.f.name), false, &c.f.touched)
		}
	}
	c.tell(r)
	if c.gone() {
		r.gone = true
	}
}

// tell gives the completions, and EvDown after the last.
func (c *Conn) tell(r *round) {
	for i := c.out.head; i < c.out.tail && c.out.untold > 0; i++ {
		e := c.out.at(i)
		if !e.over || e.told {
			continue
		}
		if !r.put(transport.Event{Kind: transport.EvDone, Conn: c, User: e.user, Err: e.err}) {
			return
		}
		e.told = true
		c.out.untold--
	}
	c.out.trim()
	if c.over != nil && c.out.untold == 0 && !c.closed && !c.downTold {
		c.downTold = r.put(transport.Event{Kind: transport.EvDown, Conn: c, Err: c.over})
	}
}

// receive takes what the peer has posted.
func (c *Conn) receive(r *round) {
	in := &c.peer.out
	before := in.unsent
	held := false // something before has not arrived
scan:
	for i := in.head; i < in.tail && c.over == nil; i++ {
		e := in.at(i)
		if e.sent {
			continue
		}
		switch {
		case e.due > c.f.polls:
			r.again = true
			if c.ordered {
				break scan
			}
			held = true
		case e.kind == transport.OpFrame:
			if held {
				continue
			}
			if !r.put(transport.Event{Kind: transport.EvFrame, Conn: c, Data: e.buf}) {
				break scan
			}
			c.f.lent = append(c.f.lent, in.send(e))
		case !c.land(e, r):
			if c.ordered {
				break scan
			}
			held = true
		}
	}
	in.trim()
	if in.unsent < before {
		c.peer.progress = r.now
		if c.peer.pressed {
			c.peer.pressed = false
			c.f.touched.add(c.peer.f)
		}
	}
}

// chunk bounds the bytes of one write that one Poll copies, so that the peers
// take turns.
const chunk = 256 << 10

// land copies a piece of a write to its target and reports whether the write is
// complete. A write that this Fabric has not allowed ends the Conn.
func (c *Conn) land(e *entry, r *round) bool {
	in := &c.peer.out
	dst, err := c.f.lookup(e.key, e.off, e.size)
	if err != nil {
		c.end(fmt.Errorf("inproc: write from %s refused: %w", c.Remote(), err),
			fmt.Errorf("inproc: %s refused a write: %w", c.f.name, err), false, &c.f.touched)
		return false
	}
	n := min(e.size-e.at, chunk, uint64(r.budget))
	if n > 0 {
		e.gather(dst.Bytes()[e.at : e.at+n])
		r.budget -= int(n)
		c.peer.progress = r.now
	}
	if e.at < e.size {
		r.again = true
		return false
	}
	if !e.over {
		in.finish(e, nil)
		c.f.touched.add(c.peer.f)
	}
	c.f.net.spare.put(in.send(e))
	return true
}
