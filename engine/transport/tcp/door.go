package tcp

import (
	"container/list"
	"context"
	"errors"
	"sync"
	"time"
)

// A door holds the connections that are inside the Gate, so that those who say
// nothing do not keep out those who do.
type door struct {
	mu     sync.Mutex
	guests list.List // of *guest, the oldest first
	left   chan struct{}
}

// A guest is one connection inside the Gate.
type guest struct {
	ctx    context.Context // ends when it has to leave
	cancel context.CancelCauseFunc
	since  time.Time
	spoke  bool
	at     *list.Element
}

var errPushedOut = errors.New("said too little for too long while others waited for its place in the handshake")

// enter waits for a place; nil says that ctx has ended. Where limit guests are
// inside, the oldest of those who have said nothing has to leave at once, or
// else the oldest of all once it has been inside for patience.
func (d *door) enter(ctx context.Context, limit int, patience time.Duration) *guest {
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
	g := &guest{since: time.Now()}
	g.ctx, g.cancel = context.WithCancelCause(ctx)
	g.at = d.guests.PushBack(g)
	return g
}

// pushOut makes one guest leave, if one may be asked to, and says after what
// time to look again if nobody has left.
func (d *door) pushOut(patience time.Duration) time.Duration {
	for e := d.guests.Front(); e != nil; e = e.Next() {
		if g := e.Value.(*guest); !g.spoke {
			g.cancel(errPushedOut)
			return patience
		}
	}
	g := d.guests.Front().Value.(*guest)
	wait := patience - time.Since(g.since)
	if wait > 0 {
		return wait
	}
	g.cancel(errPushedOut)
	return patience
}

// heard notes that g has said something.
func (d *door) heard(g *guest) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g.spoke = true
}

// silent says whether g has said nothing so far.
func (d *door) silent(g *guest) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !g.spoke
}

func (d *door) leave(g *guest) {
	g.cancel(nil)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.guests.Remove(g.at)
	if d.left != nil {
		close(d.left)
		d.left = nil
	}
}
