package faults

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"fserver/engine/transport"
)

// window bounds the frames of one Conn that are not acknowledged, and windowBytes
// their bytes.
const (
	window      = 256
	windowBytes = 4 << 20
)

// The kinds of frames that travel, with what follows the kind.
const (
	kindLast = 0xf1 // sequence number, a frame or the end of one
	kindMore = 0xf2 // sequence number, the beginning of a frame that is too large with its header
	kindAck  = 0xf3 // the sequence number that is expected next
)

const headerLen = 9

// resend is what a Conn holds for Options.Resend. A frame is only taken when its turn has come: where
// one was lost, it and all behind it are sent again.
type resend struct {
	out         []sent // by sequence number % window
	first, next uint64 // those that are not acknowledged
	fresh       uint64 // those from here on are to be sent
	most        uint64 // and those from here on never were
	outBytes    int
	since       time.Time     // when first was sent, or the last acknowledgement came
	wait        time.Duration // from then until all are sent again; it doubles

	expect  uint64 // the next for the user
	partial []byte // the beginning of a frame; nil: none has come
	ack     bool   // is due
	header  [headerLen]byte
}

// sent is a frame that is not acknowledged, with its header.
type sent struct {
	buf  []byte
	user uint64 // of the operation that ends with it
	last bool   // it does: this is no beginning
}

// patience bounds wait, in Timeouts.
const patience = 16

// accept takes a frame into the window; false if there is no room.
func (c *Conn) accept(op *transport.Op) bool {
	b := op.Frame
	parts := uint64(1)
	if len(b) > transport.MaxFrame-headerLen {
		parts = 2
	}
	if c.next-c.first+parts > window || c.outBytes != 0 && c.outBytes+len(b) > windowBytes {
		return false
	}
	if parts == 2 {
		c.number(kindMore, 0, b[:len(b)/2])
		b = b[len(b)/2:]
	}
	c.number(kindLast, op.User, b)
	c.send()
	return true
}

func (c *Conn) number(kind byte, user uint64, b []byte) {
	s := &c.out[c.next%window]
	s.user, s.last = user, kind == kindLast
	s.buf = append(s.buf[:0], kind)
	s.buf = binary.LittleEndian.AppendUint64(s.buf, c.next)
	s.buf = append(s.buf, b...)
	c.outBytes += len(s.buf)
	c.next++
}

// send posts what is due: an acknowledgement, and frames that are new, or have not been
// acknowledged for too long.
func (c *Conn) send() {
	if c.over != nil {
		return
	}
	if c.ack {
		c.header[0] = kindAck
		binary.LittleEndian.PutUint64(c.header[1:], c.expect)
		c.ack = !c.transmit(c.header[:])
	}
	if c.first == c.next {
		return
	}
	now := time.Now()
	if c.first < c.fresh && now.Sub(c.since) >= c.wait {
		c.fresh, c.wait = c.first, min(2*c.wait, patience*c.f.o.Timeout)
	}
	for ; c.fresh < c.next && c.transmit(c.out[c.fresh%window].buf); c.fresh++ {
		if c.fresh == c.first {
			c.since = now
		}
		c.most = max(c.most, c.fresh+1)
	}
}

// transmit posts one frame of ours, or loses it; false is back-pressure. That
// the inner Conn is broken is for its EvDown to say.
func (c *Conn) transmit(b []byte) bool {
	if c.f.chance(c.f.o.Drop) {
		return true
	}
	op := transport.Op{Kind: transport.OpFrame, Frame: b}
	if c.f.o.LateWrite > 0 {
		return c.holdBack(&op, owner{silent: true})
	}
	taken, _ := c.pass(&op, owner{silent: true})
	return taken
}

// receive takes a frame of the inner Conn. It or others may be for the user.
func (c *Conn) receive(b []byte, p *poll) error {
	if len(b) < headerLen || b[0] < kindLast || b[0] > kindAck || b[0] == kindAck && len(b) != headerLen {
		return errKind
	}
	kind, seq, b := b[0], binary.LittleEndian.Uint64(b[1:]), b[headerLen:]
	if kind == kindAck {
		switch {
		case seq > c.most:
			return fmt.Errorf("faults: the peer acknowledged frame %d, but the last frame sent was %d", seq, c.most)
		case seq > c.first:
			c.settle(seq, nil)
			c.since, c.wait = time.Now(), c.f.o.Timeout
		}
		return nil
	}
	c.ack = true
	switch ahead := seq - c.expect; {
	case ahead == 0:
		return c.take(kind, b, p)
	case ahead >= window && int64(ahead) > 0:
		return fmt.Errorf("faults: the peer sent frame %d, want frame %d or one of the next", seq, c.expect)
	}
	return nil // it has come before, or will come again
}

// settle ends the frames before seq.
func (c *Conn) settle(seq uint64, err error) {
	for ; c.first < seq; c.first++ {
		s := &c.out[c.first%window]
		c.outBytes -= len(s.buf)
		if s.last {
			c.tell(s.user, err)
		}
	}
	c.fresh = max(c.fresh, c.first)
}

// take gives the user the frame whose turn it is, for which p has room.
func (c *Conn) take(kind byte, b []byte, p *poll) error {
	c.expect++
	whole := len(c.partial) + len(b)
	switch {
	case whole > transport.MaxFrame || kind == kindMore && c.partial != nil:
		return fmt.Errorf("faults: the peer sent a frame of at least %d bytes, want at most %d", whole, transport.MaxFrame)
	case kind == kindMore:
		c.partial = slices.Clone(b)
		return nil
	case c.partial != nil:
		b, c.partial = append(c.partial, b...), nil
	}
	p.Put(transport.Event{Kind: transport.EvFrame, Conn: c, Data: b})
	return nil
}
