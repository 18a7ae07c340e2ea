package cudaipc

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// A Conn is one of inner, for GPU memory too. f.mu guards all.
type Conn struct {
	f      *Fabric
	inner  transport.Conn
	self   transport.Conn   // c, or what shows the user that it lends
	lender transport.Lender // inner, if it is one
	over   error            // why nothing can be posted any more, and what EvDown is to say
	since  time.Time        // when over was set
	down   bool             // EvDown was given, or will not come
	listed bool             // in f.busy
	asks   atomic.Int64     // when to ask whether the peer lives, nanoseconds; 0: over is not set
	silent atomic.Bool      // it does not, or that cannot be seen: see quiet
	late   atomic.Bool      // the end of its copies has been waited for in vain since: see settle

	jobs    []job    // what inner's operations are, by their User; 0: of nobody
	spare   []uint64 // of jobs
	open    int      // operations that inner has not ended
	scratch [2]transport.Op
	head    []byte // a frame with its head, for inner.Post
	trailer []byte // a frame of ours, right behind the operation that is or was posted
	marks   bool   // we have written to GPU memory of the peer: see send

	// Operations that a GPU has to do with, and what waits for them: items[first:last], of
	// which those from next on have not, or not wholly, been started.
	items             []item
	first, next, last uint32
	queued            int // bytes of frames there
	lane              lane

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
	marked    bool            // the peer marks
	loan      transport.Event // of the peer, which is still to say behind what it comes
	partial   []byte          // the beginning of a frame
	beginning bool            // partial is one
	landed    uint64          // number of the newest copy from a shadow that the peer has asked for
	held      [2]queue        // what waits, and what passes
}

// Hello is inner's, and so is Remote.
func (c *Conn) Hello() []byte  { return c.inner.Hello() }
func (c *Conn) Remote() string { return c.inner.Remote() }

// Via says how GPU memory travels once it has, and how host memory does before.
func (c *Conn) Via() string {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.mapped || c.theirs != nil && c.theirs.done.Load() > 0 {
		return "cudaipc"
	}
	via, _ := transport.Via(c.inner, c.f.Name())
	return via
}

// Why is inner's, and why GPU memory is staged where peers share this host.
func (c *Conn) Why() string {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	_, why := transport.Via(c.inner, c.f.Name())
	switch {
	case c.staged == "":
		return why
	case why == "":
		return "cudaipc: " + c.staged
	}
	return why + "; cudaipc: " + c.staged
}

// Unsent implements transport.Unsender.
func (c *Conn) Unsent() bool {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	u, ok := c.inner.(transport.Unsender)
	return c.next != c.last || c.lane.queued() || len(c.trailer) > 0 || ok && u.Unsent()
}

// lendingConn is a Conn over one that lends host memory.
type lendingConn struct{ *Conn }

// Lends implements transport.Lender.
func (c lendingConn) Lends(s mem.Span) bool {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	return c.over == nil && c.lender.Lends(s)
}

// Post implements transport.Conn.
func (c *Conn) Post(ops []transport.Op) (n int, err error) {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.over != nil {
		return 0, c.over
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

func (c *Conn) post(op *transport.Op) (taken bool, err error) {
	n, many := uint64(0), false
	for _, s := range op.Src {
		many = many || n+s.Len < n
		n += s.Len
	}
	gpu, waits := op.Dev != mem.CPU, op.After.Event != 0
	switch {
	case op.Kind == transport.OpFrame || op.Kind == transport.OpLend && !waits && !gpu:
		return c.order(op)
	case many:
		return false, fmt.Errorf("cudaipc: post: write of %d spans: more than 2^64 bytes", len(op.Src))
	case (gpu || waits) && c.f.dev == nil, gpu && op.Dev != c.f.name(), waits && op.After.Dev != c.f.name():
		return false, fmt.Errorf("cudaipc: post: memory on %v, behind a stream of %v: this node uses %v (STEPMESH_GPU)", op.Dev, op.After.Dev, c.f.name())
	case gpu && op.Kind != transport.OpWrite:
		return false, fmt.Errorf("cudaipc: post: an operation of kind %d has memory on %v: only writes may have GPU memory", op.Kind, op.Dev)
	case !waits && (!gpu || n == 0):
		return c.write(op, n, n > 0 && ofGPU(op.Key), job{kind: jobUser, user: op.User})
	}
	return c.queue(op, n)
}

// done tells how an operation of the user's ended.
func (c *Conn) done(user uint64, err error) {
	if err != nil && c.over != nil {
		err = c.over
	}
	c.f.told = append(c.f.told, transport.Event{Kind: transport.EvDone, User: user, Conn: c.self, Err: err})
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

// quiet says whether c has ended, and with it all that the peer had begun; also for
// who does not hold f.mu.
func (c *Conn) quiet() bool {
	at, now := c.asks.Load(), time.Now().UnixNano()
	if at == 0 || now < at || c.silent.Load() || !c.asks.CompareAndSwap(at, now+int64(deadEvery)) {
		return c.silent.Load()
	}
	dead, known := false, false
	if m, ok := c.inner.(transport.Mortal); ok {
		dead, known = m.Dead()
	}
	if dead || !known {
		c.silent.Store(true)
	}
	return c.silent.Load()
}

// copying says whether copies of ours are under way.
func (c *Conn) copying() bool { return c.lane.working() }

// due says whether a Poll has to look at c.
func (c *Conn) due() bool {
	return c.over != nil || c.first != c.last || c.lane.queued() || len(c.trailer) > 0 || c.holds() || c.unanswered()
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
		c.asks.Store(c.since.Add(lastWrites).UnixNano())
		c.trailer = nil
		drop(&c.loan)
	}
	c.wake()
}

// fail ends a Conn for an error of ours. The peer sees that it did not end in good
// order: it is asked for a key that nobody has.
func (c *Conn) fail(err error) {
	if c.over == nil {
		c.end(fmt.Errorf("cudaipc: %s: %w", c.Remote(), err))
		c.giveUp()
		c.signal(transport.Op{Kind: transport.OpWrite, Key: transport.Key{ID: ^uint64(0)}})
		_ = c.inner.Close()
	}
}

// stop ends a Conn for its own user.
func (c *Conn) stop() {
	c.end(transport.ErrClosed)
	c.giveUp()
	c.down = true
}

// Close implements transport.Conn.
func (c *Conn) Close() error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	c.stop()
	return c.inner.Close()
}

// ended says whether EvDown is due.
func (c *Conn) ended() bool {
	return c.over != nil && !c.down && c.open == 0 && c.first == c.last && !c.holds()
}

// through says whether c has ended and nothing of ours is left to do for it.
func (c *Conn) through() bool {
	return c.down && c.open == 0 && c.first == c.last && !c.copying()
}

// gone says whether nothing more comes of c.
func (c *Conn) gone() bool {
	return c.through() && c.f.at == c.f.got && !c.writing() &&
		!slices.ContainsFunc(c.f.told, func(e transport.Event) bool { return e.Conn == c.self })
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
