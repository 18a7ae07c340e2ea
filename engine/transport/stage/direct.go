package stage

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Direct: inner takes memory of our GPU by itself (transport.Caps.GPU), as it takes host memory. The key of such
// memory is inner's own, and has no shadow. A write from it goes to inner as it is, once the stream has passed its point.
// Each end is direct or not for itself: where the source is and the key is of a shadow, inner writes from the GPU into the
// shadow, and the receiver lifts; where only the key is, the pieces of the staged source need no lift.

// direct is the memory that inner has taken, by start. Fabric.mu guards it.
type direct struct {
	list []directRegion
}

type directRegion struct {
	start, end uint64
	reach      uint64 // the largest end of this one and those before it
	id, token  uint64
}

// add notes a region, and drop forgets one.
func (d *direct) add(m mem.Region, k transport.Key) {
	g := directRegion{start: uint64(m.Addr), end: uint64(m.Addr) + m.Len, id: k.ID, token: k.Token}
	i, _ := slices.BinarySearchFunc(d.list, g.start, byStart)
	d.list = slices.Insert(d.list, i, g)
	d.reaches(i)
}

func (d *direct) drop(k transport.Key) {
	if i := slices.IndexFunc(d.list, func(g directRegion) bool { return g.id == k.ID && g.token == k.Token }); i >= 0 {
		d.list = slices.Delete(d.list, i, i+1)
		d.reaches(i)
	}
}

func (d *direct) reaches(i int) {
	for ; i < len(d.list); i++ {
		g := &d.list[i]
		if g.reach = g.end; i > 0 {
			g.reach = max(g.end, d.list[i-1].reach)
		}
	}
}

// has reports whether one region contains s.
func (d *direct) has(s mem.Span) bool {
	start, end := uint64(s.Addr), uint64(s.Addr)+s.Len
	i, _ := slices.BinarySearchFunc(d.list, start+1, byStart)
	for i--; i >= 0 && d.list[i].reach >= end; i-- {
		if d.list[i].end >= end {
			return true
		}
	}
	return false
}

func byStart(g directRegion, start uint64) int { return cmp.Compare(g.start, start) }

// registerDirect registers memory of the GPU with inner. False: inner does not take it, and it is to be staged. If inner has
// failed, the registration of the shadow says so. If no more memory can be locked, m is staged only with Scarce.
func (f *Fabric) registerDirect(m mem.Region) (k transport.Key, taken bool, err error) {
	if m.Len == 0 || f.Fabric.Caps().GPU != m.Dev {
		return k, false, nil
	}
	k, err = f.register(m)
	switch {
	case err == nil:
		f.Mu.Lock()
		defer f.Mu.Unlock()
		f.direct.add(m, k)
		return k, true, nil
	case errors.Is(err, unix.ENOMEM) && !m.Scarce:
		return k, false, err
	case !errors.As(err, new(*transport.DeviceError)):
		f.deny(err)
	}
	return k, false, nil
}

// deny keeps the reason why inner has not taken memory of the GPU, for Peer, and reports the first one to Options.Refused.
func (f *Fabric) deny(why error) {
	text := fmt.Sprintf("some tensors of %v go through host memory: %v", f.Calls.Name(), why)
	if f.denied.Swap(&text) == nil && f.warn != nil {
		f.warn(why)
	}
}

// reads reports whether inner can read the source of op, which is on the GPU.
func (f *Fabric) reads(op *transport.Op) bool {
	if len(f.direct.list) == 0 || op.Kind != transport.OpWrite || op.Dev == mem.CPU {
		return false
	}
	for _, s := range op.Src {
		if s.Len > 0 && !f.direct.has(s) {
			return false
		}
	}
	return true
}

// source is where the source of an operation is that inner is handed. What is on the GPU is never handed as if it were
// on the host: inner refuses it if its key has gone meanwhile.
func source(op *transport.Op) mem.Device {
	for _, s := range op.Src {
		if s.Len > 0 {
			return op.Dev
		}
	}
	return mem.CPU
}
