package stage

import (
	"fmt"
	"strings"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/link/over"
)

// A Conn is one of inner, for GPU memory too.
type Conn struct {
	// In its Line are operations that a GPU has to do with, and what waits for them. What is held waits for copies from shadows.
	over.Path[item]
	f *Fabric

	// Operations from next on have not, or not wholly, been started. Nothing of those before passed is left to hand to inner.
	passed, next uint32
	sender       sender

	// What comes.
	bare   bool   // the next frame is the user's, whatever it starts with
	landed uint64 // number of the newest copy from a shadow that the peer has asked for
	lifts  int    // of them, those that have not been enqueued
}

// Pends implements over.Conn.
func (c *Conn) Pends() bool { return c.passed != c.Line.End }

// IsPlain implements over.Conn.
func (c *Conn) IsPlain(op *transport.Op) bool {
	if op.Dev != mem.CPU || op.After.Event != 0 || op.User&link.StageMark != 0 {
		return false
	}
	switch op.Kind {
	case transport.OpFrame:
		return !escaped(op.Frame)
	case transport.OpWrite:
		return op.Key.Blob == "" || !ofShadow(op.Key)
	}
	return true
}

// Take implements over.Conn.
func (c *Conn) Take(op *transport.Op) (taken bool, err error) {
	n, many := uint64(0), false
	for _, s := range op.Src {
		many = many || n+s.Len < n
		n += s.Len
	}
	gpu, waits, own := op.Dev != mem.CPU, op.After.Event != 0, c.f.Calls.Name()
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
		return c.write(op, n, piece{}, nil)
	}
	return c.Line.Push(op, item{n: n}), nil
}

// Reached implements over.Conn.
func (c *Conn) Reached(number uint64) bool { return c.f.in.reached(number) }

// Lingers implements over.Conn.
func (c *Conn) Lingers() bool { return !c.f.in.reached(c.landed) }

// Working implements over.Conn.
func (c *Conn) Working() bool { return c.sender.working() }

// Stream implements over.Conn.
func (c *Conn) Stream() cuda.Stream { return c.sender.stream }

// Break implements over.Conn. Of an idle stream nothing is stored any more, so its pool can be another Conn's, unless the
// CPU has still to look at an event.
func (c *Conn) Break(idle bool) {
	switch l := &c.sender; {
	case !idle:
		l.broken = true
	case !c.f.Calls.Marked():
		l.word.Here.Store(l.staged)
	}
}

// Free implements over.Conn.
func (c *Conn) Free() { c.sender.close(c.f) }

// Peer implements transport.Conn.
func (c *Conn) Peer() transport.Peer {
	p := c.Conn.Peer()
	if why := c.f.denied.Load(); why != nil {
		p.Why = strings.TrimPrefix(p.Why+"; "+*why, "; ")
	}
	return p
}

// Plain, Serve and Stopped implement over.Conn. There is nothing but what the Path knows of.
func (*Conn) Plain() bool { return true }
func (*Conn) Serve()      {}
func (*Conn) Stopped()    {}
