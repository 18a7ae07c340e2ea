package inproc

import (
	"crypto/rand"
	"errors"
	"fmt"

	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A Conn is one end of a path between two Fabrics. All but what adopt sets is guarded by net.mu.
type Conn struct {
	link.Conn
	link.Window[struct{}] // Sent: the peer has taken those before
	f                     *Fabric
	peer                  *Conn    // the other end
	inbox                 []letter // of the peer, in order
}

// letter is a frame, or the reason of an end, behind which nothing is read.
type letter struct {
	number uint32 // of the operation in the peer's Window
	frame  []byte
	end    error
}

// adopt has the two ends of a Conn meet: the dialer tells a word, by which the other side finds the
// dialer's end.
func (f *Fabric) adopt(s *link.Session) (transport.Conn, error) {
	c := &Conn{f: f}
	c.Open(s, c.end)
	c.Init(maxDepth)
	if s.Dialer {
		return c, c.dial(s)
	}
	word, err := s.Hear()
	if err != nil {
		return nil, err
	}
	f.Owned(func() { err = c.join(string(word)) })
	if err == nil {
		_ = s.Tell(nil) // a dialer that has gone ends its end
	}
	return c, err
}

func (c *Conn) dial(s *link.Session) error {
	f, n, word := c.f, c.f.net, rand.Text()
	n.mu.Lock()
	n.dialing[word] = c
	n.mu.Unlock()
	err := s.Tell([]byte(word))
	if err == nil {
		_, err = s.Hear()
	}
	f.Owned(func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.dialing, word)
		if err == nil {
			err = f.closing()
		}
		if err == nil {
			f.conns.Add(c)
		} else if c.peer != nil {
			c.cut(err, errReset)
		}
	})
	return err
}

// join makes c the other end of the one that waits for it.
func (c *Conn) join(word string) error {
	f, n := c.f, c.f.net
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.dialing[word]
	if d == nil {
		return errors.New("the peer has given up")
	}
	if err := f.closing(); err != nil {
		return err
	}
	if n.relation(f.name, d.f.name).cut {
		return errCut
	}
	delete(n.dialing, word)
	c.peer, d.peer = d, c
	c.About.Remote, d.About.Remote = prefix+d.f.name, prefix+f.name
	f.conns.Add(c)
	f.ring()
	return nil
}

// closing is why f takes no Conn. The caller is the owner and holds net.mu.
func (f *Fabric) closing() error {
	switch {
	case f.killed:
		return errKilled
	case f.Closing:
		return transport.ErrClosed
	}
	return nil
}

func (c *Conn) relation() *relation { return c.f.net.relation(c.f.name, c.peer.f.name) }

// Post implements transport.Conn. It is the owner of the peer's Fabric, where writes land.
func (c *Conn) Post(ops []transport.Op) (n int, err error) {
	to := c.peer.f
	to.Owner.Lock()
	defer to.Owner.Unlock()
	c.f.net.mu.Lock()
	defer c.f.net.mu.Unlock()
	for ; n < len(ops); n++ {
		o := &ops[n]
		size, err := link.Check("inproc", o)
		switch {
		case c.Err != nil:
			return n, c.Err
		case err != nil:
			return n, err
		case int(c.End-c.Done) == c.f.depth || o.Kind == transport.OpWrite && c.relation().held:
			return n, nil
		}
		c.post(o, size)
	}
	return n, nil
}

func (c *Conn) post(o *transport.Op, size uint64) {
	p := c.peer
	l := letter{number: c.End}
	c.Push(o.User)
	switch waiting := len(p.inbox); {
	case p.Err != nil || waiting > 0 && p.inbox[waiting-1].end != nil: // which the next Polls will find
		return
	case o.Kind == transport.OpFrame:
		l.frame = append([]byte{}, o.Frame...)
	default:
		dst, err := p.f.Target(p, o.Key.ID, o.Key.Token, o.Off, size)
		if err != nil {
			l.end = err
			break
		}
		to := dst.Bytes()
		for _, s := range o.Src {
			to = to[copy(to, s.Bytes()):]
		}
		if waiting == 0 {
			c.Sent = c.End
			c.f.ring()
		}
		return
	}
	p.inbox = append(p.inbox, l)
	p.f.ring()
}

// Unsent implements transport.Conn: the peer takes everything by itself.
func (c *Conn) Unsent() bool { return false }

// end is what a Close of c calls. The peer is given what was posted before.
func (c *Conn) end(why error) {
	c.f.net.mu.Lock()
	defer c.f.net.mu.Unlock()
	bye := errBye
	if c.Cut {
		bye = errReset
	}
	c.over(why, bye)
}

// cut ends c, and the peer finds bye in place of what it has not read. The caller holds net.mu.
func (c *Conn) cut(why, bye error) {
	if c.Err == nil {
		c.peer.inbox = nil
		c.over(why, bye)
	}
}

// over ends c; bye is for the peer. The caller holds net.mu.
func (c *Conn) over(why, bye error) {
	if c.Err == nil {
		c.Err = c.Because(why)
		c.peer.inbox = append(c.peer.inbox, letter{end: bye})
		c.peer.f.ring()
	}
	c.f.ring()
}

// visit gives what has happened on c, as far as there is room. The caller is the owner and holds net.mu.
func (c *Conn) visit(ev []transport.Event) (n int) {
	n = c.Accept(c, ev)
	if c.Err == nil && !c.relation().held {
		n += c.receive(ev[n:])
	}
	n += c.Complete(c, c.Err, ev[n:])
	if c.Err == nil || c.Done != c.End {
		return n
	}
	k, _ := c.f.conns.End(c, true, ev[n:])
	return n + k
}

// receive takes what the peer has sent.
func (c *Conn) receive(ev []transport.Event) (n int) {
	for len(c.inbox) > 0 && n < len(ev) {
		l := c.inbox[0]
		c.inbox = c.inbox[1:]
		if l.end != nil {
			c.cut(l.end, fmt.Errorf("the peer refuses what was sent: %w", l.end))
			return n
		}
		ev[n] = transport.Event{Kind: transport.EvFrame, Conn: c, Data: l.frame}
		n++
	}
	if p := c.peer; n > 0 && p.Err == nil {
		p.Sent = p.End
		if len(c.inbox) > 0 {
			p.Sent = c.inbox[0].number
		}
		p.f.ring()
	}
	return n
}
