package stage

import (
	"encoding/binary"
	"fmt"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// escape is the first byte of every message of this package; docs/wire.md lists them. Package wire uses it for no frame.
const escape = 0xff

// The kinds of messages, and what follows the kind.
const (
	kindLift = iota + 1 // key, token, offset and length of the write just before
	kindBare            // the next frame is the user's, though it starts with escape
)

const liftLen = 2 + 4*8

var bareNext = []byte{escape, kindBare}

// send hands inner a frame or a loan of the user's.
func (c *Conn) send(op *transport.Op) (taken bool, err error) {
	if !c.flush() {
		return false, nil
	}
	if b := op.Frame; len(b) > 0 && b[0] == escape && len(b) <= transport.MaxFrame {
		c.trailer = append(c.trailer, b...)
		op = &transport.Op{Kind: transport.OpFrame, User: op.User, Frame: bareNext}
	}
	return c.handed(c.PassAs(op, op.User, c.trailer))
}

// write hands inner a write of n bytes, of the user's own or a piece of one. The peer lifts them if the key is of a
// shadow.
func (c *Conn) write(op *transport.Op, n uint64, p piece) (taken bool, err error) {
	if !c.flush() {
		return false, nil
	}
	host := *op
	host.After, host.Dev = transport.Point{}, source(op)
	if k, ours := innerKey(op.Key); ours {
		if host.Key = k; n > 0 {
			b := append(c.trailer, escape, kindLift)
			for _, v := range [...]uint64{k.ID, k.Token, op.Off, n} {
				b = binary.LittleEndian.AppendUint64(b, v)
			}
			c.trailer = b
		}
	}
	if p.of != nil {
		return c.handed(c.Pass(&host, p, c.trailer))
	}
	return c.handed(c.PassAs(&host, op.User, c.trailer))
}

// handed takes what inner said to an operation, and to c.trailer right behind it. If inner has taken only the operation,
// the trailer stays, and flush sends it before anything else.
func (c *Conn) handed(k int, err error) (taken bool, _ error) {
	if k == 1 && len(c.trailer) > 0 {
		c.wake()
	} else {
		c.trailer = link.Trim(c.trailer)
	}
	return k > 0, err
}

// flush sends a trailer that inner has not taken yet; false is back-pressure.
func (c *Conn) flush() bool {
	if len(c.trailer) > 0 && c.signal(transport.Op{Kind: transport.OpFrame, Frame: c.trailer}) {
		c.trailer = link.Trim(c.trailer)
	}
	return len(c.trailer) == 0
}

// signal posts an operation whose end nobody waits for; false is back-pressure.
func (c *Conn) signal(op transport.Op) bool {
	k, _ := c.PassAs(&op, c.Mark, nil)
	return k == 1
}

// field returns the i-th number behind the kind.
func field(b []byte, i int) uint64 { return binary.LittleEndian.Uint64(b[2+8*i:]) }

// message takes a frame of inner, for which p has room.
func (c *Conn) message(b []byte, p *link.Found) error {
	switch {
	case c.bare || len(b) == 0 || b[0] != escape:
		c.bare = false
		return c.arrive(&transport.Event{Kind: transport.EvFrame, Conn: c, Data: b}, p)
	case len(b) == liftLen && b[1] == kindLift:
		return c.lift(transport.Key{ID: field(b, 0), Token: field(b, 1)}, field(b, 2), field(b, 3))
	case len(b) == len(bareNext) && b[1] == kindBare:
		c.bare = true
		return nil
	}
	kind := byte(0)
	if len(b) > 1 {
		kind = b[1]
	}
	return fmt.Errorf("the peer sent a message of kind %d and %d bytes, which this version does not know (run the same version of fserver on both sides)", kind, len(b))
}

// arrive gives an event of the peer's, for which p has room, or holds it until the copies from shadows that the peer has
// asked for have ended, and the events before it have been given.
func (c *Conn) arrive(e *transport.Event, p *link.Found) error {
	if c.held.Len() == 0 && c.f.in.reached(c.landed) {
		p.Put(*e)
		return nil
	}
	c.wake()
	return c.held.Push(e, c.landed, c.f.polls)
}

// give gives the events whose turn has come, as far as p has room.
func (c *Conn) give(p *link.Found) {
	for c.held.Len() > 0 && p.Room() && c.f.in.reached(c.held.Number()) {
		p.Put(c.held.Pop(c.f.polls))
	}
}
