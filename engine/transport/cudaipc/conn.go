package cudaipc

import (
	"strings"
	"sync/atomic"
	"time"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/link/over"
)

// A Conn is one of inner, for GPU memory that is mapped.
type Conn struct {
	// In its Line are writes that may be mapped, and what waits for them. What is held waits for mapped writes of the peer's.
	over.Path[item]
	f      *Fabric
	since  time.Time // when Err was set
	asks   time.Time // when to ask whether the peer lives, if Err is set
	silent bool      // it does not, or that cannot be seen: see quiet

	head  []byte // a frame with its head, for inner.Post
	below bool   // inner may have GPU memory of ours to send

	next   uint32 // operations from next on have not been started
	queued int    // entries of the driver's queue that its writes take
	sender sender

	// Writing by mapping.
	equipped bool      // the sender is there, or is being made
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
}

// Peer implements transport.Conn. Via is how GPU memory travels once it has, and how host memory
// does before. Why says also why GPU memory is not mapped.
func (c *Conn) Peer() transport.Peer {
	c.f.Mu.Lock()
	defer c.f.Mu.Unlock()
	p := c.Conn.Peer()
	if c.mapped || c.theirs != nil && c.theirs.done.Load() > 0 {
		p.Via = "cudaipc"
	}
	if c.staged != "" {
		p.Why = strings.TrimPrefix(p.Why+"; cudaipc: "+c.staged, "; ")
	}
	return p
}

// Pends implements over.Conn.
func (c *Conn) Pends() bool { return c.next != c.Line.End }

// IsPlain implements over.Conn.
func (c *Conn) IsPlain(op *transport.Op) bool {
	return op.Dev == mem.CPU && op.User&link.MappedMark == 0 && (op.Kind != transport.OpFrame || len(op.Frame) == 0 || op.Frame[0] != escape)
}

// Plain implements over.Conn.
func (c *Conn) Plain() bool { return c.shown == 0 && !c.below }

// Copies of a peer may still arrive when its Conn has ended, and wait behind a kernel
// for as long as its process lives. If that has died in the middle of one, the driver
// has taken its streams down, and nothing tells of their end any more.
var lastWrites = 100 * time.Millisecond // where it cannot be seen whether the peer lives; tests set it

// writing says whether copies of the peer may be under way on a Conn that has ended.
func (c *Conn) writing() bool {
	return c.theirs != nil && c.theirs.done.Load() < c.theirs.begun.Load() && !c.quiet()
}

// quiet says whether c has ended, and with it all that the peer had begun.
func (c *Conn) quiet() bool {
	if now := time.Now(); c.Err != nil && !c.silent && now.After(c.asks) {
		c.asks = now.Add(over.LingerEvery)
		dead := c.Conn.Peer().Dead
		c.silent = dead == nil || dead()
	}
	return c.silent
}

// Serve implements over.Conn. When the Conn has ended, mapped writes may still land: it waits for them for lastWrites, and
// then drops all events.
func (c *Conn) Serve() {
	if c.Owes {
		c.introduce()
	}
	if c.Err != nil && c.Held.Len() > 0 && !c.Reached(c.Held.Number()) && time.Since(c.since) > lastWrites {
		c.Drop()
	}
}

// Stopped implements over.Conn.
func (c *Conn) Stopped() {
	c.since = time.Now()
	c.asks = c.since.Add(lastWrites)
	link.Drop(&c.loan)
	if s := c.sender.seg; s != nil {
		s.over.Store(1)
	}
}

// Lingers implements over.Conn.
func (c *Conn) Lingers() bool { return c.writing() }

// Done implements over.Conn. What is ours has nothing to do.
func (*Conn) Done(uint64, error) {}

// Working implements over.Conn.
func (c *Conn) Working() bool { return c.sender.working() }

// Stream implements over.Conn.
func (c *Conn) Stream() cuda.Stream { return c.sender.stream }

// Break implements over.Conn.
func (c *Conn) Break(bool) {
	c.sender.broken = true
	c.sender.seg.begun.Store(c.sender.seg.done.Load()) // for the peer: none is under way
}

// Free implements over.Conn.
func (c *Conn) Free() {
	c.sender.close(c.f)
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
