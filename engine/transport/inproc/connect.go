package inproc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"fserver/engine/transport"
)

// Connect implements transport.Fabric. Both sides of the Gate run in the
// calling goroutine, so neither Fabric need be polled.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	c, err := f.connect(ctx, peer)
	if err != nil {
		return nil, fmt.Errorf("inproc: connect %s to %q: %w", f.name, peer, err)
	}
	return c, nil
}

func (f *Fabric) connect(ctx context.Context, peer transport.Addr) (*Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	name, ok := nameOf(peer)
	if !ok {
		return nil, errors.New("the address is not one of this transport")
	}
	p, held, err := f.meet(name)
	if err != nil {
		return nil, err
	}
	defer func() {
		f.net.mu.Lock()
		p.pending--
		f.net.mu.Unlock()
	}()
	dialer, listener := f.gate.Open(true), p.gate.Open(false)
	err = errSilence
	if !held {
		err = shake(dialer, listener)
	}
	if errors.Is(err, errSilence) {
		return nil, f.wait(ctx, p)
	}
	if err != nil {
		return nil, err
	}
	return f.join(p, dialer.Hello(), listener.Hello())
}

// meet finds the Fabric of that name and takes a place inside its Gate. held
// says that nothing passes between the two.
func (f *Fabric) meet(name string) (p *Fabric, held bool, err error) {
	n := f.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if f.over != nil {
		return nil, false, f.over
	}
	p = n.fabrics[name]
	if p == nil || !p.listen {
		return nil, false, errors.New("no fabric of this name accepts connections")
	}
	if err := n.refuse[name]; err != nil {
		return nil, false, err
	}
	r := n.relation(f.name, name)
	if r.cut {
		return nil, false, errCut
	}
	if p.pending >= p.limits.Pending {
		return nil, false, fmt.Errorf("%d connections are already in the handshake (Limits.Pending)", p.pending)
	}
	p.pending++
	return p, r.held, nil
}

// wait stands for a handshake in which nobody says anything more.
func (f *Fabric) wait(ctx context.Context, p *Fabric) error {
	limit := min(f.limits.Handshake, p.limits.Handshake)
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-f.done:
		f.net.mu.Lock()
		defer f.net.mu.Unlock()
		return f.over
	case <-p.done:
		return errGone
	case <-t.C:
		return fmt.Errorf("the handshake has not finished within %v (Limits.Handshake)", limit)
	}
}

var errGone = errors.New("the peer closed during the handshake")

var errSilence = errors.New("inproc: neither side of the handshake sends a message")

// shake carries messages between two runs of Gates until both are done. It
// gives errSilence where on a wire both sides would wait for the other.
func shake(dialer, listener transport.Handshake) error {
	var (
		sides = [2]transport.Handshake{dialer, listener}
		done  [2]bool
		in    []byte
	)
	for i := 0; ; i = 1 - i {
		if done[i] {
			return errors.New("a message after the end of the handshake")
		}
		out, over, err := sides[i].Next(in)
		if len(out) > transport.MaxHandshake {
			return fmt.Errorf("handshake message of %d bytes: the limit is %d", len(out), transport.MaxHandshake)
		}
		if err != nil {
			return refusal(i == 0, err, out, sides[1-i], done[1-i])
		}
		done[i] = over
		if out == nil {
			if done[0] && done[1] {
				return nil
			}
			return errSilence
		}
		if done[0] && done[1] {
			return errors.New("a message after the end of the handshake")
		}
		in = out
	}
}

// refusal gives the dialer's error when one side has ended the handshake with
// err and the reason out for the other side.
func refusal(byDialer bool, err error, out []byte, other transport.Handshake, otherDone bool) error {
	var told error
	if out != nil && !otherDone {
		_, _, told = other.Next(out)
	}
	if byDialer {
		return err
	}
	if told == nil {
		return errors.New("the peer ended the handshake")
	}
	return told
}

// join makes the two ends of a Conn.
func (f *Fabric) join(p *Fabric, helloOfPeer, helloOfUs []byte) (*Conn, error) {
	n := f.net
	n.mu.Lock()
	r := n.relation(f.name, p.name)
	var err error
	switch {
	case f.over != nil:
		err = f.over
	case p.over != nil:
		err = errGone
	case r.cut:
		err = errCut
	}
	if err != nil {
		n.mu.Unlock()
		return nil, err
	}
	r.conns++
	ours := newConn(f, p, r, helloOfPeer)
	theirs := newConn(p, f, r, helloOfUs)
	ours.peer, theirs.peer = theirs, ours
	theirs.fresh, theirs.due = true, p.polls+1+ours.delay()
	f.conns = append(f.conns, ours)
	p.conns = append(p.conns, theirs)
	n.mu.Unlock()
	p.bell.ring()
	return ours, nil
}
