// Package exchange is push-pull itself: tickets, plans, receive buffers, credit
// and matching. It does no I/O of its own: it posts to transport.Conns and is
// handed their events.
//
// Three kinds of goroutine meet here. Callers begin and submit tickets, from any
// goroutine. Helpers make what may block: they allocate, register and let go of
// memory (Host.Aside). The owner, one goroutine at a time, runs everything else: it
// takes what was submitted (Drain) and what the transports report (Frame, Done,
// Down). No lock is held while the owner works; what crosses over goes
// through a queue of submissions, the words of the tickets and the states of
// the requests. docs/architecture.md has the picture.
package exchange

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/wire"
)

// Tensor is contiguous memory of the caller's and what it means.
type Tensor struct {
	Span  mem.Span
	Dev   mem.Device
	Key   uint64
	Base  mem.Region // the allocation that Span lies in
	Alloc uint64     // a number that no other allocation ever gets; 0: do not cache
	DType uint8      // the application's number; of a pull tensor or an answer, wire.AnyType is never compared
	Dims  []int64
}

// rows is the first dimension, 1 where there is none.
func (t *Tensor) rows() int64 {
	if len(t.Dims) == 0 {
		return 1
	}
	return t.Dims[0]
}

func (t *Tensor) tail() []int64 {
	if len(t.Dims) == 0 {
		return nil
	}
	return t.Dims[1:]
}

// check refuses what the wire cannot carry.
func (t *Tensor) check(what string, i int) error {
	if len(t.Dims) > wire.MaxDims {
		return Shapef("exchange: %s tensor %d has %d dimensions (at most %d are allowed)", what, i, len(t.Dims), wire.MaxDims)
	}
	for _, d := range t.Dims {
		if d < 0 || d > wire.MaxSize {
			return Shapef("exchange: %s tensor %d has dimension %d (dimensions are 0 to 2^62)", what, i, d)
		}
	}
	if !t.Base.Contains(t.Span) {
		return Shapef("exchange: %s tensor %d: its %d bytes are not inside its allocation of %d bytes", what, i, t.Span.Len, t.Base.Len)
	}
	return nil
}

// ShapeError says that counts, shapes or sizes of tensors do not fit.
type ShapeError struct{ text string }

func (e *ShapeError) Error() string { return e.text }

// TypeError says that an answer is of another type than the pull tensor that it is for.
type TypeError struct {
	text      string
	Got, Want uint8
}

func (e *TypeError) Error() string { return e.text }

// Shapef makes a ShapeError.
func Shapef(format string, args ...any) error { return &ShapeError{fmt.Sprintf(format, args...)} }

// plan is a signature of push-pulls: everything about them but rows, bytes and
// addresses.
type plan struct {
	number uint64
	hash   uint64
	on     string // a channel
	push   []wire.PlanTensor
	pull   []wire.PlanPull
}

// signature hashes what makes the plan of t (FNV-1a over 64-bit words).
func (t *Ticket) signature() uint64 {
	h := uint64(14695981039346656037)
	mix := func(v uint64) { h = (h ^ v) * 1099511628211 }
	for i := range t.push {
		p := &t.push[i]
		mix(p.Key)
		mix(uint64(p.DType)<<32 | uint64(len(p.Dims)))
		for _, d := range p.tail() {
			mix(uint64(d))
		}
	}
	mix(uint64(len(t.push)))
	for i := range t.pull {
		mix(t.pull[i].Key)
		mix(uint64(t.pull[i].DType))
	}
	for i := range len(t.on) {
		mix(uint64(t.on[i]))
	}
	return h
}

// planBytes returns how many bytes the frame of the plan of t may have, with share pull
// tensors.
func (t *Ticket) planBytes(share int) int {
	n := 32 + len(t.on) + 10*len(t.push) + 8*share
	if n+binary.MaxVarintLen64*len(t.dims) <= transport.MaxFrame {
		return n // of nearly all push_pulls: no need to look at each dimension
	}
	for i := range t.push {
		for _, d := range t.push[i].tail() {
			n += (bits.Len64(uint64(d)|1) + 6) / 7
		}
	}
	return n
}

// maxBlobs bounds the Blobs of the keys in one request, in bytes. All else in it takes
// less than the rest of a frame.
const maxBlobs = transport.MaxFrame - 256<<10

// fits says whether p is the plan of t.
func (p *plan) fits(t *Ticket) bool {
	if p.on != t.on || len(p.push) != len(t.push) || len(p.pull) != len(t.pull) {
		return false
	}
	for i := range p.push {
		a, b := &p.push[i], &t.push[i]
		if a.Key != b.Key || a.DType != b.DType || a.NDim != len(b.Dims) || !slices.Equal(a.Tail, b.tail()) {
			return false
		}
	}
	for i := range p.pull {
		if p.pull[i] != (wire.PlanPull{Key: t.pull[i].Key, DType: t.pull[i].DType}) {
			return false
		}
	}
	return true
}

// wireKey and transportKey translate: wire knows no transport.
func wireKey(k transport.Key) wire.Key      { return wire.Key(k) }
func transportKey(k wire.Key) transport.Key { return transport.Key(k) }
