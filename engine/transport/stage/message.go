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

// escaped says whether a frame of the user's looks like one of ours.
func escaped(frame []byte) bool { return len(frame) > 0 && frame[0] == escape }

// send hands inner a frame or a loan of the user's.
func (c *Conn) send(op *transport.Op) (taken bool, err error) {
	if !c.Flush() {
		return false, nil
	}
	if escaped(op.Frame) && len(op.Frame) <= transport.MaxFrame {
		c.Trailer = append(c.Trailer, op.Frame...)
		op = &transport.Op{Kind: transport.OpFrame, User: op.User, Frame: bareNext}
	}
	return c.Hand(op, op.User)
}

// write hands inner a write of n bytes: one of the user's own, or a piece of one. A piece may take along the operation that
// waits behind its write (then). The peer lifts the bytes if the key is of a shadow.
func (c *Conn) write(op *transport.Op, n uint64, p piece, then *waiting) (taken bool, err error) {
	if !c.Flush() {
		return false, nil
	}
	host := *op
	host.After, host.Dev = transport.Point{}, source(op)
	if k, ours := innerKey(op.Key); ours {
		if host.Key = k; n > 0 {
			b := append(c.Trailer, escape, kindLift)
			for _, v := range [...]uint64{k.ID, k.Token, op.Off, n} {
				b = binary.LittleEndian.AppendUint64(b, v)
			}
			c.Trailer = b
		}
	}
	if p.Of != nil {
		return c.HandPiece(&host, p, then)
	}
	return c.Hand(&host, op.User)
}

// field returns the i-th number behind the kind.
func field(b []byte, i int) uint64 { return binary.LittleEndian.Uint64(b[2+8*i:]) }

// Frame implements over.Conn.
func (c *Conn) Frame(b []byte, p *link.Found) error {
	switch {
	case c.bare || !escaped(b):
		c.bare = false
		return c.ArriveFrame(b, c.landed, p)
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

// Lent implements over.Conn.
func (c *Conn) Lent(e *transport.Event, p *link.Found) error { return c.Arrive(e, c.landed, p) }
