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

// A Conn is one of inner, for GPU memory too. f.mu guards all.
type Conn struct {
	f                  *Fabric
	link.OverConn[job]           // a job says what an operation of inner's belongs to
	over               error     // why nothing can be posted any more, and what EvDown is to say
	since              time.Time // when over was set
	down               bool      // EvDown was given, or will not come
	closed             bool      // by its user
	left               bool      // inner's has given its EvClosed
	listed             bool      // in f.busy
	asks               time.Time // when to ask whether the peer lives, if over is set
	silent             bool      // it does not, or that cannot be seen: see quiet
	waits              bool      // calls of the driver for it are made aside, and it keeps what it has

	head    []byte // a frame with its head, for inner.Post
	trailer []byte // a frame of ours, right behind the operation that is or was posted
	marks   bool   // we have written to GPU memory of the peer: see send

	// Operations that a GPU has to do with, and what waits for them: items[first:last]. Those from
	// next on have not, or not wholly, been started. Nothing of those
	// before passed is left to hand to inner.
	items                     []item
	first, passed, next, last uint32
	queued                    int // bytes of frames there
	lane                      lane

	// Writing by mapping.
	asked  time.Time // when the first write waited for the introductions
	shown  int       // operations of ours that have been posted
	expect int       // loans that belong to the peer's introduction
	views  [2]*mem.View
	peers  []atomic.Uint64 // the peer's table of keys
	theirs *segment        // the peer's; nil before it has introduced itself
	ways   map[uint64]*way // to the peer's memory, by key
	maps   []*mapping
	mapped bool   // a write has gone by mapping
	apart  bool   // neither can map memory of the other
	staged string // why a write has not gone by mapping, or could not

	// What comes.
	marked  bool            // the peer marks
	loan    transport.Event // of the peer, which is still to say behind what it comes
	partial []byte          // the beginning of a frame; nil: none has come
	landed  uint64          // number of the newest copy from a shadow that the peer has asked for
	held    [2]queue        // what waits, and what passes
}

// Peer implements transport.Conn. Via is how GPU memory travels once it has, and how host memory
// does before. Why says also why GPU memory is staged where peers share this host.
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
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return c.passed != c.last || len(c.trailer) > 0 || c.Conn.Unsent()
}

// Post implements transport.Conn.
func (c *Conn) Post(ops []transport.Op) (n int, err error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	switch {
	case c.over != nil:
		return 0, c.over
	case c.f.inside:
		c.f.refused = true
		return 0, nil
	}
	for n < len(ops) {
		taken, bad := c.post(&ops[n])
		if err = bad; !taken {
			break
		}
		n++
	}
	if c.first != c.last {
		c.advance()
		c.wake()
	}
	if c.first != c.last || c.over != nil {
		c.f.rouse()
	}
	return n, err
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
	gpu, waits := op.Dev != mem.CPU, op.After.Event != 0
	switch {
	case waits && !gpu:
		return false, fmt.Errorf("cudaipc: post: an operation of kind %d on host memory waits for a point on %v: only writes of GPU memory may (Caps.Points)", op.Kind, op.After.Dev)
	case op.Kind == transport.OpFrame || op.Kind == transport.OpLend && !gpu:
		return c.order(op)
	case many:
		return false, fmt.Errorf("cudaipc: post: write of %d spans: more than 2^64 bytes", len(op.Src))
	case gpu && c.f.dev == nil, gpu && op.Dev != c.f.name(), waits && op.After.Dev != c.f.name():
		return false, fmt.Errorf("cudaipc: post: memory on %v, behind a stream of %v: this node uses %v (STEPMESH_GPU)", op.Dev, op.After.Dev, c.f.name())
	case gpu && op.Kind != transport.OpWrite:
		return false, fmt.Errorf("cudaipc: post: an operation of kind %d has memory on %v: only writes may have GPU memory", op.Kind, op.Dev)
	case !gpu || n == 0 || !waits && c.f.reads(op):
		return c.write(op, n, job{user: op.User})
	}
	return c.queue(op, n), nil
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
	return c.over != nil && !c.down || c.closed || c.first != c.last || len(c.trailer) > 0 || c.holds() || c.unanswered()
}

// aside is Fabric.aside for c, which starts nothing before then has been called.
func (c *Conn) aside(calls, then func()) {
	c.waits = true
	c.f.aside(calls, func() {
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
		c.giveUp()
		c.signal(transport.Op{Kind: transport.OpWrite, Key: transport.Key{ID: ^uint64(0)}})
		c.Conn.Close()
	}
}

// stop ends a Conn for its own user, once.
func (c *Conn) stop() {
	if !c.closed {
		c.end(transport.ErrClosed)
		c.giveUp()
		c.down, c.closed = true, true
	}
}

// Close implements transport.Conn.
func (c *Conn) Close() {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.stop()
	c.Conn.Close()
	c.f.rouse()
}

// ended says whether EvDown is due.
func (c *Conn) ended() bool { return c.over != nil && !c.down && !c.holds() }

// through says whether c is closed and nothing of ours is left to do for it.
func (c *Conn) through() bool {
	return c.closed && c.Open == 0 && c.first == c.last && !c.lane.working()
}

// gone says whether EvClosed is due, but for completions that are still to be given.
func (c *Conn) gone() bool {
	return c.through() && c.left && !c.writing() && !c.waits && c.f.in.reached(c.landed)
}

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
