package cma

import (
	"fmt"

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

func (f *Fabric) poll(ev []transport.Event) (n int, err error) {
	f.seq++
	if freed := mem.SharedFreed(); freed != f.freed {
		f.freed = freed
		for _, c := range f.conns {
			c.tx.recall()
		}
	}
	f.arena = f.arena[:0]
	if !f.closed && (f.slept || f.seq%lookEvery == 0) {
		if err := f.look(); err != nil {
			return 0, err
		}
	}
	moved := uint64(0)
	for left := len(f.conns); left > 0 && n < len(ev) && moved < pollBytes; left-- {
		if f.next >= len(f.conns) {
			f.next = 0
		}
		c := f.conns[f.next]
		f.next++
		if c.err != nil || c.due() {
			k, m := f.visit(c, ev[n:])
			n += k
			moved += m
		}
	}
	if f.closed && n == 0 && len(f.conns) == 0 {
		return 0, transport.ErrClosed
	}
	return n, nil
}

// look reads what woke us, and finds peers that are gone.
func (f *Fabric) look() error {
	if f.slept {
		f.slept = false
		for _, c := range f.conns {
			if c.err == nil {
				c.mine.sleep.Store(0)
			}
		}
	}
	n, e := epollNow(f.epoll, f.ready[:])
	if e != 0 && e != unix.EINTR {
		return fmt.Errorf("cma: poll: epoll_wait: %w", e)
	}
	for i := range max(n, 0) {
		fd := int(f.ready[i].Fd)
		if fd == f.bell {
			unix.Read(f.bell, f.letter.bytes[:8])
			continue
		}
		c := f.byFD[fd]
		if c == nil {
			continue
		}
		f.hear(c)
	}
	return nil
}

func (f *Fabric) watch(c *Conn) error {
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP, Fd: int32(c.fd)}
	if err := unix.EpollCtl(f.epoll, unix.EPOLL_CTL_ADD, c.fd, &ev); err != nil {
		return fmt.Errorf("watch the socket: %w", err)
	}
	f.byFD[c.fd] = c
	return nil
}

func (f *Fabric) unwatch(c *Conn) {
	if f.byFD[c.fd] == c {
		delete(f.byFD, c.fd)
		unix.EpollCtl(f.epoll, unix.EPOLL_CTL_DEL, c.fd, &unix.EpollEvent{})
	}
}

// visit does what there is to do for c and returns the number of events and
// of bytes moved.
func (f *Fabric) visit(c *Conn, ev []transport.Event) (n int, moved uint64) {
	before := c.tx.moved
	if c.announce && !c.closed {
		ev[n] = transport.Event{Kind: transport.EvAccept, Conn: c}
		n++
		c.announce = false
	}
	if c.err == nil && !c.hup && c.tx.unsent() {
		f.send(c)
	}
	n += c.complete(ev[n:])
	if c.err == nil {
		k, m := f.receive(c, ev[n:])
		n += k
		moved = m
		if c.err == nil && c.hup && c.rx.peek() == 0 {
			f.fail(c, c.parting())
		}
		if c.err != nil {
			n += c.complete(ev[n:])
		}
	}
	moved += c.tx.moved - before
	if c.err != nil && c.tx.done == c.tx.end && (c.closed || n < len(ev)) {
		if !c.closed {
			ev[n] = transport.Event{Kind: transport.EvDown, Conn: c, Err: c.err}
			n++
		}
		f.retire(c)
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

// send moves up to quantum bytes of writes, and puts into the ring what has
// room there.
func (f *Fabric) send(c *Conn) {
	t := &c.tx
	for end := t.moved + quantum; ; {
		err := t.publish(end)
		t.commit()
		var n uint64
		if err == nil && t.direct && t.queued() && t.need == 0 && t.moved < end {
			n, err = c.copy(&f.vec, end-t.moved)
			t.balked = n == 0
		}
		if err != nil {
			f.fail(c, err)
			return
		}
		if n == 0 {
			break
		}
	}
	c.ring(asleepData)
}

// ring makes the next Poll look, and whoever sleeps on FD wake up.
func (f *Fabric) ring() {
	unix.Write(f.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0})
}
