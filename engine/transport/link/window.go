package link

import (
	"fmt"
	"math/bits"
	"slices"

	"fserver/engine/transport"
)

// A Window is the operations of a Conn between Post and their EvDone, in order. Running numbers
// tell them apart: those in [Done, Sent) have ended and wait for their EvDone, those in
// [Sent, End) are under way. O is what the transport has to know of one.
type Window[O any] struct {
	Done, Sent, End uint32
	ops             []open[O] // its length is a power of two
}

type open[O any] struct {
	user uint64
	op   O
}

// Init makes room for depth operations, which is a power of two.
func (w *Window[O]) Init(depth int) { w.ops = make([]open[O], depth) }

// Full says whether there is no room.
func (w *Window[O]) Full() bool { return int(w.End-w.Done) == len(w.ops) }

// Push adds an operation, for which there is room, and returns it to be filled.
func (w *Window[O]) Push(user uint64) *O {
	o := &w.ops[int(w.End)&(len(w.ops)-1)]
	o.user = user
	w.End++
	return &o.op
}

// At is the ith operation.
func (w *Window[O]) At(i uint32) *O { return &w.ops[int(i)&(len(w.ops)-1)].op }

// Complete reports operations of c that have ended: all have when it is down.
func (w *Window[O]) Complete(c transport.Conn, down error, ev []transport.Event) (n int) {
	for n < len(ev) && (w.Done != w.Sent || down != nil && w.Done != w.End) {
		o := &w.ops[int(w.Done)&(len(w.ops)-1)]
		ev[n] = transport.Event{Kind: transport.EvDone, Conn: c, User: o.user}
		o.op = *new(O)
		if w.Done == w.Sent {
			w.Sent++
			ev[n].Err = down
		}
		w.Done++
		n++
	}
	return n
}

// Bytes holds what operations bring by copy, one behind the other, until all of it has gone.
type Bytes []byte

// Add makes room for n bytes at the end and returns where they begin. It is false if there would be
// more than limit; the first may be of any size.
func (b *Bytes) Add(n, limit int) (at int, ok bool) {
	at = len(*b)
	if at > 0 && at+n > max(cap(*b), limit) {
		return 0, false
	}
	*b = slices.Grow(*b, n)[:at+n]
	return at, true
}

// Trim frees what is beyond limit, if nothing is held.
func (b *Bytes) Trim(limit int) {
	if len(*b) == 0 && cap(*b) != limit {
		*b = make(Bytes, 0, limit)
	}
}

// Take hands operations to take, in order, and stops at the first one that take does not queue: there is no room for it,
// or it is wrong. It returns how many are queued.
func Take(ops []transport.Op, take func(*transport.Op) (bool, error)) (n int, err error) {
	for taken := true; taken && n < len(ops); {
		if taken, err = take(&ops[n]); taken {
			n++
		}
	}
	return n, err
}

// Check returns how many bytes a frame or a write has, or why the transport called kind can never
// take it.
func Check(kind string, op *transport.Op) (n uint64, err error) {
	switch {
	case op.After.Event != 0:
		return 0, fmt.Errorf("%s: post: the operation waits for a point on %v: hold it back until that has passed", kind, op.After.Dev)
	case op.Kind == transport.OpFrame:
		if n = uint64(len(op.Frame)); n > transport.MaxFrame {
			return 0, fmt.Errorf("%s: post: frame of %d bytes: at most %d", kind, n, transport.MaxFrame)
		}
	case op.Kind == transport.OpWrite:
		for _, s := range op.Src {
			var carry uint64
			if n, carry = bits.Add64(n, s.Len, 0); carry != 0 {
				return 0, fmt.Errorf("%s: post: write of %d spans: more than 2^64 bytes", kind, len(op.Src))
			}
		}
	default:
		return 0, fmt.Errorf("%s: post: operation of unknown kind %d", kind, op.Kind)
	}
	return n, nil
}
