package verbs

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

const (
	slotBytes = 8 << 10 // of one message; longer frames travel in pieces
	slots     = 32      // that each side posts for frames, and has for what it sends
	spare     = 4       // more, for messages that only return credits: two at a time at most
	sendRoom  = 128     // requests in a send queue
	words     = 4       // of 8 bytes, for messages that only return credits
	bufBytes  = (2*slots+spare)*slotBytes + words*headLen
)

// Conn is one queue pair. See transport.Conn.
type Conn struct {
	f          *Fabric
	inner      transport.Conn
	qp         *rdma.QP
	mr         rdma.Region // of buf
	registered bool
	buf        mem.Region // send slots, receive slots, words
	psn        uint32

	// Setting up. Fabric.mu guards it, but ready is for any goroutine.
	waits   bool          // for the peer to tell of its queue pair; there is none of ours yet
	asked   bool          // it has
	ready   chan struct{} // a dialer's: closed when peer or refusal is there
	peer    place
	refusal error
	since   time.Time
	joined  bool // a listener's: the dialer has said so
	up      bool // both ends may send

	// Fabric.mu guards all below.
	queued     bool
	fresh      bool  // EvAccept is still to be given
	closed     bool  // by its own user: no EvDown
	err        error // why it ended
	ended      time.Time
	failed     bool // the queue pair is in its error state
	late       bool // what was posted has not come back in time
	destroying bool
	gone       bool // the queue pair is destroyed
	retired    bool // no event is left to give
	number     uint32
	why        string
	tx         tx
	rx         rx
	seen       uint32 // of inspect
	moved      time.Time
}

// Post implements transport.Conn. What there is room and credit for goes to the NIC at once, with
// one doorbell.
func (c *Conn) Post(ops []transport.Op) (int, error) {
	f := c.f
	if !f.mu.TryLock() {
		f.missed.Store(true)
		return 0, nil // tear-down or set-up in another goroutine: a moment of back-pressure
	}
	defer f.mu.Unlock()
	n := 0
	for c.err == nil && n < len(ops) {
		taken, err := c.take(&ops[n])
		if err != nil {
			c.pump()
			return n, err
		}
		if !taken {
			break
		}
		n++
	}
	if c.err != nil {
		return n, c.err
	}
	c.pump()
	return n, c.err
}

// Close implements transport.Conn.
func (c *Conn) Close() error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.closed = true
	c.end(transport.ErrClosed)
	c.f.visitLater(c)
	return nil
}

// Hello implements transport.Conn: Inner's Gate has verified it.
func (c *Conn) Hello() []byte { return c.inner.Hello() }

// Remote implements transport.Conn.
func (c *Conn) Remote() string { return c.inner.Remote() }

// Unsent implements transport.Unsender.
func (c *Conn) Unsent() bool { return c.tx.cur.active || c.tx.posted != c.tx.prepared }

// Via implements transport.Teller.
func (c *Conn) Via() string { return "verbs" }

// Why implements transport.Teller.
func (c *Conn) Why() string { return c.why }

// arrive notes that the dialer may send.
func (c *Conn) arrive() {
	c.up, c.fresh = true, true
	c.f.visitLater(c)
}

// end ends c: nothing more is posted, and the peer is told why, unless it was a close in
// good order. The caller holds Fabric.mu.
func (c *Conn) end(why error) {
	if c.err != nil {
		return
	}
	f := c.f
	c.err = fmt.Errorf("verbs: %s: %w", c.inner.Remote(), why)
	c.ended = time.Now()
	told := !c.closed && !errors.Is(why, io.EOF)
	c.closed = c.closed || !c.up // nobody has heard of it
	if told {
		text := append([]byte{setEnd}, why.Error()...)
		op := []transport.Op{{Kind: transport.OpFrame, Frame: text[:min(len(text), 1000)]}}
		for range 1000 { // Inner refuses while it sets a connection up
			if n, err := c.inner.Post(op); n != 0 || err != nil {
				break
			}
			runtime.Gosched()
		}
	}
	_ = c.inner.Close()
	if c.qp != nil && !f.closing {
		f.task(func() {
			_ = c.qp.Fail() // of a device that is gone; then late ends the wait
			f.mu.Lock()
			c.failed = true
			f.visitLater(c)
			f.mu.Unlock()
		})
	}
	f.visitLater(c)
}

// destroy gives back what make took. It may block.
func (c *Conn) destroy() {
	if c.gone {
		return
	}
	c.gone = true
	if c.qp != nil {
		_ = c.qp.Destroy()
	}
	for i := range c.tx.ops {
		c.tx.ops[i].release()
	}
	if c.registered {
		_ = c.mr.Deregister()
	}
	if c.buf.Len != 0 {
		_ = mem.Unmap(c.buf)
	}
}

// flushed says whether all that was posted has come back, or never will.
func (c *Conn) flushed() bool {
	return c.failed && (c.late || c.tx.sqAcked == c.tx.sq && c.rx.posted == 0)
}

// finish is the end of c: it gives what events it can.
func (c *Conn) finish(ev []transport.Event) (n int) {
	f := c.f
	if !c.gone {
		if c.flushed() && !c.destroying && !f.closing && (c.closed || c.rx.n == 0) {
			c.destroying = true
			f.task(func() {
				c.qp.Destroy()
				f.mu.Lock()
				defer f.mu.Unlock()
				c.qp = nil
				c.destroy()
				f.visitLater(c)
			})
		}
		return 0
	}
	n = c.complete(ev)
	if c.tx.opDone != c.tx.opTail {
		return n
	}
	if !c.closed && !c.waits {
		if n == len(ev) {
			return n
		}
		ev[n] = transport.Event{Kind: transport.EvDown, Conn: c, Err: c.err}
		n++
	}
	c.retire()
	return n
}

// retire forgets c, which has no more events to give.
func (c *Conn) retire() {
	if c.f.inners[c.inner] == c {
		delete(c.f.inners, c.inner)
		c.f.made--
	}
	if c.f.conns[c.number] == c {
		delete(c.f.conns, c.number)
	}
	c.err, c.closed = c.because(), true
	c.retired = true
}

func (c *Conn) because() error {
	if c.err == nil {
		return transport.ErrClosed
	}
	return c.err
}

// due says whether a visit finds something to do.
func (c *Conn) due() bool {
	if c.retired {
		return false
	}
	if c.fresh && !c.closed || c.rx.n > 0 && !c.closed {
		return true
	}
	if c.err == nil {
		return c.tx.ready()
	}
	return c.gone || c.flushed() && !c.destroying && !c.f.closing
}

// inspect ends c if it owes bytes and nothing has moved for too long. polled says whether our
// user has polled since the last time.
func (c *Conn) inspect(now time.Time, polled bool) {
	f := c.f
	switch {
	case c.waits || !c.up && c.ready == nil:
		if now.Sub(c.since) > f.limits.Handshake {
			c.lost(errors.New("the dialer did not finish the set-up"))
		}
	case c.err != nil:
		if c.failed && !c.late && now.Sub(c.ended) > time.Second {
			c.late = true
			f.visitLater(c)
		}
	case !c.up || !polled || c.tx.acked == c.tx.prepared && !c.tx.cur.active || c.seen != c.tx.acked:
		c.seen, c.moved = c.tx.acked, now
	case now.Sub(c.moved) >= f.limits.Stall:
		c.end(fmt.Errorf("no progress while bytes are owed for %v: %w", f.limits.Stall, unix.ETIMEDOUT))
	}
}
