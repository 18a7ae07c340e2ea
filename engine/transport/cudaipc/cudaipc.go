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
	"fmt"
	"math/rand/v2"
	"sync"

	"fserver/engine/gpu"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/link/over"
)

// Options say what to wrap with.
type Options struct {
	Device gpu.Device
	// Later is that of the Device, for all who share it; nil: nobody does.
	Later *gpu.Later
}

// A Fabric is another one, for GPU memory that peers map.
type Fabric struct {
	over.Base
	own    *sync.Map // registered; tests play several processes
	id     uint64    // random; names this Fabric to peers
	spaces spaces    // of this process

	// Base.Mu guards the rest.
	regions map[uint64]*region // that can be mapped, by the IDs of their keys
	free    []uint32           // slots of the table
	used    uint32             // slots that were ever used
	table   *mem.Shared
	queued  int // entries of the driver's queue that writes of all Conns take
}

// Wrap puts a Fabric over inner, which lends, and which the Fabric's Close closes. With an error, inner is
// still the caller's.
func Wrap(inner transport.Fabric, o Options) (*Fabric, error) {
	f := &Fabric{own: &registered, id: rand.Uint64(), spaces: ownSpaces(), regions: map[uint64]*region{}}
	f.Below = true
	err := f.Begin("cudaipc", link.MappedMark, f, inner, gpu.Calls{Dev: o.Device, Later: o.Later})
	if err == nil {
		f.table, err = mem.NewNamed("fserver-cudaipc", tableSize)
	}
	if err != nil {
		f.Undo()
		return nil, fmt.Errorf("cudaipc: %w", err)
	}
	return f, nil
}

// Bind implements transport.Fabric.
func (f *Fabric) Bind(k transport.Key, conn transport.Conn) error {
	if c, ok := conn.(*Conn); ok {
		conn = c.Conn
	}
	return f.Fabric.Bind(k, conn)
}

// Wrap implements over.Layer.
func (f *Fabric) Wrap(in transport.Conn) over.Conn {
	c := &Conn{f: f}
	c.Begin(&f.Base, c, in)
	return c
}

// Waits implements over.Layer.
func (*Fabric) Waits() bool { return false }

// Proceed implements over.Layer.
func (*Fabric) Proceed() {}

// Look implements over.Layer. It finds out which mappings are not used any more.
func (f *Fabric) Look() {
	for _, c := range f.Conns {
		if c := c.(*Conn); !c.sender.working() {
			c.sweep()
		}
	}
}

// Shutting implements over.Layer. A peer that has not begun to write to a region will not.
func (f *Fabric) Shutting() {
	for _, r := range f.regions {
		f.slot(r).Store(0)
	}
}

// Free implements over.Layer.
func (f *Fabric) Free() {
	for _, r := range f.regions {
		r.Discard()
	}
	clear(f.regions)
	if f.table != nil {
		_ = mem.FreeShared(f.table.ID())
		f.table = nil
	}
}
