package rails

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"fserver/engine/mem"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// A Conn is made of members. The Fabric's mu guards it.
type Conn struct {
	f        *Fabric
	order    *order
	id       [16]byte       // the dialer has drawn it
	about    transport.Peer // of member 0
	peers    int            // Fabrics of the peer
	strands  int            // of the peer
	ways     int            // that members may be on; 0: as many as the Fabrics allow
	rails    []*rail        // until they have ended
	bound    map[uint64]*region
	ctx      context.Context // of dialing
	cancel   context.CancelFunc
	attempts int           // Connects under way
	heard    chan struct{} // closed when the peer has said something
	hear     sync.Once     // closes it

	sending
	got     [][]byte // copies of frames that have come and were not given, by number % window
	waiting int      // bytes of them
	now     []byte   // the frame that comes now
	fed     int      // bytes of the frames that were given since the peer was last told
	owing   uint64   // the Poll in which it was first found to be owed an acknowledgement; 0: none was
	idle    int      // Polls since a Post

	err    error  // why the Conn is over
	broken bool   // for an error of ours: the peer must not take it for a close in good order
	reason error  // for which a member was lost
	stats  []stat // of the strands of each of our Fabrics
	theirs uint64 // a bit for each of the peer's Fabrics that it says is away
	hinted bool   // we have told it of ours
	fresh  bool   // EvAccept is still to be given
	closed bool   // by its own user
	downed bool   // EvDown was given
	listed bool   // in busy
	late   bool   // in the Fabric's late
	stuck  uint32
	since  time.Time // when member stuck began to wait for the peer's statement
}

func (f *Fabric) conn(dialer bool, id [16]byte, peers, strands int, about *transport.Peer) *Conn {
	c := &Conn{f: f, order: newOrder(dialer, window, mostBytes), id: id, about: *about, peers: peers, strands: strands,
		bound: map[uint64]*region{}, heard: make(chan struct{}), got: make([][]byte, window), stats: make([]stat, len(f.members)*f.o.Strands)}
	c.kept = make([]kept, window)
	c.ctx, c.cancel = context.WithCancel(f.ctx)
	f.conns = append(f.conns, c)
	return c
}

// add makes r member id of c, and sends the greeting of a dialer. It is false where the member must be closed
// and nobody told of it.
func (c *Conn) add(r *rail, id uint32, greeting []byte) bool {
	r.c, r.id, r.known, r.stat = c, id, true, c.stat(r.at, r.strand)
	if greeting != nil {
		r.push(entry{text: greeting, item: item{kind: kind(greeting[0])}})
	}
	if !c.order.come(id) {
		r.c, r.queue = nil, nil
		return false
	}
	for _, old := range c.rails {
		if old.at == r.at && old.strand == r.strand { // its dialer knows of its end already
			c.order.down(old.id)
		}
	}
	c.rails = append(c.rails, r)
	for _, k := range c.bound {
		if err := r.bind(k); err != nil {
			c.fail(err)
		}
	}
	switch {
	case r.over: // before Connect returned it
		r.hasEnded()
	case r.down != nil:
		c.lose(r)
	}
	c.wake()
	return true
}

// wake makes Polls look at c.
func (c *Conn) wake() {
	c.f.stirred = true
	c.list()
}

// list makes those Polls look at c that look at all.
func (c *Conn) list() {
	if !c.listed && !c.gone() {
		c.listed = true
		c.f.busy = append(c.f.busy, c)
	}
}

// rail returns member id, or nil.
func (c *Conn) rail(id uint32) *rail {
	for _, r := range c.rails {
		if r.id == id {
			return r
		}
	}
	return nil
}

// after does what order has answered.
func (c *Conn) after() {
	if c.asks() {
		c.carryOut()
	}
	for _, r := range c.rails {
		if len(r.queue) != 0 {
			r.flush()
		}
	}
}

// asks reports whether carryOut has something to do.
func (c *Conn) asks() bool {
	o := c.order
	return len(o.out)+len(o.done)+len(o.shut) != 0 || o.over || c.doom != nil
}

// carryOut does what order asks for, but for what is queued on members.
func (c *Conn) carryOut() {
	o := c.order
	for o.over && c.err == nil || len(o.out)+len(o.done)+len(o.shut) != 0 {
		if o.over && c.err == nil {
			c.err = fmt.Errorf("rails: no member is left: %w", c.why())
		}
		c.sendAll()
		for _, num := range o.done {
			c.finish(num)
		}
		o.done = o.done[:0]
		for _, id := range o.shut {
			if r := c.rail(id); r != nil {
				c.lostThere(r)
				r.close()
			}
		}
		o.shut = o.shut[:0]
	}
	if o.over {
		c.cancel()
		c.wake()
	} else if c.doom != nil {
		c.fail(c.doom)
	}
}

// blame keeps the reason for which a member was lost that was not in use.
func (c *Conn) blame(err error) {
	if c.reason == nil {
		c.reason = fmt.Errorf("rails: a member that was not used yet: %s", err) // what was io.EOF is no orderly end of c
	}
}

// stat is what a Conn has done over a strand of a Fabric.
type stat struct {
	sent uint64
	why  error // why it has no member there; nil: it has one, or has not tried
}

func (c *Conn) stat(at, strand int) *stat { return &c.stats[at*c.f.o.Strands+strand] }

// lose takes the loss of a member. The reason for the last one is that for the whole Conn, since a peer
// that closes its Conn in good order closes all.
func (c *Conn) lose(r *rail) {
	c.catchUp()
	if m := c.order.find(r.id); m != nil && m.phase == live {
		c.reason = r.down
	} else {
		c.blame(r.down)
	}
	c.stat(r.at, r.strand).why = r.down
	if r.said && !errors.Is(r.down, io.EOF) { // with io.EOF the peer has closed it, and knows why
		c.noted(r, r.down)
	}
	c.order.down(r.id)
	c.after()
}

// lostThere notes why r is to be closed if it still works here: the peer has lost it.
func (c *Conn) lostThere(r *rail) {
	if r.down != nil || c.order.over {
		return
	}
	why := errors.New("rails: the peer has lost it")
	c.stat(r.at, r.strand).why = why
	if r.said {
		c.noted(r, why)
	}
}

// why is the reason for which a member was lost.
func (c *Conn) why() error {
	if c.reason == nil {
		return errors.New("the peer has closed it")
	}
	return c.reason
}

// fail ends c for an error, and tells the peer, to whom it must not look like a close in good order.
func (c *Conn) fail(err error) {
	if c.err != nil {
		return
	}
	c.catchUp()
	c.err, c.broken = err, true
	for _, r := range c.rails {
		r.push(entry{text: parting(err), item: item{kind: broken}})
		r.flush()
	}
	c.order.end()
	c.after()
}

// leave ends c for its own user.
func (c *Conn) leave() {
	if c.closed {
		return
	}
	c.catchUp()
	c.closed = true
	if c.err == nil {
		c.err = transport.ErrClosed
	}
	c.order.end()
	c.after()
}

// Close implements transport.Conn.
func (c *Conn) Close() { c.f.locked(c.leave) }

// CloseFor implements transport.Conn.
func (c *Conn) CloseFor(why error) {
	c.f.locked(func() {
		if !c.closed {
			c.fail(why)
			c.leave()
		}
	})
}

// inspect ends c if the peer does not say what has come on a member that was lost. read says that all was read that
// it may have said.
func (c *Conn) inspect(now time.Time, read bool) {
	id, waits := c.order.unsettled()
	switch {
	case !waits || !read || c.order.over:
		c.since = time.Time{}
	case c.since.IsZero() || id != c.stuck:
		c.stuck, c.since = id, now
	case now.Sub(c.since) >= c.f.o.Stall:
		c.fail(fmt.Errorf("rails: the peer has not said for %v what has come on member %d, which was lost (Limits.Stall): %v", c.f.o.Stall, id, c.why()))
		c.f.ring()
	}
}

// recv takes an item of a member, and what is behind its header.
func (c *Conn) recv(r *rail, it item, data []byte, p *link.Found) error {
	if c.order.over {
		return nil
	}
	if err := c.order.recv(r.id, it); err != nil {
		return err
	}
	if !r.said {
		c.noted(r, nil)
	}
	c.hear.Do(func() { close(c.heard) })
	if c.f.ailing|c.theirs != 0 || c.hinted {
		c.react()
	}
	if it.kind <= numbered {
		if c.now = data; it.kind == frame && len(r.tail) > 0 {
			c.keep(it.num, r.tail)
			r.tail = r.tail[:0]
		}
		c.give(p)
		if it.kind == frame && it.num >= c.order.given && c.got[it.num%window] == nil {
			c.keep(it.num, nil)
		}
		if c.waiting > mostBytes+2*transport.MaxFrame {
			return fmt.Errorf("rails: %d bytes of frames have come ahead of frame %d: at most %d", c.waiting, c.order.given, mostBytes)
		}
	}
	if c.asks() {
		c.after()
	}
	c.list()
	if c.order.owes() >= window/4 || c.fed >= mostBytes/4 || c.stirs() {
		c.wake()
	}
	return nil
}

// keep copies the frame that comes now, with what belongs behind it.
func (c *Conn) keep(num uint64, tail []byte) {
	b := c.f.pool.get(len(c.now) + len(tail))
	copy(b[copy(b, c.now):], tail)
	c.got[num%window] = b
	c.waiting += len(b)
}

// give gives the frames whose turn it is, as far as p has room.
func (c *Conn) give(p *link.Found) {
	for p.Room() && !c.fresh && !c.closed {
		num, ok := c.order.take()
		if !ok {
			return
		}
		data := c.got[num%window]
		if data == nil {
			data = c.now
		} else {
			c.got[num%window] = nil
			c.waiting -= len(data)
			c.f.given = append(c.f.given, data)
		}
		e := put(p)
		e.Kind, e.Conn, e.Data = transport.EvFrame, c, data
		c.fed += len(data)
	}
}

// serve does what is due, and gives events as far as p has room.
func (c *Conn) serve(p *link.Found) {
	o := c.order
	if c.fresh && !c.closed && p.Room() {
		c.fresh = false
		p.Put(transport.Event{Kind: transport.EvAccept, Conn: c})
	}
	c.give(p)
	for _, r := range c.rails {
		r.judge()
	}
	if o.next > o.sealed && !o.over {
		if c.idle++; c.idle > sealPolls {
			o.seal()
		}
	}
	if owed := o.owes(); owed != 0 && !o.over {
		if c.owing == 0 {
			c.owing = c.f.polls
		}
		if c.f.polls-c.owing >= ackPolls || owed >= window/4 || c.fed >= mostBytes/4 {
			o.acknowledge()
		}
	}
	c.after()
	if o.over && !c.downed && !c.closed && !c.fresh && !o.ready() && p.Room() {
		c.downed = true
		p.Put(transport.Event{Kind: transport.EvDown, Conn: c, Err: c.err})
	}
	if c.ended() && (c.fresh || p.Room()) {
		if !c.fresh {
			p.Put(transport.Event{Kind: transport.EvClosed, Conn: c})
		}
		c.forget()
	}
}

// told takes that the user is told of the end of an op.
func (c *Conn) told() {
	if c.open--; c.open == 0 && c.closed {
		c.wake()
	}
}

// ended reports whether EvClosed is due.
func (c *Conn) ended() bool {
	return c.closed && len(c.rails) == 0 && c.attempts == 0 && c.open == 0
}

// stirs reports whether the next Poll has to look at c.
func (c *Conn) stirs() bool {
	if c.gone() {
		return false
	}
	for _, r := range c.rails {
		if !r.shut && (len(r.queue) != 0 || r.refused != nil) {
			return true
		}
	}
	return c.news()
}

// news reports whether the next Poll finds something without anything more coming.
func (c *Conn) news() bool {
	o := c.order
	return c.ended() || !c.closed && (c.fresh || o.ready() || o.over && !c.downed) || !o.over && o.next > o.sealed
}

// rest is what Arm does for c.
func (c *Conn) rest() (again bool) {
	if !c.order.over && c.order.owes() != 0 {
		c.order.acknowledge()
		c.after()
	}
	for _, r := range c.rails {
		again = again || !r.shut && r.refused != nil
	}
	return again || c.news()
}

// gone reports whether c has given its last event.
func (c *Conn) gone() bool { return c.got == nil }

// forget lets go of what c holds. Its last event was given.
func (c *Conn) forget() {
	for _, b := range c.got {
		c.f.pool.put(b)
	}
	for _, k := range c.bound {
		k.only = nil
	}
	c.got, c.kept = nil, nil
	clear(c.bound)
	c.f.conns = slices.DeleteFunc(c.f.conns, func(o *Conn) bool { return o == c })
}

// place describes where a member may be, as far as it is known without one.
func (c *Conn) place(at, strand int) transport.Member {
	s, why := c.stat(at, strand), errors.New("not connected yet")
	switch {
	case c.f.dead[at].why != nil:
		why = c.f.dead[at].why
	case c.f.away[at].why != nil:
		why = c.f.away[at].why // which may be known after the peer has said so
	case s.why != nil:
		why = s.why
	case strand >= c.strands:
		why = fmt.Errorf("the peer has %d of these connections", c.strands)
	}
	m := transport.Member{Name: c.f.o.Names[at], Sent: s.sent, Why: why.Error()}
	if c.f.o.Strands > 1 {
		m.Name += "/" + strconv.Itoa(strand)
	}
	return m
}

// Lends implements transport.Conn.
func (c *Conn) Lends(mem.Span) bool { return false }

// Peer implements transport.Conn.
func (c *Conn) Peer() transport.Peer {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	p, vias := c.about, []string{}
	strands := c.f.o.Strands
	p.Members = make([]transport.Member, len(c.stats))
	for i := range p.Members {
		p.Members[i] = c.place(i/strands, i%strands)
	}
	for _, r := range c.lives() {
		about, m := r.conn.Peer(), &p.Members[r.at*strands+r.strand]
		m.Remote, m.Via, m.Path, m.Why = about.Remote, about.Via, about.Path, ""
		vias = append(vias, about.Via)
		if p.Why == "" {
			p.Why = about.Why
		}
	}
	if len(vias) > 0 {
		p.Via = strings.Join(vias, "+")
	}
	all := min(len(c.f.members), c.peers) * min(strands, c.strands)
	if c.ways > 0 {
		all = c.ways
	}
	if len(vias) < all && c.reason != nil {
		why := c.reason
		if i := slices.IndexFunc(c.f.away, func(a away) bool { return a.why != nil }); i >= 0 {
			why = c.f.away[i].why
		}
		p.Why = fmt.Sprintf("members connected: %d of %d (%v)", len(vias), all, why)
	}
	return p
}
