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
	asyncEvery = 1024           // Polls, where nothing has woken the user: it is a system call
)

// Poll implements transport.Fabric.
func (f *Fabric) Poll(ev []transport.Event) (int, error) {
	if owner, err := f.Enter(); !owner {
		return 0, err
	}
	defer f.Owner.Unlock()
	f.frames = f.frames[:0]
	if f.Closed {
		n := f.Freed(ev)
		n += f.visits(ev[n:])
		if n == 0 && f.queue.Len() == 0 && f.left {
			return 0, transport.ErrClosed
		}
		return n, nil
	}
	if f.slept && !f.lost {
		if _, err := f.cq.Quiet(); err != nil {
			if !errors.As(deviceError(err), new(*transport.DeviceError)) {
				return 0, err
			}
			f.lose()
		}
	}
	if err := f.collect(); err != nil {
		return 0, err
	}
	if f.slept || f.Seq%asyncEvery == 0 {
		f.async()
	}
	f.slept = false
	n := f.Freed(ev)
	return n + f.visits(ev[n:]), nil
}

// collect takes completions to their Conns.
func (f *Fabric) collect() error {
	for {
		n, err := f.cq.Poll(f.found[:])
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name(), err)
		}
		f.counts.Completions += uint64(n)
		for i := range f.found[:n] {
			w := &f.found[i]
			c := f.byQP[w.QP]
			if c == nil {
				if b := f.back; b != nil && w.QP == b.qp.Number {
					b.completed(f, w)
				}
				continue
			}
			if w.ID&recvMark != 0 {
				c.received(w)
			} else {
				c.sent(w)
			}
			f.push(c)
		}
		if n < len(f.found) {
			f.back.post(f)
			return nil
		}
	}
}

// visits visits Conns in the order in which they asked for it.
func (f *Fabric) visits(ev []transport.Event) (n int) {
	for left := f.queue.Len(); left > 0 && n < len(ev); left-- {
		c := f.queue.Pop()
		n += c.visit(ev[n:])
		if c.due() {
			f.push(c)
		}
	}
	return n
}

// visit does what there is to do for c.
func (c *Conn) visit(ev []transport.Event) (n int) {
	n = c.Accept(c, ev)
	for c.tx.over() {
		c.tx.Sent++
	}
	if !c.gone {
		n += c.tx.Complete(c, nil, ev[n:])
	}
	if !c.Closed && !c.gone {
		n += c.give(ev[n:])
	}
	c.repost()
	c.pump()
	if c.Err != nil {
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
			f.endAll(e.Type)
		case rdma.PortActive, rdma.LIDChange, rdma.GIDChange:
			f.stale = true
		case rdma.QPFatal, rdma.QPRequest, rdma.QPAccess:
			if c := f.byQP[e.QP]; c != nil {
				c.end(errors.New(e.Type.String()))
			}
		}
	}
}

// lose takes note that the kernel has taken the device away. Its descriptors are readable for ever.
func (f *Fabric) lose() {
	f.lost = true
	for _, fd := range []int{f.cq.FD, int(f.dev.FD)} {
		_ = unix.EpollCtl(f.Epoll, unix.EPOLL_CTL_DEL, fd, nil)
	}
	f.endAll(rdma.DeviceFatal)
}

// endAll ends all Conns: nothing is completed any more.
func (f *Fabric) endAll(why rdma.EventType) {
	err := errors.New(why.String())
	for _, c := range f.byQP {
		c.end(err)
	}
	if f.back != nil { // the frames that wait for a read are not given
		f.back.fail(err)
	}
}

// Arm implements transport.Fabric. FD is an epoll descriptor over the completion channel and the
// device's events.
func (f *Fabric) Arm() bool {
	f.Owner.Lock()
	defer f.Owner.Unlock()
	if f.Closed {
		return false
	}
	f.slept = true
	missed := f.Missed.Swap(false)
	err := error(nil)
	if !f.lost { // then nothing wakes who sleeps
		err = f.cq.Arm()
	}
	if err == nil {
		err = f.collect() // what came before does not count
	}
	return err != nil || missed || f.queue.Len() > 0
}

func (f *Fabric) ring() {
	if !f.Rung.Load() {
		f.Ring()
	}
}

// push makes the next Poll visit c.
func (f *Fabric) push(c *Conn) {
	if c.up && !c.retired {
		f.queue.Push(c)
	}
}

// visitLater is push that wakes who sleeps. It is for the owner.
func (f *Fabric) visitLater(c *Conn) {
	f.push(c)
	if !f.Closed {
		f.ring()
	}
}

// Counts is what a Fabric has asked of its NIC so far.
type Counts struct {
	Doorbells, Requests, Completions uint64
	Readbacks                        uint64 // reads of a GPU's memory; see readback
	Refills                          uint64 // doorbells of receive queues; Doorbells are those of send queues
}

// Counts returns them.
func (f *Fabric) Counts() Counts {
	f.Owner.Lock()
	defer f.Owner.Unlock()
	return f.counts
}
