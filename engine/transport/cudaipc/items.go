package cudaipc

import (
	"fmt"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// An item is what there is to know of a write that may be mapped, or of a frame or loan that waits for one.
type item struct {
	n      uint64 // bytes of a write
	number uint64 // of a mapped write; 0: it is not one yet
	queued int    // entries of the driver's queue that it takes
}

type waiting = link.Waiting[item]

// Take implements over.Conn.
func (c *Conn) Take(op *transport.Op) (taken bool, err error) {
	switch {
	case op.User&(link.MappedMark|link.StageMark) != 0:
		return false, fmt.Errorf("cudaipc: post: the User of an operation is %#x, want less than 2^62", op.User)
	case op.Kind != transport.OpWrite:
		return c.order(op)
	}
	var r remote
	if n, ours := c.f.length(op); ours && r.decode(op.Key) {
		switch {
		case r.reach == reachNone:
			c.staged = "the driver shares no such memory of the peer's GPU (of a memory pool, for one)"
		case !c.apart:
			c.equip()
			return c.Line.Push(op, item{n: n}), nil
		}
	}
	return c.hand(op)
}

// length returns the bytes of a write. False: it is not of memory of our GPU alone, or it is wrong, as inner will say.
func (f *Fabric) length(op *transport.Op) (n uint64, ours bool) {
	own := f.Calls.Name()
	ours = op.Dev == own && (op.After.Event == 0 || op.After.Dev == own)
	for _, s := range op.Src {
		ours = ours && n+s.Len >= n
		n += s.Len
	}
	return n, ours && n > 0
}

// hand hands inner a write. If that is of GPU memory, frames wait until inner has sent it.
func (c *Conn) hand(op *transport.Op) (taken bool, err error) {
	if !c.Flush() {
		return false, nil
	}
	taken, err = c.Hand(op, op.User)
	c.below = c.below || taken && op.Dev != mem.CPU
	return taken, err
}

// order posts a frame or a loan. One that passes goes to inner at once. Any other one goes when
// everything before it has been started, and sent if inner has it, and else becomes an item.
func (c *Conn) order(op *transport.Op) (taken bool, err error) {
	if !op.Passes && !c.Line.Empty() {
		c.Advance()
	}
	switch {
	case c.Err != nil:
		return false, c.Err
	case op.Passes, c.next == c.Line.End && !c.sends(), len(op.Frame) > transport.MaxFrame: // which inner refuses
		return c.send(op)
	}
	return c.Line.Push(op, item{}), nil
}

// sends says whether inner has GPU memory of ours that it has not sent.
func (c *Conn) sends() bool {
	c.below = c.below && c.Conn.Unsent()
	return c.below
}

// ahead returns the number of the newest mapped write, or 0 if all have ended.
func (c *Conn) ahead() uint64 {
	if s := c.sender.seg; s != nil {
		if n := s.begun.Load(); s.done.Load() < n {
			return n
		}
	}
	return 0
}

// Advance implements over.Conn.
func (c *Conn) Advance() {
	for c.Err == nil && c.next != c.Line.End && c.start(c.Line.At(c.next)) {
		c.next++
	}
	for i := c.Line.First; i != c.Line.End; i++ {
		switch w := c.Line.At(i); {
		case w.Over:
		case w.Is.number != 0 && w.Is.number <= c.sender.seg.done.Load():
			c.ended(w, nil)
		case c.Err != nil && (w.Is.number == 0 || c.sender.broken):
			c.ended(w, c.Err)
		}
	}
	c.Line.Take(&c.next)
}

// ended completes an operation, which takes no entries of the driver's queue any more.
func (c *Conn) ended(w *waiting, err error) {
	c.queued -= w.Is.queued
	c.f.queued -= w.Is.queued
	c.Complete(w, err)
}

// start starts an operation: it maps a write, or hands inner what is not mapped. False: not now.
func (c *Conn) start(w *waiting) bool {
	var taken bool
	var err error
	switch {
	case c.Waits:
		return false
	case w.Op.Kind != transport.OpWrite:
		if c.sends() {
			return false
		}
		taken, err = c.send(&w.Op)
	default:
		var r remote
		r.decode(w.Op.Key)
		way := c.mapInto(w, &r)
		if way != toInner || c.Err != nil {
			return way == mapped
		}
		taken, err = c.hand(&w.Op)
	}
	return c.Took(w, taken, err)
}
