package tcp

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

const (
	// quantum is how many bytes one system call moves at most, and so what one
	// visit to a Conn moves in each direction. On loopback that takes 0.25 ms;
	// half of it costs a tenth of the throughput, and more gains nothing. It is
	// a little over 1 MiB, so that a tensor of that size goes out in one call
	// with its header and the frame behind it.
	quantum = 1<<20 + 4<<10
	// pollBytes is after how many bytes Poll visits no further Conn.
	pollBytes = 2 << 20
)

// Poll implements transport.Fabric.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	if owner, err := f.Enter(); !owner {
		return 0, err
	}
	defer f.Owner.Unlock()
	n, moved, ask := f.Freed(ev), uint64(0), !f.Closed
	if c := f.guess(); c != nil && len(ev) > n {
		c.readable = true
		k := 0
		k, moved = f.visit(c, ev[n:])
		n += k
		ask = len(f.conns.All) > 1 && (n == 0 && !c.hidden || f.Seq%4 == 0)
	}
	if ask {
		if err := f.find(); err != nil {
			return n, err
		}
	}
	for left := f.queue.Len(); left > 0 && n < len(ev) && moved < pollBytes; left-- {
		c := f.queue.Pop()
		c.readable = c.readable || c.hidden
		k, m := f.visit(c, ev[n:])
		n += k
		moved += m
	}
	if f.Closed && n == 0 && f.queue.Len() == 0 {
		return 0, transport.ErrClosed
	}
	return n, nil
}

// guess is the Conn from which all of the last bytes came. Poll reads it before
// it asks epoll, and asks only if that was in vain, or now and then. Spinning
// on one peer in this way takes 1.3 µs off a round trip of 12 µs; reading all
// Conns in vain, at 0.45 µs each, would lose more than that from the third on.
func (f *Fabric) guess() *Conn {
	if c := f.recent; c != nil && f.streak >= 2 && c.Err == nil && !c.Queued() {
		return c
	}
	return nil
}

// hideAfter is after how many reads in a row from one Conn its socket is taken out of
// epoll, until Arm: telling an epoll of each packet, and the epoll around that, is a part
// of what sending to a socket costs, 0.3 µs of a round trip even if it watches for nothing.
const hideAfter = 64

// hide says whether epoll is to leave c alone. Of the Conns only recent may be
// hidden.
func (f *Fabric) hide(c *Conn, hidden bool) {
	if c != nil && c.hidden != hidden && c.Err == nil {
		c.hidden = hidden
		f.watch(c)
	}
}

// watch tells epoll what to watch c for, and ends c if it does not take that.
func (f *Fabric) watch(c *Conn) {
	ev := unix.EpollEvent{Fd: int32(c.FD)}
	if !c.hidden {
		ev.Events = unix.EPOLLIN
	}
	if c.armed {
		ev.Events |= unix.EPOLLOUT
	}
	how := unix.EPOLL_CTL_MOD
	switch {
	case ev.Events == 0:
		how, c.outside = unix.EPOLL_CTL_DEL, true
	case c.outside:
		how, c.outside = unix.EPOLL_CTL_ADD, false
	}
	if err := unix.EpollCtl(f.Epoll, how, c.FD, &ev); err != nil {
		c.end(fmt.Errorf("watch the socket: %w", err))
	}
}

// find queues the Conns whose sockets are ready.
func (f *Fabric) find() error {
	ready, err := f.Ready()
	for i := range ready {
		if c := f.conns.At(ready[i].Fd); c != nil {
			c.readable = c.readable || ready[i].Events&^unix.EPOLLOUT != 0
			f.push(c)
		}
	}
	return err
}

// visit does what there is to do for c and returns the number of events and
// of bytes moved. c is queued again if more can be done without waiting for
// its socket.
func (f *Fabric) visit(c *Conn, ev []transport.Event) (n int, moved uint64) {
	before := c.tx.taken + c.rx.came
	n = c.Accept(c, ev)
	if c.Err == nil && c.txErr == nil && c.Unsent() {
		f.send(c)
	}
	n += c.tx.Complete(c, c.Err, ev[n:])
	if c.Err == nil {
		n += f.receive(c, ev[n:])
		if c.Err != nil {
			n += c.tx.Complete(c, c.Err, ev[n:])
		}
	}
	moved = c.tx.taken + c.rx.came - before
	if c.Err != nil && c.tx.Done == c.tx.End {
		k, over := f.conns.End(c, true, ev[n:])
		if n += k; over {
			if f.recent == c {
				f.recent = nil
			}
			return n, moved
		}
	}
	if c.due() {
		f.push(c)
	}
	return n, moved
}

// send gives the socket up to quantum bytes, and lets epoll watch for room if
// it did not take them all.
func (f *Fabric) send(c *Conn) {
	var n int
	var e unix.Errno
	if c.tls == nil {
		c.tx.gather(&f.vec, quantum)
		n, e = f.vec.send(c.FD)
	} else {
		c.tx.gather(&f.vec, sealQuantum)
		n, e = c.tls.send(&f.vec)
	}
	full := true
	switch e {
	case 0:
		c.tx.advance(uint64(n))
		full = uint64(n) < f.vec.sum || c.tls != nil && c.tls.unsent()
	case unix.EAGAIN, unix.EINTR:
	default:
		c.txErr = c.failure("send", e)
	}
	if watch := full && c.Unsent() && c.txErr == nil; watch != c.armed {
		c.armed = watch
		f.watch(c)
	}
}

const (
	chaseFrom  = 32 << 10 // bytes of a payload that are still to come
	chaseTries = 8        // reads in vain, some 4 µs, before receive returns
)

// chases says whether receive is to ask c's socket again at once when it has read all
// there is: in the middle of a payload, when no other Conn is known to have anything. A packet that
// finds the reader in the kernel is left to him, and one that does not is worked off on the
// sender's core, which is then the slower of the two. On loopback a round trip of 1 MiB took 1.11 and
// 1.20 times the raw one with it, 1.23 and 1.34 without (medians, two cores).
func (f *Fabric) chases(c *Conn) bool {
	return c.rx.rest.Len >= chaseFrom && c == f.recent && f.queue.Len() == 0
}

// receive reads what c's socket has, up to quantum bytes, and turns it into
// events.
func (f *Fabric) receive(c *Conn, ev []transport.Event) (n int) {
	x := &c.rx
	if len(ev) == 0 {
		return 0
	}
	fresh := c.readable || c.txErr != nil || c.tls != nil && c.tls.more
	c.readable = false
	var bad error
	if x.more {
		n, bad = x.parse(c, ev, f.Seq)
	}
	tries := 0
	for limit := x.came + quantum; bad == nil && fresh && !x.more && n < len(ev) && x.came < limit; {
		if bad = x.idle(); bad != nil {
			break
		}
		x.want(&f.vec, f.Seq, limit-x.came)
		if f.vec.n == 0 {
			break
		}
		k, e := c.read(&f.vec)
		if bad = c.broken(k, e); bad != nil {
			break
		}
		if e != 0 {
			if tries++; tries > chaseTries || !f.chases(c) {
				break
			}
			continue
		}
		f.heard(c)
		x.take(uint64(k))
		var m int
		m, bad = x.parse(c, ev[n:], f.Seq)
		n += m
		if uint64(k) < f.vec.sum && !f.chases(c) {
			break // the socket is empty; epoll or the next Poll finds what comes
		}
	}
	if bad != nil {
		f.fail(c, bad)
	}
	return n
}

// read fills the memory of v.
func (c *Conn) read(v *vec) (int, unix.Errno) {
	if c.tls != nil {
		return c.tls.recv(v)
	}
	return v.recv(c.FD)
}

// broken is why c has ended, if it has, when a read has brought k bytes or e.
func (c *Conn) broken(k int, e unix.Errno) error {
	switch {
	case e == unix.EAGAIN || e == unix.EINTR:
		return c.txErr
	case e != 0:
		return c.failure("receive", e)
	case k > 0:
		return nil
	case c.txErr != nil && !errors.Is(c.txErr, unix.EPIPE):
		return c.txErr // it took the error that recv would give
	}
	return c.rx.end()
}

// heard notes that bytes came from c.
func (f *Fabric) heard(c *Conn) {
	if c != f.recent {
		f.hide(f.recent, false)
		f.recent, f.streak = c, 0
	}
	if f.streak++; f.streak == hideAfter {
		f.hide(c, true)
	}
}

// failure describes an error of a system call, or of TLS in its place.
func (c *Conn) failure(call string, e unix.Errno) error {
	if e == unix.EPROTO && c.tls != nil && c.tls.bad != nil {
		return fmt.Errorf("%s: %w", call, c.tls.bad)
	}
	switch e {
	case unix.ECONNRESET, unix.EPIPE, unix.ETIMEDOUT, unix.EHOSTUNREACH, unix.ENETUNREACH:
		return e // says all
	}
	return fmt.Errorf("%s: %w", call, e)
}

// push makes the next Poll visit c.
func (f *Fabric) push(c *Conn) { f.queue.Push(c) }

// wake makes the next Poll visit c, and whoever sleeps on FD wake up.
func (f *Fabric) wake(c *Conn) {
	f.push(c)
	f.Ring()
}
