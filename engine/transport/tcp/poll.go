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
	if !f.owner.TryLock() {
		return 0, nil // tear-down or set-up in another goroutine, for a moment
	}
	defer f.owner.Unlock()
	if e := f.broken.Load(); e != nil && !f.closed {
		return 0, e
	}
	return f.poll(ev)
}

func (f *Fabric) poll(ev []transport.Event) (int, error) {
	f.seq++
	if f.rung.Load() {
		f.quiet()
	}
	n, moved, ask := 0, uint64(0), !f.closed
	if c := f.guess(); c != nil && len(ev) > 0 {
		c.readable = true
		n, moved = f.visit(c, ev)
		ask = len(f.conns) > 1 && (n == 0 && !c.hidden || f.seq%4 == 0)
	}
	if ask {
		if err := f.find(); err != nil {
			return n, err
		}
	}
	for left := f.queue.n; left > 0 && n < len(ev) && moved < pollBytes; left-- {
		c := f.queue.pop()
		c.readable = c.readable || c.hidden
		k, m := f.visit(c, ev[n:])
		n += k
		moved += m
	}
	if f.closed {
		if n == 0 && f.queue.n == 0 {
			return 0, transport.ErrClosed
		}
	} else if f.queue.n > 0 {
		f.ring() // epoll does not know of what is left
	}
	return n, nil
}

// guess is the Conn from which all of the last bytes came. Poll reads it before
// it asks epoll, and asks only if that was in vain, or now and then. Spinning
// on one peer in this way takes 1.3 µs off a round trip of 12 µs; reading all
// Conns in vain, at 0.45 µs each, would lose more than that from the third on.
func (f *Fabric) guess() *Conn {
	if c := f.recent; c != nil && f.streak >= 2 && c.err == nil && !c.queued {
		return c
	}
	return nil
}

// hideAfter is after how many reads in a row from one Conn epoll is told to
// leave it alone, until FD is asked for: telling an epoll of each packet, and the
// epoll around that, is a part of what sending to a socket costs.
const hideAfter = 64

// hide says whether epoll is to leave c alone. Of the Conns only recent may be
// hidden.
func (f *Fabric) hide(c *Conn, hidden bool) {
	if c != nil && c.hidden != hidden && c.err == nil {
		c.hidden = hidden
		f.watch(c)
	}
}

// watch tells epoll what to watch c for.
func (f *Fabric) watch(c *Conn) {
	ev := unix.EpollEvent{Fd: int32(c.fd)}
	if !c.hidden {
		ev.Events = unix.EPOLLIN
	}
	if c.armed {
		ev.Events |= unix.EPOLLOUT
	}
	if err := unix.EpollCtl(f.epoll, unix.EPOLL_CTL_MOD, c.fd, &ev); err != nil {
		f.fail(c, fmt.Errorf("watch the socket: %w", err))
	}
}

// find queues the Conns whose sockets are ready.
func (f *Fabric) find() error {
	n, e := epollNow(f.epoll, f.ready[:])
	if e != 0 && e != unix.EINTR {
		return fmt.Errorf("tcp: poll: ask epoll: %w", e)
	}
	for i := range max(n, 0) {
		if c := f.byFD[f.ready[i].Fd]; c != nil {
			c.readable = c.readable || f.ready[i].Events&^unix.EPOLLOUT != 0
			f.queue.push(c)
		}
	}
	return nil
}

// visit does what there is to do for c and returns the number of events and
// of bytes moved. c is queued again if more can be done without waiting for
// its socket.
func (f *Fabric) visit(c *Conn, ev []transport.Event) (n int, moved uint64) {
	before := c.tx.taken + c.rx.came
	if c.announce && !c.closed {
		ev[n] = transport.Event{Kind: transport.EvAccept, Conn: c}
		n++
		c.announce = false
	}
	if c.err == nil && c.txErr == nil && c.unsent() {
		f.send(c)
	}
	n += c.complete(ev[n:])
	if c.err == nil {
		n += f.receive(c, ev[n:])
		if c.err != nil {
			n += c.complete(ev[n:])
		}
	}
	moved = c.tx.taken + c.rx.came - before
	if c.err != nil && c.tx.done == c.tx.tail {
		if c.closed {
			f.retire(c)
			return n, moved
		}
		if n < len(ev) {
			ev[n] = transport.Event{Kind: transport.EvDown, Conn: c, Err: c.err}
			f.retire(c)
			return n + 1, moved
		}
	}
	if c.due() {
		f.queue.push(c)
	}
	return n, moved
}

// retire forgets c, which has no more events to give.
func (f *Fabric) retire(c *Conn) {
	last := len(f.conns) - 1
	f.conns[c.at] = f.conns[last]
	f.conns[c.at].at = c.at
	f.conns[last] = nil
	f.conns = f.conns[:last]
	if f.recent == c {
		f.recent = nil
	}
}

// complete reports operations that have ended.
func (c *Conn) complete(ev []transport.Event) (n int) {
	for n < len(ev) {
		user, sent, ok := c.tx.complete(c.err != nil)
		if !ok {
			break
		}
		ev[n] = transport.Event{Kind: transport.EvDone, Conn: c, User: user}
		if !sent {
			ev[n].Err = c.err
		}
		n++
	}
	return n
}

// send gives the socket up to quantum bytes, and lets epoll watch for room if
// it did not take them all.
func (f *Fabric) send(c *Conn) {
	var n int
	var e unix.Errno
	if c.tls == nil {
		c.tx.gather(&f.vec, quantum)
		n, e = f.vec.send(c.fd)
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
	if watch := full && c.unsent() && c.txErr == nil; watch != c.armed {
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
	return c.rx.rest.Len >= chaseFrom && c == f.recent && f.queue.n == 0
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
	if x.more {
		var bad error
		if n, bad = x.parse(c, ev, f.seq); bad != nil {
			f.fail(c, bad)
			return n
		}
	}
	tries := 0
	for limit := x.came + quantum; fresh && !x.more && n < len(ev) && x.came < limit; {
		x.want(&f.vec, f.seq, limit-x.came)
		if f.vec.n == 0 {
			break
		}
		var k int
		var e unix.Errno
		if c.tls == nil {
			k, e = f.vec.recv(c.fd)
		} else {
			k, e = c.tls.recv(&f.vec)
		}
		if e == unix.EAGAIN || e == unix.EINTR {
			if c.txErr != nil {
				f.fail(c, c.txErr)
				break
			}
			if tries++; tries > chaseTries || !f.chases(c) {
				break
			}
			continue
		}
		if e != 0 {
			f.fail(c, c.failure("receive", e))
			break
		}
		if k == 0 {
			if c.txErr != nil && !errors.Is(c.txErr, unix.EPIPE) {
				f.fail(c, c.txErr) // it took the error that recv would give
			} else {
				f.fail(c, x.end())
			}
			break
		}
		if c != f.recent {
			f.hide(f.recent, false)
			f.recent, f.streak = c, 0
		}
		if f.streak++; f.streak == hideAfter {
			f.hide(c, true)
		}
		x.take(uint64(k))
		m, bad := x.parse(c, ev[n:], f.seq)
		n += m
		if bad != nil {
			f.fail(c, bad)
			break
		}
		if uint64(k) < f.vec.sum && !f.chases(c) {
			break // the socket is empty; epoll or the next Poll finds what comes
		}
	}
	return n
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

// wake makes the next Poll visit c, and whoever sleeps on FD wake up.
func (f *Fabric) wake(c *Conn) {
	f.queue.push(c)
	f.ring()
}

func (f *Fabric) ring() {
	unix.Write(f.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	f.rung.Store(true)
}

func (f *Fabric) quiet() {
	f.rung.Store(false)
	var b [8]byte
	unix.Read(f.bell, b[:])
}

// queue holds Conns, each once, in the order in which they came.
type queue struct {
	ring    []*Conn // its length is a power of two
	head, n int
}

// reserve makes room for n Conns.
func (q *queue) reserve(n int) {
	if n <= len(q.ring) {
		return
	}
	ring := make([]*Conn, max(8, 2*len(q.ring)))
	for i := range q.n {
		ring[i] = q.ring[(q.head+i)&(len(q.ring)-1)]
	}
	q.ring, q.head = ring, 0
}

func (q *queue) push(c *Conn) {
	if c.queued {
		return
	}
	c.queued = true
	q.ring[(q.head+q.n)&(len(q.ring)-1)] = c
	q.n++
}

func (q *queue) pop() *Conn {
	c := q.ring[q.head]
	q.ring[q.head] = nil
	q.head = (q.head + 1) & (len(q.ring) - 1)
	q.n--
	c.queued = false
	return c
}
