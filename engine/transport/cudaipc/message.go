package cudaipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// escape is the first byte of every message of this package; docs/wire.md lists them. A frame
// of the user's that starts with it is sent with a header. Package wire uses it for no frame.
const escape = 0xff

// The kinds of messages, and what follows the kind. A number is that of the last mapped write
// of the Conn that has to land first.
const (
	kindPlain        = iota // no message of ours: a frame of the user's as it is
	kindFrame               // a number, a frame of the user's
	kindFramePass           // 0, a frame of the user's that passes
	kindMore                // 0, the beginning of a frame that is too large with its header
	kindLoan                // a number: it belongs to the loan just before
	kindLoanPass            // 0: the loan just before passes
	kindLift                // key, token, offset and length of the write just before
	kindIntroduction        // 0: two loans follow
)

const (
	headLen = 2 + 8
	liftLen = 2 + 4*8
)

func appendHead(b []byte, kind uint8, number uint64) []byte {
	return binary.LittleEndian.AppendUint64(append(b, escape, kind), number)
}

// send hands inner a frame or a loan of the user's that comes behind mapped write number. As
// long as c has not written to GPU memory of the peer, the peer holds nothing of c. Until
// then, loans need no trailer, and frames that pass no header.
func (c *Conn) send(op *transport.Op, number uint64) (taken bool, err error) {
	if !c.flush() || op.Kind == transport.OpLend && c.introducing() {
		return false, nil
	}
	j := job{user: op.User}
	passes := op.Passes && c.marks
	if op.Kind == transport.OpLend {
		if c.marks {
			c.trailer = appendHead(c.trailer, kindOf(kindLoan, passes), number)
		}
		return c.pass(op, j)
	}
	b := op.Frame
	bare := number == 0 && !passes && (len(b) == 0 || b[0] != escape)
	if bare || len(b) > transport.MaxFrame { // that one inner refuses
		return c.pass(op, j)
	}
	kind := kindOf(kindFrame, passes)
	if len(b) > transport.MaxFrame-headLen {
		c.trailer = append(appendHead(c.trailer, kind, number), b[len(b)/2:]...)
		b, kind, number = b[:len(b)/2], kindMore, 0
	}
	c.head = append(appendHead(c.head[:0], kind, number), b...)
	out := transport.Op{Kind: transport.OpFrame, Frame: c.head}
	taken, err = c.pass(&out, j)
	c.head = trim(c.head)
	return taken, err
}

// kindOf returns the kind of a frame or a loan. What passes has the next number.
func kindOf(kind uint8, passes bool) uint8 {
	if passes {
		kind++
	}
	return kind
}

// keepMost is the largest buffer for a frame that is kept.
const keepMost = 64 << 10

// trim returns b empty, for the next frame, or nil if it is large.
func trim(b []byte) []byte {
	if cap(b) > keepMost {
		return nil
	}
	return b[:0]
}

// write hands inner a write of n bytes of host memory. The peer lifts them if the key is of GPU
// memory.
func (c *Conn) write(op *transport.Op, n uint64, j job) (taken bool, err error) {
	if !c.flush() {
		return false, nil
	}
	lift := n > 0 && ofGPU(op.Key)
	if lift {
		b := append(c.trailer, escape, kindLift)
		for _, v := range [...]uint64{op.Key.ID, op.Key.Token, op.Off, n} {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
		c.trailer = b
	}
	taken, err = c.pass(op, j)
	c.marks = c.marks || taken && lift
	return taken, err
}

// pass hands inner an operation, and c.trailer right behind it. If inner takes only the
// operation, the trailer stays, and flush sends it before anything else.
func (c *Conn) pass(op *transport.Op, j job) (taken bool, err error) {
	host := *op
	host.Key = innerKey(op.Key)
	host.After, host.Dev = transport.Point{}, source(op)
	k, err := c.Pass(&host, j, c.trailer)
	if k == 1 && len(c.trailer) > 0 {
		c.wake()
	} else {
		c.trailer = trim(c.trailer)
	}
	return k > 0, err
}

// flush sends a trailer that inner has not taken yet; false is back-pressure.
func (c *Conn) flush() bool {
	if len(c.trailer) > 0 && c.signal(transport.Op{Kind: transport.OpFrame, Frame: c.trailer}) {
		c.trailer = trim(c.trailer)
	}
	return len(c.trailer) == 0
}

// signal posts an operation whose end nobody waits for; false is back-pressure.
func (c *Conn) signal(op transport.Op) bool {
	k, _ := c.Pass(&op, job{ours: true}, nil)
	return k == 1
}

// lengths are those of the messages of each kind that have one.
var lengths = [kindIntroduction + 1]int{kindLoan: headLen, kindLoanPass: headLen, kindLift: liftLen, kindIntroduction: headLen}

// parse reads the head of a frame that starts with escape.
func parse(b []byte) (kind uint8, number uint64, err error) {
	if len(b) >= headLen {
		kind = b[1]
	}
	if kind == 0 || kind > kindIntroduction || lengths[kind] != 0 && lengths[kind] != len(b) {
		return 0, 0, fmt.Errorf("the peer sent a message of kind %d and %d bytes, which this version does not know (run the same version of fserver on both sides)", kind, len(b))
	}
	if kind != kindLift {
		number = field(b, 0)
	}
	if number > 0 && kind != kindFrame && kind != kindLoan {
		return 0, 0, fmt.Errorf("the peer sent a message of kind %d with the number %d, want 0", kind, number)
	}
	return kind, number, nil
}

// field returns the i-th number behind the kind.
func field(b []byte, i int) uint64 { return binary.LittleEndian.Uint64(b[2+8*i:]) }

// message takes a frame of inner, for which p has room.
func (c *Conn) message(b []byte, p *link.Found) error {
	kind, number, body := uint8(kindPlain), uint64(0), b
	if len(b) > 0 && b[0] == escape {
		var err error
		if kind, number, err = parse(b); err != nil {
			return err
		}
		body = b[headLen:]
	}
	switch {
	case c.partial != nil && kind != kindFrame && kind != kindFramePass:
		return errors.New("the peer sent the beginning of a frame, and then not its end")
	case number > 0 && (c.theirs == nil || number > c.theirs.begun.Load()):
		return fmt.Errorf("the peer sent a frame that waits for its write %d, which it has not begun", number)
	}
	switch kind {
	case kindLift:
		c.marked = true
		return c.lift(transport.Key{ID: field(b, 0), Token: field(b, 1)}, field(b, 2), field(b, 3))
	case kindIntroduction:
		c.marked = true
		return c.meet()
	case kindLoan, kindLoanPass:
		v := c.loan
		if c.loan = (transport.Event{}); v.View == nil {
			return errors.New("the peer announced a loan, but did not lend the memory")
		}
		return c.arrive(&v, number, kind == kindLoanPass, p)
	case kindMore:
		c.partial = slices.Clone(body)
		return nil
	}
	if c.partial != nil {
		body, c.partial = append(c.partial, body...), nil
	}
	if len(body) > transport.MaxFrame {
		return fmt.Errorf("the peer sent a frame of %d bytes, want at most %d", len(body), transport.MaxFrame)
	}
	return c.arrive(&transport.Event{Kind: transport.EvFrame, Conn: c, Data: body}, number, kind == kindFramePass, p)
}

// lent takes a loan of inner.
func (c *Conn) lent(e *transport.Event, p *link.Found) error {
	out := *e
	out.Conn = c
	switch {
	case c.expect > 0:
		return c.greeted(e)
	case !c.marked:
		return c.arrive(&out, 0, false, p)
	case c.loan.View != nil:
		link.Drop(e)
		return errors.New("the peer lent memory twice, and announced one loan")
	}
	c.loan = out // its trailer follows
	return nil
}
