package cma

import (
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Conn is one connection. See transport.Conn.
type Conn struct {
	link.Conn // FD is the socket: bytes that wake, and descriptors of shared memory
	f         *Fabric
	peer      process
	start     uint64 // of both rings

	// The owner of the Fabric guards all below.
	seg          *segment // unmapped when Err is set
	mine, theirs *control
	table        table  // the peer's regions, if writes are direct
	hup          bool   // nothing is sent any more; the peer's records are still read, and then c ends
	broken       error  // why; nil: the peer is gone, or its end of the socket closed
	last         writer // with Err: the peer, if it was in the middle of a copy and may still be
	tx           tx
	rx           rx
}

// Post implements transport.Conn. It copies up to quantum bytes at once; Poll
// goes on with the rest.
func (c *Conn) Post(ops []transport.Op) (n int, err error) {
	if !c.f.Try() {
		return 0, nil
	}
	defer c.f.Owner.Unlock()
	switch {
	case c.Err != nil:
		return 0, c.Err
	case c.hup:
		return 0, c.Because(c.parting())
	}
	n, err = link.Take(ops, c.tx.push)
	if c.tx.unsent() {
		c.f.send(c)
		if c.f.slept && (c.Err != nil || c.tx.unsent()) && c.rest() {
			c.f.Ring() // somebody waits who has not heard of what is left
		}
	}
	return n, err
}

// Unsent implements transport.Conn.
func (c *Conn) Unsent() bool { return c.tx.unsent() }

// due says whether a visit may find something.
func (c *Conn) due() bool {
	if c.Err != nil {
		return c.tx.Done != c.tx.End || c.Ends(c.last.seg == nil)
	}
	return c.rx.peek() != 0 || c.tx.Done != c.tx.End || len(c.tx.freed) > 0 || c.Fresh || c.hup
}

// rest tells the peer to ring, and says whether a visit would find something
// right now.
func (c *Conn) rest() bool {
	if c.Err != nil {
		return c.due()
	}
	bits := uint32(asleepData)
	if c.tx.unsent() {
		bits |= asleepRoom
	}
	c.mine.sleep.Store(bits)
	switch {
	case c.Fresh, c.hup, c.tx.Done != c.tx.Sent, c.rx.peek() != 0:
		return true
	case !c.tx.unsent():
		return false
	}
	return !c.tx.blocked()
}

// ring wakes the peer if it sleeps and waits for one of what bits say.
func (c *Conn) ring(bits uint32) {
	if c.theirs.sleep.Load()&bits != 0 && c.theirs.sleep.Swap(0) != 0 {
		sendByte(c.FD)
	}
}

// parting is why nothing is sent any more.
func (c *Conn) parting() error {
	if c.broken != nil {
		return c.broken
	}
	if c.theirs.over.Load() == overBye {
		return fmt.Errorf("the peer closed the connection: %w", io.EOF)
	}
	return fmt.Errorf("process %d has ended, or closed the connection because of an error: %w", c.peer.pid, io.ErrUnexpectedEOF)
}

// end is fail outside of a visit.
func (c *Conn) end(reason error) {
	c.f.fail(c, reason)
	c.f.Ring()
}

// fail ends c: its socket is closed here, its events are left to the next
// visit.
func (f *Fabric) fail(c *Conn, reason error) {
	if c.Err != nil {
		return
	}
	c.Err = c.Because(reason)
	if c.Closed && !c.Cut && !c.tx.queued() {
		c.mine.over.Store(overBye)
	} else {
		c.mine.over.Store(overCut)
	}
	f.conns.Unwatch(&f.Fabric, c)
	unix.Shutdown(c.FD, unix.SHUT_RDWR) // a child process may hold the socket too
	unix.Close(c.FD)
	if w, found := c.writer(); found {
		c.last = w
		f.settle([]writer{w}, func() { c.last = writer{}; f.Ring() })
	} else {
		c.seg.drop()
	}
	c.table.unmap()
	c.rx.forget()
	c.seg, c.mine, c.theirs, c.table = nil, nil, nil, nil
}

// stalled is for how long what c owes has found no room, or was not let into
// the peer's memory although our own user polled.
func (c *Conn) stalled(now time.Time, polled bool) time.Duration {
	owed := polled && c.tx.queued() && c.tx.balked && c.tx.need == 0
	return c.Out.Stalled(now, owed || c.tx.blocked(), c.theirs.head.Load()+c.tx.moved)
}
