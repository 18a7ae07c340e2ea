package cudaipc

import (
	"fmt"

	"fserver/cshim/cuda"
	"fserver/engine/transport"
)

// A job says what an operation of inner belongs to.
type job struct {
	user  uint64 // an operation of the user's own
	ours  bool   // or one of ours
	piece *item  // or a piece of this one
	buf   uint8  // the piece's buffer
}

// An item is an operation that involves a GPU, or a frame or loan that waits for one.
type item struct {
	op     transport.Op
	n      uint64 // bytes
	way    uint8
	number uint64 // wayMapped: of the write; wayBehind: of the last one before; wayStaged: of the first copy
	sent   uint64 // wayStaged: bytes whose copy has been started
	passed uint64 // wayStaged: bytes that inner has, or had
	open   int    // wayStaged: pieces that inner has
	err    error
	over   bool   // it has been told
	frame  []byte // the bytes of op.Frame; the buffer is used again
}

const (
	wayNone   = iota // not decided
	wayHeld          // memory of the GPU that inner reads, behind a point in a stream
	wayBehind        // a frame or a loan, behind what was posted before it
	wayMapped        // into the peer's memory
	wayStaged        // in pieces, through host memory
)

// queueMost bounds the bytes of the frames in items. A single frame may be larger.
const queueMost = 4 << 20

// order posts a frame or a loan. One that passes goes to inner at once. Any other one goes when
// everything before it has been started and is with inner, and else becomes an item.
func (c *Conn) order(op *transport.Op) (taken bool, err error) {
	if op.Passes {
		return c.send(op, 0)
	}
	if c.passed != c.last {
		c.advance()
	}
	switch {
	case c.over != nil:
		return false, c.over
	case c.passed == c.last:
		return c.send(op, c.ahead())
	case len(op.Frame) > transport.MaxFrame:
		return false, fmt.Errorf("cudaipc: post: frame of %d bytes: at most %d", len(op.Frame), transport.MaxFrame)
	case c.queued > 0 && c.queued+len(op.Frame) > queueMost:
		return false, nil
	}
	return c.queue(op, 0), nil
}

// ahead returns the number of the newest mapped write, or 0 if all have ended.
func (c *Conn) ahead() uint64 {
	if s := c.lane.seg; s != nil {
		if n := s.begun.Load(); s.done.Load() < n {
			return n
		}
	}
	return 0
}

// queue appends an item for an operation; n is the bytes of a write.
func (c *Conn) queue(op *transport.Op, n uint64) (taken bool) {
	if c.last-c.first == depth {
		return false
	}
	if c.items == nil {
		c.equip()
	}
	it := &c.items[c.last%depth]
	*it = item{op: *op, n: n, frame: append(it.frame, op.Frame...)}
	it.op.Frame = it.frame
	c.queued += len(it.frame)
	c.last++
	return true
}

// finish takes the end of an operation of inner.
func (c *Conn) finish(at uint64, err error) {
	j, known := c.Whose(at)
	switch it := j.piece; {
	case !known || j.ours:
	case it == nil:
		c.done(j.user, err)
	default:
		c.lane.buffers |= 1 << j.buf
		it.open--
		if it.err == nil {
			it.err = err
		}
		if it.open == 0 && it.passed == it.n {
			c.complete(it, it.err)
		}
		c.wake()
	}
}

// complete ends an item.
func (c *Conn) complete(it *item, err error) {
	if !it.over {
		user := it.op.User
		c.handed(it)
		c.done(user, err)
	}
}

// handed marks an item as over: it has ended, or inner has it and reports its end.
func (c *Conn) handed(it *item) {
	c.queued -= len(it.frame)
	it.over, it.op, it.frame = true, transport.Op{}, trim(it.frame)
}

// advance starts what can be started and notes what has ended.
func (c *Conn) advance() {
	if c.first == c.last {
		return
	}
	for c.over == nil && c.next != c.last && c.start(&c.items[c.next%depth]) {
		c.next++
	}
	c.forward()
	for i := c.first; i != c.last; i++ {
		it := &c.items[i%depth]
		switch {
		case it.over:
		case it.way == wayMapped:
			if it.number <= c.lane.seg.done.Load() {
				c.complete(it, nil)
			} else if c.lane.broken {
				c.complete(it, c.over)
			}
		case c.over != nil && it.passed == it.sent:
			c.complete(it, c.over)
		}
	}
	for c.first != c.last && c.items[c.first%depth].over {
		c.first++
	}
	for _, at := range [...]*uint32{&c.next, &c.passed} {
		if int32(*at-c.first) < 0 { // it ended before it was started
			*at = c.first
		}
	}
}

// start starts an item, or goes on with it; true when nothing is left to start.
func (c *Conn) start(it *item) bool {
	if c.waits || it.way == wayNone && !c.decide(it) {
		return false
	}
	switch it.way {
	case wayHeld:
		return c.startHeld(it)
	case wayBehind:
		it.number = c.ahead()
		return true
	case wayMapped:
		return true
	}
	return c.stage(it)
}

// startHeld hands inner a write from the memory of the GPU if its stream has passed the point.
func (c *Conn) startHeld(it *item) bool {
	passed, err := c.f.passed(cuda.Event(it.op.After.Event))
	if err != nil {
		c.fail(err)
	}
	if !passed || err != nil {
		return false
	}
	taken, err := c.write(&it.op, it.n, job{user: it.op.User})
	return c.took(it, taken, err)
}

// dispatch hands a frame or a loan to inner.
func (c *Conn) dispatch(it *item) bool {
	taken, err := c.send(&it.op, it.number)
	return c.took(it, taken, err)
}

// took takes what inner said to an item.
func (c *Conn) took(it *item, taken bool, err error) bool {
	if taken {
		c.handed(it)
	} else if err != nil {
		c.fail(err)
	}
	return taken
}

// decide finds the way of an item; false if that is not known yet.
func (c *Conn) decide(it *item) bool {
	switch {
	case it.op.Kind != transport.OpWrite:
		it.way = wayBehind
		return true
	case it.op.After.Event != 0 && c.f.reads(&it.op):
		it.way = wayHeld
		return true
	}
	var r remote
	it.way = wayStaged
	if r.decode(it.op.Key) {
		it.way = c.mapInto(it, &r)
	}
	return it.way != wayNone && c.over == nil
}
