package cma

import (
	"errors"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

const (
	// quantum is how many bytes one call copies at most, and so what one visit
	// to a Conn moves in each direction.
	quantum = 1 << 20
	// pollBytes is after how many bytes Poll visits no further Conn.
	pollBytes = 2 << 20
	// lookEvery is after how many Polls without a look at the sockets there is
	// one: a look costs as much as some ten Polls that find nothing.
	lookEvery = 1024
)

// Poll implements transport.Fabric.
func (f *Fabric) Poll(ev []transport.Event) (n int, err error) {
	if owner, err := f.Enter(); !owner {
		return 0, err
	}
	defer f.Owner.Unlock()
	if freed := mem.SharedFreed(); freed != f.freed {
		f.freed = freed
		for _, c := range f.conns.All {
			c.tx.recall()
		}
	}
	f.arena = f.arena[:0]
	if !f.Closed && (f.slept || f.Seq%lookEvery == 0) {
		if err := f.look(); err != nil {
			return 0, err
		}
	}
	n = f.Freed(ev)
	moved := uint64(0)
	for left := len(f.conns.All); left > 0 && n < len(ev) && moved < pollBytes; left-- {
		if f.next >= len(f.conns.All) {
			f.next = 0
		}
		c := f.conns.All[f.next]
		f.next++
		if c.due() {
			k, m := f.visit(c, ev[n:])
			n += k
			moved += m
		}
	}
	if f.Closed && n == 0 && len(f.conns.All) == 0 {
		return 0, transport.ErrClosed
	}
	return n, nil
}

// look reads what woke us, and finds peers that are gone.
func (f *Fabric) look() error {
	if f.slept {
		f.slept = false
		for _, c := range f.conns.All {
			if c.Err == nil {
				c.mine.sleep.Store(0)
			}
		}
	}
	ready, err := f.Ready()
	for i := range ready {
		if c := f.conns.At(ready[i].Fd); c != nil {
			f.hear(c)
		}
	}
	return err
}

// visit does what there is to do for c and returns the number of events and
// of bytes moved.
func (f *Fabric) visit(c *Conn, ev []transport.Event) (n int, moved uint64) {
	before := c.tx.moved
	n = c.Accept(c, ev)
	if c.Err == nil && !c.hup && c.tx.unsent() {
		f.send(c)
	}
	n += c.tx.Complete(c, c.Err, ev[n:])
	if c.Err == nil {
		k, m := f.receive(c, ev[n:])
		n += k
		moved = m
		if c.Err == nil && c.hup && c.rx.peek() == 0 {
			f.fail(c, c.parting())
		}
		if c.Err != nil {
			n += c.tx.Complete(c, c.Err, ev[n:])
		}
	}
	moved += c.tx.moved - before
	if c.Err != nil && c.tx.Done == c.tx.End {
		k, _ := f.conns.End(c, c.last.seg == nil, ev[n:])
		n += k
	}
	return n, moved
}

// part ends what c sends, because the peer is gone or for a reason of our own. What the peer has sent is still read, and
// then c ends.
func (f *Fabric) part(c *Conn, reason error) {
	if c.hup {
		return
	}
	c.hup, c.broken = true, reason
	f.conns.Unwatch(&f.Fabric, c)
}

// send moves up to quantum bytes of writes, and puts into the ring what has
// room there.
func (f *Fabric) send(c *Conn) {
	t := &c.tx
	for end := t.moved + quantum; ; {
		err := t.publish(end)
		t.commit()
		if err != nil { // the peer's fault
			f.fail(c, err)
			return
		}
		var n uint64
		if t.direct && t.queued() && t.need == 0 && t.moved < end {
			n, err = c.copy(&f.vec, end-t.moved)
			t.balked = n == 0
		}
		switch {
		case errors.Is(err, unix.ESRCH):
			f.part(c, nil) // the process is gone
			return
		case err != nil:
			f.part(c, err)
			return
		}
		if n == 0 {
			break
		}
	}
	c.ring(asleepData)
}
