package faults

import (
	"time"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A Conn is an inner one, with faults. All is guarded by f.mu.
type Conn struct {
	link.OverConn[owner] // Open: and EvDones to give
	f                    *Fabric
	over                 error // why nothing can be posted any more, and what EvDown is to say
	down                 bool  // EvDown was given, or will not come
	closed               bool  // by its user
	left                 bool  // the inner Conn has given its EvClosed

	queue   []held // that LateWrite holds back, and frames that Drop has lost, with Resend
	device  bool   // a write of a device was posted
	dry     uint64 // there is no credit before this Poll
	refused error  // why the inner Conn has not taken what was held back
}

// owner is whose operation of the inner Conn it is.
type owner struct {
	user   uint64
	silent bool   // the user is told nothing
	copy   []byte // of the source
}

// held is an op that waits for its time.
type held struct {
	op transport.Op
	owner
	due    uint64 // the Poll after which it may go
	device bool   // it waits for a device, or is a frame behind a write that may
	// wait is not 0 for a frame that was lost: after so long, at until, it is sent again.
	wait  time.Duration
	until time.Time
}

const (
	queueMax = 32       // ops of one Conn that are held back
	earlyMax = 64 << 10 // bytes of a write that ends early
	dryMax   = 8        // Polls without credit
	patience = 16       // bounds held.wait, in Timeouts
)

// Lends implements transport.Conn.
func (c *Conn) Lends(s mem.Span) bool {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return c.over == nil && c.Conn.Lends(s)
}

// Unsent implements transport.Conn.
func (c *Conn) Unsent() bool {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return len(c.queue) != 0 || c.Conn.Unsent()
}

// Post implements transport.Conn.
func (c *Conn) Post(ops []transport.Op) (int, error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	for i := range ops {
		switch {
		case c.over != nil:
			return i, c.over
		case c.refused != nil:
			return i, c.refused
		case c.starves():
			return i, nil
		}
		taken, err := c.post(&ops[i])
		if !taken {
			return i, err
		}
	}
	return len(ops), nil
}

// starves says whether there is no credit for an op.
func (c *Conn) starves() bool {
	if c.dry <= c.f.polls && c.f.chance(c.f.o.Starve) {
		c.dry = c.f.later(dryMax) + 1
		c.f.Wake(1) // for whoever sleeps already
	}
	return c.dry > c.f.polls
}

func (c *Conn) post(op *transport.Op) (taken bool, err error) {
	o, frame := &c.f.o, op.Kind == transport.OpFrame && len(op.Frame) <= transport.MaxFrame
	switch {
	case c.f.fails != nil:
		err, c.f.fails = c.f.fails, nil
		c.tell(op.User, err)
		c.fail(err)
		return true, nil
	case behind(op, c.queue) && (o.LateWrite == 0 || !frame):
		return false, nil
	case frame && c.f.chance(o.Drop):
		if o.Resend {
			return c.holdBack(op, o.Timeout), nil
		}
		c.tell(op.User, nil)
		return true, nil
	case o.LateWrite > 0 && (frame || op.Kind == transport.OpWrite):
		return c.holdBack(op, 0), nil
	}
	return c.pass(op, owner{user: op.User})
}

// holdBack takes a write or a frame into the queue; false if there is no room. A frame that was
// lost waits.
func (c *Conn) holdBack(op *transport.Op, wait time.Duration) bool {
	if len(c.queue) == queueMax {
		return false
	}
	f := c.f
	h := held{op: *op, owner: owner{user: op.User}, due: f.polls}
	if op.Kind == transport.OpWrite {
		h.due = f.later(f.o.LateWrite)
		h.device = op.Dev != mem.CPU
		c.device = c.device || h.device
		if size, err := link.Check("faults", op); !h.device && err == nil && size <= earlyMax && f.chance(f.o.Early) {
			h.owner = owner{silent: true}
			for _, s := range op.Src {
				h.copy = append(h.copy, s.Bytes()...)
			}
			h.op.Src = []mem.Span{mem.Of(h.copy)}
			c.tell(op.User, nil)
		}
	} else {
		h.device = c.device
		h.op.Frame = append([]byte{}, op.Frame...)
		h.wait, h.until = wait, time.Now().Add(wait)
	}
	c.queue = append(c.queue, h)
	c.flush(false)
	return true
}

// flush posts what is held back and has its time, or all of it.
func (c *Conn) flush(all bool) {
	kept := c.queue[:0]
	for _, h := range c.queue {
		if c.refused == nil && (all || h.due <= c.f.polls) && !behind(&h.op, kept) && (all || !c.lost(&h)) {
			taken, err := c.pass(&h.op, h.owner)
			if taken {
				continue
			}
			c.refused = err
		}
		kept = append(kept, h)
	}
	clear(c.queue[len(kept):])
	c.queue = kept
}

// lost says whether a frame has been lost that is not to be sent yet, or is lost again.
func (c *Conn) lost(h *held) bool {
	now := time.Now()
	switch {
	case h.wait == 0:
		return false
	case now.Before(h.until):
		return true
	case c.f.chance(c.f.o.Drop):
		h.wait = min(2*h.wait, patience*c.f.o.Timeout)
		h.until = now.Add(h.wait)
		return true
	}
	h.wait = 0
	return false
}

// behind says whether op has to wait for one of those before it: a frame or a loan for all of
// them, and one that passes for those that wait for no device.
func behind(op *transport.Op, before []held) bool {
	if op.Kind != transport.OpFrame && op.Kind != transport.OpLend {
		return false
	}
	for i := range before {
		if b := &before[i]; !op.Passes || !b.device || b.op.Passes {
			return true
		}
	}
	return false
}

// pass posts an op on the inner Conn.
func (c *Conn) pass(op *transport.Op, o owner) (taken bool, err error) {
	k, err := c.Pass(op, o, nil, nil)
	return k == 1, err
}

// tell ends an operation of the user's.
func (c *Conn) tell(user uint64, err error) {
	c.Open++
	c.f.told = append(c.f.told, done{c, user, err, c.f.later(c.f.o.LateDone)})
}

// deliver tells the user of the end of the Conn, if p has room.
func (c *Conn) deliver(p *poll) {
	switch {
	case !c.ended() || !p.Room():
	case c.closed:
		c.left = false
		delete(c.f.conns, c.Conn)
		p.Put(transport.Event{Kind: transport.EvClosed, Conn: c})
	default:
		c.down = true
		p.Put(transport.Event{Kind: transport.EvDown, Conn: c, Err: c.over})
	}
}

// end takes the end of a Conn.
func (c *Conn) end(err error) {
	if c.over == nil {
		c.over = err
		for _, h := range c.queue {
			if !h.silent {
				c.tell(h.user, err)
			}
		}
		c.queue = nil
	}
}

// fail ends a Conn that has refused an op which was taken from the user.
func (c *Conn) fail(err error) {
	if c.over == nil {
		c.end(err)
		c.Conn.Close()
	}
}

// ended says whether EvDown is due, or EvClosed.
func (c *Conn) ended() bool {
	if c.closed {
		return c.left && c.Open == 0
	}
	return c.over != nil && !c.down
}

// late says whether something is held back that needs nothing but Polls.
func (c *Conn) late() bool {
	if c.dry > c.f.polls || c.refused != nil && c.over == nil {
		return true
	}
	for i := range c.queue {
		if c.queue[i].due > c.f.polls {
			return true
		}
	}
	return false
}

// leave ends a Conn for its own user, who is told nothing more than how the
// operations have ended, and of the end.
func (c *Conn) leave() { c.leaveBy(c.Conn.Close) }

// leaveBy is leave, where shut closes the inner Conn.
func (c *Conn) leaveBy(shut func()) {
	if c.closed {
		return
	}
	if c.over == nil && !c.f.chance(c.f.o.Forget) {
		c.flush(true)
	}
	c.end(transport.ErrClosed)
	c.down, c.closed = true, true
	c.f.after(shut)
}

// Close implements transport.Conn.
func (c *Conn) Close() {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.leave()
}

// CloseFor implements transport.Conn.
func (c *Conn) CloseFor(why error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.leaveBy(func() { c.Conn.CloseFor(why) })
}
