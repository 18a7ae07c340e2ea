// Package cudaipc lets GPU memory travel over another Fabric, inner, which carries host
// memory alone: connections, and who may talk, are inner's.
//
// # Three ways of a write
//
// Mapped: inner is of this host, and the peer's GPU memory can be mapped. The copy engine
// writes it there, and the stream then stores the write's number into host memory that both
// processes map (segment_unsafe.go). No CPU takes part after Post, no call into the driver
// waits, no SM is used.
//
// Direct: inner reads the GPU's memory by itself, as a NIC with GPUDirect does. The write goes to
// inner as it is, when its stream has passed the point (direct.go).
//
// Staged: the copy engine brings the source to pinned host memory in pieces, and each goes
// over inner while the next is copied (stage.go). GPU memory has a shadow in host memory,
// which such writes land in. Its key is what a peer sees as that of the memory. Behind each
// write the sender tells the receiver to lift it, that is, to copy it from the shadow to the
// GPU (land.go).
//
// # Frames
//
// A frame that comes behind mapped writes carries how many were begun before it on its Conn,
// and the receiver gives it when as many have ended. So does a frame that arrives while
// copies from shadows are under way (held.go). A frame whose writes are still to be started,
// or to be handed to inner, waits at the sender. A frame that waits for nothing travels over
// inner as it is, so peers without GPU memory need not be wrapped (message.go).
//
// A node without a GPU has a Fabric without a Device. It wraps only the Conns to nodes with
// one, to tell them what to lift, and hands out inner's Conns for all others.
//
// # Memory
//
// A Key of GPU memory carries what a peer needs to map it: the name of the
// allocation, which is mapped once for each Conn and told from a later one at the
// same address by its buffer id. A peer looks into the owner's table of keys before
// it enqueues a copy, and says first that it is about to: so the owner either
// sees the copy, and waits for its number, or the peer sees that the key is gone.
// Mappings without a living key are closed.
//
// A peer that is allowed to map memory can write anywhere in its allocation, as with cma. Its
// own checks of keys and bounds guard against mistakes, not against malice.
package cudaipc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"fserver/cshim/cuda"
	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Options say what to wrap with.
type Options struct {
	Device gpu.Device // nil: this node has no GPU
	// HasGPU says by its hello whether a peer may have GPU memory. It is for a Fabric
	// without a Device; the others treat all peers alike.
	HasGPU func(hello []byte) bool
	// Share has GPU memory mapped where it can be. Only if inner lends, so that peers are
	// processes of this host.
	Share bool
	// Events has the CPU ask events how far copies to and from its own memory are,
	// instead of having the streams say so in host memory.
	Events bool
	// Later is that of the Device, for all who share it; nil: nobody does.
	Later *gpu.Later
}

// A Fabric is another one, for GPU memory too.
type Fabric struct {
	link.Over
	dev    gpu.Device
	o      Options
	own    *sync.Map // registered; tests play several processes
	id     uint64    // random; names this Fabric to peers
	spaces spaces    // of this process

	// mu guards the rest. It is held during Posts and Polls of inner, and during no call of the
	// device; see outside.
	mu       sync.Mutex
	inside   bool     // somebody calls the device in place, and is to have f.mu again
	refused  bool     // a Post came meanwhile, and no Poll since
	asides   int      // goroutines that call it, and what is in prepared
	prepared []func() // what is to be done when they have
	panicked error    // one of them has
	marks    []mark
	spare    []cuda.Event // for marks
	closed   bool
	ended    error
	conns    map[transport.Conn]*Conn // by inner's
	busy     []*Conn                  // that a Poll has to look at; see due
	told     []transport.Event        // completions, to be given first
	ev       [64]transport.Event      // of inner
	regions  map[uint64]*region       // GPU memory, by the IDs of its keys
	ending   map[uint64]*region       // whose keys are gone, but not what had begun before
	free     []uint32                 // slots of the table
	used     uint32                   // slots that were ever used
	table    *mem.Shared
	in       landing
	direct   direct
	scan     time.Time // of the last tick
	polls    uint64
	slept    bool // Arm was called, and no Poll since

	tracked atomic.Int32 // without a Device: Conns that are wrapped, and Connects under way
}

// Wrap puts a Fabric over inner, which the Fabric's Close closes. With an error, inner is
// still the caller's.
func Wrap(inner transport.Fabric, o Options) (*Fabric, error) {
	if o.Later == nil {
		o.Later = new(gpu.Later)
	}
	f := &Fabric{
		Over: link.Over{Fabric: inner}, dev: o.Device, o: o, own: &registered, spaces: ownSpaces(),
		conns: map[transport.Conn]*Conn{}, regions: map[uint64]*region{}, ending: map[uint64]*region{},
	}
	if o.Device == nil {
		return f, nil
	}
	f.id = rand.Uint64()
	if err := f.open(); err != nil {
		f.release()
		return nil, fmt.Errorf("cudaipc: %w", err)
	}
	return f, nil
}

func (f *Fabric) open() (err error) {
	if err = f.Over.Open(); err != nil {
		return err
	}
	if f.table, err = mem.NewNamed("fserver-cudaipc", tableSize); err != nil {
		return err
	}
	return f.in.open(f)
}

// release gives back what open acquired.
func (f *Fabric) release() {
	f.in.close(f)
	for _, e := range f.spare {
		f.o.Later.Do(gpu.Rest, 0, func() { _ = f.dev.FreeEvent(e) })
	}
	f.Shut()
	if f.table != nil {
		_ = mem.FreeShared(f.table.ID())
		f.table = nil
	}
}

// Caps implements transport.Fabric.
func (f *Fabric) Caps() transport.Caps {
	c := f.Fabric.Caps()
	c.Points = f.dev != nil
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
		c = &Conn{f: f, OverConn: link.OverConn[job]{Conn: in}}
		f.conns[in] = c
		f.tracked.Add(1)
	}
	return c
}

// forget drops a Conn that has no more events to give.
func (f *Fabric) forget(c *Conn) {
	c.release()
	delete(f.conns, c.Conn)
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

// Close implements transport.Fabric.
func (f *Fabric) Close() error {
	err := errors.Join(f.Fabric.Close(), f.end())
	f.o.Later.Wait(settleLimit)
	return err
}

// end waits for what is under way, and gives back what f holds.
func (f *Fabric) end() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.ended
	}
	f.closed = true
	for _, c := range f.conns {
		c.stop()
	}
	for _, r := range f.regions { // who has not begun to write there will not
		f.slot(r).Store(0)
	}
	// Nobody may poll.
	for limit := time.Now().Add(settleLimit); ; f.mu.Lock() {
		if f.drive(true); f.idles() {
			break
		}
		if time.Now().After(limit) {
			f.ended = fmt.Errorf("cudaipc: close: copies on %v have not finished within %v (a kernel before them does not end), so their memory stays pinned", f.name(), settleLimit)
			return f.ended
		}
		f.mu.Unlock()
		time.Sleep(20 * time.Microsecond)
	}
	for _, c := range f.conns {
		c.release()
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
	if f.inside || f.in.waiting() || f.asides > 0 || len(f.ending) > 0 {
		return false
	}
	for _, c := range f.conns {
		c.advance()
		if c.first != c.last || c.lane.working() || c.writing() { // a copy may have ended since advance looked
			return false
		}
	}
	return true
}

// name is the GPU; the CPU if there is none.
func (f *Fabric) name() mem.Device {
	if f.dev == nil {
		return mem.CPU
	}
	return mem.GPU(f.dev.Ordinal())
}
