// Package mem names memory that Go does not own: tensors of the caller, and
// buffers that the engine maps for itself. Addresses are numbers, never Go
// pointers, so nothing here keeps memory alive and the collector sees nothing.
package mem

import (
	"fmt"
	"math/bits"
	"sync/atomic"
)

// Device says where memory lies: CPU, or a GPU. What says nothing else is on the
// CPU.
type Device int32

// CPU is host memory.
const CPU Device = 0

// GPU is the GPU with an index, 0 or more; an index of -1 gives CPU.
func GPU(index int) Device { return Device(index + 1) }

// Index is the index of a GPU, -1 for the CPU.
func (d Device) Index() int { return int(d) - 1 }

// String gives "cpu" or "gpu N".
func (d Device) String() string {
	if d == CPU {
		return "cpu"
	}
	return fmt.Sprintf("gpu %d", d.Index())
}

// Span is a range of addresses on a device that the context knows.
type Span struct {
	Addr uintptr
	Len  uint64 // bytes
}

// Region is one allocation: what a Fabric registers.
type Region struct {
	Addr uintptr
	Len  uint64 // bytes
	Dev  Device
	// InUse, if it is not nil, is how many operations of this process the memory is in use for. While that is 0, the memory
	// may be gone: see transport.Fabric.Register.
	InUse *atomic.Int32
	// Scarce says that the caller has already given up other registrations for this region. If the device still cannot
	// lock enough memory, the Fabric takes the region in a slower way that needs less. See transport.Fabric.Register.
	Scarce bool
}

// Idle reports whether no operation of this process uses the memory, so that it may be gone.
func (r *Region) Idle() bool { return r.InUse != nil && r.InUse.Load() == 0 }

// Span is the whole region.
func (r Region) Span() Span { return Span{r.Addr, r.Len} }

// Contains says whether s lies wholly inside r. A span of no bytes lies in
// every region whose bounds enclose its address. It never overflows.
func (r Region) Contains(s Span) bool {
	if s.Addr < r.Addr {
		return false
	}
	off := uint64(s.Addr - r.Addr)
	end, carry := bits.Add64(off, s.Len, 0)
	return carry == 0 && end <= r.Len
}

// Slice is the n bytes at offset off of r, or an error that names the bounds.
// off and n may come from a peer: no sum overflows.
func (r Region) Slice(off, n uint64) (Span, error) {
	end, carry := bits.Add64(off, n, 0)
	if carry != 0 || end > r.Len {
		return Span{}, fmt.Errorf("mem: %d bytes at offset %d leave the region of %d bytes", n, off, r.Len)
	}
	return Span{r.Addr + uintptr(off), n}, nil
}
