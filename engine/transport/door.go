package transport

import (
	"container/list"
	"context"
	"errors"
	"sync"
	"time"
)

// A Door holds the connections that are inside the Gate, so that those who say
// nothing do not keep out those who do: what Limits.Pending asks of a Fabric.
type Door struct {
	mu     sync.Mutex
	guests list.List // of *Guest, the oldest first
	left   chan struct{}
}

// A Guest is one connection inside the Gate.
type Guest struct {
	Ctx    context.Context // ends when it has to leave; its cause says why
	cancel context.CancelCauseFunc
	since  time.Time
	spoke  bool
	at     *list.Element
}

var errPushedOut = errors.New("too slow in the handshake while other connections waited for a place")

// Enter waits for a place; nil says that ctx has ended. Where limit guests are
// inside, the oldest of those who have said nothing has to leave at once, or
// else the oldest of all once it has been inside for patience.
func (d *Door) Enter(ctx context.Context, limit int, patience time.Duration) *Guest {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.guests.Len() >= limit {
		wait := d.pushOut(patience)
		left := make(chan struct{})
		d.left = left
		d.mu.Unlock()
		select {
		case <-left:
		case <-time.After(wait):
		case <-ctx.Done():
		}
		d.mu.Lock()
		if ctx.Err() != nil {
			return nil
		}
	}
	g := &Guest{since: time.Now()}
	g.Ctx, g.cancel = context.WithCancelCause(ctx)
	g.at = d.guests.PushBack(g)
	return g
}

// pushOut makes one guest leave, if one may be asked to, and says after what
// time to look again if nobody has left.
func (d *Door) pushOut(patience time.Duration) time.Duration {
	for e := d.guests.Front(); e != nil; e = e.Next() {
		if g := e.Value.(*Guest); !g.spoke {
			g.cancel(errPushedOut)
			return patience
		}
	}
	g := d.guests.Front().Value.(*Guest)
	wait := patience - time.Since(g.since)
	if wait > 0 {
		return wait
	}
	g.cancel(errPushedOut)
	return patience
}

// Heard notes that g has said something.
func (d *Door) Heard(g *Guest) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g.spoke = true
}

// Silent says whether g has said nothing so far.
func (d *Door) Silent(g *Guest) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !g.spoke
}

// Leave gives g's place to another.
func (d *Door) Leave(g *Guest) {
	g.cancel(nil)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.guests.Remove(g.at)
	if d.left != nil {
		close(d.left)
		d.left = nil
	}
}

// Inside is how many there are.
func (d *Door) Inside() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.guests.Len()
}
