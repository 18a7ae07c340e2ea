package stage

import (
	"fmt"
	"sync/atomic"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A Conn is one of inner, for GPU memory too. f.mu guards all but plain.
type Conn struct {
	f *Fabric
	// The User of a piece has an owner. Those of the user's own operations are inner's too, so that they need none.
	link.OverConn[piece]
	plain  atomic.Bool // nothing of c waits: operations without a GPU go to inner as they are
	over   error       // why nothing can be posted any more, and what EvDown is to say
	down   bool        // EvDown was given, or will not come
	closed bool        // by its user
	left   bool        // inner's has given its EvClosed
	listed bool        // in f.busy
	waits  bool        // calls of the driver for it are made aside, and it keeps what it has

	trailer []byte // a frame of ours, right behind the operation that is or was posted

	// Operations that a GPU has to do with, and what waits for them. Those from next on have not, or not wholly, been
	// started. Nothing of those before passed is left to hand to inner.
	line         link.Line[item]
	passed, next uint32
	lane         lane

	// What comes.
	bare   bool   // the next frame is the user's, whatever it starts with
	landed uint64 // number of the newest copy from a shadow that the peer has asked for
	held   link.Held
}

// Unsent implements transport.Conn.
func (c *Conn) Unsent() bool {
	if c.plain.Load() {
		return c.Conn.Unsent()
	}
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return c.passed != c.line.End || len(c.trailer) > 0 || c.Conn.Unsent()
}

// Post implements transport.Conn.
func (c *Conn) Post(ops []transport.Op) (n int, err error) {
	if c.plain.Load() {
		k := 0
		for k < len(ops) && isPlain(&ops[k]) {
			k++
		}
		if k > 0 {
			n, err = c.Conn.Post(ops[:k])
		}
		if n == len(ops) || n < k {
			return n, c.why(err)
		}
	}
	c.f.lock()
	defer c.f.mu.Unlock()
	switch {
	case c.over != nil:
		return n, c.over
	case c.f.calls.Inside:
		c.f.refused = true
		return n, nil
	}
	for n < len(ops) {
		taken, bad := c.post(&ops[n])
		if err = bad; !taken {
			break
		}
		n++
	}
	if !c.line.Empty() {
		c.advance()
		c.wake()
	}
	if !c.line.Empty() || c.over != nil {
		c.f.rouse()
	}
	c.review()
	return n, err
}

// isPlain says whether inner may be handed an operation as it is.
func isPlain(op *transport.Op) bool {
	if op.Dev != mem.CPU || op.After.Event != 0 || op.User&link.StageMark != 0 {
		return false
	}
	switch op.Kind {
	case transport.OpFrame:
		return len(op.Frame) == 0 || op.Frame[0] != escape
	case transport.OpWrite:
		return op.Key.Blob == "" || !ofShadow(op.Key)
	}
	return true
}

// review finds out whether c is plain. It becomes so in a Post or Poll alone.
func (c *Conn) review() { c.plain.Store(c.over == nil && c.line.Empty() && len(c.trailer) == 0) }

// why is an error of inner, or why c has ended.
func (c *Conn) why(err error) error {
	if err == nil {
		return nil
	}
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.over != nil {
		return c.over
	}
	return err
}

// rouse wakes a sleeper, who has not heard of what there is to do now.
func (f *Fabric) rouse() {
	if f.slept {
		f.slept = false
		f.Wake(pollEvery)
	}
}

func (c *Conn) post(op *transport.Op) (taken bool, err error) {
	n, many := uint64(0), false
	for _, s := range op.Src {
		many = many || n+s.Len < n
		n += s.Len
	}
	gpu, waits, own := op.Dev != mem.CPU, op.After.Event != 0, c.f.calls.Name()
	switch {
	case op.User&link.StageMark != 0:
		return false, fmt.Errorf("stage: post: the User of an operation is %#x, want less than 2^62", op.User)
	case waits && !gpu:
		return false, fmt.Errorf("stage: post: an operation of kind %d on host memory waits for a point on %v: only writes of GPU memory may (Caps.Points)", op.Kind, op.After.Dev)
	case op.Kind == transport.OpFrame || op.Kind == transport.OpLend && !gpu:
		return c.order(op)
	case many:
		return false, fmt.Errorf("stage: post: write of %d spans: more than 2^64 bytes", len(op.Src))
	case gpu && own == mem.CPU, gpu && op.Dev != own, waits && op.After.Dev != own:
		return false, fmt.Errorf("stage: post: memory on %v, behind a stream of %v: this node uses %v (STEPMESH_GPU)", op.Dev, op.After.Dev, own)
	case gpu && op.Kind != transport.OpWrite:
		return false, fmt.Errorf("stage: post: an operation of kind %d has memory on %v: only writes may have GPU memory", op.Kind, op.Dev)
	case !gpu || n == 0 || !waits && c.f.reads(op):
		return c.write(op, n, piece{})
	}
	return c.line.Push(op, item{n: n}), nil
}

// done tells how an operation of the user's ended.
func (c *Conn) done(user uint64, err error) {
	if err != nil && c.over != nil {
		err = c.over
	}
	c.f.told = append(c.f.told, transport.Event{Kind: transport.EvDone, User: user, Conn: c, Err: err})
}

// due says whether a Poll has to look at c.
func (c *Conn) due() bool {
	return c.over != nil && !c.down || c.closed || !c.line.Empty() || len(c.trailer) > 0 || c.held.Len() > 0
}

// aside is gpu.Calls.Aside for c, which starts nothing before then has been called.
func (c *Conn) aside(calls, then func()) {
	c.waits = true
	c.f.calls.Aside(calls, func() {
		c.waits = false
		then()
		c.wake()
	})
}

// wake makes Polls look at c.
func (c *Conn) wake() {
	if !c.listed {
		c.listed = true
		c.f.busy = append(c.f.busy, c)
	}
}

// end takes the end of a Conn.
func (c *Conn) end(err error) {
	if c.over == nil {
		c.over = err
		c.plain.Store(false)
		c.trailer = nil
	}
	c.wake()
}

// fail ends a Conn for an error of ours. The peer sees that it did not end in good
// order: it is asked for a key that nobody has.
func (c *Conn) fail(err error) {
	if c.over == nil {
		c.end(fmt.Errorf("stage: %s: %w", c.Conn.Peer().Remote, err))
		c.held.Drop(c.f.polls)
		c.signal(transport.Op{Kind: transport.OpWrite, Key: transport.Key{ID: ^uint64(0)}})
		c.Conn.Close()
	}
}

// stop ends a Conn for its own user, once.
func (c *Conn) stop() {
	if !c.closed {
		c.end(transport.ErrClosed)
		c.held.Drop(c.f.polls)
		c.down, c.closed = true, true
	}
}

// Close implements transport.Conn.
func (c *Conn) Close() {
	c.f.lock()
	defer c.f.mu.Unlock()
	c.stop()
	c.Conn.Close()
	c.f.rouse()
}

// gone says whether EvClosed is due, but for completions that are still to be given.
func (c *Conn) gone() bool {
	return c.closed && c.left && c.line.Empty() && !c.lane.working() && !c.waits && c.f.in.reached(c.landed)
}
