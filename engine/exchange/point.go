package exchange

import (
	"slices"
	"sync/atomic"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Point is a point in a device stream, in the forms in which it can be waited for. A Fabric that takes
// points waits for the transport.Point of device memory. All else is held back here until the word says
// that the point has passed.
type Point struct {
	transport.Point                // zero: it has not this form
	Word            *atomic.Uint64 // where the stream stores a number; nil: it has not this form
	Value           uint64         // the point has passed when the number is at least this
	ID              uint32         // for whoever makes points
}

// After has the tensors that t pushes, or answers with, sent when what is queued on a stream of
// the device has run. The point is made when t is submitted.
func (t *Ticket) After(stream uint64) { t.stream, t.behind = stream, true }

// point makes the point of t, which waits for one, in the forms that are needed on the way to peers first to
// end. It may wait.
func (tb *Table) point(t *Ticket, first, end int) (err error) {
	if event, word := tb.keys.forms(t, first, end); event || word {
		t.after, err = tb.Point(t.stream, event, word)
	}
	return err
}

// forms returns the forms of the point of t that are needed. Where host memory is sent too, everything waits
// for the word, so an event would be of no use.
func (ks *keys) forms(t *Ticket, first, end int) (event, word bool) {
	device := false
	for i := range t.push {
		if t.push[i].Span.Len != 0 {
			device = device || t.push[i].Dev != mem.CPU
			word = word || t.push[i].Dev == mem.CPU
		}
	}
	if word || !device {
		return false, word
	}
	ks.mu.Lock()
	defer ks.mu.Unlock()
	for _, r := range ks.paths[first:end] {
		points := r != nil && r.points
		event, word = event || points, word || !points
	}
	return event, word
}

// holds reports whether t, the next that o is to post, has to wait for its point here.
func (tb *Table) holds(o *outbox, t *Ticket) bool {
	p := &t.after
	if *p == (Point{}) || o.points && p.Event != 0 {
		return false
	}
	if p.Word == nil { // the peer came back over another Fabric
		tb.Word(p)
	}
	waits := p.Word == nil || p.Word.Load() < p.Value
	o.held = o.held || waits
	return waits
}

// tellHeld has Held say whether a ticket waits for its point.
func (tb *Table) tellHeld() {
	if held := slices.ContainsFunc(tb.outs, func(o *outbox) bool { return o.held }); held != tb.held.Load() {
		tb.held.Store(held)
	}
}

// Held reports whether a ticket waited for its point at the last Drain: nothing but a further Drain finds
// out that it has passed. Safe from any goroutine.
func (tb *Table) Held() bool { return tb.held.Load() }
