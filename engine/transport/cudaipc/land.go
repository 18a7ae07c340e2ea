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
	next   uint64 // number of the newest copy
	copies [1]cuda.Copy
	broken error // the device does nothing any more
}

// counter is a word that the GPU stores numbers to, which grow.
type counter interface{ Load() uint64 }

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

// reached says whether a copy is over, or as good as that; 0 is none.
func (l *landing) reached(number uint64) bool {
	return number == 0 || l.broken != nil || l.word.Load() >= number
}

// fail ends the Conns whose writes do not reach the GPU any more.
func (l *landing) fail(f *Fabric, err error) {
	for _, c := range f.conns {
		if !l.reached(c.landed) {
			c.fail(err)
		}
	}
	l.broken = err
}

// lift starts the copy of n bytes at off from the shadow of a region to the GPU: the peer of c
// has written them.
func (f *Fabric) lift(c *Conn, k transport.Key, off, n uint64) error {
	r := f.regions[k.ID]
	switch {
	case r == nil: // taken back after the write has passed inner
		return fmt.Errorf("the peer wrote %d bytes at offset %d of key %d, which is not registered on a GPU, or no longer", n, off, k.ID)
	case r.key.Token != k.Token:
		return fmt.Errorf("the peer wrote to key %d with a wrong token", k.ID)
	case r.only != nil && r.only != c:
		return fmt.Errorf("the peer wrote to key %d, which belongs to another peer", k.ID)
	}
	// The GPU looks at no bounds.
	if _, err := r.Slice(off, n); err != nil || n == 0 {
		return fmt.Errorf("the peer wrote %d bytes at offset %d of key %d, which has %d bytes: out of bounds", n, off, k.ID, r.Len)
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
	r.copied, c.landed = l.next, l.next
	if err != nil {
		return fmt.Errorf("copy %d bytes to %v: %w", n, f.name(), err)
	}
	return nil
}
