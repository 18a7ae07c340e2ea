// Package stage makes a Fabric that takes memory of a GPU out of one, inner, that takes host memory alone: connections, and
// who may talk, are inner's.
//
// # Two ways of a write
//
// Staged: the copy engine brings the source to pinned host memory in pieces, behind the write's point, and each goes over
// inner while the next is copied (pieces.go). GPU memory has a shadow in host memory, which such writes land in. Its key is
// what a peer sees as that of the memory. Behind each write the sender tells the receiver to lift it, that is, to copy it
// from the shadow to the GPU (land.go).
//
// Direct: inner reads the GPU's memory by itself, as a NIC with GPUDirect does. The write goes to inner as it is, when
// its stream has passed the point (direct.go).
//
// # Frames
//
// A frame whose writes are still to be started, or to be handed to inner, waits at the sender, unless it passes. A frame or
// loan that arrives while copies from shadows are under way is given when they have ended. Some are of host memory, and
// a copy waits for no stream of an application, so that holds for those that pass, too.
//
// # What it costs others
//
// Operations that no GPU has to do with go to inner as they are, all at once and without a lock, as long as nothing of
// their Conn waits. So peers without GPU memory need not be wrapped. A node without a GPU has a Fabric without a Device. It
// wraps only the Conns to nodes with one, to tell them what to lift, and hands out inner's Conns for all others.
package stage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"fserver/engine/gpu"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Options say what to wrap with.
type Options struct {
	Device gpu.Device // nil: this node has no GPU
	// HasGPU says by its hello whether a peer may have GPU memory. It is for a Fabric
	// without a Device; the others treat all peers alike.
	HasGPU func(hello []byte) bool
	// Events is that of gpu.Calls.
	Events bool
	// Later is that of the Device, for all who share it; nil: nobody does.
	Later *gpu.Later
}

// A Fabric is another one, for GPU memory too.
type Fabric struct {
	link.Over
	hasGPU func(hello []byte) bool

	// mu guards the rest. It is held during Posts and Polls of inner, and during no call of the device.
	mu      sync.Mutex
	calls   gpu.Calls
	refused bool // a Post came while another was in the device, and no Poll since
	closed  bool
	ended   error
	conns   map[transport.Conn]*Conn // by inner's
	last    *Conn                    // that an event was of; nil: none
	busy    []*Conn                  // that a Poll has to look at; see due
	told    []transport.Event        // completions, to be given first
	ev      [64]transport.Event      // of inner
	regions map[uint64]*region       // GPU memory, by the IDs of its keys
	ending  map[uint64]*region       // whose keys are gone, but not what had begun before
	in      landing
	direct  direct
	scan    time.Time // of the last tick
	polls   uint64
	slept   bool // Arm was called, and no Poll since

	spins uint64      // Polls, of those that look at nothing too; for whoever polls
	calm  atomic.Bool // a Poll has nothing to look at but inner; see lock

	tracked atomic.Int32 // without a Device: Conns that are wrapped, and Connects under way
}

// Wrap puts a Fabric over inner, which the Fabric's Close closes. With an error, inner is
// still the caller's.
func Wrap(inner transport.Fabric, o Options) (*Fabric, error) {
	if o.Later == nil {
		o.Later = new(gpu.Later)
	}
	f := &Fabric{
		Over: link.Over{Fabric: inner}, hasGPU: o.HasGPU,
		conns: map[transport.Conn]*Conn{}, regions: map[uint64]*region{}, ending: map[uint64]*region{},
	}
	f.calls = gpu.Calls{Mu: &f.mu, Dev: o.Device, Later: o.Later, Events: o.Events}
	if o.Device == nil {
		f.calm.Store(true)
		return f, nil
	}
	if err := errors.Join(f.Over.Open(), f.in.open(f)); err != nil {
		f.release()
		return nil, fmt.Errorf("stage: %w", err)
	}
	return f, nil
}

// release gives back what Wrap acquired.
func (f *Fabric) release() {
	f.in.close(f)
	f.calls.FreeEvents()
	f.Shut()
}

// Caps implements transport.Fabric.
func (f *Fabric) Caps() transport.Caps {
	c := f.Fabric.Caps()
	c.Points = f.calls.Dev != nil
	return c
}

// Connect implements transport.Fabric.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	f.tracked.Add(1) // before an event of the new Conn can come
	defer f.tracked.Add(-1)
	in, err := f.Fabric.Connect(ctx, peer)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.wraps(in) {
		return in, nil
	}
	if f.closed && f.conns[in] == nil {
		in.Close()
		return nil, transport.ErrClosed
	}
	return f.conn(in), nil
}

// conn is the Conn over one of inner, whose events may come before Connect
// returns.
func (f *Fabric) conn(in transport.Conn) *Conn {
	c := f.conns[in]
	if c == nil {
		c = &Conn{f: f, OverConn: link.OverConn[piece]{Conn: in, Mark: link.StageMark}}
		c.plain.Store(true)
		f.conns[in] = c
		f.tracked.Add(1)
	}
	return c
}

// forget drops a Conn that has no more events to give.
func (f *Fabric) forget(c *Conn) {
	c.lane.close(f)
	delete(f.conns, c.Conn)
	f.last = nil
	f.tracked.Add(-1)
}

// Bind implements transport.Fabric.
func (f *Fabric) Bind(k transport.Key, conn transport.Conn) error {
	f.mu.Lock()
	if c, ok := conn.(*Conn); ok { // else it is inner's
		if r := f.regions[k.ID]; r != nil {
			r.only = c
		}
		conn = c.Conn
	}
	f.mu.Unlock()
	return f.Fabric.Bind(k, conn)
}

// settleLimit bounds how long Close waits for copies that are under
// way. The wire needs microseconds; a copy may wait behind a kernel though.
const settleLimit = 5 * time.Second

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	err := errors.Join(f.Fabric.Close(), f.end())
	f.calls.Later.Wait(settleLimit)
	return err
}

// end waits for what is under way, and gives back what f holds.
func (f *Fabric) end() error {
	f.lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.ended
	}
	f.closed = true
	for _, c := range f.conns {
		c.stop()
	}
	// Nobody may poll.
	for limit := time.Now().Add(settleLimit); ; f.mu.Lock() {
		if f.drive(true); f.idles() {
			break
		}
		if time.Now().After(limit) {
			f.ended = fmt.Errorf("stage: close: copies on %v have not finished within %v (a kernel before them does not end), so their memory stays pinned", f.calls.Name(), settleLimit)
			return f.ended
		}
		f.mu.Unlock()
		time.Sleep(20 * time.Microsecond)
	}
	for _, c := range f.conns {
		c.lane.close(f)
	}
	for _, r := range f.regions {
		f.discard(r)
	}
	clear(f.regions)
	f.release()
	return nil
}

// idles reports whether nothing is under way that the end of f has to wait for.
func (f *Fabric) idles() bool {
	if f.calls.Inside || f.in.waiting() || f.calls.Asides > 0 || len(f.ending) > 0 {
		return false
	}
	for _, c := range f.conns {
		c.advance()
		if !c.line.Empty() || c.lane.working() { // a copy may have ended since advance looked
			return false
		}
	}
	return true
}
