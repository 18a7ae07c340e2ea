// Package cudaipc lets a GPU write into the memory of a peer's GPU, which this process maps: one copy, by the copy engine. It
// is a Fabric over another one, inner, which lends memory, and which takes GPU memory by some other way: connections, who
// may talk, and all that cannot be mapped are inner's.
//
// # A mapped write
//
// The stream waits for the write's point, copies, and then stores the write's number into host memory that both processes
// map (segment_unsafe.go). No CPU takes part after Post, no call into the driver waits, no SM is used.
//
// # Frames
//
// A frame that comes behind mapped writes carries how many were begun before it on its Conn, and the receiver gives it when
// as many have ended. A frame that waits for nothing travels over inner as it is. At the sender, a frame waits for the
// writes before it that are not started, and for those that inner has and has not sent (Conn.Unsent). So inner never
// has frames of ours that wait, and what belongs together stays together (message.go).
//
// # Memory
//
// A Key of GPU memory is inner's, and its Blob carries behind inner's what a peer needs to map the memory: the name of the
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

	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// Options say what to wrap with.
type Options struct {
	Device gpu.Device
	// Later is that of the Device, for all who share it; nil: nobody does.
	Later *gpu.Later
}

// A Fabric is another one, for GPU memory that peers map.
type Fabric struct {
	link.Over
	own    *sync.Map // registered; tests play several processes
	id     uint64    // random; names this Fabric to peers
	spaces spaces    // of this process

	// mu guards the rest. It is not held during calls of the device, nor of inner's Posts and Polls, which may make some.
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
	regions map[uint64]*region       // that can be mapped, by the IDs of their keys
	ending  map[uint64]*region       // whose keys are gone, but not what had begun before
	free    []uint32                 // slots of the table
	used    uint32                   // slots that were ever used
	table   *mem.Shared
	scan    time.Time // of the last tick
	polls   uint64
	slept   bool // Arm was called, and no Poll since

	spins uint64      // Polls, of those that look at nothing too; for whoever polls
	calm  atomic.Bool // a Poll has nothing to look at but inner; see lock
}

// Wrap puts a Fabric over inner, which lends, and which the Fabric's Close closes. With an error, inner is
// still the caller's.
func Wrap(inner transport.Fabric, o Options) (*Fabric, error) {
	if o.Later == nil {
		o.Later = new(gpu.Later)
	}
	f := &Fabric{
		Over: link.Over{Fabric: inner}, own: &registered, id: rand.Uint64(), spaces: ownSpaces(),
		conns: map[transport.Conn]*Conn{}, regions: map[uint64]*region{}, ending: map[uint64]*region{},
	}
	f.calls = gpu.Calls{Mu: &f.mu, Dev: o.Device, Later: o.Later}
	err := f.Over.Open()
	if err == nil {
		f.table, err = mem.NewNamed("fserver-cudaipc", tableSize)
	}
	if err != nil {
		f.release()
		return nil, fmt.Errorf("cudaipc: %w", err)
	}
	return f, nil
}

// release gives back what Wrap acquired.
func (f *Fabric) release() {
	f.Shut()
	if f.table != nil {
		_ = mem.FreeShared(f.table.ID())
		f.table = nil
	}
}

// Connect implements transport.Fabric.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	in, err := f.Fabric.Connect(ctx, peer)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
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
		c = &Conn{f: f, OverConn: link.OverConn[struct{}]{Conn: in, Mark: link.MappedMark}}
		c.plain.Store(true)
		f.conns[in] = c
	}
	return c
}

// Bind implements transport.Fabric.
func (f *Fabric) Bind(k transport.Key, conn transport.Conn) error {
	if c, ok := conn.(*Conn); ok {
		conn = c.Conn
	}
	return f.Fabric.Bind(k, conn)
}

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
	for _, r := range f.regions { // who has not begun to write there will not
		f.slot(r).Store(0)
	}
	// Nobody may poll.
	for limit := time.Now().Add(settleLimit); ; f.mu.Lock() {
		if f.drive(true); f.idles() {
			break
		}
		if time.Now().After(limit) {
			f.ended = fmt.Errorf("cudaipc: close: copies on %v have not finished within %v (a kernel before them does not end), so their memory stays pinned", f.calls.Name(), settleLimit)
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
	if f.calls.Inside || f.calls.Asides > 0 || len(f.ending) > 0 {
		return false
	}
	for _, c := range f.conns {
		c.advance()
		if !c.line.Empty() || c.lane.working() || c.writing() { // a copy may have ended since advance looked
			return false
		}
	}
	return true
}
