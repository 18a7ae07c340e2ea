package link

import "fserver/engine/transport"

// A Line is the operations of a Conn that wait, or whose end is waited for, in order. Those in [First, End) are At(i).
// O is what the Fabric has to know of one. Its zero value is empty.
type Line[O any] struct {
	First, End uint32
	bytes      int // of frames
	list       []Waiting[O]
}

// A Waiting operation has a copy of the frame.
type Waiting[O any] struct {
	Op    transport.Op
	Is    O
	Over  bool   // it has ended, or is another one's
	frame []byte // the bytes of Op.Frame; the buffer is used again
}

// LineMost is how many operations wait at most. lineBytes bounds the bytes of their frames; a single frame may be larger.
const (
	LineMost  = 512
	lineBytes = 4 << 20
)

// At is the ith operation.
func (l *Line[O]) At(i uint32) *Waiting[O] { return &l.list[i%LineMost] }

// Empty says whether nothing waits.
func (l *Line[O]) Empty() bool { return l.First == l.End }

// Push appends an operation; false is back-pressure.
func (l *Line[O]) Push(op *transport.Op, is O) (taken bool) {
	if l.End-l.First == LineMost || l.bytes > 0 && l.bytes+len(op.Frame) > lineBytes {
		return false
	}
	if l.list == nil {
		l.list = make([]Waiting[O], LineMost)
	}
	w := l.At(l.End)
	w.Op, w.Is, w.Over = *op, is, false
	w.frame = append(w.frame[:0], op.Frame...)
	w.Op.Frame = w.frame
	l.bytes += len(w.frame)
	l.End++
	return true
}

// Finish marks an operation as over. Take takes it out.
func (l *Line[O]) Finish(w *Waiting[O]) {
	l.bytes -= len(w.frame)
	w.Over, w.Op, w.frame = true, transport.Op{}, Trim(w.frame)
}

// Take takes out the first operations as far as they are over, and moves the places at not to be before the new first.
func (l *Line[O]) Take(at ...*uint32) {
	for l.First != l.End && l.At(l.First).Over {
		l.First++
	}
	for _, at := range at {
		if int32(*at-l.First) < 0 { // it ended before it was started
			*at = l.First
		}
	}
}
