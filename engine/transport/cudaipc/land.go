package cudaipc

import (
	"fmt"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// landing brings what has arrived in shadows to the GPU, on a stream of its own.
// Nothing there waits for work of the application's, so it is never held up.
type landing struct {
	stream cuda.Stream
	open_  bool
	page   mem.Region
	flag   uint64 // the page's address for the GPU
	word   counter
	next   uint64    // number of the newest copy
	queue  []arrived // in the order of their numbers
	copies [1]cuda.Copy
	broken error // the device does nothing any more
}

// counter is a word that the GPU stores numbers to, which grow.
type counter interface{ Load() uint64 }

// arrived is a write whose last bytes are on their way to the GPU.
type arrived struct {
	number uint64
	c      *Conn
	ev     transport.Event
}

// divided is what has come of a write that goes in pieces.
type divided struct {
	to     *region
	off, n uint64
}

// before says whether a write of n bytes at off of r, if it is no piece, is the last
// one of p. Other writes may come between pieces, none of which goes there.
func (p *divided) before(r *region, off, n uint64) bool {
	return p.n != 0 && n != 0 && p.to == r && off == p.off+p.n
}

func (l *landing) open(f *Fabric) (err error) {
	if l.page, err = mem.Map(4096); err != nil {
		return scarce(err)
	}
	l.word = wordIn(l.page)
	if l.flag, err = f.pin(uint64(l.page.Addr), l.page.Len); err != nil {
		_ = mem.Unmap(l.page)
		l.page = mem.Region{}
		return scarce(err)
	}
	if l.stream, err = f.dev.NewStream(); err != nil {
		return err
	}
	l.open_ = true
	return nil
}

func (l *landing) close(f *Fabric) {
	if l.open_ {
		_ = f.dev.FreeStream(l.stream)
		l.open_ = false
	}
	if l.page.Len != 0 {
		f.unpinMapped(l.page)
		l.page = mem.Region{}
		l.word = zero{}
	}
}

// zero is the counter of a landing that is closed: all has ended.
type zero struct{}

func (zero) Load() uint64 { return ^uint64(0) }

// waiting says whether copies are under way.
func (l *landing) waiting() bool { return l.word != nil && !l.reached(l.next) }

// reached says whether a copy is over, or as good as that.
func (l *landing) reached(number uint64) bool { return l.broken != nil || l.word.Load() >= number }

// fail ends the Conns whose writes do not reach the GPU any more.
func (l *landing) fail(err error) {
	l.broken = err
	for _, v := range l.queue {
		v.c.landing--
		v.c.fail(err)
	}
	l.queue = nil
}

// forget forgets the writes that are there: the Fabric is closing.
func (l *landing) forget() { l.queue = l.queue[:0] }

// written takes a write that inner reports.
func (f *Fabric) written(c *Conn, e *transport.Event, p *poll) {
	if e.Key == f.mailbox.ID {
		if c.theirs == nil && c.expect == 0 {
			c.expect = 2 // a table and a segment follow
		}
		c.wake()
		return
	}
	r := f.regions[e.Key]
	if r == nil { // its key was taken back after it had passed there: it is refused here
		c.fail(fmt.Errorf("the peer wrote %d bytes at offset %d of key %d, which has been deregistered", e.Len, e.Off, e.Key))
		return
	}
	last := c.pieces.before(r, e.Off, e.Len)
	if e.Key == r.part.ID && c.pieces.n != 0 && !last {
		c.fail(fmt.Errorf("the peer wrote a piece at offset %d of key %d before the last %d bytes of another write", e.Off, e.Key, c.pieces.n))
		return
	}
	if r.Dev != mem.CPU && e.Len != 0 {
		if err := f.lift(r, e.Off, e.Len); err != nil {
			c.fail(err)
			return
		}
	}
	if e.Key == r.part.ID {
		if !last {
			c.pieces = divided{to: r, off: e.Off}
		}
		c.pieces.n += e.Len
		return
	}
	out := *e
	out.Conn = c.self
	if last {
		out.Len, out.Off = c.pieces.n+e.Len, c.pieces.off
		c.pieces = divided{}
	}
	if r.Dev == mem.CPU || e.Len == 0 {
		p.put(out)
		return
	}
	c.landing++
	f.in.queue = append(f.in.queue, arrived{f.in.next, c, out})
}

// lift starts the copy of n bytes at off from the shadow of r.
func (f *Fabric) lift(r *region, off, n uint64) error {
	if _, err := r.Slice(off, n); err != nil { // inner has looked, and there the GPU looks at nothing
		return fmt.Errorf("the peer wrote out of bounds of key %d: %w", r.last.ID, err)
	}
	if r.seen == 0 {
		// Memory that cannot be pinned can be copied too, by way of the driver's own.
		seen, err := f.dev.Pin(uint64(r.shadow.Addr), r.shadow.Len)
		if r.pinned = err == nil; !r.pinned {
			seen = uint64(r.shadow.Addr)
		}
		r.seen = seen
	}
	l := &f.in
	if l.broken != nil {
		return l.broken
	}
	l.copies[0] = cuda.Copy{To: uint64(r.Addr) + off, From: r.seen + off, Len: n}
	err := f.dev.Enqueue(l.stream, 0, l.copies[:], l.flag, l.next+1)
	l.next++ // after an error too: the copy may be under way, and tick finds out when it is over
	r.copied = l.next
	if err != nil {
		return fmt.Errorf("copy %d bytes to %v: %w", n, f.name(), err)
	}
	return nil
}

// land gives the writes that have reached the GPU, as far as p has room.
func (f *Fabric) land(p *poll) {
	l := &f.in
	if len(l.queue) == 0 {
		return
	}
	done, n := l.word.Load(), 0
	for n < len(l.queue) && l.queue[n].number <= done && p.room() {
		c := l.queue[n].c
		c.landing--
		if c.over == nil || !c.down {
			p.put(l.queue[n].ev)
		}
		if c.over != nil {
			c.wake()
		}
		n++
	}
	l.queue = l.queue[:copy(l.queue, l.queue[n:])]
}
