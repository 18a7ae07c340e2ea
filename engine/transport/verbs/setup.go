package verbs

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	rdma "fserver/cshim/verbs"
	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// The dialer makes a queue pair and tells of it; the listener makes one, joins it to that, and
// tells of it; the dialer joins its own, writes nothing over it and, when the listener's NIC
// has acknowledged that, says so with an empty message. From then on both send.

// A place is what a peer is told of a queue pair.
type place struct {
	gid     [16]byte
	qp, psn uint32
	mtu     int32
	lid     int32
	slots   int // that are posted for frames
	slot    int // bytes of each
}

const placeLen = 16 + 4*6

func (p *place) encode() []byte {
	b := append([]byte(nil), p.gid[:]...)
	for _, v := range []uint32{p.qp, p.psn, uint32(p.mtu), uint32(p.lid), uint32(p.slots), uint32(p.slot)} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
}

func parsePlace(b []byte) (p place, err error) {
	if len(b) != placeLen {
		return p, fmt.Errorf("the peer told of its queue pair in %d bytes, want %d", len(b), placeLen)
	}
	copy(p.gid[:], b)
	v := func(i int) uint32 { return binary.LittleEndian.Uint32(b[16+4*i:]) }
	p.qp, p.psn, p.mtu, p.lid, p.slots, p.slot = v(0), v(1), int32(v(2)), int32(v(3)), int(v(4)), int(v(5))
	if p.qp >= 1<<24 || p.psn >= 1<<24 || p.mtu < 256 || p.slots < 2 || p.slots > 1<<15 || p.slot < slotBytes {
		return p, fmt.Errorf("the peer's queue pair is %+v, which cannot be", p)
	}
	return p, nil
}

// adopt makes a Conn of s, which then is its life. It may block.
func (f *Fabric) adopt(s *link.Session) (transport.Conn, error) {
	room := false
	f.Owned(func() {
		if room = f.made < f.most; room {
			f.made++
		}
	})
	if !room {
		err := fmt.Errorf("%s has room for %d connections, and all are in use", f.Name(), f.most)
		s.End(err)
		return nil, err
	}
	c := &Conn{f: f, session: s}
	c.Open(s, c.end)
	err := c.make()
	if err == nil {
		err = c.meet()
	}
	f.Owned(func() {
		if err == nil {
			err = f.add(c)
		}
		if err != nil {
			delete(f.byQP, c.number)
			f.made--
		}
	})
	if err != nil {
		s.End(err)
		c.destroy()
		return nil, err
	}
	return c, nil
}

// add makes c one of the Fabric's.
func (f *Fabric) add(c *Conn) error {
	switch {
	case c.Err != nil:
		return c.Err
	case f.Closing:
		return transport.ErrClosed
	}
	c.up = true
	f.conns.Add(c)
	f.queue.Reserve(len(f.conns.All))
	f.visitLater(c)
	c.session.Keep(func(why error) {
		if !errors.Is(why, io.EOF) {
			why = fmt.Errorf("the connection that set it up: %w", why)
		}
		c.end(why)
	})
	return nil
}

// meet joins the queue pair to the peer's.
func (c *Conn) meet() error {
	s := c.session
	if s.Dialer {
		if err := c.tell(); err != nil {
			return err
		}
	}
	m, err := s.Hear()
	if err != nil {
		return err
	}
	if c.peer, err = parsePlace(m); err != nil {
		return err
	}
	c.tx.credits = c.peer.slots
	if err = c.join(c.peer); err == nil {
		c.f.Owned(func() { c.f.byQP[c.number] = c })
	}
	if err == nil && s.Dialer {
		err = c.greet()
	}
	if err != nil {
		return fmt.Errorf("no path from GID %v of %s to GID %v of the peer: %w (check that both are in one network, and that its switches and firewalls let RoCE pass, UDP port 4791; FSERVER_RDMA_DEVICE names another device)",
			c.f.gid, c.f.Name(), rdma.GID{Raw: c.peer.gid}, err)
	}
	if s.Dialer {
		return s.Tell(nil)
	}
	if err = c.tell(); err == nil {
		m, err = s.Hear()
	}
	if err == nil && len(m) > 0 {
		err = fmt.Errorf("the peer said in %d bytes that it is ready, want none", len(m))
	}
	return err
}

// greet posts a write of no bytes, for which the peer's NIC looks at no key, and waits until that NIC
// has acknowledged it: then packets travel both ways. Completions of others that it finds are for the next Poll.
func (c *Conn) greet() (err error) {
	f := c.f
	begin := time.Now()
	f.Owned(func() {
		f.batch[0] = rdma.Request{ID: c.number31(), Op: rdma.Write, Flags: rdma.Signaled}
		_, err = c.qp.PostSend(f.batch[:1])
	})
	for done := err != nil; !done; time.Sleep(100 * time.Microsecond) {
		f.Owned(func() {
			err = f.collect()
			if f.queue.Len() > 0 {
				f.ring()
			}
			switch done = true; {
			case err != nil:
			case c.Err != nil:
				err = c.Err
			case f.Closing:
				err = transport.ErrClosed
			case c.tx.sqAcked == c.tx.sq:
			case time.Since(begin) > f.Limits.Handshake:
				err = fmt.Errorf("nothing was acknowledged in %v", f.Limits.Handshake)
			default:
				done = false
			}
		})
	}
	return err
}

// tell tells the peer of the queue pair.
func (c *Conn) tell() error {
	p := place{c.f.gid.Raw, c.qp.Number, c.psn, c.f.port.MTU, c.f.port.LID, slots, slotBytes}
	return c.session.Tell(p.encode())
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
	qp, err := f.dev.NewQP(f.cq, rdma.Room{Send: sendRoom, Recv: slots + spare})
	if err != nil {
		return err
	}
	c.qp, c.number = qp, qp.Number
	var b [4]byte
	rand.Read(b[:]) // never fails
	c.psn = binary.LittleEndian.Uint32(b[:]) & 0xffffff
	c.tx.Init(opDepth)
	for i := range uint32(slots + spare) {
		c.rx.spent = append(c.rx.spent, i)
	}
	return nil
}

// join joins the queue pair to the peer's. It may block. What is not acknowledged within 0.27 s is
// sent again, six times. In an emulated machine under load 67 ms (14) was too short: queue pairs with
// large writes both ways ended (ADR 23). A peer that dies is known by its socket, long before. A peer
// without a slot is waited for: the credits see to it that there is one.
func (c *Conn) join(p place) error {
	if err := c.post(c.rx.spent); err != nil {
		return err
	}
	return c.qp.Connect(rdma.Path{
		GID: p.gid, QP: p.qp, PSN: p.psn, OwnPSN: c.psn, LID: p.lid, GIDIndex: c.f.gid.Index,
		MTU: min(p.mtu, c.f.port.MTU), Global: c.f.port.Ethernet,
		Timeout: 16, Retries: 6, NotReady: 7,
	})
}
