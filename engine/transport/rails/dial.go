package rails

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"fserver/engine/transport"
)

// Connect implements transport.Fabric. The first Fabric that gets through makes member 0. The others are
// dialed when the peer has answered on it, and again when they are lost.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	ways, theirs, err := f.ways(peer)
	if err != nil {
		return nil, err
	}
	closed := fmt.Errorf("rails: connect to %q: %w", peer, transport.ErrClosed)
	if !f.begin() {
		return nil, closed
	}
	defer f.tasks.Done()
	for i, w := range ways {
		in, bad := f.members[w.ours].Connect(ctx, theirs[w.theirs])
		if bad == nil {
			if c := f.dialed(in, ways, theirs, i); c != nil {
				return c, nil
			}
			return nil, closed
		}
		err = and(err, bad)
		if ctx.Err() != nil {
			err = and(err, context.Cause(ctx))
			break
		}
	}
	return nil, err
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

// dialed makes a Conn of member 0, which is over ways[first]. It returns nil after Close.
func (f *Fabric) dialed(in transport.Conn, ways []pair, theirs []transport.Addr, first int) *Conn {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.find(ways[first].ours, in)
	if f.closing {
		r.refuse()
		return nil
	}
	var id [16]byte
	rand.Read(id[:]) // never fails
	about := in.Peer()
	c := f.conn(true, id, len(theirs), &about)
	r.theirs = ways[first].theirs
	number, _ := c.order.dial() // a new Conn takes it
	c.add(r, number, c.greeting(r.at, number))
	for i, w := range ways {
		k := keeper{c: c, way: w, to: theirs[w.theirs]}
		if i == first {
			k.lost = r.lost
		}
		f.task(k.run)
	}
	c.after()
	f.ring()
	return c
}

// greeting is the first frame on a member that we have dialed.
func (c *Conn) greeting(at int, member uint32) []byte {
	return greet{Conn: c.id, Member: member, At: uint16(at), Count: uint16(len(c.f.members))}.bytes()
}

// A keeper dials the members over one Fabric, one after the other.
type keeper struct {
	c    *Conn
	way  pair
	to   transport.Addr
	lost <-chan struct{} // closed when the member has ended; nil: there was none yet
}

// run is a goroutine of the Fabric. It ends with the Conn.
func (k *keeper) run() {
	next, pause, began := k.lost, k.c.f.o.Pause, time.Now()
	if next == nil {
		next = k.c.heard
	}
	for {
		select {
		case <-next:
		case <-k.c.ctx.Done():
			return
		}
		if k.lost != nil {
			if time.Since(began) > pause {
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
	in, err := f.members[k.way.ours].Connect(c.ctx, k.to)
	f.locked(func() {
		c.attempts--
		defer c.after()
		if err != nil {
			c.blame(err)
			c.order.failed(id)
			return
		}
		r := f.find(k.way.ours, in)
		if !bytes.Equal(in.Peer().Hello, c.about.Hello) {
			c.blame(fmt.Errorf("rails: %s is another peer by now", k.to))
			c.order.failed(id)
			r.refuse()
		} else if r.theirs = k.way.theirs; c.add(r, id, c.greeting(k.way.ours, id)) {
			lost = r.lost
		} else {
			r.refuse()
		}
	})
	return lost
}
