package cudaipc

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"fserver/cshim/cuda"
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
	down   bool             // EvDown was given, or will not come
	listed bool             // in f.busy
	asks   atomic.Int64     // when to ask whether the peer lives, nanoseconds; 0: over is not set
	silent atomic.Bool      // it does not, or that cannot be seen: see quiet
	late   atomic.Bool      // the end of its copies has been waited for in vain since: see settle

	jobs    []job    // what inner's operations are, by their User; 0: of nobody
	spare   []uint64 // of jobs
	open    int      // operations that inner has not ended
	scratch [1]transport.Op

	// Operations that GPUs have to do with: items[first:last], of which those
	// from next on have not, or not wholly, been started.
	items             []item
	first, next, last uint32
	began             time.Time // when the one at next was first in the way of a full ring
	lane              lane

	// Writing by mapping.
	asked   time.Time // when the first write waited for the introductions
	shown   int       // operations of ours that have been posted
	expect  int       // loans that belong to the peer's introduction
	views   [2]*mem.View
	peers   []atomic.Uint64 // the peer's table of keys
	theirs  *segment        // the peer's; nil before it has introduced itself
	ways    map[uint64]*way // to the peer's memory, by key
	maps    []*mapping
	mapped  bool   // a write has gone by mapping
	apart   bool   // neither can map memory of the other
	staged  string // why a write has not gone by mapping, or could not
	owes    bool   // the peer is still to be woken
	sweepAt time.Time

	landing int     // writes of the peer that are on their way to the GPU
	pieces  divided // of the peer's write whose last piece is to come
}

// job is what an operation of inner belongs to.
type job struct {
	kind uint8
	user uint64 // jobUser
	item uint32 // jobPiece
	buf  int8   // jobPiece: the piece's buffer
	last bool   // jobPiece: the last one of the item
}

const (
	jobUser  = iota + 1 // an operation of the user's own
	jobPiece            // a piece of a write
)

// item is an operation that GPUs have to do with.
type item struct {
	op     transport.Op
	n      uint64 // bytes
	way    uint8
	number uint64 // wayMapped: of the write
	sent   uint64 // wayStaged: bytes whose copy has been started
	err    error
	over   bool // it has been told
}

const (
	wayNone   = iota // not decided
	wayHeld          // host memory, behind a point in a stream
	wayMapped        // into the peer's memory
	wayStaged        // in pieces, through host memory
)

// Hello is inner's, and so is Remote.
func (c *Conn) Hello() []byte  { return c.inner.Hello() }
func (c *Conn) Remote() string { return c.inner.Remote() }

// Via says how GPU memory travels once it has, and how host memory does before.
func (c *Conn) Via() string {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.mapped {
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
	return c.next != c.last || c.lane.queued() || c.owes || ok && u.Unsent()
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
	if op.Kind == transport.OpLend && c.introducing() {
		return false, nil
	}
	if op.Kind == transport.OpFrame || op.After.Event == 0 && op.Dev == mem.CPU {
		return c.pass(op, job{kind: jobUser, user: op.User})
	}
	n, many := uint64(0), false
	for _, s := range op.Src {
		many = many || n+s.Len < n
		n += s.Len
	}
	switch {
	case many:
		return false, fmt.Errorf("cudaipc: post: write of %d spans: more than 2^64 bytes", len(op.Src))
	case op.Dev != mem.CPU && op.Dev != c.f.name(), op.After.Event != 0 && op.After.Dev != c.f.name():
		return false, fmt.Errorf("cudaipc: post: memory on %v, behind a stream of %v: this node uses %v (STEPMESH_GPU)", op.Dev, op.After.Dev, c.f.name())
	case op.Dev != mem.CPU && op.Kind != transport.OpWrite:
		return false, fmt.Errorf("cudaipc: post: an operation of kind %d has memory on %v: only writes may have GPU memory", op.Kind, op.Dev)
	case n == 0 && op.After.Event == 0:
		return c.pass(op, job{kind: jobUser, user: op.User})
	case c.last-c.first == depth:
		return false, nil
	}
	if c.items == nil {
		if err := c.equip(); err != nil {
			c.fail(err)
			return false, c.over
		}
	}
	c.items[c.last%depth] = item{op: *op, n: n}
	c.last++
	return true, nil
}

// pass hands an operation on to inner.
func (c *Conn) pass(op *transport.Op, j job) (taken bool, err error) {
	var at uint64
	if n := len(c.spare); n > 0 {
		at, c.spare = c.spare[n-1], c.spare[:n-1]
		c.jobs[at] = j
	} else {
		at = uint64(len(c.jobs))
		c.jobs = append(c.jobs, j)
	}
	c.scratch[0] = *op
	c.scratch[0].User, c.scratch[0].After, c.scratch[0].Dev = at, transport.Point{}, mem.CPU
	k, err := c.inner.Post(c.scratch[:])
	c.scratch[0] = transport.Op{}
	if k == 0 {
		c.spare = append(c.spare, at)
		return false, err
	}
	c.open++
	return true, nil
}

// signal posts operations of ours that belong to nothing; false is back-pressure.
func (c *Conn) signal(ops ...transport.Op) bool {
	for i := range ops {
		c.scratch[0] = ops[i]
		k, _ := c.inner.Post(c.scratch[:])
		c.scratch[0] = transport.Op{}
		c.open += k
		if k == 0 {
			return false
		}
	}
	return true
}

// finish takes the end of an operation of inner.
func (c *Conn) finish(at uint64, err error) {
	if at == 0 {
		return
	}
	j := c.jobs[at]
	c.spare = append(c.spare, at)
	if j.kind == jobUser {
		c.done(j.user, err)
		return
	}
	c.lane.buffers |= 1 << j.buf
	it := &c.items[j.item%depth]
	if it.err == nil {
		it.err = err
	}
	if j.last {
		c.complete(it, it.err)
	}
	c.wake()
}

// done tells how an operation of the user's ended.
func (c *Conn) done(user uint64, err error) {
	if err != nil && c.over != nil {
		err = c.over
	}
	c.f.told = append(c.f.told, transport.Event{Kind: transport.EvDone, User: user, Conn: c.self, Err: err})
}

// complete ends an item.
func (c *Conn) complete(it *item, err error) {
	if !it.over {
		it.over = true
		it.op.Src, it.op.Key.Blob = nil, ""
		c.done(it.op.User, err)
	}
}

// advance starts what can be started and notes what has ended.
func (c *Conn) advance() {
	if c.first == c.last {
		return
	}
	for c.over == nil && c.next != c.last && c.start(&c.items[c.next%depth]) {
		c.next++
	}
	c.forward()
	done := c.seg().done.Load()
	for i := c.first; i != c.last; i++ {
		it := &c.items[i%depth]
		switch {
		case it.over:
		case it.way == wayMapped && it.number != 0:
			if it.number <= done {
				c.complete(it, nil)
			} else if c.lane.broken {
				c.complete(it, c.over)
			}
		case c.over != nil && !c.lane.uses(i):
			c.complete(it, c.over)
		}
	}
	for c.first != c.last && c.items[c.first%depth].over {
		c.first++
	}
	if int32(c.next-c.first) < 0 { // it ended before it was started
		c.next = c.first
	}
}

// start starts an item, or goes on with it; true when nothing is left to start.
func (c *Conn) start(it *item) bool {
	if it.way == wayNone && !c.decide(it) {
		return false
	}
	switch it.way {
	case wayHeld:
		passed, err := c.f.dev.Passed(cuda.Event(it.op.After.Event))
		if err != nil {
			c.fail(err)
			return false
		}
		if !passed || it.op.Kind == transport.OpLend && c.introducing() {
			return false
		}
		taken, err := c.pass(&it.op, job{kind: jobUser, user: it.op.User})
		if taken {
			it.over = true // inner tells
			it.op.Src = nil
		} else if err != nil {
			c.fail(err)
		}
		return taken
	case wayMapped:
		return true
	}
	return c.stage(it)
}

// decide finds the way of an item; false if that is not known yet.
func (c *Conn) decide(it *item) bool {
	if it.op.Dev == mem.CPU || it.n == 0 {
		it.way = wayHeld
		return true
	}
	var r remote
	if !r.decode(it.op.Key) {
		it.way = wayStaged
		return true
	}
	switch c.write(it, &r) {
	case tryAgain:
		return false
	case tryDone:
		it.way = wayMapped
	default:
		it.way = wayStaged
	}
	return c.over == nil
}

// seg is our segment; there is one when there are items.
func (c *Conn) seg() *segment { return c.lane.seg }

// coming says whether the peer writes by mapping right now.
func (c *Conn) coming() bool {
	return c.theirs != nil && c.over == nil && c.theirs.begun.Load() != c.lane.seg.taken.Load()
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
	return c.over != nil || c.first != c.last || c.coming() || c.expect > 0 || c.lane.queued() || c.owes
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
		c.asks.Store(time.Now().Add(lastWrites).UnixNano())
	}
	c.wake()
}

// fail ends a Conn for an error of ours. The peer sees that it did not end in good
// order: it is asked for a key that nobody has.
func (c *Conn) fail(err error) {
	if c.over == nil {
		c.end(fmt.Errorf("cudaipc: %s: %w", c.Remote(), err))
		c.signal(transport.Op{Kind: transport.OpWrite, Key: transport.Key{ID: ^uint64(0)}})
		_ = c.inner.Close()
	}
}

// stop ends a Conn for its own user.
func (c *Conn) stop() {
	c.end(transport.ErrClosed)
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
	return c.over != nil && !c.down && c.open == 0 && c.first == c.last && c.landing == 0
}

// through says whether c has ended and nothing of ours is left to do for it.
func (c *Conn) through() bool {
	return c.down && c.open == 0 && c.first == c.last && c.landing == 0 && !c.copying()
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
