package cma

import (
	"fmt"
	"io"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// Conn is one connection. See transport.Conn.
type Conn struct {
	f      *Fabric
	fd     int // the socket: bytes that wake, and descriptors of shared memory
	remote string
	hello  []byte
	peer   process
	why    string
	start  uint64 // of both rings

	// The owner of the Fabric guards all below.
	seg          *segment // unmapped when err is set
	mine, theirs *control
	table        table // the peer's regions, if writes are direct
	at           int   // index in Fabric.conns
	announce     bool  // EvAccept is still to be given
	hup          bool  // the peer's end of the socket is closed; its records are still read
	closed       bool  // by its own user: no EvDown
	err          error // why all ended; the socket is closed
	tx           tx
	rx           rx
	stuck        progress
}

// Post implements transport.Conn. It copies up to quantum bytes at once; Poll
// goes on with the rest.
func (c *Conn) Post(ops []transport.Op) (int, error) {
	if !c.f.owner.TryLock() {
		c.f.missed.Store(true)
		return 0, nil // tear-down or set-up in another goroutine: a moment of back-pressure
	}
	defer c.f.owner.Unlock()
	return c.post(ops)
}

func (c *Conn) post(ops []transport.Op) (n int, err error) {
	if c.err != nil {
		return 0, c.err
	}
	if c.hup {
		return 0, c.because(c.parting())
	}
	for n < len(ops) {
		taken, bad := c.tx.push(&ops[n])
		if err = bad; !taken {
			break
		}
		n++
	}
	if c.tx.unsent() {
		c.f.send(c)
		if c.f.slept && (c.err != nil || c.tx.unsent()) {
			// Somebody waits who has not heard of what is left.
			if c.rest() {
				c.f.ring()
			}
		}
	}
	return n, err
}

// Close implements transport.Conn.
func (c *Conn) Close() error {
	c.f.owner.Lock()
	defer c.f.owner.Unlock()
	c.close()
	return nil
}

func (c *Conn) close() {
	c.closed = true
	if c.err == nil {
		c.f.fail(c, transport.ErrClosed)
		c.f.ring()
	}
}

// Hello implements transport.Conn.
func (c *Conn) Hello() []byte { return c.hello }

// Remote implements transport.Conn.
func (c *Conn) Remote() string { return c.remote }

// Unsent implements transport.Unsender.
func (c *Conn) Unsent() bool { return c.tx.unsent() }

// Via says how writes travel: "cma", straight into the peer's memory, or
// "cma/staged", through memory that both share.
func (c *Conn) Via() string {
	if c.tx.direct {
		return "cma"
	}
	return "cma/staged"
}

// Why is the reason for which writes are staged; empty if they are not.
func (c *Conn) Why() string { return c.why }

// due says whether a visit may find something.
func (c *Conn) due() bool {
	return c.rx.peek() != 0 || c.tx.done != c.tx.end || len(c.tx.freed) > 0 || c.announce || c.hup
}

// rest tells the peer to ring, and says whether a visit would find something
// right now.
func (c *Conn) rest() bool {
	if c.err != nil {
		return true
	}
	bits := uint32(asleepData)
	if c.tx.unsent() {
		bits |= asleepRoom
	}
	c.mine.sleep.Store(bits)
	switch {
	case c.announce, c.hup, c.tx.done != c.tx.sent, c.rx.peek() != 0:
		return true
	case !c.tx.unsent():
		return false
	case c.tx.need == 0:
		return true
	}
	_, _, ok, err := c.tx.place(c.tx.need)
	return ok || err != nil
}

// Dead implements transport.Mortal.
func (c *Conn) Dead() (dead, known bool) {
	return c.peer.start != "" && c.peer.dead(), c.peer.start != ""
}

// ring wakes the peer if it sleeps and waits for one of what bits say.
func (c *Conn) ring(bits uint32) {
	if c.theirs.sleep.Load()&bits != 0 && c.theirs.sleep.Swap(0) != 0 {
		sendByte(c.fd)
	}
}

// because wraps the reason for which c ended.
func (c *Conn) because(reason error) error {
	return fmt.Errorf("cma: %s: %w", c.remote, reason)
}

// parting is the reason of a peer whose socket is closed.
func (c *Conn) parting() error {
	if c.theirs.over.Load() == overBye {
		return fmt.Errorf("the peer closed the connection: %w", io.EOF)
	}
	return fmt.Errorf("process %d has ended, or closed the connection because of an error: %w", c.peer.pid, io.ErrUnexpectedEOF)
}

// fail ends c: its socket is closed here, its events are left to the next
// visit. Outside of a visit, ring must follow.
func (f *Fabric) fail(c *Conn, reason error) {
	if c.err != nil {
		return
	}
	c.err = c.because(reason)
	if c.closed && !c.tx.queued() {
		c.mine.over.Store(overBye)
	} else {
		c.mine.over.Store(overCut)
	}
	f.unwatch(c)
	unix.Shutdown(c.fd, unix.SHUT_RDWR) // a child process may hold the socket too
	unix.Close(c.fd)
	if w, found := c.revoke(); found {
		f.writers = append(f.writers, w)
	}
	c.seg.drop()
	c.table.unmap()
	c.rx.forget()
	c.seg, c.mine, c.theirs, c.table = nil, nil, nil, nil
}

// progress watches whether the peer lets the queue move.
type progress struct {
	owed  bool // the queue waits for the peer
	count uint64
	since time.Time // when that was first seen with this count
}

// stalled is for how long what c owes has found no room, or was not let into
// the peer's memory.
func (c *Conn) stalled(now time.Time) time.Duration {
	owed := c.tx.queued() && c.tx.balked
	if c.tx.need > 0 {
		_, _, ok, err := c.tx.place(c.tx.need)
		owed = !ok && err == nil
	}
	count := c.theirs.head.Load() + c.tx.moved
	if !owed || !c.stuck.owed || count != c.stuck.count {
		c.stuck = progress{owed, count, now}
	}
	return now.Sub(c.stuck.since)
}
