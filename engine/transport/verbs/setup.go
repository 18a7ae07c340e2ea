package verbs

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	rdma "fserver/cshim/verbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// The frames of Inner, by their first byte. The dialer makes a queue pair and tells of it
// (setHere); the listener makes one, joins it to that, and tells of it; the dialer joins its
// own and says so (setReady). From then on both send. setEnd is why one of them ends, if
// it is no close in good order.
const (
	setHere  = 'Q'
	setReady = 'R'
	setEnd   = 'E'
)

// A place is what a peer is told of a queue pair.
type place struct {
	gid     [16]byte
	qp, psn uint32
	mtu     int
	lid     int
	slots   int // that are posted for frames
	slot    int // bytes of each
}

const placeLen = 1 + 16 + 4*6

func (p *place) append(b []byte) []byte {
	b = append(append(b, setHere), p.gid[:]...)
	for _, v := range []uint32{p.qp, p.psn, uint32(p.mtu), uint32(p.lid), uint32(p.slots), uint32(p.slot)} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
}

func parsePlace(b []byte) (p place, err error) {
	if len(b) != placeLen || b[0] != setHere {
		return p, fmt.Errorf("the peer told of its queue pair in %d bytes, want %d", len(b), placeLen)
	}
	copy(p.gid[:], b[1:])
	v := func(i int) uint32 { return binary.LittleEndian.Uint32(b[17+4*i:]) }
	p.qp, p.psn, p.mtu, p.lid, p.slots, p.slot = v(0), v(1), int(v(2)), int(v(3)), int(v(4)), int(v(5))
	if p.qp >= 1<<24 || p.psn >= 1<<24 || p.mtu < 256 || p.slots < 2 || p.slots > 1<<15 || p.slot < slotBytes {
		return p, fmt.Errorf("the peer's queue pair is %+v, which cannot be", p)
	}
	return p, nil
}

// here is what the peer is to be told of c.
func (c *Conn) here() place {
	return place{c.f.gid.Raw, c.qp.Number, c.psn, c.f.port.MTU, c.f.port.LID, slots, slotBytes}
}

// make makes the queue pair of a Conn over in, ready to receive. It may block.
func (f *Fabric) make(in transport.Conn, dialer bool) (*Conn, error) {
	f.mu.Lock()
	room := f.made < f.most
	if room {
		f.made++
	}
	f.mu.Unlock()
	if !room {
		return nil, fmt.Errorf("%s has room for %d connections, and all are in use", f.name, f.most)
	}
	c := &Conn{f: f, inner: in, since: time.Now(), moved: time.Now()}
	if dialer {
		c.ready = make(chan struct{})
	}
	if err := c.make(); err != nil {
		c.destroy()
		f.mu.Lock()
		f.made--
		f.mu.Unlock()
		return nil, err
	}
	return c, nil
}

// make acquires what destroy gives back, also after an error.
func (c *Conn) make() (err error) {
	f := c.f
	if c.buf, err = mem.Map(bufBytes); err != nil {
		return err
	}
	if c.mr, err = f.dev.Register(uint64(c.buf.Addr), c.buf.Len, rdma.LocalWrite); err != nil {
		return err
	}
	c.registered = true
	qp, err := f.dev.NewQP(f.cq, rdma.Room{Send: sendRoom, Recv: slots + spare, SGE: 1})
	if err != nil {
		return err
	}
	c.qp, c.number = qp, qp.Number
	c.psn = binary.LittleEndian.Uint32(random(4)) & 0xffffff
	for i := range uint32(slots + spare) {
		c.rx.spent = append(c.rx.spent, i)
	}
	return qp.Init(1, rdma.RemoteWrite)
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails
	return b
}

// patience: what is not acknowledged within 0.27 s is sent again, six times. In an emulated machine
// under load 67 ms (14) was too short: queue pairs with large writes both ways ended (ADR 23). A peer that dies is known by its socket, long before. A peer without a slot is waited
// for: the credits see to it that there is one.
var patience = rdma.Patience{Timeout: 16, Retries: 6, NotReady: 7}

// join joins the queue pair to the peer's. It may block.
func (c *Conn) join(p place) error {
	if err := c.post(c.rx.spent); err != nil {
		return err
	}
	err := c.qp.Receive(rdma.Path{
		GID: p.gid, QP: p.qp, PSN: p.psn, LID: p.lid, Port: 1, GIDIndex: c.f.gid.Index,
		MTU: min(p.mtu, c.f.port.MTU), Global: c.f.port.Ethernet,
	})
	if err == nil {
		err = c.qp.Send(c.psn, patience)
	}
	return err
}

// Connect implements transport.Fabric.
func (f *Fabric) Connect(ctx context.Context, peer transport.Addr) (transport.Conn, error) {
	at, ok := f.innerAddr(peer)
	if !ok {
		return nil, fmt.Errorf("verbs: connect to %q: want an address that starts with %s", peer, scheme)
	}
	if !f.begin() {
		return nil, fmt.Errorf("verbs: connect to %s: %w", peer, transport.ErrClosed)
	}
	defer f.tasks.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(f.ctx, func() { cancel(transport.ErrClosed) })()
	in, err := f.inner.Connect(ctx, at)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("verbs: connect to %s: %w", peer, err)
	}
	c, err := f.make(in, true)
	if err == nil {
		err = f.dial(ctx, c)
	}
	if err != nil {
		_ = in.Close()
		return nil, fmt.Errorf("verbs: connect to %s: %w", peer, err)
	}
	return c, nil
}

// dial does the dialer's part over the Conn of Inner that c has.
func (f *Fabric) dial(ctx context.Context, c *Conn) error {
	p := c.here()
	f.mu.Lock()
	f.inners[c.inner] = c
	f.conns[c.number] = c
	f.mu.Unlock()
	err := f.say(ctx, c.inner, p.append(nil))
	limit := time.NewTimer(f.limits.Handshake)
	defer limit.Stop()
	for waiting := true; waiting && err == nil; {
		select {
		case <-c.ready:
			waiting = false
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-limit.C:
			err = fmt.Errorf("the peer did not answer within %v", f.limits.Handshake)
		case <-time.After(200 * time.Microsecond):
			f.mu.Lock()
			f.askInner()
			f.mu.Unlock()
		}
	}
	if err == nil {
		err = c.refusal
	}
	if err == nil {
		err = c.join(c.peer)
	}
	if err == nil {
		err = f.say(ctx, c.inner, []byte{setReady})
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case err != nil:
	case c.err != nil:
		err = c.err
	case f.closing:
		err = transport.ErrClosed
	}
	if err != nil {
		f.forget(c)
		return err
	}
	c.tx.credits += c.peer.slots
	c.up = true
	f.visitLater(c)
	return nil
}

// say sends a frame over Inner, from outside of Poll.
func (f *Fabric) say(ctx context.Context, in transport.Conn, frame []byte) error {
	for {
		f.mu.Lock()
		n, err := in.Post([]transport.Op{{Kind: transport.OpFrame, Frame: frame}})
		f.mu.Unlock()
		if n == 1 || err != nil {
			return err
		}
		select {
		case <-time.After(100 * time.Microsecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// forget ends a Conn that nobody has heard of. The caller holds f.mu.
func (f *Fabric) forget(c *Conn) {
	if !c.ended.IsZero() {
		c.closed = true // its end is under way
		f.visitLater(c)
		return
	}
	if f.inners[c.inner] == c {
		delete(f.inners, c.inner)
	}
	delete(f.conns, c.number)
	f.made--
	c.err, c.retired = c.because(), true
	c.destroy()
}

// welcome does the listener's part: in is a Conn of Inner whose dialer has told of p.
func (f *Fabric) welcome(in transport.Conn, told []byte) {
	p, err := parsePlace(told)
	var c *Conn
	if err == nil {
		c, err = f.make(in, false)
	}
	if err == nil {
		err = c.join(p)
	}
	if err == nil {
		here := c.here()
		f.mu.Lock()
		if waits := f.inners[in]; waits != nil && waits.err == nil && !f.closing {
			c.peer, c.tx.credits = p, p.slots
			f.inners[in] = c
			f.conns[c.number] = c
		} else {
			err = transport.ErrClosed
		}
		f.mu.Unlock()
		if err == nil {
			err = f.say(f.ctx, in, here.append(nil))
		}
	}
	if err != nil {
		_ = f.say(f.ctx, in, append([]byte{setEnd}, err.Error()...))
		_ = in.Close()
		f.mu.Lock()
		if c != nil {
			f.forget(c)
		}
		if w := f.inners[in]; w != nil && w.waits {
			delete(f.inners, in)
		}
		f.mu.Unlock()
	}
}

// askInner polls Inner, if nobody else does. The caller holds f.mu.
func (f *Fabric) askInner() {
	for {
		n, err := f.inner.Poll(f.told[:])
		for i := range n {
			f.heard(&f.told[i])
		}
		if err != nil && !errors.Is(err, transport.ErrClosed) {
			f.broken.CompareAndSwap(nil, transport.Caught(any(err)))
		}
		if n < len(f.told) {
			return
		}
	}
}

// heard takes one event of Inner.
func (f *Fabric) heard(e *transport.Event) {
	c := f.inners[e.Conn]
	switch e.Kind {
	case transport.EvAccept:
		f.inners[e.Conn] = &Conn{f: f, inner: e.Conn, since: time.Now(), waits: true}
	case transport.EvFrame:
		if c != nil && len(e.Data) > 0 {
			f.frame(c, e.Data)
		}
	case transport.EvDown:
		switch {
		case c == nil:
		default:
			c.lost(e.Err)
		}
	}
}

// frame takes a frame of Inner for c.
func (f *Fabric) frame(c *Conn, b []byte) {
	switch {
	case b[0] == setHere && c.waits && !c.asked && !f.closing:
		c.asked = true
		told := append([]byte(nil), b...)
		in := c.inner
		f.task(func() { f.welcome(in, told) })
	case b[0] == setHere && c.ready != nil && !c.up && c.peer.qp == 0 && c.refusal == nil:
		c.peer, c.refusal = parsePlace(b)
		close(c.ready)
	case b[0] == setReady && !c.joined && !c.waits && c.ready == nil:
		c.joined = true
		if !c.up { // else a message over the queue pair was faster
			c.arrive()
		}
	case b[0] == setEnd:
		c.lost(fmt.Errorf("the peer: %.500s", b[1:]))
	default:
		c.lost(fmt.Errorf("the peer sent a frame of kind %q out of turn", b[0]))
	}
}

// lost ends c because of what Inner says.
func (c *Conn) lost(why error) {
	if !errors.Is(why, io.EOF) && c.up {
		why = fmt.Errorf("the connection that set it up: %w", why)
	}
	switch {
	case c.waits:
		c.err = why
		_ = c.inner.Close()
		delete(c.f.inners, c.inner)
	case c.ready != nil && c.peer.qp == 0:
		if c.refusal == nil {
			c.refusal = why
			close(c.ready)
		}
	case c.ready != nil && !c.up:
		c.err = why // the dialer sees it before it is done
	default:
		c.end(why)
	}
}
