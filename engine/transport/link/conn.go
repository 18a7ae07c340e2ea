package link

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Conn is the part of a Conn that does not depend on how bytes travel. The owner of the Fabric
// guards it, but for what Open sets.
type Conn struct {
	f     *Fabric
	end   func(why error)
	About transport.Peer // set before the Conn is used

	FD     int  // the socket, where Poll looks at it
	at     int  // index in Conns
	queued bool // in a Queue
	Fresh  bool // EvAccept is still to be given
	Closed bool // by its own user
	Cut    bool // likewise, for an error: the peer must not take it for a close in good order
	downed bool // EvDown was given
	Err    error
	In     Meter
	Out    Meter
}

// Open makes c the Conn of s. The owner calls end once, when c is closed, whether it has ended
// before or not.
func (c *Conn) Open(s *Session, end func(why error)) {
	now := Meter{since: time.Now()}
	about := transport.Peer{Hello: s.Hello, Remote: s.Remote, Via: s.f.kind.Name}
	*c = Conn{f: s.f, end: end, About: about, FD: -1, Fresh: !s.Dialer, In: now, Out: now}
}

// Peer implements transport.Conn.
func (c *Conn) Peer() transport.Peer { return c.About }

// Lends implements transport.Conn, for those that lend nothing.
func (c *Conn) Lends(mem.Span) bool { return false }

// Because wraps the reason for which c or a half of it ended.
func (c *Conn) Because(reason error) error {
	return fmt.Errorf("%s: %s: %w", c.f.kind.Name, c.About.Remote, reason)
}

// Accept gives the event that begins a Conn, once. whole is the Conn that c is a part of.
func (c *Conn) Accept(whole transport.Conn, ev []transport.Event) (n int) {
	if c.Fresh && !c.Closed {
		ev[0] = transport.Event{Kind: transport.EvAccept, Conn: whole}
		c.Fresh = false
		n = 1
	}
	return n
}

// Close implements transport.Conn.
func (c *Conn) Close() { c.f.Owned(c.leave) }

// leave ends c by our own will.
func (c *Conn) leave() {
	if !c.Closed {
		c.Closed = true
		c.end(transport.ErrClosed)
	}
}

// CloseFor implements transport.Conn.
func (c *Conn) CloseFor(why error) {
	c.f.Owned(func() {
		if !c.Closed {
			c.Closed, c.Cut = true, true
			c.end(why)
		}
	})
}

// Down gives EvDown of a Conn that has ended and whose frames have been given.
func (c *Conn) Down(whole transport.Conn, ev []transport.Event) (n int) {
	if !c.Closed && !c.downed && len(ev) > 0 {
		ev[0] = transport.Event{Kind: transport.EvDown, Conn: whole, Err: c.Err}
		c.downed = true
		n = 1
	}
	return n
}

// gone gives EvClosed. over says that no event is left to give.
func (c *Conn) gone(whole transport.Conn, ev []transport.Event) (n int, over bool) {
	switch {
	case !c.Closed:
		return 0, false
	case c.Fresh: // nobody knows it
		return 0, true
	case len(ev) == 0:
		return 0, false
	}
	ev[0] = transport.Event{Kind: transport.EvClosed, Conn: whole}
	return 1, true
}

// Ends reports whether c has an event of its end to give now: EvDown, or EvClosed if quiet says that
// its peer touches no memory any more.
func (c *Conn) Ends(quiet bool) bool {
	if c.Closed {
		return quiet
	}
	return c.Err != nil && !c.downed
}

// Meter watches one direction of a Conn.
type Meter struct {
	seen  uint64
	since time.Time // when seen was new, or nothing was owed
}

// Stalled is for how long bytes have been owed while their count did not
// change.
func (p *Meter) Stalled(now time.Time, owed bool, count uint64) time.Duration {
	if !owed || count != p.seen {
		p.seen, p.since = count, now
	}
	return now.Sub(p.since)
}

// Derived is a transport's Conn, which embeds Conn.
type Derived interface {
	transport.Conn
	base() *Conn
}

func (c *Conn) base() *Conn { return c }

// Conns is the Conns of a Fabric with events to come.
type Conns[C Derived] struct {
	All  []C
	byFD []C // by descriptor, which is a small number
}

// Leave closes all.
func (l *Conns[C]) Leave() {
	for _, c := range l.All {
		c.base().leave()
	}
}

// Add adds c.
func (l *Conns[C]) Add(c C) {
	c.base().at = len(l.All)
	l.All = append(l.All, c)
}

// End gives the last events of c, which has ended and so have its operations. It forgets c when no
// event is left to give, which over says; quiet says that the peer touches no memory any more.
func (l *Conns[C]) End(c C, quiet bool, ev []transport.Event) (n int, over bool) {
	n = c.base().Down(c, ev)
	if !quiet {
		return n, false
	}
	k, over := c.base().gone(c, ev[n:])
	if over {
		at, last := c.base().at, len(l.All)-1
		l.All[at] = l.All[last]
		l.All[at].base().at = at
		clear(l.All[last:])
		l.All = l.All[:last]
	}
	return n + k, over
}

// Watch is Add of a Conn whose socket f watches. It fails when f is closing.
func (l *Conns[C]) Watch(f *Fabric, events uint32, c C) error {
	if f.Closing {
		return transport.ErrClosed
	}
	fd := c.base().FD
	if err := f.Watch(fd, events); err != nil {
		return err
	}
	for len(l.byFD) <= fd {
		l.byFD = append(l.byFD, *new(C))
	}
	l.byFD[fd] = c
	l.Add(c)
	if c.base().Fresh {
		f.Ring()
	}
	return nil
}

// Unwatch ends Watch before the socket is closed.
func (l *Conns[C]) Unwatch(f *Fabric, c C) {
	fd := c.base().FD
	l.byFD[fd] = *new(C)
	unix.EpollCtl(f.Epoll, unix.EPOLL_CTL_DEL, fd, &unix.EpollEvent{})
}

// At is the Conn whose socket is fd, or the zero C.
func (l *Conns[C]) At(fd int32) (c C) {
	if int(fd) < len(l.byFD) {
		c = l.byFD[fd]
	}
	return c
}

// Queue holds Conns, each once, in the order in which they came.
type Queue[C Derived] []C

// Len is how many there are.
func (q Queue[C]) Len() int { return len(q) }

// Push adds c if it is not there.
func (q *Queue[C]) Push(c C) {
	if p := c.base(); !p.queued {
		p.queued = true
		*q = append(*q, c)
	}
}

// Pop takes the first.
func (q *Queue[C]) Pop() C {
	all := *q
	c, last := all[0], len(all)-1
	copy(all, all[1:])
	clear(all[last:])
	*q = all[:last]
	c.base().queued = false
	return c
}

// Queued says whether c is in a Queue.
func (c *Conn) Queued() bool { return c.queued }
