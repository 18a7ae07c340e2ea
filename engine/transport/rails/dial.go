package rails

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"fserver/engine/transport"
)

// Connect implements transport.Fabric. The first Fabric that gets through makes member 0. The others are
// dialed when the peer has answered on it, and again when they are lost.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	to, err := f.routes(peer)
	if err != nil {
		return nil, err
	}
	ways := to.first() // another strand would not do better
	closed := fmt.Errorf("rails: connect to %q: %w", peer, transport.ErrClosed)
	if !f.begin() {
		return nil, closed
	}
	defer f.tasks.Done()
	f.mu.Lock()
	slices.SortStableFunc(ways, func(a, b way) int { // those that are away last
		return int(f.ailing>>a.ours&1) - int(f.ailing>>b.ours&1)
	})
	f.mu.Unlock()
	a, err := f.first(ctx, ways)
	if err != nil {
		return nil, err
	}
	if c := f.dialed(a.in, to, a.way); c != nil {
		return c, nil
	}
	return nil, closed
}

// headStart is how long a way has before the next one is tried too.
const headStart = 250 * time.Millisecond

// attempt is what has come of dialing a way.
type attempt struct {
	way int
	in  transport.Conn
	err error
}

// first returns the first member that gets through. Each way is tried when the one before has failed, or has had
// its head start: a NIC that is silent does not hold up the others.
func (f *Fabric) first(parent context.Context, ways []way) (attempt, error) {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	came, begun := make(chan attempt, len(ways)), 0
	dial := func() {
		a, w := attempt{way: begun, err: errors.New("rails: dialing has panicked")}, ways[begun]
		begun++
		f.task(func() {
			defer func() { came <- a }()
			a.in, a.err = f.members[w.ours].Connect(ctx, w.to)
		})
	}
	dial()
	var err error
	for failed := 0; failed < begun; {
		var late <-chan time.Time
		if begun < len(ways) {
			late = time.After(headStart)
		}
		select {
		case a := <-came:
			if a.err == nil {
				f.task(func() { f.drop(came, begun-failed-1, ways) })
				return a, nil
			}
			failed++
			err = and(err, a.err)
		case <-late:
		}
		switch {
		case parent.Err() != nil:
			err = and(err, context.Cause(parent))
		case begun < len(ways):
			dial()
		}
	}
	return attempt{}, err
}

// drop closes members that got through after the first.
func (f *Fabric) drop(came <-chan attempt, left int, ways []way) {
	for range left {
		if a := <-came; a.err == nil {
			f.locked(func() { f.find(ways[a.way].ours, a.in).refuse() })
		}
	}
}

// and returns both errors in one, without one that is in the other.
func and(err, more error) error {
	switch {
	case err == nil:
		return more
	case errors.Is(err, more):
		return err
	}
	return fmt.Errorf("%w; %w", err, more)
}

// dialed makes a Conn of member 0, which is over to.ways[first]. It returns nil after Close.
func (f *Fabric) dialed(in transport.Conn, to *routes, first int) *Conn {
	f.mu.Lock()
	defer f.mu.Unlock()
	at := &to.ways[first]
	r := f.find(at.ours, in)
	if f.closing {
		r.refuse()
		return nil
	}
	var id [16]byte
	rand.Read(id[:]) // never fails
	about := in.Peer()
	c := f.conn(true, id, to.fabrics, to.strands, &about)
	r.strand, r.theirs = at.strand, at.theirs
	c.plan(to.ways)
	number, _ := c.order.dial() // a new Conn takes it
	c.add(r, number, c.greeting(at, number))
	for i, w := range to.ways {
		k := keeper{c: c, way: w}
		if i == first {
			k.lost = r.lost
		}
		f.task(k.run)
	}
	c.after()
	f.ring()
	return c
}

// plan notes which members there will be, and why there are no others.
func (c *Conn) plan(ways []way) {
	why := errors.New("the peer has no interface left for it")
	if c.f.o.Common {
		c.ways, why = len(ways), errors.New("the peer has no interface in its network")
	}
	for i := range c.stats {
		if !slices.ContainsFunc(ways, func(w way) bool { return w.ours*c.f.o.Strands+w.strand == i }) && i%c.f.o.Strands < c.strands {
			c.stats[i].why = why
		}
	}
}

// greeting is the first frame on a member that we have dialed.
func (c *Conn) greeting(w *way, member uint32) []byte {
	return greet{Conn: c.id, Member: member, At: uint16(w.ours), Count: uint16(len(c.f.members)), Strand: uint16(w.strand), Strands: uint16(c.f.o.Strands)}.bytes()
}

// A keeper dials the members of one way, one after the other.
type keeper struct {
	c *Conn
	way
	lost <-chan struct{} // closed when the member has ended; nil: there was none yet
}

// run is a goroutine of the Fabric. It ends with the Conn, or when the Fabric of ours has failed.
func (k *keeper) run() {
	next, pause, began, over := k.lost, k.c.f.o.Pause, time.Now(), k.c.ctx.Done()
	if next == nil {
		next = k.c.heard
	}
	for {
		select {
		case <-next:
		case <-over:
			return
		}
		waited, ok := k.wait()
		if !ok || k.c.f.works(k.ours) != nil {
			return
		}
		if k.lost != nil {
			if waited || time.Since(began) > pause {
				pause = k.c.f.o.Pause
			} else {
				pause = min(2*pause, MaxPause)
			}
			rest, cancel := context.WithTimeout(k.c.ctx, pause)
			<-rest.Done()
			cancel()
		}
		k.lost = k.dial()
		next, began = k.lost, time.Now()
	}
}

// gone is closed.
var gone = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// failed takes that an attempt of a keeper has failed.
func (c *Conn) failed(k *keeper, id uint32, err error) {
	c.stat(k.ours, k.strand).why = err
	c.blame(err)
	c.order.failed(id)
}

// dial makes one attempt. What it returns is closed when the member has ended, or the attempt has failed.
func (k *keeper) dial() (lost <-chan struct{}) {
	lost = gone
	c, f := k.c, k.c.f
	f.mu.Lock()
	id, ok := c.order.dial()
	if ok {
		c.attempts++
	}
	f.mu.Unlock()
	if !ok {
		return lost
	}
	ctx, cancel := context.WithTimeoutCause(c.ctx, f.o.Dial, fmt.Errorf("rails: connect to %s: no answer within %v", k.to, f.o.Dial))
	in, err := f.members[k.ours].Connect(ctx, k.to)
	cancel()
	f.gone(k.ours, err)
	f.locked(func() {
		c.attempts--
		defer c.after()
		if err != nil {
			c.failed(k, id, err)
			return
		}
		r := f.find(k.ours, in)
		if !f.o.Same(in.Peer().Hello, c.about.Hello) {
			c.failed(k, id, fmt.Errorf("rails: %s is another peer by now", k.to))
			r.refuse()
		} else if r.strand, r.theirs = k.strand, k.theirs; c.add(r, id, c.greeting(&k.way, id)) {
			lost = r.lost
		} else {
			r.refuse()
		}
	})
	return lost
}
