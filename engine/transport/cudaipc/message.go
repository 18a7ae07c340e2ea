package cudaipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

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
	if !c.Flush() || op.Kind == transport.OpLend && c.introducing() {
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
			c.Trailer = appendHead(c.Trailer, kindLoan, number)
		}
		return c.Hand(op, op.User)
	case number == 0 && (len(b) == 0 || b[0] != escape), len(b) > transport.MaxFrame: // that inner refuses
		return c.Hand(op, op.User)
	}
	kind := uint8(kindFrame)
	if len(b) > transport.MaxFrame-headLen {
		kind, b = kindNext, nil
		c.Trailer = append(c.Trailer, op.Frame...)
	}
	c.head = append(appendHead(c.head[:0], kind, number), b...)
	taken, err = c.Hand(&transport.Op{Kind: transport.OpFrame, Frame: c.head, Passes: op.Passes}, op.User)
	c.head = link.Trim(c.head)
	return taken, err
}

// Frame implements over.Conn.
func (c *Conn) Frame(b []byte, p *link.Found) error {
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

// Lent implements over.Conn.
func (c *Conn) Lent(e *transport.Event, p *link.Found) error {
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

// arrive is Arrive for an event that may pass: then it waits for nothing.
func (c *Conn) arrive(e *transport.Event, number uint64, p *link.Found) error {
	if number == passes {
		p.Put(*e)
		return nil
	}
	return c.Arrive(e, number, p)
}

// Reached implements over.Conn; 0 is none.
func (c *Conn) Reached(number uint64) bool {
	return number == 0 || c.theirs.done.Load() >= number
}
