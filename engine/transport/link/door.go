package link

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A door holds the connections that are inside the Gate, so that those who say
// nothing do not keep out those who do: what Limits.Pending asks of a Fabric.
type door struct {
	mu     sync.Mutex
	guests []*guest      // the oldest first
	left   chan struct{} // wakes the one who waits in enter
}

// A guest is one connection inside the Gate.
type guest struct {
	ctx    context.Context // ends when it has to leave; its cause says why
	cancel context.CancelCauseFunc
	since  time.Time
	spoke  atomic.Bool // it has said something
}

var errPushedOut = errors.New("too slow in the handshake while other connections waited for a place")

// enter waits for a place; nil says that ctx has ended. Where limit guests are
// inside, the oldest of those who have said nothing has to leave at once, or
// else the oldest of all once it has been inside for patience. One goroutine calls it.
func (d *door) enter(ctx context.Context, limit int, patience time.Duration) *guest {
	g := &guest{}
	for ctx.Err() == nil {
		wait, left := d.admit(ctx, g, limit, patience)
		if left == nil {
			return g
		}
		select {
		case <-left:
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
	return nil
}

// admit gives g a place, or makes one guest leave, if one may be asked to, and says when to look
// again.
func (d *door) admit(ctx context.Context, g *guest, limit int, patience time.Duration) (wait time.Duration, left <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.guests) < limit {
		g.since = time.Now()
		g.ctx, g.cancel = context.WithCancelCause(ctx)
		d.guests = append(d.guests, g)
		return 0, nil
	}
	d.left = make(chan struct{})
	slow := d.guests[0]
	if i := slices.IndexFunc(d.guests, func(g *guest) bool { return !g.spoke.Load() }); i >= 0 {
		slow = d.guests[i]
	} else if wait = patience - time.Since(slow.since); wait > 0 {
		return wait, d.left
	}
	slow.cancel(errPushedOut)
	return patience, d.left
}

// leave gives g's place to another.
func (d *door) leave(g *guest) {
	g.cancel(nil)
	d.mu.Lock()
	defer d.mu.Unlock()
	at := slices.Index(d.guests, g)
	d.guests = slices.Delete(d.guests, at, at+1)
	if d.left != nil {
		close(d.left)
		d.left = nil
	}
}
