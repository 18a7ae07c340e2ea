// Package gpu is the GPU of a process, for all who use it: what its driver does for them
// (Device), how one is opened, and when its memory is given back (Later).
package gpu

import (
	"fmt"
	"sync"

	"fserver/cshim/cuda"
	"fserver/engine/transport"
)

// A Device is a GPU as the engine uses it; *cuda.Device is one. Only the methods that give
// memory back wait for what the GPU has to do; see Later. Any method may wait for the driver
// itself, so none is called with a lock held.
type Device interface {
	Ordinal() int
	NewStream() (cuda.Stream, error)
	FreeStream(cuda.Stream) error
	Idle(cuda.Stream) (bool, error)
	NewEvent() (cuda.Event, error)
	FreeEvent(cuda.Event) error
	Record(cuda.Event, cuda.Stream) error
	Passed(cuda.Event) (bool, error)
	Enqueue(s cuda.Stream, e cuda.Event, copies []cuda.Copy, flag, value uint64) error
	Alloc(n uint64) (uint64, error)
	Free(address uint64) error
	Pin(address, n uint64) (uint64, error)
	Unpin(address uint64) error
	Describe(address uint64) (cuda.Memory, error)
	ExportIPC(base uint64) (cuda.IPCHandle, error)
	ImportIPC(cuda.IPCHandle) (uint64, error)
	CloseIPC(base uint64) error
	Reach(ordinal int) error
	ExportFD(address uint64) (int, error)
	MapFDs(fds []int32, lens []uint64) (uint64, error)
	UnmapFDs(base uint64, lens []uint64) error
	Direct() (cuda.Direct, error)
	ExportDMABuf(address, n uint64) (int, error)
}

// A GPU is a Device and what gives back its memory: the transport.Env.Device of a node that
// has one.
type GPU struct {
	Device
	*Later
}

// Opener finds the GPU with an index, as CUDA counts.
type Opener func(index int) (Device, error)

// IndexError says that CUDA shows GPUs to the process, but none with the index that is asked for.
type IndexError struct{ *transport.ErrUnavailable }

// Unwrap returns the ErrUnavailable.
func (e *IndexError) Unwrap() error { return e.ErrUnavailable }

// opened is the GPUs of this process by their index. Their contexts are never given back: receive
// buffers may outlive their node.
var opened sync.Map

// Open holds a GPU. Without a driver or that GPU it is an ErrUnavailable, which is an IndexError if there are others.
func Open(index int) (Device, error) {
	if d, ok := opened.Load(index); ok {
		return d.(*cuda.Device), nil
	}
	if _, err := Find(index); err != nil {
		return nil, err
	}
	d, err := cuda.Retain(index)
	if err != nil {
		return nil, err
	}
	first, _ := opened.LoadOrStore(index, d)
	return first.(*cuda.Device), nil
}

// Find is Open without a context: it holds nothing, and gives no Device.
func Find(index int) (Device, error) {
	if err := cuda.Open(); err != nil {
		return nil, &transport.ErrUnavailable{Transport: "gpu", Reason: err.Error(), Remedy: "install an NVIDIA driver for CUDA 11.7 or later, or set STEPMESH_BACKEND=CPU"}
	}
	n, err := cuda.Count()
	if err == nil && index < n {
		return nil, nil
	}
	no := &transport.ErrUnavailable{Transport: "gpu", Remedy: "STEPMESH_GPU counts from 0 among CUDA_VISIBLE_DEVICES"}
	if err != nil {
		no.Reason = err.Error()
		return nil, no
	}
	no.Reason = fmt.Sprintf("gpu %d: CUDA shows %d GPUs", index, n)
	if n == 0 {
		return nil, no
	}
	return nil, &IndexError{no}
}
