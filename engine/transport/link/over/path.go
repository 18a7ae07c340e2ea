package over

import (
	"fmt"
	"sync/atomic"

	"fserver/cshim/cuda"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A Conn is a Conn of a Fabric that embeds a Base. It embeds a Path, which makes it a transport.Conn and has the methods
// that are not exported.
type Conn interface {
	transport.Conn

	// IsPlain reports whether inner may be handed an operation as it is. Mu may not be held.
	IsPlain(op *transport.Op) bool
	// Plain reports whether nothing but what the Path knows of keeps operations that are plain from inner.
	Plain() bool
	// Take takes an operation of the user's; false without an error is back-pressure.
	Take(op *transport.Op) (taken bool, err error)
	// Advance starts what can be started of the Line, which is not empty, and notes what has ended.
	Advance()
	// Serve does what else is due: what the Conn owes, and what there is to do at its end.
	Serve()
	// Pends reports whether operations in the Line have not gone, or not wholly.
	Pends() bool

	// Done takes the end of an operation of ours.
	Done(user uint64, err error)
	// Frame and Lent take a frame and a loan of inner, for which p has room.
	Frame(b []byte, p *link.Found) error
	Lent(e *transport.Event, p *link.Found) error
	// Reached reports whether a write or copy of the peer's has landed; 0 is none.
	Reached(number uint64) bool

	// Stopped is called once, when nothing can be posted any more.
	Stopped()
	// Working reports whether copies of ours are under way, on Stream. Break is called when the device does not make them:
	// nothing is left on Stream (idle), or it fails. If Conn is Working all the same, Break is called again.
	Working() bool
	Stream() cuda.Stream
	Break(idle bool)
	// Lingers reports whether copies of the peer's are under way, or may be.
	Lingers() bool
	// Free gives back what the Conn holds. Its copies are over.
	Free()

	path
}

// path is what a Base asks of the Path of a Conn.
type path interface {
	advance() (empty bool)
	stop()
	through() bool
	due() bool
	idled(idle bool, err error)
	event(e *transport.Event, p *link.Found)
	give(p *link.Found)
	serve(p *link.Found) (again bool)
}

var _ path = (*Path[struct{}])(nil)

// A Path is the part of a Conn that does not depend on how it copies. I is what the Conn has to know of an operation
// that waits.
type Path[I any] struct {
	// The User of a piece has an owner. Those of the user's own operations are inner's too, so that they need none.
	link.OverConn[Piece[I]]
	base   *Base
	own    Conn        // that this is the Path of
	plain  atomic.Bool // operations that are plain go to inner as they are
	Err    error       // why nothing can be posted any more, and what EvDown is to say
	down   bool        // EvDown was given, or will not come
	closed bool        // by its user
	left   bool        // inner's has given its EvClosed
	listed bool        // in Base.busy
	Waits  bool        // calls of the driver for it are made aside, and it keeps what it has
	Owes   bool        // there is something to do for Conn.Serve
	// refused is why inner does not take an operation that waits, at quiet of Base.quiet. It is handed nothing more.
	refused error
	quiet   uint64

	Trailer []byte // a frame of ours, right behind the operation that is or was posted
	Line    link.Line[I]
	Held    link.Held // what has come
}

// A Piece is what an operation of inner is a part of, and the number of the piece's buffer.
type Piece[I any] struct {
	Of  *link.Waiting[I]
	Buf uint8
}

// Begin begins the Path of a Conn over one of inner's.
func (c *Path[I]) Begin(b *Base, own Conn, in transport.Conn) {
	c.base, c.own, c.Conn, c.Mark = b, own, in, b.mark
	c.plain.Store(true)
}

// Unsent implements transport.Conn.
func (c *Path[I]) Unsent() bool {
	if c.plain.Load() {
		return c.Conn.Unsent()
	}
	c.base.Mu.Lock()
	defer c.base.Mu.Unlock()
	return c.own.Pends() || len(c.Trailer) > 0 || c.Conn.Unsent()
}

// Post implements transport.Conn.
func (c *Path[I]) Post(ops []transport.Op) (n int, err error) {
	if c.plain.Load() {
		k := 0
		for k < len(ops) && c.own.IsPlain(&ops[k]) {
			k++
		}
		if k > 0 {
			n, err = c.Conn.Post(ops[:k])
		}
		if n == len(ops) || n < k {
			return n, c.why(err)
		}
	}
	c.base.Lock()
	defer c.base.Mu.Unlock()
	switch {
	case c.Err != nil:
		return n, c.Err
	case c.base.Calls.Inside:
		c.base.refused = true
		return n, nil
	}
	more, err := link.Take(ops[n:], c.own.Take)
	n += more
	if !c.Line.Empty() {
		c.own.Advance()
		c.Wake()
	}
	if !c.Line.Empty() || c.Err != nil {
		c.base.rouse()
	}
	c.review()
	return n, err
}

// review finds out whether c is plain. It becomes so in a Post or Poll alone.
func (c *Path[I]) review() {
	c.plain.Store(c.Err == nil && c.Line.Empty() && len(c.Trailer) == 0 && c.own.Plain())
}

// why is an error of inner, or why c has ended.
func (c *Path[I]) why(err error) error {
	if err == nil {
		return nil
	}
	c.base.Mu.Lock()
	defer c.base.Mu.Unlock()
	if c.Err != nil {
		return c.Err
	}
	return err
}

// Complete ends an operation that waits.
func (c *Path[I]) Complete(w *link.Waiting[I], err error) {
	if !w.Over {
		user := w.Op.User
		c.Line.Finish(w)
		if err != nil && c.Err != nil {
			err = c.Err
		}
		c.base.told = append(c.base.told, transport.Event{Kind: transport.EvDone, User: user, Conn: c.own, Err: err})
	}
}

// Took takes what inner said to an operation that waits.
func (c *Path[I]) Took(w *link.Waiting[I], taken bool, err error) bool {
	if taken {
		c.Line.Finish(w)
	} else {
		c.Refused(err)
	}
	return taken
}

// Refused takes that inner does not take an operation that waits, for an error, or for none. As a rule inner's Conn has
// ended. Then its EvDown is to come with the reason, behind the frames that have arrived, so c does not end here.
func (c *Path[I]) Refused(err error) {
	if err != nil && c.refused == nil {
		c.refused, c.quiet = err, c.base.quiet
		c.Wake()
	}
}

// quietPolls is how many Polls of inner that find nothing tell that no EvDown is to come. A single one does not: a Poll
// does a bounded amount of work, and may end in the middle of a frame.
const quietPolls = 64

// wrong ends c if inner has refused an operation that is wrong in itself: no EvDown has come.
func (c *Path[I]) wrong() {
	if c.refused != nil && c.Err == nil && c.base.quiet-c.quiet >= quietPolls {
		c.Fail(c.refused)
	}
}

// Hand hands inner an operation with another User, and the Trailer right behind it. If inner takes only the operation, the
// Trailer stays, and Flush sends it before anything else.
func (c *Path[I]) Hand(op *transport.Op, user uint64) (taken bool, err error) {
	return c.handed(c.pass(op, user, c.Trailer))
}

// HandPiece is Hand for a piece of an operation that waits. If then is not nil, it is the operation right behind that one, and
// is posted with the piece. It is over here when inner has taken it.
func (c *Path[I]) HandPiece(op *transport.Op, p Piece[I], then *link.Waiting[I]) (taken bool, err error) {
	all, last := 1, (*transport.Op)(nil)
	if len(c.Trailer) > 0 {
		all++
	}
	if then != nil {
		all, last = all+1, &then.Op
	}
	if c.refused != nil {
		return c.handed(0, nil)
	}
	k, err := c.Pass(op, p, c.Trailer, last)
	if then != nil && k == all {
		c.Line.Finish(then)
	}
	return c.handed(k, err)
}

func (c *Path[I]) pass(op *transport.Op, user uint64, behind []byte) (int, error) {
	if c.refused != nil {
		return 0, nil
	}
	if c.base.Below {
		defer c.base.Calls.Leave().Back()
	}
	return c.PassAs(op, user, behind, nil)
}

func (c *Path[I]) handed(k int, err error) (taken bool, _ error) {
	if k == 1 && len(c.Trailer) > 0 {
		c.Wake()
	} else {
		c.Trailer = link.Trim(c.Trailer)
	}
	return k > 0, err
}

// Flush sends a Trailer that inner has not taken yet; false is back-pressure. What it belongs to may have passed.
func (c *Path[I]) Flush() bool {
	if len(c.Trailer) > 0 && c.Signal(transport.Op{Kind: transport.OpFrame, Frame: c.Trailer, Passes: true}) {
		c.Trailer = link.Trim(c.Trailer)
	}
	return len(c.Trailer) == 0
}

// Signal posts an operation whose end nobody waits for; false is back-pressure.
func (c *Path[I]) Signal(op transport.Op) bool {
	k, _ := c.pass(&op, c.Mark, nil)
	return k == 1
}

// Aside is gpu.Calls.Aside for a Conn, which starts nothing before then has been called.
func (c *Path[I]) Aside(calls, then func()) {
	c.Waits = true
	c.base.Calls.Aside(calls, func() {
		c.Waits = false
		then()
		c.Wake()
	})
}

// Wake makes Polls look at the Conn.
func (c *Path[I]) Wake() {
	if !c.listed {
		c.listed = true
		c.base.busy = append(c.base.busy, c.own)
	}
}

// end takes the end of a Conn.
func (c *Path[I]) end(err error) {
	if c.Err == nil {
		c.Err = err
		c.plain.Store(false)
		c.Trailer, c.Owes, c.refused = nil, false, nil
		c.own.Stopped()
	}
	c.Wake()
}

// Fail ends a Conn for an error of ours. What is held is still given. The peer sees that it did not end in good order.
func (c *Path[I]) Fail(err error) {
	if c.Err == nil {
		c.end(c.because(err))
		c.Conn.CloseFor(c.Err)
	}
}

// because wraps the reason for which a Conn ended.
func (c *Path[I]) because(err error) error {
	return fmt.Errorf("%s: %s: %w", c.base.name, c.Conn.Peer().Remote, err)
}

// Spoil is Fail where the bytes of the write with a number do not come any more. So it drops what is held for that write, and
// what is behind, and is the reason that EvDown gives, also if the Conn has ended before.
func (c *Path[I]) Spoil(err error, number uint64) {
	if c.Err != nil && !c.down {
		c.Err = c.because(err)
	}
	c.Fail(err)
	c.Held.DropFrom(number)
}

// Drop drops what is held.
func (c *Path[I]) Drop() { c.Held.Drop() }

// stop ends a Conn for its own user, once.
func (c *Path[I]) stop() {
	if !c.closed {
		c.end(transport.ErrClosed)
		c.Drop()
		c.down, c.closed = true, true
	}
}

// Close implements transport.Conn.
func (c *Path[I]) Close() {
	c.base.Lock()
	defer c.base.Mu.Unlock()
	c.stop()
	c.Conn.Close()
	c.base.rouse()
}

// CloseFor implements transport.Conn.
func (c *Path[I]) CloseFor(why error) {
	c.base.Lock()
	defer c.base.Mu.Unlock()
	c.stop()
	c.Conn.CloseFor(why)
	c.base.rouse()
}

// advance does what can be done for the Line, and reports whether it is empty then.
func (c *Path[I]) advance() (empty bool) {
	if !c.Line.Empty() {
		c.own.Advance()
	}
	return c.Line.Empty()
}

// due says whether a Poll has to look at c.
func (c *Path[I]) due() bool {
	return c.Err != nil && !c.down || c.closed || !c.Line.Empty() || len(c.Trailer) > 0 || c.Held.Len() > 0 || c.Owes
}

// through says whether c is closed and nothing of ours is left to do for it.
func (c *Path[I]) through() bool {
	return c.closed && c.left && c.Line.Empty() && !c.own.Working()
}

// idled takes what the device says to the stream of a Conn that is working.
func (c *Path[I]) idled(idle bool, err error) {
	if err != nil || idle && c.Err != nil && c.own.Working() { // what is left was not enqueued
		c.own.Break(idle)
		c.Fail(err)
		c.Wake()
	}
}

// event takes one event of inner's Conn, for which p has room.
func (c *Path[I]) event(e *transport.Event, p *link.Found) {
	var err error
	switch {
	case e.Kind == transport.EvDone && e.User&c.Mark != 0:
		c.own.Done(e.User, e.Err)
	case e.Kind == transport.EvDone: // with an error
		if e.Conn = c.own; c.Err != nil {
			e.Err = c.Err
		}
		p.Put(*e)
	case e.Kind == transport.EvClosed:
		c.left = true
		c.Wake()
	case c.Err != nil: // it has ended since inner was asked
		link.Drop(e)
	case e.Kind == transport.EvDown:
		c.end(e.Err)
	case e.Kind == transport.EvFrame:
		err = c.own.Frame(e.Data, p)
	case e.Kind == transport.EvLent:
		e.Conn = c.own
		err = c.own.Lent(e, p)
	default:
		e.Conn = c.own
		p.Put(*e)
	}
	if err != nil {
		c.Fail(err)
	}
}

// ArriveFrame is Arrive for a frame.
func (c *Path[I]) ArriveFrame(b []byte, number uint64, p *link.Found) error {
	return c.Arrive(&transport.Event{Kind: transport.EvFrame, Conn: c.own, Data: b}, number, p)
}

// Arrive gives an event of the peer's, for which p has room, or holds it until a number has been reached, and the events
// before it have been given.
func (c *Path[I]) Arrive(e *transport.Event, number uint64, p *link.Found) error {
	if c.Held.Len() == 0 && (number == 0 || c.own.Reached(number)) {
		p.Put(*e)
		return nil
	}
	c.Wake()
	return c.Held.Push(e, number, c.base.polls)
}

// give gives the events whose turn has come, as far as p has room.
func (c *Path[I]) give(p *link.Found) {
	for c.Held.Len() > 0 && p.Room() && c.own.Reached(c.Held.Number()) {
		p.Put(c.Held.Pop(c.base.polls))
	}
}

// serve does what is due on a Conn, and reports whether it has to be called again.
func (c *Path[I]) serve(p *link.Found) (again bool) {
	if c.Held.Len() > 0 {
		c.give(p)
	}
	c.wrong()
	c.advance()
	if len(c.Trailer) > 0 {
		c.Flush()
	}
	if c.Owes || c.Err != nil {
		c.own.Serve()
	}
	c.review()
	if c.Err != nil && !c.down && c.Held.Len() == 0 && p.Room() && len(c.base.told) == 0 {
		c.down = true
		p.Put(transport.Event{Kind: transport.EvDown, Conn: c.own, Err: c.Err})
	}
	if c.through() && !c.own.Lingers() && !c.Waits && p.Room() && len(c.base.told) == 0 {
		c.base.forget(c.own, c.Conn)
		p.Put(transport.Event{Kind: transport.EvClosed, Conn: c.own})
		return false
	}
	c.listed = c.due()
	return c.listed
}
