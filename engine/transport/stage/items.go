package stage

import (
	"fserver/cshim/cuda"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/link/over"
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

type piece = over.Piece[item]

const (
	wayNone   = iota // not decided
	wayHeld          // memory of the GPU that inner reads, behind a point in a stream
	wayBehind        // a frame or a loan, behind what was posted before it
	wayStaged        // in pieces, through host memory
)

// order posts a frame or a loan. One that passes goes to inner at once, unless a write of its own User waits. Any other one
// goes when everything before it has been started and is with inner, and else becomes an item.
func (c *Conn) order(op *transport.Op) (taken bool, err error) {
	passes := op.Passes && !c.holds(op.User)
	if !passes && c.passed != c.Line.End {
		c.Advance()
	}
	switch {
	case c.Err != nil:
		return false, c.Err
	case passes, c.passed == c.Line.End, len(op.Frame) > transport.MaxFrame: // which inner refuses
		return c.send(op)
	}
	return c.Line.Push(op, item{}), nil
}

// holds reports whether a write of a User is still to be handed to inner. 0 is none.
func (c *Conn) holds(user uint64) bool {
	for i := c.passed; user != 0 && i != c.Line.End; i++ {
		if op := &c.Line.At(i).Op; op.Kind == transport.OpWrite && op.User == user {
			return true
		}
	}
	return false
}

// Done implements over.Conn: it takes the end of a piece.
func (c *Conn) Done(user uint64, err error) {
	p, known := c.Whose(user)
	if !known {
		return
	}
	c.sender.buffers |= 1 << p.Buf
	it := &p.Of.Is
	it.open--
	if it.err == nil {
		it.err = err
	}
	if it.open == 0 && it.passed == it.n {
		c.Complete(p.Of, it.err)
	}
	c.Wake()
}

// Advance implements over.Conn.
func (c *Conn) Advance() {
	for c.Err == nil && c.next != c.Line.End && c.start(c.Line.At(c.next)) {
		c.next++
	}
	c.forward()
	for i := c.Line.First; i != c.Line.End && c.Err != nil; i++ {
		if w := c.Line.At(i); w.Is.passed == w.Is.sent {
			c.Complete(w, c.Err)
		}
	}
	c.Line.Take(&c.next, &c.passed)
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
		return !c.Waits && c.stage(w)
	}
	return true
}

// startHeld hands inner a write from the memory of the GPU if its stream has passed the point.
func (c *Conn) startHeld(w *waiting) bool {
	passed, err := c.f.Calls.Passed(cuda.Event(w.Op.After.Event))
	if err != nil {
		c.Fail(err)
	}
	if !passed || err != nil {
		return false
	}
	taken, err := c.write(&w.Op, w.Is.n, piece{}, nil)
	return c.Took(w, taken, err)
}

// forward hands inner what is ready, in order: pieces that have reached their buffers, frames and loans.
func (c *Conn) forward() {
	for c.passed != c.Line.End && c.hand(c.Line.At(c.passed)) && c.passed != c.next {
		c.passed++
	}
}

// hand hands inner what is ready of an operation; true when nothing is left of it to hand over.
func (c *Conn) hand(w *waiting) bool {
	it := &w.Is
	switch it.way {
	case wayBehind:
		if c.Err != nil || w.Over {
			return true
		}
		taken, err := c.send(&w.Op)
		return c.Took(w, taken, err)
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
