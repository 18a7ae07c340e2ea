package verbs

import (
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

const (
	slotBytes = 8 << 10 // of one message; longer frames travel in pieces
	slots     = 32      // that each side posts for frames, and has for what it sends
	spare     = 4       // more, for messages without bytes, which return half of the credits: two at a time at most
	sendRoom  = 128     // requests in a send queue
	inlined   = 220     // bytes that a request carries by itself, if the device can; perftest asks for as many
	bufBytes  = (2*slots + spare) * slotBytes

	// flushLimit is for how long a Conn that has ended waits for what it has posted.
	flushLimit = time.Second
)

// Conn is one queue pair. See transport.Conn.
type Conn struct {
	link.Conn
	f          *Fabric
	session    *link.Session
	qp         *rdma.QP
	number     uint32      // of qp
	mr         rdma.Region // of buf
	registered bool
	buf        mem.Region // send slots, receive slots
	psn        uint32
	at         address // where the queue pair is reached
	peer       place
	lag        int    // port of a bond that it sends over; 0: the NIC chooses
	lagOf      string // the peer whose queue pairs that was chosen among

	// The owner of the Fabric guards all below.
	up         bool        // set up: both ends may send
	failed     bool        // the queue pair is in its error state
	patience   *time.Timer // calls giveUp
	late       bool        // what was posted has not come back in time
	destroying bool
	gone       bool // the queue pair is destroyed
	retired    bool // no event is left to give
	tx         tx
	rx         rx
}

// Post implements transport.Conn. What there is room and credit for goes to the NIC at once, with
// one doorbell.
func (c *Conn) Post(ops []transport.Op) (int, error) {
	if !c.f.Try() {
		return 0, nil
	}
	defer c.f.Owner.Unlock()
	if c.Err != nil {
		return 0, c.Err
	}
	n, err := link.Take(ops, c.take)
	c.pump()
	if c.tx.over() { // a write of no bytes asks nothing of the NIC
		c.f.push(c)
	}
	if err == nil {
		err = c.Err
	}
	return n, err
}

// Unsent implements transport.Conn.
func (c *Conn) Unsent() bool { return c.tx.cur.active || c.tx.posted != c.tx.prepared }

// end ends c: nothing more is posted, and the peer is told why, unless it was a close in
// good order. It is for the owner.
func (c *Conn) end(why error) {
	f := c.f
	f.visitLater(c)
	if c.Err != nil {
		return
	}
	c.Err = c.Because(why)
	if !c.Cut && (c.Closed || errors.Is(why, io.EOF)) {
		why = nil
	}
	switch {
	case !c.up: // the set-up sees it
	case f.Closing:
		c.session.End(why)
	default:
		f.Task(func() {
			c.session.End(why)
			_ = c.qp.Fail() // of a device that is gone; then late ends the wait
			f.Owned(func() {
				c.failed = true
				if !f.Closing {
					c.patience = time.AfterFunc(flushLimit, c.giveUp)
				}
				f.visitLater(c)
			})
		})
	}
}

// giveUp ends the wait for what the device has not given back. A timer calls it.
func (c *Conn) giveUp() {
	f := c.f
	if !f.Begin() {
		return
	}
	defer f.End()
	f.Task(func() { // where a panic is caught
		f.Owned(func() {
			if !c.destroying && !f.Closing {
				c.late = true
				f.visitLater(c)
			}
		})
	})
}

// destroy gives back what make took. It may block.
func (c *Conn) destroy() {
	if c.qp != nil && c.qp.Destroy() != nil {
		return // the library may still write to the buffer
	}
	if c.registered {
		_ = c.mr.Deregister()
	}
	if c.buf.Len != 0 {
		_ = mem.Unmap(c.buf)
	}
}

// leave notes that destroy was called. It is for the owner.
func (c *Conn) leave() {
	c.gone = true
	if c.patience != nil {
		c.patience.Stop()
	}
}

// flushed says whether all that was posted has come back, or never will.
func (c *Conn) flushed() bool {
	return c.failed && (c.late || c.tx.sqAcked == c.tx.sq && c.rx.posted == 0)
}

// finish is the end of c: it gives what events it can.
func (c *Conn) finish(ev []transport.Event) (n int) {
	f := c.f
	if c.flushed() && c.rx.n == 0 {
		n = c.Down(c, ev)
	}
	if !c.gone {
		if c.flushed() && !c.destroying && !f.Closing && (c.Closed || c.rx.n == 0) {
			c.destroying = true
			delete(f.byQP, c.number) // the device may give it to another one
			f.Task(func() {
				c.destroy()
				f.Owned(func() {
					c.leave()
					f.visitLater(c)
				})
			})
		}
		return n
	}
	n += c.tx.Complete(c, c.Err, ev[n:])
	if c.tx.Done != c.tx.End {
		return n
	}
	k, over := f.conns.End(c, true, ev[n:])
	if over {
		c.retired = true
		f.lag.leave(c)
		f.made--
	}
	return n + k
}

// due says whether a visit finds something to do.
func (c *Conn) due() bool {
	switch {
	case c.retired:
		return false
	case !c.Closed && (c.Fresh || c.ready()):
		return true
	case c.Err == nil:
		return c.tx.Done != c.tx.Sent || c.tx.over()
	case c.gone:
		return c.tx.Done != c.tx.End || c.Ends(true)
	}
	return c.flushed() && (c.Ends(false) || !c.destroying && !c.f.Closing)
}

// inspect ends c if it owes bytes and nothing has moved for too long. polled says whether our
// user has polled since the last time.
func (c *Conn) inspect(now time.Time, polled bool) {
	limit := c.f.Limits.Stall
	if c.Err == nil && c.Out.Stalled(now, polled && (c.tx.acked != c.tx.prepared || c.tx.cur.active), uint64(c.tx.acked)) >= limit {
		c.end(fmt.Errorf("no progress while bytes are owed for %v: %w", limit, unix.ETIMEDOUT))
	}
}
