package link

import (
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
)

// Over is a Fabric over another one, whose names, addresses and abilities it has.
type Over struct {
	transport.Fabric       // the inner one
	fds              []int // for epoll, and the timer
}

// Open makes a descriptor of its own to sleep on, over the inner Fabric's and a timer. Shut closes
// it, also after an error.
func (o *Over) Open() error {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	o.fds = append(o.fds, epoll)
	timer, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return err
	}
	o.fds = append(o.fds, timer)
	for _, fd := range []int{o.Fabric.FD(), timer} {
		if err = unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
			return err
		}
	}
	return nil
}

// Shut closes what Open has opened. It is called once, and no Wake at the same time.
func (o *Over) Shut() {
	for _, fd := range o.fds {
		unix.Close(fd)
	}
	if len(o.fds) == 2 {
		o.fds[1] = -1 // a Wake may come
	}
}

// FD implements transport.Fabric. Without Open, it is the inner Fabric's.
func (o *Over) FD() int {
	if len(o.fds) == 0 {
		return o.Fabric.FD()
	}
	return o.fds[0]
}

// Wake makes FD readable after some time; with 0, it does not.
func (o *Over) Wake(after time.Duration) {
	if len(o.fds) == 2 {
		_ = unix.TimerfdSettime(o.fds[1], 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(after))}, nil)
	}
}

// The top bits of Op.User belong to Fabrics around others. One that hands on its user's operations with their own User
// marks those of its own with its bit, and refuses a User that has it.
const (
	StageMark  = 1 << 63 // of the Fabric that stages
	MappedMark = 1 << 62 // of a Fabric over that one
)

// OverConn is a Conn over an inner one. It keeps the owners of operations on the inner Conn by the operation's User. A
// User without the Mark is its user's own, and so is the operation; the Mark alone has no owner.
type OverConn[T any] struct {
	transport.Conn        // the inner one
	Mark           uint64 // 0: all operations have an owner, or User 0
	Open           int    // operations with an owner that it has not ended
	owners         []T    // by their User, from 1 on
	free           []uint64
	scratch        [3]transport.Op
}

// Pass is PassAs for an operation of owner's.
func (c *OverConn[T]) Pass(op *transport.Op, owner T, behind []byte, then *transport.Op) (taken int, err error) {
	if len(c.free) == 0 {
		c.owners = append(c.owners, owner)
		c.free = append(c.free, uint64(len(c.owners)))
	}
	last := len(c.free) - 1
	user := c.free[last]
	c.owners[user-1] = owner
	taken, err = c.PassAs(op, user|c.Mark, behind, then)
	if taken > 0 {
		c.Open++
		c.free = c.free[:last]
	}
	return taken, err
}

// PassAs posts an operation on the inner Conn with another User, right behind it a frame of ours that passes, if it
// is not empty, and then another operation as it is, if there is one. It returns how many of them were taken.
func (c *OverConn[T]) PassAs(op *transport.Op, user uint64, behind []byte, then *transport.Op) (taken int, err error) {
	ops := append(c.scratch[:0], *op)
	ops[0].User = user
	if len(behind) > 0 {
		ops = append(ops, transport.Op{Kind: transport.OpFrame, Frame: behind, User: c.Mark, Passes: true})
	}
	if then != nil {
		ops = append(ops, *then)
	}
	taken, err = c.Conn.Post(ops)
	clear(c.scratch[:])
	return taken, err
}

// Whose returns the owner of an operation that has ended; false if it has none.
func (c *OverConn[T]) Whose(user uint64) (owner T, known bool) {
	if user &^= c.Mark; user == 0 {
		return owner, false
	}
	c.Open--
	c.free = append(c.free, user)
	at := &c.owners[user-1]
	owner, *at = *at, owner
	return owner, true
}

// Found is what one Poll has found.
type Found struct {
	Events []transport.Event
	N      int
}

// Room says whether there is room for one more event.
func (p *Found) Room() bool { return p.N < len(p.Events) }

// Put takes an event, for which there is room.
func (p *Found) Put(e transport.Event) {
	p.Events[p.N] = e
	p.N++
}

// Drop drops the loan of an event, if it has one. Call it for an event that nobody is given.
func Drop(e *transport.Event) {
	if e.View != nil {
		_ = e.View.Drop() // our own mapping
		e.View = nil
	}
}
