package stage

import (
	"fserver/cshim/cuda"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// An item is what there is to know of an operation that involves a GPU, or of a frame or loan that waits for one.
type item struct {
	n      uint64 // bytes
	way    uint8
	number uint64 // wayStaged: of the first copy
	sent   uint64 // wayStaged: bytes whose copy has been started
	passed uint64 // wayStaged: bytes that inner has, or had
	open   int    // wayStaged: pieces that inner has
	err    error
}

type waiting = link.Waiting[item]

const (
	wayNone   = iota // not decided
	wayHeld          // memory of the GPU that inner reads, behind a point in a stream
	wayBehind        // a frame or a loan, behind what was posted before it
	wayStaged        // in pieces, through host memory
)

// order posts a frame or a loan. One that passes goes to inner at once. Any other one goes when
// everything before it has been started and is with inner, and else becomes an item.
func (c *Conn) order(op *transport.Op) (taken bool, err error) {
	if !op.Passes && c.passed != c.line.End {
		c.advance()
	}
	switch {
	case c.over != nil:
		return false, c.over
	case op.Passes, c.passed == c.line.End, len(op.Frame) > transport.MaxFrame: // which inner refuses
		return c.send(op)
	}
	return c.line.Push(op, item{}), nil
}

// A piece is what an operation of inner is a part of, and the piece's buffer.
type piece struct {
	of  *waiting
	buf uint8
}

// finish takes the end of a piece.
func (c *Conn) finish(user uint64, err error) {
	p, known := c.Whose(user)
	if !known {
		return
	}
	c.lane.buffers |= 1 << p.buf
	it := &p.of.Is
	it.open--
	if it.err == nil {
		it.err = err
	}
	if it.open == 0 && it.passed == it.n {
		c.complete(p.of, it.err)
	}
	c.wake()
}

// complete ends an operation that waits.
func (c *Conn) complete(w *waiting, err error) {
	if !w.Over {
		user := w.Op.User
		c.line.Finish(w)
		c.done(user, err)
	}
}

// advance starts what can be started and notes what has ended.
func (c *Conn) advance() {
	if c.line.Empty() {
		return
	}
	for c.over == nil && c.next != c.line.End && c.start(c.line.At(c.next)) {
		c.next++
	}
	c.forward()
	for i := c.line.First; i != c.line.End && c.over != nil; i++ {
		if w := c.line.At(i); w.Is.passed == w.Is.sent {
			c.complete(w, c.over)
		}
	}
	c.line.Take(&c.next, &c.passed)
}

// start starts an operation, or goes on with it; true when nothing is left to start.
func (c *Conn) start(w *waiting) bool {
	it := &w.Is
	if it.way == wayNone {
		switch {
		case w.Op.Kind != transport.OpWrite:
			it.way = wayBehind
		case w.Op.After.Event != 0 && c.f.reads(&w.Op):
			it.way = wayHeld
		default:
			it.way = wayStaged
		}
	}
	switch {
	case it.way == wayHeld:
		return c.startHeld(w)
	case it.way == wayStaged:
		return !c.waits && c.stage(w)
	}
	return true
}

// startHeld hands inner a write from the memory of the GPU if its stream has passed the point.
func (c *Conn) startHeld(w *waiting) bool {
	passed, err := c.f.calls.Passed(cuda.Event(w.Op.After.Event))
	if err != nil {
		c.fail(err)
	}
	if !passed || err != nil {
		return false
	}
	taken, err := c.write(&w.Op, w.Is.n, piece{})
	return c.took(w, taken, err)
}

// took takes what inner said to an operation.
func (c *Conn) took(w *waiting, taken bool, err error) bool {
	if taken {
		c.line.Finish(w)
	} else if err != nil {
		c.fail(err)
	}
	return taken
}

// forward hands inner what is ready, in order: pieces that have reached their buffers, frames and loans.
func (c *Conn) forward() {
	for c.passed != c.line.End && c.hand(c.line.At(c.passed)) && c.passed != c.next {
		c.passed++
	}
}

// hand hands inner what is ready of an operation; true when nothing is left of it to hand over.
func (c *Conn) hand(w *waiting) bool {
	it := &w.Is
	switch it.way {
	case wayBehind:
		if c.over != nil {
			return true
		}
		taken, err := c.send(&w.Op)
		return c.took(w, taken, err)
	case wayStaged:
		for it.passed < it.sent {
			if !c.handPiece(w) {
				return false
			}
		}
		return it.passed == it.n
	}
	return true
}
