package cudaipc

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"fserver/cshim/cuda"
	"fserver/engine/mem"
	"fserver/engine/transport"
)

// Writes go through pinned host memory in pieces: while one travels, the next are
// copied. 512 KiB take the copy engine 10 µs, and a network at 400 Gbps as long.
const (
	pieceSize = 512 << 10
	buffers   = 4 // of a Conn; its lane.buffers has a bit for each
)

// lane is the stream of a Conn on which its copies are made, its segment, where
// the stream says how far it is, and the buffers of staging.
type lane struct {
	stream  cuda.Stream
	shared  *mem.Shared
	seg     *segment
	staging word // seg.staged
	mapped  word // seg.done; it is the GPU that stores it, also where our own CPU asks events

	staged  uint64 // number of the newest copy to a buffer
	pool    pinned // the buffers; mapped when first used
	buffers uint8  // those that are free
	copies  []cuda.Copy
	spans   [buffers]mem.Span // what of each buffer inner has
	broken  bool              // the device does nothing any more
}

// equip gives c what it needs for GPU memory.
func (c *Conn) equip() {
	c.items = make([]item, depth)
	var l lane
	var err error
	c.aside(func() { err = l.open(c.f) }, func() {
		if err != nil {
			c.fail(fmt.Errorf("set up the memory that shows the progress of writes: %w", err))
			return
		}
		c.lane = l
		c.met()
	})
}

func (l *lane) open(f *Fabric) (err error) {
	if l.shared, err = mem.NewNamed("fserver-cudaipc", uint64(segmentSize)); err != nil {
		return scarce(err)
	}
	r := l.shared.Region()
	seen, err := f.pin(r)
	if err != nil {
		_ = mem.FreeShared(l.shared.ID())
		return err
	}
	l.seg = segmentIn(r)
	l.staging = wordAt(pinned{r, seen}, uint64(stagedAt))
	l.mapped = word{at: seen + uint64(doneAt)}
	l.seg.spaces, l.seg.magic, l.seg.fabric = f.spaces, segmentMagic, f.id
	l.buffers = 1<<buffers - 1
	if l.stream, err = f.dev.NewStream(); err != nil {
		l.close(f)
	}
	return err
}

// close gives back what equip and provide acquired.
func (l *lane) close(f *Fabric) {
	f.freeStream(l.stream)
	f.unmapPinned(l.pool.Region)
	if s := l.shared; s != nil {
		f.unpin(s.Region(), func() { _ = mem.FreeShared(s.ID()) })
	}
	*l = lane{}
}

// working says whether copies are under way.
func (l *lane) working() bool {
	return l.seg != nil && !l.broken && (l.seg.done.Load() < l.seg.begun.Load() || l.seg.staged.Load() < l.staged)
}

// stage starts the copies of an item to the buffers, as far as there are any; true
// when all have been started.
func (c *Conn) stage(it *item) bool {
	l := &c.lane
	if l.pool.Len == 0 {
		c.provide()
		return false
	}
	for it.sent < it.n {
		n, buf := min(it.n-it.sent, pieceSize), (l.staged+1)%buffers
		if l.buffers&(1<<buf) == 0 {
			return false
		}
		l.gather(it, l.pool.seen+buf*pieceSize, n)
		l.staged++
		l.buffers &^= 1 << buf
		var after transport.Point
		if it.sent == 0 {
			after, it.number = it.op.After, l.staged
		}
		it.sent += n
		if err := c.f.enqueue(l.stream, after, l.copies, l.staging, l.staged); err != nil { // as in mapInto
			c.fail(fmt.Errorf("copy %d bytes to the host: %w", n, err))
			return false
		}
	}
	return true
}

// gather makes the copies of the next n bytes of an item.
func (l *lane) gather(it *item, to, n uint64) {
	l.copies = l.copies[:0]
	skip := it.sent
	for _, s := range it.op.Src {
		if skip >= s.Len {
			skip -= s.Len
			continue
		}
		k := min(s.Len-skip, n)
		l.copies = append(l.copies, cuda.Copy{To: to, From: uint64(s.Addr) + skip, Len: k})
		to, n, skip = to+k, n-k, 0
		if n == 0 {
			return
		}
	}
}

// provide maps and pins the buffers.
func (c *Conn) provide() {
	var pool pinned
	var err error
	c.aside(func() { pool, err = c.f.mapPinned(buffers * pieceSize) }, func() {
		if c.lane.pool = pool; err != nil {
			c.fail(err)
		}
	})
}

// scarce says what to do about an error if it is that there is no host memory for
// staging.
func scarce(err error) error {
	if cuda.Is(err, cuda.OutOfMemory) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("allocate host memory for staging: %w (send fewer or smaller tensors at once, or raise ulimit -l and the memory limit of the container)", err)
	}
	return err
}

// forward hands inner what is ready, in the order of the items: pieces that have reached their
// buffers, frames and loans.
func (c *Conn) forward() {
	for c.passed != c.last && c.hand(&c.items[c.passed%depth]) && c.passed != c.next {
		c.passed++
	}
}

// hand hands inner what is ready of an item; true when nothing is left of it to hand over.
func (c *Conn) hand(it *item) bool {
	switch it.way {
	case wayBehind:
		return c.over != nil || c.dispatch(it)
	case wayStaged:
		for it.passed < it.sent {
			if !c.handPiece(it) {
				return false
			}
		}
		return it.passed == it.n
	}
	return true
}

// handPiece hands inner the next piece of an item, if it has reached its buffer.
func (c *Conn) handPiece(it *item) bool {
	l := &c.lane
	number, n := it.number+it.passed/pieceSize, min(it.n-it.passed, pieceSize)
	buf := number % buffers
	switch {
	case number > l.seg.staged.Load() && !l.broken:
		return false
	case c.over != nil:
		l.buffers |= 1 << buf
	default:
		l.spans[buf] = mem.Span{Addr: l.pool.Addr + uintptr(buf*pieceSize), Len: n}
		op := transport.Op{Kind: transport.OpWrite, Key: it.op.Key, Off: it.op.Off + it.passed, Src: l.spans[buf : buf+1]}
		taken, err := c.write(&op, n, job{piece: it, buf: uint8(buf)})
		if !taken {
			if err != nil {
				c.fail(err)
			}
			return false
		}
		it.open++
	}
	it.passed += n
	return true
}
