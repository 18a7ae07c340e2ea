package cudaipc

import (
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A Conn is one of inner, for GPU memory that is mapped. f.mu guards all but plain.
type Conn struct {
	f *Fabric
	// Operations of ours have no owner. Those of the user's own are inner's too.
	link.OverConn[struct{}]
	plain  atomic.Bool // operations without a GPU go to inner as they are
	over   error       // why nothing can be posted any more, and what EvDown is to say
	since  time.Time   // when over was set
	down   bool        // EvDown was given, or will not come
	closed bool        // by its user
	left   bool        // inner's has given its EvClosed
	listed bool        // in f.busy
	asks   time.Time   // when to ask whether the peer lives, if over is set
	silent bool        // it does not, or that cannot be seen: see quiet
	waits  bool        // calls of the driver for it are made aside, and it keeps what it has

	head    []byte // a frame with its head, for inner.Post
	trailer []byte // a frame right behind the operation that is or was posted
	below   bool   // inner may have GPU memory of ours to send

	// Writes that may be mapped, and what waits for them. Those from next on have not been started.
	line link.Line[item]
	next uint32
	lane lane

	// Writing by mapping.
	equipped bool      // the lane is there, or is being made
	asked    time.Time // when the first write waited for the introductions
	shown    int       // operations of our introduction that have been posted
	expect   int       // loans that belong to the peer's introduction
	views    [2]*mem.View
	peers    []atomic.Uint64 // the peer's table of keys
	theirs   *segment        // the peer's; nil before it has introduced itself
	ways     map[uint64]*way // to the peer's memory, by key
	maps     []*mapping
	mapped   bool   // a write has gone by mapping
	apart    bool   // neither can map memory of the other
	staged   string // why a write has not gone by mapping, or could not

	// What comes.
	marked   bool            // the peer has introduced itself: it tells what each loan comes behind
	loan     transport.Event // of the peer, which is still to say that
	numbered bool            // number is that of the next frame
	number   uint64
	held     link.Held
}

// Peer implements transport.Conn. Via is how GPU memory travels once it has, and how host memory
// does before. Why says also why GPU memory is not mapped.
func (c *Conn) Peer() transport.Peer {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	p := c.Conn.Peer()
	if c.mapped || c.theirs != nil && c.theirs.done.Load() > 0 {
		p.Via = "cudaipc"
	}
	if c.staged != "" {
		p.Why = strings.TrimPrefix(p.Why+"; cudaipc: "+c.staged, "; ")
	}
	return p
}

// Unsent implements transport.Conn.
func (c *Conn) Unsent() bool {
	if c.plain.Load() {
		return c.Conn.Unsent()
	}
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return c.next != c.line.End || len(c.trailer) > 0 || c.Conn.Unsent()
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
	return op.Dev == mem.CPU && op.User&link.MappedMark == 0 && (op.Kind != transport.OpFrame || len(op.Frame) == 0 || op.Frame[0] != escape)
}

// review finds out whether c is plain. It becomes so in a Post or Poll alone.
func (c *Conn) review() {
	c.plain.Store(c.over == nil && c.line.Empty() && len(c.trailer) == 0 && c.shown == 0 && !c.below)
}

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

// done tells how an operation of the user's ended.
func (c *Conn) done(user uint64, err error) {
	if err != nil && c.over != nil {
		err = c.over
	}
	c.f.told = append(c.f.told, transport.Event{Kind: transport.EvDone, User: user, Conn: c, Err: err})
}

// Copies of a peer may still arrive when its Conn has ended, and wait behind a kernel
// for as long as its process lives. If that has died in the middle of one, the driver
// has taken its streams down, and nothing tells of their end any more.
const (
	lastWrites = 100 * time.Millisecond // where it cannot be seen whether the peer lives
	deadEvery  = 10 * time.Millisecond  // how often it is asked
)

// writing says whether copies of the peer may be under way on a Conn that has ended.
func (c *Conn) writing() bool {
	return c.theirs != nil && c.theirs.done.Load() < c.theirs.begun.Load() && !c.quiet()
}

// quiet says whether c has ended, and with it all that the peer had begun.
func (c *Conn) quiet() bool {
	if now := time.Now(); c.over != nil && !c.silent && now.After(c.asks) {
		c.asks = now.Add(deadEvery)
		dead := c.Conn.Peer().Dead
		c.silent = dead == nil || dead()
	}
	return c.silent
}

// due says whether a Poll has to look at c.
func (c *Conn) due() bool {
	return c.over != nil && !c.down || c.closed || !c.line.Empty() || len(c.trailer) > 0 || c.held.Len() > 0 || c.unanswered()
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
		c.over, c.since = err, time.Now()
		c.asks = c.since.Add(lastWrites)
		c.plain.Store(false)
		c.trailer = nil
		link.Drop(&c.loan)
		if s := c.lane.seg; s != nil {
			s.over.Store(1)
		}
	}
	c.wake()
}

// fail ends a Conn for an error of ours. The peer sees that it did not end in good
// order: it is asked for a key that nobody has.
func (c *Conn) fail(err error) {
	if c.over == nil {
		c.end(fmt.Errorf("cudaipc: %s: %w", c.Conn.Peer().Remote, err))
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

// through says whether c is closed and nothing of ours is left to do for it.
func (c *Conn) through() bool { return c.closed && c.left && c.line.Empty() && !c.lane.working() }

// release gives back what c holds. Its copies are over.
func (c *Conn) release() {
	c.lane.close(c.f)
	for _, m := range c.maps {
		if m.chore == nil {
			c.f.unmap(m)
		}
	}
	for _, v := range c.views {
		if v != nil {
			_ = v.Drop() // our own mapping
		}
	}
	c.maps, c.ways, c.theirs, c.peers, c.views = nil, nil, nil, nil, [2]*mem.View{}
}
