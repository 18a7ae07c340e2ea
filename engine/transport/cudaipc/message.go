package cudaipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// escape is the first byte of every message of this package; docs/wire.md lists them. A frame
// of the user's that starts with it is sent with a header. Package wire uses it for no frame, nor does an inner Fabric.
const escape = 0xfe

// The kinds of messages, and what follows the kind. A number is that of the last mapped write of the Conn that has to land
// first: 0 is none, and passes is none either, nor does such a frame or loan wait for what is before it.
const (
	kindFrame        = iota + 1 // a number, a frame of the user's
	kindNext                    // a number: it belongs to the next frame, which is too large with its header
	kindLoan                    // a number: it belongs to the loan just before
	kindIntroduction            // 0: two loans follow

	passes = math.MaxUint64
)

const headLen = 2 + 8

func appendHead(b []byte, kind uint8, number uint64) []byte {
	return binary.LittleEndian.AppendUint64(append(b, escape, kind), number)
}

// send hands inner a frame or a loan of the user's. As long as c has not introduced itself, the peer holds nothing of c.
// Until then, loans need no trailer, and frames that pass no header.
func (c *Conn) send(op *transport.Op) (taken bool, err error) {
	if !c.flush() || op.Kind == transport.OpLend && c.introducing() {
		return false, nil
	}
	number, b := c.ahead(), op.Frame
	if op.Passes {
		if number = 0; c.shown > 0 {
			number = passes
		}
	}
	switch {
	case op.Kind == transport.OpLend:
		if c.shown > 0 {
			c.trailer = appendHead(c.trailer, kindLoan, number)
		}
		return c.pass(op)
	case number == 0 && (len(b) == 0 || b[0] != escape), len(b) > transport.MaxFrame: // that inner refuses
		return c.pass(op)
	}
	kind := uint8(kindFrame)
	if len(b) > transport.MaxFrame-headLen {
		kind, b = kindNext, nil
		c.trailer = append(c.trailer, op.Frame...)
	}
	c.head = append(appendHead(c.head[:0], kind, number), b...)
	taken, err = c.pass(&transport.Op{Kind: transport.OpFrame, User: op.User, Frame: c.head, Passes: op.Passes})
	c.head = link.Trim(c.head)
	return taken, err
}

// pass hands inner an operation, and c.trailer right behind it. If inner takes only the
// operation, the trailer stays, and flush sends it before anything else. Inner may call the device meanwhile.
func (c *Conn) pass(op *transport.Op) (taken bool, err error) {
	k, err := c.posts(op, op.User)
	if k == 1 && len(c.trailer) > 0 {
		c.wake()
	} else {
		c.trailer = link.Trim(c.trailer)
	}
	return k > 0, err
}

// posts posts an operation on inner's Conn, which may call the device, and c.trailer right behind it.
func (c *Conn) posts(op *transport.Op, user uint64) (int, error) {
	behind := c.trailer
	defer c.f.calls.Leave().Back()
	return c.PassAs(op, user, behind)
}

// flush sends a trailer that inner has not taken yet; false is back-pressure. What it belongs to may have passed.
func (c *Conn) flush() bool {
	if b := c.trailer; len(b) > 0 {
		c.trailer = nil
		if !c.signal(transport.Op{Kind: transport.OpFrame, Frame: b, Passes: true}) {
			c.trailer = b
			return false
		}
		c.trailer = link.Trim(b)
	}
	return true
}

// signal posts an operation whose end nobody waits for; false is back-pressure.
func (c *Conn) signal(op transport.Op) bool {
	k, _ := c.posts(&op, c.Mark)
	return k == 1
}

// message takes a frame of inner, for which p has room.
func (c *Conn) message(b []byte, p *link.Found) error {
	number := uint64(0)
	switch {
	case c.numbered:
		number, c.numbered = c.number, false
	case len(b) > 0 && b[0] == escape:
		kind := uint8(0)
		if len(b) >= headLen {
			kind = b[1]
		}
		if kind == 0 || kind > kindIntroduction || kind != kindFrame && len(b) != headLen {
			return fmt.Errorf("the peer sent a message of kind %d and %d bytes, which this version does not know (run the same version of fserver on both sides)", kind, len(b))
		}
		number = binary.LittleEndian.Uint64(b[2:])
		if number != 0 && number != passes && (c.theirs == nil || number > c.theirs.begun.Load()) {
			return fmt.Errorf("the peer sent a frame that waits for its write %d, which it has not begun", number)
		}
		if kind != kindFrame {
			return c.control(kind, number, p)
		}
		b = b[headLen:]
	}
	return c.arrive(&transport.Event{Kind: transport.EvFrame, Conn: c, Data: b}, number, p)
}

// control takes a message without a frame.
func (c *Conn) control(kind uint8, number uint64, p *link.Found) error {
	switch kind {
	case kindNext:
		c.number, c.numbered = number, true
		return nil
	case kindIntroduction:
		c.marked = true
		return c.meet()
	}
	v := c.loan
	if c.loan = (transport.Event{}); v.View == nil {
		return errors.New("the peer announced a loan, but did not lend the memory")
	}
	return c.arrive(&v, number, p)
}

// lent takes a loan of inner.
func (c *Conn) lent(e *transport.Event, p *link.Found) error {
	e.Conn = c
	switch {
	case c.expect > 0:
		return c.greeted(e)
	case !c.marked:
		return c.arrive(e, 0, p)
	case c.loan.View != nil:
		link.Drop(e)
		return errors.New("the peer lent memory twice, and announced one loan")
	}
	c.loan = *e // its trailer follows
	return nil
}

// arrive gives an event of the peer's, for which p has room, or holds it until its mapped write
// has landed, and the events before it have been given. One that passes waits for nothing.
func (c *Conn) arrive(e *transport.Event, number uint64, p *link.Found) error {
	if number == passes || c.held.Len() == 0 && c.reached(number) {
		p.Put(*e)
		return nil
	}
	c.wake()
	return c.held.Push(e, number, c.f.polls)
}

// reached reports whether mapped write number of the peer has landed; 0 is none.
func (c *Conn) reached(number uint64) bool {
	return number == 0 || c.theirs.done.Load() >= number
}

// give gives the events whose turn has come, as far as p has room. When the Conn has ended,
// mapped writes may still land: give waits for them for lastWrites, and then drops all events.
func (c *Conn) give(p *link.Found) {
	for c.held.Len() > 0 && p.Room() {
		switch {
		case c.reached(c.held.Number()):
			p.Put(c.held.Pop(c.f.polls))
		case c.over != nil && time.Since(c.since) > lastWrites:
			c.held.Drop(c.f.polls)
		default:
			return
		}
	}
}
