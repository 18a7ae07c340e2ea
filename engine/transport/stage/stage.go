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
	"errors"
	"fmt"
	"sync/atomic"

	"fserver/engine/gpu"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
	"fserver/engine/transport/link/over"
)

// Options say what to wrap with.
type Options struct {
	Device gpu.Device // nil: this node has no GPU
	// HasGPU says by its hello whether a peer may have GPU memory. It is for a Fabric
	// without a Device; the others treat all peers alike.
	HasGPU func(hello []byte) bool
	// Events is that of gpu.Calls.
	Events bool
	// Refused, if set, is told once why inner has not taken memory of the GPU, which it takes in general. It is called by a
	// Register and must not call the Fabric.
	Refused func(why error)
	// Later is that of the Device, for all who share it; nil: nobody does.
	Later *gpu.Later
}

// A Fabric is another one, for GPU memory too.
type Fabric struct {
	over.Base
	// Base.Mu guards the rest.
	regions map[uint64]*region // GPU memory, by the IDs of its keys
	in      landing
	direct  direct
	denied  atomic.Pointer[string] // why inner has not taken memory of the GPU, the last time; nil: it has taken all
	warn    func(error)            // Options.Refused
	// The buffers of senders that have ended. Inner knows them until it is closed, or needs the memory that is locked for them.
	pools, broken []pool
}

// Wrap puts a Fabric over inner, which the Fabric's Close closes. With an error, inner is
// still the caller's.
func Wrap(inner transport.Fabric, o Options) (*Fabric, error) {
	f := &Fabric{regions: map[uint64]*region{}, warn: o.Refused}
	err := f.Begin("stage", link.StageMark, f, inner, gpu.Calls{Dev: o.Device, Later: o.Later, Events: o.Events})
	if o.Device == nil {
		f.Wraps = func(in transport.Conn) bool { return o.HasGPU != nil && o.HasGPU(in.Peer().Hello) }
	} else {
		err = errors.Join(err, f.in.open(f))
	}
	if err != nil {
		f.Undo()
		return nil, fmt.Errorf("stage: %w", err)
	}
	return f, nil
}

// Caps implements transport.Fabric.
func (f *Fabric) Caps() transport.Caps {
	c := f.Fabric.Caps()
	c.Points = f.Calls.Dev != nil
	return c
}

// Bind implements transport.Fabric.
func (f *Fabric) Bind(k transport.Key, conn transport.Conn) error {
	f.Mu.Lock()
	if c, ok := conn.(*Conn); ok { // else it is inner's
		if r := f.regions[k.ID]; r != nil {
			r.only = c
		}
		conn = c.Conn
	}
	f.Mu.Unlock()
	return f.Fabric.Bind(k, conn)
}

// Wrap implements over.Layer.
func (f *Fabric) Wrap(in transport.Conn) over.Conn {
	c := &Conn{f: f}
	c.Begin(&f.Base, c, in)
	return c
}

// Waits implements over.Layer.
func (f *Fabric) Waits() bool { return f.in.waiting() }

// Proceed implements over.Layer.
func (f *Fabric) Proceed() { f.land() }

// Look implements over.Layer.
func (f *Fabric) Look() { f.in.look(f) }

// Shutting implements over.Layer.
func (f *Fabric) Shutting() {}

// Free implements over.Layer.
func (f *Fabric) Free() {
	for _, r := range f.regions {
		r.Discard()
	}
	clear(f.regions)
	for _, p := range append(f.pools, f.broken...) {
		f.Calls.Unmap(p.Region)
	}
	f.pools, f.broken = nil, nil
	f.in.close(f)
}
