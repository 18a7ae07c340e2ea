package lossy

import (
	"encoding/binary"
	"fmt"
	"time"

	"fserver/engine/transport"
)

// window bounds the frames of one Conn that are not acknowledged, and windowBytes
// their bytes: of what is sent, and of what has come before its turn.
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

// A Conn is one of inner, with losses. All is guarded by f.mu.
type Conn struct {
	f      *Fabric
	inner  transport.Conn
	over   error // why nothing can be posted any more, and what EvDown is to say
	broken bool  // we have ended it: nothing that has come counts
	down   bool  // EvDown was given, or will not come
	listed bool  // in f.busy

	users []uint64 // User of an operation of inner -> the user's own; 0 is that of ours
	free  []uint64
	open  int // operations that inner has not ended

	out         []sent // by sequence number % window
	first, next uint64 // those that are not acknowledged
	fresh       uint64 // those from here on were never sent
	outBytes    int

	in        []received // likewise
	expect    uint64     // the next for the user
	inBytes   int        // of those that came before their turn
	partial   []byte     // the beginning of a frame
	beginning bool       // partial is one
	ack       bool       // is due
	scratch   [1]transport.Op
	header    [headerLen]byte
}

// sent is a frame that is not acknowledged, with its header.
type sent struct {
	buf  []byte
	user uint64        // of the operation that ends with it
	last bool          // it does: this is no beginning
	at   time.Time     // when it was sent last
	wait time.Duration // until it is sent again; it doubles
}

// patience bounds wait, in Timeouts.
const patience = 16

// received is a frame that came before its turn.
type received struct {
	buf  []byte
	kind byte
	here bool
}

// Hello is inner's, and so is Remote.
func (c *Conn) Hello() []byte  { return c.inner.Hello() }
func (c *Conn) Remote() string { return c.inner.Remote() }

// Via and Why implement transport.Teller, if inner does.
func (c *Conn) Via() string {
	via, _ := transport.Via(c.inner, c.f.Name())
	return via
}

func (c *Conn) Why() string {
	_, why := transport.Via(c.inner, c.f.Name())
	return why
}

// Unsent implements transport.Unsender.
func (c *Conn) Unsent() bool {
	u, ok := c.inner.(transport.Unsender)
	return ok && u.Unsent()
}

// Post implements transport.Conn.
func (c *Conn) Post(ops []transport.Op) (int, error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.over != nil {
		return 0, c.over
	}
	for i := range ops {
		taken, err := c.post(&ops[i])
		if !taken {
			return i, err
		}
	}
	return len(ops), nil
}

func (c *Conn) post(op *transport.Op) (taken bool, err error) {
	frame := op.Kind == transport.OpFrame && len(op.Frame) <= transport.MaxFrame
	switch {
	case frame && c.f.o.Resend:
		return c.accept(op), nil
	case frame && c.f.lose():
		c.tell(op.User, nil)
		return true, nil
	default:
		user := c.hold(op.User)
		c.scratch[0] = *op
		c.scratch[0].User = user
		k, err := c.inner.Post(c.scratch[:])
		c.scratch[0] = transport.Op{}
		if k == 0 {
			c.release(user)
			return false, err
		}
		c.open++
		return true, nil
	}
}

// tell ends an operation that inner knows nothing of.
func (c *Conn) tell(user uint64, err error) {
	c.f.told = append(c.f.told, transport.Event{Kind: transport.EvDone, User: user, Conn: c, Err: err})
}

// hold gives an operation of the user's a number of ours.
func (c *Conn) hold(user uint64) uint64 {
	if n := len(c.free); n > 0 {
		i := c.free[n-1]
		c.free = c.free[:n-1]
		c.users[i] = user
		return i
	}
	c.users = append(c.users, user)
	return uint64(len(c.users) - 1)
}

// release gives the user's number back.
func (c *Conn) release(i uint64) (user uint64, ours bool) {
	if i == 0 {
		return 0, true
	}
	c.free = append(c.free, i)
	return c.users[i], false
}

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
		c.queue(kindMore, 0, b[:len(b)/2])
		b = b[len(b)/2:]
	}
	c.queue(kindLast, op.User, b)
	c.send()
	c.wake()
	return true
}

func (c *Conn) queue(kind byte, user uint64, b []byte) {
	s := &c.out[c.next%window]
	s.user, s.last = user, kind == kindLast
	s.buf = append(s.buf[:0], kind)
	s.buf = binary.LittleEndian.AppendUint64(s.buf, c.next)
	s.buf = append(s.buf, b...)
	s.at, s.wait = time.Time{}, c.f.o.Timeout
	c.outBytes += len(s.buf)
	c.next++
}

// send posts what is due: frames that are new, those that have not been
// acknowledged for too long, and an acknowledgement.
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
	for i := c.first; i < c.fresh; i++ {
		s := &c.out[i%window]
		if now.Sub(s.at) < s.wait {
			continue
		}
		if !c.transmit(s.buf) {
			return
		}
		s.at, s.wait = now, min(2*s.wait, patience*c.f.o.Timeout)
	}
	for ; c.fresh < c.next; c.fresh++ {
		s := &c.out[c.fresh%window]
		if !c.transmit(s.buf) {
			return
		}
		s.at = now
	}
}

// transmit posts one frame of ours, or loses it; false is back-pressure. That
// inner is broken is for its EvDown to say.
func (c *Conn) transmit(b []byte) bool {
	if c.f.lose() {
		return true
	}
	c.scratch[0] = transport.Op{Kind: transport.OpFrame, Frame: b}
	k, _ := c.inner.Post(c.scratch[:])
	c.open += k
	return k == 1
}

// receive takes a frame of inner. It or others may be for the user.
func (c *Conn) receive(b []byte, p *poll) error {
	if c.over != nil {
		return nil
	}
	if len(b) < headerLen || b[0] < kindLast || b[0] > kindAck || b[0] == kindAck && len(b) != headerLen {
		return errKind
	}
	kind, seq, b := b[0], binary.LittleEndian.Uint64(b[1:]), b[headerLen:]
	if kind == kindAck {
		if seq < c.first { // an old one
			return nil
		}
		if seq > c.fresh {
			return fmt.Errorf("lossy: the peer acknowledged frame %d, but the last frame sent was %d", seq, c.fresh)
		}
		c.settle(seq, nil)
		c.wake()
		return nil
	}
	c.ack = true
	c.wake()
	ahead := seq - c.expect
	switch s := &c.in[seq%window]; {
	case int64(ahead) < 0: // it has come before
	case ahead >= window:
		return fmt.Errorf("lossy: the peer sent frame %d, want frame %d or one of the next", seq, c.expect)
	case ahead == 0 && !s.here:
		return c.take(kind, b, p)
	case !s.here && c.inBytes+len(b) <= windowBytes: // else it will come again
		s.buf = append(s.buf[:0], b...)
		s.kind, s.here = kind, true
		c.inBytes += len(b)
	}
	return nil
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
}

// take gives the user the frame whose turn it is, for which p has room.
func (c *Conn) take(kind byte, b []byte, p *poll) error {
	c.expect++
	whole := len(b)
	if c.beginning {
		whole += len(c.partial)
	}
	switch {
	case whole > transport.MaxFrame || kind == kindMore && c.beginning:
		return fmt.Errorf("lossy: the peer sent a frame of at least %d bytes, want at most %d", whole, transport.MaxFrame)
	case kind == kindMore:
		c.partial, c.beginning = append(c.partial[:0], b...), true
		return nil
	case c.beginning:
		b = append(c.partial, b...)
		c.partial, c.beginning = nil, false
	}
	p.put(transport.Event{Kind: transport.EvFrame, Conn: c, Data: b})
	return nil
}

// ready says whether a frame that came before its turn has it now.
func (c *Conn) ready() bool {
	return c.f.o.Resend && !c.down && !c.broken && c.in[c.expect%window].here
}

// deliver gives the user what has its turn, as far as p has room, and after it the
// end of the Conn.
func (c *Conn) deliver(p *poll) {
	for c.ready() && p.room() {
		s := &c.in[c.expect%window]
		b := s.buf
		// The user keeps b until the next Poll. This Poll may fill the place again.
		s.buf, s.here = nil, false
		c.inBytes -= len(b)
		c.ack = true
		if err := c.take(s.kind, b, p); err != nil {
			c.fail(err)
		}
	}
	if c.ended() && p.room() {
		c.down = true
		p.put(transport.Event{Kind: transport.EvDown, Conn: c, Err: c.over})
	}
}

// end takes the end of a Conn.
func (c *Conn) end(err error) {
	if c.over == nil {
		c.over = err
		c.settle(c.next, err)
	}
	c.wake()
}

// fail ends a Conn whose peer does not keep to the protocol.
func (c *Conn) fail(err error) {
	if c.over == nil {
		c.broken = true
		c.end(err)
		_ = c.inner.Close()
	}
}

// ended says whether EvDown is due.
func (c *Conn) ended() bool {
	return c.over != nil && !c.down && c.open == 0 && len(c.f.told) == 0 && !c.ready()
}

// due says whether a Poll has to look at c.
func (c *Conn) due() bool {
	return c.over != nil || c.ack || c.first != c.next || c.ready()
}

// wake makes Polls look at c.
func (c *Conn) wake() {
	if !c.listed {
		c.listed = true
		c.f.busy = append(c.f.busy, c)
	}
}

// stop ends a Conn for its own user, who is told nothing more than how the
// operations have ended.
func (c *Conn) stop() {
	if c.over == nil {
		c.settle(c.fresh, nil) // on their way, as far as one can know
	}
	c.end(transport.ErrClosed)
	c.down = true
}

// gone says whether inner has nothing more to say of a Conn.
func (c *Conn) gone() bool { return c.down && c.open == 0 && c.f.at == c.f.got }

// Close implements transport.Conn.
func (c *Conn) Close() error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.stop()
	return c.inner.Close()
}
