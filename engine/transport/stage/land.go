package stage

import (
	"fmt"

	"fserver/cshim/cuda"
	"fserver/engine/gpu"
	"fserver/engine/transport"
	"fserver/engine/transport/link"
)

// landMost is how many copies from shadows the driver has at most. Its queues take 1,020 entries of streams that wait (on an
// H200), of which a copy with its number takes two; with one more, the next call blocks. The landing's stream waits for
// nothing, but it may share a queue with one that does. The bound is of one Fabric, and the queues are of the process and the GPU:
// Fabrics of several devices or nodes add up.
const landMost = 128

// landing brings what has arrived in shadows to the GPU, on a stream of its own, in the order
// of arrival. Nothing there waits for work of the application's, so it is never held up.
type landing struct {
	stream cuda.Stream
	page   gpu.Pinned
	word   gpu.Word
	queue  []lift // of copies that have not been enqueued
	begun  uint64 // number of the newest that has
	next   uint64 // number of the newest copy
	copies [1]cuda.Copy
	broken error // the device does nothing any more, or it is closed
}

// A lift is a copy of n bytes at off from the shadow of a region, which the peer of c has written.
type lift struct {
	c      *Conn
	r      *region
	off, n uint64
}

func (l *landing) open(f *Fabric) (err error) {
	if l.page, err = f.Calls.Map(4096); err != nil {
		return err
	}
	l.word = l.page.Word(0)
	l.stream, err = f.Calls.Dev.NewStream()
	return err
}

func (l *landing) close(f *Fabric) {
	f.Calls.FreeStream(l.stream)
	f.Calls.Unmap(l.page.Region)
	*l = landing{broken: transport.ErrClosed}
}

// waiting says whether copies are under way.
func (l *landing) waiting() bool { return !l.reached(l.next) }

// reached says whether a copy is over, or as good as that; 0 is none.
func (l *landing) reached(number uint64) bool {
	return number == 0 || l.broken != nil || l.word.Here.Load() >= number
}

// fail ends the Conns whose writes do not reach the GPU any more.
func (l *landing) fail(f *Fabric, err error) {
	landed := l.word.Here.Load()
	for _, c := range f.Conns {
		if c := c.(*Conn); c.landed > landed {
			c.Spoil(err, landed+1)
		}
	}
	l.broken, l.queue = err, nil
}

// look finds out whether the device still makes copies.
func (l *landing) look(f *Fabric) {
	if l.word.Here == nil || l.word.Here.Load() >= l.begun || l.broken != nil {
		return
	}
	idle, err := f.Calls.Idle(l.stream)
	switch {
	case err != nil:
		l.fail(f, err)
	case idle && l.word.Here.Load() < l.begun: // the number of the last copy was not enqueued
		l.word.Here.Store(l.begun)
	}
}

// lift begins the copy of n bytes at off from the shadow of a region to the GPU.
func (c *Conn) lift(k transport.Key, off, n uint64) error {
	f := c.f
	l, r := &f.in, f.regions[k.ID]
	switch {
	case r == nil: // taken back after the write has passed inner
		return fmt.Errorf("the peer wrote %d bytes at offset %d of key %d, which is not registered on a GPU, or no longer", n, off, k.ID)
	case r.key.Token != k.Token:
		return fmt.Errorf("the peer wrote to key %d with a wrong token", k.ID)
	case r.only != nil && r.only != c:
		return fmt.Errorf("the peer wrote to key %d, which belongs to another peer", k.ID)
	case r.Idle():
		return r.notInUse(n)
	case l.broken != nil:
		return l.broken
	case c.lifts == link.HeldMost:
		return fmt.Errorf("the peer wrote to key %d while %d copies to %v wait", k.ID, link.HeldMost, f.Calls.Name())
	}
	// The GPU looks at no bounds.
	if _, err := r.Slice(off, n); err != nil || n == 0 {
		return fmt.Errorf("the peer wrote %d bytes at offset %d of key %d, which has %d bytes: out of bounds", n, off, k.ID, r.Len)
	}
	l.next++
	r.copied, c.landed = l.next, l.next
	l.queue = append(l.queue, lift{c, r, off, n})
	c.lifts++
	f.land()
	return nil
}

// notInUse is why n bytes for r are not copied.
func (r *region) notInUse(n uint64) error {
	return fmt.Errorf("the peer wrote %d bytes to key %d: %w", n, r.key.ID, link.ErrNotInUse)
}

// land enqueues the copies that wait, up to landMost. The first one of a region has to wait until its shadow
// is pinned. After an error, tick finds out when the copy is over.
func (f *Fabric) land() {
	l := &f.in
	for len(l.queue) > 0 && l.broken == nil && l.begun-l.word.Here.Load() < landMost {
		q := l.queue[0]
		if q.r.seen == 0 {
			f.pinShadow(q.r)
			return
		}
		l.queue = l.queue[:copy(l.queue, l.queue[1:])]
		q.c.lifts--
		l.begun++
		number := l.begun
		l.copies[0] = cuda.Copy{To: uint64(q.r.Addr) + q.off, From: q.r.seen + q.off, Len: q.n}
		copies := l.copies[:]
		if q.r.Idle() {
			q.c.Spoil(q.r.notInUse(q.n), number)
			copies = nil // the number alone
		}
		if err := f.Calls.Enqueue(l.stream, transport.Point{}, copies, l.word, number); err != nil {
			q.c.Spoil(fmt.Errorf("copy %d bytes to %v: %w", q.n, f.Calls.Name(), err), number)
		}
	}
}

// pinShadow pins the shadow of a region. Memory that cannot be pinned can be copied too, by
// way of the driver's own.
func (f *Fabric) pinShadow(r *region) {
	if r.pinning {
		return
	}
	r.pinning = true
	seen, err := uint64(0), error(nil)
	f.Calls.Aside(func() { seen, err = f.Calls.Dev.Pin(uint64(r.shadow.Addr), r.shadow.Len) }, func() {
		r.pinning, r.pinned, r.seen = false, err == nil, seen
		if err != nil {
			r.seen = uint64(r.shadow.Addr)
		}
	})
}
