package verbs

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	rdma "fserver/cshim/verbs"
	"fserver/engine/transport"
)

const (
	frameRoom  = 64 * slotBytes // of the frames that one Poll gives
	innerEvery = 16             // Polls, where nothing has woken the user
)

// Poll implements transport.Fabric.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	if !f.mu.TryLock() {
		return 0, nil // tear-down or set-up in another goroutine, for a moment
	}
	defer f.mu.Unlock()
	f.frames = f.frames[:0]
	if f.closed {
		n := f.visits(ev)
		if n == 0 && f.queue.n() == 0 {
			return 0, transport.ErrClosed
		}
		return n, nil
	}
	if e := f.broken.Load(); e != nil {
		return 0, e
	}
	f.polls++
	if f.rung {
		f.rung = false
		var b [8]byte
		unix.Read(f.bell, b[:])
	}
	if f.slept {
		if _, err := f.cq.Quiet(); err != nil {
			return 0, err
		}
	}
	if err := f.collect(); err != nil {
		return 0, err
	}
	if f.slept || f.polls%innerEvery == 0 {
		f.askInner()
		f.async()
	}
	f.slept = false
	n := f.visits(ev)
	if f.queue.n() > 0 {
		f.ring()
	}
	return n, nil
}

// collect takes completions to their Conns.
func (f *Fabric) collect() error {
	for {
		n, err := f.cq.Poll(f.found[:])
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		f.counts.Completions += uint64(n)
		for i := range f.found[:n] {
			w := &f.found[i]
			c := f.conns[w.QP]
			if c == nil {
				continue
			}
			if w.ID&recvMark != 0 {
				c.received(w)
			} else {
				c.sent(w)
			}
			f.queue.push(c)
		}
		if n < len(f.found) {
			return nil
		}
	}
}

// visits visits Conns in the order in which they asked for it.
func (f *Fabric) visits(ev []transport.Event) (n int) {
	for left := f.queue.n(); left > 0 && n < len(ev); left-- {
		c := f.queue.pop()
		n += c.visit(ev[n:])
		if c.due() {
			f.queue.push(c)
		}
	}
	return n
}

// visit does what there is to do for c.
func (c *Conn) visit(ev []transport.Event) (n int) {
	if c.retired {
		return 0
	}
	if c.fresh && !c.closed {
		ev[0] = transport.Event{Kind: transport.EvAccept, Conn: c}
		c.fresh = false
		n++
	}
	if !c.gone {
		n += c.complete(ev[n:])
	}
	if !c.closed && !c.gone {
		n += c.give(ev[n:])
	}
	c.repost()
	c.pump()
	if c.err != nil {
		n += c.finish(ev[n:])
	}
	return n
}

// async takes what has happened to the device.
func (f *Fabric) async() {
	for {
		e, found, err := f.dev.Async()
		if err != nil || !found {
			return
		}
		switch e.Type {
		case rdma.DeviceFatal, rdma.CQError:
			for _, c := range f.conns {
				c.end(errors.New(e.Type.String()))
			}
		case rdma.QPFatal, rdma.QPRequest, rdma.QPAccess:
			if c := f.conns[e.Element]; c != nil {
				c.end(errors.New(e.Type.String()))
			}
		}
	}
}

// FD implements transport.Sleeper: an epoll descriptor over Inner's, the completion channel and
// the device's events.
func (f *Fabric) FD() int {
	f.sleep.FD()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.epoll
	}
	f.slept = true
	missed := f.missed.Swap(false)
	err := f.cq.Arm()
	if err == nil {
		err = f.collect() // what came before does not count
	}
	if err != nil || missed || f.queue.n() > 0 {
		f.ring()
	}
	return f.epoll
}

var one = [8]byte{1}

func (f *Fabric) ring() {
	if !f.rung {
		f.rung = true
		unix.Write(f.bell, one[:])
	}
}

// visitLater makes the next Poll visit c, and wakes who sleeps. The caller holds f.mu.
func (f *Fabric) visitLater(c *Conn) {
	f.queue.push(c)
	if !f.closed {
		f.ring()
	}
}

// queue holds Conns, each once, in the order in which they came.
type queue struct {
	list []*Conn
	head int
}

func (q *queue) n() int { return len(q.list) - q.head }

func (q *queue) push(c *Conn) {
	if c.queued || c.retired || c.waits {
		return
	}
	c.queued = true
	if q.head > 64 && 2*q.head > len(q.list) {
		n := copy(q.list, q.list[q.head:])
		clear(q.list[n:])
		q.list, q.head = q.list[:n], 0
	}
	q.list = append(q.list, c)
}

func (q *queue) pop() *Conn {
	c := q.list[q.head]
	q.list[q.head] = nil
	if q.head++; q.head == len(q.list) {
		q.list, q.head = q.list[:0], 0
	}
	c.queued = false
	return c
}

// Counts is what a Fabric has asked of its NIC so far.
type Counts struct{ Doorbells, Requests, Completions uint64 }

// Counts returns them.
func (f *Fabric) Counts() Counts {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts
}
