package inproc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A Fabric is a transport.Fabric in a Network.
type Fabric struct {
	link.Fabric
	link.Regions
	net   *Network
	name  string
	depth int
	next  int // the Conn that the next Poll serves first

	// Guarded by net.mu; of conns, what changes it is the owner, too.
	conns  link.Conns[*Conn]
	killed bool
	over   bool // there is nothing to ring
}

var _ transport.Fabric = (*Fabric)(nil)

// socket is the name of peer's socket.
func (f *Fabric) socket(peer transport.Addr) (string, error) {
	name, ok := strings.CutPrefix(string(peer), prefix)
	if !ok || name == "" {
		return "", errors.New("the address is not one of this transport")
	}
	return f.net.space + name, nil
}

// ring makes FD readable until the next Poll. The caller holds net.mu.
func (f *Fabric) ring() {
	if !f.over {
		f.Ring()
	}
}

// Arm implements transport.Fabric. Whatever happens rings at once.
func (f *Fabric) Arm() bool { return f.Missed.Swap(false) }

// Deregister implements transport.Fabric. A write lands while its Post is the owner.
func (f *Fabric) Deregister(k transport.Key) {
	f.Owned(func() {
		if f.Remove(k) {
			f.Free(k.ID)
		}
	})
}

// Poll implements transport.Fabric.
func (f *Fabric) Poll(ev []transport.Event) (n int, err error) {
	if owner, err := f.Enter(); !owner {
		return 0, err
	}
	defer f.Owner.Unlock()
	f.net.mu.Lock()
	defer f.net.mu.Unlock()
	if f.killed {
		return 0, errKilled
	}
	n = f.Freed(ev)
	for left := len(f.conns.All); left > 0 && n < len(ev); left-- {
		f.next = (f.next + 1) % len(f.conns.All)
		n += f.conns.All[f.next].visit(ev[n:])
	}
	if n == len(ev) {
		f.ring() // there may be more
	}
	if f.Closed && n == 0 && len(f.conns.All) == 0 {
		return 0, transport.ErrClosed
	}
	return n, nil
}

// Close implements transport.Fabric. Its peers see io.EOF.
func (f *Fabric) Close() error {
	f.Shut(f.conns.Leave, func() {
		f.net.mu.Lock()
		defer f.net.mu.Unlock()
		f.over = true
		if f.net.fabrics[f.name] == f {
			delete(f.net.fabrics, f.name)
		}
	})
	return nil
}

// inspect ends what stalls. See link.Fabric.
func (f *Fabric) inspect(now time.Time, _ bool) {
	f.net.mu.Lock()
	defer f.net.mu.Unlock()
	limit := f.Limits.Stall
	for _, c := range f.conns.All {
		if c.Out.Stalled(now, c.Err == nil && c.Sent != c.End, uint64(c.Sent)<<32|uint64(c.End)) >= limit {
			c.cut(fmt.Errorf("the peer has read nothing for %v (Limits.Stall)", limit), errors.New("the peer closed a stalled connection"))
		}
	}
}

// Connect implements transport.Fabric.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	f.net.mu.Lock()
	r, killed := *f.net.relation(f.name, strings.TrimPrefix(string(peer), prefix)), f.killed
	f.net.mu.Unlock()
	err := error(nil)
	switch {
	case killed:
		err = errKilled
	case r.cut:
		err = errCut
	case r.held:
		err = f.silence(ctx)
	default:
		return f.Fabric.Connect(ctx, peer)
	}
	return nil, fmt.Errorf("inproc: connect %s to %q: %w", f.name, peer, err)
}

// silence stands for a handshake in which nothing passes.
func (f *Fabric) silence(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-f.Ending():
		return transport.ErrClosed
	case <-time.After(f.Limits.Handshake):
		return fmt.Errorf("the handshake has not finished within %v (Limits.Handshake): %w", f.Limits.Handshake, unix.ETIMEDOUT)
	}
}
