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

// A place is what a peer is told of a queue pair, in this order and little-endian.
type place struct {
	GID     [16]byte
	QP, PSN uint32
	MTU     uint32
	LID     uint32
	Slots   uint32 // that are posted for frames
	Slot    uint32 // bytes of each
	Port    uint32 // of a bond that it sends over, from 1; 0: the NIC chooses
}

func parsePlace(b []byte) (p place, err error) {
	if n := binary.Size(p); len(b) != n {
		return p, fmt.Errorf("the peer told of its queue pair in %d bytes, want %d", len(b), n)
	}
	_, _ = binary.Decode(b, binary.LittleEndian, &p) // it fits
	if p.Port > bondPorts || p.QP >= 1<<24 || p.PSN >= 1<<24 || p.MTU < 256 || p.Slots < 2 || p.Slots > 1<<15 || p.Slot < slotBytes {
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
	f.refresh()
	f.mend()
	c := &Conn{f: f, session: s}
	f.Owned(func() { c.at = f.at })
	c.Open(s, c.end)
	c.About.Why = f.direct.why
	err := deviceError(c.make())
	if err == nil {
		err = c.meet()
	}
	f.Owned(func() {
		if err == nil {
			err = f.add(c)
		}
		if err != nil {
			delete(f.byQP, c.number)
			f.lag.leave(c)
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
		c.choosePort(s.Remote, 0)
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
	c.tx.credits = int(c.peer.Slots)
	if !s.Dialer {
		c.choosePort(s.Remote, int(c.peer.Port))
		c.at = c.at.toward(rdma.GID{Raw: c.peer.GID})
	}
	c.About.Path = c.journey()
	if err = c.join(c.peer); err == nil {
		c.f.Owned(func() { c.f.byQP[c.number] = c })
	} else {
		err = c.f.refused(c.at.gid(), err)
	}
	if err == nil && s.Dialer {
		err = c.greet()
	}
	if err != nil {
		return fmt.Errorf("no path from GID %v of %s to GID %v of the peer: %w (check that both are in one network, and that its switches and firewalls let RoCE pass, UDP port 4791; FSERVER_RDMA_DEVICE names another device)",
			c.at.gid(), c.f.Name(), rdma.GID{Raw: c.peer.GID}, err)
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
			case c.session.Interrupted():
				err = fmt.Errorf("nothing was acknowledged in %v", time.Since(begin).Round(time.Millisecond))
			default:
				done = false
			}
		})
	}
	return err
}

// tell tells the peer of the queue pair.
func (c *Conn) tell() error {
	p := place{c.at.gid().Raw, c.qp.Number, c.psn, uint32(c.at.port.MTU), uint32(c.at.port.LID), slots, slotBytes, uint32(c.lag)}
	b, _ := binary.Append(nil, binary.LittleEndian, p) // its size is fixed
	return c.session.Tell(b)
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
	qp, err := f.dev.NewQP(f.cq, rdma.Room{Send: sendRoom, Recv: slots + spare, Port: c.at.number, Inline: inlined})
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

// join joins the queue pair to the peer's. It may block. A peer that dies is known by its socket, long before retries
// are over. A peer without a slot is waited for: the credits see to it that there is one.
func (c *Conn) join(p place) error {
	var err error
	if c.f.Owned(func() { err = c.post(c.rx.spent) }); err != nil {
		return err
	}
	err = c.qp.Connect(rdma.Path{
		GID: p.GID, QP: p.QP, PSN: p.PSN, OwnPSN: c.psn, LID: int32(p.LID), GIDIndex: c.at.gid().Index,
		MTU: int32(min(p.MTU, uint32(c.at.port.MTU))), Global: c.at.across(p.GID), Port: c.at.number, Flow: c.flow(),
		TrafficClass: c.f.path.TrafficClass, ServiceLevel: c.f.path.ServiceLevel,
		Timeout: c.f.path.Timeout, Retries: c.f.path.Retries, NotReady: 7,
	})
	if err == nil {
		err = c.keepTo()
	}
	return err
}
